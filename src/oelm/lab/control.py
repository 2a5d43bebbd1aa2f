"""What can be done to runs from their records: find their log, ask them or their matrix to stop, free what is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.locks import hold, holder
from ..errors import FileError, LabError
from ..runs.folder import ASKED, STOP
from .launch.local import CONSOLE, launch_of
from .status import RunState, live_matrices, look

_HOLDER = re.compile(r"process (\d+) on (.+)")


def stop(run: RunState) -> str:
    """Ask a run to save and stop; says what was done.

    On this machine its process gets SIGTERM, if that process is the one that holds the run's lock. On another machine
    a file is left in its folder, which it looks for whenever it logs. A job that still waits in a queue is cancelled.
    """
    who = holder(run.path)
    if who is None and run.state != "running":
        job = _queued_job(run.path)
        if job is not None:
            return _cancel(job)
        raise LabError(f"{run.name}: is not running; its state is {run.state}")
    how = _ask(run.path, who or "", run.name)
    if how == "before":
        return "was asked before; it is saving, or finishing its step"
    if how == "signal":
        return "asked to stop; it saves first"
    where = run.host or "another machine"
    return f"it runs on {where}: asked to stop by a file in its folder, which it sees at its next line of log"


def stop_matrices(root: Path) -> dict[str, str]:
    """Ask every matrix that runs below a folder to start no more runs and to let those that go on save and stop.

    By the name of its place, what was done to each: signalled on this machine, on another by a file that it looks for.
    """
    done = {}
    for place in live_matrices(root):
        who = holder(place)
        if who is None:
            continue  # it has ended meanwhile
        how = _ask(place, who, f"the matrix of {who}")
        told = "was asked to stop before" if how == "before" else "asked to stop"
        done[place.name] = f"the matrix of {who}: {told}; it starts no more runs, and running ones save first"
    return done


def matrix_of(run: RunState) -> str | None:
    """The name of the place of the matrix that started a run last: it stops the run itself, and once is enough."""
    try:
        return launch_of(run.path).get("matrix")
    except FileError:  # damaged: nobody stops it but us
        return None


def _ask(folder: Path, who: str, name: str) -> Literal["before", "signal", "file"]:
    """Ask the process that holds a folder's lock to stop, once: a second signal would end it at once, unsaved."""
    asked = folder / ASKED
    if who and asked.is_file() and asked.read_text(encoding="utf-8") == who:
        return "before"
    asked.write_text(who, encoding="utf-8")
    found = _HOLDER.fullmatch(who)
    if found and found[2] == socket.gethostname():
        try:
            os.kill(int(found[1]), signal.SIGTERM)
            return "signal"
        except ProcessLookupError:
            pass  # the same name on another machine, or in another container
        except PermissionError:
            asked.unlink(missing_ok=True)  # nobody was
            raise LabError(f"{name}: process {found[1]} belongs to another user") from None
    (folder / STOP).touch()
    return "file"


def log_file(run: RunState) -> Path:
    """A run's log; where it ended before it had one, what its process printed."""
    for name in ("train.log", CONSOLE):
        file = run.path / name
        if file.is_file() and (file.stat().st_size or run.live):
            return file
    raise LabError(f"{run.name}: has no log yet; its state is {run.state}")


def log_lines(run: RunState, last: int, follow: bool = False, pause: float = 0.5) -> Iterator[str]:
    """The last lines of a run's log; then, if wanted, those that it grows by until no process has the run any more."""
    with open(log_file(run), encoding="utf-8", errors="replace") as log:
        going_on = follow
        yield from deque(log, maxlen=last)
        while going_on:
            # Asked before reading: what a run says last, after its result, is read once it has gone.
            going_on = holder(run.path) is not None or look(run.path).live
            yield from iter(log.readline, "")
            if going_on:
                time.sleep(pause)


@dataclass(frozen=True)
class Freeable:
    """Something of a finished run that can be removed, and its size in bytes."""

    path: Path
    bytes: int


def freeable(runs: list[RunState], best: bool = False) -> list[Freeable]:
    """The checkpoints of finished runs, and with `best` their best models too. Records are never among them."""
    found = []
    for run in runs:
        if run.state not in ("finished", "diverged") or holder(run.path) is not None:
            continue
        for name in ("checkpoints", "best") if best else ("checkpoints",):
            size = _size(run.path / name)
            if size:
                found.append(Freeable(run.path / name, size))
    return found


def free(things: list[Freeable]) -> int:
    """Remove them; the bytes that were freed. A run that came to life meanwhile keeps what it has."""
    freed = 0
    for thing in things:
        try:
            with hold(thing.path.parent):
                shutil.rmtree(thing.path)
                freed += thing.bytes
        except FileError:
            continue  # a process has it now
        except OSError as error:
            raise LabError(f"{thing.path}: cannot be removed ({error.strerror})") from None
    return freed


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _queued_job(folder: Path) -> str | None:
    """The id of a Slurm job that this run was submitted as."""
    launch = launch_of(folder)
    return str(launch["job"]) if launch.get("launcher") == "slurm" and not (folder / "result.json").exists() else None


def _cancel(job: str) -> str:
    import subprocess

    try:
        done = subprocess.run(["scancel", job], capture_output=True, text=True, check=False)
    except OSError:
        raise LabError(f"it waits as Slurm job {job}, and there is no scancel here: cancel it where Slurm is") from None
    if done.returncode:
        raise LabError(f"Slurm job {job} could not be cancelled: {done.stderr.strip()}")
    return f"Slurm job {job} was cancelled"
