"""Rows of a table to texts and answers, and answers to classes; rows that cannot be used are refused by their place."""

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
from .columns import Columns, Found, find
from .locations import Table

# What stands for a label where annotators of pairs did not agree, in the public files.
NO_CONSENSUS = "-"
_WHOLE = re.compile(r"([-+]?\d+)\.0+")


@dataclass
class Answered:
    """The rows of one table. `places` are where the answers stood, for messages about them."""

    texts: list[str] = field(default_factory=list)
    pairs: list[str] | None = None
    answers: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    no_consensus: int = 0


def read_table(
    table: Table, columns_for: Callable[[Row, str], Columns], labelled_elsewhere: Callable[[], str]
) -> tuple[Answered, Columns]:
    """The texts and answers of a table. `columns_for` is shown a first row, and says which columns to look for.

    Rows without an answer are refused: how many, where, and, by `labelled_elsewhere`, what to use instead.
    """
    columns: Columns | None = None
    found: Found | None = None

    def choose(row: Row) -> list[str]:
        nonlocal columns, found
        columns = columns_for(row, table.name)
        found = find(columns, row, table.name)
        return found.names

    read = Answered()
    unanswered: list[str] = []
    for place, row in table.rows(choose):
        assert columns is not None
        assert found is not None
        text = _text(row, found.text, place)
        pair = None if found.pair is None else _text(row, found.pair, place)
        answer = _answer(row, found, columns, table, place)
        if answer is None:
            unanswered.append(place)
            continue
        if pair is not None and answer == NO_CONSENSUS:
            read.no_consensus += 1
            continue
        read.texts.append(text)
        if pair is not None:
            read.pairs = [] if read.pairs is None else read.pairs
            read.pairs.append(pair)
        read.answers.append(answer)
        read.places.append(place)
    if columns is None or found is None:
        raise DataError(f"{table.name}: holds no row")
    if unanswered:
        total = len(unanswered) + len(read.texts) + read.no_consensus
        wanted = (
            f"no column {' or '.join(map(repr, columns.answer))}" if found.answer is None else "a label of -1 or none"
        )
        if columns.written:
            wanted = "an empty target" if found.answer else wanted
        raise DataError(
            f"{table.name}: {len(unanswered):,} of {total:,} rows have no answer to learn ({wanted}; the first is "
            f"{unanswered[0]}). {labelled_elsewhere()}"
        )
    if not read.texts:
        raise DataError(f"{table.name}: holds no row that can be used")
    return read, columns


def class_names(answers: Sequence[str], where: str) -> tuple[str, ...]:
    """The classes of data that has no fixed ones, in order: of number where all are numbers, else of the alphabet."""
    names = set(answers)
    if len(names) < 2:
        raise DataError(f"{where}: every row has the label {answers[0]!r}: there is nothing to tell apart")
    if len(names) > max(2, len(answers) // 2):
        raise DataError(
            f"{where}: {len(names):,} different labels in {len(answers):,} rows: is that column a class? "
            "Name the right one as `label`"
        )
    whole = all(re.fullmatch(r"-?\d+", name) for name in names)
    return tuple(sorted(names, key=int) if whole else sorted(names))


def to_classes(read: Answered, names: Sequence[str], also: Mapping[str, str], *, fixed: bool) -> npt.NDArray[np.int64]:
    """Class indices. Fixed classes may be written as names, in any case, as other spellings, or as numbers."""
    known = {name: index for index, name in enumerate(names)}
    if fixed:
        known = {name.casefold(): index for name, index in known.items()}
        known |= {spelling.casefold(): known[name.casefold()] for spelling, name in also.items()}
        known |= {str(index): index for index in range(len(names))}
    indices = np.empty(len(read.answers), dtype=np.int64)
    for row, (answer, place) in enumerate(zip(read.answers, read.places, strict=True)):
        index = known.get(answer.casefold() if fixed else answer)
        if index is None:
            spelled = [f"{name} ({number})" for number, name in enumerate(names)] if fixed else list(names)
            origin = "" if fixed else ", which are those of the training rows"
            raise DataError(f"{place}: label {answer!r} is none of {', '.join(spelled)}{origin}")
        indices[row] = index
    return indices


def _text(row: Row, column: str, place: str) -> str:
    text = text_of(row, column, place)
    if not text.strip():
        raise DataError(f"{place}: {column!r} is empty: fill it in or remove the row")
    return text


def _answer(row: Row, found: Found, columns: Columns, table: Table, place: str) -> str | None:
    if found.answer is None:
        return None
    if found.answer not in row:
        raise DataError(f"{place}: no {found.answer!r}; it has {', '.join(map(repr, row))}. Is the file cut off there?")
    if columns.written:
        answer = text_of(row, found.answer, place)
        return answer if answer.strip() else None
    return _label(row[found.answer], table.class_names(found.answer), f"{place}: {found.answer!r}")


def _label(value: Any, names: tuple[str, ...] | None, where: str) -> str | None:
    """A label as text, or None where there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if not value.is_integer():
            raise DataError(f"{where} is {value}, which is no class")
        value = int(value)
    if isinstance(value, int):
        if value == -1:
            return None
        return names[value] if names and 0 <= value < len(names) else str(value)
    if value is None or (isinstance(value, str) and value.strip() in ("", "-1")):
        return None
    if not isinstance(value, str):
        raise DataError(f"{where} holds {type(value).__name__}, not a label")
    whole = _WHOLE.fullmatch(value.strip())  # what tools write of whole numbers beside missing ones
    return whole[1] if whole else value.strip()
