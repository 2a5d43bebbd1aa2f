"""Several projections of one input as one product: a GPU computes a wide product faster than several narrow ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def project(hidden: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return every layer's output for the same input.

    In code that is compiled for a GPU, plain matrices are joined, which costs no time beside their cast: the trained
    ones to one product, and the frozen ones, which need no gradient, to another.
    """
    if not (hidden.is_cuda and torch.compiler.is_compiling()):
        return [layer(hidden) for layer in layers]
    weights = [_plain_weight(layer) for layer in layers]
    outputs: dict[int, Tensor] = {}
    for trained in (True, False):
        joined = {
            i: weight for i, weight in enumerate(weights) if weight is not None and weight.requires_grad is trained
        }
        if len(joined) > 1:
            product = F.linear(hidden, torch.cat(list(joined.values())))
            parts = torch.split(product, [weight.shape[0] for weight in joined.values()], dim=-1)
            outputs |= dict(zip(joined, parts, strict=True))
    return [outputs[i] if i in outputs else layer(hidden) for i, layer in enumerate(layers)]


def _plain_weight(layer: nn.Module) -> Tensor | None:
    """Return the matrix of a Linear that does nothing but multiply by it; None for any other layer."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    return layer.weight if layer._parameters["bias"] is None else None
