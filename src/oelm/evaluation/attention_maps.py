"""The attention weights that a model computes for given tokens, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..method.spec import Kind
from ..models.returned_weights import returning_weights, weights_in
from ..runs.looks import LayerMap


def attention_maps(model: Any, own_kind: Kind, ids: Tensor, target_ids: Tensor | None = None) -> list[LayerMap]:
    """Return the weights of every layer for one text, whose token ids are (1, tokens).

    `own_kind` is the kind of attention of a model with one stack; `target_ids` is what the decoder of an
    encoder-decoder reads.
    """
    return [
        LayerMap(kind, layer, weights[0].numpy())
        for (kind, layer), weights in batch_weights(model, own_kind, ids, target_ids).items()
    ]


@torch.inference_mode()
def batch_weights(
    model: Any, own_kind: Kind, ids: Tensor, target_ids: Tensor | None = None
) -> dict[tuple[Kind, int], Tensor]:
    """Return the weights (rows, heads, queries, keys) of a batch of rows, by kind and layer."""
    base: Any = model.base_model  # no head's logits are needed
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {} if target_ids is None else {"decoder_input_ids": target_ids}
    was_training = model.training
    model.eval()
    try:
        with returning_weights(model):
            weights = weights_in(base(**inputs), own_kind)
    finally:
        model.train(was_training)
    if not weights:
        raise ModelError(
            f"{type(model).__name__} returns no attention weights: its class takes output_attentions=True and leaves "
            "them out, so there is nothing to look at"
        )
    by_place = {
        (kind, layer): own.float().cpu() for kind, layers in weights.items() for layer, own in enumerate(layers)
    }
    for (kind, layer), own in by_place.items():
        if not own.isfinite().all():
            raise ModelError(
                f"{type(model).__name__}: the weights of layer {layer} ({kind}) are not finite: the model holds values "
                "that are no numbers, or its scores overflow"
            )
    return by_place
