"""The model of a run: a language model, a classifier or an encoder-decoder, pretrained or with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from ..base.hub import hub_options
from ..config import RANDOM, ModelConfig
from ..errors import ConfigError, ModelError, OelmError, first_line
from .folder import require_own_weights, stored_bytes
from .hf_config import (
    OFFSET_POSITIONS,
    build_hf_config,
    is_fresh,
    max_text_length,
    require_changeable,
    require_memory,
    unused_positions,
)
from .load import build_model
from .small import require_fields, seeded, small_config, small_model

# What a model's new head is for, in errors.
_HEADS = {
    AutoModelForMaskedLM: "masked-language-modelling",
    AutoModelForSeq2SeqLM: "text-to-text",
    AutoModelForSequenceClassification: "classification",
}
_SPECIAL_TOKENS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")


def build_language_model(config: ModelConfig, vocab_size: int, length: int, seed: int) -> PreTrainedModel:
    """Return the model of a run, on the CPU in float32, checked against the data's vocabulary and length.

    Random weights are a function of the seed, so the arms of an experiment share every weight they have in common.
    """
    if config.name.startswith(RANDOM):
        family = config.name.removeprefix(RANDOM)
        require_fields(small_config(family), config.fields)
        with _in_words(config):
            require_memory(small_config(family, **config.fields), partial(small_model, family, **config.fields))
            model: Any = small_model(family, seed, **config.fields)
    elif is_fresh(config):
        hf_config = build_hf_config(config, vocab_size, length)
        with _in_words(config):
            require_memory(hf_config, partial(AutoModelForCausalLM.from_config, hf_config))
            with seeded(seed):
                model = AutoModelForCausalLM.from_config(hf_config)
    else:
        require_changeable(config)
        model = build_model(config.name, revision=config.revision or "main")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.name {config.name}: {type(model).__name__} is an encoder-decoder and cannot continue running text; "
            "name a decoder, or set task.form to 'text' for a task with examples"
        )
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ConfigError(
            f"model.name {config.name}: {type(model).__name__} has no language-model head: its get_output_embeddings() "
            "returns None, and it has no lm_head"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    _require_token_ids(config, rows)
    if vocab_size > rows:
        raise ConfigError(
            f"model.name {config.name}: its vocabulary has {rows} entries, the token file's has {vocab_size}. "
            "Was the file made with another tokenizer?"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ConfigError(f"data.sequence_length {length} is more than the model's {positions} positions")
    return model.float()


def _require_token_ids(config: ModelConfig, rows: int) -> None:
    """Raise for the number of a token, given in model.fields, that the vocabulary has not got."""
    for name, value in config.fields.items():
        for number in value if isinstance(value, list) else [value]:
            if name.endswith("_token_id") and number is not None and not 0 <= number < rows:
                raise ConfigError(f"model.fields.{name} {number}: the vocabulary has tokens 0 to {rows - 1}")


def build_masked_model(config: ModelConfig, vocab_size: int, length: int, padding: int, seed: int) -> PreTrainedModel:
    """Return an encoder with a head that fills masks. Random weights are a function of the seed.

    `padding` is the id of the token that pads texts, for a small random model whose family cannot do without.
    """
    hf_config = masked_model_config(config, vocab_size, length, padding)
    model = _build(config, hf_config, AutoModelForMaskedLM, seed)
    rows = model.get_input_embeddings().weight.shape[0]
    _require_token_ids(config, rows)
    if vocab_size > rows:
        raise ConfigError(
            f"model.name {config.name}: its vocabulary has {rows} entries, and the token file's, with a token for the "
            f"mask, has {vocab_size}. Was the file made with another tokenizer?"
        )
    return model


def masked_model_config(config: ModelConfig, vocab_size: int, length: int, padding: int) -> Any:
    """Return the transformers config of an encoder that fills masks; raise for any other model, by name.

    A small random model gets the vocabulary and as many positions as a sequence has tokens, unless its fields say
    otherwise, and no padding token unless its positions are counted from there: no sequence is padded.
    """
    hf_config = build_hf_config(config, vocab_size, length)
    _require_encoder(config, hf_config)
    if config.name.startswith(RANDOM):
        if "pad_token_id" not in config.fields:
            hf_config.pad_token_id = padding if hf_config.model_type in OFFSET_POSITIONS else None
        unused = unused_positions(hf_config)
        if "max_position_embeddings" not in config.fields and unused <= length:
            hf_config.max_position_embeddings = length + unused
    longest = max_text_length(hf_config, length)
    if longest < length:
        raise ConfigError(f"data.sequence_length {length} is more than the model's {longest} positions")
    return hf_config


def _require_encoder(config: ModelConfig, hf_config: Any) -> None:
    """Raise for a model that cannot fill masks from what stands on both sides of them."""
    name = f"model.name {config.name}: a {hf_config.model_type}"
    encoder = "name an encoder, such as random:bert"
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder, whose decoder writes from left to right; {encoder}")
    is_decoder = type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING and type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_decoder or getattr(hf_config, "is_decoder", False):
        raise ConfigError(
            f"{name} is a decoder here, which reads only what comes before a masked token; {encoder}, or set task to "
            "'language'"
        )
    if type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ConfigError(f"{name} has no head that fills masks; {encoder}")


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
    return model


def _build(config: ModelConfig, hf_config: Any, auto_class: Any, seed: int) -> PreTrainedModel:
    require_own_weights(config.name, hf_config)
    with _in_words(config):
        try:
            require_memory(hf_config, partial(auto_class.from_config, hf_config), stored_bytes(config.name))
            with seeded(seed):
                model = auto_class.from_config(hf_config) if is_fresh(config) else _load(config, hf_config, auto_class)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"model.name {config.name}: a {hf_config.model_type} cannot be given a {_HEADS[auto_class]} head, or "
                f"its weights cannot be loaded ({first_line(error)})"
            ) from None
    return model.float()


@contextmanager
def _in_words(config: ModelConfig) -> Iterator[None]:
    """Turn an error of transformers about a config into one of the run's: it checks few values before it uses them."""
    try:
        yield
    except (OelmError, MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocat" in str(error):  # too little memory has its own message
            raise
        why = first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError(f"model.name {config.name}: no model can be made of its fields ({why})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _load(config: ModelConfig, hf_config: Any, auto_class: Any) -> PreTrainedModel:
    model, info = auto_class.from_pretrained(
        config.name,
        config=hf_config,
        revision=config.revision or "main",
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **hub_options(config.name),
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
    return model
