"""Masks for masked language modelling, as a pure function of a seed and the rows' numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

# The target of a place that asks for nothing, as in torch.
NO_TARGET = -100
# A word of the seed, so that masks share no random numbers with the order of the windows.
_STREAM = 0x6D61736B
# 64 random bits, shifted so far and multiplied with this, are a number from 0 to 1.
_SHIFT, _UNIT = np.uint64(11), 2.0**-53


class MaskedRows(NamedTuple):
    """Rows in which some tokens were replaced, the positions of the chosen tokens, and the tokens that stood there."""

    inputs: Rows
    positions: Rows
    targets: Rows


@dataclass(frozen=True, eq=False)
class Masking:
    """Chooses `count` ordinary tokens of every row, and replaces most of them.

    Of the chosen tokens the share `token_share` becomes the token `mask_id`, the share `random_share` some ordinary
    token, and the rest stays. `ordinary` says of each id whether its token may be chosen, or may replace another. The
    number of chosen tokens is exact, so that all rows have one shape; the shares hold on average, as each token is
    replaced or not by itself.
    """

    count: int
    mask_id: int
    ordinary: npt.NDArray[np.bool_]
    token_share: float
    random_share: float

    def mask(self, rows: Rows, first: int, seed: int) -> MaskedRows:
        """Return rows with their masks, which follow from the seed and the rows' numbers; `first` is the first one's.

        A row with too few ordinary tokens has NO_TARGET at positions that were left over.
        """
        length = rows.shape[1]
        bits = self._bits(len(rows), length, first, seed)
        keys, fates, others = np.split(bits, (length, length + self.count), axis=1)
        # The ordinary tokens with the smallest keys are chosen.
        keys = np.where(self.ordinary[rows], keys, np.iinfo(np.uint64).max)
        positions = np.sort(np.argpartition(keys, self.count - 1, axis=1)[:, : self.count], axis=1)
        tokens = np.take_along_axis(rows, positions, axis=1)
        chosen = self.ordinary[tokens]
        fate = (fates >> _SHIFT) * _UNIT
        random = self._ordinary_ids[others % np.uint64(len(self._ordinary_ids))]
        replaced = np.where(fate < self.token_share + self.random_share, random, tokens)
        replaced = np.where(fate < self.token_share, self.mask_id, replaced)
        inputs = rows.copy()
        np.put_along_axis(inputs, positions, np.where(chosen, replaced, tokens), axis=1)
        return MaskedRows(inputs, positions, np.where(chosen, tokens, NO_TARGET))

    def targets_in(self, rows: Rows) -> int:
        """Return how many tokens are chosen in these rows."""
        return int(np.minimum(self.ordinary[rows].sum(axis=1), self.count).sum())

    @cached_property
    def _ordinary_ids(self) -> Rows:
        return np.flatnonzero(self.ordinary).astype(np.int64)

    def _bits(self, rows: int, length: int, first: int, seed: int) -> npt.NDArray[np.uint64]:
        """Return the random bits of rows. Each row has its own part of one stream, which is the same in every numpy."""
        draws = length + 2 * self.count
        stream = np.random.PCG64(np.random.SeedSequence((seed, _STREAM)))
        stream.advance(first * draws)
        bits: npt.NDArray[np.uint64] = stream.random_raw(rows * draws).reshape(rows, draws)
        return bits
