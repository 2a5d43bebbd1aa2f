"""The model of a language-modelling run: the project's GPT at a named size, or any causal model of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..base.files import require_reachable
from ..config import GPT, RANDOM, ModelConfig
from ..errors import ConfigError, first_line
from .build import build_model
from .gpt import OelmGPTForCausalLM, gpt_config
from .small import require_fields, seeded, small_config, small_model


def build_for_run(config: ModelConfig, vocab_size: int, length: int, seed: int) -> PreTrainedModel:
    """The model that a run's config describes, on the CPU in float32, checked against the data's vocabulary and length.

    Random weights are a function of the seed, so that the arms of an experiment share every weight they have in common.
    """
    if config.name.startswith(GPT):
        fields = {"vocab_size": vocab_size, "max_position_embeddings": length, **config.fields}
        model: Any = seeded(seed, lambda: OelmGPTForCausalLM(gpt_config(config.name.removeprefix(GPT), **fields)))
    elif config.name.startswith(RANDOM):
        family = config.name.removeprefix(RANDOM)
        require_fields(small_config(family), config.fields)
        model = small_model(family, seed, **config.fields)
    elif config.from_scratch:
        model = _from_scratch(config, seed)
    else:
        require_changeable(config)
        options = {} if config.revision is None else {"revision": config.revision}
        model = build_model(config.name, seed, **options)
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ConfigError(f"model.name {config.name}: {type(model).__name__} has no language-model head")
    _check_fit(model, config.name, vocab_size, length)
    return model.float()


def _from_scratch(config: ModelConfig, seed: int) -> Any:
    require_reachable(config.name)
    try:
        described = AutoConfig.from_pretrained(config.name, trust_remote_code=False, revision=config.revision or "main")
        with_fields(described, config.fields)
        return seeded(seed, lambda: AutoModelForCausalLM.from_config(described))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name {config.name}: {first_line(error)}") from None


def _check_fit(model: Any, name: str, vocab_size: int, length: int) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab_size > rows:
        raise ConfigError(
            f"model.name {name}: its vocabulary has {rows} entries, the token file's has {vocab_size}. "
            "Was the file made with another tokenizer?"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ConfigError(f"data.sequence_length {length} is more than the model's {positions} positions")


def require_changeable(config: ModelConfig) -> None:
    """Raises for fields of a pretrained model: its weights fit the config that it came with, and no other."""
    if config.fields and not config.from_scratch:
        raise ConfigError("model.fields: a pretrained model's config is fixed; set model.from_scratch to change it")


def with_fields(config: Any, fields: dict[str, Any]) -> Any:
    """A model's config with fields of `model.fields` set, each of which it must have."""
    require_fields(config, fields)
    for name, value in fields.items():
        setattr(config, name, value)
    return config
