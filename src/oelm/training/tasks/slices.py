"""Slices of a language model's loss: what its targets repeat, how frequent they are, and where they stand.

Every target is in one slice of each part, so the slices of a part add up to the whole loss:

recall      `hit`: the target and the token before it were such a pair earlier in the window, so that looking back
            predicts it; `rest`: they were not
frequency   both of these by how often that pair is in the training text, per million tokens: `never`, `rare` (below
            10), `common` (below 100), `frequent`
repeat      how many tokens up to the target were together earlier in the window: 0, 1, 2-3, 4-7, 8+
position    how many tokens the model has read: 1-16, 17-32, 33-64 and so on, up to the window's length

The tokens alone decide this, so runs on the same data have the same slices. Records are compared by these names: slices
that are defined anew need new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.corpus.batches import Windows

REPEATS = ("0", "1", "2-3", "4-7", "8+")
FREQUENCIES = ("never", "rare", "common", "frequent")
# Pairs with fewer occurrences in a million tokens of the training text are rare, and common.
_RARE, _COMMON = 10, 100
# Of a longer training text, pairs are counted in this many tokens, in pieces spread evenly over it.
_MOST_COUNTED, _PIECE = 1 << 23, 1 << 19
# The last position of the first band; every further band is as long as all before it.
_FIRST_BAND = 16
# Windows whose slices are computed at a time.
_BLOCK = 256
# The repeat from which on a target is a hit: a pair.
_PAIR = 2

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PairFrequencies:
    """How frequent pairs of tokens are in a training text, as numbers of FREQUENCIES."""

    text: npt.NDArray[Any]
    vocab_size: int

    def of(self, windows: Numbers) -> npt.NDArray[np.uint8]:
        """Return the frequency of each pair of neighbours in the rows."""
        known, frequency = self._table
        pairs, where = np.unique(self._pairs(windows), return_inverse=True)
        place = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
        return np.where(known[place] == pairs, frequency[place], 0)[where].reshape(len(windows), -1)

    @cached_property
    def _table(self) -> tuple[Numbers, npt.NDArray[np.uint8]]:
        """Return the different pairs of the text, sorted, and the frequency of each."""
        pairs = np.sort(np.concatenate([self._pairs(piece) for piece in self._pieces()]))
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(first, append=len(pairs))
        per_million = counts * 1e6 / len(pairs)
        return pairs[first], np.digitize(per_million, (0, _RARE, _COMMON)).astype(np.uint8)

    def _pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the text or, of a long one, pieces that are spread evenly over it."""
        if len(self.text) <= _MOST_COUNTED:
            yield self.text
            return
        for start in np.linspace(0, len(self.text) - _PIECE, _MOST_COUNTED // _PIECE).astype(np.int64).tolist():
            yield self.text[start : start + _PIECE]

    def _pairs(self, tokens: Any) -> Numbers:
        """Return a number for each pair of neighbours along the last axis."""
        ids = np.asarray(tokens).astype(np.int64)
        return ids[..., :-1] * self.vocab_size + ids[..., 1:]


@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of the targets in windows of text, one number for each; computed on first use and kept."""

    windows: Windows
    frequencies: PairFrequencies
    _blocks: dict[int, npt.NDArray[np.uint16]] = field(default_factory=dict, init=False)

    @cached_property
    def bands(self) -> list[str]:
        """Return the names of the slices by position."""
        length, ends = self.windows.length, [_FIRST_BAND]
        while ends[-1] < length:
            ends.append(2 * ends[-1])
        return [f"{start + 1}-{min(end, length)}" for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.bands), len(REPEATS), len(FREQUENCIES)

    @property
    def count(self) -> int:
        """Return how many numbers there are: one for each combination of the parts' slices."""
        return int(np.prod(self._shape))

    def numbers(self, first: int, count: int) -> npt.NDArray[np.uint16]:
        """Return the numbers of the targets of windows `first` to `first + count - 1`, in rows."""
        last = first + count - 1
        blocks = [self._block(number) for number in range(first // _BLOCK, last // _BLOCK + 1)]
        start = first % _BLOCK
        return np.concatenate(blocks)[start : start + count]

    def _block(self, number: int) -> npt.NDArray[np.uint16]:
        if number not in self._blocks:
            windows = self.windows.sequential(number * _BLOCK, _BLOCK)
            band = np.searchsorted([int(name.split("-")[1]) for name in self.bands], np.arange(1, windows.shape[1]))
            parts = np.broadcast_arrays(band, repeats(windows), self.frequencies.of(windows))
            self._blocks[number] = np.ravel_multi_index(parts, self._shape).astype(np.uint16)
        return self._blocks[number]

    def by_part(self, losses: npt.ArrayLike, tokens: npt.ArrayLike) -> dict[str, dict[str, dict[str, Any]]]:
        """Return mean loss and tokens of every slice that has any, from the sums for each number."""
        summed = np.stack([np.reshape(losses, self._shape), np.reshape(tokens, self._shape)])
        hit, rest = summed[:, :, _PAIR:].sum(2), summed[:, :, :_PAIR].sum(2)  # by band and frequency
        named = {
            "recall": {"hit": hit.sum((1, 2)), "rest": rest.sum((1, 2))},
            "frequency": {
                f"{name} {frequency}": sums.sum(1)[:, index]
                for name, sums in (("hit", hit), ("rest", rest))
                for index, frequency in enumerate(FREQUENCIES)
            },
            "repeat": dict(zip(REPEATS, summed.sum((1, 3)).T, strict=True)),
            "position": dict(zip(self.bands, summed.sum((2, 3)).T, strict=True)),
        }
        return {
            part: {
                name: {"loss": float(loss / count), "tokens": int(count)}
                for name, (loss, count) in slices.items()
                if count
            }
            for part, slices in named.items()
        }


def repeats(windows: Numbers) -> Numbers:
    """Return for each target in rows of tokens how much up to it was there before, as numbers of REPEATS.

    Whether a token, a pair, four and eight tokens were there is looked up in turn. The tokens in a row get their ranks,
    so that two neighbouring groups of tokens are one number of the next size.
    """
    length = windows.shape[1] - 1
    ranks, seen = _ranks(windows)
    repeated = seen[:, 1:].astype(np.int64)
    for size in (1, 2, 4):  # of the groups that are put together
        if ranks.shape[1] <= size:
            break
        ranks, seen = _ranks(ranks[:, :-size] * (length + 1) + ranks[:, size:])
        repeated[:, length - seen.shape[1] :] += seen
    return repeated


def _ranks(groups: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Return for each number the rank of its value in its row, and whether that value was in the row before."""
    bits = groups.shape[1].bit_length()
    # One sort of value and place together is several times faster than one that returns the order.
    ordered = np.sort(groups << bits | np.arange(groups.shape[1]), axis=1)
    values, places = ordered >> bits, ordered & ((1 << bits) - 1)
    new = np.diff(values, axis=1, prepend=-1) != 0
    ranks, seen = np.empty_like(groups), np.empty(groups.shape, dtype=np.bool_)
    np.put_along_axis(ranks, places, np.cumsum(new, axis=1) - 1, axis=1)
    np.put_along_axis(seen, places, ~new, axis=1)
    return ranks, seen
