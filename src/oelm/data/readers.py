"""One input file to a stream of text units: plain text, JSON lines, CSV, TSV and Parquet, compressed or not.

Nothing is read whole: text comes in blocks, rows one by one, so that memory does not grow with the file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from .errors import DataError, optional

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


class Meter:
    """Counts the bytes that were read from the disk, for progress."""

    def __init__(self) -> None:
        self.bytes = 0


class _Metered(io.RawIOBase):
    """A raw file that reports to a meter what is read from it."""

    def __init__(self, file: io.FileIO, meter: Meter) -> None:
        self._file, self._meter = file, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._meter.bytes += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Zst(io.RawIOBase):
    """Zstandard frames one after the other. The package's own reader takes a file that is cut off for a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._package = optional("zstandard", "reading .zst files")
        self._raw = raw
        self._ready = b""  # decompressed, not yet handed on
        self._left = b""  # compressed, after the end of a frame
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._left or self._raw.read(1 << 16)
            self._left = b""
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(block)
            except self._package.ZstdError as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


COMPRESSIONS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
    ".xz": lambda raw: cast(IO[bytes], lzma.LZMAFile(raw)),
    ".bz2": lambda raw: cast(IO[bytes], bz2.BZ2File(raw)),
    ".zst": lambda raw: cast(IO[bytes], io.BufferedReader(_Zst(raw), buffer_size=1 << 18)),
}
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


def format_of(path: Path) -> tuple[str, str]:
    """A file's format and compression suffix by its name, or an empty format where it has none that is known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    name = FORMATS.get(suffixes[-1], "") if suffixes else ""
    return ("", compression) if name == "parquet" and compression else (name, compression)


def known_names() -> str:
    """The file names that can be read, for messages."""
    return f"{', '.join(FORMATS)}; all but .parquet also with {', '.join(COMPRESSIONS)}"


def read_units(path: Path, reading: Reading, meter: Meter) -> Iterator[Unit]:
    """The text units of one file, in order. Units of whitespace alone are left out, blocks of a stream apart."""
    name, compression = format_of(path)
    try:
        if name == "parquet":
            yield from (Unit(text) for text in _parquet(path, reading, meter) if text.strip())
            return
        with _open_text(path, compression, meter, newline="" if name in ("csv", "tsv") else None) as stream:
            if name == "text":
                yield from text_units(stream.read, reading.separator)
            else:
                rows = _json_rows(stream, path, reading) if name == "json" else _csv_rows(stream, path, reading, name)
                yield from (Unit(text) for text in rows if text.strip())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text ({error.reason}, near byte {meter.bytes:,} of the file): convert it first"
        ) from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: the {compression} file is damaged or cut off ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def _open_text(path: Path, compression: str, meter: Meter, newline: str | None) -> Iterator[io.TextIOWrapper]:
    raw = io.BufferedReader(_Metered(io.FileIO(path), meter), buffer_size=1 << 18)
    with raw:
        content = COMPRESSIONS[compression](raw) if compression else raw
        yield io.TextIOWrapper(cast(Any, content), encoding="utf-8-sig", newline=newline)


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


def _json_rows(stream: io.TextIOWrapper, path: Path, reading: Reading) -> Iterator[str]:
    column: str | None = None
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); one object per line is expected") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: one JSON object per line is expected, not {type(row).__name__}")
        if column is None:
            column = find_text_field(row, reading.text_field, str(path))
        yield text_of(row, column, f"{path}, line {number}")


def _csv_rows(stream: io.TextIOWrapper, path: Path, reading: Reading, name: str) -> Iterator[str]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    if name == "tsv":
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.DictReader(stream, strict=True)
    try:
        if not rows.fieldnames:
            raise DataError(f"{path}: empty; the first line must name the columns")
        column: str | None = None
        for row in rows:
            if column is None:
                column = find_text_field(row, reading.text_field, str(path))
            yield text_of(row, column, f"{path}, line {rows.line_num}")
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: not valid {name.upper()} ({error})") from None


def _parquet(path: Path, reading: Reading, meter: Meter) -> Iterator[str]:
    parquet = optional("pyarrow.parquet", "reading .parquet files")
    start, size = meter.bytes, path.stat().st_size
    try:
        with parquet.ParquetFile(str(path)) as file:
            first = next(file.iter_batches(batch_size=1), None)
            example = first.to_pylist()[0] if first is not None else dict.fromkeys(file.schema_arrow.names)
            column = find_text_field(example, reading.text_field, str(path))
            row, total = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield text_of({column: value}, column, f"{path}, row {row}")
                meter.bytes = start + size * row // total
    except ValueError as error:  # what pyarrow's own errors derive from
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def find_text_field(row: Mapping[str, Any], wanted: str | None, where: str) -> str:
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
        f"{where}: which column holds the text? It has {', '.join(map(repr, columns))}; name one as text_field"
    )


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text of one row; a missing value counts as empty."""
    if column not in row:
        raise DataError(f"{where}: no {column!r}; it has {', '.join(map(repr, row))}")
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} holds {type(value).__name__}, not text")
    # JSON can escape half a surrogate pair, which no encoding of text can hold.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{where}: {column!r} holds half a surrogate pair, which is not text: repair or remove it")
    return value
