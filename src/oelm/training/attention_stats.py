"""How attention spreads in every layer: the entropy of its weights and the spread of its logits, on real examples.

Every model here attends through torch's `scaled_dot_product_attention`, so that is where it is watched: what is
measured is what the layer does, with rotary positions, masks and shared key heads, in any family. A model that computes
its attention by hand (DeBERTa, T5) is not seen, and has no such figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..method.sites import find_sites
from .tasks.base import Batch


@torch.no_grad()
def attention_figures(model: nn.Module, module: nn.Module, batch: Batch) -> list[dict[str, Any]]:
    """For each layer: mean entropy of its attention in nats, as a share of the greatest possible, and logit spread.

    `module` is the model with its loss. Rows that see fewer than two keys have no spread and are left out. Empty where
    the calls that were seen are not one for each attention of the model.
    """
    device = next(model.parameters()).device
    training = module.training
    seen: list[dict[str, float]] = []
    module.eval()
    try:
        with _watching(seen):
            module(**{name: rows.to(device) for name, rows in batch.items()})
    finally:
        module.train(training)
    _, sites = find_sites(model)
    if len(seen) != len(sites):
        return []
    # A decoder's block attends to itself first, then across; its encoder ran before it.
    in_order = sorted(sites, key=lambda site: (site.kind != "encoder", site.layer, site.kind == "cross"))
    return [{"label": f"{site.kind} {site.label}", **figures} for site, figures in zip(in_order, seen, strict=True)]


@contextmanager
def _watching(seen: list[dict[str, float]]) -> Iterator[None]:
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(_spread(query, key, *args, **kwargs))
        return attend(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = watched
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attend


def _spread(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, float]:
    """What torch's function computes before it meets the values, measured."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query.float() @ key.float().transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        added = attn_mask.float() if attn_mask.dtype != torch.bool else torch.where(attn_mask, 0.0, -math.inf)
        scores = scores + added
    visible = scores > torch.finfo(torch.bfloat16).min / 2  # masks say minus infinity, or the least of some dtype
    count = visible.sum(-1)
    rows = count > 1
    weights = torch.softmax(scores, -1)
    entropy = -torch.where(visible & (weights > 0), weights * weights.clamp_min(1e-38).log(), 0.0).sum(-1)
    kept = torch.where(visible, scores, 0.0)
    mean = kept.sum(-1) / count.clamp_min(1)
    square = torch.where(visible, (scores - mean[..., None]) ** 2, 0.0).sum(-1) / count.clamp_min(1)
    share = entropy / count.clamp_min(2).float().log()
    return {
        "entropy": float(entropy[rows].mean()),
        "entropy_share": float(share[rows].mean()),
        "logit_std": float(square[rows].sqrt().mean()),
    }
