"""What a benchmark of training times: something that takes steps, and this project's own arms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..method.apply import apply
from ..models.flops import find_reach, train_flops_per_token
from ..models.hf_config import build_hf_config
from ..runs.schema import KernelTime
from ..training.checkpoint import TrainState
from ..training.optim import build_optimizer, set_learning_rate
from ..training.parallel import World
from ..training.step import Stepper
from ..training.tasks.base import Task
from ..training.timing import StepTimer
from .random_data import random_task
from .rounds import Rounds


class TimedTrainer(ABC):
    """Something that takes training steps. `rounds` collects their seconds.

    `peak_memory` is the most that its own tensors took on the device in one step, in bytes: weights, gradients,
    optimiser state, activations and the batch. It is None without CUDA.
    """

    def __init__(self, name: str, config: RunConfig, device: torch.device) -> None:
        self.name, self.config, self._device = name, config, device
        self.rounds: Rounds = []
        self.peak_memory: int | None = None
        self.kernels: list[KernelTime] = []
        self.trainable = 0
        self.flops_per_token = 0.0
        self._at_end = ExitStack()

    @abstractmethod
    def step(self) -> None:
        """Take one optimiser step."""

    def close(self) -> None:
        """End what still runs, and remove what was written for it."""
        self._at_end.close()

    def time_steps(self, count: int) -> list[float]:
        """Take `count` optimiser steps and return the seconds of each."""
        timer = StepTimer(self._device, warmup_steps=0)
        timer.begin()
        for _ in range(count):
            self.step()
            timer.step()
        return timer.collect()

    def _count(self, model: nn.Module, task: Task, loss: nn.Module) -> None:
        """Count what trains in a model, and the FLOPs of its steps."""
        reach = find_reach(loss, {name: rows.to(self._device) for name, rows in task.batch(0, 1).items()})
        train = self.config.train
        sequences = train.micro_batch_size or train.batch_size
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.flops_per_token = train_flops_per_token(model, self.config.data.sequence_length, sequences, reach)


class OelmTrainer(TimedTrainer):
    """The model of one arm with its optimiser, which takes steps as `oelm train` does."""

    def __init__(self, name: str, config: RunConfig, world: World, seed: int) -> None:
        super().__init__(name, config, world.device)
        task, model = task_and_model(config, seed)
        apply(model, config.method, config.seed)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.to(world.device).train()
        loss = task.loss(model)
        self._count(model, task, loss)
        optimizer = build_optimizer(model, config.optimizer, world.device)
        set_learning_rate(optimizer, config.optimizer.learning_rate)
        self._stepper = Stepper(config, world, task, model, loss, optimizer)
        self._state = TrainState()
        self._stepper.prepare(self._state)

    def step(self) -> None:
        self._stepper.step(self._state)
        self._state.step += 1


def task_and_model(config: RunConfig, seed: int) -> tuple[Task, Any]:
    """Return a task of random tokens and a model for it."""
    task = random_task(config, build_hf_config(config.model, None, config.data.sequence_length), seed)
    return task, task.build_model(config)
