"""The GPT as a GPT-NeoX: rotary positions, LayerNorm, two feed-forward matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXConfig

from .tensors import embedding_and_head, heads_of_qkv, parameters_with_bias, rope_parameters, shared_fields


def gpt_neox_config(config: Any) -> GPTNeoXConfig:
    """Return the config of the GPT-NeoX."""
    return GPTNeoXConfig(
        intermediate_size=config.intermediate_size,
        hidden_act=config.activation,
        rope_parameters={**rope_parameters(config), "partial_rotary_factor": 1.0},
        attention_bias=False,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        use_parallel_residual=False,
        layer_norm_eps=config.layer_norm_eps,
        **shared_fields(config),
    )


def gpt_neox_state(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the GPT-NeoX."""
    state = embedding_and_head(model, "gpt_neox.embed_in")
    state |= parameters_with_bias("gpt_neox.final_layer_norm", model.transformer.ln_f)
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"gpt_neox.layers.{layer}", block.attn
        # GPT-NeoX fuses the three head by head: the rows of head 1's q, k and v, then those of head 2, ...
        fused = torch.cat(heads_of_qkv(attn), dim=1).flatten(0, 1)
        state[f"{prefix}.attention.query_key_value.weight"] = fused
        state[f"{prefix}.attention.dense.weight"] = attn.o_proj.weight
        state |= parameters_with_bias(f"{prefix}.mlp.dense_h_to_4h", block.mlp.fc_in)
        state |= parameters_with_bias(f"{prefix}.mlp.dense_4h_to_h", block.mlp.fc_out)
        state |= parameters_with_bias(f"{prefix}.input_layernorm", block.ln_1)
        state |= parameters_with_bias(f"{prefix}.post_attention_layernorm", block.ln_2)
    return state
