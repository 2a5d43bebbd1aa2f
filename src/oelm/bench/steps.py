"""Measure step time, throughput and memory of arms side by side, and compare them with the FLOPs that each needs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..method.apply import apply
from ..models.flops import find_reach, train_flops_per_token
from ..models.hf_config import build_hf_config
from ..runs.schema import KernelTime, StepBench
from ..training.checkpoint import TrainState
from ..training.optim import build_optimizer, set_learning_rate
from ..training.parallel import World, device_for
from ..training.step import Stepper
from ..training.timing import StepTimer
from .profile import profile_kernels
from .random_data import random_task
from .rounds import Rounds, ShowProgress, median_seconds, no_progress, ratio_of_rounds

# Dense bf16 peak of a device in FLOP/s by the vendor's datasheet, by a part of its name; for MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX A5000": 111e12, "4090": 165e12}


def benchmark(
    arms: dict[str, RunConfig],
    rounds: int = 5,
    steps: int = 20,
    warmup: int = 10,
    seed: int = 0,
    show: ShowProgress = no_progress,
    profiled: bool = False,
) -> list[StepBench]:
    """Time whole optimiser steps of every arm on random tokens, `rounds` times `steps` each, interleaved.

    Return one row per arm, each compared with the first arm; if `profiled`, with the kernels of its steps.
    """
    device = device_for(next(iter(arms.values())).train.device)
    world = World(0, 1, device)
    torch._dynamo.config.recompile_limit = 64  # each arm compiles the same code once more
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        _allocate_workspaces(device)
    trainers: list[_ArmTrainer] = []
    for name, config in arms.items():
        show(f"building {name} and warming it up", len(trainers), len(arms))
        memory_before = _allocated(device)
        trainer = _ArmTrainer(name, config, world, seed)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(warmup):
            trainer.step()
        peak = _peak(device)
        trainer.peak_memory = None if peak is None else peak - memory_before
        trainers.append(trainer)
    for number in range(rounds):
        show("rounds measured", number, rounds)
        for trainer in trainers:
            trainer.step()  # not timed: the processor's caches still hold the previous arm's data
            trainer.rounds.append(trainer.time_steps(steps))
    # None without a GPU, and for one that is not in the table.
    gpu = torch.cuda.get_device_name(0) if on_gpu else ""
    peak_flops = next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)
    for number, trainer in enumerate(trainers if profiled else []):
        show(f"profiling {trainer.name}", number, len(trainers))
        trainer.kernels = profile_kernels(trainer.step, steps, device)
    return [_row(trainer, trainers[0], peak_flops) for trainer in trainers]


class _ArmTrainer:
    """The model of one arm with its optimiser, which takes training steps as `oelm train` does.

    `rounds` collects the seconds of its steps. `peak_memory` is the most that the arm's own tensors took on the device
    in one of its steps, in bytes: weights, gradients, optimiser state, activations and the batch, without the other
    arms, which are on the device too. It is None without CUDA.
    """

    def __init__(self, name: str, config: RunConfig, world: World, seed: int) -> None:
        self.name, self.config = name, config
        self.rounds: Rounds = []
        self.peak_memory: int | None = None
        self.kernels: list[KernelTime] = []
        length = config.data.sequence_length
        task = random_task(config, build_hf_config(config.model, None, length), seed)
        model: Any = task.build_model(config)
        apply(model, config.method, config.seed)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.to(world.device).train()
        loss = task.loss(model)
        reach = find_reach(loss, {name: rows.to(world.device) for name, rows in task.batch(0, 1).items()})
        optimizer = build_optimizer(model, config.optimizer, world.device)
        set_learning_rate(optimizer, config.optimizer.learning_rate)
        self._device = world.device
        self._stepper = Stepper(config, world, task, model, loss, optimizer)
        self._state = TrainState()
        self._stepper.prepare(self._state)
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.flops_per_token = train_flops_per_token(model, length, self._state.micro_batch_size, reach)

    def step(self) -> None:
        """Take one optimiser step."""
        self._stepper.step(self._state)
        self._state.step += 1

    def time_steps(self, count: int) -> list[float]:
        """Take `count` optimiser steps and return the seconds of each."""
        timer = StepTimer(self._device, warmup_steps=0)
        timer.begin()
        for _ in range(count):
            self.step()
            timer.step()
        return timer.collect()


def _row(arm: _ArmTrainer, reference: _ArmTrainer, peak_flops: float | None) -> StepBench:
    """Return an arm's row.

    The FLOP bound is per token, as the ratio per example is; where batch sizes differ, the ratio of step times is not.
    """
    batch, reference_batch = arm.config.train.batch_size, reference.config.train.batch_size
    ratio, half_interval = ratio_of_rounds(arm.rounds, reference.rounds)
    step_seconds = median_seconds(arm.rounds)
    tokens_per_second = batch * arm.config.data.sequence_length / step_seconds
    warning = None
    if batch != reference_batch:
        warning = (
            f"{arm.name} has batches of {batch}, {reference.name} of {reference_batch}: their ratio compares steps of "
            "different size and says nothing about speed; the ratio per example does"
        )
    return StepBench(
        arm=arm.name,
        step_ms=step_seconds * 1000,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * arm.flops_per_token / peak_flops if peak_flops else None,
        ratio=ratio,
        ratio_95=half_interval,
        flop_bound=arm.flops_per_token / reference.flops_per_token,
        trainable=arm.trainable,
        peak_memory=arm.peak_memory,
        rounds=len(arm.rounds),
        batch_size=batch,
        ratio_per_example=ratio * reference_batch / batch,
        ratio_per_example_95=None if half_interval is None else half_interval * reference_batch / batch,
        warning=warning,
        kernels=arm.kernels,
    )


def _allocated(device: torch.device) -> int:
    """Return the bytes of the tensors that are on the device now."""
    gc.collect()  # unreachable tensors would otherwise be freed later, and lower another arm's count
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _peak(device: torch.device) -> int | None:
    """Return the most bytes that tensors took on the device since the last reset; None without CUDA."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _allocate_workspaces(device: torch.device) -> None:
    """Make the matrix library allocate its buffers now: it keeps them, and they would count for the first arm."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype)).sum().backward()
