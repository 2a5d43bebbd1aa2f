"""Measure how long each arm takes to generate one more token after a context, and the size of that context's cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from ..config import RunConfig
from ..errors import ConfigError
from ..method.apply import apply
from ..models.hf_config import build_hf_config
from ..models.run_model import build_language_model
from ..runs.schema import DecodeBench
from ..training.parallel import device_for
from ..training.step import uses_bfloat16
from .rounds import Rounds, ShowProgress, median_seconds, no_progress, ratio_of_rounds

# Tokens before the first round.
_WARMUP = 3


def positions_needed(context: int, rounds: int, tokens: int) -> int:
    """Return the positions that a benchmark needs: every round adds tokens to the context, equally in all arms."""
    return context + _WARMUP + rounds * (tokens + 1)


@torch.inference_mode()
def benchmark_decoding(
    arms: dict[str, RunConfig],
    context: int,
    rounds: int = 5,
    tokens: int = 10,
    seed: int = 0,
    show: ShowProgress = no_progress,
) -> list[DecodeBench]:
    """Time single tokens of every arm after `context` random ones, `rounds` times `tokens` each, interleaved.

    Return one row per arm, each compared with the first arm.
    """
    for name, config in arms.items():
        if config.task.kind != "language":
            raise ConfigError(f"model.name {config.model.name}: only a decoder generates token by token")
        if "@" in name:
            raise ConfigError(f"arm {name!r}: --decode needs batches of one size in all arms; leave out the @")
    torch._dynamo.config.recompile_limit = 64  # each arm compiles the same code once more
    decoders: list[_Decoder] = []
    for name, config in arms.items():
        show(f"building {name}", len(decoders), len(arms))
        decoders.append(_Decoder(name, config, context, seed))
    for done, decoder in enumerate(decoders):
        show(f"warming up {decoder.name}", done, len(arms))
        list(decoder.generate(_WARMUP))
    for number in range(rounds):
        show("rounds measured", number, rounds)
        for decoder in decoders:
            list(decoder.generate(1))  # not timed: the processor's caches still hold the previous arm's data
            decoder.rounds.append(list(decoder.generate(tokens)))
    return [_row(decoder, decoders[0], context) for decoder in decoders]


def _row(arm: _Decoder, reference: _Decoder, context: int) -> DecodeBench:
    seconds = median_seconds(arm.rounds)
    ratio, half_interval = ratio_of_rounds(arm.rounds, reference.rounds)
    return DecodeBench(
        arm=arm.name,
        token_ms=seconds * 1000,
        tokens_per_second=arm.batch_size / seconds,
        ratio=ratio,
        ratio_95=half_interval,
        cache_bytes_per_token=arm.cache_bytes,
        cache_ratio=arm.cache_bytes / reference.cache_bytes,
        context=context,
        batch_size=arm.batch_size,
        compiled=arm.compiled,
        rounds=len(arm.rounds),
    )


class _Decoder:
    """The model of one arm with a context in its cache, which generates greedily. `rounds` collects its times.

    With compiled code (off by default) a GPU launches all kernels of a token at once. Without it, in small batches, the
    time of launching the kernels one by one hides the differences between arms.
    """

    def __init__(self, name: str, config: RunConfig, context: int, seed: int) -> None:
        self.name, self.batch_size = name, config.train.batch_size
        self.rounds: Rounds = []
        device = device_for(config.train.device)
        length = config.data.sequence_length
        vocab_size = int(build_hf_config(config.model, None, length).vocab_size)
        self.model: Any = build_language_model(config.model, vocab_size, length, config.seed)
        apply(self.model, config.method, config.seed)
        dtype = torch.bfloat16 if uses_bfloat16(config, device) else torch.float32
        self.model.to(device, dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (self.batch_size, context), generator=generator).to(device)
        # A static cache is allocated once. A growing one is copied for every token, and that copy would be timed.
        self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.last: Tensor = output.logits[:, -1:].argmax(-1)
        self.compiled = config.train.compile is True
        self.step: Any = self.model
        if self.compiled:
            # On a GPU, a token's kernels are recorded once and replayed as one graph.
            mode = "reduce-overhead" if device.type == "cuda" else None
            self.step = torch.compile(self.model, dynamic=False, mode=mode)
        cache_tensors = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        # The bytes that one token of one text takes in the cache.
        self.cache_bytes = sum(tensor[0].numel() * tensor.element_size() / tensor.shape[-2] for tensor in cache_tensors)

    def generate(self, tokens: int) -> Iterator[float]:
        """Generate tokens and yield the seconds of each, until the device has computed it."""
        for _ in range(tokens):
            started = time.perf_counter()
            # Allows the recorded graph to overwrite its outputs of the previous token.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            output = self.step(input_ids=self.last, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.last = output.logits[:, -1:].argmax(-1)
            self.last[0, 0].item()  # waits for the device
            yield time.perf_counter() - started
