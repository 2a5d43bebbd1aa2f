"""Batches as a pure function of seed and position: there is no iterator state to save or restore."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from .tokens import Tokens

Batch = npt.NDArray[np.int64]
Order = npt.NDArray[np.int64]


def permutation(seed: int, epoch: int, size: int) -> Order:
    """Return the order of the windows in one epoch.

    It sorts raw 64-bit outputs instead of calling numpy's shuffle, so that it is the same in every version of numpy:
    the raw stream of a bit generator is fixed, the algorithms of `Generator` are not.
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(keys, kind="stable")


class Windows:
    """A corpus cut into windows of `length + 1` tokens, in an order fixed by `seed` for each epoch.

    Window w covers tokens w * length to w * length + length, both included: its first `length` tokens are inputs,
    its last `length` are targets. Every token but the first of the corpus is a target in exactly one window of an
    epoch; fewer than `length` tokens at the end of the corpus are left over.

    Sample i of a run, counted from 0 without end, belongs to epoch i // count and is the window at index i % count of
    that epoch's permutation. `fraction` keeps only the first share of the tokens. `text` names the tokens in errors.
    """

    def __init__(
        self, tokens: Tokens, length: int, seed: int = 0, fraction: float = 1.0, text: str = "the corpus"
    ) -> None:
        if length < 1:
            raise DataError(f"length {length}: a window needs at least 1 input token")
        if seed < 0:
            raise DataError(f"seed {seed}: must not be negative")
        if not 0.0 < fraction <= 1.0:
            raise DataError(f"fraction {fraction}: must be above 0 and at most 1")
        size = len(tokens) if fraction == 1.0 else int(len(tokens) * fraction)
        if size < length + 1:
            share = "" if fraction == 1.0 else f" (the first {fraction:g} of {len(tokens):,})"
            raise DataError(
                f"a window needs {length + 1:,} tokens, {text} has {size:,}{share}: "
                "use a shorter length (data.sequence_length) or more text"
            )
        # A plain array view, since slicing a memmap object is several times slower.
        self.tokens = np.asarray(tokens)[:size]
        self.length = length
        self.seed = seed
        self.count = (size - 1) // length
        # Two orders are kept, since a batch may straddle two epochs; the next batch needs no others.
        self._order = lru_cache(maxsize=2)(partial(permutation, seed, size=self.count))

    def __len__(self) -> int:
        return self.count

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first to first + count - 1 as rows of length + 1 ids; they may reach into later epochs."""
        self._check(first, count)
        windows = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, index = divmod(first + done, self.count)
            taken = min(count - done, self.count - index)
            windows[done : done + taken] = self._order(epoch)[index : index + taken]
            done += taken
        return self._gather(windows)

    def sequential(self, first: int, count: int) -> Batch:
        """Return windows first to first + count - 1 in the order of the text, for validation; fewer at its end."""
        self._check(first, count)
        return self._gather(np.arange(min(first, self.count), min(first + count, self.count), dtype=np.int64))

    def _gather(self, windows: npt.NDArray[np.int64]) -> Batch:
        rows = np.empty((len(windows), self.length + 1), dtype=np.int64)
        for row, window in zip(rows, windows.tolist(), strict=True):
            start = window * self.length
            row[:] = self.tokens[start : start + self.length + 1]
        return rows

    @staticmethod
    def _check(first: int, count: int) -> None:
        if first < 0 or count < 1:
            raise DataError(f"first {first}, count {count}: must be at least 0 and 1")
