"""The manifest of a finished folder: the size and hash of each of its files, so that any change is noticed.

It is written last. A file that was flipped, cut, swapped or removed since then no longer fits it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError
from .files import read_record, write_json

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileMark:
    """What a file was when it was written: its size and its hash."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Return the mark of a file as it is now."""
        with open(path, "rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def files_in(folder: Path) -> list[str]:
    """Return the names of all files in a folder and those below it, but for its manifest."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST)


def write_manifest(folder: Path, marks: Mapping[str, FileMark]) -> None:
    """Write the manifest of a folder whose files were all written."""
    files = {name: {"bytes": mark.bytes, "sha256": mark.sha256} for name, mark in marks.items()}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def read_manifest(folder: Path) -> dict[str, FileMark]:
    """Return what a folder's manifest says of each file; raise a FileError where it cannot be read."""
    content = read_record(folder / MANIFEST)
    files = content.get("files")
    if content.get("format") != FORMAT or not isinstance(files, dict):
        raise FileError(f"{folder / MANIFEST}: not a manifest of format {FORMAT}")
    return {name: _mark(folder, name, entry) for name, entry in files.items()}


def check_files(folder: Path, names: Collection[str]) -> None:
    """Raise a FileError that names the first of these files that is not as the manifest says, or not in it."""
    marks = read_manifest(folder)
    for name in names:
        if name not in marks:
            raise FileError(f"{folder / name}: was not there when the folder was written")
        if not (folder / name).is_file():
            raise FileError(f"{folder / name}: missing")
        try:
            now = FileMark.of(folder / name)
        except OSError as error:
            raise FileError(f"{folder / name}: cannot be read ({error.strerror})") from None
        if now != marks[name]:
            how = "has changed" if now.bytes == marks[name].bytes else f"has {now.bytes} of {marks[name].bytes} bytes"
            raise FileError(f"{folder / name}: {how} since it was written")


def _mark(folder: Path, name: str, entry: Any) -> FileMark:
    if isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str):
        return FileMark(entry["bytes"], entry["sha256"])
    raise FileError(f"{folder / MANIFEST}: its entry of {name} is damaged")
