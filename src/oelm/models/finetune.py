"""The model of a fine-tuning run: a classifier or an encoder-decoder, pretrained or fresh, and the tokenizer it reads.

What is checked here is that the two belong together: ids within the vocabulary, the same special tokens, a head that
is the only thing without loaded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..checkpoint import require_reachable
from ..config import ModelConfig
from ..data.tokenizer import load_model_tokenizer
from ..errors import ConfigError, ModelError, first_line
from .build import RANDOM
from .gpt import gpt_config
from .language import GPT, seeded, with_fields
from .small import small_config

# Families that count positions from after the padding token's id, so that many of their positions are never used.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
# Rows of an embedding beyond the tokenizer's last token: vocabularies are padded, but not by more than this.
_SPARE_ROWS = 1024
_SPECIAL = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")


def tokenizer_for(config: ModelConfig, builtin: bool) -> Any:
    """The tokenizer that a model reads: the one that is named, else the model's own, else that of the built-in data."""
    fresh = config.name.startswith((GPT, RANDOM))
    if config.tokenizer is not None:
        tokenizer = load_model_tokenizer(config.tokenizer)
    elif fresh and builtin:
        from ..data.judgements import judgement_tokenizer

        tokenizer = judgement_tokenizer()
    elif fresh:
        raise ConfigError(
            f"model.tokenizer: {config.name} brings no tokenizer; name a folder or a Hub name (bert-base-uncased, say)"
        )
    else:
        tokenizer = load_model_tokenizer(config.name)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.tokenizer {config.tokenizer or config.name}: has neither a padding nor an end token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def described(config: ModelConfig, tokenizer: Any, length: int) -> PreTrainedConfig:
    """The model's own config: of a fresh one made to fit the tokenizer and the length, of a pretrained one as it is."""
    if config.name.startswith(GPT):
        fields = {"vocab_size": len(tokenizer), "max_position_embeddings": length, **config.fields}
        return gpt_config(config.name.removeprefix(GPT), **fields)
    if config.name.startswith(RANDOM):
        return small_config(config.name.removeprefix(RANDOM), **{"vocab_size": len(tokenizer), **config.fields})
    if config.fields and not config.from_scratch:
        raise ConfigError("model.fields: a pretrained model's config is fixed; set model.from_scratch to change it")
    require_reachable(config.name)
    try:
        found = AutoConfig.from_pretrained(config.name, trust_remote_code=False, revision=config.revision or "main")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name {config.name}: neither a model's folder nor a Hub name that can be reached "
            f"({first_line(error)})"
        ) from None
    if getattr(found, "oelm", None) is not None:
        raise ConfigError(
            f"model.name {config.name}: a method was applied to it already. Write it out as a plain model first, "
            f"`oelm export {config.name} OUT`, and fine-tune that"
        )
    return with_fields(found, config.fields)


def longest_text(config: PreTrainedConfig, wanted: int) -> int:
    """How many tokens the model can read, and at most `wanted`."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions is None:
        return wanted
    if config.model_type in _OFFSET_POSITIONS:
        positions -= (config.pad_token_id or 0) + 1
    return min(wanted, int(positions))


def build_classifier(
    config: ModelConfig, own: PreTrainedConfig, tokenizer: Any, labels: Sequence[str], seed: int
) -> PreTrainedModel:
    """A model with a classification head for these labels. What is random is a function of the seed."""
    own.id2label = dict(enumerate(labels))
    own.label2id = {label: index for index, label in enumerate(labels)}
    if hasattr(own, "use_cache"):
        own.use_cache = False
    return _build(config, own, tokenizer, AutoModelForSequenceClassification, seed, "classification")


def build_text_to_text(config: ModelConfig, own: PreTrainedConfig, tokenizer: Any, seed: int) -> PreTrainedModel:
    """An encoder-decoder that writes its answers."""
    if not getattr(own, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.name {config.name}: a {own.model_type} does not write answers; task.form 'text' needs an "
            "encoder-decoder such as t5-small or facebook/bart-base"
        )
    return _build(config, own, tokenizer, AutoModelForSeq2SeqLM, seed, "text-to-text")


def _build(config: ModelConfig, own: Any, tokenizer: Any, cls: Any, seed: int, head: str) -> PreTrainedModel:
    fresh = config.from_scratch or config.name.startswith((GPT, RANDOM))
    if not fresh:
        _require_match(own, tokenizer, config)
    own.pad_token_id = tokenizer.pad_token_id
    if fresh:
        _take_marks(own, tokenizer)
    try:
        if fresh:
            model: Any = seeded(seed, lambda: cls.from_config(own))
        else:
            model = seeded(seed, lambda: _load(config, own, cls))
    except (OSError, ValueError, SafetensorError) as error:
        what = f"a {own.model_type} cannot be given a {head} head, or its weights cannot be loaded"
        raise ConfigError(f"model.name {config.name}: {what} ({first_line(error)})") from None
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"model.name {config.name}: its vocabulary has {rows} entries, the tokenizer's has {len(tokenizer)}. "
            "Is it another model's tokenizer?"
        )
    built: PreTrainedModel = model.float()
    return built


def _take_marks(own: Any, tokenizer: Any) -> None:
    """Give a fresh model the tokenizer's marks: where a text ends, and what a decoder begins with."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is not None:
        own.eos_token_id = end
    if getattr(own, "is_encoder_decoder", False):
        own.decoder_start_token_id = tokenizer.pad_token_id


def _load(config: ModelConfig, own: Any, cls: Any) -> PreTrainedModel:
    how = {"use_safetensors": True, "trust_remote_code": False, "dtype": torch.float32}
    where = {} if config.revision is None else {"revision": config.revision}
    model, info = cls.from_pretrained(
        config.name, config=own, output_loading_info=True, ignore_mismatched_sizes=True, **how, **where
    )
    base = f"{model.base_model_prefix}."
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    lacking = [key for key in (*info["missing_keys"], *mismatched) if key.startswith(base) and ".pooler." not in key]
    if lacking:
        raise ModelError(
            f"model.name {config.name}: {len(lacking)} of the model's weights are not in the checkpoint, such as "
            f"{sorted(lacking)[0]}: it is not the model that its config describes"
        )
    loaded: PreTrainedModel = model
    return loaded


def _require_match(own: Any, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a tokenizer that can only be another model's: special tokens elsewhere, or a far smaller vocabulary."""
    if config.tokenizer is None:
        return
    where = f"model.tokenizer {config.tokenizer}"
    rows = getattr(own, "vocab_size", len(tokenizer))
    if rows - len(tokenizer) >= _SPARE_ROWS:
        raise ConfigError(f"{where}: has {len(tokenizer)} tokens, the model was trained with {rows}: not its tokenizer")
    for name in _SPECIAL:
        mine, theirs = getattr(tokenizer, name, None), getattr(own, name, None)
        shared = mine is not None and isinstance(theirs, int)
        if shared and mine != theirs and not (name == "pad_token_id" and tokenizer.pad_token == tokenizer.eos_token):
            raise ConfigError(
                f"{where}: its {name.removesuffix('_id').replace('_', ' ')} is {mine}, the model's is {theirs}: not "
                "its tokenizer"
            )
