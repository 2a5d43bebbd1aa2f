"""One arm of a benchmark of generation: its model, a context in its cache, and the step that generates a token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from transformers.cache_utils import StaticCache

from ..config import RunConfig
from ..errors import OelmError, first_line
from ..method.apply import apply
from ..models.hf_config import build_hf_config
from ..models.run_model import build_language_model
from ..training.parallel import device_for
from ..training.step import uses_bfloat16
from ..training.timing import StepTimer
from .caches import bytes_per_token, enlarge, refill, to_float8
from .decode_kernels import DecodeKernel, kernel_errors, kernels_for
from .rounds import Rounds

# Tokens that are generated before a step is timed: it is compiled, and libraries choose their kernels.
_WARMUP = 3
# Tokens that are timed of each kernel when the fastest is looked for.
_TRIED = 5
# The most rows whose context is read; the other rows get copies of it.
_MAX_ROWS = 8
# A cache has a multiple of this many places: some kernels are slow with other lengths.
_PLACES = 16


def places_needed(context: int, tokens: int) -> int:
    """Return the places of a cache for the context and the tokens after it; every round starts with the context."""
    generated = max(_WARMUP + 1 + _TRIED, 1 + tokens)
    return -(-(context + generated) // _PLACES) * _PLACES


def rows_to_read(batch: int) -> int:
    """Return how many rows of a batch are read: few, and a divisor of the batch, whose other rows are their copies."""
    return math.gcd(batch, _MAX_ROWS)


@dataclass(frozen=True)
class ReadContext:
    """A context that was read for a few rows: their cache, the first token after it, and how long it took."""

    cache: StaticCache
    first: Tensor
    seconds: float


class GraphMemory:
    """Records what a step launches on a GPU. The graphs of arms, which take turns, share their memory."""

    def __init__(self) -> None:
        self._renew()

    def record(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of all that the step launches."""
        try:
            return _record_graph(step, self._first.pool())
        except BaseException:
            self._renew()  # torch goes on taking the memory of a failed graph for one that is being recorded
            raise

    def _renew(self) -> None:
        # Memory can be shared as long as some graph uses it.
        self._first = _record_graph(partial(torch.zeros, 1, device="cuda"))


def _record_graph(step: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            step()
    finally:
        torch.cuda.set_stream(current)  # a step that cannot be recorded would leave another stream behind
    return graph


class ArmModel:
    """The model of one arm, on the device in evaluation mode. `cache_bytes` is the size of one token of one text."""

    def __init__(self, name: str, config: RunConfig, float8_cache: bool) -> None:
        self.name, self.float8_cache = name, float8_cache
        self.compiled = config.train.compile is True
        self.device = device_for(config.train.device)
        length = config.data.sequence_length
        self.vocab_size = int(build_hf_config(config.model, None, length).vocab_size)
        self.model: Any = build_language_model(config.model, self.vocab_size, length, config.seed)
        apply(self.model, config.method, config.seed)
        for module in self.model.modules():  # a key that torch keeps orthogonal would be computed for every token
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        dtype = torch.bfloat16 if uses_bfloat16(config, self.device) else torch.float32
        self.model.to(self.device, dtype).eval()
        cache = self.read(rows=1, context=2, places=2, seed=0).cache
        self.cache_bytes, self.layers = bytes_per_token(cache), len(cache.layers)

    def read(self, rows: int, context: int, places: int, seed: int) -> ReadContext:
        """Read a random context into a cache with the given places."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocab_size, (rows, context), generator=generator).to(self.device)
        # A static cache is allocated once. A growing one is copied for every token, and that copy would be timed.
        cache = StaticCache(config=self.model.config, max_cache_len=places)
        timer = StepTimer(self.device, warmup_steps=0)
        timer.begin()
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        timer.step()
        first = out.logits[:, -1:].argmax(-1)
        return ReadContext(to_float8(cache) if self.float8_cache else cache, first, timer.collect()[0])


class Decoder:
    """An arm that generates tokens for a whole batch, greedily, after a context. `rounds` collects their times.

    On a GPU the fastest of several kernels computes plain attention: `kernel` is its name, and `kernel_ms` has the time
    of a token with each that was tried. A compiled arm, which is off unless asked for, also records all that a token
    launches and launches it at once. Otherwise, with small batches, the time of launching one kernel after another
    hides the differences between arms.
    """

    def __init__(
        self, arm: ArmModel, context: ReadContext, batch: int, memory: list[Tensor], graphs: GraphMemory | None
    ) -> None:
        """`memory` is what the arms share for their caches, `graphs` what they share for recorded graphs on a GPU."""
        self.arm = arm
        self.rounds: Rounds = []
        self.kernel_ms: dict[str, float] = {}
        self._context, self._graphs = context, graphs
        self.cache = enlarge(context.cache, batch, memory)
        self.last = context.first.repeat(batch // len(context.first), 1)
        self._inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        if arm.float8_cache:
            self._inputs["cache_scales"] = torch.stack([layer.scales for layer in self.cache.layers])
        self._kernel = self._choose_kernel()
        self.kernel = None if self._kernel is None else self._kernel.name
        forward = torch.compile(arm.model, dynamic=False) if arm.compiled else arm.model
        self._step: Callable[[], None] = partial(self._advance, forward)
        self.start()
        if arm.compiled and arm.device.type == "cuda":
            with self._chosen(self._kernel):
                self._step = self._record(self._step)
        else:
            self.generate(_WARMUP)

    def start(self) -> None:
        """Put the context into the cache, as it was before any token was generated."""
        refill(self.cache, self._context.cache)
        self.last.copy_(self._context.first.repeat(len(self.last) // len(self._context.first), 1))

    def generate(self, tokens: int) -> list[float]:
        """Generate tokens after those in the cache, and return the seconds of each."""
        with self._chosen(self._kernel):
            return self._time(self._step, tokens)

    def _advance(self, forward: Any) -> None:
        """Generate one token, which then is the last."""
        out = forward(input_ids=self.last, **self._inputs)
        self.last.copy_(out.logits[:, -1:].argmax(-1))

    def _time(self, step: Callable[[], None], tokens: int) -> list[float]:
        timer = StepTimer(self.arm.device, warmup_steps=0)
        timer.begin()
        for _ in range(tokens):
            step()
            timer.step()
        return timer.collect()

    def _chosen(self, kernel: DecodeKernel | None) -> Any:
        return nullcontext() if kernel is None else kernel.chosen(self.arm.model)

    def _choose_kernel(self) -> DecodeKernel | None:
        """Return the kernel whose recorded token is fastest; None where the model has only its own way."""
        kernels = kernels_for(self.arm.model, self.arm.device, self.arm.float8_cache)
        if len(kernels) <= 1:
            return kernels[0] if kernels else None
        failure = ""
        for kernel in kernels:
            try:
                with kernel.chosen(self.arm.model):
                    self.start()
                    step = self._record(partial(self._advance, self.arm.model))
                    self.kernel_ms[kernel.name] = 1000 * statistics.median(self._time(step, 1 + _TRIED)[1:])
            except kernel_errors() as error:  # not every kernel takes every shape
                failure = failure or f"{kernel.name}: {first_line(error)}"
        if not self.kernel_ms:
            raise OelmError(f"no kernel computes its attention ({failure})")
        fastest = min(self.kernel_ms, key=lambda name: self.kernel_ms[name])
        return next(kernel for kernel in kernels if kernel.name == fastest)

    def _record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches all that a step launches, as one recorded graph."""
        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP):
                step()
        current.wait_stream(stream)
        assert self._graphs is not None
        replay: Callable[[], None] = self._graphs.record(step).replay
        return replay
