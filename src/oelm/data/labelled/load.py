"""Load the data of a labelled task: from the Hub, from local files, or generated here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from ...base.strict import Fraction, Strict, ValidationShare
from ...errors import DataError, nearest
from ..synthetic import judgements as judged
from ..synthetic import translation as translated
from ..synthetic.judgements import KINDS, Judgement, judgements
from ..synthetic.translation import Translation, translations
from ..tables import Row
from .columns import ColumnNames, guess_labelled, guess_text_to_text
from .draft import Draft
from .examples import Examples, LabelledData
from .labels import class_names, read_table, to_classes
from .table_sources import TableSource, find_local, find_on_hub
from .tasks import BUILTIN, FOLDER, NAMES, OWN, TASKS, TRANSLATION, NamedTask


class LabelledKeywords(TypedDict, total=False):
    """The keyword arguments of `open_labelled`."""

    form: Literal["labels", "text"]
    text: str | None
    pair: str | None
    label: str | None
    source: str | None
    target: str | None
    languages: Sequence[str]
    validation_share: float
    fraction: float
    revision: str | None


class LabelledOptions(Strict, refusal=DataError):
    """The keyword arguments of `open_labelled` with their defaults, validated."""

    form: Literal["labels", "text"] = "labels"
    text: str | None = None
    pair: str | None = None
    label: str | None = None
    source: str | None = None
    target: str | None = None
    languages: tuple[str, ...] = ("en",)
    validation_share: ValidationShare = 0.05
    fraction: Fraction = 1.0
    revision: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that the user named, by their role."""
        columns = {role: getattr(self, role) for role in ("text", "pair", "label", "source", "target")}
        return {role: column for role, column in columns.items() if column is not None}


def open_labelled(name: str, path: str | Path | None = None, **keywords: Unpack[LabelledKeywords]) -> LabelledData:
    """Load the data of a task by its name, from the local files below `path`, or from the Hub without a path.

    form              "labels" for classes, or "text" for answers as text
    text, pair, label, source, target
                      the names of columns, where they are not those that the task is known by
    languages         the languages that xnli is evaluated in
    validation_share  the share of the training rows that becomes the validation split of a task without one
    fraction          the share of the remaining training rows that is trained on
    revision          a branch, tag or commit of the dataset on the Hub

    Both shares are chosen by content, class by class, without a seed: all runs see the same rows.
    """
    if name not in NAMES:
        raise DataError(f"no task called {name!r}.{nearest(name, NAMES)} Known tasks: {', '.join(NAMES)}")
    fields: dict[str, Any] = {**keywords}
    options = LabelledOptions(**fields)
    _check_combination(name, path, options)
    if name.startswith(BUILTIN):
        draft = _builtin(name)
    else:
        task = TASKS.get(name, OWN)
        if path is None:
            tables = find_on_hub(task, options.languages, options.revision)
        else:
            tables = find_local(name, task, Path(path), options.languages)
        draft = _read_tables(name, task, tables, options)
        if path is not None and not draft.about:  # users' own data is described by the name of its folder
            draft.about = Path(path).resolve().name
    if "validation" not in draft.splits:
        draft.hold_out_validation(options.validation_share)
    digests = draft.check()
    if options.fraction < 1.0:
        draft.keep_fraction(options.fraction, digests["train"])
    if options.form == "text" and draft.labels:
        draft.to_text()
    return draft.finish()


def builtin_labelled(
    name: str, *, seed: int = 0, train: int | None = None, validation: int | None = None
) -> LabelledData:
    """Generate the built-in data `sentiment`, `inference` or `translation` in any size; no row is in both splits."""
    draft = _builtin(f"{BUILTIN}{name}", seed, train, validation)
    draft.check()
    return draft.finish()


