"""One new token's mixture of cached latents in Triton: a tile of latents is read once, as key and as value.

The cache is cut into parts, so that a small batch occupies the whole GPU too. Every part has its own softmax, and a
second, small kernel joins the parts and multiplies their mixture by the heads' values.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latent_launch import HEADS_AT_ONCE, Device, launch_options, padded_columns
from .visible import Visible

# Content and channel of the query, or latent and channel of the cache.
Parts = tuple[Tensor, Tensor | None]
# The second kernel joins at most so many parts at a time, and numbers of them; the rows of the values in a program.
_JOINED_PARTS, _JOINED_NUMBERS, _VALUE_ROWS = 16, 8192, 32


def read_on_gpu(query: Parts, cache: Parts, values: Tensor, visible: Visible, scaling: float, device: Device) -> Tensor:
    """Return every head's output (batch, heads, d_value), as `read_latents` does."""
    (content, rotary), (latent, channel) = query, cache
    (batch, heads, _), (_, tokens, r), d_value = content.shape, latent.shape, values.shape[1]
    p = 0 if channel is None else channel.shape[-1]
    programs = batch * -(-heads // HEADS_AT_ONCE)
    launch, parts = launch_options(r, p, programs, tokens, device)
    parts = parts_in_use(tokens, launch.tile, parts)
    # What a part sums up, and each head's highest score and sum of weights; of a whole text, its mixture.
    exact = content.dtype if parts == 1 else torch.float32
    sums = torch.empty(batch, parts, heads, r, dtype=exact, device=content.device)
    tops = torch.empty(batch, parts, heads, 2, dtype=exact, device=content.device) if parts > 1 else sums
    wide, rest, channel_columns = padded_columns(r, p)
    _mix_part[(programs, parts)](
        *_with_strides(content, sums), *_with_strides(rotary, sums),
        *_with_strides(latent, sums), *_with_strides(channel, sums),
        *visible_with_strides(visible, sums), sums, tops, tokens, scaling * math.log2(math.e),
        HEADS=heads, R=r, P=p, SLICED=content.shape[2] < r, ROWS=HEADS_AT_ONCE, WIDE=wide, REST=rest,
        CHANNEL=channel_columns, TILE=launch.tile, TURNED=launch.turned,
        MASK=visible.kind,
        WHOLE=parts == 1, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if parts == 1:
        return torch.bmm(sums[:, 0].transpose(0, 1), values.mT).transpose(0, 1)
    out = torch.empty(batch, heads, d_value, dtype=content.dtype, device=content.device)
    columns = wide * (2 if rest else 1)
    _join_parts[(batch * heads, -(-d_value // _VALUE_ROWS))](
        sums, tops, values, *values.stride(), out, parts, HEADS=heads, R=r, D_VALUE=d_value,
        PARTS=min(_JOINED_PARTS, _JOINED_NUMBERS // columns), COLUMNS=columns, ROWS=_VALUE_ROWS, num_warps=4,
    )  # fmt: skip
    return out


def _with_strides(tensor: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor of three dimensions and its first two strides; a stand-in where there is no tensor."""
    if tensor is None:
        return stand_in, 0, 0
    if tensor.stride(2) != 1:
        raise ValueError(f"queries and cache of strides {tensor.stride()} need contiguous rows: a last stride of 1")
    return tensor, tensor.stride(0), tensor.stride(1)


def parts_in_use(tokens: int, tile: int, parts: int) -> int:
    """Return into how many parts of whole tiles a text is cut, given how many are wanted: none is empty."""
    tiles = -(-tokens // tile)
    tiles_of_part = -(-tiles // parts)
    return -(-tiles // tiles_of_part)


def visible_with_strides(visible: Visible, stand_in: Tensor) -> tuple[Tensor, int, int, Tensor, int]:
    """Return the mask with its strides from text to text and token to token, and its ranges with theirs.

    The strides from text to text are 0 where all texts share one mask or range.
    """
    mask, ranges = visible
    of_mask, of_ranges = (stand_in, 0, 0), (stand_in, 0)
    if mask is not None:
        of_mask = mask, mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(3)
    if ranges is not None:
        of_ranges = ranges, ranges.stride(0) if ranges.shape[0] > 1 else 0
    return *of_mask, *of_ranges


# Lengths change with every token: without this, Triton would compile again for those that 16 divides.
@triton.jit(do_not_specialize=["tokens", "mask_by_text", "ranges_by_text"])
def _mix_part(
    content, content_by_text, content_by_head, rotary, rotary_by_text, rotary_by_head,
    latent, latent_by_text, latent_by_token, channel, channel_by_text, channel_by_token,
    mask, mask_by_text, mask_by_token, ranges, ranges_by_text, sums, tops, tokens, factor,
    HEADS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, REST: tl.constexpr, CHANNEL: tl.constexpr, TILE: tl.constexpr, TURNED: tl.constexpr,
    MASK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store the mixture of one part of one text, by `content` and `rotary`, the two parts of the query.

    Where the part is not the WHOLE text, store for each head the sum of the latents times 2 ** (score - top), and the
    top score and the sum of those weights, by which `_join_parts` puts the parts together.
    """
    GROUPS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    HEAD_AXIS: tl.constexpr = 1 if TURNED else 0
    text, part = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(1)
    head, token = tl.program_id(0) % GROUPS * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    content += text * content_by_text
    # The first tile waits for this load, so it comes before those of the query.
    first, end, mask_end = range_of_part(ranges + text * ranges_by_text, tokens, MASK)
    query = _turn(_load_content(content, head, content_by_head, HEADS, SLICED, 0, WIDE, R), TURNED)
    mixture = tl.zeros(query.shape, tl.float32)
    if REST > 0:
        query_rest = _turn(_load_content(content, head, content_by_head, HEADS, SLICED, WIDE, REST, R), TURNED)
        mixture_rest = tl.zeros(query_rest.shape, tl.float32)
    if P > 0:
        rotary += text * rotary_by_text
        query_rotary = _turn(_load_block(rotary, head, rotary_by_head, head < HEADS, 0, CHANNEL, P), TURNED)
    top = tl.full((ROWS,), -1e30, tl.float32)
    # The weights are summed over the tiles here and within the tile at the end, which saves a reduction per tile.
    total = _turn(tl.zeros((ROWS, TILE), tl.float32), TURNED)
    factor = tl.cast(factor, tl.float32)  # a compiled model passes its floats as doubles
    mask += text * mask_by_text
    for start in range(first, end, TILE):
        exists = start + token < end
        bias = load_bias(mask, start + token, mask_by_token, start + token < mask_end, MASK)
        row = latent + text * latent_by_text + tl.cast(start, tl.int64) * latent_by_token
        tile = _load_block(row, token, latent_by_token, exists, 0, WIDE, R)
        scores = _product(query, tl.trans(tile), tl.zeros_like(total), TURNED)
        if REST > 0:
            tile_rest = _load_block(row, token, latent_by_token, exists, WIDE, REST, R)
            scores = _product(query_rest, tl.trans(tile_rest), scores, TURNED)
        if P > 0:
            row = channel + text * channel_by_text + tl.cast(start, tl.int64) * channel_by_token
            tile_rotary = _load_block(row, token, channel_by_token, exists, 0, CHANNEL, P)
            scores = _product(query_rotary, tl.trans(tile_rotary), scores, TURNED)
        # Hidden tokens keep a finite score, so that a text with every token hidden has weights; others weigh nothing.
        scores = tl.maximum(scores * factor + tl.expand_dims(bias, HEAD_AXIS), -1e30)
        scores = tl.where(tl.expand_dims(exists, HEAD_AXIS), scores, float("-inf"))
        # A running softmax: when a higher score is found, what was summed before is scaled down.
        higher = tl.maximum(top, tl.max(scores, 1 - HEAD_AXIS))
        weights = tl.exp2(scores - tl.expand_dims(higher, 1 - HEAD_AXIS))
        shrink = tl.expand_dims(tl.exp2(top - higher), 1 - HEAD_AXIS)
        total = total * shrink + weights
        weights = weights.to(tile.dtype)
        mixture = _product(weights, tile, mixture * shrink, TURNED)
        if REST > 0:
            mixture_rest = _product(weights, tile_rest, mixture_rest * shrink, TURNED)
        top = higher
    sum_of_weights = tl.sum(total, 1 - HEAD_AXIS)
    if WHOLE:
        mixture = mixture / tl.expand_dims(sum_of_weights, 1 - HEAD_AXIS)
        if REST > 0:
            mixture_rest = mixture_rest / tl.expand_dims(sum_of_weights, 1 - HEAD_AXIS)
    index = (text * tl.num_programs(1) + part) * HEADS + head
    _store_block(sums, index, head < HEADS, _turn(mixture, TURNED), 0, WIDE, R)
    if REST > 0:
        _store_block(sums, index, head < HEADS, _turn(mixture_rest, TURNED), WIDE, REST, R)
    if not WHOLE:
        tl.store(tops + index * 2, top, mask=head < HEADS)
        tl.store(tops + index * 2 + 1, sum_of_weights, mask=head < HEADS)


@triton.jit
def _product(left, right, so_far, TURNED: tl.constexpr):
    """Add left @ right to `so_far`; where TURNED, all but `right` are held transposed."""
    if TURNED:
        out = tl.dot(tl.trans(right), left, so_far)
    else:
        out = tl.dot(left, right, so_far)
    return out


@triton.jit
def _turn(block, TURNED: tl.constexpr):
    """Transpose a block between rows of heads and the layout of products."""
    if TURNED:
        block = tl.trans(block)
    return block


@triton.jit
def _load_content(
    content, head, by_head, HEADS: tl.constexpr, SLICED: tl.constexpr,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load columns of the queries' content. Where it is SLICED, a head has only those of its own slice."""
    if SLICED:
        SLICE: tl.constexpr = WIDTH // HEADS
        column = FIRST + tl.arange(0, COLUMNS)
        own = (column // SLICE)[None, :] == head[:, None]
        block = tl.load(
            content + (column // SLICE * by_head + column % SLICE)[None, :],
            mask=own & (head < HEADS)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
    else:
        block = _load_block(content, head, by_head, head < HEADS, FIRST, COLUMNS, WIDTH)
    return block


@triton.jit
def _load_block(pointer, row, by_row, exists, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns FIRST to FIRST + COLUMNS of some rows, zeros where there is no such row or column."""
    column = FIRST + tl.arange(0, COLUMNS)
    wanted = exists[:, None]
    if FIRST + COLUMNS > WIDTH:
        wanted = wanted & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * by_row + column[None, :], mask=wanted, other=0.0)


@triton.jit
def _store_block(pointer, row, exists, block, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a block where `_load_block` would load it from, the rows being WIDTH apart."""
    column = FIRST + tl.arange(0, COLUMNS)
    wanted = exists[:, None] & (column < WIDTH)[None, :]
    tl.store(pointer + row[:, None] * WIDTH + column[None, :], block.to(pointer.dtype.element_ty), mask=wanted)


@triton.jit
def load_bias(mask, position, by_token, wanted, MASK: tl.constexpr):
    """Return what the mask adds to the scores of base 2 at these positions, 0 where it is not wanted."""
    if MASK == "boolean":
        bias = tl.where(tl.load(mask + position * by_token, mask=wanted, other=1) != 0, 0.0, -1e30)
    elif MASK == "additive":
        bias = tl.load(mask + position * by_token, mask=wanted, other=0.0).to(tl.float32) * 1.4426950408889634
    else:
        bias = tl.zeros(position.shape, tl.float32)
    return bias


@triton.jit
def range_of_part(ranges, tokens, MASK: tl.constexpr):
    """Return where this program's part of a text begins and ends, and up to where the mask must be read.

    The visible tokens are shared out evenly, so that no program has only hidden ones, or a whole tile more than
    others. Where the mask need not be read, it is not: the loop over tiles would wait for it in every tile.
    """
    first, end, mask_end = 0, tokens, tokens
    if (MASK == "boolean") | (MASK == "range"):
        first, end, mask_end = tl.load(ranges), min(tl.load(ranges + 1), tokens), tl.load(ranges + 2)
    tokens_of_part = tl.cdiv(tl.cdiv(end - first, 16), tl.num_programs(1)) * 16
    first += tl.program_id(1) * tokens_of_part
    return first, min(first + tokens_of_part, end), mask_end


@triton.jit(do_not_specialize=["parts"])
def _join_parts(
    sums, tops, values, values_by_head, values_by_row, values_by_column, out, parts,
    HEADS: tl.constexpr, R: tl.constexpr, D_VALUE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Store some rows of a head's values times its mixture, which joins its parts by their top scores and weights."""
    text, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    block = tl.load(
        values + head * values_by_head + row[:, None] * values_by_row + column[None, :] * values_by_column,
        mask=(row < D_VALUE)[:, None] & (column < R)[None, :],
        other=0.0,
    )
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    mixture = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        index = (text * parts + part) * HEADS + head
        top_of_part = tl.load(tops + index * 2, mask=part < parts, other=float("-inf"))
        total_of_part = tl.load(tops + index * 2 + 1, mask=part < parts, other=0.0)
        wanted = (part < parts)[:, None] & (column < R)[None, :]
        sum_of_part = tl.load(sums + index[:, None] * R + column[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(top, tl.max(top_of_part, 0))
        shrink, weight = tl.exp2(top - higher), tl.exp2(top_of_part - higher)
        total = total * shrink + tl.sum(total_of_part * weight, 0)
        mixture = mixture * shrink + tl.sum(sum_of_part * weight[:, None], 0)
        top = higher
    result = tl.sum(block.to(tl.float32) * mixture[None, :], 1) / total
    index = tl.program_id(0).to(tl.int64) * D_VALUE + row
    tl.store(out + index, result.to(out.dtype.element_ty), mask=row < D_VALUE)
