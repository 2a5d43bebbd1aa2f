"""Measure step time, throughput and memory of arms side by side, and compare them with the FLOPs that each needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ..config import RunConfig
from ..runs.schema import StepBench
from ..training.parallel import World, device_for
from .peers import Peer
from .profile import profile_kernels
from .rounds import ShowProgress, median_seconds, no_progress, ratio_of_rounds, round_medians
from .trainers import OelmTrainer, TimedTrainer

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
    peers: Sequence[Peer] = (),
) -> list[StepBench]:
    """Time whole optimiser steps of every arm on random tokens, `rounds` times `steps` each, interleaved.

    Return one row per arm and peer, each compared with the first arm; if `profiled`, with the kernels of its steps.
    Peers train a plain model of the first arm's size.
    """
    device = device_for(next(iter(arms.values())).train.device)
    world = World(0, 1, device)
    torch._dynamo.config.recompile_limit = 64  # each arm compiles the same code once more
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        _allocate_workspaces(device)
    reference = next(iter(arms.values()))
    makers: dict[str, Callable[[], TimedTrainer]] = {
        name: partial(OelmTrainer, name, config, world, seed) for name, config in arms.items()
    }
    makers |= {peer.name: partial(peer.trainer, reference, world, seed) for peer in peers}
    trainers: list[TimedTrainer] = []
    try:
        for name, make in makers.items():
            show(f"building {name} and warming it up", len(trainers), len(makers))
            memory_before = _allocated(device)
            trainers.append(make())
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(warmup):
                trainers[-1].step()
            peak = _peak(device)
            trainers[-1].peak_memory = None if peak is None else peak - memory_before
        _measure(trainers, rounds, steps, show)
        for number, trainer in enumerate(trainers if profiled else []):
            show(f"profiling {trainer.name}", number, len(trainers))
            trainer.kernels = profile_kernels(trainer.step, steps, device)
    finally:
        for trainer in trainers:
            trainer.close()
    # None without a GPU, and for one that is not in the table.
    gpu = torch.cuda.get_device_name(0) if on_gpu else ""
    peak_flops = next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)
    return [_row(trainer, trainers[0], peak_flops) for trainer in trainers]


def _measure(trainers: list[TimedTrainer], rounds: int, steps: int, show: ShowProgress) -> None:
    """Time the steps of all trainers, interleaved in rounds."""
    for number in range(rounds):
        show("rounds measured", number, rounds)
        for trainer in trainers:
            trainer.step()  # not timed: the processor's caches still hold the previous arm's data
            trainer.rounds.append(trainer.time_steps(steps))


def _row(arm: TimedTrainer, reference: TimedTrainer, peak_flops: float | None) -> StepBench:
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
        round_ms=round_medians(arm.rounds),
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
