"""Classification: the class of a text, or of a pair of texts, by a head on a pretrained or a fresh model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import RunConfig
from ..data.batches import Order
from ..data.examples import Encoded, Grouped, encode
from ..data.labelled import Examples, LabelledData, open_labelled
from ..data.tasks import BUILTIN
from ..errors import ConfigError
from ..metrics import classification_figures, is_at_chance, majority
from ..models.finetune import build_classifier, described, longest_text, tokenizer_for
from .task import IGNORED, Batch, Figures, Task


@dataclass(frozen=True)
class Classification(Task):
    """A labelled task. Batches hold examples of about the same length, padded to the longest of them."""

    data: LabelledData
    tokenizer: Any
    own: PreTrainedConfig
    longest: int
    train: Encoded
    order: Grouped
    split: Examples
    held_out: Encoded
    in_turn: Order
    choose: str

    @classmethod
    def open(cls, config: RunConfig) -> Classification:
        data = open_data(config)
        tokenizer = tokenizer_for(config.model, config.task.name.startswith(BUILTIN))
        own = described(config.model, tokenizer, config.data.sequence_length)
        longest = longest_text(own, config.data.sequence_length)
        train, held_out = (_encoded(data.splits[split], tokenizer, own, longest) for split in ("train", "validation"))
        _require_end(own, tokenizer, train)
        order = Grouped(train.lengths, config.train.batch_size, config.data_seed)
        in_turn = _longest_first(held_out, config.eval.sequences)
        choose = config.eval.choose or "accuracy"
        split = data.splits["validation"]
        return cls(data, tokenizer, own, longest, train, order, split, held_out, in_turn, choose)

    @property
    def samples_per_epoch(self) -> int:
        return self.order.places

    @property
    def held_out_count(self) -> int:
        return len(self.in_turn)

    @property
    def sha256(self) -> str:
        return self.data.sha256

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_classifier(config.model, self.own, self.tokenizer, self.data.labels, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return ClassifierLoss(model, len(self.data.labels))

    def batch(self, first: int, count: int) -> Batch:
        return self._rows(self.train, self.data.splits["train"], self.order.chosen(first, count))

    def targets(self, first: int, count: int) -> int:
        return int((self.order.chosen(first, count) >= 0).sum())

    def tokens(self, first: int, count: int) -> int:
        chosen = self.order.chosen(first, count)
        return int(self.train.lengths[chosen[chosen >= 0]].sum())

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        chosen = np.full(fill_to, -1, dtype=np.int64)
        chosen[: max(0, count)] = self.in_turn[first : first + count]
        return self._rows(self.held_out, self.split, chosen)

    def figures(self, sums: list[float]) -> Figures:
        classes = len(self.data.labels)
        confusion = np.rint(sums[2:]).astype(np.int64).reshape(classes, classes)
        return {"loss": sums[0] / sums[1], **classification_figures(confusion, self.data.labels)}

    def score(self, figures: Figures) -> float:
        return -float(figures["loss"]) if self.choose == "loss" else float(figures[self.choose])

    def reached(self, figures: Figures, target: float) -> bool:
        return bool(figures["accuracy"] >= target)

    def headline(self, figures: Figures) -> str:
        return (
            f"accuracy {figures['accuracy']:.4f} (majority {self._majority()['accuracy']:.4f}), "
            f"macro-F1 {figures['macro_f1']:.4f}, validation loss {figures['loss']:.4f}"
        )

    def others(self) -> dict[str, Task]:
        found: dict[str, Task] = {}
        for name, split in self.data.splits.items():
            if name not in ("train", "validation"):
                encoded = _encoded(split, self.tokenizer, self.own, self.longest)
                found[name] = replace(self, split=split, held_out=encoded, in_turn=_longest_first(encoded, None))
        return found

    def results(self, last: Figures, best: Figures) -> dict[str, Any]:
        chosen = best or last
        chance = is_at_chance(chosen["accuracy"], chosen["n"], self._majority()["accuracy"])
        warning = (
            f"accuracy {chosen['accuracy']:.4f} on {chosen['n']} examples is within noise of always answering "
            f"{self._majority()['label']!r} ({self._majority()['accuracy']:.4f}): a failed run, not a comparison"
        )
        return {
            "val_loss": last["loss"],
            "accuracy": last["accuracy"],
            "macro_f1": last["macro_f1"],
            "matthews": last["matthews"],
            "best_accuracy": best.get("accuracy"),
            "best_step": best.get("step"),
            "labels": list(self.data.labels),
            "majority": self._majority(),
            "at_chance": chance,
            "warnings": [warning] if chance else [],
        }

    def warnings(self) -> list[str]:
        said = []
        for name, encoded in (("training", self.train), ("validation", self.held_out)):
            if encoded.cut:
                share = 100 * encoded.cut / len(encoded)
                said.append(f"{encoded.cut:,} {name} texts ({share:.1f} %) were longer than {self.longest} tokens: cut")
        return said

    def describe(self) -> dict[str, Any]:
        return {
            "description": self.data.description,
            "synthetic": self.data.synthetic,
            "labels": list(self.data.labels),
            "longest": self.longest,
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
        self.tokenizer.save_pretrained(folder)

    def _majority(self) -> dict[str, Any]:
        counts = np.bincount(self.split.labels[self.in_turn], minlength=len(self.data.labels))
        return majority(counts.tolist(), self.data.labels)

    def _rows(self, encoded: Encoded, split: Examples, chosen: Order) -> Batch:
        """Examples as a batch. An empty place is filled with the first example, and its label is ignored."""
        filled = np.where(chosen < 0, max(0, int(chosen[0])), chosen)
        rows = encoded.pad(filled, self.tokenizer.pad_token_id)
        rows["labels"] = np.where(chosen < 0, IGNORED, split.labels[filled])
        return {name: torch.from_numpy(values) for name, values in rows.items()}


def open_data(config: RunConfig) -> LabelledData:
    """The examples that a run's task names."""
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
    """Cross-entropy summed over the labels that count, in float32; in evaluation, the confusion matrix with it."""

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


def _encoded(split: Examples, tokenizer: Any, own: PreTrainedConfig, longest: int) -> Encoded:
    # Only a model that was made for them reads which of two texts a token belongs to.
    types = "token_type_ids" in tokenizer.model_input_names and getattr(own, "type_vocab_size", 0) > 1
    texts, pairs = split.texts, split.pairs
    if pairs is not None and tokenizer("a", "b").input_ids == tokenizer("a").input_ids + tokenizer("b").input_ids:
        # A decoder's tokenizer puts nothing between two texts; without a mark they would run into each other.
        texts = [f"{text}{tokenizer.eos_token}{pair}" for text, pair in zip(texts, pairs, strict=True)]
        pairs = None
    return encode(tokenizer, texts, pairs, longest, types)


def _require_end(own: PreTrainedConfig, tokenizer: Any, encoded: Encoded) -> None:
    """An encoder-decoder is pooled where the text ends, so its tokenizer must mark that."""
    if getattr(own, "is_encoder_decoder", False):
        marks = {tokenizer.eos_token_id, tokenizer.sep_token_id}
        if int(encoded.ids[encoded.offsets[1] - 1]) not in marks:
            raise ConfigError(
                f"model: a {own.model_type} classifies by the end-of-text token, and its tokenizer puts none after a "
                "text; name the model's own tokenizer"
            )


def _longest_first(encoded: Encoded, most: int | None) -> Order:
    """The first `most` examples by falling length: little padding, and what does not fit is found at once."""
    considered = encoded.lengths[:most]
    return np.argsort(-considered, kind="stable").astype(np.int64)
