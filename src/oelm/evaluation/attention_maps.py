"""The attention weights that a model computes for given tokens, layer by layer, as transformers' classes return them.

The function that computes attention step by step is the only one that returns weights, so it replaces the model's own
while this module reads them. Heads see the same keys with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ModelError
from ..runs.looks import HeadKind, LayerMap

# The outputs that hold weights, with the kind of their attention; None is that of the model's own sites.
_OUTPUTS: dict[str, HeadKind | None] = {
    "attentions": None,
    "encoder_attentions": "encoder",
    "decoder_attentions": "decoder",
    "cross_attentions": "cross",
}

# What a config has while the weights are read.
_SETTINGS = {"_attn_implementation": "eager", "use_cache": False}


@torch.inference_mode()
def attention_maps(model: Any, own_kind: HeadKind, ids: Tensor, target_ids: Tensor | None = None) -> list[LayerMap]:
    """Return the weights of every layer for one text, whose token ids are (1, tokens).

    `own_kind` is the kind of attention of a model with one stack; `target_ids` is what the decoder of an
    encoder-decoder reads.
    """
    return [
        LayerMap(kind, layer, weights[0].float().cpu().numpy())
        for kind, layers in _weights(model, own_kind, ids, target_ids).items()
        for layer, weights in enumerate(layers)
    ]


@torch.inference_mode()
def batch_weights(
    model: Any, own_kind: HeadKind, ids: Tensor, target_ids: Tensor | None = None
) -> dict[tuple[HeadKind, int], Tensor]:
    """Return the weights (rows, heads, queries, keys) of a batch of rows, by kind and layer."""
    return {
        (kind, layer): weights.float().cpu()
        for kind, layers in _weights(model, own_kind, ids, target_ids).items()
        for layer, weights in enumerate(layers)
    }


def _weights(
    model: Any, own_kind: HeadKind, ids: Tensor, target_ids: Tensor | None
) -> dict[HeadKind, tuple[Tensor, ...]]:
    base: Any = model.base_model  # no head's logits are needed
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {} if target_ids is None else {"decoder_input_ids": target_ids}
    with _step_by_step(model):
        out = base(**inputs, output_attentions=True)
    weights: dict[HeadKind, tuple[Tensor, ...]] = {}
    for name, kind in _OUTPUTS.items():
        layers = out.get(name)
        if layers and all(isinstance(layer, Tensor) for layer in layers):
            weights[kind or own_kind] = tuple(layers)
    if not weights:
        raise ModelError(
            f"{type(model).__name__} returns no attention weights: its class takes output_attentions=True and leaves "
            "them out, so there is nothing to look at"
        )
    return weights


@contextmanager
def _step_by_step(model: Any) -> Iterator[None]:
    """Let the model compute attention step by step, in evaluation mode and without a cache, and as before afterwards.

    The configs are changed directly: Falcon refuses to be set, and would then leave out its causal mask.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = [
        (config, {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)})
        for config in configs.values()
    ]
    was_training = model.training
    model.eval()
    try:
        for config, own_settings in before:
            for name in own_settings:
                setattr(config, name, _SETTINGS[name])
        yield
    finally:
        for config, own_settings in before:
            for name, value in own_settings.items():
                setattr(config, name, value)
        model.train(was_training)
