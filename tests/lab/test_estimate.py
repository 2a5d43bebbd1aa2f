"""How long a matrix will take, estimated from the machine's speed."""

from types import SimpleNamespace

import pytest
import torch

from oelm.lab import estimate


def test_the_machines_speed_includes_the_time_that_other_programs_take(monkeypatch):
    """Of three products the last one had to wait: all the time counts, not that of the fastest."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = iter([0.0, 0.01, 0.02, 2.0])
    monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    efficiency = estimate._EFFICIENCY["cpu"]
    assert estimate.training_speed.__wrapped__() == pytest.approx(3 * 2 * 512**3 / 2.0 * efficiency)
