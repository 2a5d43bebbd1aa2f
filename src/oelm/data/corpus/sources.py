"""Resolve what a user names as a corpus: a file, a folder of files, or a dataset on the Hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...errors import DataError
from .. import hub
from ..text_files import Meter, format_of, known_suffixes
from . import readers
from .header import SourceHeader, SplitName
from .readers import Reading, Unit

_HELD_OUT = re.compile(r"(val|valid|validation|dev|test)([-_.].*)?", re.IGNORECASE)
_TRAIN = re.compile(r"train([-_.].*)?", re.IGNORECASE)


@dataclass(frozen=True)
class FileSource:
    """One file, or the files of a folder in the order of their names.

    It can be read several times, in the same order each time. `ignored` are the files of the folder that are not read.
    """

    root: Path
    paths: tuple[Path, ...]
    reading: Reading
    ignored: tuple[str, ...] = ()

    @cached_property
    def total_bytes(self) -> int:
        """Return the number of bytes that the meter of `units` will count."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def description(self) -> str:
        return self.root.name if len(self.paths) == 1 else f"{self.root.name} ({len(self.paths)} files)"

    def identify(self, split: SplitName, count: Callable[[int], None]) -> tuple[SourceHeader, ...]:
        """Return names, sizes and hashes of the inputs; `count` is called with the size of every block hashed."""
        inputs = []
        for path in self.paths:
            # A path relative to the folder that the user named is the same on every machine.
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            size, sha256 = path.stat().st_size, hash_file(path, count)
            inputs.append(SourceHeader(name=name, split=split, bytes=size, sha256=sha256))
        return tuple(inputs)

    def units(self, meter: Meter) -> Iterator[Unit]:
        """Yield the text units."""
        for path in self.paths:
            yield from readers.read_units(path, self.reading, meter)


@dataclass(frozen=True)
class HubSource:
    """One split of a dataset on the Hub, with the interface of FileSource; its size is not known beforehand."""

    dataset: hub.HubDataset
    split: str
    reading: Reading
    ignored: tuple[str, ...] = ()
    total_bytes: None = None

    @property
    def description(self) -> str:
        return f"{self.dataset} ({self.split})"

    def identify(self, split: SplitName, count: Callable[[int], None]) -> tuple[SourceHeader, ...]:
        return (SourceHeader(name=self.description, split=split),)

    def units(self, meter: Meter) -> Iterator[Unit]:
        return hub.read_units(self.dataset, self.split, self.reading, meter)


Source = FileSource | HubSource


def resolve(
    source: str | Path, val: str | Path | None, reading: Reading, test: str | Path | None = None
) -> tuple[Source, Source | None, Source | None]:
    """Return the training source and, where there are separate ones, those of validation and of test.

    A known dataset name takes precedence over a file or folder of that name; write ./name for the path.
    """
    name = str(source)
    if name not in hub.REGISTRY and Path(source).exists():
        val_files, test_files = (None if path is None else _files(Path(path), reading) for path in (val, test))
        return _files(Path(source), reading), val_files, test_files
    if isinstance(source, Path) or _looks_like_path(name):
        raise DataError(f"{name}: no such file or folder.")
    dataset = hub.parse(name)
    if dataset is None:
        raise DataError(f"{name}: no such file or folder.{hub.suggest(name)}")
    train = HubSource(dataset, "train", reading)

    def held_out(split: str | Path | None) -> Source | None:
        if split is None:
            return None
        if Path(split).exists() or _looks_like_path(str(split)):
            return _files(Path(split), reading)
        return HubSource(dataset, str(split), reading)

    return train, held_out(dataset.validation or None if val is None else val), held_out(test)


def _looks_like_path(name: str) -> bool:
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or "\\" in name or format_of(path) != ("", "")


def _files(path: Path, reading: Reading) -> FileSource:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_dir():
        return _folder(path, reading)
    if not format_of(path)[0]:
        raise DataError(f"{path}: unknown file suffix; known are {known_suffixes()}")
    return FileSource(path, (path,), reading)


def _folder(folder: Path, reading: Reading) -> FileSource:
    """Return the readable files of a folder; raise DataError where they mix training and held-out text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    visible.sort(key=lambda path: path.relative_to(folder).as_posix())
    paths = tuple(path for path in visible if format_of(path)[0])
    if not paths:
        raise DataError(f"{folder}: holds no file that can be read; known are {known_suffixes()}")
    held_out = [path for path in paths if _HELD_OUT.fullmatch(path.name)]
    training = [path for path in paths if _TRAIN.fullmatch(path.name)]
    if held_out and training:
        raise DataError(
            f"{folder}: holds {training[0].name} and {held_out[0].name}; reading both as one corpus would train on "
            "held-out text: name the training file as the source and the validation file as val (--val)"
        )
    ignored = tuple(path.relative_to(folder).as_posix() for path in visible if path not in paths)
    return FileSource(folder, paths, reading, ignored)


def hash_file(path: Path, count: Callable[[int], None] = lambda _: None) -> str:
    """Return the sha256 of a file; `count` is called with the size of every block."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                count(len(block))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()
