"""Read a table's rows as texts and answers, and turn answers into classes; errors give the location of the bad row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from ..tables import Row, text_of
from .columns import ColumnNames, FoundColumns, find_columns
from .table_sources import TableSource

# The public files of sentence pairs have this instead of a label where annotators did not agree.
NO_CONSENSUS = "-"
_WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0+")


@dataclass
class AnsweredRows:
    """The rows of one table. `locations` say where each row is in its file, for error messages."""

    texts: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    no_consensus: int = 0


def read_table(
    table: TableSource, columns_for: Callable[[Row, str], ColumnNames], advice: str
) -> tuple[AnsweredRows, ColumnNames]:
    """Read the texts and answers of a table; return them and the columns they came from.

    `columns_for` is called with a first row and the table's name, and returns the columns to look for. Rows without an
    answer raise DataError with their number, the location of the first, and the advice.
    """
    columns_of_files: list[FoundColumns] = []  # the last entry is for the file that is being read

    def choose(row: Row) -> list[str]:
        columns_of_files.append(find_columns(columns_for(row, table.name), row, table.name))
        return columns_of_files[-1].names

    rows = AnsweredRows()
    unanswered: list[str] = []
    for location, row in table.rows(choose):
        columns = columns_of_files[-1]
        text = _require_text(row, columns.text, location)
        pair = None if columns.pair is None else _require_text(row, columns.pair, location)
        answer = _answer(row, columns, table, location)
        if answer is None:
            unanswered.append(location)
        elif pair is not None and answer == NO_CONSENSUS:
            rows.no_consensus += 1
        else:
            rows.texts.append(text)
            rows.pairs += [] if pair is None else [pair]
            rows.answers.append(answer)
            rows.locations.append(location)
    if unanswered:
        total = len(unanswered) + len(rows.texts) + rows.no_consensus
        raise DataError(
            f"{table.name}: {len(unanswered):,} of {total:,} rows have no answer to learn "
            f"({_why_unanswered(columns_of_files[-1])}; the first is {unanswered[0]}). {advice}"
        )
    if not rows.texts:
        raise DataError(f"{table.name}: holds no row{' that can be used' if rows.no_consensus else ''}")
    return rows, columns_of_files[-1].candidates


def _why_unanswered(columns: FoundColumns) -> str:
    """Return, for a message, what shows that a row has no answer."""
    if columns.answer is None:
        return f"no column {' or '.join(map(repr, columns.candidates.answer))}"
    return "an empty target" if columns.candidates.text_answers else "no label, or -1, which means none"


def class_names(answers: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the classes of data that has no fixed ones, sorted: by number when all are numbers, else as text."""
    names = set(answers)
    if len(names) < 2:
        raise DataError(f"{where}: every row has the label {answers[0]!r}: there is nothing to tell apart")
    if len(names) > max(2, len(answers) // 2):
        raise DataError(
            f"{where}: {len(names):,} different labels in {len(answers):,} rows: is that column a class? "
            "Name the right one as `label`"
        )
    all_numbers = all(re.fullmatch(r"-?\d+", name) for name in names)
    return tuple(sorted(names, key=int) if all_numbers else sorted(names))


def to_classes(
    rows: AnsweredRows, names: Sequence[str], other_spellings: Mapping[str, str], *, fixed: bool
) -> npt.NDArray[np.int64]:
    """Return the class index of every row.

    Fixed classes may be written as names in any case, in another spelling, or as numbers; others must match exactly.
    """
    index_of = {name: index for index, name in enumerate(names)}
    if fixed:
        index_of = {name.casefold(): index for name, index in index_of.items()}
        index_of |= {spelling.casefold(): index_of[name.casefold()] for spelling, name in other_spellings.items()}
        index_of |= {str(index): index for index in range(len(names))}
    indices = np.empty(len(rows.answers), dtype=np.int64)
    for row, (answer, location) in enumerate(zip(rows.answers, rows.locations, strict=True)):
        index = index_of.get(answer.casefold() if fixed else answer)
        if index is None:
            known = [f"{name} ({number})" for number, name in enumerate(names)] if fixed else list(names)
            origin = "" if fixed else ", the labels of the training rows"
            raise DataError(f"{location}: label {answer!r} is none of {', '.join(known)}{origin}")
        indices[row] = index
    return indices


def _require_text(row: Row, column: str, location: str) -> str:
    text = text_of(row, column, location)
    if not text.strip():
        raise DataError(f"{location}: {column!r} is empty: fill it in or remove the row")
    return text


def _answer(row: Row, columns: FoundColumns, table: TableSource, location: str) -> str | None:
    """Return a row's label or target text, or None when it has none."""
    column = columns.answer
    if column is None:
        return None
    if column not in row:
        raise DataError(f"{location}: no {column!r}; it has {', '.join(map(repr, row))}. Is the file truncated there?")
    if columns.candidates.text_answers:
        answer = text_of(row, column, location)
        return answer if answer.strip() else None
    return _label(row[column], table.class_names(column), f"{location}: {column!r}")


def _label(value: Any, names: tuple[str, ...] | None, where: str) -> str | None:
    """Return a label as text, or None when there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if not value.is_integer():
            raise DataError(f"{where} is {value}, which is not a class")
        value = int(value)
    if isinstance(value, int):
        if value == -1:
            return None
        return names[value] if names and 0 <= value < len(names) else str(value)
    if value is None or (isinstance(value, str) and value.strip() in ("", "-1")):
        return None
    if not isinstance(value, str):
        raise DataError(f"{where} holds {type(value).__name__}, not a label")
    # Some tools write integers as floats in a column that also has missing values.
    number = _WHOLE_NUMBER.fullmatch(value.strip())
    return number[1] if number else value.strip()
