"""Tables to rows: JSON, CSV, TSV and Parquet, compressed or not, each row with its place in the file.

Nothing is read whole: rows come one by one, so that memory does not grow with the file.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from ..errors import DataError
from .packages import import_optional

Row = Mapping[str, Any]
# Is shown the first row and names the columns that are wanted; the others need not be read.
Choose = Callable[[Row], Sequence[str]]


_SPACE = re.compile(r"\s*")
# Characters of a JSON file that are read to see whether it is an array, and of an array at once.
_HEAD = 1 << 16


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
        self._package = import_optional("zstandard", "reading .zst files")
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


def known_names(*, tables: bool = False) -> str:
    """The file names that can be read, or only those of tables, for messages."""
    suffixes = [suffix for suffix, name in FORMATS.items() if not (tables and name == "text")]
    return f"{', '.join(suffixes)}; all but .parquet also with {', '.join(COMPRESSIONS)}"


def read_rows(path: Path, meter: Meter, choose: Choose) -> Iterator[tuple[str, Row]]:
    """The rows of a table in order, each with its place, such as 'data.csv, line 7', for messages."""
    name = format_of(path)[0]
    if name == "parquet":
        with translated(path):
            yield from _parquet_rows(path, meter, choose)
        return
    place = ""
    with open_text(path, meter, None if name == "json" else "", lambda: place) as stream:
        for here, row in _json_rows(stream, path) if name == "json" else _csv_rows(stream, path, name):
            if not place:
                choose(row)
            place = here
            yield place, row


@contextmanager
def open_text(
    path: Path, meter: Meter, newline: str | None, reached: Callable[[], str] = lambda: ""
) -> Iterator[io.TextIOWrapper]:
    """The text of a file, decompressed by its name; whatever is wrong with it becomes a DataError.

    `reached` says what was read last, for the message about a file that is cut off.
    """
    compression = format_of(path)[1]
    with translated(path, compression, reached), io.BufferedReader(_Metered(io.FileIO(path), meter), 1 << 18) as raw:
        content = COMPRESSIONS[compression](raw) if compression else raw
        yield io.TextIOWrapper(cast(Any, content), encoding="utf-8-sig", newline=newline)


@contextmanager
def translated(path: Path, compression: str = "", reached: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn what is raised while a file is read into a DataError that says what is wrong with it, and where."""
    try:
        yield
    except UnicodeDecodeError as error:
        where = _undecodable_line(path, compression)
        raise DataError(f"{path}: not UTF-8 text ({error.reason}, line {where:,}): convert it first") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        last = f" after {reached()}" if reached() else ""
        raise DataError(
            f"{path}: the {compression} file is damaged or cut off{last} ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _undecodable_line(path: Path, compression: str) -> int:
    """The number of the first line that is not UTF-8. The decoder itself reads ahead and cannot tell."""
    good = 0
    with path.open("rb") as raw:
        for line in COMPRESSIONS[compression](raw) if compression else raw:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                break
            good += 1
    return good + 1


def _json_rows(stream: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Row]]:
    """Objects on lines of their own, or of one array."""
    head = stream.read(_HEAD)
    if head.lstrip().startswith("["):
        yield from _array_rows(head.lstrip().removeprefix("["), stream, path)
        return
    for number, line in enumerate(chain(io.StringIO(head + stream.readline()), stream), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_Pairs)
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error}); one object per line is expected, or an array") from None
        yield place, _checked(row, place)


def _array_rows(text: str, stream: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Row]]:
    """The objects of an array whose bracket was read, each as soon as all of it is there."""
    decoder = json.JSONDecoder(object_pairs_hook=_Pairs)
    number, at, step = 1, 0, _HEAD
    while True:
        place = f"{path}, object {number}"
        at = _skip_space(text, at)
        if text[at : at + 1] == "]":
            break
        try:
            row, end = decoder.raw_decode(text, at)
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):  # it is not there yet, or something else is
                raise ValueError("a comma or the closing bracket is missing")
        except ValueError as error:
            more = stream.read(step)
            if not more:
                raise DataError(f"{place}: not JSON ({error})") from None
            # Twice as much the next time: a long object is not to be tried anew for every little part of it.
            text, at, step = text[at:] + more, 0, 2 * step
            continue
        yield place, _checked(row, place)
        number, at, step = number + 1, end + (text[end] == ","), _HEAD
    if (text[at + 1 :] + stream.read(_HEAD)).strip():
        raise DataError(f"{path}: something follows the array's closing bracket")


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _checked(row: Any, place: str) -> Row:
    if not isinstance(row, _Pairs):
        raise DataError(f"{place}: a JSON object is expected, not {type(row).__name__}")
    if len(row) != row.pairs:
        raise DataError(f"{place}: a key appears twice; it has {', '.join(map(repr, row))}")
    return row


class _Pairs(dict[str, Any]):
    """A JSON object that knows how many keys were written, the same one twice included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = len(pairs)


def _csv_rows(stream: io.TextIOWrapper, path: Path, name: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    tabs = name == "tsv"
    rows = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(stream, strict=True)
    line = 1  # where the next row begins: one with quoted line breaks ends further down
    try:
        header = next(rows, [])
        if not any(header):
            raise DataError(f"{path}: empty; the first line must name the columns")
        _check_unique(header, str(path))
        line = rows.line_num + 1
        for cells in rows:
            if len(cells) > len(header):
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells, but the first line names {len(header)} columns: "
                    f"is there a {'tab' if tabs else 'comma without quotes'} inside a text?"
                )
            if cells:
                # A row that stops early has no value for the last columns; who needs one says so.
                yield f"{path}, line {line}", dict(zip(header, cells, strict=False))
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not valid {name.upper()} ({error})") from None


def _parquet_rows(path: Path, meter: Meter, choose: Choose) -> Iterator[tuple[str, Row]]:
    parquet = import_optional("pyarrow.parquet", "reading .parquet files")
    start, size = meter.bytes, path.stat().st_size
    try:
        with parquet.ParquetFile(str(path)) as file:
            _check_unique(file.schema_arrow.names, str(path))
            first = next(file.iter_batches(batch_size=1), None)
            columns = list(
                choose(first.to_pylist()[0] if first is not None else dict.fromkeys(file.schema_arrow.names))
            )
            number, total = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
                meter.bytes = start + size * number // total
    except ValueError as error:  # what pyarrow's own errors derive from
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def _check_unique(columns: Iterable[str], where: str) -> None:
    twice = [repr(name) for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(f"{where}: two columns are called {', '.join(twice)}; rename one")


def text_of(row: Row, column: str, where: str) -> str:
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
