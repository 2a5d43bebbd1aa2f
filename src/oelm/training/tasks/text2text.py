"""Text to text: an encoder-decoder reads a source text and writes an answer."""

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
from ...data.labelled.tasks import PROMPTS
from ...data.labelled.widths import Widths
from ...data.packages import import_optional
from ...errors import ConfigError
from ...models.masks import unread_masks
from ...models.run_model import build_text_to_text
from .base import IGNORED, Batch, MetricDict, example_count, summed_loss
from .labelled import LabelledTask, count_tokens, open_data, token_total, uses_few_widths
from .model_tokenizer import ModelTokenizer

# Each pair of a width of sources and one of targets is compiled by itself.
_MOST_SOURCE_WIDTHS, _MOST_TARGET_WIDTHS = 3, 2


@dataclass(frozen=True)
class SourcesAndTargets:
    """The encoded sources and targets of one split."""

    sources: Encoded
    targets: Encoded


@dataclass(frozen=True, kw_only=True)
class TextToText(LabelledTask):
    """Sources and targets. The loss is over the targets' tokens; answers are also generated, greedily, and scored.

    The order of validation is by a hash of the content, so that the first examples represent all.
    """

    train: SourcesAndTargets
    held_out: SourcesAndTargets
    target_widths: Widths = ()

    writes_answers = True

    @classmethod
    def open(cls, config: RunConfig) -> TextToText:
        """Open and encode the sources and targets of a run."""
        data = open_data(config)
        if config.eval.generations:
            import_optional("sacrebleu", "scoring written answers (or set eval.generations to 0)")
        model_tokenizer = ModelTokenizer.of(config)
        train, held_out = (_encode(data, name, model_tokenizer) for name in ("train", "validation"))
        if int(train.targets.ids[train.targets.offsets[1] - 1]) != model_tokenizer.hf_config.eos_token_id:
            raise ConfigError(
                "model: its tokenizer puts no end-of-text token after an answer, so it would never learn to stop; name "
                "the model's own tokenizer"
            )
        order = LengthGrouped(train.sources.lengths, config.train.batch_size, config.data_seed)
        widths: tuple[Widths, Widths] = ((), ())
        if uses_few_widths(config):
            both = (train.sources, held_out.sources), (train.targets, held_out.targets)
            longest = [max(int(encoded.lengths.max()) for encoded in splits) for splits in both]
            widths = (
                order.widths(train.sources.lengths, longest[0], _MOST_SOURCE_WIDTHS),
                order.widths(train.targets.lengths, longest[1], _MOST_TARGET_WIDTHS),
            )
        return cls(
            data=data,
            model_tokenizer=model_tokenizer,
            train=train,
            order=order,
            widths=widths[0],
            target_widths=widths[1],
            held_out=held_out,
            validation_order=by_content(data.splits["validation"]),
        )

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        return build_text_to_text(config.model, self.model_tokenizer.hf_config, config.seed)

    def loss(self, model: nn.Module) -> nn.Module:
        return AnswerLoss(model)

    def largest(self, count: int) -> Batch:
        lengths = self.train.sources.lengths + self.train.targets.lengths
        return self.rows("train", np.resize(np.argsort(-lengths, kind="stable"), count))

    def target_count(self, first: int, count: int) -> int:
        return token_total(self.train.targets, self.order.chosen(first, count))

    def token_count(self, first: int, count: int) -> int:
        chosen = self.order.chosen(first, count)
        return token_total(self.train.sources, chosen) + token_total(self.train.targets, chosen)

    def inputs(self, split: str, rows: Order, counted: npt.NDArray[np.bool_], beside: Order) -> Rows:
        encoded, pad_id = self.train if split == "train" else self.held_out, self.model_tokenizer.tokenizer.pad_token_id
        inputs = encoded.sources.pad(rows, pad_id, encoded.sources.width(beside, self.widths))
        answers = encoded.targets.pad(rows, pad_id, encoded.targets.width(beside, self.target_widths))
        inputs.pop("token_type_ids", None)
        scored = answers["attention_mask"].astype(bool) & counted[:, None]
        return inputs | {"labels": np.where(scored, answers["input_ids"], IGNORED)}

    def metrics(self, sums: list[float]) -> MetricDict:
        return {"loss": sums[0] / sums[1], "token_accuracy": sums[2] / sums[1]}

    def write_answers(self, model: nn.Module, first: int, count: int) -> list[str]:
        longest = max(int(split.targets.lengths.max()) for split in (self.train, self.held_out))
        chosen = self.validation_order[first : first + count]
        return answer(model, self.model_tokenizer, self.held_out.sources, chosen, longest)

    def score_answers(self, answers: list[str]) -> MetricDict:
        # Answers are compared with the targets as the tokenizer decodes them, which is all that a model can write.
        targets, chosen = self.held_out.targets, self.validation_order[: len(answers)]
        tokens = [targets.ids[targets.offsets[row] : targets.offsets[row + 1]] for row in chosen]
        expected = self.model_tokenizer.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return text_metrics(answers, [text.strip() for text in expected]) | {"held_out": self.held_out_count}

    def headline(self, metrics: MetricDict) -> str:
        text = f"loss {metrics['loss']:.4f}, token accuracy {metrics['token_accuracy']:.4f}"
        if "exact_match" in metrics:
            text += (
                f", exact match {metrics['exact_match']:.4f}, chrF {metrics['chrf']:.1f}, BLEU {metrics['bleu']:.1f} "
                f"({example_count(metrics['written'], metrics['held_out'])} answers)"
            )
        return text

    def on_split(self, name: str) -> TextToText:
        encoded = _encode(self.data, name, self.model_tokenizer)
        return replace(self, split=name, held_out=encoded, validation_order=by_content(self.data.splits[name]))

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        names = ("token_accuracy", "exact_match", "chrf", "bleu")
        metrics: MetricDict = {name: last[name] for name in names if name in last}
        return {"val_loss": last["loss"], "best_val_loss": best.get("loss"), "best_step": best.get("step"), **metrics}

    def warnings(self) -> list[str]:
        splits = {"training": self.train, self.split: self.held_out}
        sources = {f"{name} source": split.sources for name, split in splits.items()}
        targets = {f"{name} target": split.targets for name, split in splits.items()}
        return self.cut_warnings(sources | targets) + _unknown_warnings(targets, self.model_tokenizer)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"pairs": "{pair}" in PROMPTS.get(self.data.name, "")}


