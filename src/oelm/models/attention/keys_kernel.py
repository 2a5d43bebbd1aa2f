"""One new token's attention over cached keys that are the values too (K = V), in Triton.

A tile of keys is read once: it is rotated for the scores, as it is cached for the values. The cache is cut into parts,
so that a small batch occupies the whole GPU too; every part has its own softmax, and a second kernel joins the parts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latent_kernel import load_bias, parts_in_use, range_of_part, visible_with_strides
from .rotary import Rotation
from .visible import Visible

# Keys in a tile, and Triton's options of a launch.
_TILE, _WARPS, _STAGES = 64, 4, 4
# Parts in total, over the whole batch and all heads, and the smallest number of tiles in a part.
_PARTS, _TILES_PER_PART = 1024, 2


def attend_on_gpu(query: Tensor, keys: Tensor, rotation: Rotation | None, visible: Visible, scaling: float) -> Tensor:
    """Return the output (batch, heads, d) of one token's query (batch, heads, d), which is rotated already.

    Keys are (batch, tokens, key heads * d), and are rotated here by cosines and sines (1, 1, tokens, d). `visible`
    says which keys the token sees.
    """
    (batch, heads, d), tokens = query.shape, keys.shape[1]
    kv_heads = keys.shape[2] // d
    parts = max(1, min(_PARTS // (batch * kv_heads), tokens // (_TILE * _TILES_PER_PART)))
    parts = parts_in_use(tokens, _TILE, parts)
    sums = torch.empty(batch, heads, parts, d, dtype=torch.float32, device=query.device)
    tops = torch.empty(batch, heads, parts, 2, dtype=torch.float32, device=query.device)
    cosines, sines = (sums, sums) if rotation is None else (part[0, 0] for part in rotation)
    _attend_part[(batch * kv_heads, parts)](
        query.contiguous(), keys, keys.stride(0), keys.stride(1), cosines, sines, cosines.stride(0),
        *visible_with_strides(visible, sums), sums, tops, tokens, scaling * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, ROWS=max(16, 1 << (heads // kv_heads - 1).bit_length()),
        HALF=d // 2, TILE=_TILE, ROTATED=rotation is not None, MASK=visible.kind,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    out = torch.empty(batch, heads, d, dtype=query.dtype, device=query.device)
    join_parts[(batch * heads,)](sums, tops, out, parts, D_VALUE=d, WIDE_VALUE=d, num_warps=1)
    return out


@triton.jit(do_not_specialize=["tokens", "mask_by_text", "ranges_by_text"])
def _attend_part(
    query, keys, keys_by_text, keys_by_token, cosines, sines, rotation_by_token, mask, mask_by_text, mask_by_token,
    ranges, ranges_by_text, sums, tops, tokens, factor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    ROTATED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Store for each query head of a key the sum of a part's keys times 2 ** (score - top), the top, and the weights.

    A key is loaded in two halves, since a rotation turns each dimension of the first with one of the second.
    """
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, row, token, dim = pair // KV_HEADS, tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, HALF)
    own = pair * GROUP + row  # the query heads of this key, counted over the whole batch
    asked, is_head = query + own[:, None] * (2 * HALF) + dim[None, :], (row < GROUP)[:, None]
    first_query = tl.load(asked, mask=is_head, other=0.0)
    second_query = tl.load(asked + HALF, mask=is_head, other=0.0)
    keys += text * keys_by_text + pair % KV_HEADS * (2 * HALF)
    mask += text * mask_by_text
    first, end, mask_end = range_of_part(ranges + text * ranges_by_text, tokens, MASK)
    factor = tl.cast(factor, tl.float32)  # a compiled model passes its floats as doubles
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first_mixture, second_mixture = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    for start in range(first, end, TILE):
        position = start + token
        exists = position < end
        place = keys + position[:, None] * keys_by_token + dim[None, :]
        first_half = tl.load(place, mask=exists[:, None], other=0.0)
        second_half = tl.load(place + HALF, mask=exists[:, None], other=0.0)
        first_rotated, second_rotated = first_half, second_half
        if ROTATED:
            place = position[:, None] * rotation_by_token + dim[None, :]
            cosine = tl.load(cosines + place, mask=exists[:, None], other=0.0).to(tl.float32)
            sine = tl.load(sines + place, mask=exists[:, None], other=0.0).to(tl.float32)
            first_rotated = (first_half * cosine - second_half * sine).to(first_half.dtype)
            second_rotated = (second_half * cosine + first_half * sine).to(first_half.dtype)
        scores = tl.dot(first_query, tl.trans(first_rotated))
        scores = tl.dot(second_query, tl.trans(second_rotated), scores)
        bias = load_bias(mask, position, mask_by_token, position < mask_end, MASK)
        # Hidden tokens keep a finite score, so that a text with every token hidden has weights; others weigh nothing.
        scores = tl.maximum(scores * factor + bias[None, :], -1e30)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(first_half.dtype)
        first_mixture = tl.dot(weights, first_half, first_mixture * shrink[:, None])
        second_mixture = tl.dot(weights, second_half, second_mixture * shrink[:, None])
        top = higher
    index = own * tl.num_programs(1) + part
    out = sums + index[:, None] * (2 * HALF) + dim[None, :]
    tl.store(out, first_mixture, mask=is_head)
    tl.store(out + HALF, second_mixture, mask=is_head)
    tl.store(tops + index * 2, top, mask=row < GROUP)
    tl.store(tops + index * 2 + 1, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["parts"])
def join_parts(sums, tops, out, parts, D_VALUE: tl.constexpr, WIDE_VALUE: tl.constexpr):
    """Join the parts of one head of one text, each scaled by its top score relative to the highest one."""
    head = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, WIDE_VALUE)
    real = dim < D_VALUE
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    mixture = tl.zeros((WIDE_VALUE,), tl.float32)
    for part in range(parts):
        index = head * parts + part
        top_of_part = tl.load(tops + index * 2)
        higher = tl.maximum(top, top_of_part)
        shrink, weight = tl.exp2(top - higher), tl.exp2(top_of_part - higher)
        total = total * shrink + tl.load(tops + index * 2 + 1) * weight
        mixture = mixture * shrink + tl.load(sums + index * D_VALUE + dim, mask=real, other=0.0) * weight
        top = higher
    tl.store(out + head * D_VALUE + dim, (mixture / total).to(out.dtype.element_ty), mask=real)
