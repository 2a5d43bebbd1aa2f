"""Signals that ask a process to stop: the first is noted, a second ends the process unless it repeats the first."""

import signal

import pytest

from oelm.training import signals
from oelm.training.signals import StopRequest


@pytest.mark.parametrize(("patience", "delay", "ends"), [(0.0, 0.0, True), (2.0, 1.9, False), (2.0, 2.1, True)])
def test_a_second_signal_ends_the_process_unless_it_comes_within_the_patience(patience, delay, ends, monkeypatch):
    clock, exit_codes = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(signals.os, "_exit", exit_codes.append)
    request = StopRequest()
    request.patience = patience
    assert not request
    request.handle(signal.SIGTERM, None)
    assert request.signal == "SIGTERM"
    clock[0] += delay
    request.handle(signal.SIGINT, None)
    assert exit_codes == ([128 + signal.SIGINT] if ends else [])
    assert request.signal == "SIGTERM", "the run is stopped by the first signal"
