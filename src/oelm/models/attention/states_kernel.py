"""The mixture of cached states as one Triton kernel: a tile of states is read once and serves as key and as value.

The cache is cut into parts, so that a small batch occupies the whole GPU too. Every part has its own softmax, and a
second, small kernel combines the parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens in a tile, the smallest number of tiles in a part, and Triton's launch options.
_TILE = 32
_TILES = 4
_LAUNCH = {"num_warps": 4, "num_stages": 2}
# Parts in total, over the whole batch: a few for each multiprocessor of a large GPU.
_PARTS = 512


def mix_on_gpu(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return every head's mixture (batch, heads, width) of states (batch, heads, tokens, d_head)."""
    batch, heads, tokens, d_head = states.shape
    width = heads * d_head
    parts = max(1, min(_PARTS // batch, tokens // (_TILE * _TILES)))
    each = -(-tokens // (parts * _TILE)) * _TILE
    sums = torch.empty(batch, parts, heads, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(batch, parts, heads, 2, dtype=torch.float32, device=query.device)
    mask_kind, mask_strides = "none", (0, 0)
    if mask is not None:
        mask = mask.expand(batch, 1, 1, mask.shape[-1])
        mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
        mask_strides = mask.stride(0), mask.stride(3)
    rows, columns = _padded(heads, d_head)
    wide: dict[str, Any] = {"WIDTH": width, "WIDE": columns}
    _mix_part[(batch, parts)](
        query.contiguous(), states, query if mask is None else mask, sums, tops,
        tokens, each, scaling, *states.stride(), *mask_strides,
        HEADS=heads, D_HEAD=d_head, ROWS=rows, TILE=_TILE, MASK=mask_kind, **wide, **_LAUNCH,
    )  # fmt: skip
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    _join_parts[(batch, heads)](sums, tops, out, parts, HEADS=heads, **wide, num_warps=4)
    return out


def shared_bytes(heads: int, d_head: int) -> int:
    """Return an upper bound of the shared memory of a part: a tile, the queries spread over its width, small arrays."""
    rows, columns = _padded(heads, d_head)
    return (_TILE + rows) * columns * 2 + 12 * 1024


def _padded(heads: int, d_head: int) -> tuple[int, int]:
    """Return heads and width as Triton needs them: powers of two, and at least 16 rows for a matrix product."""
    return max(16, 1 << (heads - 1).bit_length()), 1 << (heads * d_head - 1).bit_length()


@triton.jit
def _mix_part(
    query, states, mask, sums, tops, tokens, each, scaling,
    by_batch, by_head, by_token, by_channel, mask_by_batch, mask_by_token,
    HEADS: tl.constexpr, D_HEAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one part of one text: per head the states weighted by exp(score - top), the top score and the sum."""
    text, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, token = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, TILE)
    real = column < WIDTH
    in_head = (column // D_HEAD)[None, :] == row[:, None]
    flat = tl.load(query + text * WIDTH + column, mask=real, other=0.0)
    # Row h holds head h's query at its slice of a state and zeros elsewhere, so that one product scores all heads.
    spread = tl.where(in_head, flat[None, :], 0.0).to(flat.dtype)
    channel = (column // D_HEAD) * by_head + (column % D_HEAD) * by_channel
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixture = tl.zeros((ROWS, WIDE), tl.float32)
    factor = tl.cast(scaling, tl.float32)  # a compiled model passes its floats as doubles
    for start in range(part * each, min((part + 1) * each, tokens), TILE):
        position = start + token
        exists = position < tokens
        tile = tl.load(
            states + text * by_batch + position[:, None].to(tl.int64) * by_token + channel[None, :],
            mask=exists[:, None] & real[None, :],
            other=0.0,
        )
        scores = tl.dot(spread, tl.trans(tile)) * factor
        if MASK == "boolean":
            visible = tl.load(mask + text * mask_by_batch + position * mask_by_token, mask=exists, other=0) != 0
            scores = tl.where(visible[None, :], scores, -1e30)
        elif MASK == "additive":
            added = tl.load(mask + text * mask_by_batch + position * mask_by_token, mask=exists, other=0.0)
            scores = tl.maximum(scores + added[None, :].to(tl.float32), -1e30)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        # A running softmax: when a higher score is found, what was summed before is scaled down.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixture = mixture * shrink[:, None] + tl.dot(weights.to(tile.dtype), tile)
        top = higher
    index = (text * tl.num_programs(1) + part) * HEADS + row
    is_head = row < HEADS
    tl.store(sums + index[:, None] * WIDTH + column[None, :], mixture, mask=is_head[:, None] & real[None, :])
    tl.store(tops + index * 2, top, mask=is_head)
    tl.store(tops + index * 2 + 1, total, mask=is_head)


@triton.jit
def _join_parts(sums, tops, out, parts, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Combine the parts of one head of one text, each scaled by its top score relative to the highest one."""
    text, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDE)
    real = column < WIDTH
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    mixture = tl.zeros((WIDE,), tl.float32)
    for part in range(parts):
        index = (text * parts + part) * HEADS + head
        top_of_part = tl.load(tops + index * 2)
        higher = tl.maximum(top, top_of_part)
        shrink, weight = tl.exp(top - higher), tl.exp(top_of_part - higher)
        total = total * shrink + tl.load(tops + index * 2 + 1) * weight
        mixture = mixture * shrink + tl.load(sums + index * WIDTH + column, mask=real, other=0.0) * weight
        top = higher
    tl.store(out + (text * HEADS + head) * WIDTH + column, (mixture / total).to(out.dtype.element_ty), mask=real)
