"""Classification: predict the class of a text or a pair of texts, with a head on a pretrained or a fresh model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.batches import Order
from ...data.labelled.encoded import Encoded, LengthGrouped, Rows
from ...data.labelled.examples import LabelledData, by_content
from ...errors import ConfigError, DataError
from ...models.masks import unread_masks
from ...models.run_model import build_classifier, relabelled_head_note
from .base import IGNORED, Batch, MetricDict, example_count, summed_loss
from .labelled import LabelledTask, count_tokens, open_data, token_total, uses_few_widths
from .metrics import classification_metrics
from .model_tokenizer import ModelTokenizer

# Each width is compiled by itself, for training and again for validation.
_MOST_WIDTHS = 6


@dataclass(frozen=True, kw_only=True)
class Classification(LabelledTask):
    """Texts, or pairs of texts, with a class each. `choose` is the metric of the best model."""

    train: Encoded
    held_out: Encoded
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
        order = LengthGrouped(train.lengths, config.train.batch_size, config.data_seed)
        longest = max(int(train.lengths.max()), int(held_out.lengths.max()))
        return cls(
            data=data,
            model_tokenizer=model_tokenizer,
            train=train,
            order=order,
            widths=order.widths(train.lengths, longest, _MOST_WIDTHS) if uses_few_widths(config) else (),
            held_out=held_out,
            validation_order=_longest_first(held_out, rows),
            choose=config.eval.choose or "accuracy",
            head_note=relabelled_head_note(config.model, model_tokenizer.hf_config, data.labels),
        )

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_classifier(config.model, self.model_tokenizer.hf_config, self.data.labels, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return ClassifierLoss(model, len(self.data.labels))

    def largest(self, count: int) -> Batch:
        return self.rows("train", np.resize(_longest_first(self.train), count))

    def target_count(self, first: int, count: int) -> int:
        return int((self.order.chosen(first, count) >= 0).sum())

    def token_count(self, first: int, count: int) -> int:
        return token_total(self.train, self.order.chosen(first, count))

    def inputs(self, split: str, rows: Order, counted: npt.NDArray[np.bool_], beside: Order) -> Rows:
        encoded = self.train if split == "train" else self.held_out
        width = encoded.width(beside, self.widths)
        padded = encoded.pad(rows, self.model_tokenizer.tokenizer.pad_token_id, width)
        return padded | {"labels": np.where(counted, self.data.splits[split].labels[rows], IGNORED)}

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
        examples = example_count(metrics["n"], metrics["held_out"])
        return (
            f"accuracy {metrics['accuracy']:.4f} on {examples} (majority {metrics['majority']['accuracy']:.3f}), "
            f"F1 {metrics['macro_f1']:.3f}, loss {metrics['loss']:.3f}"
        )

    def on_split(self, name: str) -> Classification:
        encoded = _encode(self.data, name, self.model_tokenizer)
        return replace(self, split=name, held_out=encoded, validation_order=_longest_first(encoded))

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
        return notes + self.cut_warnings({"training": self.train, self.split: self.held_out})

    def describe(self) -> dict[str, Any]:
        labels, pairs = self.data.labels, self.data.splits["train"].pairs is not None
        described = super().describe() | {"labels": list(labels), "pairs": pairs}
        for name, split in self.data.splits.items():
            described["splits"][name]["per_class"] = np.bincount(split.labels, minlength=len(labels)).tolist()
        return described


class ClassifierLoss(nn.Module):
    """Cross-entropy summed over labels that are not ignored, in float32; in evaluation with the confusion matrix."""

    def __init__(self, model: nn.Module, classes: int) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        with unread_masks():
            logits = self.model(**inputs).logits.float()
        loss = summed_loss(logits, labels, self.training)
        if self.training:
            return loss
        # Counted without choosing rows, whose number the host would have to wait for. No class is IGNORED.
        classes = torch.arange(self.classes, device=labels.device)
        truth, predicted = labels[:, None] == classes, logits.argmax(-1)[:, None] == classes
        confusion = (truth[:, :, None] & predicted[:, None, :]).sum(0)
        return torch.cat([loss, confusion.flatten().double()])


def classify(model: nn.Module, model_tokenizer: ModelTokenizer, text: str, pair: str | None) -> dict[str, Any]:
    """Return a classifier's most likely class for one text or pair, and the probability of each class."""
    encoded = model_tokenizer.encode([text], None if pair is None else [pair])
    probabilities = class_probabilities(model, model_tokenizer, encoded, np.zeros(1, np.int64))[0].tolist()
    labels = class_names(model, len(probabilities))
    most_likely = max(zip(probabilities, labels, strict=True))[1]
    return {"label": most_likely, "probabilities": dict(zip(labels, probabilities, strict=True))}


@torch.no_grad()
def class_probabilities(model: nn.Module, model_tokenizer: ModelTokenizer, encoded: Encoded, chosen: Order) -> Tensor:
    """Return the probability of each class for the chosen texts, a row for each."""
    rows = encoded.pad(chosen, model_tokenizer.tokenizer.pad_token_id)
    classifier: Any = model
    inputs = {name: torch.from_numpy(values).to(classifier.device) for name, values in rows.items()}
    return torch.softmax(classifier(**inputs).logits.float(), -1).cpu()


def class_names(model: Any, count: int) -> list[str]:
    """Return the names of a classifier's classes, in the order of its outputs."""
    return [model.config.id2label[index] for index in range(count)]


def _encode(data: LabelledData, split: str, model_tokenizer: ModelTokenizer) -> Encoded:
    encoded = model_tokenizer.encode(data.splits[split].texts, data.splits[split].pairs)
    if getattr(model_tokenizer.hf_config, "is_encoder_decoder", False):
        _require_one_end(encoded, model_tokenizer, f"{data.name}, {split}")
    return encoded


def _require_one_end(encoded: Encoded, model_tokenizer: ModelTokenizer, where: str) -> None:
    """Raise unless all texts have the same number of end tokens: an encoder-decoder is pooled at the end token."""
    end = model_tokenizer.hf_config.eos_token_id
    counts = count_tokens(encoded, encoded.ids == end)
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
