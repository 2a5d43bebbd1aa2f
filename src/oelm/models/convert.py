"""The project's GPT as a model of plain transformers: GPT-2 with learned positions, GPT-NeoX with rotary ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedModel,
)

from ..errors import ModelError
from .gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification, OelmGPTPreTrainedModel


def to_transformers(model: OelmGPTPreTrainedModel) -> PreTrainedModel:
    """The same function as a GPT-2 or GPT-NeoX model. The GPT must be plain: cores folded, identities written out.

    Biases that those have in attention and this GPT has not are zero there.
    """
    if not isinstance(model, OelmGPTForCausalLM | OelmGPTForSequenceClassification):
        raise ModelError(f"{type(model).__name__}: only the GPT with a head can be exported")
    config: Any = model.config
    build = _gpt2 if config.positions == "learned" else _gpt_neox
    plain = build(model, config).to(model.dtype)
    if isinstance(model, OelmGPTForCausalLM):
        plain.generation_config = model.generation_config
    return plain.train(model.training)


def _gpt2(model: Any, config: Any) -> Any:
    classifies = isinstance(model, OelmGPTForSequenceClassification)
    plain = (GPT2ForSequenceClassification if classifies else GPT2LMHeadModel)(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            n_inner=config.intermediate_size,
            activation_function="gelu",
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            layer_norm_epsilon=config.layer_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            **_tokens_and_classes(config),
        )
    )
    state = _outer(model, "transformer.wte", "transformer.ln_f")
    state["transformer.wpe.weight"] = model.transformer.wpe.weight
    for layer, block in enumerate(model.transformer.h):
        here, attn = f"transformer.h.{layer}", block.attn
        fused = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
        state |= _with_bias(f"{here}.attn.c_attn", fused.T, None)
        state |= _with_bias(f"{here}.attn.c_proj", attn.o_proj.weight.T, None)
        state |= _with_bias(f"{here}.mlp.c_fc", block.mlp.fc_in.weight.T, block.mlp.fc_in.bias)
        state |= _with_bias(f"{here}.mlp.c_proj", block.mlp.fc_out.weight.T, block.mlp.fc_out.bias)
        state |= _norm(f"{here}.ln_1", block.ln_1) | _norm(f"{here}.ln_2", block.ln_2)
    return _filled(plain, state)


def _gpt_neox(model: Any, config: Any) -> Any:
    classifies = isinstance(model, OelmGPTForSequenceClassification)
    plain = (GPTNeoXForSequenceClassification if classifies else GPTNeoXForCausalLM)(
        GPTNeoXConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            hidden_act="gelu",
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
            attention_bias=False,
            attention_dropout=config.dropout,
            hidden_dropout=config.dropout,
            use_parallel_residual=False,
            layer_norm_eps=config.layer_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            **_tokens_and_classes(config),
        )
    )
    state = _outer(model, "gpt_neox.embed_in", "gpt_neox.final_layer_norm")
    heads = config.num_attention_heads
    for layer, block in enumerate(model.transformer.h):
        here, attn = f"gpt_neox.layers.{layer}", block.attn
        by_head = [p.weight.unflatten(0, (heads, -1)) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        state[f"{here}.attention.query_key_value.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
        state[f"{here}.attention.dense.weight"] = attn.o_proj.weight
        state |= _with_bias(f"{here}.mlp.dense_h_to_4h", block.mlp.fc_in.weight, block.mlp.fc_in.bias)
        state |= _with_bias(f"{here}.mlp.dense_4h_to_h", block.mlp.fc_out.weight, block.mlp.fc_out.bias)
        state |= _norm(f"{here}.input_layernorm", block.ln_1) | _norm(f"{here}.post_attention_layernorm", block.ln_2)
    return _filled(plain, state)


def _tokens_and_classes(config: Any) -> dict[str, Any]:
    """What a config says of tokens and of classes."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
    return {name: getattr(config, name) for name in names}


def _outer(model: Any, embedding: str, norm: str) -> dict[str, Tensor]:
    head = "score" if isinstance(model, OelmGPTForSequenceClassification) else "lm_head"
    state = {f"{embedding}.weight": model.transformer.wte.weight, f"{head}.weight": getattr(model, head).weight}
    return state | _norm(norm, model.transformer.ln_f)


def _norm(name: str, norm: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


def _with_bias(name: str, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    rows = weight.shape[1] if bias is None else bias.shape[0]
    return {f"{name}.weight": weight, f"{name}.bias": weight.new_zeros(rows) if bias is None else bias}


def _filled(plain: Any, state: dict[str, Tensor]) -> Any:
    plain.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    return plain
