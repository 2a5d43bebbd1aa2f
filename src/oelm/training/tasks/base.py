"""The engine's interface to a training objective: batches by number, a summed loss, validation sums, and metrics.

`language.py`, `masked.py`, `classification.py`, `text2text.py` and `generated.py` are the tasks; `open.py` opens the
one that a config names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...config import RunConfig

# The label of a position that the loss ignores.
IGNORED = -100

Batch = dict[str, Tensor]
MetricDict = dict[str, Any]


class Task(ABC):
    """A training objective on a dataset.

    Training samples are numbered without end, epoch after epoch, and a batch is a function of its numbers. The module
    that `loss` returns takes a batch. In training mode it returns the summed loss. In evaluation mode it returns a
    vector of sums (the loss, the number of targets, and what else `metrics` needs), so that any number of batches and
    processes add up to the same metrics.
    """

    # True if every batch has the same shape, so that the model is compiled once.
    fixed_shapes = False
    # True if the model generates answers, which are scored beside the loss.
    writes_answers = False

    @property
    def head_share(self) -> float:
        """Return the share of a sequence's tokens that a language model's head computes logits for."""
        return 1.0

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Return the number of training samples in an epoch."""

    @property
    @abstractmethod
    def held_out_count(self) -> int:
        """Return the number of validation examples."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Return the hash of all the data, which a checkpoint records so that it is resumed with the same data."""

    @abstractmethod
    def build_model(self, config: RunConfig) -> PreTrainedModel:
        """Build the config's model for this data, on the CPU in float32, before any method is applied."""

    @abstractmethod
    def loss(self, model: nn.Module) -> nn.Module:
        """Return the model and its loss as one module, so that both are wrapped and compiled together."""

    @abstractmethod
    def batch(self, first: int, count: int) -> Batch:
        """Return the samples `first` to `first + count - 1` of the run."""

    def largest(self, count: int) -> Batch:
        """Return a batch of `count` samples that needs as much memory as any batch of the run."""
        return self.batch(0, count)

    @abstractmethod
    def target_count(self, first: int, count: int) -> int:
        """Return the number of targets in those samples, by which their summed loss is divided."""

    @abstractmethod
    def token_count(self, first: int, count: int) -> int:
        """Return the number of tokens that the model reads for those samples, without padding."""

    @abstractmethod
    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        """Return validation examples in order, filled up to `fill_to` rows with ignored labels."""

    @abstractmethod
    def metrics(self, sums: list[float]) -> MetricDict:
        """Compute metrics from the sums over a set of examples; `loss` is always among them."""

    def training_metrics(self, loss: float) -> dict[str, float]:
        """Return what is shown beside the mean training loss of the last steps."""
        return {}

    @abstractmethod
    def headline(self, metrics: MetricDict) -> str:
        """Describe metrics in a few words, for the terminal."""

    @abstractmethod
    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        """Return the result's top-level fields from the metrics of the last and the best validation."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the run's environment records about the data."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Save the data's tokenizer into a model's folder."""

    def score(self, metrics: MetricDict) -> tuple[float, ...]:
        """Return the numbers by which the best model is chosen: higher is better, the first number counts first."""
        return (-float(metrics["loss"]),)

    def reached(self, metrics: MetricDict, target: float) -> bool:
        """Return True when a target of `eval.targets` is met."""
        return False

    def write_answers(self, model: nn.Module, first: int, count: int) -> list[str]:
        """Let the model write answers to validation examples. Only for tasks with `writes_answers`."""
        raise NotImplementedError

    def score_answers(self, answers: list[str]) -> MetricDict:
        """Compute metrics of the answers to the first validation examples. Only for tasks with `writes_answers`."""
        raise NotImplementedError

    def other_splits(self) -> dict[str, Task]:
        """Return further labelled splits by name, each as a task that validates on it. They never select the model."""
        return {}

    def warnings(self) -> list[str]:
        """Return what a reader of the result must know about the data, such as how many texts were cut."""
        return []


def summed_loss(logits: Tensor, labels: Tensor, training: bool) -> Tensor:
    """Return the cross-entropy summed over the labels that are not ignored, in float32.

    In evaluation, return the vector of that loss and the number of those labels instead.
    """
    logits, flat_labels = logits.flatten(0, -2).float(), labels.flatten()
    loss = F.cross_entropy(logits, flat_labels, ignore_index=IGNORED, reduction="sum")
    return loss if training else torch.stack([loss.double(), (labels != IGNORED).sum().double()])


def example_count(scored: int, held_out: int) -> str:
    """Return how many validation examples metrics are based on, for the terminal."""
    return f"{scored:,}" if scored == held_out else f"{scored:,} of {held_out:,}"
