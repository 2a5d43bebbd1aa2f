"""Generation measured arm by arm: the time of one more token on top of a context, and what that context's cache takes.

As in `oelm.bench`, arms are interleaved in rounds and compared as ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from ..config import RunConfig
from ..errors import ConfigError
from ..method.apply import apply
from ..models.hf_config import build_hf_config
from ..models.language import build_for_run
from ..training.parallel import device_for
from ..training.step import uses_bfloat16
from .steps import Tell, ratio_of_rounds, tell_nobody


@dataclass(frozen=True)
class Decoding:
    """One arm: the seconds of its tokens in every round, and the bytes of its cache for one token of one text."""

    name: str
    rounds: list[list[float]]
    cache_bytes: float
    batch_size: int
    context: int
    compiled: bool

    @property
    def token_seconds(self) -> float:
        return statistics.median(second for seconds in self.rounds for second in seconds)


# Tokens before the first round.
_WARMUP = 3
# How a token is compiled: on a GPU recorded once and played back.
_COMPILED = {"cuda": "reduce-overhead"}


def room_for(context: int, rounds: int, tokens: int) -> int:
    """The positions that a benchmark needs: its context grows by what every round adds, alike in all arms."""
    return context + _WARMUP + rounds * (tokens + 1)


@torch.inference_mode()
def measure(
    arms: dict[str, RunConfig],
    context: int,
    rounds: int = 5,
    tokens: int = 10,
    seed: int = 0,
    tell: Tell = tell_nobody,
) -> list[Decoding]:
    """Time single tokens of every arm after `context` random ones, `rounds` times `tokens` each, interleaved."""
    for name, config in arms.items():
        _check(name, config)
    torch._dynamo.config.recompile_limit = 64  # every arm is one more variant of the same code
    writers: dict[str, _Writer] = {}
    for name, config in arms.items():
        tell(f"building {name}", len(writers), len(arms))
        writers[name] = _Writer(config, context, seed)
    for done, (name, writer) in enumerate(writers.items()):
        tell(f"warming up {name}", done, len(arms))
        list(writer.write(_WARMUP))
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    for number in range(rounds):
        tell("rounds measured", number, rounds)
        for name, writer in writers.items():
            list(writer.write(1))  # the caches belong to the arm before it
            times[name].append(list(writer.write(tokens)))
    return [
        Decoding(name, times[name], writer.cache_bytes, arms[name].train.batch_size, context, writer.compiled)
        for name, writer in writers.items()
    ]


def summarise(arms: list[Decoding], against: str) -> list[dict[str, Any]]:
    """One row per arm: the time of a token, the ratio to one arm with its 95 % interval, and the cache."""
    reference = next(arm for arm in arms if arm.name == against)
    rows = []
    for arm in arms:
        ratio, spread = ratio_of_rounds(arm.rounds, reference.rounds)
        rows.append(
            {
                "arm": arm.name,
                "token_ms": arm.token_seconds * 1000,
                "tokens_per_second": arm.batch_size / arm.token_seconds,
                "ratio": ratio,
                "ratio_95": spread,
                "cache_bytes_per_token": arm.cache_bytes,
                "cache_ratio": arm.cache_bytes / reference.cache_bytes,
                "context": arm.context,
                "batch_size": arm.batch_size,
                "compiled": arm.compiled,
                "rounds": len(arm.rounds),
            }
        )
    return rows


def _check(name: str, config: RunConfig) -> None:
    if config.task.kind != "language":
        raise ConfigError(f"model.name {config.model.name}: only a decoder writes token by token")
    if "@" in name:
        raise ConfigError(f"arm {name!r}: tokens are written for all arms in batches of one size")


class _Writer:
    """A model with a context in its cache, which writes on greedily.

    Compiled, which has to be asked for, a GPU takes all kernels of a token at once: what launching them one by one
    takes hides in small batches what the arms differ in.
    """

    def __init__(self, config: RunConfig, context: int, seed: int) -> None:
        device = device_for(config.train.device)
        length = config.data.sequence_length
        vocab_size = int(build_hf_config(config.model, None, length).vocab_size)
        self.model: Any = build_for_run(config.model, vocab_size, length, config.seed)
        apply(self.model, config.method, config.seed)
        dtype = torch.bfloat16 if uses_bfloat16(config, device) else torch.float32
        self.model.to(device, dtype).eval()
        shape = (config.train.batch_size, context)
        ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed)).to(device)
        # One that has its memory from the start: to copy all of it for every token is what would be timed otherwise.
        self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.last: Tensor = out.logits[:, -1:].argmax(-1)
        held = [part for layer in self.cache.layers for part in (layer.keys, layer.values)]
        self.compiled = config.train.compile is True
        self.step: Any = self.model
        if self.compiled:
            self.step = torch.compile(self.model, dynamic=False, mode=_COMPILED.get(device.type))
        self.cache_bytes = sum(part[0].numel() * part.element_size() / part.shape[-2] for part in held)

    def write(self, tokens: int) -> Iterator[float]:
        """Write tokens; the seconds of each. A token is there when the next could be asked for."""
        for _ in range(tokens):
            started = time.perf_counter()
            # What the token before has left in a recorded graph may be written over.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            out = self.step(input_ids=self.last, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.last = out.logits[:, -1:].argmax(-1)
            self.last[0, 0].item()  # waits for the device
            yield time.perf_counter() - started
