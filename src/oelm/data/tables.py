"""Read tables row by row: JSON, CSV, TSV and Parquet, each row with its location in the file for messages.

No file is read whole, so memory does not grow with its size.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import DataError
from .packages import import_optional
from .text_files import Meter, format_of, open_text, read_errors_explained

Row = Mapping[str, Any]
# Called with the first row of a file; returns the columns that are needed. The others need not be read.
ChooseColumns = Callable[[Row], Sequence[str]]

_WHITESPACE = re.compile(r"\s*")
# Characters read first to see whether a JSON file is an array, and then at a time from an array.
_READ_CHARACTERS = 1 << 16


def read_rows(path: Path, meter: Meter, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a table in order, each with its location, such as 'data.csv, line 7'."""
    name = format_of(path)[0]
    if name == "parquet":
        with read_errors_explained(path):
            yield from _parquet_rows(path, meter, choose)
        return
    last_location = ""
    with open_text(path, meter, None if name == "json" else "", lambda: last_location) as stream:
        for location, row in _json_rows(stream, path) if name == "json" else _csv_rows(stream, path, name):
            if not last_location:
                choose(row)
            last_location = location
            yield location, row


def _json_rows(stream: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a JSON file: one per line, or the elements of one array."""
    head = stream.read(_READ_CHARACTERS)
    if head.lstrip().startswith("["):
        yield from _array_rows(head.lstrip().removeprefix("["), stream, path)
        return
    for number, line in enumerate(chain(io.StringIO(head + stream.readline()), stream), start=1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_JsonObject)
        except ValueError as error:
            raise DataError(f"{location}: not JSON ({error}); one object per line is expected, or an array") from None
        yield location, _require_object(row, location)


def _array_rows(text: str, stream: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the objects of an array, each as soon as all of it was read; `text` begins after the opening bracket."""
    decoder = json.JSONDecoder(object_pairs_hook=_JsonObject)
    number, position, step = 1, 0, _READ_CHARACTERS
    while True:
        location = f"{path}, object {number}"
        position = _skip_whitespace(text, position)
        if text[position : position + 1] == "]":
            break
        try:
            row, end = decoder.raw_decode(text, position)
            end = _skip_whitespace(text, end)
            if text[end : end + 1] not in (",", "]"):  # not read yet, or not JSON
                raise ValueError("a comma or the closing bracket is missing")
        except ValueError as error:
            more = stream.read(step)
            if not more:
                raise DataError(f"{location}: not JSON ({error})") from None
            # Read twice as much each time, so that a long object is parsed from its beginning only a few times.
            text, position, step = text[position:] + more, 0, 2 * step
            continue
        yield location, _require_object(row, location)
        number, position, step = number + 1, end + (text[end] == ","), _READ_CHARACTERS
    if (text[position + 1 :] + stream.read(_READ_CHARACTERS)).strip():
        raise DataError(f"{path}: something follows the array's closing bracket")


def _skip_whitespace(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _require_object(row: Any, location: str) -> Row:
    if not isinstance(row, _JsonObject):
        raise DataError(f"{location}: a JSON object is expected, not {type(row).__name__}")
    if len(row) != row.written_keys:
        raise DataError(f"{location}: a key appears twice; it has {', '.join(map(repr, row))}")
    return row


class _JsonObject(dict[str, Any]):
    """A JSON object that remembers how many keys were written, to notice duplicates."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.written_keys = len(pairs)


def _csv_rows(stream: io.TextIOWrapper, path: Path, name: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    tabs = name == "tsv"
    rows = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(stream, strict=True)
    line = 1  # where the next row begins: a row with quoted line breaks covers several lines
    try:
        header = next(rows, [])
        if not any(header):
            raise DataError(f"{path}: empty; the first line must name the columns")
        _require_unique_columns(header, str(path))
        line = rows.line_num + 1
        for cells in rows:
            if len(cells) > len(header):
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells, but the first line names {len(header)} columns: "
                    f"is there a {'tab' if tabs else 'comma without quotes'} inside a text?"
                )
            if cells:
                # A short row has no value for the last columns; a reader that needs one raises an error.
                yield f"{path}, line {line}", dict(zip(header, cells, strict=False))
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not valid {name.upper()} ({error})") from None


def _parquet_rows(path: Path, meter: Meter, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
    parquet = import_optional("pyarrow.parquet", "reading .parquet files")
    start, size = meter.bytes, path.stat().st_size
    try:
        with parquet.ParquetFile(str(path)) as file:
            _require_unique_columns(file.schema_arrow.names, str(path))
            first = next(file.iter_batches(batch_size=1), None)
            row = dict.fromkeys(file.schema_arrow.names) if first is None else first.to_pylist()[0]
            columns = list(choose(row))
            number, total = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
                meter.bytes = start + size * number // total
    except ValueError as error:  # the base class of pyarrow's errors
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def _require_unique_columns(columns: Iterable[str], where: str) -> None:
    duplicates = [repr(name) for name, count in Counter(columns).items() if count > 1]
    if duplicates:
        raise DataError(f"{where}: two columns are called {', '.join(duplicates)}; rename one")


def text_of(row: Row, column: str, location: str) -> str:
    """Return the text in one column of a row; a missing value counts as empty text."""
    if column not in row:
        raise DataError(f"{location}: no {column!r}; it has {', '.join(map(repr, row))}")
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{location}: {column!r} holds {type(value).__name__}, not text")
    # JSON can escape half a surrogate pair, which cannot be encoded as UTF-8.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{location}: {column!r} holds half a surrogate pair, which is not text: repair or remove it")
    return value
