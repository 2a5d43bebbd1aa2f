"""Freezing that changes during training: the changes that are due, made, and the record renewed each time."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ModelError
from .events import Event, events
from .seal import record_of, reseal
from .sites import unwrapped
from .spec import Method


def due(model: nn.Module, step: int) -> int:
    """Return how many changes are due by the start of `step` and not made yet. Cheap enough to call at every step."""
    record = record_of(model)
    if record is None:
        return 0
    return sum(change <= step for change in record["method"]["schedule"]["steps"][record["events"] :])


def advance(model: nn.Module, step: int) -> list[Event]:
    """Make every change that the schedule has due by the start of `step`, and return those made by this call."""
    wrapped, model = model, unwrapped(model)
    count, record = due(model, step), record_of(model)
    if not count or record is None:
        return []
    if any(isinstance(module, DistributedDataParallel) for module in wrapped.modules()):
        raise ModelError(
            "the schedule changes what trains, but DistributedDataParallel sums only the gradients of what trained "
            "when it was made: advance the unwrapped model, then wrap it again"
        )
    due_events = events(model, Method.load(record["method"]))[record["events"] :][:count]
    for event in due_events:
        reseal(model, event.paths, event.freeze)
    return due_events
