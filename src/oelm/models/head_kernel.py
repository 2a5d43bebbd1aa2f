"""The cross-entropy of logits and its gradient in Triton: each logit is read twice and overwritten once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most columns that a program has in registers at once, and the columns for each of its warps: of sixteen such pairs
# the fastest on an H200 with 50,257 classes.
_MOST_COLUMNS, _COLUMNS_OF_WARP = 4096, 512
_TO_BASE_2 = tl.constexpr(1.4426950408889634)


def replace_by_gradient(logits: Tensor, targets: Tensor, classes: int, ignored: int) -> Tensor:
    """Return the loss of every row of logits (rows, columns), and overwrite the logits with its gradient.

    Columns from `classes` on are filling: they have no part in the loss, and a gradient of 0. So has a row whose target
    is `ignored`. The number of columns is best a multiple of 64, so that a thread loads several at once.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_MOST_COLUMNS, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _replace[(rows,)](
            logits, logits.stride(0), targets, losses, ignored,
            CLASSES=classes, COLUMNS=columns, BLOCK=block, num_warps=max(1, block // _COLUMNS_OF_WARP),
        )  # fmt: skip
    return losses


@triton.jit
def _replace(
    logits, by_row, targets, losses, ignored,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * by_row
    target = tl.load(targets + row)
    counts = target != ignored
    # Before any of the row is overwritten, by whichever thread.
    at_target = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    top = float("-inf")
    total = 0.0
    score = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, CLASSES, BLOCK):
        score = _scores(logits, start, CLASSES, COLUMNS, BLOCK)
        higher = tl.maximum(top, tl.max(score, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(score - higher), 0)
        top = higher
    log_total = top + tl.log2(total)
    tl.store(losses + row, tl.where(counts, log_total / _TO_BASE_2 - at_target, 0.0))
    for start in tl.static_range(0, COLUMNS, BLOCK):
        if COLUMNS > BLOCK:
            score = _scores(logits, start, CLASSES, COLUMNS, BLOCK)
        column = start + tl.arange(0, BLOCK)
        gradient = tl.exp2(score - log_total) - tl.where(column == target, 1.0, 0.0)
        tl.store(logits + column, tl.where(counts, gradient, 0.0), mask=column < COLUMNS)


@triton.jit
def _scores(logits, start, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of a row's logits times log2(e), minus infinity where there is no class."""
    column = start + tl.arange(0, BLOCK)
    # The mask ends at a multiple of 64: with one that ends at any class, a thread would load its columns one by one.
    score = tl.load(logits + column, mask=column < COLUMNS, other=float("-inf")).to(tl.float32) * _TO_BASE_2
    return tl.where(column < CLASSES, score, float("-inf"))
