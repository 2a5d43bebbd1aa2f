"""The tables of a task: a split's local files or its table on the Hub, behind one interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from .. import hub
from ..tables import ChooseColumns, Row, read_rows
from ..text_files import Meter, format_of, known_suffixes
from .tasks import FOLDER, NamedTask, SplitLocation

# The Hub stores a split in numbered parts: train-00000-of-00002.parquet.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


@dataclass(frozen=True)
class LocalTable:
    """One local file, or the parts of one. From a file in several languages, only rows in `language` are read."""

    root: Path
    paths: tuple[Path, ...]
    language: str | None = None

    @property
    def name(self) -> str:
        """Return the table's name in error messages."""
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}" + (f" (language {self.language})" if self.language else "")

    def rows(self, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
        """Yield every row with its location. `choose` gets the first row of each file and names the columns to read."""

        def with_language(row: Row) -> list[str]:
            return [*choose(row), *(["language"] if self.language and "language" in row else [])]

        for path in self.paths:
            for location, row in read_rows(path, Meter(), with_language):
                if self.language is None or row.get("language", self.language) == self.language:
                    yield location, row

    def class_names(self, column: str) -> None:
        """Return None: files do not name the numbers in a label column."""

    def source(self) -> dict[str, Any]:
        """Return where the table is from, for the run's record; without absolute paths."""
        files = [path.relative_to(self.root).as_posix() for path in self.paths]
        return {"file": files[0] if len(files) == 1 else files} | ({"language": self.language} if self.language else {})


# The rows of one split, wherever they are.
TableSource = LocalTable | hub.HubTable


def find_local(name: str, task: NamedTask, path: Path, languages: tuple[str, ...]) -> dict[str, TableSource]:
    """Return the table of every split that a local folder has, training first."""
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: no such folder. It should hold the files of the task {name!r}")
        expected = f"{task.train[0].files[0]}{path.suffix}"
        raise DataError(f"{path}: a file; name the folder that holds it, where the training file is called {expected}")
    # Folders with the task's name come first, since files directly in the folder may belong to another task.
    folders = [*(path / folder for folder in task.folders), path]
    train = _first_local(task.train, path, folders)
    if train is None:
        raise DataError(f"{path}: no training file for the task {name!r}.{_advice(name, task, task.train)}")
    if not task.scattered:
        folders = [train.paths[0].parent]
    tables: dict[str, TableSource] = {"train": train}
    validation = _first_local(task.validation, path, folders)
    if validation is not None:
        tables["validation"] = validation
    for split, locations in _extra_splits(task, languages):
        table = _first_local(locations, path, folders)
        if table is not None and table != validation:
            tables[split] = table
        elif table is None and locations[0].language is not None:
            raise DataError(f"{path}: no file for {split}.{_advice(name, task, locations)}")
    return tables


def find_on_hub(task: NamedTask, languages: tuple[str, ...], revision: str | None) -> dict[str, TableSource]:
    """Return the tables of a task on the Hub, all of one commit when the Hub says which one the revision is."""
    commit = hub.resolve_commit(task.repo, revision)
    revision = revision or hub.REVISION
    tables: dict[str, TableSource] = {}
    for name, locations in (("train", task.train), ("validation", task.validation), *_extra_splits(task, languages)):
        location = next((location for location in locations if location.split), None)
        if location and location.split:
            config, split = location.language or task.config, location.split
            tables[name] = hub.HubTable(repo=task.repo, config=config, split=split, revision=revision, commit=commit)
    return tables


def _extra_splits(task: NamedTask, languages: tuple[str, ...]) -> Iterator[tuple[str, tuple[SplitLocation, ...]]]:
    """Yield the extra splits and their locations; a split for each language is repeated for all languages."""
    for split, locations in task.extra.items():
        if "{language}" not in split:
            yield split, locations
            continue
        for language in languages:
            in_language = []
            for location in locations:
                files = tuple(file.format(language=language) for file in location.files)
                in_language.append(replace(location, files=files, language=language))
            yield split.format(language=language), tuple(in_language)


def _first_local(locations: tuple[SplitLocation, ...], root: Path, folders: Sequence[Path]) -> LocalTable | None:
    """Return the files of the first location that has any, in the first folder that has them."""
    for location in locations:
        for folder in folders:
            candidates = [paths for stem in location.files if (paths := _files(folder, stem))]
            if len(candidates) > 1:
                names = " and ".join(paths[0].name for paths in candidates)
                raise DataError(f"{folder}: holds {names}, which mean the same split: keep one")
            if candidates:
                return LocalTable(root, candidates[0], location.language)
    return None


def _files(folder: Path, stem: str) -> tuple[Path, ...]:
    """Return the file with that name in any format, or all of its parts; an empty tuple when there is none."""
    single_files: list[Path] = []
    parts: dict[int, Path] = {}
    count = 0
    parent = (folder / stem).parent
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if format_of(path)[0] in ("", "text") or not path.is_file():
            continue
        # The suffixes that give the format and compression; other dots are part of the name.
        suffixes = path.suffixes[-2:] if format_of(path)[1] else path.suffixes[-1:]
        file_stem = path.name.removesuffix("".join(suffixes))
        part = _PART.fullmatch(file_stem)
        if Path(stem).name in (file_stem, path.name):
            single_files.append(path)
        elif part and part["stem"] == Path(stem).name:
            parts[int(part["number"])], count = path, int(part["count"])
    if len(single_files) + bool(parts) > 1:
        names = ", ".join(path.name for path in [*single_files, *parts.values()])
        raise DataError(f"{parent}: {names} are the same split in several formats: keep one")
    missing = [number for number in range(count) if number not in parts]
    if missing:
        raise DataError(f"{parent}: {Path(stem).name} has {count} parts, and number {missing[0]} is missing")
    return (single_files[0],) if single_files else tuple(parts[number] for number in sorted(parts))


def _advice(name: str, task: NamedTask, locations: tuple[SplitLocation, ...]) -> str:
    """Return which files were looked for, and how to get the public ones."""
    stems = ", ".join(dict.fromkeys(stem for location in locations for stem in location.files))
    searched = f" Looked for {stems} (with {known_suffixes(tables=True)})"
    if name == FOLDER:
        return f"{searched} in it"
    folders = ", ".join(f"{folder}/" for folder in task.folders)
    return (
        f"{searched} in it and in {folders}. The public files: hf download {task.repo} --repo-type dataset "
        "--local-dir DIR, then name DIR; or name no folder to load them from the Hub"
    )
