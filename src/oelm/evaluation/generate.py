"""Continue prompts with the model of a run, or of any folder that holds a language model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..training.parallel import device_for
from .load import load_language_model

# New tokens when the caller gives no number.
_DEFAULT_TOKENS = 100
# Logits divided by a lower temperature overflow.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Continuation:
    """A prompt and its continuation as one text, and the start of the prompt that the model had no room to read."""

    text: str
    cut: str
    cut_tokens: int
    positions: int | None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 always takes the most likely one, a `top_k` of 0 samples from all.

    `tokens` None means 100 new tokens, or as many as the model has positions left for.
    """

    tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise ConfigError(
                f"--temperature {self.temperature}: too low to sample with; 0 always takes the most likely token"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"--seed {self.seed}: must be at least 0 and below 2**64")


class Writer:
    """A language model with its tokenizer, which continues prompts."""

    def __init__(self, source: Path) -> None:
        self.model, self.tokenizer = load_language_model(source)
        if not self.model.can_generate():
            raise ConfigError(
                f"{source}: a {type(self.model).__name__} has no `generate`; a class takes it from transformers' "
                "GenerationMixin"
            )
        self.positions = positions_of(self.model)
        self.model.to(device_for("auto")).eval()

    def encode(self, prompt: str) -> Tensor:
        """Return a prompt as a row of token ids on the model's device."""
        ids: Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids.to(self.model.device)
        if ids.shape[1] == 0:
            raise ConfigError("the prompt is empty: give at least one word")
        return ids

    def continue_ids(self, ids: Tensor, sampling: Sampling, samples: int = 1) -> tuple[Tensor, int]:
        """Return continuations of a prompt, one in a row, and how many of the prompt's tokens each row begins with.

        A prompt that leaves too little room loses its start.
        """
        length = ids.shape[1]
        tokens, kept = _fit(sampling.tokens, length, self.positions)
        torch.manual_seed(sampling.seed)
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k or None}
        end = {} if self.tokenizer.eos_token_id is None else {"eos_token_id": self.tokenizer.eos_token_id}
        generated = self.model.generate(
            ids[:, length - kept :],
            attention_mask=torch.ones_like(ids[:, length - kept :]),
            max_new_tokens=tokens,
            pad_token_id=self.tokenizer.eos_token_id or 0,
            do_sample=sampling.temperature > 0,
            num_return_sequences=samples,
            **(chosen if sampling.temperature > 0 else {}),
            **end,
        )
        return generated, kept

    def decode(self, ids: Tensor) -> str:
        """Return token ids as text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def generate_text(source: Path, prompt: str, sampling: Sampling) -> Continuation:
    """Return the prompt and its continuation by the model of a run, or of a folder that was exported or saved."""
    writer = Writer(source)
    ids = writer.encode(prompt)
    generated, kept = writer.continue_ids(ids, sampling)
    cut = ids.shape[1] - kept
    return Continuation(writer.decode(generated[0]), writer.decode(ids[0, :cut]), cut, writer.positions)


def positions_of(model: Any) -> int | None:
    """Return how many tokens a model can read, or None where its positions have no end."""
    if getattr(model.config, "positions", "learned") != "learned":  # the project's GPT: rotary, or none
        return None
    positions = getattr(model.config, "max_position_embeddings", None)
    return None if positions is None else int(positions)


def _fit(requested: int | None, length: int, positions: int | None) -> tuple[int, int]:
    """Return how many tokens to generate, and how many of the prompt's to keep.

    The last new token is never read, so a prompt of n tokens leaves room for positions - n + 1.
    """
    if positions is None:
        return requested or _DEFAULT_TOKENS, length
    room = positions - length + 1
    if requested is None:
        # A prompt that does not fit keeps the half of the positions before its end.
        requested = min(_DEFAULT_TOKENS, room if room > 0 else positions - positions // 2)
    if requested > positions:
        most = f"{room} after this prompt of {length}" if room > 0 else f"{positions}, after one token"
        raise ConfigError(f"--tokens {requested}: the model has {positions} positions; ask for at most {most}")
    return requested, min(length, positions - requested + 1)
