"""The changes that a method's schedule makes during training: at which steps, and to which matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..errors import ModelError
from .plan import Operation, plan
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
    return [] if method.schedule.kind == "static" else events_of(plan(model, method))


def events_of(operation: Operation) -> list[Event]:
    """Return every change that the schedule of an operation's method makes, in order."""
    method = operation.method
    schedule = method.schedule
    if schedule.kind == "static":
        return []
    method.require_steps()
    targets = [target for target in operation.targets if target.spec.frozen]
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


def frozen_after(operation: Operation, count: int) -> list[str]:
    """Return the paths of the matrices that are frozen once the schedule made its first `count` changes."""
    frozen = set(operation.frozen_at_start)
    for event in events_of(operation)[:count]:
        frozen = frozen | set(event.paths) if event.freeze else frozen - set(event.paths)
    return [target.path for target in operation.targets if target.path in frozen]
