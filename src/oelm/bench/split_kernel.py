"""One token's attention over plain keys and values as a Triton kernel, also where these are stored in 8 bits.

It is what the forms of attention are measured against, so it must be fast: the cache is cut into parts, so that a small
batch occupies the whole GPU too; every part has its own softmax, and a second, small kernel combines the parts. Query
heads that share a key are handled together, so that a key is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.attention.keys_kernel import join_parts

# Places in a tile -> Triton's launch options: how many tiles are on their way from memory follows from the stages.
TILES: dict[int, dict[str, int]] = {64: {"num_warps": 4, "num_stages": 4}, 128: {"num_warps": 4, "num_stages": 3}}
# Parts in total, over the whole batch and all heads, and the smallest number of tiles in a part.
_PARTS, _TILES_PER_PART = 1024, 2


@dataclass(frozen=True)
class CachedPairs:
    """A cache of keys and values, each (batch, key-value heads, places, dimensions), of which `length` are filled.

    With `scales` (2, key-value heads) they are 8-bit floats stored as bytes, to be multiplied by their head's scale.
    """

    key: Tensor
    value: Tensor
    length: Tensor
    scales: Tensor | None = None


def attend_in_parts(query: Tensor, cache: CachedPairs, scaling: float, tile: int) -> Tensor:
    """Return the output (batch, heads, d_value) of one token's query (batch, heads, 1, d_key)."""
    batch, kv_heads, places, d_key = cache.key.shape
    heads, d_value = query.shape[1], cache.value.shape[-1]
    pairs = batch * kv_heads
    parts = max(1, min(_PARTS // pairs, places // (tile * _TILES_PER_PART)))
    each = -(-places // (parts * tile)) * tile
    sums = torch.empty(batch, heads, parts, d_value, dtype=torch.float32, device=query.device)
    tops = torch.empty(batch, heads, parts, 2, dtype=torch.float32, device=query.device)
    group = heads // kv_heads
    fixed: dict[str, Any] = {"SCALING": scaling * math.log2(math.e), "KV_HEADS": kv_heads, "GROUP": group}
    fixed |= {"ROWS": _padded(group), "TILE": tile, "FLOAT8": cache.scales is not None}
    fixed |= {"D_KEY": d_key, "WIDE_KEY": _padded(d_key), "D_VALUE": d_value, "WIDE_VALUE": _padded(d_value)}
    scales = cache.length if cache.scales is None else cache.scales
    _attend_part[(pairs, parts)](
        query.contiguous(), cache.key, cache.value, cache.length, scales, sums, tops, each,
        *cache.key.stride(), *cache.value.stride(), **fixed, **TILES[tile],
    )  # fmt: skip
    out = torch.empty(batch, heads, d_value, dtype=query.dtype, device=query.device)
    join_parts[(batch * heads,)](sums, tops, out, parts, D_VALUE=d_value, WIDE_VALUE=_padded(d_value), num_warps=1)
    return out


def _padded(size: int) -> int:
    """Return a size as Triton's matrix product takes it: a power of two, and at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def _attend_part(
    query, key, value, length, scales, sums, tops, each,
    key_by_batch, key_by_head, key_by_place, key_by_dim, value_by_batch, value_by_head, value_by_place, value_by_dim,
    SCALING: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    FLOAT8: tl.constexpr, D_KEY: tl.constexpr, WIDE_KEY: tl.constexpr, D_VALUE: tl.constexpr, WIDE_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute one part of one key-value head: per query head the values weighted by 2^(score - top), top and sum."""
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, head = pair // KV_HEADS, pair % KV_HEADS
    row, place = tl.arange(0, ROWS), tl.arange(0, TILE)
    key_dim, value_dim = tl.arange(0, WIDE_KEY), tl.arange(0, WIDE_VALUE)
    is_head = row < GROUP
    own = pair * GROUP + row  # the query heads of this key-value head, counted over the whole batch
    in_query = is_head[:, None] & (key_dim < D_KEY)[None, :]
    asked = tl.load(query + own[:, None] * D_KEY + key_dim[None, :], mask=in_query, other=0.0)
    factor, value_scale = SCALING, 1.0
    if FLOAT8:
        asked = asked.to(tl.float16)
        factor = SCALING * tl.load(scales + head)
        value_scale = tl.load(scales + KV_HEADS + head)
    keys = key + text * key_by_batch + head * key_by_head + key_dim[None, :] * key_by_dim
    values = value + text * value_by_batch + head * value_by_head + value_dim[None, :] * value_by_dim
    filled = tl.load(length).to(tl.int32)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixture = tl.zeros((ROWS, WIDE_VALUE), tl.float32)
    for start in range(part * each, min((part + 1) * each, filled), TILE):
        position = start + place
        visible = position < filled
        # Where no dimension was added, the mask is the same along a row, which allows wide loads.
        in_keys = visible[:, None] if D_KEY == WIDE_KEY else visible[:, None] & (key_dim < D_KEY)[None, :]
        in_values = visible[:, None] if D_VALUE == WIDE_VALUE else visible[:, None] & (value_dim < D_VALUE)[None, :]
        tile = tl.load(keys + position[:, None] * key_by_place, mask=in_keys, other=0)
        if FLOAT8:
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        scores = tl.dot(asked, tl.trans(tile)) * factor
        scores = tl.where(visible[None, :], scores, -1e30)
        # A running softmax: when a higher score is found, what was summed before is scaled down.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        tile = tl.load(values + position[:, None] * value_by_place, mask=in_values, other=0)
        if FLOAT8:
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        total = total * shrink + tl.sum(weights, 1)
        mixture = mixture * shrink[:, None] + tl.dot(weights.to(asked.dtype), tile)
        top = higher
    index = own * tl.num_programs(1) + part
    in_sums = is_head[:, None] & (value_dim < D_VALUE)[None, :]
    tl.store(sums + index[:, None] * D_VALUE + value_dim[None, :], mixture * value_scale, mask=in_sums)
    tl.store(tops + index * 2, top, mask=is_head)
    tl.store(tops + index * 2 + 1, total, mask=is_head)
