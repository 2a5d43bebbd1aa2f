"""The GPT as a Llama: rotary positions, RMSNorm, SwiGLU. With norms on queries and keys it is a Qwen3."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from .tensors import embedding_and_head, key_and_value, parameters, rope_parameters, shared_fields


def llama_config(config: Any) -> LlamaConfig:
    """Return the config of the Llama."""
    return LlamaConfig(mlp_bias=config.biases, **llama_fields(config))


def qwen3_config(config: Any) -> Qwen3Config:
    """Return the config of the Qwen3: without its sliding window, which is off unless asked for."""
    return Qwen3Config(**llama_fields(config))


def llama_fields(config: Any) -> dict[str, Any]:
    """Return the fields that a Llama's config and a Qwen3's have in common."""
    return {
        **rms_norm_fields(config),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }


def rms_norm_fields(config: Any) -> dict[str, Any]:
    """Return the fields that the configs of Llama and of later classes like it have in common."""
    return {
        **shared_fields(config),
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(config),
        "attention_bias": False,
        "attention_dropout": config.dropout,
        "rms_norm_eps": config.layer_norm_eps,
    }


def llama_state(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the Llama, with the norms of queries and keys where the GPT has them."""
    state = outside_attention(model)
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"model.layers.{layer}.self_attn", block.attn
        key, value = key_and_value(attn)
        state |= {f"{prefix}.k_proj.weight": key, f"{prefix}.v_proj.weight": value}
        state |= parameters(f"{prefix}.q_proj", attn.q_proj) | parameters(f"{prefix}.o_proj", attn.o_proj)
        if attn.q_norm is not None:
            state |= parameters(f"{prefix}.q_norm", attn.q_norm) | parameters(f"{prefix}.k_norm", attn.k_norm)
    return state


def outside_attention(model: Any) -> dict[str, Tensor]:
    """Return embedding, head, norms and feed-forward layers under the names of Llama and of classes like it."""
    state = embedding_and_head(model, "model.embed_tokens") | parameters("model.norm", model.transformer.ln_f)
    for layer, block in enumerate(model.transformer.h):
        prefix = f"model.layers.{layer}"
        state |= parameters(f"{prefix}.input_layernorm", block.ln_1)
        state |= parameters(f"{prefix}.post_attention_layernorm", block.ln_2)
        state |= parameters(f"{prefix}.mlp.gate_proj", block.mlp.gate)
        state |= parameters(f"{prefix}.mlp.up_proj", block.mlp.fc_in)
        state |= parameters(f"{prefix}.mlp.down_proj", block.mlp.fc_out)
    return state
