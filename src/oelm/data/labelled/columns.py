"""Find the columns of texts and answers in a table: by the task's names, the user's names, or the only candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import DataError
from ..corpus.readers import TEXT_FIELDS
from ..tables import Row

# Usual column names in users' own data. In a pair, the first name is the text and the second its companion.
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
class ColumnNames:
    """Column names to try in order: of the text, the second text of a pair (empty: no pairs), and the answer.

    The answer is a target text when `text_answers` is True, and a label otherwise.
    """

    text: tuple[str, ...]
    pair: tuple[str, ...]
    answer: tuple[str, ...]
    text_answers: bool = False


@dataclass(frozen=True)
class FoundColumns:
    """The columns of one table among the candidates. When `answer` is None, no row of the table has a label."""

    candidates: ColumnNames
    text: str
    pair: str | None
    answer: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.answer) if name is not None]


def find_columns(candidates: ColumnNames, row: Row, where: str) -> FoundColumns:
    """Return which of the candidates a table has, given one of its rows; `where` names the table in errors."""
    text = _first(candidates.text, row)
    if text is None:
        role = "source" if candidates.text_answers else "text"
        raise DataError(f"{where}: no column {_either(candidates.text)}; {_has(row)}; name the right one as `{role}`")
    pair = _first(candidates.pair, row)
    if candidates.pair and pair is None:
        raise DataError(
            f"{where}: each row needs two texts, {text!r} and {_either(candidates.pair)}; {_has(row)}; "
            "name the second one as `pair`"
        )
    return FoundColumns(candidates, text, pair, _first(candidates.answer, row))


def find_inputs(candidates: Sequence[tuple[str, str | None]], row: Row, where: str) -> tuple[str, str | None]:
    """Return the first of the candidates, a column of texts and one of second texts or None, that a table has.

    A table whose only column with text has another name is taken where one column is enough.
    """
    for text, pair in candidates:
        if text in row and (pair is None or pair in row):
            return text, pair
    single = all(pair is None for _, pair in candidates)
    with_text = [name for name in row if isinstance(row[name], str)]
    if single and len(row) == len(with_text) == 1:
        return with_text[0], None
    names = [repr(text) if pair is None else f"{text!r} with {pair!r}" for text, pair in candidates]
    raise DataError(f"{where}: no column {' or '.join(names)}; {_has(row)}")


def guess_labelled(
    row: Row, where: str, *, text: str | None = None, pair: str | None = None, label: str | None = None
) -> ColumnNames:
    """Return the columns of a user's own labelled table: those that the user names, else those with usual names."""
    _require_columns(row, where, text=text, pair=pair, label=label)
    answer = label or _only(LABELS, row)
    if answer is None:
        text_too = "" if text or pair or _only(TEXTS, row) else ", and that of the text: task.text=COLUMN"
        raise DataError(f"{where}: which column holds the label? {_has(row)}; name one: task.label=COLUMN{text_too}")
    if text is None and pair is None:
        known_pairs = [names for names in PAIRS if all(name in row for name in names)]
        if len(known_pairs) == 1:
            text, pair = known_pairs[0]
    others = [name for name in row if name not in (answer, pair)]
    if text is None:
        text_columns = [name for name in others if isinstance(row[name], str)]
        text = _only(TEXTS, others) or (text_columns[0] if len(text_columns) == 1 else None)
    if text is None:
        raise DataError(f"{where}: which column holds the text? {_has(row)}; name one: task.text=COLUMN")
    if len({text, pair, answer}) < 3:
        raise DataError(f"{where}: text {text!r}, pair {pair!r} and label {answer!r} must be different columns")
    return ColumnNames((text,), (pair,) if pair else (), (answer,))


def guess_text_to_text(row: Row, where: str, *, source: str | None = None, target: str | None = None) -> ColumnNames:
    """Return the columns of a user's own text-to-text table: those that the user names, else a usual pair of names."""
    _require_columns(row, where, source=source, target=target)
    if source is None and target is None:
        known_pairs = [names for names in TEXT_TO_TEXT if all(name in row for name in names)]
        if len(known_pairs) == 1:
            source, target = known_pairs[0]
    if source is None or target is None:
        raise DataError(f"{where}: which columns hold the texts? {_has(row)}; name two as `source` and `target`")
    if source == target:
        raise DataError(f"{where}: source and target are both {source!r}: name two columns")
    return ColumnNames((source,), (), (target,), text_answers=True)


def _first(names: Sequence[str], row: Row) -> str | None:
    return next((name for name in names if name in row), None)


def _only(names: Sequence[str], columns: Row | Sequence[str]) -> str | None:
    """Return the one name that is among the columns, or None when there are none or several."""
    present = [name for name in names if name in columns]
    return present[0] if len(present) == 1 else None


def _require_columns(row: Row, where: str, **requested: str | None) -> None:
    for role, name in requested.items():
        if name is not None and name not in row:
            raise DataError(f"{where}: no column {name!r}, which `{role}` names; {_has(row)}")


def _either(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def _has(row: Row) -> str:
    separator = next((mark for mark in (";", "\t") if len(row) == 1 and mark in next(iter(row))), None)
    hint = "" if separator is None else f" (are its columns separated by {separator!r}? Save it with commas)"
    return f"it has {', '.join(map(repr, row))}{hint}"
