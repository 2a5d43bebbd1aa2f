"""Attention whose cache holds one latent for keys and values, and the rotary channel beside it.

A key is U_h c and a value W_h c, where c is the latent: a projection of the hidden state, or the state itself. While
tokens are read, keys and values are computed from their latents and attention is the ordinary one. For one new token
the query goes through U_hᵀ once, its scores are products with the cached latents, and the mixture of latents goes
through W_h once: no old token's key or value is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...method.projections import IdentityProjection
from .interface import attend, split_heads, update_cache
from .latent_decode import LatentCache, LatentQuery, read_latents
from .rotary import TokenPlaces

# A query and the latent that it reads: content and channel parts of each.
Parts = tuple[Tensor, Tensor | None]


def attend_to_latents(
    module: Any, query: Parts, latent: Parts, mask: Tensor | None, places: TokenPlaces, cache: Cache, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the output (batch, tokens, heads, d_value) of a call's queries over all latents, which are cached.

    `query` has the content (batch, heads, tokens, d_key) and the rotated channel part (batch, heads, tokens, p) or
    None; `latent` has the latents (batch, tokens, r) and their rotated channel (batch, 1, tokens, p) or None.
    """
    content, channel = query
    own, own_channel = latent[0][:, None], latent[1] if latent[1] is not None else latent[0][:, None, :, :0]
    tokens = own.shape[2]
    was_empty = tokens > 1 and int(cache.get_seq_length(module.layer_idx)) == 0
    cached, cached_channel = update_cache(cache, own, own_channel, module.layer_idx)
    mask_fits_scores = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)
    if tokens == 1 and mask_fits_scores and _is_absorbed(module):
        moved, scaling = move_query(module, content, channel)
        held = LatentCache(cached[:, 0], None if channel is None else cached_channel[:, 0])
        values = module.v_proj.weight.view(content.shape[1], -1, own.shape[-1])
        fused = module.config._attn_implementation != "eager"
        out, weights = read_latents(moved, held, values, mask, scaling, visible=places.visible, fused=fused)
        return out[:, None], weights
    if was_empty and (mask is None or isinstance(mask, Tensor)):
        # The call's own latents are all there is; a preallocated cache would be expanded in its whole length.
        cached, cached_channel = own, own_channel
        mask = None if mask is None else mask[..., :tokens]
    key = split_heads(module.k_proj(cached[:, 0]), module.key_dim)
    value = split_heads(module.v_proj(cached[:, 0]), module.head_dim)
    if channel is not None:
        content = torch.cat([content, channel], dim=-1)
        key = torch.cat([key, cached_channel.expand(-1, key.shape[1], -1, -1)], dim=-1)
    return attend(module, content, key, value, mask, **kwargs)


def move_query(module: Any, content: Tensor, channel: Tensor | None) -> tuple[LatentQuery, float]:
    """Return one token's query (batch, heads, 1, d_key or p) on the latent's side, and the scaling of its scores."""
    scaling: float = module.scaling
    channel = None if channel is None else channel[:, :, 0]
    if isinstance(module.k_proj, IdentityProjection):
        # A head's key is its slice of the latent times a factor, which is taken out of both parts of the query.
        factor = module.k_proj.factor
        return LatentQuery(content[:, :, 0], None if channel is None else channel / factor), scaling * factor
    per_head: Tensor = module.k_proj.weight.view(content.shape[1], content.shape[-1], -1)
    return LatentQuery((content[:, :, 0].transpose(0, 1) @ per_head).transpose(0, 1), channel), scaling


def _is_absorbed(module: Any) -> bool:
    """Return True when key and value are plain matrices times a latent: no adapter, no core."""
    return type(module.v_proj) is nn.Linear and type(module.k_proj) in (nn.Linear, IdentityProjection)
