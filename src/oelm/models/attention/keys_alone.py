"""Attention whose cache holds keys alone, before their rotation: for K = V, and for an orthogonal key.

A value follows from its key: it is the key itself, or W_v W_kᵀ k where W_k is orthogonal. Keys are rotated when they
are read, each by its place in the cache; only distances between tokens count, so padding on the left does no harm. For
one new token a GPU kernel does that with K = V; an orthogonal key's values are computed by torch for the whole cache.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .interface import attend, split_heads, update_cache
from .latent_decode import suit_a_kernel
from .rotary import TokenPlaces, rotate
from .visible import Visible

# How far from orthogonal a key's matrix may be: rounding of 16-bit weights, and training steps of a parametrised one.
_TOLERANCE = 1e-2


def attend_to_keys(
    module: Any,
    own: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    places: TokenPlaces,
    cache: Cache,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (batch, tokens, heads, d_value) of a call's queries over all keys, which are cached.

    `own` has the call's own query, key and value (batch, heads, tokens, dim), not rotated yet.
    """
    (query, key, value), rotary = own, places.rotary
    batch, kv_heads, tokens, d_key = key.shape
    start = cache.get_seq_length(module.layer_idx)
    was_empty = (tokens > 1 or not _is_recorded(key)) and int(start) == 0
    # Added up before the update: a preallocated cache counts its tokens in place.
    own_places = start + torch.arange(tokens, device=key.device)[None]
    if not module.config.shared_kv and was_empty:
        require_orthogonal(module)
    flat = key.transpose(1, 2).reshape(batch, 1, tokens, kv_heads * d_key)
    cached, _ = update_cache(cache, flat, flat[..., :0], module.layer_idx)
    if tokens == 1 and module.config.shared_kv and _is_for_kernel(module, query, cached, mask):
        from .keys_kernel import attend_on_gpu

        rotation = None
        if rotary is not None:
            query = rotate(query, rotary(own_places, query.dtype))
            rotation = rotary(torch.arange(cached.shape[2], device=key.device)[None], key.dtype)
        scaling = kwargs.get("scaling", module.scaling)
        visible = places.visible or Visible.of(mask)
        return attend_on_gpu(query[:, :, 0], cached[:, 0], rotation, visible, scaling)[:, None], None
    if was_empty and (mask is None or isinstance(mask, Tensor)):
        mask = None if mask is None else mask[..., :tokens]
    else:
        key = split_heads(cached[:, 0], d_key)
        value = key if module.config.shared_kv else split_heads(_values_of(module, cached[:, 0]), module.head_dim)
    if rotary is not None:
        all_places = torch.arange(key.shape[2], device=key.device)[None]
        query = rotate(query, rotary(own_places, query.dtype))
        key = rotate(key, rotary(all_places, key.dtype))
    return attend(module, query, key, value, mask, **kwargs)


def require_orthogonal(module: Any) -> None:
    """Raise unless the key's matrix is orthogonal, so that its transpose undoes it, and nothing else acts on keys."""
    for name in ("k_proj", "v_proj"):
        projection = getattr(module, name)
        if not isinstance(projection, nn.Linear):
            kind = f"{type(projection).__module__}.{type(projection).__name__}"
            raise ValueError(
                f"cache 'keys' recovers values from keys by their matrices alone, but {name} of layer "
                f"{module.layer_idx} is a {kind}: set cache to 'auto'"
            )
    weight = module.k_proj.weight.detach().float()
    error = float((weight @ weight.mT - torch.eye(weight.shape[0], device=weight.device)).abs().max())
    if not error <= _TOLERANCE:
        raise ValueError(
            f"cache 'keys' recovers values from keys, which needs an orthogonal key matrix, but in layer "
            f"{module.layer_idx} |W Wᵀ - I| is {error:.1e}: set orthogonal_key, or freeze an orthogonal key over all "
            "heads (k: {init: orthogonal, scope: global, frozen: true}), or set cache to 'auto'"
        )


def _is_for_kernel(module: Any, query: Tensor, cached: Tensor, mask: Tensor | None) -> bool:
    d_key = query.shape[-1]
    return (
        module.config._attn_implementation == "sdpa"
        and (mask is None or mask.ndim == 4)
        and suit_a_kernel([query, cached], mask)
        and d_key >= 32
        and d_key & (d_key - 1) == 0
        and _runs_triton(query.device.index)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _runs_triton(index: int) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_properties(index).major >= 8


def _is_recorded(tensor: Tensor) -> bool:
    """Return True in code that is compiled or recorded: for single tokens it cannot read how full a cache is."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _values_of(module: Any, keys: Tensor) -> Tensor:
    """Return the values of cached keys (batch, tokens, width): W_v times the hidden state, W_kᵀ times the key."""
    return F.linear(keys, module.v_proj.weight @ module.k_proj.weight.mT)
