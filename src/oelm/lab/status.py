"""Every run below a folder and the state it is in, from its records alone: works after a reboot, with no server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.files import read_record
from ..base.locks import holder
from ..errors import FileError, LabError, near
from ..runs.folder import ending, is_alive

# Where matrices that run now say what they have planned, below the output folder.
LAB = ".lab"
# Folders of a run that hold no runs.
_INNER = ("checkpoints", "best")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class RunState:
    """One run as its records show it.

    state: running, finished, diverged (all its steps, and a validation loss that is no number), stopped, failed; died
    (it says running, but no process has it); new (nothing begun); waiting (a matrix has planned it); unreadable (a
    damaged record, named in the message).
    """

    name: str
    path: Path
    state: str
    experiment: str | None = None
    method: str | None = None
    seed: int | None = None
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    memory: int | None = None
    host: str | None = None
    pid: int | None = None
    updated: float | None = None
    message: str | None = None

    @property
    def live(self) -> bool:
        return self.state == "running"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def look(path: Path, name: str | None = None) -> RunState:
    """The state of the run in a folder, whether or not it has begun."""
    label = str(path) if name is None else name
    try:
        status, result = _read(path / "status.json"), _read(path / "result.json")
        config = _read(path / "config.json")
    except (FileError, OSError) as error:
        return RunState(label, path, "unreadable", message=str(error))
    figures = {key: status.get(key) for key in _FIGURES if status.get(key) is not None}
    if result:
        last = {key: result.get(key) for key in ("val_loss", "perplexity", "accuracy", "tokens_per_second")}
        figures |= {key: value for key, value in last.items() if value is not None}
        figures |= {"step": result.get("steps"), "max_steps": result.get("steps")}
        figures.pop("eta_seconds", None)
    message = status.get("message") if not result else None
    return RunState(
        label,
        path,
        _state(path, status, result),
        experiment=config.get("experiment"),
        method=_method_of(path),
        seed=config.get("seed"),
        message=message,
        **figures,
    )


_FIGURES = (
    "step",
    "max_steps",
    "loss",
    "val_loss",
    "perplexity",
    "accuracy",
    "tokens_per_second",
    "eta_seconds",
    "memory",
    "host",
    "pid",
    "updated",
)


def survey(root: Path) -> list[RunState]:
    """Every run below a folder, in the order of their names; runs that a matrix has planned are waiting."""
    found = {path: look(path, _name(path, root)) for path in run_folders(root)}
    for path in planned_by_live_matrices(root):
        if path not in found or found[path].state == "new":
            found[path] = RunState(_name(path, root), path, "waiting", method=_method_of(path))
    return [found[path] for path in sorted(found, key=_natural)]


def run_folders(root: Path) -> Iterator[Path]:
    """Every folder below one that holds a run's records."""
    return (place for place, is_run in _walk(root) if is_run)


def planned_by_live_matrices(root: Path) -> list[Path]:
    """The folders of all runs that matrices which are running now have planned below `root`."""
    planned = []
    for place in live_matrices(root):
        with suppress(FileError):  # one that ends just now takes away what it has said
            planned += [place.parent.parent / name for name in read_record(place / "matrix.json")["runs"]]
    return planned


def live_matrices(root: Path) -> list[Path]:
    """Where each matrix that runs now, in `root` or a folder below, has said what it plans; it holds the lock there."""
    said = [file for folder, _ in _walk(root) for file in sorted(folder.glob(f"{LAB}/*/matrix.json"))]
    return [file.parent for file in said if holder(file.parent) is not None]


def so_many(count: int, noun: str = "run") -> str:
    """A number of things in words: 1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Every folder below one down to those of runs, and whether it is a run's."""
    for place, folders, names in os.walk(root):
        is_run = "config.json" in names and ("metrics.jsonl" in names or "status.json" in names)
        is_run = is_run or "result.json" in names
        kept = [] if is_run else [name for name in folders if not name.startswith(".") and name not in _INNER]
        folders[:] = kept
        yield Path(place), is_run


def find_run(name: str, root: Path) -> RunState:
    """A run by its folder, or by a part of its name that only one run below `root` has."""
    path = Path(name)
    if path.is_dir() and next(run_folders(path), None) == path:
        return look(path)
    runs = survey(root) if root.is_dir() else []
    exact = [run for run in runs if run.name == name.strip("/")]
    matches = exact or [run for run in runs if name.strip("/") in run.name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(run.name for run in matches[:5]) + (", ..." if len(matches) > 5 else "")
        raise LabError(f"{name!r} is part of {len(matches)} runs' names: {shown}. Give more of it")
    raise LabError(f"no run {name!r} below {root}.{near(name, [run.name for run in runs])}")


def is_done(folder: Path, id: str) -> bool:
    """Whether a folder holds the result of the run with this id; raises where it is another's, or damaged."""
    if not (folder / "result.json").is_file():
        return False
    config, result = _read(folder / "config.json"), _read(folder / "result.json")
    found = config.get("id") or result.get("id")
    if found != id:
        raise FileError(f"its folder holds another run ({found}); use another --out")
    return True


def _state(path: Path, status: dict[str, Any], result: dict[str, Any]) -> str:
    if result:
        return ending(result["val_loss"]) if "val_loss" in result else "finished"
    if is_alive(path, status):
        return "running"
    state = status.get("state") or "new"
    return "died" if state == "running" else str(state)


def _read(path: Path) -> dict[str, Any]:
    return read_record(path) if path.is_file() else {}


def _method_of(path: Path) -> str:
    return path.parent.name


def _name(path: Path, root: Path) -> str:
    relative = str(path.relative_to(root))
    return str(path) if relative == "." else relative


def _natural(path: Path) -> list[Any]:
    """Sorts seed-10 after seed-9."""
    words, numbers = _NUMBER.split(str(path)), _NUMBER.findall(str(path))
    return [part for pair in zip(words, [*map(int, numbers), 0], strict=True) for part in pair]
