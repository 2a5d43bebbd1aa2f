"""Validation loss, the same number whatever the batch size or the number of processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .training.parallel import World
    from .training.task import LanguageModelling


@torch.no_grad()
def validation_loss(
    module: nn.Module,
    task: LanguageModelling,
    world: World,
    batch_size: int,
    sequences: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> float:
    """Mean cross-entropy per token over the first `sequences` validation windows (none: all), shared by the processes.

    `module` takes inputs and targets and gives the summed loss. Short batches are filled with ignored targets: compiled
    code sees one shape, and every process takes as many turns as the others.
    """
    count = min(sequences or len(task.held_out), len(task.held_out))
    training = module.training
    module.eval()
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for start in range(0, count, batch_size * world.size):
        first = start + world.rank * batch_size
        inputs, targets = task.validation(first, max(0, min(batch_size, count - first)), fill_to=batch_size)
        with autocast or nullcontext():
            total += module(inputs.to(world.device), targets.to(world.device))
    module.train(training)
    return world.total(float(total)) / (count * task.length)
