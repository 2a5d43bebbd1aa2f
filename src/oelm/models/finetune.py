"""The model of a fine-tuning run: a classifier or an encoder-decoder, pretrained or fresh.

What is checked of a pretrained one is that its head is the only thing without loaded weights.
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
from ..training.tasks.model_tokenizer import Reader, is_fresh
from .small import seeded


def build_classifier(config: ModelConfig, reader: Reader, labels: Sequence[str], seed: int) -> PreTrainedModel:
    """A model with a classification head for these labels. What is random is a function of the seed."""
    own: Any = reader.own
    if getattr(own, "is_decoder", False) and hasattr(own, "type_vocab_size"):
        raise ConfigError(
            f"model.name {config.name}: an encoder run as a decoder is pooled where it has seen nothing yet"
        )
    own.id2label = dict(enumerate(labels))
    own.label2id = {label: index for index, label in enumerate(labels)}
    if hasattr(own, "use_cache"):
        own.use_cache = False
    return _build(config, own, AutoModelForSequenceClassification, seed, "classification")


def kept_head(config: ModelConfig, reader: Reader, labels: Sequence[str]) -> str | None:
    """What to know about a checkpoint that was a classifier already, and whose head is taken over under other names."""
    own: Any = reader.own
    classifies = any("SequenceClassification" in name for name in own.architectures or ())
    theirs = [own.id2label[index] for index in sorted(own.id2label)] if classifies else []
    if config.from_scratch or len(theirs) != len(labels) or theirs == list(labels):
        return None
    return (
        f"the model was a classifier already, and its head is kept: its classes {', '.join(map(str, theirs))} are now "
        f"{', '.join(labels)}, in that order"
    )


def build_text_to_text(config: ModelConfig, reader: Reader, seed: int) -> PreTrainedModel:
    """An encoder-decoder that writes its answers, greedily: settings of generation that came with it are let go."""
    own: Any = reader.own
    if not getattr(own, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.name {config.name}: a {own.model_type} does not write answers; task.form 'text' needs an "
            "encoder-decoder such as t5-small or facebook/bart-base"
        )
    model: Any = _build(config, own, AutoModelForSeq2SeqLM, seed, "text-to-text")
    came = model.generation_config
    marks = {
        name: getattr(own, name, None) if getattr(own, name, None) is not None else getattr(came, name, None)
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
    }
    # transformers' cache takes a T5 decoder to have as many layers as the encoder.
    uneven = own.model_type == "t5" and own.num_decoder_layers != own.num_layers
    model.generation_config = GenerationConfig(**marks, do_sample=False, num_beams=1, use_cache=not uneven)
    built: PreTrainedModel = model
    return built


def _build(config: ModelConfig, own: Any, cls: Any, seed: int, head: str) -> PreTrainedModel:
    fresh = is_fresh(config)
    try:
        model: Any = seeded(seed, lambda: cls.from_config(own) if fresh else _load(config, own, cls))
    except (OSError, ValueError, SafetensorError) as error:
        what = f"a {own.model_type} cannot be given a {head} head, or its weights cannot be loaded"
        raise ConfigError(f"model.name {config.name}: {what} ({first_line(error)})") from None
    built: PreTrainedModel = model.float()
    return built


def _load(config: ModelConfig, own: Any, cls: Any) -> PreTrainedModel:
    how = {"use_safetensors": True, "trust_remote_code": False, "dtype": torch.float32}
    where = {} if config.revision is None else {"revision": config.revision}
    model, info = cls.from_pretrained(
        config.name, config=own, output_loading_info=True, ignore_mismatched_sizes=True, **how, **where
    )
    # A model that is its own base, as T5 is, has no part that may be missing.
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    lacking = [key for key in (*info["missing_keys"], *mismatched) if key.startswith(base) and ".pooler." not in key]
    if lacking:
        raise ModelError(
            f"model.name {config.name}: {len(lacking)} of the model's weights are not in the checkpoint, such as "
            f"{sorted(lacking)[0]}: it is not the model that its config describes"
        )
    loaded: PreTrainedModel = model
    return loaded
