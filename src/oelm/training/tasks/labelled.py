"""The base of classification and text to text: labelled examples, encoded for a model, batched by similar length."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import RunConfig
from ...data.corpus.batches import Order
from ...data.labelled.encoded import Encoded, LengthGrouped, Rows
from ...data.labelled.examples import LabelledData
from ...data.labelled.load import open_labelled
from ...data.labelled.widths import Widths
from .base import Batch, Task
from .model_tokenizer import ModelTokenizer


@dataclass(frozen=True, kw_only=True)
class LabelledTask(Task):
    """A task on labelled data. Batches hold examples of about the same length, padded to the longest of them.

    Where code is compiled or recorded for each shape, they are padded to one of a few `widths`, the same one for all
    parts of a batch. Validation uses the rows `validation_order` of the split `split`, in that order.
    """

    data: LabelledData
    model_tokenizer: ModelTokenizer
    order: LengthGrouped
    widths: Widths = ()
    split: str = "validation"
    validation_order: Order

    @abstractmethod
    def inputs(self, split: str, rows: Order, counted: npt.NDArray[np.bool_], beside: Order) -> Rows:
        """Return rows of a split as model inputs and labels; the labels of rows that are not `counted` are ignored.

        The inputs are as wide as those of the rows `beside` are.
        """

    @abstractmethod
    def on_split(self, name: str) -> Task:
        """Return a copy of this task that validates on another split."""

    @property
    def samples_per_epoch(self) -> int:
        return self.order.slots

    @property
    def held_out_count(self) -> int:
        return len(self.validation_order)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.data.sha256}\0{self.model_tokenizer.sha256}".encode()).hexdigest()

    def batch(self, first: int, count: int) -> Batch:
        beside = self.order.whole_batches(first, count) if self.widths else None
        return self.rows("train", self.order.chosen(first, count), beside)

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        chosen = np.full(fill_to, -1, dtype=np.int64)
        chosen[:count] = self.validation_order[first : first + count]
        return self.rows(self.split, chosen)

    def rows(self, split: str, chosen: Order, beside: Order | None = None) -> Batch:
        """Return rows of a split as a batch, as wide as the rows `beside`, by default themselves, need.

        Empty slots (-1) repeat the first example of those with ignored labels.
        """
        repeated = chosen if beside is None else beside
        filled = np.where(chosen < 0, max(0, int(repeated[0])), chosen)
        inputs = self.inputs(split, filled, chosen >= 0, filled if beside is None else beside)
        return {name: torch.from_numpy(values) for name, values in inputs.items()}

    def other_splits(self) -> dict[str, Task]:
        return {name: self.on_split(name) for name in self.data.splits if name not in ("train", "validation")}

    def describe(self) -> dict[str, Any]:
        return {
            "description": self.data.description,
            "synthetic": self.data.synthetic,
            **self.model_tokenizer.describe(),
            "splits": {
                name: {**self.data.sources.get(name, {}), "examples": len(split)}
                for name, split in self.data.splits.items()
            },
        }

    def save_tokenizer(self, folder: Path) -> None:
        self.model_tokenizer.save(folder)

    def cut_warnings(self, encoded: dict[str, Encoded]) -> list[str]:
        """Return a warning for each named set of texts in which some were longer than the model reads, and were cut."""
        return [
            f"{texts.truncated:,} {name} texts ({100 * texts.truncated / len(texts):.1f} %) were longer than "
            f"{self.model_tokenizer.max_length} tokens: cut"
            for name, texts in encoded.items()
            if texts.truncated
        ]


def open_data(config: RunConfig) -> LabelledData:
    """Open the examples that a run's task names."""
    return open_labelled(path=config.data.path, fraction=config.data.fraction, **config.task.model_dump())


def uses_few_widths(config: RunConfig) -> bool:
    """Return True when batches must have few shapes: where code is compiled, or steps recorded, for each of them."""
    return config.train.graphs is True or config.train.compile is True


def token_total(encoded: Encoded, chosen: Order) -> int:
    """Return the number of tokens in the chosen texts; empty slots (-1) have none."""
    return int(encoded.lengths[chosen[chosen >= 0]].sum())


def count_tokens(encoded: Encoded, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return how many tokens of each text are marked."""
    counts: npt.NDArray[np.int64] = np.add.reduceat(marked.astype(np.int64), encoded.offsets[:-1])
    return counts
