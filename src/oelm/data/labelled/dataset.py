"""Labelled data for fine-tuning: the splits of a task as texts and classes, checked before anything is trained."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from ..synthetic.judgements import KINDS, TRAIN_SIZE, VALIDATION_SIZE, Judgement, judgements
from ..tables import Row
from .columns import Columns, guess, guess_written
from .labels import class_names, read_table, to_classes
from .locations import Tables, locate, on_hub
from .subsets import digest, first_share, lowest_first, split_off
from .tasks import BUILTIN, FOLDER, OWN, TASKS, NamedTask, check_name

PROMPTS = {name: task.prompt for name, task in TASKS.items()}
PROMPTS |= {f"{BUILTIN}{name}": kind.prompt for name, kind in KINDS.items()}


@dataclass(frozen=True, eq=False)
class Examples:
    """One split. `pairs` are the second texts, where rows have two; `answers` the targets, where answers are written.

    `labels` are class indices, and empty where answers are written.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: npt.NDArray[np.int64]
    answers: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, eq=False)
class LabelledData:
    """A task's data. Only "train" is trained on, and only "validation" chooses; any other split is for the end.

    `sources` says for each split where it is from, how many rows it has, and the sha256 of its content. `sha256` is of
    everything that is used, its order included.
    """

    name: str
    description: str
    synthetic: bool
    labels: tuple[str, ...]
    splits: dict[str, Examples]
    sources: dict[str, dict[str, Any]]
    sha256: str


def open_labelled(
    name: str,
    path: str | Path | None = None,
    *,
    form: str = "labels",
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    source: str | None = None,
    target: str | None = None,
    languages: Sequence[str] = ("en",),
    validation_share: float = 0.05,
    fraction: float = 1.0,
    revision: str | None = None,
) -> LabelledData:
    """The data of a task by its name, from the Hub or from the local files below `path`.

    `text`, `pair`, `label`, `source` and `target` name columns, where they are not those that the task is known by.
    `validation_share` of the training rows become the validation split where there is none; `fraction` of the rest
    are trained on. Both go by content, class by class, and need no seed: all runs see the same rows.
    """
    check_name(name)
    given = {"text": text, "pair": pair, "label": label, "source": source, "target": target}
    columns = {role: column for role, column in given.items() if column is not None}
    languages = tuple(languages)
    _check_arguments(name, path, form, columns, languages, validation_share, fraction, revision)
    if name.startswith(BUILTIN):
        draft = _builtin(name)
    else:
        task = TASKS.get(name, OWN)
        tables = on_hub(task, languages, revision) if path is None else locate(name, task, Path(path), languages)
        draft = _read(name, task, tables, form, columns)
        if path is not None and not draft.about:  # the user's own data is known by its folder
            draft.about = Path(path).resolve().name
    if "validation" not in draft.splits:
        _cut(draft, validation_share)
    _check(draft)
    if fraction < 1.0:
        _thin(draft, fraction)
    if form == "text" and draft.labels:
        _pose(draft)
    return _sealed(draft)


@dataclass
class _Draft:
    """The data while it is put together."""

    name: str
    about: str
    labels: tuple[str, ...]
    splits: dict[str, Examples]
    sources: dict[str, dict[str, Any]]
    synthetic: bool = False


def _read(name: str, task: NamedTask, tables: Tables, form: str, given: dict[str, str]) -> _Draft:
    """All tables of a task. The user's own data says with its training rows what the columns and classes are."""
    columns: Columns | None = None if name == FOLDER else _columns(task, given)
    labels = task.labels
    draft = _Draft(name, task.about, labels, {}, {})

    def columns_for(row: Row, where: str) -> Columns:
        return columns or (guess_written if form == "text" else guess)(row, where, **given)

    def labelled_elsewhere() -> str:
        if task.labels:
            splits = [place.split for places in (task.train, task.validation, *task.extra.values()) for place in places]
            return f"The splits of {name} that have labels: {', '.join(dict.fromkeys(filter(None, splits)))}"
        found = f"; {', '.join(draft.splits)} can stay as it is" if draft.splits else ""
        return f"Add the answers, or move the file away{found}; a class that is really called so needs another name"

    named = {"train": tables.train, "validation": tables.validation, **tables.extra}
    for split, table in named.items():
        if table is None:
            continue
        read, columns = read_table(table, columns_for, labelled_elsewhere)
        if columns.written:
            examples = Examples(read.texts, None, np.empty(0, dtype=np.int64), read.answers)
        else:
            labels = labels or class_names(read.answers, table.name)
            indices = to_classes(read, labels, task.also, fixed=bool(task.labels))
            examples = Examples(read.texts, read.pairs, indices)
        draft.splits[split] = examples
        draft.sources[split] = table.source() | ({"no_consensus": read.no_consensus} if read.no_consensus else {})
    draft.labels = labels
    return draft


