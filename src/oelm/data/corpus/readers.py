"""Read an input file as a stream of text units: plain text, JSON, CSV, TSV and Parquet, compressed or not.

No file is read whole: text comes in blocks and rows one by one, so that memory does not grow with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ...errors import DataError
from ..tables import Row, read_rows, text_of
from ..text_files import Meter, format_of, open_text

SEPARATOR = "<|endoftext|>"

# All in characters.
_READ = 1 << 20  # per read
_LOOK = 8 << 20  # how far a text file is searched for its first separator
_LONG = 8 << 20  # a document longer than this is split into parts
_BLOCK = 8 << 10  # a block of text without separators is at least this long, where the text allows it
_BLOCK_MAX = 64 << 10  # and at most this long
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# Columns that are tried in this order when the user names none.
TEXT_FIELDS = ("text", "content", "document", "story", "article", "body", "sentence")


@dataclass(frozen=True, slots=True)
class Unit:
    """Text that goes to one split as a whole: a document, a part of one, or a block of a stream.

    With `more`, the same document continues in the next unit. With `joined`, this unit belongs to the same split as
    the one before it.
    """

    text: str
    more: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Reading:
    """How to read files: the column or key of the text (None: detect it), and the separator of plain-text documents."""

    text_field: str | None = None
    separator: str = SEPARATOR


def read_units(path: Path, reading: Reading, meter: Meter) -> Iterator[Unit]:
    """Yield the text units of one file in order, without documents of whitespace alone."""
    if format_of(path)[0] == "text":
        with open_text(path, meter, newline=None) as stream:
            yield from text_units(iter(lambda: stream.read(_READ), ""), reading.separator)
    else:
        yield from (Unit(text) for text in _texts(path, reading, meter) if text.strip())


def _texts(path: Path, reading: Reading, meter: Meter) -> Iterator[str]:
    """Return an iterator over the texts of a table; the first row decides the column."""
    columns: list[str] = []

    def choose(row: Row) -> list[str]:
        columns.append(find_text_field(row, reading.text_field, str(path)))
        return columns

    return (text_of(row, columns[0], location) for location, row in read_rows(path, meter, choose))


def text_units(portions: Iterator[str], separator: str) -> Iterator[Unit]:
    """Yield the documents between separators, or the blocks of one long document when no separator is near the start.

    `portions` are the text in order, in pieces of any length.
    """
    head = ""
    for portion in portions:
        head += portion
        if len(head) >= _LOOK:
            break
    divide = _documents if separator and separator in head else _blocks
    return divide(chain([head], portions), separator)


def _documents(portions: Iterator[str], separator: str) -> Iterator[Unit]:
    """Yield the texts between separators, without the line breaks around them; long ones in parts."""
    buffer, inside = "", False  # inside: earlier parts of this document have been yielded
    for portion in portions:
        *documents, buffer = (buffer + portion).split(separator)
        for text in documents:
            text = text.rstrip("\n") if inside else text.strip("\n")
            if inside or text.strip():
                yield Unit(text, joined=inside)
            inside = False
        if len(buffer) > _LONG:
            # The end of the text stays in the buffer: it may hold half a separator, or line breaks before one.
            part = buffer[: -max(_READ // 2, len(separator))].rstrip("\n")
            buffer = buffer[len(part) :]
            yield Unit(part if inside else part.lstrip("\n"), more=True, joined=inside)
            inside = True
    buffer = buffer.rstrip("\n") if inside else buffer.strip("\n")
    if inside or buffer.strip():
        yield Unit(buffer, joined=inside)


def _blocks(portions: Iterator[str], separator: str) -> Iterator[Unit]:
    """Yield text without separators in blocks that end at blank lines where possible; joined, they are the text.

    A separator that appears late in the file still ends a document.
    """
    buffer, start, ended = "", 0, False
    inside = False  # whether earlier blocks of this document have been yielded
    while True:
        if not ended and len(buffer) - start <= _BLOCK_MAX + len(separator):
            portion = next(portions, None)
            ended = portion is None
            buffer, start = buffer[start:] + (portion or ""), 0
            continue
        if start == len(buffer):
            return
        end = _block_end(buffer, start)
        separator_at = buffer.find(separator, start, end + len(separator) - 1) if separator else -1
        if separator_at >= 0:
            end = separator_at
        # A document ends where a separator follows, and at the end of the file.
        last = (
            separator_at >= 0
            or (ended and end == len(buffer))
            or (bool(separator) and buffer.startswith(separator, end))
        )
        block = buffer[start:end]
        if inside or not last or block.strip():
            yield Unit(block, more=not last)
        inside = not last
        start = end + len(separator) if separator_at >= 0 else end


def _block_end(text: str, start: int) -> int:
    """Return where the block from `start` ends: at a blank line, else at a line end, else at the limit."""
    limit = min(start + _BLOCK_MAX, len(text))
    blank = _BLANK_LINE.search(text, start + _BLOCK, limit)
    if blank:
        return blank.end()
    if limit == len(text):
        return limit
    line = text.rfind("\n", start, limit)
    return line + 1 if line > start else limit


def find_text_field(row: Row, requested: str | None, where: str) -> str:
    """Return the column that holds the text: the requested one, else a usual name, else the only one with text."""
    columns = [str(name) for name in row]
    if requested is not None:
        if requested not in columns:
            raise DataError(f"{where}: no column {requested!r}; it has {', '.join(map(repr, columns))}")
        return requested
    for name in TEXT_FIELDS:
        if name in columns:
            return name
    text_columns = [name for name, value in row.items() if isinstance(value, str)]
    if len(text_columns) == 1:
        return text_columns[0]
    raise DataError(
        f"{where}: which column holds the text? It has {', '.join(map(repr, columns))}; "
        "name one as text_field (--text-field)"
    )
