"""A small random model of every family, for tests and for trying a method without a download.

Each is a transformers model of its real class with a small config. Features that a family's default config leaves off
(grouped queries, relative positions, Falcon's three layouts) are on here, because mistakes are most likely there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..errors import ConfigError, OelmError, nearest
from . import gpt

_VOCABULARY = 96
_BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": _VOCABULARY,
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": _VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OELM_GPT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": _VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (model class, config class, config)
SMALL: MappingProxyType[str, tuple[str, str, dict[str, Any]]] = MappingProxyType(
    {
        "bert": ("BertForSequenceClassification", "BertConfig", _BERT),
        "bert-cross": (
            "BertLMHeadModel",
            "BertConfig",
            {**_BERT, "is_decoder": True, "add_cross_attention": True},
        ),
        "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _BERT),
        "xlm-roberta": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _BERT),
        "camembert": ("CamembertForSequenceClassification", "CamembertConfig", _BERT),
        "electra": ("ElectraForSequenceClassification", "ElectraConfig", {**_BERT, "embedding_size": 32}),
        "distilbert": (
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            {
                "dim": 48,
                "n_layers": 3,
                "n_heads": 4,
                "hidden_dim": 96,
                "vocab_size": _VOCABULARY,
                "max_position_embeddings": 64,
            },
        ),
        "albert": (
            "AlbertForSequenceClassification",
            "AlbertConfig",
            {**_BERT, "embedding_size": 32, "num_hidden_groups": 1},
        ),
        "deberta-v2": (
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        ),
        "deberta-v2-shared": (
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            {
                **_BERT,
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_buckets": 8,
                "share_att_key": True,
            },
        ),
        "deberta-v2-absolute": ("DebertaV2ForSequenceClassification", "DebertaV2Config", _BERT),
        "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", _BERT),
        "modernbert": (
            "ModernBertForSequenceClassification",
            "ModernBertConfig",
            {
                **_BERT,
                "attention_bias": True,
                "local_attention": 8,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
            },
        ),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
        "gpt2-cross": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "add_cross_attention": True}),
        "oelm-gpt": ("OelmGPTForCausalLM", "OelmGPTConfig", _OELM_GPT),
        "oelm-gpt-rotary": ("OelmGPTForCausalLM", "OelmGPTConfig", {**_OELM_GPT, "positions": "rotary"}),
        "opt": (
            "OPTForCausalLM",
            "OPTConfig",
            {
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "ffn_dim": 96,
                "word_embed_proj_dim": 48,
                "vocab_size": _VOCABULARY,
                "max_position_embeddings": 64,
                "pad_token_id": 0,
            },
        ),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BERT, "bos_token_id": 1, "eos_token_id": 2}),
        "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 8}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "attention_bias": True}),
        "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
        "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 16}),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA),
        "falcon-rw": (
            "FalconForCausalLM",
            "FalconConfig",
            {**_FALCON, "alibi": True, "multi_query": False, "new_decoder_architecture": False},
        ),
        "falcon-7b": (
            "FalconForCausalLM",
            "FalconConfig",
            {**_FALCON, "alibi": False, "multi_query": True, "new_decoder_architecture": False},
        ),
        "falcon-40b": (
            "FalconForCausalLM",
            "FalconConfig",
            {**_FALCON, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        "t5": (
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "d_model": 48,
                "d_kv": 12,
                "d_ff": 96,
                "num_layers": 2,
                "num_decoder_layers": 3,
                "num_heads": 4,
                "vocab_size": _VOCABULARY,
                "feed_forward_proj": "gated-gelu",
                "decoder_start_token_id": 0,
            },
        ),
        "bart": (
            "BartForConditionalGeneration",
            "BartConfig",
            {
                "d_model": 48,
                "encoder_layers": 2,
                "decoder_layers": 3,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "decoder_ffn_dim": 96,
                "vocab_size": _VOCABULARY,
                "max_position_embeddings": 64,
            },
        ),
        "vit": (
            "ViTForImageClassification",
            "ViTConfig",
            {
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "image_size": 16,
                "patch_size": 8,
            },
        ),
    }
)


def small_config(name: str, **changes: Any) -> Any:
    """Return the config of a small model by name (`bert`, `gpt2`, `falcon-40b`, ...); `changes` override its fields."""
    if name not in SMALL:
        raise OelmError(f"no small model {name!r}.{nearest(name, SMALL)} There are: {', '.join(SMALL)}")
    _, config_class, fields = SMALL[name]
    return _class_named(config_class)(**{**fields, **changes})


def require_fields(config: Any, fields: Iterable[str]) -> None:
    """Raise for a field that a model's config does not have: transformers would accept and ignore it."""
    for field in fields:
        if not hasattr(config, field):
            hint = nearest(field, config.to_dict())
            raise ConfigError(f"model.fields: {config.model_type} has no field {field!r}.{hint}")


def small_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a small random model by name; `changes` override fields of its config."""
    config = small_config(name, **changes)
    model = seeded(seed, lambda: _class_named(SMALL[name][0])(config))
    assert isinstance(model, PreTrainedModel)
    return model


def _class_named(name: str) -> Any:
    """Return a class of the project's GPT or of transformers."""
    return getattr(gpt if hasattr(gpt, name) else transformers, name)


def seeded(seed: int, build: Callable[[], Any]) -> Any:
    """Return what `build` makes, with its random numbers a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
