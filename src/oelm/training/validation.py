"""Validation: metrics that are the same whatever the batch size or the number of processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .parallel import World
from .tasks.base import MetricDict, Task


@torch.no_grad()
def validate(
    module: nn.Module,
    task: Task,
    world: World,
    batch_size: int,
    sequences: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> MetricDict:
    """Return a task's metrics over its first `sequences` validation examples (None: all), shared by the processes.

    `module` is what `task.loss` returned. Short batches are filled up with ignored labels, so that every process makes
    the same number of passes and compiled code sees one shape.
    """
    count = min(sequences or task.held_out_count, task.held_out_count)
    training = module.training
    module.eval()
    sums: Any = 0  # a tensor from the first batch on, and a validation split has examples
    for start in range(0, count, batch_size * world.size):
        first = start + world.rank * batch_size
        batch = task.validation(first, max(0, min(batch_size, count - first)), fill_to=batch_size)
        with autocast or nullcontext():
            sums = sums + module(**{name: tensor.to(world.device) for name, tensor in batch.items()})
    module.train(training)
    return task.metrics(world.totals(sums.tolist()))


@torch.no_grad()
def answer_metrics(model: nn.Module, task: Task, world: World, batch_size: int, examples: int) -> MetricDict:
    """Return the metrics of the model's written answers to the first validation examples, shared by the processes.

    There are none for a task without written answers.
    """
    if not task.writes_answers:
        return {}
    count = min(examples, task.held_out_count)
    training = model.training
    model.eval()
    share = -(-count // world.size)
    start, stop = world.rank * share, min((world.rank + 1) * share, count)
    answers: list[str] = []
    for first in range(start, stop, batch_size):
        answers += task.write_answers(model, first, min(batch_size, stop - first))
    model.train(training)
    return task.score_answers(world.collect(answers))
