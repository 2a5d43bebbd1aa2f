"""Open text files, compressed or not, and explain what is wrong with one that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import DataError
from .packages import import_optional

_BUFFER_BYTES = 1 << 18


def _open_zst(raw: IO[bytes]) -> Any:
    # Unlike the readers of zstandard and fsspec, pyarrow's raises an error when the file ends inside a frame.
    pyarrow = import_optional("pyarrow", "reading .zst files")
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BUFFER_BYTES)


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _open_zst,
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


class Meter:
    """Counts the bytes read from disk, for progress reports."""

    def __init__(self) -> None:
        self.bytes = 0


class _MeteredFile(io.FileIO):
    """A raw file that adds the number of bytes read from it to a meter; a buffered reader calls only `readinto`."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self._meter = meter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._meter.bytes += count
        return count


def format_of(path: Path) -> tuple[str, str]:
    """Return a file's format and compression suffix by its name; the format is "" when it is unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    name = FORMATS.get(suffixes[-1], "") if suffixes else ""
    return ("", compression) if name == "parquet" and compression else (name, compression)


def known_suffixes(*, tables: bool = False) -> str:
    """List the file suffixes that can be read, or only those of tables, for messages."""
    suffixes = [suffix for suffix, name in FORMATS.items() if not (tables and name == "text")]
    return f"{', '.join(suffixes)}; all but .parquet also with {', '.join(COMPRESSIONS)}"


@contextmanager
def open_text(
    path: Path, meter: Meter, newline: str | None, last_location: Callable[[], str] = lambda: ""
) -> Iterator[io.TextIOWrapper]:
    """Open a file as UTF-8 text, decompressed according to its name; anything wrong with it raises DataError.

    `last_location` returns the location of the row read last, for the message about a truncated file.
    """
    compression = format_of(path)[1]
    with (
        read_errors_explained(path, compression, last_location),
        io.BufferedReader(_MeteredFile(path, meter), _BUFFER_BYTES) as raw,
    ):
        content: Any = COMPRESSIONS[compression](raw) if compression else raw
        yield io.TextIOWrapper(content, encoding="utf-8-sig", newline=newline)


@contextmanager
def read_errors_explained(
    path: Path, compression: str = "", last_location: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Turn errors in the block that reads `path` into a DataError that says what is wrong, and where."""
    try:
        yield
    except UnicodeDecodeError as error:
        line = _first_undecodable_line(path, compression)
        raise DataError(f"{path}: not UTF-8 text ({error.reason}, line {line:,}): convert it first") from None
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        # The decompressors also raise OSError for damaged content, but only the system's own errors have a number.
        if isinstance(error, OSError) and (error.errno is not None or not compression):
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        after = f" after {last_location()}" if last_location() else ""
        raise DataError(
            f"{path}: the {compression} file is damaged or truncated{after} ({error}); fetch it again"
        ) from None


def _first_undecodable_line(path: Path, compression: str) -> int:
    """Return the number of the first line that is not UTF-8; the decoder reads ahead and does not know it."""
    with path.open("rb") as raw:
        number = 1
        for line in COMPRESSIONS[compression](raw) if compression else raw:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                break
            number += 1
    return number
