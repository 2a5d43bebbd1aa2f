"""Step time, throughput and memory of arms measured side by side, against the FLOPs that the model must do.

Machines are shared and clocks move, so arms are interleaved in rounds and compared as ratios within a round.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..base.strict import merge
from ..config import GPT, RANDOM, RunConfig
from ..data.corpus.batches import Windows
from ..data.corpus.tokens import in_memory
from ..data.labelled.encoded import Encoded, LengthGrouped
from ..data.labelled.examples import Examples, LabelledData
from ..errors import ConfigError
from ..method.apply import apply
from ..method.families import family_of
from ..models.flops import find_reach, train_flops_per_token
from ..models.hf_config import build_hf_config, max_text_length
from ..training.checkpoint import TrainState
from ..training.optim import build_optimizer, set_learning_rate
from ..training.parallel import World, device_for
from ..training.step import Stepper
from ..training.tasks.base import Task
from ..training.tasks.classification import Classification
from ..training.tasks.language import LanguageModelling
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.timing import StepTimer

# Dense bf16 peak of a device in FLOP/s by the vendor's datasheet, by a part of its name; for MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX A5000": 111e12, "4090": 165e12}

Kind = Literal["language", "classification"]
# Told between what is timed: what comes next, how much of its kind is done, and of how much.
Tell = Callable[[str, int, int], None]

_GPT_VOCABULARY = 8192
_CLASSES = ("one", "two", "three")
# Batches of random data before they come round again.
_BATCHES = 64
# Positions beyond a sequence's length: texts are padded to a multiple of 8, and some families leave the first unused.
_SPARE_POSITIONS = 8
# What an override may set; the rest of a run's config has no part in a step, or is given by the arms.
_SECTIONS = ("model", "optimizer", "train")


@dataclass(frozen=True)
class Arm:
    """One line of a benchmark: its name, the run it stands for, and the seconds of its steps in every round.

    `peak_memory` is the most that the arm's own tensors took on the device in one of its steps, in bytes: weights,
    gradients, the optimiser's state, activations and the batch, without the other arms, which lie there too.
    """

    name: str
    config: RunConfig
    rounds: list[list[float]]
    trainable: int
    flops_per_token: float
    peak_memory: int | None

    @property
    def step_seconds(self) -> float:
        return statistics.median(second for seconds in self.rounds for second in seconds)


def plan_arms(
    names: Sequence[str],
    model: str,
    batch_size: int = 8,
    length: int = 128,
    vocab_size: int | None = None,
    kind: Kind | None = None,
    compile_model: bool | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, RunConfig]:
    """The run of every arm. `PRESET@N` is an arm with batches of N; without a kind, the model says what it learns."""
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SECTIONS:
            raise ConfigError(f"{override}: a benchmark takes settings of {', '.join(_SECTIONS)}")
    fields: dict[str, Any] = {
        "model": {"name": model, "fields": _fitting(model, length, vocab_size)},
        "data": {"sequence_length": length},
        "train": {"batch_size": batch_size, "compile": "auto" if compile_model is None else compile_model},
    }
    common = RunConfig.load(fields, [*overrides])
    if common.model.name != model:  # the fields that make it fit are another model's
        raise ConfigError(f"model.name={common.model.name}: a benchmark's model is named with --model")
    usual = _kind_for(common)
    if (kind or usual) == "classification":
        fields["task"] = {"name": "random"}
    arms = {}
    for name in names:
        if name in arms:
            raise ConfigError(f"arm {name!r} is named twice")
        method, size = _split_arm(name)
        own = [] if size is None else [f"train.batch_size={size}"]
        arms[name] = RunConfig.load(merge(fields, {"method": method}), [*overrides, *own])
    return arms


def tell_nobody(what: str, done: int, total: int) -> None:
    pass


def benchmark(
    arms: dict[str, RunConfig],
    rounds: int = 5,
    steps: int = 20,
    warmup: int = 10,
    seed: int = 0,
    tell: Tell = tell_nobody,
) -> list[Arm]:
    """Time whole optimiser steps of every arm on random tokens, `rounds` times `steps` each, interleaved."""
    device = device_for(next(iter(arms.values())).train.device)
    world = World(0, 1, device)
    torch._dynamo.config.recompile_limit = 64  # every arm is one more variant of the same code
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        _take_workspaces(device)
    built: dict[str, tuple[Stepper, TrainState, float, int | None]] = {}
    for name, config in arms.items():
        tell(f"building {name} and warming it up", len(built), len(arms))
        before = _allocated(device)
        stepper, state, flops = _stepper(config, world, seed)
        _forget_peak(device)
        for _ in range(warmup):
            _step(stepper, state)
        peak = _peak(device)
        built[name] = (stepper, state, flops, None if peak is None else peak - before)
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    for number in range(rounds):
        tell("rounds measured", number, rounds)
        for name, (stepper, state, _, _) in built.items():
            _step(stepper, state)  # the caches belong to the arm before it
            times[name].append(_timed(stepper, state, steps, device))
    found = []
    for name, (stepper, _, flops, memory) in built.items():
        trainable = sum(p.numel() for p in stepper.model.parameters() if p.requires_grad)
        found.append(Arm(name, arms[name], times[name], trainable, flops, memory))
    return found


def summarise(arms: list[Arm], against: str) -> list[dict[str, Any]]:
    """One row per arm: step time, throughput, MFU, memory, and the ratio to one arm with its 95 % interval.

    The bound by FLOPs is per token, as the ratio per example is: where batches differ, the ratio of steps is neither.
    """
    reference = next(arm for arm in arms if arm.name == against)
    peak = _peak_flops() if reference.peak_memory is not None else None
    usual = reference.config.train.batch_size
    rows = []
    for arm in arms:
        batch = arm.config.train.batch_size
        ratio, spread = ratio_of_rounds(arm.rounds, reference.rounds)
        per_second = batch * arm.config.data.sequence_length / arm.step_seconds
        rows.append(
            {
                "arm": arm.name,
                "step_ms": arm.step_seconds * 1000,
                "tokens_per_second": per_second,
                "mfu": per_second * arm.flops_per_token / peak if peak else None,
                "ratio": ratio,
                "ratio_95": spread,
                "flop_bound": arm.flops_per_token / reference.flops_per_token,
                "trainable": arm.trainable,
                "peak_memory": arm.peak_memory,
                "rounds": len(arm.rounds),
                "batch_size": batch,
                "ratio_per_example": ratio * usual / batch,
                "ratio_per_example_95": spread * usual / batch,
                "warning": None if batch == usual else _unequal(arm.name, batch, against, usual),
            }
        )
    return rows


def ratio_of_rounds(own: list[list[float]], other: list[list[float]]) -> tuple[float, float]:
    """The mean over rounds of one arm's median time to another's, and half of its 95 % interval; one round has none."""
    pairs = zip(own, other, strict=True)
    ratios = np.array([statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs])
    spread = _t95(len(ratios)) * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return float(ratios.mean()), float(spread)


def _unequal(name: str, batch: int, against: str, usual: int) -> str:
    return (
        f"{name} has batches of {batch}, {against} of {usual}: their ratio compares steps of different size and says "
        "nothing about speed; the ratio per example does"
    )


def _split_arm(name: str) -> tuple[str, int | None]:
    """A preset's name, and the batch size that the arm has of its own."""
    method, mark, size = name.partition("@")
    if not mark:
        return name, None
    if not (size.isascii() and size.isdigit() and int(size) > 0):
        raise ConfigError(f"arm {name!r}: @ must be followed by the arm's batch size, 1 or more, as in oelm-freeze@8")
    return method, int(size)