def _read_tables(name: str, task: NamedTask, tables: dict[str, TableSource], options: LabelledOptions) -> Draft:
    """Read all tables of a task. In users' own data, the training rows decide what the columns and classes are."""
    user_columns = {role: (column,) for role, column in options.columns.items()}
    columns: ColumnNames | None = None
    if name != FOLDER:  # names that the user gave replace the task's own
        columns = ColumnNames(*(user_columns.get(role, getattr(task, role)) for role in ("text", "pair", "label")))
    labels = task.labels
    draft = Draft(name=name, about=task.about, labels=labels)
    guess_columns = guess_text_to_text if options.form == "text" else guess_labelled

    def columns_for(row: Row, where: str) -> ColumnNames:
        return columns or guess_columns(row, where, **options.columns)

    for split, table in tables.items():
        rows, columns = read_table(table, columns_for, _unanswered_advice(name, task, list(draft.splits)))
        if columns.text_answers:
            examples = Examples(rows.texts, None, np.empty(0, dtype=np.int64), rows.answers)
        else:
            labels = labels or class_names(rows.answers, table.name)
            indices = to_classes(rows, labels, task.other_spellings, fixed=bool(task.labels))
            examples = Examples(rows.texts, rows.pairs or None, indices)
        draft.splits[split] = examples
        draft.sources[split] = table.source() | ({"no_consensus": rows.no_consensus} if rows.no_consensus else {})
    draft.labels = labels
    return draft


def _unanswered_advice(name: str, task: NamedTask, read_splits: list[str]) -> str:
    """Return what to do about rows without an answer."""
    if task.labels:
        locations = [*task.train, *task.validation, *chain.from_iterable(task.extra.values())]
        splits = dict.fromkeys(location.split for location in locations if location.split)
        return f"The splits of {name} that have labels: {', '.join(splits)}"
    unaffected = f"; {', '.join(read_splits)} can stay as it is" if read_splits else ""
    return f"Add the answers, or move the file away{unaffected}"


def _builtin(name: str, seed: int = 0, train: int | None = None, validation: int | None = None) -> Draft:
    """Return generated data; the usual sizes are those of its kind."""
    sizes = translated if name == TRANSLATION else judged
    train = sizes.TRAIN_SIZE if train is None else train
    count = train + (sizes.VALIDATION_SIZE if validation is None else validation)
    kind = name.removeprefix(BUILTIN)
    labels: tuple[str, ...] = ()
    if name == TRANSLATION:
        pairs = translations(seed, count)
        splits = {"train": _translated(pairs[:train]), "validation": _translated(pairs[train:])}
    else:
        rows = judgements(kind, seed, count)
        labels = KINDS[kind].labels
        splits = {"train": _judged(rows[:train], labels), "validation": _judged(rows[train:], labels)}
    sources: dict[str, dict[str, Any]] = {split: {"builtin": name, "seed": seed, "synthetic": True} for split in splits}
    about = f"built-in synthetic {kind} data, seed {seed}"
    return Draft(name=name, about=about, labels=labels, splits=splits, sources=sources, synthetic=True)


def _judged(rows: list[Judgement], labels: tuple[str, ...]) -> Examples:
    pairs = [row.pair for row in rows if row.pair is not None]
    indices = np.array([labels.index(row.label) for row in rows], dtype=np.int64)
    return Examples([row.text for row in rows], pairs or None, indices)


def _translated(rows: list[Translation]) -> Examples:
    return Examples([row.source for row in rows], None, np.empty(0, dtype=np.int64), [row.target for row in rows])


def _check_combination(name: str, path: str | Path | None, options: LabelledOptions) -> None:
    """Raise DataError for options that do not fit the task or each other."""
    columns, languages = options.columns, options.languages
    if name.startswith(BUILTIN) and (path is not None or columns or options.revision):
        raise DataError(f"{name}: this data is generated; it takes no path, no columns and no revision")
    if name == TRANSLATION and options.form != "text":
        raise DataError(f"{name}: its answers are texts, not classes; set task.form to 'text'")
    if name == FOLDER and path is None:
        raise DataError("task 'folder': needs --data DIR (data.path), a folder with train.* and perhaps validation.*")
    if path is not None and options.revision is not None:
        raise DataError(f"revision {options.revision!r}: belongs to the Hub; local files below {path} have none")
    if not languages or (languages != ("en",) and name != "xnli"):
        raise DataError(f"languages {', '.join(languages) or '()'}: only xnli has several; it needs at least one")
    allowed = ("source", "target") if options.form == "text" and name == FOLDER else ("label", "pair", "text")
    for role, column in columns.items():
        if role not in allowed:
            raise DataError(f"{role} {column!r}: task {name!r} with form {options.form!r} takes {', '.join(allowed)}")
    if "pair" in columns and name != FOLDER and not TASKS[name].pair:
        raise DataError(f"pair {columns['pair']!r}: the rows of {name} have one text")
