"""The mixture of cached states as one Triton kernel: a tile of states is read once and serves as key and as value.

A cache is cut into parts so that a small batch fills the GPU too; every part has its own softmax, and a second, small
kernel puts them together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens in a tile, the tiles that a part has at least, and how a part is run.
_TILE = 32
_TILES = 4
_LAUNCH = {"num_warps": 4, "num_stages": 2}
# Parts to have in all, over the batch: a few for each multiprocessor of a large GPU.
_PARTS = 512


def mix_on_gpu(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    batch, heads, tokens, d_head = states.shape
    width = heads * d_head
    parts = max(1, min(_PARTS // batch, tokens // (_TILE * _TILES)))
    each = -(-tokens // (parts * _TILE)) * _TILE
    sums = torch.empty(batch, parts, heads, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(batch, parts, heads, 2, dtype=torch.float32, device=query.device)
    if mask is not None:
        mask = mask.expand(batch, 1, 1, mask.shape[-1])
    rows, columns = _padded(heads, d_head)
    wide: dict[str, Any] = {"WIDTH": width, "WIDE": columns}
    _mix_part[(batch, parts)](
        query.contiguous(), states, query if mask is None else mask, sums, tops,
        tokens, each, scaling,
        *states.stride(), 0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(3),
        HEADS=heads, D_HEAD=d_head, ROWS=rows, TILE=_TILE, MASK=_kind(mask), **wide, **_LAUNCH,
    )  # fmt: skip
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    _join_parts[(batch, heads)](sums, tops, out, parts, HEADS=heads, **wide, num_warps=4)
    return out


def shared_bytes(heads: int, d_head: int) -> int:
    """The shared memory that a part needs, from above: a tile, the queries spread over its width, and what is small."""
    rows, columns = _padded(heads, d_head)
    return (_TILE + rows) * columns * 2 + 12 * 1024


def _padded(heads: int, d_head: int) -> tuple[int, int]:
    """Heads and width as Triton wants them: powers of two, and 16 rows at least for a matrix product."""
    return max(16, 1 << (heads - 1).bit_length()), 1 << (heads * d_head - 1).bit_length()


def _kind(mask: Tensor | None) -> str:
    return "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"


@triton.jit
def _mix_part(
    query, states, mask, sums, tops, tokens, each, scaling,
    by_batch, by_head, by_token, by_channel, mask_by_batch, mask_by_token,
    HEADS: tl.constexpr, D_HEAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One part of one text: the states' mixture by exp(score - top) for every head, that top, and the sum."""
    text, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, token = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, TILE)
    real = column < WIDTH
    own = (column // D_HEAD)[None, :] == row[:, None]
    flat = tl.load(query + text * WIDTH + column, mask=real, other=0.0)
    spread = tl.where(own, flat[None, :], 0.0).to(flat.dtype)  # row h is head h's query, at its slice of a state
    channel = (column // D_HEAD) * by_head + (column % D_HEAD) * by_channel
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixture = tl.zeros((ROWS, WIDE), tl.float32)
    factor = tl.cast(scaling, tl.float32)  # a compiled model hands its floats over as doubles
    for start in range(part * each, min((part + 1) * each, tokens), TILE):
        here = start + token
        there = here < tokens
        tile = tl.load(
            states + text * by_batch + here[:, None].to(tl.int64) * by_token + channel[None, :],
            mask=there[:, None] & real[None, :],
            other=0.0,
        )
        scores = tl.dot(spread, tl.trans(tile)) * factor
        if MASK == "boolean":
            seen = tl.load(mask + text * mask_by_batch + here * mask_by_token, mask=there, other=0) != 0
            scores = tl.where(seen[None, :], scores, -1e30)
        elif MASK == "additive":
            added = tl.load(mask + text * mask_by_batch + here * mask_by_token, mask=there, other=0.0)
            scores = tl.maximum(scores + added[None, :].to(tl.float32), -1e30)
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixture = mixture * shrink[:, None] + tl.dot(weights.to(tile.dtype), tile)
        top = higher
    place = (text * tl.num_programs(1) + part) * HEADS + row
    some = row < HEADS
    tl.store(sums + place[:, None] * WIDTH + column[None, :], mixture, mask=some[:, None] & real[None, :])
    tl.store(tops + place * 2, top, mask=some)
    tl.store(tops + place * 2 + 1, total, mask=some)


@triton.jit
def _join_parts(sums, tops, out, parts, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """One head of one text: the mixtures of all parts, each weighted by where its top stands among theirs."""
    text, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDE)
    real = column < WIDTH
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    mixture = tl.zeros((WIDE,), tl.float32)
    for part in range(parts):
        place = (text * parts + part) * HEADS + head
        own = tl.load(tops + place * 2)
        higher = tl.maximum(top, own)
        shrink, weight = tl.exp(top - higher), tl.exp(own - higher)
        total = total * shrink + tl.load(tops + place * 2 + 1) * weight
        mixture = mixture * shrink + tl.load(sums + place * WIDTH + column, mask=real, other=0.0) * weight
        top = higher
    tl.store(out + (text * HEADS + head) * WIDTH + column, (mixture / total).to(out.dtype.element_ty), mask=real)
