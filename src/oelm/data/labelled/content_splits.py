"""Split labelled rows by their content: every machine chooses the same rows, whatever order they come in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

# Part of every digest, so changing it would change which rows are chosen.
_KEY = b"oelm cut 0"

Classes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def digest(*texts: str) -> bytes:
    """Return a hash of a row's texts that ignores case and spacing."""
    joined = "\x00".join(" ".join(text.split()).casefold() for text in texts)
    return hashlib.blake2b(joined.encode(), digest_size=8, key=_KEY).digest()


def lowest_first(digests: Sequence[bytes], rows: Iterable[int]) -> list[int]:
    """Return rows sorted by digest: the first n are a pseudo-random sample, and contain every smaller sample."""
    return sorted(rows, key=lambda row: digests[row])


def first_share(digests: Sequence[bytes], classes: Classes, share: float) -> Mask:
    """Return a mask of the rows to keep: in each class the share with the lowest digests, rounded up.

    The rows of a smaller share are among those of every larger one.
    """
    kept = np.zeros(len(digests), dtype=np.bool_)
    for rows in _by_class(classes):
        kept[lowest_first(digests, rows)[: _share_of(len(rows), share)]] = True
    return kept


def split_off(digests: Sequence[bytes], classes: Classes, share: float) -> Mask:
    """Return a mask of the rows to hold out: in each class about the share with the lowest digests.

    Rows with the same digest stay together and count for the class of the first of them. The last digest of a class is
    never held out, so that every class keeps training rows.
    """
    groups: dict[bytes, list[int]] = {}
    for row, value in enumerate(digests):
        groups.setdefault(value, []).append(row)
    first_rows = np.array([rows[0] for rows in groups.values()], dtype=np.int64)
    held_out = np.zeros(len(digests), dtype=np.bool_)
    values = list(groups)
    for members in _by_class(classes[first_rows]):
        ordered = sorted(values[member] for member in members)
        target = _share_of(sum(len(groups[value]) for value in ordered), share)
        taken = 0
        for value in ordered[:-1]:
            if taken >= target:
                break
            held_out[groups[value]] = True
            taken += len(groups[value])
    return held_out


def _by_class(classes: Classes) -> list[list[int]]:
    return [np.flatnonzero(classes == name).tolist() for name in np.unique(classes)]


def _share_of(count: int, share: float) -> int:
    """Return the share of a count, rounded up after removing rounding error: 0.07 of 100 is 7, not 8."""
    return int(np.ceil(round(count * share, 6)))
