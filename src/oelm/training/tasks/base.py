"""What a run learns, as the engine sees it: batches by number, a summed loss, sums to validate by, figures from those.

`language.py`, `classification.py` and `text2text.py` are the tasks; `open.py` opens the one that a config names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import RunConfig

# The target of a position that is not to be predicted.
IGNORED = -100

Batch = dict[str, Tensor]
Figures = dict[str, Any]


class Task(ABC):
    """One kind of learning. Samples are numbered without end, epoch after epoch; a batch is a function of its numbers.

    The module that `loss` makes takes a batch. In training mode it gives the summed loss; in evaluation mode a vector
    of sums, so that any number of batches and processes add up to the same figures: the summed loss, the number of
    targets, and whatever else `figures` makes use of.
    """

    # Whether every batch has the same shape, so that compiled code is compiled once.
    fixed_shapes = False

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int: ...

    @property
    @abstractmethod
    def held_out_count(self) -> int:
        """How many validation examples there are."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Of all the data, so that a checkpoint goes on with the same."""

    @abstractmethod
    def build_model(self, config: RunConfig) -> PreTrainedModel:
        """The model that the config describes, fit for this data, on the CPU in float32, before any method."""

    @abstractmethod
    def loss(self, model: nn.Module) -> nn.Module:
        """The model and its loss as one module, so that both are wrapped and compiled together."""

    @abstractmethod
    def batch(self, first: int, count: int) -> Batch:
        """Samples first to first + count - 1 of the run."""

    def largest(self, count: int) -> Batch:
        """As large a batch of `count` samples as any that will come: what fits it fits all."""
        return self.batch(0, count)

    @abstractmethod
    def targets(self, first: int, count: int) -> int:
        """How many predictions those samples ask for: what their summed loss is divided by."""

    @abstractmethod
    def tokens(self, first: int, count: int) -> int:
        """How many tokens the model reads for those samples, padding aside."""

    @abstractmethod
    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        """Validation examples in their turn, filled up to `fill_to` rows whose targets are ignored."""

    @abstractmethod
    def figures(self, sums: list[float]) -> Figures:
        """What the sums over a set of examples say; `loss` is always there."""

    @abstractmethod
    def headline(self, figures: Figures) -> str:
        """The figures in a few words, for the terminal."""

    @abstractmethod
    def results(self, last: Figures, best: Figures) -> dict[str, Any]:
        """What a result says at its top level, of the last model and of the best."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the environment records of the data."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None: ...

    def score(self, figures: Figures) -> tuple[float, ...]:
        """The higher, the better, the first number first: by this the best model is chosen."""
        return (-float(figures["loss"]),)

    def reached(self, figures: Figures, target: float) -> bool:
        """Whether a target of `eval.targets` is met."""
        return False

    def write(self, model: nn.Module, first: int, count: int) -> list[str]:
        """What the model answers to validation examples, where answers are written out."""
        return []

    def judge(self, written: list[str]) -> Figures:
        """The figures of what was written for the first validation examples."""
        return {}

    def others(self) -> dict[str, Task]:
        """Further labelled splits by name, each as the validation split of a task: never used for choosing."""
        return {}

    def warnings(self) -> list[str]:
        """What must be known about the data to read the result, such as how many texts were cut."""
        return []


def of_all(judged: int, held_out: int) -> str:
    """How many examples figures are of, for the terminal."""
    return f"{judged:,}" if judged == held_out else f"{judged:,} of {held_out:,}"
