"""Measure how long each arm takes to generate one more token after a context, and the size of that context's cache."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ..config import RunConfig
from ..errors import ConfigError, OelmError, first_line
from ..runs.schema import DecodeBench, KernelTime
from .caches import pairs_of, shared_memory
from .decoder import ArmModel, Decoder, GraphMemory, ReadContext, places_needed, rows_to_read
from .forms import FORMS
from .profile import profile_kernels
from .rounds import ShowProgress, median_seconds, no_progress, ratio_of_rounds, round_medians

_NO_MEMORY = "not enough memory"


@dataclass(frozen=True)
class DecodePlan:
    """The settings of a benchmark of generation: every batch size with every context. Each has `rounds` of `tokens`.

    If `profiled`, the kernels of a token are measured too, after the rounds.
    """

    batch_sizes: Sequence[int]
    contexts: Sequence[int]
    rounds: int = 5
    tokens: int = 10
    profiled: bool = False

    @property
    def positions(self) -> int:
        """Return the positions that a model needs for the longest context."""
        return places_needed(max(self.contexts), self.tokens)


@torch.inference_mode()
def benchmark_decoding(
    arms: dict[str, RunConfig], plan: DecodePlan, seed: int = 0, show: ShowProgress = no_progress
) -> list[DecodeBench]:
    """Time single tokens of every arm after random ones, in rounds with the arms interleaved.

    Return one row per arm and setting, each compared with the first arm in the same setting.
    """
    for name, config in arms.items():
        if config.task.kind != "language":
            raise ConfigError(f"model.name {config.model.name}: only a decoder generates token by token")
        if "@" in name:
            raise ConfigError(f"arm {name!r}: --decode needs batches of one size in all arms; leave out the @")
    torch._dynamo.config.recompile_limit = 64  # each arm compiles the same code once more
    models: list[ArmModel] = []
    for name, config in arms.items():
        show(f"building {name}", len(models), len(arms))
        models.append(ArmModel(name, config, name in FORMS and FORMS[name].float8_cache))
    rows: list[DecodeBench] = []
    for batch, context in product(plan.batch_sizes, plan.contexts):
        rows += _Setting(models, batch, context, plan).measure(seed, show)
        # The next setting needs the memory of this one, which compiled code and recorded graphs hold on to.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if all(row.error for row in rows):
        raise OelmError(f"no arm could be timed; {rows[0].arm}: {rows[0].error}")
    return rows


class _Setting:
    """All arms with one batch size and one context. `errors` says why an arm has no time."""

    def __init__(self, models: list[ArmModel], batch: int, context: int, plan: DecodePlan) -> None:
        self.models, self.batch, self.context, self.plan = models, batch, context, plan
        self.contexts: dict[str, ReadContext] = {}
        self.decoders: dict[str, Decoder] = {}
        self.errors: dict[str, str] = {}
        self.kernels: dict[str, list[KernelTime]] = {}

    def measure(self, seed: int, show: ShowProgress) -> list[DecodeBench]:
        """Return the rows of all arms."""
        self._read(seed, show)
        memory = self._allocate()
        graphs = GraphMemory() if self.models[0].device.type == "cuda" else None
        for number, (name, context) in enumerate(self.contexts.items()):
            show(f"warming up {name}{self._title}", number, len(self.contexts))
            arm = next(model for model in self.models if model.name == name)
            try:
                self.decoders[name] = Decoder(arm, context, self.batch, memory, graphs)
            except torch.OutOfMemoryError:
                self.errors[name] = _NO_MEMORY
            except (OelmError, RuntimeError) as error:  # one arm that fails must not cost the times of the others
                self.errors[name] = f"{type(error).__name__}: {first_line(error)}"
        for number in range(self.plan.rounds):
            show(f"rounds measured{self._title}", number, self.plan.rounds)
            for decoder in self.decoders.values():
                decoder.start()
                decoder.generate(1)  # not timed: the processor's caches still hold the previous arm's data
                decoder.rounds.append(decoder.generate(self.plan.tokens))
        for decoder in self.decoders.values() if self.plan.profiled else []:
            show(f"profiling {decoder.arm.name}{self._title}", 0, 1)
            decoder.start()
            self.kernels[decoder.arm.name] = profile_kernels(
                partial(decoder.generate, 1), self.plan.tokens, decoder.arm.device
            )
        return [self._row(model) for model in self.models]

    @property
    def _title(self) -> str:
        several = len(self.plan.batch_sizes) * len(self.plan.contexts) > 1
        return f" ({self.context:,} tokens, batches of {self.batch})" if several else ""

    def _read(self, seed: int, show: ShowProgress) -> None:
        """Read the context with every arm."""
        rows, places = rows_to_read(self.batch), places_needed(self.context, self.plan.tokens)
        for number, model in enumerate(self.models):
            show(f"reading with {model.name}{self._title}", number, len(self.models))
            try:
                if model.device.type == "cuda":  # not timed: libraries choose and load their kernels
                    model.read(rows, self.context, places, seed)
                self.contexts[model.name] = model.read(rows, self.context, places, seed)
            except torch.OutOfMemoryError:
                self.errors[model.name] = _NO_MEMORY

    def _allocate(self) -> list[Tensor]:
        """Return the memory that the arms share; those whose cache alone does not fit are left out."""
        while self.contexts:
            try:
                return shared_memory([context.cache for context in self.contexts.values()], self.batch)
            except torch.OutOfMemoryError:
                sizes = {
                    name: sum(tensor.nbytes for tensor in pairs_of(context.cache))
                    for name, context in self.contexts.items()
                }
                largest = max(sizes, key=lambda name: sizes[name])
                self.errors[largest] = _NO_MEMORY
                del self.contexts[largest]
        return []

    def _row(self, arm: ArmModel) -> DecodeBench:
        """Return an arm's row; where it or the reference has no time, without a ratio."""
        decoder, reference = self.decoders.get(arm.name), self.decoders.get(self.models[0].name)
        seconds = median_seconds(decoder.rounds) if decoder else None
        ratio, half_interval = (None, None)
        if decoder and reference:
            ratio, half_interval = ratio_of_rounds(decoder.rounds, reference.rounds)
        context = self.contexts.get(arm.name)
        # The 8-bit cache is made from an ordinary one: reading takes as long as multi-head attention's.
        prefill = None if context is None or arm.float8_cache else context.seconds * 1000
        return DecodeBench(
            arm=arm.name,
            token_ms=None if seconds is None else seconds * 1000,
            tokens_per_second=None if seconds is None else self.batch / seconds,
            ratio=ratio,
            ratio_95=half_interval,
            cache_bytes_per_token=arm.cache_bytes,
            cache_ratio=arm.cache_bytes / self.models[0].cache_bytes,
            layers=arm.layers,
            context=self.context,
            batch_size=self.batch,
            compiled=arm.compiled,
            rounds=self.plan.rounds,
            prefill_ms=prefill,
            prefill_rows=rows_to_read(self.batch),
            kernel=decoder.kernel if decoder else None,
            kernel_ms=decoder.kernel_ms if decoder else {},
            error=self.errors.get(arm.name),
            kernels=self.kernels.get(arm.name, []),
            round_ms=round_medians(decoder.rounds) if decoder else [],
        )
