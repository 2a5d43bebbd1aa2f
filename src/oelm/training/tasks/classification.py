"""Classification: predict the class of a text or a pair of texts, with a head on a pretrained or a fresh model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.batches import Order
from ...data.labelled.encoded import Encoded, LengthGrouped
from ...data.labelled.examples import Examples, LabelledData, by_content
from ...data.labelled.load import open_labelled
from ...errors import ConfigError, DataError
from ...models.run_model import build_classifier, relabelled_head_note
from .base import IGNORED, Batch, MetricDict, Task, example_count
from .metrics import classification_metrics
from .model_tokenizer import ModelTokenizer


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A labelled task. Batches hold examples of about the same length, padded to the longest of them.

    `validation_order` are the rows of `held_out` that are validated on. `choose` is the metric of the best model.
    """

    data: LabelledData
    model_tokenizer: ModelTokenizer
    train: Encoded
    order: LengthGrouped
    split: str
    held_out: Encoded
    validation_order: Order
    choose: str
    head_note: str | None = None

    @classmethod
    def open(cls, config: RunConfig) -> Classification:
        """Open and encode the labelled data of a run."""
        data, model_tokenizer = open_data(config), ModelTokenizer.of(config)
        train = _encode(data, "train", model_tokenizer)
        held_out = _encode(data, "validation", model_tokenizer)
        limit = config.eval.sequences
        rows = None if limit is None else by_content(data.splits["validation"])[:limit]
        return cls(
            data=data,
            model_tokenizer=model_tokenizer,
            train=train,
            order=LengthGrouped(train.lengths, config.train.batch_size, config.data_seed),
            split="validation",
            held_out=held_out,
            validation_order=_longest_first(held_out, rows),
            choose=config.eval.choose or "accuracy",
            head_note=relabelled_head_note(config.model, model_tokenizer.hf_config, data.labels),
        )

    @property
    def samples_per_epoch(self) -> int:
        return self.order.slots

    @property
    def held_out_count(self) -> int:
        return len(self.validation_order)

    @property
    def sha256(self) -> str:
        return sha256_of(self.data, self.model_tokenizer)

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_classifier(config.model, self.model_tokenizer.hf_config, self.data.labels, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return ClassifierLoss(model, len(self.data.labels))

    def batch(self, first: int, count: int) -> Batch:
        return self._rows(self.train, "train", self.order.chosen(first, count))

    def largest(self, count: int) -> Batch:
        return self._rows(self.train, "train", np.resize(_longest_first(self.train), count))

    def target_count(self, first: int, count: int) -> int:
        return int((self.order.chosen(first, count) >= 0).sum())

    def token_count(self, first: int, count: int) -> int:
        chosen = self.order.chosen(first, count)
        return int(self.train.lengths[chosen[chosen >= 0]].sum())

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        chosen = np.full(fill_to, -1, dtype=np.int64)
        chosen[: max(0, count)] = self.validation_order[first : first + count]
        return self._rows(self.held_out, self.split, chosen)

    def metrics(self, sums: list[float]) -> MetricDict:
        classes = len(self.data.labels)
        confusion = np.rint(sums[2:]).astype(np.int64).reshape(classes, classes)
        metrics = classification_metrics(confusion, self.data.labels)
        return {"loss": sums[0] / sums[1], **metrics, "held_out": len(self.held_out)}

    def score(self, metrics: MetricDict) -> tuple[float, ...]:
        by_loss = -float(metrics["loss"])
        return (by_loss,) if self.choose == "loss" else (float(metrics[self.choose]), by_loss)

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["accuracy"] >= target)

    def headline(self, metrics: MetricDict) -> str:
        return (
            f"accuracy {metrics['accuracy']:.4f} (majority {metrics['majority']['accuracy']:.4f}), "
            f"macro-F1 {metrics['macro_f1']:.4f}, validation loss {metrics['loss']:.4f} "
            f"({example_count(metrics['n'], metrics['held_out'])} examples)"
        )

    def other_splits(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for name in self.data.splits:
            if name not in ("train", "validation"):
                encoded = _encode(self.data, name, self.model_tokenizer)
                tasks[name] = replace(self, split=name, held_out=encoded, validation_order=_longest_first(encoded))
        return tasks

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        chosen = best or last
        warning = (
            f"accuracy {chosen['accuracy']:.4f} on {chosen['n']} examples is within noise of always answering "
            f"{chosen['majority']['label']!r} ({chosen['majority']['accuracy']:.4f}): a failed run, not a comparison"
        )
        return {
            "val_loss": last["loss"],
            "accuracy": last["accuracy"],
            "macro_f1": last["macro_f1"],
            "matthews": last["matthews"],
            "best_accuracy": best.get("accuracy"),
            "best_step": best.get("step"),
            "labels": list(self.data.labels),
            "majority": chosen["majority"],
            "at_chance": chosen["at_chance"],
            "warnings": [warning] if chosen["at_chance"] else [],
        }

    def warnings(self) -> list[str]:
        notes = [self.head_note] if self.head_note else []
        return notes + cut_warnings({"training": self.train, self.split: self.held_out}, self.model_tokenizer)

    def describe(self) -> dict[str, Any]:
        return {
            "description": self.data.description,
            "synthetic": self.data.synthetic,
            "labels": list(self.data.labels),
            **self.model_tokenizer.describe(),
            "pairs": self.data.splits["train"].pairs is not None,
            "splits": {
                name: {
                    **self.data.sources.get(name, {}),
                    "examples": len(split),
                    "per_class": np.bincount(split.labels, minlength=len(self.data.labels)).tolist(),
                }
                for name, split in self.data.splits.items()
            },
        }

    def save_tokenizer(self, folder: Path) -> None:
        self.model_tokenizer.save(folder)

    def _rows(self, encoded: Encoded, split: str, chosen: Order) -> Batch:
        """Return examples as a batch. Empty places (-1) repeat the first example with an ignored label."""
        filled = np.where(chosen < 0, max(0, int(chosen[0])), chosen)
        rows = encoded.pad(filled, self.model_tokenizer.tokenizer.pad_token_id)
        rows["labels"] = np.where(chosen < 0, IGNORED, self.data.splits[split].labels[filled])
        return {name: torch.from_numpy(values) for name, values in rows.items()}


def open_data(config: RunConfig) -> LabelledData:
    """Open the examples that a run's task names."""
    task = config.task
    return open_labelled(
        task.name,
        config.data.path,
        form=task.form,
        text=task.text,
        pair=task.pair,
        label=task.label,
        source=task.source,
        target=task.target,
        languages=task.languages,
        validation_share=task.validation_share,
        fraction=config.data.fraction,
        revision=task.revision,
    )


class ClassifierLoss(nn.Module):
    """Cross-entropy summed over labels that are not ignored, in float32; in evaluation with the confusion matrix."""

    def __init__(self, model: nn.Module, classes: int) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        logits = self.model(**inputs).logits.float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.training:
            return loss
        known = labels != IGNORED
        cells = (labels * self.classes + logits.argmax(-1))[known]
        confusion = torch.bincount(cells, minlength=self.classes**2)
        return torch.cat([torch.stack([loss.double(), known.sum().double()]), confusion.double()])


@torch.no_grad()
def classify(model: nn.Module, model_tokenizer: ModelTokenizer, text: str, pair: str | None) -> dict[str, Any]:
    """Return a classifier's most likely class for one text or pair, and the probability of each class."""
    encoded = model_tokenizer.encode([text], None if pair is None else [pair])
    rows = encoded.pad(np.zeros(1, np.int64), model_tokenizer.tokenizer.pad_token_id)
    classifier: Any = model
    logits = classifier(**{name: torch.from_numpy(values) for name, values in rows.items()}).logits
    probabilities = torch.softmax(logits[0].float(), -1).tolist()
    labels = [classifier.config.id2label[index] for index in range(len(probabilities))]
    most_likely = max(zip(probabilities, labels, strict=True))[1]
    return {"label": most_likely, "probabilities": dict(zip(labels, probabilities, strict=True))}


def sha256_of(data: LabelledData, model_tokenizer: ModelTokenizer) -> str:
    """Return one hash of labelled data and of how it is encoded for the model."""
    return hashlib.sha256(f"{data.sha256}\0{model_tokenizer.sha256}".encode()).hexdigest()


def cut_warnings(encoded: dict[str, Encoded], model_tokenizer: ModelTokenizer) -> list[str]:
    """Return a warning for each split with texts that were longer than the model reads."""
    return [
        f"{one.truncated:,} {name} texts ({100 * one.truncated / len(one):.1f} %) were longer than "
        f"{model_tokenizer.max_length} tokens: cut"
        for name, one in encoded.items()
        if one.truncated
    ]


def _encode(data: LabelledData, split: str, model_tokenizer: ModelTokenizer) -> Encoded:
    """Encode the texts of a split."""
    examples: Examples = data.splits[split]
    encoded = model_tokenizer.encode(examples.texts, examples.pairs)
    if getattr(model_tokenizer.hf_config, "is_encoder_decoder", False):
        _require_one_end(encoded, model_tokenizer, f"{data.name}, {split}")
    return encoded


def _require_one_end(encoded: Encoded, model_tokenizer: ModelTokenizer, where: str) -> None:
    """Raise unless all texts have the same number of end tokens: an encoder-decoder is pooled at the end token."""
    end = model_tokenizer.hf_config.eos_token_id
    counts = np.add.reduceat((encoded.ids == end).astype(np.int64), encoded.offsets[:-1])
    if counts[0] == 0:
        raise ConfigError(
            f"model: a {model_tokenizer.hf_config.model_type} classifies by the end-of-text token, and its tokenizer "
            "puts none after a text; name the model's own tokenizer"
        )
    token = model_tokenizer.tokenizer.convert_ids_to_tokens(end)
    odd = np.flatnonzero(counts != np.bincount(counts).argmax())
    if len(odd):
        raise DataError(
            f"{where}, example {odd[0] + 1}: its text contains {token!r}, the end-of-text token at which a "
            f"{model_tokenizer.hf_config.model_type} classifies; remove it from the text ({len(odd)} such texts)"
        )


def _longest_first(encoded: Encoded, chosen: Order | None = None) -> Order:
    """Return the chosen rows (None: all) by falling length.

    Batches then need little padding, and one that does not fit into memory is the first.
    """
    rows = np.arange(len(encoded)) if chosen is None else np.sort(chosen)
    return rows[np.argsort(-encoded.lengths[rows], kind="stable")].astype(np.int64)