class AnswerLoss(nn.Module):
    """Cross-entropy summed over the tokens of the answers, in float32; in evaluation, also how many were right.

    A token is right if it is the most likely one after the right tokens before it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        model: Any = self.model
        decoder_ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
        with unread_masks():
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_ids, use_cache=False
            ).logits
        sums = summed_loss(logits, labels, self.training)
        if self.training:
            return sums
        right = (logits.argmax(-1) == labels).sum()  # an ignored label is no token
        return torch.cat([sums, right.double()[None]])


def text_metrics(answers: list[str], expected: list[str]) -> MetricDict:
    """Return exact match as a share, and sacrebleu's chrF and BLEU from 0 to 100."""
    if not answers:
        return {}
    sacrebleu = import_optional("sacrebleu", "scoring written answers")
    return {
        "exact_match": sum(text == target for text, target in zip(answers, expected, strict=True)) / len(answers),
        "chrf": float(sacrebleu.corpus_chrf(answers, [expected]).score),
        "bleu": float(sacrebleu.corpus_bleu(answers, [expected]).score),
        "written": len(answers),
    }


@torch.no_grad()
def answer(
    model: nn.Module, model_tokenizer: ModelTokenizer, sources: Encoded, chosen: Order, longest: int
) -> list[str]:
    """Generate answers to the chosen sources greedily, with at most `longest` tokens each."""
    rows = sources.pad(chosen, model_tokenizer.tokenizer.pad_token_id)
    generator: Any = model
    device = next(model.parameters()).device
    generated = generator.generate(
        input_ids=torch.from_numpy(rows["input_ids"]).to(device),
        attention_mask=torch.from_numpy(rows["attention_mask"]).to(device),
        max_new_tokens=min(longest, model_tokenizer.max_length - 1),
    )
    return [text.strip() for text in model_tokenizer.tokenizer.batch_decode(generated, skip_special_tokens=True)]


def _encode(data: LabelledData, name: str, model_tokenizer: ModelTokenizer) -> SourcesAndTargets:
    """Encode a split. Raise when an answer consists only of tokens that the tokenizer does not know."""
    split = data.splits[name]
    assert split.answers is not None, "text-to-text data has answers"
    sources, targets = model_tokenizer.encode(split.texts, split.pairs), model_tokenizer.encode(split.answers)
    # Special tokens, the unknown token included, are left out of decoded text: a model that writes nothing would match
    # an answer that consists of them.
    known = count_tokens(targets, ~np.isin(targets.ids, model_tokenizer.tokenizer.all_special_ids))
    unknown = np.flatnonzero(known == 0)
    if len(unknown):
        raise ConfigError(
            f"{data.name}, {name}: the tokenizer has no known token for {len(unknown):,} of {len(known):,} answers, "
            f"such as {split.answers[unknown[0]]!r}; use other answers, or a model whose tokenizer knows them"
        )
    return SourcesAndTargets(sources, targets)


def _unknown_warnings(targets: dict[str, Encoded], model_tokenizer: ModelTokenizer) -> list[str]:
    """Return a warning for each split with answers that have tokens unknown to the tokenizer."""
    warnings = []
    for name, encoded in targets.items():
        unknown = int((count_tokens(encoded, encoded.ids == model_tokenizer.tokenizer.unk_token_id) > 0).sum())
        if unknown and model_tokenizer.tokenizer.unk_token_id != model_tokenizer.hf_config.eos_token_id:
            warnings.append(
                f"{unknown:,} {name} texts ({100 * unknown / len(encoded):.1f} %) have parts that the tokenizer does "
                "not know: scored without those"
            )
    return warnings
