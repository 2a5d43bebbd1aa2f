"""A small random model of every family, for tests and for trying a method without a download.

Each is a transformers model of its real class with a small config. Features that a family's default config leaves off
(grouped queries, relative positions, Falcon's three layouts) are on here, because mistakes are most likely there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..errors import ConfigError, OelmError, nearest
from . import gpt
from .gpt_config import MODERN

# Sizes and special tokens that several families share, in the words of their configs.
_SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_VOCABULARY = {"vocab_size": 96}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**_VOCABULARY, "max_position_embeddings": 64}
_BERT = {**_SIZES, "intermediate_size": 96, **_TEXT, "pad_token_id": 0}
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, **_VOCABULARY, **_ENDS}
_OELM_GPT = {**_SIZES, **_TEXT, **_ENDS}
_MODERN_GPT = {**_OELM_GPT, **MODERN}
# As wide a latent as the hidden state, which every preset for latents fits.
_LATENT_GPT = {**_MODERN_GPT, "positions": "none", "latent": 48, "channel": 8}
_LLAMA = {**_BERT, "num_key_value_heads": 2, **_ENDS}
# Every expert by itself: the kernel for all of them together takes no float64.
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_FALCON = {**_SIZES, **_VOCABULARY, "bias": True, **_ENDS}
_DISTILBERT = {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, **_TEXT}
_MODERNBERT = {**_BERT, "attention_bias": True, "local_attention": 8, **_ENDS, "cls_token_id": 1, "sep_token_id": 2}
_OPT = {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 48, **_TEXT, "pad_token_id": 0}
# The decoders have more layers than the encoders, so that a mix-up of the two is noticed.
_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, **_VOCABULARY}
_BART_ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
_BART_DECODER = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
# The encoder reads 10 frames of 8 mel bins, at half as many positions.
_SPEECH = {"num_mel_bins": 8, "max_source_positions": 5, "max_target_positions": 64, "decoder_start_token_id": 1}
_WHISPER = {"d_model": 48, **_BART_ENCODER, **_BART_DECODER, **_VOCABULARY, **_SPEECH, **_ENDS, "pad_token_id": 0}
_GPT_NEO = {**_TEXT, **_ENDS, "hidden_size": 48, "num_layers": 3, "num_heads": 4, "window_size": 8}
# Both kinds of layers; and a divisor of the scores that is not the root of the heads' size.
_GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 36, "sliding_window": 8}
_GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_VIT = {**_SIZES, "intermediate_size": 96, "image_size": 16, "patch_size": 8}

# name -> (model class, fields of its config)
SMALL: MappingProxyType[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "bert": ("BertForSequenceClassification", _BERT),
        "bert-cross": ("BertLMHeadModel", {**_BERT, "is_decoder": True, "add_cross_attention": True}),
        "roberta": ("RobertaForSequenceClassification", _BERT),
        "xlm-roberta": ("XLMRobertaForSequenceClassification", _BERT),
        "camembert": ("CamembertForSequenceClassification", _BERT),
        "electra": ("ElectraForSequenceClassification", {**_BERT, "embedding_size": 32}),
        "distilbert": ("DistilBertForSequenceClassification", _DISTILBERT),
        "albert": ("AlbertForSequenceClassification", {**_BERT, "embedding_size": 32, "num_hidden_groups": 1}),
        "deberta-v2": ("DebertaV2ForSequenceClassification", _DEBERTA),
        "deberta-v2-shared": ("DebertaV2ForSequenceClassification", {**_DEBERTA, "share_att_key": True}),
        "deberta-v2-absolute": ("DebertaV2ForSequenceClassification", _BERT),
        "mpnet": ("MPNetForSequenceClassification", _BERT),
        "modernbert": ("ModernBertForSequenceClassification", _MODERNBERT),
        "gpt2": ("GPT2LMHeadModel", _GPT2),
        "gpt2-cross": ("GPT2LMHeadModel", {**_GPT2, "add_cross_attention": True}),
        "oelm-gpt": ("OelmGPTForCausalLM", _OELM_GPT),
        "oelm-gpt-rotary": ("OelmGPTForCausalLM", {**_OELM_GPT, "positions": "rotary"}),
        "oelm-gpt-modern": ("OelmGPTForCausalLM", _MODERN_GPT),
        "oelm-gpt-grouped": ("OelmGPTForCausalLM", {**_MODERN_GPT, "num_key_value_heads": 2}),
        "oelm-gpt-latent": ("OelmGPTForCausalLM", _LATENT_GPT),
        "opt": ("OPTForCausalLM", _OPT),
        "gpt_neox": ("GPTNeoXForCausalLM", {**_BERT, **_ENDS}),
        "gpt_neo": ("GPTNeoForCausalLM", {**_GPT_NEO, "attention_types": [[["global", "local", "global"], 1]]}),
        "gptj": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 8}),
        "llama": ("LlamaForCausalLM", {**_LLAMA, "attention_bias": True}),
        "mistral": ("MistralForCausalLM", _LLAMA),
        "qwen2": ("Qwen2ForCausalLM", _LLAMA),
        "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 16}),
        "gemma": ("GemmaForCausalLM", {**_LLAMA, "head_dim": 16}),
        "gemma2": ("Gemma2ForCausalLM", {**_LLAMA, **_GEMMA2, "layer_types": _GEMMA_LAYERS}),
        "gemma3": ("Gemma3ForCausalLM", {**_LLAMA, **_GEMMA2, "layer_types": _GEMMA_LAYERS}),
        "olmo2": ("Olmo2ForCausalLM", _LLAMA),
        "starcoder2": ("Starcoder2ForCausalLM", {**_LLAMA, "use_bias": True}),
        "mixtral": ("MixtralForCausalLM", _MIXTRAL),
        "phi3": ("Phi3ForCausalLM", _LLAMA),
        "falcon-rw": ("FalconForCausalLM", {**_FALCON, "alibi": True, "multi_query": False}),
        "falcon-7b": ("FalconForCausalLM", _FALCON),
        "falcon-40b": ("FalconForCausalLM", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
        "t5": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}),
        "bart": ("BartForConditionalGeneration", {"d_model": 48, **_BART_ENCODER, **_BART_DECODER, **_TEXT}),
        "whisper": ("WhisperForConditionalGeneration", _WHISPER),
        "vit": ("ViTForImageClassification", _VIT),
        "deit": ("DeiTForImageClassification", _VIT),
    }
)


def small_config(name: str, **changes: Any) -> Any:
    """Return the config of a small model by name (`bert`, `gpt2`, `falcon-40b`, ...); `changes` override its fields."""
    if name not in SMALL:
        raise OelmError(f"no small model {name!r}.{nearest(name, SMALL)} There are: {', '.join(SMALL)}")
    model_class, fields = SMALL[name]
    return _class_named(model_class).config_class(**{**fields, **changes})


def require_fields(config: Any, fields: Iterable[str]) -> None:
    """Raise for a field that a model's config does not have: transformers would accept and ignore it."""
    for field in fields:
        if not hasattr(config, field):
            hint = nearest(field, config.to_dict())
            raise ConfigError(f"model.fields: {config.model_type} has no field {field!r}.{hint}")


def small_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a small random model by name; `changes` override fields of its config."""
    config = small_config(name, **changes)
    with seeded(seed):
        return _class_named(SMALL[name][0])(config)


def _class_named(name: str) -> Any:
    """Return a class of the project's GPT or of transformers."""
    return getattr(gpt if hasattr(gpt, name) else transformers, name)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make the random numbers in a block a function of the seed, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