def _columns(task: NamedTask, given: dict[str, str]) -> Columns:
    """A known task's columns, those that the user names in their place."""
    named = {role: (given[role],) if role in given else getattr(task, role) for role in ("text", "pair", "label")}
    return Columns(named["text"], named["pair"], named["label"])


def builtin_labelled(
    name: str, *, seed: int = 0, train: int = TRAIN_SIZE, validation: int = VALIDATION_SIZE
) -> LabelledData:
    """The built-in synthetic data `sentiment` or `inference`, in any size. No row stands on both sides."""
    draft = _builtin(f"{BUILTIN}{name}", seed, train, validation)
    _check(draft)
    return _sealed(draft)


def by_content(examples: Examples) -> npt.NDArray[np.int64]:
    """The rows in an order that their content alone decides: the first few stand for all, however a file is sorted."""
    rows = [(*shown, answer) for shown, answer in zip(_contents(examples), _answers(examples), strict=True)]
    # Rows of one digest differ in case or spacing only; the text itself, behind it, puts these in order too.
    keys = [digest(*row) + "\x00".join(row).encode() for row in rows]
    return np.array(lowest_first(keys, range(len(keys))), dtype=np.int64)


def _builtin(name: str, seed: int = 0, train: int = TRAIN_SIZE, validation: int = VALIDATION_SIZE) -> _Draft:
    kind = name.removeprefix(BUILTIN)
    rows = judgements(kind, seed, train + validation)
    labels = KINDS[kind].labels

    def examples(part: list[Judgement]) -> Examples:
        pairs = [row.pair for row in part if row.pair is not None]
        indices = np.array([labels.index(row.label) for row in part], dtype=np.int64)
        return Examples([row.text for row in part], pairs or None, indices)

    splits = {"train": examples(rows[:train]), "validation": examples(rows[train:])}
    sources: dict[str, dict[str, Any]] = {split: {"builtin": name, "seed": seed, "synthetic": True} for split in splits}
    return _Draft(name, f"built-in synthetic {kind} data, seed {seed}", labels, splits, sources, synthetic=True)


def _cut(draft: _Draft, share: float) -> None:
    """Make a validation split of training rows. Rows with the same first text stay together, so that none leaks."""
    train = draft.splits["train"]
    aside = split_off([digest(text) for text in train.texts], _classes_of(train), share)
    if not aside.any():
        raise DataError(f"{draft.name}: {len(train):,} training rows are too few to cut a validation split from")
    whole = dict(draft.sources["train"])
    draft.splits = {"train": _rows(train, ~aside), "validation": _rows(train, aside), **_without(draft.splits, "train")}
    draft.sources = {
        "train": whole,
        "validation": _without(whole, "no_consensus") | {"cut_from": "train", "share": share},
        **_without(draft.sources, "train"),
    }


def _thin(draft: _Draft, fraction: float) -> None:
    """Keep a share of the training rows."""
    train = draft.splits["train"]
    kept = first_share([digest(*row) for row in _contents(train)], _classes_of(train), fraction)
    draft.splits["train"] = _rows(train, kept)
    draft.sources["train"] |= {"fraction": fraction, "of": len(train)}


def posed(name: str, text: str, pair: str | None) -> str:
    """A row of a classification task as the text that a model answers; of the user's own data, the text as it is."""
    prompt = PROMPTS.get(name)
    return text if prompt is None else prompt.format(text=text, pair=pair or "")


def _pose(draft: _Draft) -> None:
    """Turn classes into text: a prompt with the texts in it, and the class's name as the answer."""
    for split, examples in draft.splits.items():
        pairs = examples.pairs or [""] * len(examples)
        texts = [posed(draft.name, text, pair) for text, pair in zip(examples.texts, pairs, strict=True)]
        answers = [draft.labels[index] for index in examples.labels.tolist()]
        draft.splits[split] = Examples(texts, None, np.empty(0, dtype=np.int64), answers)
    draft.labels = ()


def _sealed(draft: _Draft) -> LabelledData:
    """The finished data, with hashes of what is in it and a description of where it is from."""
    total = hashlib.sha256(json.dumps(draft.labels).encode())
    for split, examples in draft.splits.items():
        content = hashlib.sha256()
        answers: Iterable[Any] = examples.labels.tolist() if examples.answers is None else examples.answers
        for row in zip(_contents(examples), answers, strict=True):
            content.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        draft.sources[split] |= {"rows": len(examples), "sha256": content.hexdigest()}
        total.update(f"\n{split} {content.hexdigest()}".encode())
    return LabelledData(
        draft.name,
        _description(draft),
        draft.synthetic,
        draft.labels,
        draft.splits,
        draft.sources,
        total.hexdigest(),
    )


