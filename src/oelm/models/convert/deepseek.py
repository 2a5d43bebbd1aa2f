"""The GPT with a latent and a rotary channel as a DeepSeek-V3 without experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config

from .llama import outside_attention, rms_norm_fields
from .tensors import interleaved, parameters


def deepseek_v3_config(config: Any) -> DeepseekV3Config:
    """Return the config of the DeepSeek-V3: every layer dense, queries without a latent, no layers beside the model's.

    Its scores are divided by the root of a head's query dimensions, content and channel together, as the GPT's are.
    """
    return DeepseekV3Config(
        num_key_value_heads=config.num_attention_heads,
        kv_lora_rank=config.latent,
        q_lora_rank=None,
        qk_nope_head_dim=config.key_dim,
        qk_rope_head_dim=config.channel,
        v_head_dim=config.head_dim,
        rope_interleave=True,  # serving engines read no other order
        first_k_dense_replace=config.num_hidden_layers,
        num_mtp_layers=0,
        **rms_norm_fields(config),
    )


def deepseek_v3_state(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the DeepSeek-V3.

    kv_a_proj_with_mqa      the matrix to the latent, and below it the key of the channel
    kv_b_proj               for each head, the matrices from the latent to its key and to its value
    q_proj                  for each head, the query of the content and that of the channel
    """
    heads = model.config.num_attention_heads
    state = outside_attention(model)
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"model.layers.{layer}.self_attn", block.attn
        content, key, value, channel = (
            projection.weight.unflatten(0, (heads, -1))
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj, attn.channel.q_proj)
        )
        to_latent = torch.cat([attn.down_proj.weight, interleaved(attn.channel.k_proj.weight)])
        state[f"{prefix}.kv_a_proj_with_mqa.weight"] = to_latent
        state[f"{prefix}.kv_b_proj.weight"] = torch.cat([key, value], dim=1).flatten(0, 1)
        state[f"{prefix}.q_proj.weight"] = torch.cat([content, interleaved(channel)], dim=1).flatten(0, 1)
        state |= parameters(f"{prefix}.kv_a_layernorm", attn.latent_norm)
        state |= parameters(f"{prefix}.o_proj", attn.o_proj)
    return state
