"""Where the rows of a task are: a split's local files, or its table on the Hub, behind one interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import DataError
from .. import hub
from ..tables import ChooseColumns, Row, read_rows
from ..text_files import Meter, format_of, known_suffixes
from .tasks import FOLDER, NamedTask, Place

# The parts of a split as the Hub stores them: train-00000-of-00002.parquet.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


class Table(Protocol):
    """The rows of one split."""

    @property
    def name(self) -> str:
        """For messages."""

    def rows(self, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
        """Every row with its place. `choose` is shown the first row of each file and names the columns to read."""

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """What the numbers in a column of labels stand for, where the table itself says so."""

    def source(self) -> dict[str, Any]:
        """Where it is from, for the record; there is no absolute path in it."""


@dataclass(frozen=True)
class LocalTable:
    """One file, or the parts of one. Of a file in several languages, `language` is read."""

    root: Path
    paths: tuple[Path, ...]
    language: str | None = None

    @property
    def name(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}" + (f" (language {self.language})" if self.language else "")

    def rows(self, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
        def with_language(row: Row) -> list[str]:
            return [*choose(row), *(["language"] if self.language and "language" in row else [])]

        for path in self.paths:
            for place, row in read_rows(path, Meter(), with_language):
                if self.language is None or row.get("language", self.language) == self.language:
                    yield place, row

    def class_names(self, column: str) -> tuple[str, ...] | None:
        return None

    def source(self) -> dict[str, Any]:
        files = [path.relative_to(self.root).as_posix() for path in self.paths]
        return {"file": files[0] if len(files) == 1 else files} | ({"language": self.language} if self.language else {})


@dataclass(frozen=True)
class Tables:
    """The tables of a task. `validation` is None where a share of the training rows must do."""

    train: Table
    validation: Table | None
    extra: dict[str, Table]


def locate(name: str, task: NamedTask, path: Path, languages: tuple[str, ...]) -> Tables:
    """The tables of a task below a local folder."""
    if not path.is_dir():
        kind = "a file; name the folder that holds it" if path.exists() else "no such folder"
        raise DataError(f"{path}: {kind}. It should hold the files of the task {name!r}")
    # A folder of the task's name first: what lies in the root may belong to another task.
    folders = [*(path / folder for folder in task.folders), path]
    train = _local(task.train, path, folders)
    if train is None:
        raise DataError(f"{path}: no training file for the task {name!r}.{_advice(name, task, task.train)}")
    if not task.scattered:
        folders = [train.paths[0].parent]
    validation = _local(task.validation, path, folders)
    extra: dict[str, Table] = {}
    for split, places in _expanded(task, languages):
        table = _local(places, path, folders)
        if table is not None and table != validation:
            extra[split] = table
        elif table is None and places[0].language is not None:
            raise DataError(f"{path}: no file for {split}.{_advice(name, task, places)}")
    return Tables(train, validation, extra)


def on_hub(task: NamedTask, languages: tuple[str, ...], revision: str | None) -> Tables:
    """The tables of a task on the Hub, all of one commit where the Hub says which one that is."""
    commit = hub.resolve_commit(task.repo, revision)

    def table(places: tuple[Place, ...]) -> hub.HubTable | None:
        place = next((place for place in places if place.split is not None), None)
        if place is None or place.split is None:
            return None
        return hub.HubTable(task.repo, place.language or task.config, place.split, revision or hub.REVISION, commit)

    train = table(task.train)
    assert train is not None
    extra: dict[str, Table] = {
        split: found for split, places in _expanded(task, languages) if (found := table(places)) is not None
    }
    return Tables(train, table(task.validation), extra)


def _expanded(task: NamedTask, languages: tuple[str, ...]) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """The extra splits, those of languages once for each."""
    for split, places in task.extra.items():
        if "{language}" not in split:
            yield split, places
            continue
        for language in languages:
            yield (
                split.format(language=language),
                tuple(
                    replace(
                        place,
                        files=tuple(file.format(language=language) for file in place.files),
                        language=language,
                    )
                    for place in places
                ),
            )


def _local(places: tuple[Place, ...], root: Path, folders: Sequence[Path]) -> LocalTable | None:
    """The first of the places that has files, in the first of the folders that has them."""
    for place in places:
        for folder in folders:
            found = [paths for stem in place.files if (paths := _files(folder, stem))]
            if len(found) > 1:
                names = " and ".join(paths[0].name for paths in found)
                raise DataError(f"{folder}: holds {names}, which mean the same split: keep one")
            if found:
                return LocalTable(root, found[0], place.language)
    return None


def _files(folder: Path, stem: str) -> tuple[Path, ...]:
    """The file of that name, whatever its format, or all parts of it."""
    whole: list[Path] = []
    parts: dict[int, Path] = {}
    count = 0
    place = (folder / stem).parent
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        if format_of(path)[0] in ("", "text") or not path.is_file():
            continue
        bare = path.name[: -len("".join(_endings(path)))]
        part = _PART.fullmatch(bare)
        if Path(stem).name in (bare, path.name):
            whole.append(path)
        elif part and part["stem"] == Path(stem).name:
            parts[int(part["number"])], count = path, int(part["count"])
    if len(whole) + bool(parts) > 1:
        names = ", ".join(path.name for path in [*whole, *parts.values()])
        raise DataError(f"{place}: {names} are the same split in several formats: keep one")
    missing = [number for number in range(count) if number not in parts]
    if missing:
        raise DataError(f"{place}: {Path(stem).name} has {count} parts, and number {missing[0]} is missing")
    return (whole[0],) if whole else tuple(parts[number] for number in sorted(parts))


def _endings(path: Path) -> list[str]:
    """The suffixes that say a file's format, not those that are part of its name."""
    return path.suffixes[-2:] if format_of(path)[1] else path.suffixes[-1:]


def _advice(name: str, task: NamedTask, places: tuple[Place, ...]) -> str:
    """What was looked for, and how to get the public files."""
    stems = ", ".join(dict.fromkeys(stem for place in places for stem in place.files))
    looked = f" Looked for {stems} (with {known_suffixes(tables=True)})"
    if name == FOLDER:
        return f"{looked} in it"
    folders = ", ".join(f"{folder}/" for folder in task.folders)
    return (
        f"{looked} in it and in {folders}. The public files: hf download {task.repo} --repo-type dataset "
        "--local-dir DIR, then name DIR; or name no folder, and the Hub is asked"
    )
