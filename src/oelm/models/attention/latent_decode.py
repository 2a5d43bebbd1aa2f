"""Attention of one new token over cached latents, from which every head's keys and values follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LatentQuery:
    """The query of one new token: content (batch, heads, r) on the latent's side, and channel (batch, heads, p)."""

    content: Tensor
    channel: Tensor | None = None


@dataclass(frozen=True)
class LatentCache:
    """What is cached: latents (batch, tokens, r), and their rotated channel (batch, tokens, p)."""

    latent: Tensor
    channel: Tensor | None = None


def mix_latents(
    query: LatentQuery, cache: LatentCache, mask: Tensor | None, scaling: float, *, fused: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return every head's mixture (batch, heads, r) of the cached latents, and the weights where they were computed."""
    scores = query.content @ cache.latent.mT
    if query.channel is not None and cache.channel is not None:
        scores = scores + query.channel @ cache.channel.mT
    scores = add_mask(scores[:, :, None] * scaling, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return weights[:, :, 0] @ cache.latent, weights


def add_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores with a boolean mask (True where to attend) or an additive one applied."""
    if mask is None:
        return scores
    mask = mask[..., : scores.shape[-1]]
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
