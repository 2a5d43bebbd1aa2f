"""The state of every run below a folder, read from the runs' records alone: no server, and it survives a reboot."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.files import read_record
from ..base.locks import holder
from ..errors import FileError, LabError, nearest
from ..runs.folder import ending, is_alive
from ..runs.schema import RecordedConfig, Result, RunProgress, Status, read, read_optional

# The folder, below the output folder, in which running matrices write what they have planned.
LAB = ".lab"
# Folders inside a run's folder, which hold no runs.
_INNER = ("checkpoints", "best")
_NUMBER = re.compile(r"\d+")


class RunState(RunProgress):
    """One run as its records show it: its state and progress, and its experiment, method and seed.

    `split_accuracy` is the accuracy on each labelled split besides validation, such as test, once the run has ended.

    The states are: new (nothing recorded yet), waiting (a matrix has planned it), running, finished, diverged (all
    steps done, but the validation loss is not a number), stopped (it was asked to, and can be resumed), failed, died
    (its status says running, but its process is gone) and unreadable (a damaged record, named in the message).
    """

    name: str
    path: Path
    state: str
    experiment: str | None = None
    method: str | None = None
    seed: int | None = None
    split_accuracy: dict[str, float] = {}

    @property
    def live(self) -> bool:
        return self.state == "running"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path), "state": self.state, **self.model_dump(mode="json")}


def read_state(path: Path, name: str | None = None) -> RunState:
    """Return the state of the run in a folder, which may not exist yet. Its name is `name`, or else the path."""
    label = str(path) if name is None else name
    try:
        status = read_optional(path / "status.json", Status)
        recorded = read_optional(path / "config.json", RecordedConfig)
        result = read_optional(path / "result.json", Result)
    except (FileError, OSError) as error:
        return RunState(name=label, path=path, state="unreadable", message=str(error))
    figures: dict[str, Any] = {}
    for record in (status, result):  # a figure of the result replaces that of the last status
        if record is not None:
            figures |= record.model_dump(include=set(RunProgress.model_fields), exclude_none=True)
    if result is not None:
        figures |= {"step": result.steps, "max_steps": result.steps, "eta_seconds": None, "message": None}
        accuracies = {name: split.accuracy for name, split in result.evaluations.items()}
        figures["split_accuracy"] = {name: value for name, value in accuracies.items() if value is not None}
    return RunState(
        name=label,
        path=path,
        state=_state(path, status, result),
        experiment=None if recorded is None else recorded.config.experiment,
        method=path.parent.name,
        seed=None if recorded is None else recorded.config.seed,
        **figures,
    )


def list_runs(root: Path) -> list[RunState]:
    """Return every run below a folder, ordered by name. Runs that a live matrix has only planned are waiting."""
    states = {path: read_state(path, _name(path, root)) for path in run_folders(root)}
    for folder in live_matrices(root):
        with suppress(FileError):  # a matrix that ends at this moment removes its file
            for path in (folder.parent.parent / name for name in read_record(folder / "matrix.json")["runs"]):
                if path not in states or states[path].state == "new":
                    states[path] = RunState(name=_name(path, root), path=path, state="waiting", method=path.parent.name)
    return [states[path] for path in sorted(states, key=_natural_order)]


def run_folders(root: Path) -> Iterator[Path]:
    """Yield every folder below `root` (or `root` itself) that holds a run's records."""
    return (folder for folder, is_run in _walk(root) if is_run)


def live_matrices(root: Path) -> list[Path]:
    """Return the folder of each matrix that is running in `root` or below; the matrix holds a lock there."""
    files = [file for folder, _ in _walk(root) for file in sorted(folder.glob(f"{LAB}/*/matrix.json"))]
    return [file.parent for file in files if holder(file.parent) is not None]


def find_run(name: str, root: Path) -> RunState:
    """Return a run given its folder, or a part of its name that no other run below `root` has."""
    path = Path(name)
    if path.is_dir() and next(run_folders(path), None) == path:
        return read_state(path)
    runs = list_runs(root) if root.is_dir() else []
    exact = [run for run in runs if run.name == name.strip("/")]
    matching = exact or [run for run in runs if name.strip("/") in run.name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        shown = ", ".join(run.name for run in matching[:5]) + (", ..." if len(matching) > 5 else "")
        raise LabError(f"{name!r} is part of {len(matching)} runs' names: {shown}. Give a longer part")
    raise LabError(f"no run {name!r} below {root}.{nearest(name, [run.name for run in runs], count=3)}")


def refuse_folder_of_runs(folder: Path) -> None:
    """Raise if a folder is no run or model itself but holds runs below it, of which one is to be named."""
    below = [] if (folder / "config.json").is_file() else sorted(run_folders(folder))
    if below:
        others = f" (there are {len(below)})" if len(below) > 1 else ""
        raise LabError(f"{folder}: not a run but a folder above runs; name one{others}, such as {below[0]}")


def is_done(folder: Path, id: str) -> bool:
    """Return True when a folder holds the result of the run with this id; raise if it holds another run's."""
    if not (folder / "result.json").is_file():
        return False
    result, recorded = read(folder / "result.json", Result), read_optional(folder / "config.json", RecordedConfig)
    recorded_id = result.id if recorded is None else recorded.id
    if recorded_id != id:
        raise FileError(f"its folder holds another run ({recorded_id}); use another --out")
    return True


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield `root` and every folder below it, down to those of runs, and whether each is a run's."""
    for path, subfolders, names in os.walk(root):
        is_run = "config.json" in names and ("metrics.jsonl" in names or "status.json" in names)
        is_run = is_run or "result.json" in names
        # os.walk descends into what is left in this list.
        subfolders[:] = (
            [] if is_run else [name for name in subfolders if not name.startswith(".") and name not in _INNER]
        )
        yield Path(path), is_run


def _state(path: Path, status: Status | None, result: Result | None) -> str:
    if result is not None:
        return ending(result.val_loss)
    if is_alive(path, status):
        return "running"
    if status is None:
        return "new"
    return "died" if status.state == "running" else status.state


def _name(path: Path, root: Path) -> str:
    relative = str(path.relative_to(root))
    return str(path) if relative == "." else relative


def _natural_order(path: Path) -> list[Any]:
    """Return a sort key that puts seed-10 after seed-9."""
    words, numbers = _NUMBER.split(str(path)), _NUMBER.findall(str(path))
    return [part for pair in zip(words, [*map(int, numbers), 0], strict=True) for part in pair]
