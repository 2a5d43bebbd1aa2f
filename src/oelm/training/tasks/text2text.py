"""Text to text: an encoder-decoder reads a source and writes its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.batches import Order
from ...data.labelled.encoded import Encoded, LengthGrouped
from ...data.labelled.examples import Examples, LabelledData, by_content
from ...data.labelled.prompts import PROMPTS
from ...data.packages import import_optional
from ...errors import ConfigError
from ...models.finetune import build_text_to_text
from .base import IGNORED, Batch, Figures, Task, of_all
from .classification import cut_warnings, open_data, sha256_of
from .model_tokenizer import ModelTokenizer


@dataclass(frozen=True)
class Sides:
    """The sources and the targets of one split."""

    examples: Examples
    sources: Encoded
    targets: Encoded

    @cached_property
    def in_turn(self) -> Order:
        """The order in which examples are judged, so that the first of them stand for all."""
        return by_content(self.examples)


@dataclass(frozen=True)
class TextToText(Task):
    """Sources and targets. The loss is over the targets' tokens; answers are also written out, greedily, and judged."""

    data: LabelledData
    model_tokenizer: ModelTokenizer
    train: Sides
    held_out: Sides
    order: LengthGrouped
    split: str = "validation"

    @classmethod
    def open(cls, config: RunConfig) -> TextToText:
        data = open_data(config)
        if config.eval.generations:
            import_optional("sacrebleu", "judging written answers (or set eval.generations to 0)")
        model_tokenizer = ModelTokenizer.of(config)
        train, held_out = (_sides(data, name, model_tokenizer) for name in ("train", "validation"))
        if int(train.targets.ids[train.targets.offsets[1] - 1]) != model_tokenizer.hf_config.eos_token_id:
            raise ConfigError(
                "model: its tokenizer puts no end-of-text token after an answer, so it would never learn to stop; name "
                "the model's own tokenizer"
            )
        order = LengthGrouped(train.sources.lengths, config.train.batch_size, config.data_seed)
        return cls(data, model_tokenizer, train, held_out, order)

    @property
    def samples_per_epoch(self) -> int:
        return self.order.slots

    @property
    def held_out_count(self) -> int:
        return len(self.held_out.sources)

    @property
    def sha256(self) -> str:
        return sha256_of(self.data, self.model_tokenizer)

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_text_to_text(config.model, self.model_tokenizer.hf_config, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return AnswerLoss(model)

    def batch(self, first: int, count: int) -> Batch:
        return self._rows(self.train, self.order.chosen(first, count))

    def largest(self, count: int) -> Batch:
        lengths = self.train.sources.lengths + self.train.targets.lengths
        return self._rows(self.train, np.resize(np.argsort(-lengths, kind="stable"), count))

    def targets(self, first: int, count: int) -> int:
        return self._length(self.train.targets, self.order.chosen(first, count))

    def tokens(self, first: int, count: int) -> int:
        chosen = self.order.chosen(first, count)
        return self._length(self.train.sources, chosen) + self._length(self.train.targets, chosen)

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        chosen = np.full(fill_to, -1, dtype=np.int64)
        chosen[: max(0, count)] = self.held_out.in_turn[first : first + max(0, count)]
        return self._rows(self.held_out, chosen)

    def figures(self, sums: list[float]) -> Figures:
        return {"loss": sums[0] / sums[1]}

    def write(self, model: nn.Module, first: int, count: int) -> list[str]:
        longest = max(int(sides.targets.lengths.max()) for sides in (self.train, self.held_out))
        chosen = self.held_out.in_turn[first : first + count]
        return answer(model, self.model_tokenizer, self.held_out.sources, chosen, longest)

    def judge(self, written: list[str]) -> Figures:
        assert self.held_out.examples.answers is not None
        # What the tokenizer makes of a target is what a model can write; that it may not be able to is not its fault.
        targets, chosen = self.held_out.targets, self.held_out.in_turn[: len(written)]
        tokens = [targets.ids[targets.offsets[row] : targets.offsets[row + 1]] for row in chosen]
        wanted = self.model_tokenizer.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return judged(written, [text.strip() for text in wanted]) | {"held_out": self.held_out_count}

    def headline(self, figures: Figures) -> str:
        said = f"validation loss {figures['loss']:.4f}"
        if "exact_match" in figures:
            said += (
                f", exact match {figures['exact_match']:.4f}, chrF {figures['chrf']:.1f}, BLEU {figures['bleu']:.1f} "
                f"({of_all(figures['written'], figures['held_out'])} answers)"
            )
        return said

    def others(self) -> dict[str, Task]:
        return {
            name: replace(self, held_out=_sides(self.data, name, self.model_tokenizer), split=name)
            for name in self.data.splits
            if name not in ("train", "validation")
        }

    def results(self, last: Figures, best: Figures) -> dict[str, Any]:
        figures: Figures = {name: last[name] for name in ("exact_match", "chrf", "bleu") if name in last}
        return {
            "val_loss": last["loss"],
            "best_val_loss": best.get("loss"),
            "best_step": best.get("step"),
            **figures,
        }

    def warnings(self) -> list[str]:
        sides = {"training": self.train, self.split: self.held_out}
        targets = {f"{name} target": one.targets for name, one in sides.items()}
        encoded = {f"{name} source": one.sources for name, one in sides.items()}
        return cut_warnings(encoded | targets, self.model_tokenizer) + _unknown_warnings(targets, self.model_tokenizer)

    def describe(self) -> dict[str, Any]:
        return {
            "description": self.data.description,
            "synthetic": self.data.synthetic,
            **self.model_tokenizer.describe(),
            "pairs": "{pair}" in PROMPTS.get(self.data.name, ""),
            "splits": {
                name: {**self.data.sources.get(name, {}), "examples": len(split)}
                for name, split in self.data.splits.items()
            },
        }

    def save_tokenizer(self, folder: Path) -> None:
        self.model_tokenizer.save(folder)

    @staticmethod
    def _length(encoded: Encoded, chosen: Order) -> int:
        return int(encoded.lengths[chosen[chosen >= 0]].sum())

    def _rows(self, sides: Sides, chosen: Order) -> Batch:
        filled = np.where(chosen < 0, max(0, int(chosen[0])), chosen)
        rows = sides.sources.pad(filled, self.model_tokenizer.tokenizer.pad_token_id)
        rows.pop("token_type_ids", None)
        answers = sides.targets.pad(filled, self.model_tokenizer.tokenizer.pad_token_id)
        counts = answers["attention_mask"].astype(bool) & (chosen >= 0)[:, None]
        rows["labels"] = np.where(counts, answers["input_ids"], IGNORED)
        return {name: torch.from_numpy(values) for name, values in rows.items()}


class AnswerLoss(nn.Module):
    """Cross-entropy summed over the answers' tokens, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        model: Any = self.model
        before = model.prepare_decoder_input_ids_from_labels(labels=labels)
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=before, use_cache=False
        ).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.training:
            return loss
        return torch.stack([loss.double(), (labels != IGNORED).sum().double()])


def judged(written: list[str], wanted: list[str]) -> Figures:
    """Exact match as a share, chrF and BLEU as sacrebleu has them, from 0 to 100."""
    if not written:
        return {}
    sacrebleu = import_optional("sacrebleu", "judging written answers")
    return {
        "exact_match": sum(one == other for one, other in zip(written, wanted, strict=True)) / len(written),
        "chrf": float(sacrebleu.corpus_chrf(written, [wanted]).score),
        "bleu": float(sacrebleu.corpus_bleu(written, [wanted]).score),
        "written": len(written),
    }


@torch.no_grad()
def answer(
    model: nn.Module, model_tokenizer: ModelTokenizer, sources: Encoded, chosen: Order, longest: int
) -> list[str]:
    """What the model writes to the chosen sources, of at most `longest` tokens, greedily."""
    rows = sources.pad(chosen, model_tokenizer.tokenizer.pad_token_id)
    writer: Any = model
    device = next(model.parameters()).device
    out = writer.generate(
        input_ids=torch.from_numpy(rows["input_ids"]).to(device),
        attention_mask=torch.from_numpy(rows["attention_mask"]).to(device),
        max_new_tokens=min(longest, model_tokenizer.max_length - 1),
    )
    return [text.strip() for text in model_tokenizer.tokenizer.batch_decode(out, skip_special_tokens=True)]


def _sides(data: LabelledData, name: str, model_tokenizer: ModelTokenizer) -> Sides:
    split = data.splits[name]
    assert split.answers is not None, "text-to-text data has answers"
    sides = Sides(split, model_tokenizer.encode(split.texts, split.pairs), model_tokenizer.encode(split.answers))
    # Unknown and other special tokens are not written out, so whoever writes nothing would match such an answer.
    kept = _count(sides.targets, ~np.isin(sides.targets.ids, model_tokenizer.tokenizer.all_special_ids))
    lost = np.flatnonzero(kept == 0)
    if len(lost):
        raise ConfigError(
            f"{data.name}, {name}: the tokenizer knows nothing of {len(lost):,} of {len(kept):,} answers, such as "
            f"{split.answers[lost[0]]!r}; use answers that it can write, or a model whose tokenizer can"
        )
    return sides


def _unknown_warnings(targets: dict[str, Encoded], model_tokenizer: ModelTokenizer) -> list[str]:
    """How many answers of each split have parts that the tokenizer does not know, and no model here can write."""
    warnings = []
    for name, one in targets.items():
        unknown = int((_count(one, one.ids == model_tokenizer.tokenizer.unk_token_id) > 0).sum())
        if unknown and model_tokenizer.tokenizer.unk_token_id != model_tokenizer.hf_config.eos_token_id:
            warnings.append(
                f"{unknown:,} {name} texts ({100 * unknown / len(one):.1f} %) have parts that the tokenizer does not "
                "know: judged without those"
            )
    return warnings


def _count(encoded: Encoded, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many of each text's tokens are marked."""
    counts: npt.NDArray[np.int64] = np.add.reduceat(marked.astype(np.int64), encoded.offsets[:-1])
    return counts
