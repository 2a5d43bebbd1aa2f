"""The labelled tasks that are known by name: where their rows are, what their columns and classes are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import DataError, nearest
from ..synthetic.judgements import KINDS

BUILTIN = "builtin:"
FOLDER = "folder"


@dataclass(frozen=True)
class Place:
    """Where a split is: its name on the Hub (None: not there), and the names of local files.

    A name without an ending stands for every format; the public XNLI comes in two at once, so there one is named.
    `{language}` stands for a language, which is also the name of the config on the Hub. A file that holds several
    languages has a column `language`.
    """

    split: str | None
    files: tuple[str, ...]
    language: str | None = None


@dataclass(frozen=True)
class NamedTask:
    """A labelled dataset. The order of `labels` is that of the class indices, in every file and on the Hub.

    `validation` and the values of `extra` are places tried in order. Without a validation split, a share of the
    training rows becomes one. All splits lie in one folder, unless they are `scattered`. Names of columns are tried in
    order too. `prompt` is the task as text, in the format that T5 was trained on, where it was. `also` are other
    spellings of labels.
    """

    about: str
    repo: str
    config: str | None
    folders: tuple[str, ...]
    labels: tuple[str, ...]
    text: tuple[str, ...]
    prompt: str
    train: tuple[Place, ...]
    validation: tuple[Place, ...] = ()
    extra: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    scattered: bool = False
    pair: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label", "gold_label")
    also: Mapping[str, str] = field(default_factory=dict)


_INFERENCE = {
    "labels": ("entailment", "neutral", "contradiction"),
    "text": ("premise", "sentence1"),
    "pair": ("hypothesis", "sentence2", "hypo"),
    "label": ("gold_label", "label"),
    "also": {"contradictory": "contradiction"},
    "prompt": "mnli hypothesis: {pair} premise: {text}",
}
_MATCHED = ("dev_matched", "validation_matched", "multinli_1.0_dev_matched")
_MISMATCHED = ("dev_mismatched", "validation_mismatched", "multinli_1.0_dev_mismatched")
_TRAIN = (Place("train", ("train",)),)
_TEST = {"test": (Place("test", ("test",)),)}

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
        validation=(Place("validation", ("dev", "validation")),),
    ),
    "mnli": NamedTask(
        about="MNLI: does the premise entail the hypothesis",
        repo="nyu-mll/glue",
        config="mnli",
        folders=("mnli", "MNLI", "multinli_1.0"),
        train=(Place("train", ("train", "multinli_1.0_train")),),
        validation=(Place("validation_matched", _MATCHED),),
        extra={"mismatched": (Place("validation_mismatched", _MISMATCHED),)},
        **_INFERENCE,  # type: ignore[arg-type]
    ),
    # Trains on MNLI and is chosen on English: the other languages, and every test split, are only reported.
    "xnli": NamedTask(
        about="XNLI: MNLI's question in many languages; trained in English",
        repo="facebook/xnli",
        config="en",
        scattered=True,
        folders=("xnli", "XNLI-1.0", "XNLI-MT-1.0/multinli", "mnli", "MNLI", "multinli_1.0"),
        train=(Place("train", ("train", "en/train", "multinli.train.en", "multinli_1.0_train")),),
        validation=(
            Place("validation", ("en.dev", "en/validation", "xnli.dev.tsv"), "en"),
            Place(None, _MATCHED),
        ),
        extra={
            "xnli-{language}": (
                Place("test", ("{language}.test", "{language}/test", "xnli.test.tsv"), language="{language}"),
                Place("validation", ("{language}.dev", "{language}/validation", "xnli.dev.tsv"), "{language}"),
            ),
            "matched": (Place(None, _MATCHED),),
            "mismatched": (Place(None, _MISMATCHED),),
        },
        **_INFERENCE,  # type: ignore[arg-type]
    ),
    "imdb": NamedTask(
        about="IMDB: long film reviews, negative or positive",
        repo="stanfordnlp/imdb",
        config="plain_text",
        folders=("imdb", "plain_text"),
        labels=("negative", "positive"),
        also={"neg": "negative", "pos": "positive"},
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

# A user's own folder: the usual names of its files.
OWN = NamedTask(
    about="",
    repo="",
    config=None,
    folders=(),
    labels=(),
    text=(),
    prompt="",
    train=(Place(None, ("train",)),),
    validation=(Place(None, ("validation", "valid", "val", "dev")),),
    extra={"test": (Place(None, ("test",)),)},
)

NAMES = (*TASKS, FOLDER, *(f"{BUILTIN}{name}" for name in KINDS))


def check_name(name: str) -> None:
    """Refuse a task that is not known."""
    if name not in NAMES:
        raise DataError(f"no task called {name!r}.{nearest(name, NAMES)} Known tasks: {', '.join(NAMES)}")
