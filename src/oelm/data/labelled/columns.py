"""Which column of a labelled table holds what: by the task's names, by the user's, or where only one can be meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import DataError
from ..corpus.readers import TEXT_FIELDS
from ..tables import Row

# Usual names, for data of the user's own. Of the pairs, the first name is the text and the second what goes with it.
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
TEXTS = (*TEXT_FIELDS, "review", "question", "premise", "sentence1")
LABELS = ("label", "gold_label", "labels", "class", "category", "sentiment")
TEXT_TO_TEXT = (("source", "target"), ("input", "output"), ("prompt", "completion"), ("question", "answer"))


@dataclass(frozen=True)
class Columns:
    """Names of columns, each tried in order: the text, the second text of a pair (none: no pairs), and the answer.

    The answer is a label, or the target text where `written`.
    """

    text: tuple[str, ...]
    pair: tuple[str, ...]
    answer: tuple[str, ...]
    written: bool = False


@dataclass(frozen=True)
class Found:
    """The columns of one table. Without an answer, none of its rows has a label."""

    text: str
    pair: str | None
    answer: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.answer) if name is not None]


def find(columns: Columns, row: Row, where: str) -> Found:
    """The task's columns in a table."""
    text = _first(columns.text, row)
    if text is None:
        role = "source" if columns.written else "text"
        raise DataError(f"{where}: no column {_either(columns.text)}; {_has(row)}; name the right one as `{role}`")
    pair = _first(columns.pair, row)
    if columns.pair and pair is None:
        raise DataError(
            f"{where}: each row needs two texts, {text!r} and {_either(columns.pair)}; {_has(row)}; "
            "name the second one as `pair`"
        )
    return Found(text, pair, _first(columns.answer, row))


def guess(
    row: Row,
    where: str,
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """The columns of a user's own labelled table, by their usual names; what the user names is taken as it is."""
    _check_there(row, where, text=text, pair=pair, label=label)
    answer = label or _only(LABELS, row)
    if answer is None:
        raise DataError(f"{where}: which column holds the label? {_has(row)}; name one: task.label=COLUMN")
    if text is None and pair is None:
        known = [names for names in PAIRS if all(name in row for name in names)]
        if len(known) == 1:
            text, pair = known[0]
    rest = [name for name in row if name not in (answer, pair)]
    if text is None:
        textual = [name for name in rest if isinstance(row[name], str)]
        text = _only(TEXTS, rest) or (textual[0] if len(textual) == 1 else None)
    if text is None:
        raise DataError(f"{where}: which column holds the text? {_has(row)}; name one: task.text=COLUMN")
    if len({text, pair, answer}) < 3:
        raise DataError(f"{where}: text {text!r}, pair {pair!r} and label {answer!r} must be different columns")
    return Columns((text,), (pair,) if pair else (), (answer,))


def guess_written(row: Row, where: str, *, source: str | None = None, target: str | None = None) -> Columns:
    """The columns of a user's own text-to-text table."""
    _check_there(row, where, source=source, target=target)
    if source is None and target is None:
        known = [names for names in TEXT_TO_TEXT if all(name in row for name in names)]
        if len(known) == 1:
            source, target = known[0]
    if source is None or target is None:
        raise DataError(f"{where}: which columns hold the texts? {_has(row)}; name two as `source` and `target`")
    if source == target:
        raise DataError(f"{where}: source and target are both {source!r}: name two columns")
    return Columns((source,), (), (target,), written=True)


def _first(names: Sequence[str], row: Row) -> str | None:
    return next((name for name in names if name in row), None)


def _only(names: Sequence[str], columns: Row | Sequence[str]) -> str | None:
    there = [name for name in names if name in columns]
    return there[0] if len(there) == 1 else None


def _check_there(row: Row, where: str, **given: str | None) -> None:
    for role, name in given.items():
        if name is not None and name not in row:
            raise DataError(f"{where}: no column {name!r}, which `{role}` names; {_has(row)}")


def _either(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def _has(row: Row) -> str:
    return f"it has {', '.join(map(repr, row))}"
