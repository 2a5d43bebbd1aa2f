"""What the plain classes share: fields of their configs, and the GPT's tensors under the names of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Fields that have these names in the configs of all classes.
_SHARED_FIELDS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
)


def shared_fields(config: Any) -> dict[str, Any]:
    """Return the fields of the GPT's config that mean the same in every other."""
    return {name: getattr(config, name) for name in _SHARED_FIELDS}


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the GPT's rotation as transformers' configs describe it."""
    return {"rope_type": "default", "rope_theta": float(config.rope_theta)}


def embedding_and_head(model: Any, embedding: str) -> dict[str, Tensor]:
    """Return the token embedding, under the given name, and the head, which has one name in all classes."""
    head = "score" if hasattr(model, "score") else "lm_head"
    return {f"{embedding}.weight": model.transformer.wte.weight, f"{head}.weight": getattr(model, head).weight}


def parameters(name: str, module: Any) -> dict[str, Tensor]:
    """Return a module's weight and, where it has one, its bias."""
    bias = getattr(module, "bias", None)
    return {f"{name}.weight": module.weight} | ({} if bias is None else {f"{name}.bias": bias})


def parameters_with_bias(name: str, module: Any) -> dict[str, Tensor]:
    """Return a module's weight and bias, which is zero where the module has none."""
    weight = module.weight
    return {f"{name}.bias": weight.new_zeros(weight.shape[0])} | parameters(name, module)


def key_and_value(attention: Any) -> tuple[Tensor, Tensor]:
    """Return the matrices of key and value: one matrix twice, where the attention has K = V."""
    key = attention.k_proj.weight
    return key, key if attention.v_proj is None else attention.v_proj.weight


def heads_of_qkv(attention: Any) -> list[Tensor]:
    """Return the matrices of query, key and value as (heads, rows, width), a group's key and value once per query."""
    query, key, value = (
        matrix.reshape(-1, attention.head_dim, matrix.shape[1])
        for matrix in (attention.q_proj.weight, *key_and_value(attention))
    )
    groups = attention.num_key_value_groups
    return [query, key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)]


def interleaved(rows: Tensor) -> Tensor:
    """Return rows (..., p, width) in the order of classes that rotate dimension 2i with 2i + 1, not i with i + p/2."""
    half = rows.shape[-2] // 2
    return torch.stack([rows[..., :half, :], rows[..., half:, :]], dim=-2).flatten(-3, -2)
