"""List what the corpora of the records consist of, and check or rebuild a corpus from such a list.

    python results/corpora.py list FILE... --out books.tsv        # texts: a line for each document
    python results/corpora.py list train.tsv --out rows.tsv.xz    # a table: a line for each row
    python results/corpora.py check books.tsv FILE...             # are these the same documents, in the same order?
    python results/corpora.py select rows.tsv.xz FULL.tsv --out OUT    # the rows of a data set that a list names

The corpora themselves are not here: licences differ, and each is a part of a public data set or a stand-in for one. A
list has the name of the file, the first digits of the SHA-256 of the content, its length in bytes and, of a document,
how it begins, by which a book can be found again. Files and lists may be compressed (.xz).
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_SEPARATOR = "<|endoftext|>"
_TABLE = ".tsv"
# Characters of a document's beginning that a list shows.
_BEGINNING = 160
# Hexadecimal digits of a hash that a list keeps: enough to tell hundreds of thousands of rows apart.
_DIGITS = 16


class CorpusError(Exception):
    """A file is not what a list says, or no list."""


@dataclass(frozen=True)
class Line:
    """A document or a row of a corpus, as a list has it."""

    file: str
    sha256: str
    bytes: int
    beginning: str = ""

    def __str__(self) -> str:
        return "\t".join([self.file, self.sha256, str(self.bytes), *([self.beginning] if self.beginning else [])])

    @classmethod
    def of(cls, file: str, content: str, shown: bool) -> Line:
        """Return the line of a document, or of a row, which shows nothing of its content."""
        data = content.encode()
        beginning = " ".join(content[: 4 * _BEGINNING].split())[:_BEGINNING] if shown else ""
        return cls(file, hashlib.sha256(data).hexdigest()[:_DIGITS], len(data), beginning)


def opened(path: Path, mode: str) -> IO[str]:
    """Open a text, compressed or not by its name."""
    opener: Callable[..., IO[str]] = lzma.open if path.suffix == ".xz" else open
    return opener(path, mode, encoding="utf-8", newline="\n")


def contents(path: Path) -> Iterator[str]:
    """Yield the documents of a text, or the rows of a table without its header."""
    with opened(path, "rt") as file:
        if _is_table(path):
            next(file, None)
            yield from (row.rstrip("\n") for row in file)
            return
        lines: list[str] = []
        for line in file:
            if line.strip() == _SEPARATOR:
                yield "".join(lines).strip()
                lines = []
            else:
                lines.append(line)
        rest = "".join(lines).strip()
        if rest:
            yield rest


def listed(paths: Iterable[Path]) -> Iterator[Line]:
    """Yield the line of every document or row in the files."""
    for path in paths:
        for content in contents(path):
            yield Line.of(path.name.removesuffix(".xz"), content, not _is_table(path))


def read_list(path: Path) -> list[Line]:
    """Return the lines of a list."""
    lines = []
    with opened(path, "rt") as file:
        texts = file.read().splitlines()
    for number, text in enumerate(texts, start=1):
        fields = text.split("\t")
        if len(fields) not in (3, 4) or len(fields[1]) != _DIGITS or not fields[2].isdigit():
            raise CorpusError(f"{path}: line {number} is not one of a list: {text[:60]!r}")
        lines.append(Line(fields[0], fields[1], int(fields[2]), *fields[3:]))
    return lines


def check(wanted: list[Line], found: list[Line]) -> None:
    """Raise where the documents or rows are not those of the list, with the first that differs."""
    for number, (one, other) in enumerate(zip(wanted, found, strict=False), start=1):
        if (one.sha256, one.bytes) != (other.sha256, other.bytes):
            raise CorpusError(f"number {number} differs: the list has {one}, the files have {other}")
    if len(wanted) != len(found):
        raise CorpusError(f"the list has {len(wanted)}, the files have {len(found)}")


def select(wanted: list[Line], full: Path) -> list[str]:
    """Return a table's header and the rows that the list names, in its order; raise where one is not there."""
    by_hash = {Line.of("", row, False).sha256: row for row in contents(full)}
    missing = [line for line in wanted if line.sha256 not in by_hash]
    if missing:
        raise CorpusError(f"{full}: {len(missing)} of {len(wanted)} rows are not there, the first is {missing[0]}")
    with opened(full, "rt") as file:
        header = file.readline().rstrip("\n")
    return [header, *(by_hash[line.sha256] for line in wanted)]


def _is_table(path: Path) -> bool:
    return path.name.removesuffix(".xz").endswith(_TABLE)


def _written(out: Path, lines: Iterable[object]) -> str:
    texts = [f"{line}\n" for line in lines]
    with opened(out, "wt") as file:
        file.writelines(texts)
    return f"wrote {len(texts)} lines to {out}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("list")
    make.add_argument("files", nargs="+", type=Path)
    make.add_argument("--out", required=True, type=Path)
    same = commands.add_parser("check")
    same.add_argument("list", type=Path)
    same.add_argument("files", nargs="+", type=Path)
    part = commands.add_parser("select")
    part.add_argument("list", type=Path)
    part.add_argument("full", type=Path)
    part.add_argument("--out", required=True, type=Path)
    asked = parser.parse_args()
    try:
        if asked.command == "list":
            print(_written(asked.out, listed(asked.files)))
        elif asked.command == "check":
            lines = read_list(asked.list)
            check(lines, list(listed(asked.files)))
            print(f"the same {len(lines)}, in the same order")
        else:
            print(_written(asked.out, select(read_list(asked.list), asked.full)))
    except (CorpusError, OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
