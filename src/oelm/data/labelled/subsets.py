"""Cutting labelled rows by their content: the same rows are chosen on every machine, in whatever order they come."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_SALT = b"oelm cut 0"

Classes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def digest(*texts: str) -> bytes:
    """A number for a row's content, in which neither case nor spacing counts."""
    joined = "\x00".join(" ".join(text.split()).casefold() for text in texts)
    return hashlib.blake2b(joined.encode(), digest_size=8, key=_SALT).digest()


def lowest_first(digests: Sequence[bytes], rows: Iterable[int]) -> list[int]:
    """Rows in the order of their digests: the first of them are as good as drawn, and fewer are part of more."""
    return sorted(rows, key=lambda row: digests[row])


def first_share(digests: Sequence[bytes], classes: Classes, share: float) -> Mask:
    """The rows to keep: of each class the share with the lowest digests, rounded up.

    A smaller share is part of every larger one.
    """
    kept = np.zeros(len(digests), dtype=np.bool_)
    for rows in _by_class(classes):
        kept[lowest_first(digests, rows)[: _share_of(len(rows), share)]] = True
    return kept


def split_off(digests: Sequence[bytes], classes: Classes, share: float) -> Mask:
    """The rows to set aside: of each class about the share with the lowest digests, rows of one digest together.

    A digest belongs to the class of its first row. The last digest of a class stays.
    """
    groups: dict[bytes, list[int]] = {}
    for row, value in enumerate(digests):
        groups.setdefault(value, []).append(row)
    firsts = np.array([rows[0] for rows in groups.values()], dtype=np.int64)
    aside = np.zeros(len(digests), dtype=np.bool_)
    values = list(groups)
    for members in _by_class(classes[firsts]):
        ordered = sorted(values[member] for member in members)
        wanted = _share_of(sum(len(groups[value]) for value in ordered), share)
        taken = 0
        for value in ordered[:-1]:
            if taken >= wanted:
                break
            aside[groups[value]] = True
            taken += len(groups[value])
    return aside


def _by_class(classes: Classes) -> list[list[int]]:
    return [np.flatnonzero(classes == name).tolist() for name in np.unique(classes)]


def _share_of(count: int, share: float) -> int:
    """The share rounded up, but for what is only the error of the product: 0.07 of 100 is 7."""
    return int(np.ceil(round(count * share, 6)))
