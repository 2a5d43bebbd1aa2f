"""Labelled examples: the splits of a task as texts and classes, and choices among their rows.

Rows are chosen by their content: every machine chooses the same ones, whatever order they come in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, eq=False)
class Examples:
    """The rows of one split.

    `pairs` are the second texts of tasks whose rows have two. `answers` are the target texts of text-to-text tasks,
    `labels` the class indices of all others (empty for text-to-text).
    """

    texts: list[str]
    pairs: list[str] | None
    labels: Classes
    answers: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def contents(self) -> Iterator[tuple[str, ...]]:
        """Yield the text or texts of each row."""
        return iter(zip(self.texts, *([] if self.pairs is None else [self.pairs]), strict=True))

    def digests(self) -> list[bytes]:
        """Return a hash of each row's texts that ignores case and spacing."""
        return [digest(*texts) for texts in self.contents()]

    def classes(self) -> Classes:
        """Return class indices; rows with a target text are all in one class."""
        return self.labels if self.answers is None else np.zeros(len(self), dtype=np.int64)

    def subset(self, mask: Mask) -> Examples:
        """Return the rows where the mask is True, in the same order."""
        rows = np.flatnonzero(mask).tolist()

        def select(values: list[str] | None) -> list[str] | None:
            return None if values is None else [values[row] for row in rows]

        labels = self.labels if self.answers is not None else self.labels[mask]
        return Examples([self.texts[row] for row in rows], select(self.pairs), labels, select(self.answers))


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledData:
    """A task's data: "train" is trained on, "validation" selects the best model, other splits are only reported.

    `sources` holds for each split where it is from, its number of rows, and the sha256 of its content. `sha256` is the
    hash of everything that is used, in its order.
    """

    name: str
    description: str
    synthetic: bool
    labels: tuple[str, ...]
    splits: dict[str, Examples]
    sources: dict[str, dict[str, Any]]
    sha256: str


def by_content(examples: Examples) -> npt.NDArray[np.int64]:
    """Return row numbers sorted by a hash of the content, so that the first few are a fair sample of a sorted file."""
    answers = list(map(str, examples.labels.tolist())) if examples.answers is None else examples.answers
    rows = [(*texts, answer) for texts, answer in zip(examples.contents(), answers, strict=True)]
    # Rows with the same digest differ only in case or spacing; the text after it makes their order fixed too.
    keys = [digest(*row) + "\x00".join(row).encode() for row in rows]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def first_share(digests: Sequence[bytes], classes: Classes, share: float) -> Mask:
    """Return a mask of the rows to keep: in each class the share with the lowest digests, rounded up.

    The rows of a smaller share are among those of every larger one.
    """
    mask = np.zeros(len(digests), dtype=np.bool_)
    for rows in _by_class(classes):
        mask[sorted(rows, key=digests.__getitem__)[: _share_of(len(rows), share)]] = True
    return mask


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
