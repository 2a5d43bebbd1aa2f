"""One input file to a stream of text units: plain text, JSON lines, CSV, TSV and Parquet, compressed or not.

Nothing is read whole: text comes in blocks, rows one by one, so that memory does not grow with the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ..tables import Row, read_rows, text_of
from ..text_files import Meter, format_of, open_text

SEPARATOR = "<|endoftext|>"

_READ = 1 << 20  # characters per read
_LOOK = 8 << 20  # how far a text file is searched for its first separator
_LONG = 8 << 20  # a document longer than this is handed on in parts
_BLOCK = 8 << 10  # a block of text without separators is at least this long, where the text allows it
_BLOCK_MAX = 64 << 10  # and at most this long
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# Where text may be found when no column is named, in this order.
TEXT_FIELDS = ("text", "content", "document", "story", "article", "body", "sentence")


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of text that goes to one split as a whole: a document, a part of one, or a block of a stream.

    `more` says that the same document goes on in the next unit, `joined` that this unit belongs to the same split
    as the one before it.
    """

    text: str
    more: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Reading:
    """How files are read: the column or key of the text (None: found), and what separates documents in plain text."""

    text_field: str | None = None
    separator: str = SEPARATOR


def read_units(path: Path, reading: Reading, meter: Meter) -> Iterator[Unit]:
    """The text units of one file, in order. Units of whitespace alone are left out, blocks of a stream apart."""
    if format_of(path)[0] == "text":
        with open_text(path, meter, newline=None) as stream:
            yield from text_units(stream.read, reading.separator)
    else:
        yield from (Unit(text) for text in _texts(path, reading, meter) if text.strip())


def _texts(path: Path, reading: Reading, meter: Meter) -> Iterator[str]:
    """The text of every row of a table; its column is found in the first one."""
    found: list[str] = []

    def choose(row: Row) -> list[str]:
        found.append(find_text_field(row, reading.text_field, str(path)))
        return found

    return (text_of(row, found[0], place) for place, row in read_rows(path, meter, choose))


def text_units(read: Callable[[int], str], separator: str) -> Iterator[Unit]:
    """Documents between separators; without a separator near the start, the blocks of one long document."""
    head = read(_LOOK)
    if not separator or separator not in head:
        yield from _blocks(head, read, separator)
        return
    yield from _documents(head, read, separator)


def _documents(head: str, read: Callable[[int], str], separator: str) -> Iterator[Unit]:
    """Texts between separators, without the line breaks around them; long ones in parts."""
    rest, inside = head, False  # inside: earlier parts of this document have been handed on
    while True:
        *whole, rest = rest.split(separator)
        for text in whole:
            text = text.rstrip("\n") if inside else text.strip("\n")
            if inside or text.strip():
                yield Unit(text, joined=inside)
            inside = False
        if len(rest) > _LONG:
            # The end stays behind: it may hold half a separator, or line breaks before one.
            part = rest[: -max(_READ // 2, len(separator))].rstrip("\n")
            rest = rest[len(part) :]
            yield Unit(part if inside else part.lstrip("\n"), more=True, joined=inside)
            inside = True
        block = read(_READ)
        if not block:
            break
        rest += block
    rest = rest.rstrip("\n") if inside else rest.strip("\n")
    if inside or rest.strip():
        yield Unit(rest, joined=inside)


def _blocks(head: str, read: Callable[[int], str], separator: str) -> Iterator[Unit]:
    """Text without separators, cut where possible at a blank line; joined again, the blocks are the text exactly.

    A separator that turns up late in the file still ends a document.
    """
    rest, start, ended = head, 0, not head
    inside = False  # earlier blocks of this document have been handed on
    while True:
        if not ended and len(rest) - start <= _BLOCK_MAX + len(separator):
            block = read(_READ)
            ended = not block
            rest, start = rest[start:] + block, 0
            continue
        if start == len(rest):
            return
        end = _block_end(rest, start)
        mark = rest.find(separator, start, end + len(separator) - 1) if separator else -1
        if mark >= 0:
            end = mark
        # Text that ends where a separator follows, or the file does, ends its document.
        last = mark >= 0 or (ended and end == len(rest)) or (bool(separator) and rest.startswith(separator, end))
        block = rest[start:end]
        if inside or not last or block.strip():
            yield Unit(block, more=not last)
        inside = not last
        start = end + len(separator) if mark >= 0 else end


def _block_end(text: str, start: int) -> int:
    """Where the block from `start` ends: at a blank line, else at a line end, else wherever the limit is."""
    limit = min(start + _BLOCK_MAX, len(text))
    blank = _BLANK_LINE.search(text, start + _BLOCK, limit)
    if blank:
        return blank.end()
    if limit == len(text):
        return limit
    line = text.rfind("\n", start, limit)
    return line + 1 if line > start else limit


def find_text_field(row: Row, wanted: str | None, where: str) -> str:
    """The column that holds the text: the one asked for, else a usual name, else the only one with text."""
    columns = [str(name) for name in row]
    if wanted is not None:
        if wanted not in columns:
            raise DataError(f"{where}: no column {wanted!r}; it has {', '.join(map(repr, columns))}")
        return wanted
    for name in TEXT_FIELDS:
        if name in columns:
            return name
    textual = [name for name, value in row.items() if isinstance(value, str)]
    if len(textual) == 1:
        return textual[0]
    raise DataError(
        f"{where}: which column holds the text? It has {', '.join(map(repr, columns))}; "
        "name one as text_field (--text-field)"
    )
