"""Generated sequences: predict the tokens that follow from earlier ones, and report how often that is right."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import GENERATED, RunConfig
from ...data.synthetic.sequences import VOCABULARY, Tokens, ability, sequences
from ...errors import ConfigError
from ...models.run_model import build_language_model
from .base import IGNORED, Batch, MetricDict, Task, example_count, summed_loss
from .metrics import majority

# No training sequence is repeated; an epoch is only a unit of length.
_EPOCH = 65_536
_HELD_OUT = 512
_VALIDATION = "validation"
# Upper ends of the distances to an answer's evidence that are reported together; the last group has all further ones.
_DISTANCES = (8, 16, 32, 64, 128, 256)
# What a token's group says beside the number of a distance: no answer, and an answer without a single distance.
_NO_ANSWER, _NO_DISTANCE = -1, len(_DISTANCES) + 1
_GROUPS = _NO_DISTANCE + 1


@dataclass(frozen=True)
class GeneratedSequences(Task):
    """Sequences of one ability, from a seed: each training sequence is new, and validation has its own."""

    name: str
    length: int
    seed: int

    fixed_shapes = True

    @classmethod
    def open(cls, config: RunConfig) -> GeneratedSequences:
        """Check the settings of a run on generated sequences."""
        name = config.task.name.removeprefix(GENERATED)
        ability(name)
        if config.data.path is not None or config.data.fraction != 1.0:
            raise ConfigError(f"task {config.task.name} generates its data: leave out data.path and data.fraction")
        task = cls(name, config.data.sequence_length, config.data_seed)
        task.batch(0, 1)  # raises for a length that is too short
        return task

    @property
    def samples_per_epoch(self) -> int:
        return _EPOCH

    @property
    def held_out_count(self) -> int:
        return _HELD_OUT

    @property
    def sha256(self) -> str:
        """Return the hash of the first sequences: others differ only if these do."""
        content = hashlib.sha256()
        for stream in (self._stream, _VALIDATION):
            for part in self._rows(stream, 0, 8):
                content.update(part.tobytes())
        return content.hexdigest()

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_language_model(config.model, VOCABULARY, self.length, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return GeneratedLoss(model)

    def batch(self, first: int, count: int) -> Batch:
        ids, distances = self._rows(self._stream, first, count)
        return _inputs_and_answers(ids, distances >= 0)

    def target_count(self, first: int, count: int) -> int:
        _, distances = self._rows(self._stream, first, count)
        return int((distances >= 0).sum())

    def token_count(self, first: int, count: int) -> int:
        return count * self.length

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        ids, distances = self._rows(_VALIDATION, first, fill_to)
        distances = np.where(np.arange(fill_to)[:, None] < count, distances, -1)
        groups = np.where(distances > 0, np.searchsorted(_DISTANCES, distances), _NO_DISTANCE)
        groups = np.where(distances < 0, _NO_ANSWER, groups)
        return _inputs_and_answers(ids, distances >= 0) | {"groups": torch.from_numpy(groups[:, 1:].copy())}

    def metrics(self, sums: list[float]) -> MetricDict:
        loss, count = sums[:2]
        hits, answers = np.array(sums[2:]).reshape(2, _GROUPS)
        shares = {_range_of(group): hits[group] / answers[group] for group in range(_NO_DISTANCE) if answers[group]}
        return {
            "loss": loss / count,
            "accuracy": float(hits.sum()) / count,
            "by_distance": {name: float(share) for name, share in shares.items()},
            "majority": self._commonest_answer(),
            "n": int(count),
        }

    def score(self, metrics: MetricDict) -> tuple[float, ...]:
        return float(metrics["accuracy"]), -float(metrics["loss"])

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["accuracy"] >= target)

    def headline(self, metrics: MetricDict) -> str:
        return (
            f"accuracy {metrics['accuracy']:.4f} on {example_count(metrics['n'], metrics['n'])} answers "
            f"(commonest {metrics['majority']['accuracy']:.4f}), loss {metrics['loss']:.4f}"
        )

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        return {
            "val_loss": last["loss"],
            "accuracy": last["accuracy"],
            "best_accuracy": best.get("accuracy"),
            "best_step": best.get("step"),
            "majority": last["majority"],
        }

    def describe(self) -> dict[str, Any]:
        return {
            "description": f"generated sequences of {self.length} tokens, seed {self.seed}: {ability(self.name).about}",
            "synthetic": True,
            "vocab_size": VOCABULARY,
            "splits": {"train": {"sha256": self.sha256}, "validation": {"examples": _HELD_OUT}},
        }

    def save_tokenizer(self, folder: Path) -> None:
        """Save nothing: the tokens are numbers without a text."""

    @property
    def _stream(self) -> str:
        return f"train {self.seed}"

    def _rows(self, stream: str, first: int, count: int) -> tuple[Tokens, Tokens]:
        # One token more than the model reads: the last one is only predicted.
        return _generated(self.name, stream, first, count, self.length + 1)

    def _commonest_answer(self) -> dict[str, Any]:
        """Return the commonest answer in validation, and the accuracy of always giving it."""
        ids, distances = self._rows(_VALIDATION, 0, _HELD_OUT)
        counts = np.bincount(ids[distances >= 0], minlength=VOCABULARY)
        return majority(counts.tolist(), [str(token) for token in range(VOCABULARY)])


# A batch is asked for more than once: for its tokens, and for the number of its answers.
_generated = lru_cache(maxsize=8)(sequences)


class GeneratedLoss(nn.Module):
    """Cross-entropy summed over the answers; in evaluation, with hits and answers by group of distances."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, groups: Tensor | None = None) -> Tensor:
        logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = summed_loss(logits, targets, self.training)
        if groups is None:
            return loss
        is_answer = groups != _NO_ANSWER
        hits = (logits.argmax(-1) == targets)[is_answer].double()
        by_group = torch.zeros(2, _GROUPS, dtype=torch.float64, device=logits.device)
        by_group[0].index_add_(0, groups[is_answer], hits)
        by_group[1].index_add_(0, groups[is_answer], torch.ones_like(hits))
        return torch.cat([loss, by_group.flatten()])


def _inputs_and_answers(ids: Tokens, answers: npt.NDArray[np.bool_]) -> Batch:
    """Return sequences without their last token, and at each token the next one where that is an answer."""
    targets = np.where(answers, ids, IGNORED)
    return {"inputs": torch.from_numpy(ids[:, :-1].copy()), "targets": torch.from_numpy(targets[:, 1:].copy())}


def _range_of(group: int) -> str:
    """Return the distances of a group in words: 1-8, 9-16, ..., 257-."""
    first = _DISTANCES[group - 1] + 1 if group else 1
    return f"{first}-{_DISTANCES[group]}" if group < len(_DISTANCES) else f"{first}-"
