"""Convert the project's GPT to a model of transformers: GPT-2 with learned positions, GPT-NeoX with rotary ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPTNeoXConfig
from transformers.modeling_utils import PreTrainedModel

from ..errors import ModelError
from .gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification, OelmGPTPreTrainedModel

# Fields that have these names in the configs of all three models.
_SHARED_FIELDS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
)


def to_transformers(model: OelmGPTPreTrainedModel) -> PreTrainedModel:
    """Return a GPT-2 or GPT-NeoX with the same outputs. The GPT must be plain: cores folded, identities written out.

    Attention biases, which GPT-2 has and this GPT has not, are zero.
    """
    if not isinstance(model, OelmGPTForCausalLM | OelmGPTForSequenceClassification):
        raise ModelError(f"{type(model).__name__}: only the GPT with a head can be exported")
    config: Any = model.config
    shared = {name: getattr(config, name) for name in _SHARED_FIELDS}
    learned = config.positions == "learned"
    plain_config = _gpt2_config(config, shared) if learned else _gpt_neox_config(config, shared)
    state = _gpt2_state(model) if learned else _gpt_neox_state(model)
    is_classifier = isinstance(model, OelmGPTForSequenceClassification)
    plain = (AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM).from_config(plain_config)
    plain.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    if not is_classifier:
        plain.generation_config = model.generation_config
    return plain.to(model.dtype).train(model.training)


def _gpt2_config(config: Any, shared: dict[str, Any]) -> GPT2Config:
    return GPT2Config(
        n_inner=config.intermediate_size,
        activation_function="gelu",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        layer_norm_epsilon=config.layer_norm_eps,
        **shared,
    )


def _gpt2_state(model: Any) -> dict[str, Tensor]:
    state = _embedding_and_head(model, "transformer.wte", "transformer.ln_f")
    state["transformer.wpe.weight"] = model.transformer.wpe.weight
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"transformer.h.{layer}", block.attn
        fused = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
        state |= _with_bias(f"{prefix}.attn.c_attn", fused.T, None)
        state |= _with_bias(f"{prefix}.attn.c_proj", attn.o_proj.weight.T, None)
        state |= _with_bias(f"{prefix}.mlp.c_fc", block.mlp.fc_in.weight.T, block.mlp.fc_in.bias)
        state |= _with_bias(f"{prefix}.mlp.c_proj", block.mlp.fc_out.weight.T, block.mlp.fc_out.bias)
        state |= _parameters(f"{prefix}.ln_1", block.ln_1) | _parameters(f"{prefix}.ln_2", block.ln_2)
    return state


def _gpt_neox_config(config: Any, shared: dict[str, Any]) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        intermediate_size=config.intermediate_size,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        attention_bias=False,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        use_parallel_residual=False,
        layer_norm_eps=config.layer_norm_eps,
        **shared,
    )


def _gpt_neox_state(model: Any) -> dict[str, Tensor]:
    state = _embedding_and_head(model, "gpt_neox.embed_in", "gpt_neox.final_layer_norm")
    heads = model.config.num_attention_heads
    for layer, block in enumerate(model.transformer.h):
        prefix, attn = f"gpt_neox.layers.{layer}", block.attn
        # GPT-NeoX fuses the three head by head: the rows of head 1's q, k and v, then those of head 2, ...
        by_head = [p.weight.unflatten(0, (heads, -1)) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        state[f"{prefix}.attention.query_key_value.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
        state[f"{prefix}.attention.dense.weight"] = attn.o_proj.weight
        state |= _parameters(f"{prefix}.mlp.dense_h_to_4h", block.mlp.fc_in)
        state |= _parameters(f"{prefix}.mlp.dense_4h_to_h", block.mlp.fc_out)
        state |= _parameters(f"{prefix}.input_layernorm", block.ln_1)
        state |= _parameters(f"{prefix}.post_attention_layernorm", block.ln_2)
    return state


def _embedding_and_head(model: Any, embedding: str, norm: str) -> dict[str, Tensor]:
    """Return the tensors outside the blocks, with the embedding and the final norm under the given names."""
    head = "score" if isinstance(model, OelmGPTForSequenceClassification) else "lm_head"
    state = {f"{embedding}.weight": model.transformer.wte.weight, f"{head}.weight": getattr(model, head).weight}
    return state | _parameters(norm, model.transformer.ln_f)


def _parameters(name: str, module: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}


def _with_bias(name: str, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Return a layer's tensors. A missing bias is zero, one per column of GPT-2's transposed weight."""
    return {f"{name}.weight": weight, f"{name}.bias": weight.new_zeros(weight.shape[1]) if bias is None else bias}
