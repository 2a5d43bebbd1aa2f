"""The labelled tasks known by name: where their rows are, and what their columns and classes are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..synthetic.judgements import KINDS

BUILTIN = "builtin:"
# Generated data whose answers are texts; those of `KINDS` are classes.
TRANSLATION = f"{BUILTIN}translation"
FOLDER = "folder"


@dataclass(frozen=True)
class SplitLocation:
    """Where a split may be: its name on the Hub (None: not there), and the names of local files.

    A file name without a suffix stands for every format. The public XNLI has the same split in two formats, so there
    the suffix is given. `{language}` stands for a language, which is also the name of the config on the Hub. A file
    with several languages has a column `language`.
    """

    split: str | None
    files: tuple[str, ...]
    language: str | None = None


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A labelled dataset. `labels` are in the order of the class indices, in every file and on the Hub.

    `train`, `validation` and the values of `extra` are locations, tried in order. Without a validation split, a share
    of the training rows becomes one. All splits are in one folder, unless they are `scattered`. Column names (`text`,
    `pair`, `label`) are tried in order too. `prompt` is the task as text, in T5's format where T5 was trained on it.
    `other_spellings` maps other spellings of labels to the labels.
    """

    about: str = ""
    repo: str = ""
    config: str | None = None
    folders: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    prompt: str = ""
    train: tuple[SplitLocation, ...]
    validation: tuple[SplitLocation, ...] = ()
    extra: Mapping[str, tuple[SplitLocation, ...]] = field(default_factory=dict)
    scattered: bool = False
    pair: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label", "gold_label")
    other_spellings: Mapping[str, str] = field(default_factory=dict)


_INFERENCE = {
    "labels": ("entailment", "neutral", "contradiction"),
    "text": ("premise", "sentence1"),
    "pair": ("hypothesis", "sentence2", "hypo"),
    "label": ("gold_label", "label"),
    "other_spellings": {"contradictory": "contradiction"},
    "prompt": "mnli hypothesis: {pair} premise: {text}",
}
_MATCHED = ("dev_matched", "validation_matched", "multinli_1.0_dev_matched")
_MISMATCHED = ("dev_mismatched", "validation_mismatched", "multinli_1.0_dev_mismatched")
_TRAIN = (SplitLocation("train", ("train",)),)
_TEST = {"test": (SplitLocation("test", ("test",)),)}

TASKS = {
    "sst2": NamedTask(
        about="SST-2: sentences from film reviews, negative or positive",
        repo="nyu-mll/glue",
        config="sst2",
        folders=("sst2", "SST-2"),
        labels=("negative", "positive"),
        text=("sentence", "text"),
        prompt="sst2 sentence: {text}",
        train=_TRAIN,
        validation=(SplitLocation("validation", ("dev", "validation")),),
    ),
    "mnli": NamedTask(
        about="MNLI: does the premise entail the hypothesis",
        repo="nyu-mll/glue",
        config="mnli",
        folders=("mnli", "MNLI", "multinli_1.0"),
        train=(SplitLocation("train", ("train", "multinli_1.0_train")),),
        validation=(SplitLocation("validation_matched", _MATCHED),),
        extra={"mismatched": (SplitLocation("validation_mismatched", _MISMATCHED),)},
        **_INFERENCE,  # type: ignore[arg-type]
    ),
    # Trained on MNLI and selected on English validation rows; other languages and all test splits are only reported.
    "xnli": NamedTask(
        about="XNLI: MNLI's question in many languages; trained in English",
        repo="facebook/xnli",
        config="en",
        scattered=True,
        folders=("xnli", "XNLI-1.0", "XNLI-MT-1.0/multinli", "mnli", "MNLI", "multinli_1.0"),
        train=(SplitLocation("train", ("train", "en/train", "multinli.train.en", "multinli_1.0_train")),),
        validation=(
            SplitLocation("validation", ("en.dev", "en/validation", "xnli.dev.tsv"), "en"),
            SplitLocation(None, _MATCHED),
        ),
        extra={
            "xnli-{language}": (
                SplitLocation("test", ("{language}.test", "{language}/test", "xnli.test.tsv"), language="{language}"),
                SplitLocation("validation", ("{language}.dev", "{language}/validation", "xnli.dev.tsv"), "{language}"),
            ),
            "matched": (SplitLocation(None, _MATCHED),),
            "mismatched": (SplitLocation(None, _MISMATCHED),),
        },
        **_INFERENCE,  # type: ignore[arg-type]
    ),
    "imdb": NamedTask(
        about="IMDB: long film reviews, negative or positive",
        repo="stanfordnlp/imdb",
        config="plain_text",
        folders=("imdb", "plain_text"),
        labels=("negative", "positive"),
        other_spellings={"neg": "negative", "pos": "positive"},
        text=("text", "review"),
        label=("label", "sentiment"),
        prompt="imdb review: {text}",
        train=_TRAIN,
        extra=_TEST,
    ),
    "ag_news": NamedTask(
        about="AG News: the beginnings of news articles, by topic",
        repo="fancyzhx/ag_news",
        config="default",
        folders=("ag_news", "data"),
        labels=("World", "Sports", "Business", "Sci/Tech"),
        text=("text",),
        prompt="ag_news article: {text}",
        train=_TRAIN,
        extra=_TEST,
    ),
}

# A user's own folder, with the usual names of its files.
OWN = NamedTask(
    train=(SplitLocation(None, ("train",)),),
    validation=(SplitLocation(None, ("validation", "valid", "val", "dev")),),
    extra={"test": (SplitLocation(None, ("test",)),)},
)

PROMPTS = {name: task.prompt for name, task in TASKS.items()}
PROMPTS |= {f"{BUILTIN}{name}": kind.prompt for name, kind in KINDS.items()}
NAMES = (*TASKS, FOLDER, *(f"{BUILTIN}{name}" for name in KINDS), TRANSLATION)


def to_prompt(task: str, text: str, pair: str | None) -> str:
    """Return a row of a classification task as the prompt for a text-to-text model; users' own texts stay as is."""
    prompt = PROMPTS.get(task)
    return text if prompt is None else prompt.format(text=text, pair=pair or "")
