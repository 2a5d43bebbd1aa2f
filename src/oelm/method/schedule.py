"""Freezing that changes during training: which matrices change at which step, and the record renewed each time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ModelError
from .plan import plan
from .seal import record_of, reseal
from .sites import unwrapped
from .spec import Method


@dataclass(frozen=True)
class Event:
    """A change at the start of `step`: these matrices (module paths) become frozen or trainable."""

    step: int
    freeze: bool
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"step {self.step}: {'froze' if self.freeze else 'unfroze'} {len(self.paths)} matrices"


def events(model: nn.Module, method: Method) -> list[Event]:
    """Return every change that the method's schedule makes to the model, in order: one for each of its steps."""
    schedule = method.schedule
    if schedule.kind == "static":
        return []
    method.require_steps()
    targets = [target for target in plan(model, method).targets if target.spec.frozen]
    if schedule.kind == "freeze":
        return [Event(schedule.steps[0], True, tuple(target.path for target in targets))]
    layers = sorted({target.site.layer for target in targets}, reverse=schedule.order == "top-down")
    count = len(layers) if schedule.layers_each == "all" else schedule.layers_each
    unfreezing = []
    for number, step in enumerate(schedule.steps):
        chosen = layers[number * count : (number + 1) * count]
        if not chosen:
            raise ModelError(
                f"schedule: {len(schedule.steps)} steps of {schedule.layers_each} layers, "
                f"but only {len(layers)} layers are frozen"
            )
        unfreezing.append(Event(step, False, tuple(t.path for t in targets if t.site.layer in chosen)))
    return unfreezing


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
