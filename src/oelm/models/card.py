"""The model card of an exported checkpoint: what was frozen, how it was trained, and its figures, as README.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import nn
from transformers import PreTrainedModel

from .. import __version__
from ..base.files import write_text
from ..method.audit import audit
from ..method.seal import record_of
from ..method.spec import PRESETS, Method

CARD = "README.md"
# What a class is for, in the Hub's words and in the name of the Auto class that loads it, by the end of its name.
_PURPOSES = {
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForConditionalGeneration": ("text-generation", "AutoModelForSeq2SeqLM"),
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure of a model: the split it was measured on, the metric's name and its value."""

    split: str
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model was trained, from the records of its run. `base` is the pretrained model's name on the Hub, if any.

    `settings` are rows of a table in words; `notes` are what a reader of the figures must know.
    """

    task: str
    data: str
    base: str | None
    settings: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


def write_card(folder: Path, model: nn.Module, plain: PreTrainedModel, training: Training | None) -> None:
    """Write the card of `plain`, which `model` was exported to, unless the folder has one: it may have been edited."""
    if not (folder / CARD).exists():
        write_text(folder / CARD, model_card(model, plain, training))


def model_card(model: nn.Module, plain: PreTrainedModel, training: Training | None) -> str:
    """Return the card: front matter for the Hub, and the same in words."""
    purpose, auto_class = _purpose(plain)
    sections = [
        f"---\n{_front_matter(plain, purpose, training)}---\n",
        f"# {type(plain).__name__}\n",
        f"Exported with oelm {__version__} as a plain checkpoint of transformers: it loads without oelm, and all of "
        "its parameters are trainable again.\n",
        f'```python\nfrom transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained("FOLDER")\n```\n',
        "## What was frozen\n",
        *_what_was_frozen(model),
    ]
    if training is None:
        sections.append("## How it was trained\n\nNo record of its training was at hand when it was exported.\n")
    else:
        sections += _how_it_was_trained(training)
    return "\n".join(sections)


def _purpose(plain: PreTrainedModel) -> tuple[str | None, str]:
    name = type(plain).__name__
    matching = (purpose for ending, purpose in _PURPOSES.items() if name.endswith(ending))
    return next(matching, (None, "AutoModel"))


def _front_matter(plain: PreTrainedModel, purpose: str | None, training: Training | None) -> str:
    """Return the YAML that the Hub reads. The licence is the author's to choose, so it is left out."""
    fields: dict[str, Any] = {"library_name": "transformers", "tags": ["oelm"]}
    if purpose is not None:
        fields["pipeline_tag"] = purpose
    if training is not None and training.base is not None:
        fields["base_model"] = training.base
    if training is not None and training.figures:
        fields["model_name"] = type(plain).__name__
        fields["eval_results"] = [
            EvalResult(
                task_type=purpose or "other",
                dataset_type=training.task,
                dataset_name=training.data.partition(";")[0],
                dataset_split=figure.split,
                metric_type=figure.metric,
                metric_value=figure.value,
            )
            for figure in training.figures
        ]
    return f"{ModelCardData(**fields).to_yaml()}\n"


def _what_was_frozen(model: nn.Module) -> list[str]:
    record = record_of(model)
    if record is None:
        return ["Nothing: no method was applied to this model.\n"]
    method = Method.load(record["method"])
    sentence = f"The model had the method `{method.name}` (seed {record['seed']}). Every frozen tensor was compared "
    sentence += "with its hash before the export. Before the export it was:\n"
    custom = [] if method.name in PRESETS else [f"The method as data:\n\n```json\n{method.to_json()}\n```\n"]
    return [sentence, f"```text\n{audit(model)}\n```\n", *custom]


def _how_it_was_trained(training: Training) -> list[str]:
    settings = _table(("setting", "value"), training.settings)
    rows = [(figure.split, figure.metric, f"{figure.value:.6g}") for figure in training.figures]
    figures = (
        _table(("split", "metric", "value"), rows) if rows else "The run has no final figures: it is unfinished.\n"
    )
    notes = "".join(f"- {_cell(note)}\n" for note in training.notes)
    return ["## How it was trained\n", settings, "## Its figures\n", figures, *([notes] if notes else [])]


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = (f"| {' | '.join(map(_cell, line))} |\n" for line in (head, *rows))
    first = next(lines)
    return f"{first}{'|---' * len(head)}|\n{''.join(lines)}"


def _cell(text: str) -> str:
    """Return text for a table's cell: on one line, and with nothing that Markdown or HTML would act on."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())
