"""Generate text with a run's language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..training.parallel import device_for
from ..training.tasks.language import LanguageModelling
from .load import config_of, load_run

# New tokens when the caller gives no number.
_DEFAULT_TOKENS = 100
# Logits divided by a lower temperature overflow.
_MIN_TEMPERATURE = 1e-30


def generate_text(run: Path, prompt: str, tokens: int | None, temperature: float, top_k: int, seed: int) -> str:
    """Return the prompt and its continuation by a run's model. If both exceed the positions, the prompt's start goes.

    `tokens` None means 100 new tokens, or fewer if the model has fewer positions left: at least half of its positions
    after a long prompt. A temperature of 0 always takes the most likely token; a `top_k` of 0 samples from all.
    """
    config = config_of(run)
    if config.task.kind != "language":
        raise ConfigError(f"{run}: trained on {config.task.name}, not to continue a prompt; use `oelm predict`")
    if 0 < temperature < _MIN_TEMPERATURE:
        raise ConfigError(f"--temperature {temperature}: too low to sample with; 0 always takes the most likely token")
    model: Any = load_run(run)
    tokenizer = LanguageModelling.open(config).data.load_tokenizer()
    device = device_for("auto")
    model.to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        raise ConfigError("the prompt is empty: give at least one word")
    positions = getattr(model.config, "max_position_embeddings", None)
    tokens = _new_tokens(tokens, ids.shape[1], positions)
    if positions is not None and ids.shape[1] + tokens > positions:
        ids = ids[:, -(positions - tokens) :]
    torch.manual_seed(seed)
    sampling = {"temperature": temperature, "top_k": top_k or None} if temperature > 0 else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
        do_sample=temperature > 0,
        **sampling,
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _new_tokens(requested: int | None, prompt_length: int, positions: int | None) -> int:
    """Return how many tokens to generate; raise when the request leaves no position for the prompt."""
    if positions is None:
        return _DEFAULT_TOKENS if requested is None else requested
    if requested is None:
        return min(_DEFAULT_TOKENS, max(positions - prompt_length, positions // 2))
    if requested >= positions:
        raise ConfigError(f"--tokens {requested}: the model has {positions} positions; ask for {positions - 1} at most")
    return requested
