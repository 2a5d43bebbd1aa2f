"""Step time, throughput and memory of arms measured side by side, against the FLOPs that the model must do.

Machines are shared and clocks move, so arms are interleaved in rounds and compared as ratios within a round.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .config import RunConfig
from .data.batches import Windows
from .data.tokens import in_memory
from .models.language import build_for_run
from .operate import apply
from .sites import find_sites
from .training.language import LanguageModelling
from .training.optim import build_optimizer, set_learning_rate
from .training.parallel import World
from .training.state import TrainState
from .training.step import Stepper

# Dense bf16 peak of a device in FLOP/s by the vendor's datasheet, by a part of its name; for MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX A5000": 111e12, "4090": 165e12}


@dataclass(frozen=True)
class Arm:
    """One line of a benchmark: its name, the run it stands for, and the seconds of its steps in every round."""

    name: str
    config: RunConfig
    rounds: list[list[float]]
    trainable: int
    flops_per_token: float
    peak_memory: int | None

    @property
    def step_seconds(self) -> float:
        return statistics.median(second for seconds in self.rounds for second in seconds)


def train_flops_per_token(model: Any, length: int) -> float:
    """Multiply-adds times two that one token's training step must do, with frozen matrices' weight gradients left out.

    Forward 2 per weight, backward 2 for the input's gradient and 2 for the weight's; causal attention half of full.
    """
    _, sites = find_sites(model)
    matrices = {id(m.weight): m.weight for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    tokens_only = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tokens_only.discard(id(head.weight))
    flops = 0.0
    for key, weight in matrices.items():
        if weight.ndim == 2 and key not in tokens_only:
            flops += (6 if weight.requires_grad else 4) * weight.numel()
    for name, parameter in model.named_parameters():
        if name.endswith(".core"):
            flops += 6 * parameter.numel()
    return flops + sum(6 * site.heads * site.d_head * length for site in sites)


def benchmark(
    arms: dict[str, RunConfig], rounds: int = 5, steps: int = 20, warmup: int = 10, seed: int = 0
) -> list[Arm]:
    """Time whole optimiser steps of every arm on random tokens, `rounds` times `steps` each, interleaved."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = World(0, 1, device)
    torch._dynamo.config.recompile_limit = 64  # every arm is one more variant of the same code
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    built = {}
    for name, config in arms.items():
        stepper, state = _stepper(config, world, seed)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(warmup):
            _step(stepper, state)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        built[name] = (stepper, state, memory)
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (stepper, state, _) in built.items():
            _step(stepper, state)  # the caches belong to the arm before it
            times[name].append(_timed(stepper, state, steps, device))
    found = []
    for name, (stepper, _, memory) in built.items():
        trainable = sum(p.numel() for p in stepper.model.parameters() if p.requires_grad)
        flops = train_flops_per_token(stepper.model, arms[name].data.sequence_length)
        found.append(Arm(name, arms[name], times[name], trainable, flops, memory))
    return found


def summarise(arms: list[Arm], against: str) -> list[dict[str, Any]]:
    """One row per arm: step time, throughput, MFU, memory, and the ratio to one arm with its 95 % interval."""
    reference = next(arm for arm in arms if arm.name == against)
    peak = _peak_flops()
    rows = []
    for arm in arms:
        tokens = arm.config.train.batch_size * arm.config.data.sequence_length
        pairs = zip(arm.rounds, reference.rounds, strict=True)
        ratios = np.array([statistics.median(own) / statistics.median(other) for own, other in pairs])
        spread = _t95(len(ratios)) * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        per_second = tokens / arm.step_seconds
        rows.append(
            {
                "arm": arm.name,
                "step_ms": arm.step_seconds * 1000,
                "tokens_per_second": per_second,
                "mfu": per_second * arm.flops_per_token / peak if peak else None,
                "ratio": float(ratios.mean()),
                "ratio_95": float(spread),
                "flop_bound": arm.flops_per_token / reference.flops_per_token,
                "trainable": arm.trainable,
                "peak_memory": arm.peak_memory,
                "rounds": len(ratios),
            }
        )
    return rows


def _stepper(config: RunConfig, world: World, seed: int) -> tuple[Stepper, TrainState]:
    vocabulary = int(config.model.fields.get("vocab_size", 50257))
    length = config.data.sequence_length
    ids = np.random.default_rng(seed).integers(0, vocabulary, 64 * config.train.batch_size * length + 1)
    data = in_memory(ids, vocab_size=vocabulary, description="random tokens")
    windows = Windows(data.train.tokens, length)
    task = LanguageModelling(data, windows, windows, length)
    model: Any = build_for_run(config.model, vocabulary, length, seed)
    apply(model, config.method, seed)
    model.to(world.device).train()
    optimizer = build_optimizer(model, config.optimizer, world.device)
    set_learning_rate(optimizer, config.optimizer.learning_rate)
    stepper = Stepper(config, world, task, model, task.loss(model), optimizer, reset_compiler=False)
    state = TrainState()
    stepper.fit_micro_batch(state)
    return stepper, state


def _step(stepper: Stepper, state: TrainState) -> None:
    stepper.step(state)
    state.step += 1


def _timed(stepper: Stepper, state: TrainState, steps: int, device: torch.device) -> list[float]:
    from .training.timing import StepTimer

    timer = StepTimer(device, warmup_steps=0)
    timer.begin()
    for _ in range(steps):
        _step(stepper, state)
        timer.step()
    return timer.collect()


def _peak_flops() -> float | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def _t95(count: int) -> float:
    """Student's t for a two-sided 95 % interval, without scipy, for the few rounds that a benchmark has."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
    return table[count - 2] if 2 <= count <= len(table) + 1 else 1.96
