"""The GPT as a GPT-2: learned positions, LayerNorm, two feed-forward matrices. What GPT-2 has beside is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config

from .tensors import embedding_and_head, heads_of_qkv, parameters_with_bias, shared_fields


def gpt2_config(config: Any) -> GPT2Config:
    """Return the config of the GPT-2."""
    return GPT2Config(
        n_inner=config.intermediate_size,
        activation_function=config.activation,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        layer_norm_epsilon=config.layer_norm_eps,
        **shared_fields(config),
    )


def gpt2_state(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the GPT-2. Its biases of attention, which the GPT has not, are zero."""
    state = embedding_and_head(model, "transformer.wte")
    state |= parameters_with_bias("transformer.ln_f", model.transformer.ln_f)
    state["transformer.wpe.weight"] = model.transformer.wpe.weight
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"transformer.h.{layer}", block.attn
        fused = torch.cat([matrix.flatten(0, 1) for matrix in heads_of_qkv(attn)])
        state |= {f"{prefix}.attn.c_attn.weight": fused.T, f"{prefix}.attn.c_attn.bias": fused.new_zeros(len(fused))}
        state |= _transposed(f"{prefix}.attn.c_proj", attn.o_proj)
        state |= _transposed(f"{prefix}.mlp.c_fc", block.mlp.fc_in)
        state |= _transposed(f"{prefix}.mlp.c_proj", block.mlp.fc_out)
        state |= parameters_with_bias(f"{prefix}.ln_1", block.ln_1)
        state |= parameters_with_bias(f"{prefix}.ln_2", block.ln_2)
    return state


def _transposed(name: str, linear: Any) -> dict[str, Tensor]:
    """Return a Linear's tensors with the weight as GPT-2 stores it, one column for each output."""
    return parameters_with_bias(name, linear) | {f"{name}.weight": linear.weight.T}