def _fitting(model: str, length: int, vocab_size: int | None) -> dict[str, Any]:
    """Fields that make a fresh model fit the tokens: its vocabulary, and positions enough."""
    fields = {} if vocab_size is None else {"vocab_size": vocab_size}
    if model.startswith(GPT):
        return {"vocab_size": _GPT_VOCABULARY, **fields}
    if model.startswith(RANDOM):
        hf_config = build_hf_config(RunConfig.load({"model": {"name": model}}).model, None, length)
        positions = getattr(hf_config, "max_position_embeddings", None)
        if positions is not None:
            fields["max_position_embeddings"] = max(positions, length + _SPARE_POSITIONS)
    return fields


def _kind_for(config: RunConfig) -> Kind:
    """What a model is there to learn: a decoder the next token, an encoder classes."""
    hf_config = build_hf_config(config.model, None, config.data.sequence_length)
    stacks = {stack.kind for stack in family_of(hf_config.model_type).stacks if stack.present(hf_config)}
    if not hasattr(hf_config, "vocab_size") or {"encoder", "decoder"} <= stacks:
        raise ConfigError(
            f"model.name {config.model.name}: steps of language models and of text encoders can be timed, not those of "
            f"a {hf_config.model_type}"
        )
    return "classification" if stacks == {"encoder"} else "language"


