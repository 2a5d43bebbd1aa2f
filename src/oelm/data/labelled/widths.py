"""Choose the few widths that batches are padded to where code is compiled or recorded once for each shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Padded lengths are a multiple of this: GPU kernels run faster on such shapes, and there are fewer of them.
LENGTH_MULTIPLE = 8
# Fewer widths are taken where they lead to at most this share more tokens, padding included.
_MORE_TOKENS = 0.01
# A sum of tokens that no data has, and that does not overflow when more is added to it.
_IMPOSSIBLE = 2**60

# Rising; empty where every batch is padded to its own longest text.
Widths = tuple[int, ...]


def round_up(length: int) -> int:
    """Return the next multiple of `LENGTH_MULTIPLE`."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def padded_width(length: int, widths: Widths) -> int:
    """Return the smallest of the widths that holds `length` tokens, and where none does, the next multiple of 8.

    Only texts of a split that is not validated on during training can be longer than the largest width.
    """
    return next((width for width in widths if width >= length), round_up(length))


def plan_widths(longest: npt.NDArray[np.int64], limit: int, most: int) -> Widths:
    """Return at most `most` widths for batches whose longest texts have these lengths, with the least padding.

    The largest width holds `limit` tokens, the length of the longest text of all. This is exact, by dynamic
    programming: `tokens[n][i]` is the least sum of widths over the batches up to candidate i, with n widths of which
    candidate i is the largest.
    """
    rounded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    candidates = np.union1d(rounded, [round_up(limit)])
    batches = np.cumsum([np.count_nonzero(rounded == width) for width in candidates])
    count = len(candidates)
    tokens = [candidates * batches]  # one width for all batches
    before: list[npt.NDArray[np.int64]] = []
    for _ in range(1, min(most, count)):
        # With candidate i as the largest width, the batches above candidate j, the next smaller one, are padded to it.
        sums = tokens[-1][None, :] + candidates[:, None] * (batches[:, None] - batches[None, :])
        sums = np.where(np.tri(count, k=-1, dtype=bool), sums, _IMPOSSIBLE)
        before.append(sums.argmin(1))
        tokens.append(sums.min(1))
    totals = [int(sums[-1]) for sums in tokens]
    number = next(n for n, total in enumerate(totals) if total <= (1 + _MORE_TOKENS) * min(totals))
    widths, last = [int(candidates[-1])], count - 1
    for level in reversed(range(number)):
        last = int(before[level][last])
        widths.append(int(candidates[last]))
    return tuple(reversed(widths))
