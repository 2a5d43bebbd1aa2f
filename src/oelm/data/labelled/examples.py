"""Labelled examples: the splits of a task as texts and classes, and operations on their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .content_splits import digest, lowest_first


@dataclass(frozen=True, eq=False)
class Examples:
    """The rows of one split.

    `pairs` are the second texts of tasks whose rows have two. `answers` are the target texts of text-to-text tasks,
    `labels` the class indices of all others (empty for text-to-text).
    """

    texts: list[str]
    pairs: list[str] | None
    labels: npt.NDArray[np.int64]
    answers: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def contents(self) -> Iterator[tuple[str, ...]]:
        """Yield the text or texts of each row."""
        return iter(zip(self.texts, *([] if self.pairs is None else [self.pairs]), strict=True))

    def digests(self) -> list[bytes]:
        """Return a hash of each row's texts that ignores case and spacing."""
        return [digest(*texts) for texts in self.contents()]

    def classes(self) -> npt.NDArray[np.int64]:
        """Return class indices; rows with a target text are all in one class."""
        return self.labels if self.answers is None else np.zeros(len(self), dtype=np.int64)

    def subset(self, mask: npt.NDArray[np.bool_]) -> Examples:
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
    return np.array(lowest_first(keys, range(len(keys))), dtype=np.int64)
