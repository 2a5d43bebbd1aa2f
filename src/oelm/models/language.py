"""The model of a language-modelling run: the project's GPT at a named size, or any causal model of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..config import RANDOM, ModelConfig
from ..errors import ConfigError, first_line
from .build import build_model
from .hf_config import build_hf_config, is_fresh, require_changeable
from .small import require_fields, seeded, small_config, small_model


def build_for_run(config: ModelConfig, vocab_size: int, length: int, seed: int) -> PreTrainedModel:
    """Return the model of a run, on the CPU in float32, checked against the data's vocabulary and length.

    Random weights are a function of the seed, so the arms of an experiment share every weight they have in common.
    """
    if config.name.startswith(RANDOM):
        family = config.name.removeprefix(RANDOM)
        require_fields(small_config(family), config.fields)
        model: Any = small_model(family, seed, **config.fields)
    elif is_fresh(config):
        model = _from_scratch(config, vocab_size, length, seed)
    else:
        require_changeable(config)
        options = {} if config.revision is None else {"revision": config.revision}
        model = build_model(config.name, seed, **options)
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ConfigError(f"model.name {config.name}: {type(model).__name__} has no language-model head")
    _require_fit(model, config.name, vocab_size, length)
    return model.float()


def _from_scratch(config: ModelConfig, vocab_size: int, length: int, seed: int) -> Any:
    hf_config = build_hf_config(config, vocab_size, length)
    try:
        return seeded(seed, lambda: AutoModelForCausalLM.from_config(hf_config))
    except ValueError as error:
        raise ConfigError(f"model.name {config.name}: {first_line(error)}") from None


def _require_fit(model: Any, name: str, vocab_size: int, length: int) -> None:
    """Raise when the data has more token ids than the model's vocabulary, or longer sequences than its positions."""
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab_size > rows:
        raise ConfigError(
            f"model.name {name}: its vocabulary has {rows} entries, the token file's has {vocab_size}. "
            "Was the file made with another tokenizer?"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ConfigError(f"data.sequence_length {length} is more than the model's {positions} positions")
