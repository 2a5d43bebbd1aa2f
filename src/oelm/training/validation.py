"""Validation: figures that are the same whatever the batch size or the number of processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .parallel import World
from .tasks.base import Figures, Task


@torch.no_grad()
def validate(
    module: nn.Module,
    task: Task,
    world: World,
    batch_size: int,
    sequences: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> Figures:
    """The task's figures over the first `sequences` validation examples (none: all), shared by the processes.

    `module` is what `task.loss` made. Short batches are filled with ignored targets: every process takes as many turns
    as the others, and compiled code sees one shape.
    """
    count = min(sequences or task.held_out_count, task.held_out_count)
    training = module.training
    module.eval()
    sums: torch.Tensor | None = None
    for start in range(0, count, batch_size * world.size):
        first = start + world.rank * batch_size
        batch = task.validation(first, max(0, min(batch_size, count - first)), fill_to=batch_size)
        with autocast or nullcontext():
            found = module(**{name: tensor.to(world.device) for name, tensor in batch.items()})
        sums = found if sums is None else sums + found
    module.train(training)
    assert sums is not None, "a validation split has examples"
    return task.figures(world.totals(sums.tolist()))


@torch.no_grad()
def written_figures(model: nn.Module, task: Task, world: World, batch_size: int, examples: int) -> Figures:
    """The figures of the answers that the model writes to the first validation examples, shared by the processes."""
    count = min(examples, task.held_out_count)
    training = model.training
    model.eval()
    share = -(-count // world.size)
    mine = range(world.rank * share, min((world.rank + 1) * share, count))
    answers: list[str] = []
    for first in range(mine.start, mine.stop, batch_size):
        answers += task.write(model, first, min(batch_size, mine.stop - first))
    model.train(training)
    return task.judge(world.collect(answers))