def _stepper(config: RunConfig, world: World, seed: int) -> tuple[Stepper, TrainState, float]:
    length = config.data.sequence_length
    hf_config = build_hf_config(config.model, None, length)
    task = (_labelled if config.task.kind == "classification" else _running_text)(config, hf_config, seed)
    model: Any = task.build_model(config)
    apply(model, config.method, config.seed)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.to(world.device).train()
    loss = task.loss(model)
    reach = find_reach(loss, {name: rows.to(world.device) for name, rows in task.batch(0, 1).items()})
    optimizer = build_optimizer(model, config.optimizer, world.device)
    set_learning_rate(optimizer, config.optimizer.learning_rate)
    stepper = Stepper(config, world, task, model, loss, optimizer, reset_compiler=False)
    state = TrainState()
    stepper.fit_micro_batch(state)
    return stepper, state, train_flops_per_token(model, length, state.micro_batch_size, reach)


def _running_text(config: RunConfig, hf_config: Any, seed: int) -> Task:
    length, vocabulary = config.data.sequence_length, int(hf_config.vocab_size)
    ids = np.random.default_rng(seed).integers(0, vocabulary, _BATCHES * config.train.batch_size * length + 1)
    data = in_memory(ids, vocab_size=vocabulary, description="random tokens")
    windows = Windows(data.train.tokens, length)
    return LanguageModelling(data, windows, windows, length)


def _labelled(config: RunConfig, hf_config: Any, seed: int) -> Task:
    """Random sequences, all of the full length, with random classes. None holds the padding token."""
    length, count = config.data.sequence_length, _BATCHES * config.train.batch_size
    padding = getattr(hf_config, "pad_token_id", None)
    hf_config.pad_token_id = 0 if padding is None else padding
    if max_text_length(hf_config, length) < length:
        raise ConfigError(
            f"data.sequence_length {length} is more than the model's {max_text_length(hf_config, length)} tokens"
        )
    draws = np.random.default_rng(seed)
    ids = draws.integers(0, hf_config.vocab_size - 1, count * length)
    ids = (ids + (ids >= hf_config.pad_token_id)).astype(np.int32)
    types = np.zeros(len(ids), np.int8) if getattr(hf_config, "type_vocab_size", 0) > 1 else None
    encoded = Encoded(ids, np.arange(count + 1) * length, types, truncated=0)
    examples = Examples([""] * count, None, draws.integers(0, len(_CLASSES), count))
    splits = {"train": examples, "validation": examples}
    data = LabelledData(
        name="random",
        description="random tokens",
        synthetic=True,
        labels=_CLASSES,
        splits=splits,
        sources={},
        sha256="",
    )
    model_tokenizer = ModelTokenizer(SimpleNamespace(pad_token_id=hf_config.pad_token_id), hf_config, length)
    order = LengthGrouped(encoded.lengths, config.train.batch_size, seed)
    return Classification(data, model_tokenizer, encoded, order, "validation", encoded, np.arange(count), "accuracy")


def _step(stepper: Stepper, state: TrainState) -> None:
    stepper.step(state)
    state.step += 1


def _timed(stepper: Stepper, state: TrainState, steps: int, device: torch.device) -> list[float]:
    timer = StepTimer(device, warmup_steps=0)
    timer.begin()
    for _ in range(steps):
        _step(stepper, state)
        timer.step()
    return timer.collect()


def _allocated(device: torch.device) -> int:
    """Bytes of the tensors that live on the device now."""
    gc.collect()  # what is only unreachable would be freed later, out of another arm's account
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> int | None:
    """The most bytes that tensors took on the device since that was last forgotten; not known without CUDA."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _take_workspaces(device: torch.device) -> None:
    """Let the matrix library take its buffers now: it keeps them, and the first arm would be charged with them."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype)).sum().backward()


def _peak_flops() -> float | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def _t95(count: int) -> float:
    """Student's t for a two-sided 95 % interval over so many rounds, to three digits, without scipy."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    free = count - 1
    if free <= len(table):
        return table[free - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Its expansion in 1 / free (Abramowitz and Stegun, 26.7.5): good from ten on.
    first, second, third = z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + first / (4 * free) + second / (96 * free**2) + third / (384 * free**3)
