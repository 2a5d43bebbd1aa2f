"""Act on runs through their folders: read a log, ask runs or matrices to stop, free disk space."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.locks import hold, holder, holding_pid
from ..errors import FileError, LabError
from ..runs.folder import ASKED, STOP
from .launch.interface import CONSOLE, read_launch
from .status import RunState, list_runs, live_matrices, read_state

HowStopped = Literal["signal", "file", "before", "cancelled", "with matrix"]


@dataclass(frozen=True)
class StopOutcome:
    """What was done to stop a run, or a matrix and with it its runs.

    name    the run, or the process of the matrix
    how     how the process was asked: by SIGTERM, by a file in its folder, or not again because it had been asked
            before; "cancelled" for a job that still waited in a queue; "with matrix" for a run that its matrix stops
    where   the machine that a run on another machine is on, or the id of a cancelled job
    """

    name: str
    how: HowStopped
    where: str = ""


def stop(run: RunState) -> StopOutcome:
    """Ask a run to save and stop.

    On this machine its process gets SIGTERM, provided that it is the one that holds the run's lock. A run on another
    machine finds a file in its folder when it next logs. A job that waits in a queue is cancelled.
    """
    process = holder(run.path)
    if process is None and run.state != "running":
        job = _queued_job(run.path)
        if job is None:
            raise LabError(f"{run.name}: is not running; its state is {run.state}")
        _cancel(job)
        return StopOutcome(run.name, "cancelled", job)
    how = _ask(run.path, process or "", run.name)
    return StopOutcome(run.name, how, (run.host or "another machine") if how == "file" else "")


def stop_all(root: Path) -> tuple[list[StopOutcome], list[StopOutcome]]:
    """Ask every matrix and every run in progress below a folder to stop; return (matrices, runs)."""
    # Matrices come first: otherwise they would start the next run as soon as one stops.
    matrices = {}
    for folder in live_matrices(root):
        process = holder(folder)
        if process is not None:  # otherwise it has just ended
            matrices[folder.name] = StopOutcome(process, _ask(folder, process, f"the matrix of {process}"))
    runs = []
    for run in list_runs(root):
        if run.live:
            with_matrix = _matrix_of(run) in matrices
            runs.append(StopOutcome(run.name, "with matrix") if with_matrix else stop(run))
    return list(matrices.values()), runs


def _matrix_of(run: RunState) -> str | None:
    """Return the folder name of the matrix that started a run."""
    try:
        info = read_launch(run.path)
    except FileError:  # damaged: the run is stopped directly
        return None
    return None if info is None else info.matrix


def _ask(folder: Path, process: str, name: str) -> HowStopped:
    """Ask the process that holds a folder's lock to stop, once: a second signal would end it at once, unsaved."""
    request = folder / ASKED
    if process and request.is_file() and request.read_text(encoding="utf-8") == process:
        return "before"
    request.write_text(process, encoding="utf-8")
    pid = holding_pid(folder)
    if pid is not None:
        try:
            os.kill(pid, signal.SIGTERM)
            return "signal"
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError:
            request.unlink(missing_ok=True)
            raise LabError(f"{name}: process {pid} belongs to another user") from None
    (folder / STOP).touch()
    return "file"


def log_file(run: RunState) -> Path:
    """Return a run's log, or if it failed before it had one, what its process printed."""
    for name in ("train.log", CONSOLE):
        file = run.path / name
        if file.is_file() and (file.stat().st_size or run.live):
            return file
    raise LabError(f"{run.name}: has no log yet; its state is {run.state}")


def log_lines(run: RunState, last: int, follow: bool = False) -> Iterator[str]:
    """Yield the last lines of a run's log; with `follow` also new ones, until the run is no longer in progress."""
    return end_of(log_file(run), last, follow, lambda: holder(run.path) is not None or read_state(run.path).live)


def end_of(file: Path, last: int, follow: bool, is_written: Callable[[], bool], pause: float = 0.5) -> Iterator[str]:
    """Yield the last lines of a log; with `follow` also new ones, for as long as it is written."""
    with open(file, encoding="utf-8", errors="replace") as log:
        in_progress = follow
        yield from deque(log, maxlen=last)
        while in_progress:
            # Checked before reading, so that the last lines of what has just ended are read too.
            in_progress = is_written()
            yield from iter(log.readline, "")
            if in_progress:
                time.sleep(pause)


def freeable(runs: list[RunState], best: bool = False) -> dict[Path, int]:
    """Return the size in bytes of each checkpoint folder of finished runs, and with `best` of each best model's."""
    names = ("checkpoints", "best") if best else ("checkpoints",)
    ended = [run for run in runs if run.state in ("finished", "diverged") and holder(run.path) is None]
    sizes = {run.path / name: _size(run.path / name) for run in ended for name in names}
    return {folder: size for folder, size in sizes.items() if size}


def free(folders: dict[Path, int]) -> int:
    """Remove the folders and return the bytes that were freed; folders of runs that are in use again stay."""
    freed = 0
    for folder, size in folders.items():
        try:
            with hold(folder.parent):
                shutil.rmtree(folder)
                freed += size
        except FileError:
            continue  # a process holds the run's lock
        except OSError as error:
            raise LabError(f"{folder}: cannot be removed ({error.strerror})") from None
    return freed


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _queued_job(folder: Path) -> str | None:
    """Return the id of the Slurm job that a run without a result was submitted as, or None."""
    info = None if (folder / "result.json").exists() else read_launch(folder)
    return info.job if info is not None and info.launcher == "slurm" else None


def _cancel(job: str) -> None:
    try:
        command = subprocess.run(["scancel", job], capture_output=True, text=True, check=False)
    except OSError:
        raise LabError(f"Slurm job {job}: there is no scancel here; cancel the job on a machine with Slurm") from None
    if command.returncode:
        raise LabError(f"Slurm job {job} could not be cancelled: {command.stderr.strip()}")