def _description(draft: _Draft) -> str:
    counts = ", ".join(f"{len(examples):,} {split}" for split, examples in draft.splits.items())
    notes = [draft.about, f"rows: {counts}"]
    for split, source in draft.sources.items():
        if "no_consensus" in source:
            notes.append(f"{split}: {source['no_consensus']:,} rows without a consensus label left out")
        if "cut_from" in source:
            notes.append(f"validation is cut from train ({source['share']:g} of it)")
        if "fraction" in source:
            notes.append(f"trained on {source['fraction']:g} of {source['of']:,} rows")
    return "; ".join(notes)


def _check(draft: _Draft) -> None:
    """What must hold between the splits: the same classes, and held-out rows that were not trained on."""
    for split, examples in draft.splits.items():
        own = Counter(examples.labels.tolist())
        absent = [name for index, name in enumerate(draft.labels) if not own[index]]
        if absent and split in ("train", "validation"):
            raise DataError(
                f"{draft.name}: no row of {split} has the label {', '.join(absent)}; train and validation need "
                f"every one of {', '.join(draft.labels)}"
            )
    seen: dict[str, set[bytes]] = {}
    for split, examples in draft.splits.items():
        contents = [digest(*row) for row in _contents(examples)]
        for earlier in ("train", "validation"):
            if earlier in seen and split != earlier:
                shared = sum(content in seen[earlier] for content in contents)
                if shared == len(contents):
                    raise DataError(
                        f"{draft.name}: every row of {split} is also in {earlier}: they must be different data"
                    )
                if shared:
                    draft.sources[split][f"also_in_{earlier}"] = shared
        seen[split] = set(contents)


def _check_arguments(
    name: str,
    path: str | Path | None,
    form: str,
    columns: dict[str, str],
    languages: tuple[str, ...],
    validation_share: float,
    fraction: float,
    revision: str | None,
) -> None:
    if form not in ("labels", "text"):
        raise DataError(f"form {form!r}: use 'labels' (a class for each row) or 'text' (the answer is written)")
    if not 0.0 < validation_share <= 0.5:
        raise DataError(f"validation_share {validation_share}: must be above 0 and at most 0.5")
    if not 0.0 < fraction <= 1.0:
        raise DataError(f"fraction {fraction}: must be above 0 and at most 1")
    builtin = name.startswith(BUILTIN)
    if builtin and (path is not None or columns or revision):
        raise DataError(f"{name}: is made here; it takes no path, no columns and no revision")
    if name == FOLDER and path is None:
        raise DataError(
            "task 'folder': where is it? --data DIR, or data.path; it holds train.* and, best, validation.*"
        )
    if path is not None and revision is not None:
        raise DataError(f"revision {revision!r}: belongs to the Hub; local files below {path} have none")
    if not languages or (languages != ("en",) and name != "xnli"):
        raise DataError(f"languages {', '.join(languages) or '()'}: only xnli has several; it needs at least one")
    fits = {"source", "target"} if form == "text" and name == FOLDER else {"text", "pair", "label"}
    for role, column in columns.items():
        if role not in fits:
            raise DataError(f"{role} {column!r}: task {name!r} with form {form!r} takes {', '.join(sorted(fits))}")
    if "pair" in columns and name != FOLDER and not TASKS[name].pair:
        raise DataError(f"pair {columns['pair']!r}: the rows of {name} have one text")


def _contents(examples: Examples) -> Iterator[tuple[str, ...]]:
    """What each row shows: its text, or both."""
    return iter(zip(examples.texts, *([] if examples.pairs is None else [examples.pairs]), strict=True))


def _answers(examples: Examples) -> list[str]:
    """What is asked of each row: the text to write, or the number of its class."""
    return list(map(str, examples.labels.tolist())) if examples.answers is None else examples.answers


def _classes_of(examples: Examples) -> npt.NDArray[np.int64]:
    """Class indices; written answers are all of one class."""
    return examples.labels if examples.answers is None else np.zeros(len(examples), dtype=np.int64)


def _rows(examples: Examples, mask: npt.NDArray[np.bool_]) -> Examples:
    """Some of the rows, in their order."""
    rows = np.flatnonzero(mask).tolist()

    def some(values: list[str] | None) -> list[str] | None:
        return None if values is None else [values[row] for row in rows]

    labels = examples.labels if examples.answers is not None else examples.labels[mask]
    return Examples([examples.texts[row] for row in rows], some(examples.pairs), labels, some(examples.answers))


def _without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}
