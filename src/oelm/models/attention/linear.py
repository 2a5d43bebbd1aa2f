"""Linear attention, a control: elu + 1 of queries and keys in place of the softmax of their products.

Out = Σ_j (φ(q) · φ(k_j)) v_j / Σ_j φ(q) · φ(k_j) with φ = elu + 1 (Katharopoulos et al. 2020). With rotary positions
φ(q) and φ(k) are rotated above the line and not below it, where the sum must stay positive (Su et al. 2021, RoFormer).

It is computed as ordinary attention is, from all pairs of tokens, so that masks and caches of every kind work: what it
can learn is that of linear attention; its speed, and its cache of keys and values, are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .interface import update_cache
from .rotary import TokenPlaces, rotate

# Below the line, where a query sees no key at all.
_SMALLEST_SUM = 1e-6


def attend_linearly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: TokenPlaces,
    cache: Cache | None,
) -> Tensor:
    """Return the output (batch, tokens, heads, d_value) of queries over the call's keys and all cached ones.

    Queries, keys and values are (batch, heads, tokens, dimensions), not rotated yet. The cache holds φ(k) and, with
    rotary positions, φ(k) rotated behind it.
    """
    query, key = F.elu(query) + 1, F.elu(key) + 1
    queries, keys = [query], [key]
    if places.rotation is not None:
        queries, keys = [query, rotate(query, places.rotation)], [key, rotate(key, places.rotation)]
    joined = torch.cat(keys, dim=-1)
    if cache is not None:
        joined, value = update_cache(cache, joined, value, module.layer_idx)
    groups = module.num_key_value_groups
    if groups > 1:
        joined, value = joined.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    visible = _visible(mask, query, joined)
    products = [
        (own @ other.mT).masked_fill(~visible, 0.0)
        for own, other in zip(queries, joined.chunk(len(queries), dim=-1), strict=True)
    ]
    total = products[0].sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    out: Tensor = products[-1] @ value / total
    return out.transpose(1, 2)


def _visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return (batch or 1, 1, queries, keys), True where a query sees a key, of any mask that transformers makes."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None:
        # As for torch's function: one token sees all, several are the first ones, whatever room a cache has behind.
        all_pairs = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        return all_pairs if queries == 1 else all_pairs.tril()
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise ValueError("scores 'linear' has no kernel of its own: set attn_implementation to 'sdpa' or 'eager'")
    mask = mask[..., :keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
