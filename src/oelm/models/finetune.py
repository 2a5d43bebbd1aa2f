"""The model of a fine-tuning run: a classifier or an encoder-decoder, pretrained or with random weights.

Of a pretrained model, only the head may be missing from the checkpoint; anything else that is missing is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from ..config import ModelConfig
from ..errors import ConfigError, ModelError, first_line
from .hf_config import is_fresh
from .small import seeded

_SPECIAL_TOKENS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")


def build_classifier(config: ModelConfig, hf_config: Any, labels: Sequence[str], seed: int) -> PreTrainedModel:
    """Return a model with a classification head for `labels`. Random weights are a function of the seed.

    The labels are written into `hf_config`, so that a saved model names its classes.
    """
    if getattr(hf_config, "is_decoder", False) and hasattr(hf_config, "type_vocab_size"):
        raise ConfigError(
            f"model.name {config.name}: an encoder run as a decoder is classified by its first token, which cannot "
            "attend to the rest of the text; use it without is_decoder"
        )
    hf_config.id2label = dict(enumerate(labels))
    hf_config.label2id = {label: index for index, label in enumerate(labels)}
    if hasattr(hf_config, "use_cache"):
        hf_config.use_cache = False
    return _build(config, hf_config, AutoModelForSequenceClassification, seed)


def relabelled_head_note(config: ModelConfig, hf_config: Any, labels: Sequence[str]) -> str | None:
    """Return a note when the checkpoint is a classifier whose head is kept under other class names, else None."""
    is_classifier = any("SequenceClassification" in name for name in hf_config.architectures or ())
    old_labels = [hf_config.id2label[index] for index in sorted(hf_config.id2label)] if is_classifier else []
    if config.from_scratch or len(old_labels) != len(labels) or old_labels == list(labels):
        return None
    return (
        f"the model was a classifier already, and its head is kept: its classes {', '.join(map(str, old_labels))} are "
        f"now {', '.join(labels)}, in that order"
    )


def build_text_to_text(config: ModelConfig, hf_config: Any, seed: int) -> PreTrainedModel:
    """Return an encoder-decoder that generates greedily, whatever generation settings its checkpoint came with."""
    if not getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.name {config.name}: a {hf_config.model_type} does not write answers; task.form 'text' needs an "
            "encoder-decoder such as t5-small or facebook/bart-base"
        )
    model: Any = _build(config, hf_config, AutoModelForSeq2SeqLM, seed)
    special_tokens = {
        name: value
        if (value := getattr(hf_config, name, None)) is not None
        else getattr(model.generation_config, name, None)
        for name in _SPECIAL_TOKENS
    }
    # transformers' cache assumes that a T5 decoder has as many layers as its encoder.
    uneven = hf_config.model_type == "t5" and hf_config.num_decoder_layers != hf_config.num_layers
    model.generation_config = GenerationConfig(**special_tokens, do_sample=False, num_beams=1, use_cache=not uneven)
    built: PreTrainedModel = model
    return built


def _build(config: ModelConfig, hf_config: Any, auto_class: Any, seed: int) -> PreTrainedModel:
    def build() -> Any:
        return auto_class.from_config(hf_config) if is_fresh(config) else _load(config, hf_config, auto_class)

    try:
        model: Any = seeded(seed, build)
    except (OSError, ValueError, SafetensorError) as error:
        head = "classification" if auto_class is AutoModelForSequenceClassification else "text-to-text"
        raise ConfigError(
            f"model.name {config.name}: a {hf_config.model_type} cannot be given a {head} head, or its weights cannot "
            f"be loaded ({first_line(error)})"
        ) from None
    built: PreTrainedModel = model.float()
    return built


def _load(config: ModelConfig, hf_config: Any, auto_class: Any) -> PreTrainedModel:
    options = {} if config.revision is None else {"revision": config.revision}
    model, info = auto_class.from_pretrained(
        config.name,
        config=hf_config,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    # Only weights below the base model's prefix must be in the checkpoint. A model that is its own base, as T5 is,
    # has an empty prefix: all of its weights must be there.
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    missing = [key for key in (*info["missing_keys"], *mismatched) if key.startswith(base) and ".pooler." not in key]
    if missing:
        raise ModelError(
            f"model.name {config.name}: {len(missing)} of the model's weights are not in the checkpoint, such as "
            f"{sorted(missing)[0]}: it is not the model that its config describes"
        )
    loaded: PreTrainedModel = model
    return loaded
