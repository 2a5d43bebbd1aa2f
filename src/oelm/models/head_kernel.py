"""The cross-entropy of logits and its gradient in Triton: each logit is read twice and overwritten once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most columns that a program has in registers at once. A row of no more is read from memory only once.
_MOST_COLUMNS = 8192
# Columns for a warp, of which a program has at most 16.
_COLUMNS_OF_WARP = 512


def replace_by_gradient(logits: Tensor, targets: Tensor, classes: int, ignored: int) -> Tensor:
    """Return the loss of every row of logits (rows, columns), and overwrite the logits with its gradient.

    Columns from `classes` on are filling: they have no part in the loss, and a gradient of 0. So has a row whose target
    is `ignored`.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_MOST_COLUMNS, triton.next_power_of_2(columns))
    _replace[(rows,)](
        logits, logits.stride(0), targets, losses, ignored,
        CLASSES=classes, COLUMNS=columns, BLOCK=block, num_warps=min(16, max(1, block // _COLUMNS_OF_WARP)),
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
    TO_BASE_2: tl.constexpr = 1.4426950408889634
    top = float("-inf")
    total = 0.0
    column = tl.arange(0, BLOCK)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.static_range(0, CLASSES, BLOCK):
        loaded = tl.load(logits + start + column, mask=start + column < CLASSES, other=float("-inf"))
        score = loaded.to(tl.float32) * TO_BASE_2
        higher = tl.maximum(top, tl.max(score, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(score - higher), 0)
        top = higher
    log_total = top + tl.log2(total)
    tl.store(losses + row, tl.where(counts, log_total / TO_BASE_2 - at_target, 0.0))
    for start in tl.static_range(0, COLUMNS, BLOCK):
        if COLUMNS > BLOCK:
            loaded = tl.load(logits + start + column, mask=start + column < CLASSES, other=float("-inf"))
            score = loaded.to(tl.float32) * TO_BASE_2
        gradient = tl.exp2(score - log_total) - tl.where(start + column == target, 1.0, 0.0)
        tl.store(logits + start + column, tl.where(counts, gradient, 0.0), mask=start + column < COLUMNS)
