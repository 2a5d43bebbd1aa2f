"""Start a matrix that outlives its terminal: in a session of its own, with a log that stays locked while it runs."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...base.files import read_record, writing
from ...base.locks import holder, holding_pid
from ...errors import LabError
from ..status import LAB

# What `oelm` exits with when it refuses a command.
_EXIT_REFUSED = 2
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Detached:
    """A matrix in the background: its process, its log, and True where it was in progress before it was asked for."""

    process: int
    log: Path
    before: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "log": str(self.log)}


def detach(arguments: Sequence[str], out: Path, runs: Sequence[str]) -> Detached:
    """Start `oelm ARGUMENTS`, a matrix of these runs in `out`, and return once it has announced them.

    A matrix in `out` that has all of these runs already, and is in progress, is returned instead.
    """
    running = _in_progress(out, runs)
    if running is not None:
        return running
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        child, log = _start(arguments, out)
    while child.poll() is None and child.pid not in _processes(out):
        time.sleep(_PAUSE_SECONDS)
    if child.returncode == _EXIT_REFUSED:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        log.unlink()
        raise LabError("\n".join(lines[1:]).removeprefix("oelm: "))
    return Detached(child.pid, log, False)


def find_log(name: str | None, out: Path) -> Path | None:
    """Return a matrix's log by its name; without one, that of the matrix that was detached last.

    One that is in progress comes before others. Return None for a name that is no matrix's log.
    """
    logs = sorted(out.glob("matrix-*.log"))
    if name is not None:
        return next((log for log in logs if name in (log.name, str(log))), None)
    if not logs:
        raise LabError(f"{out}: no matrix was started with --detach there; name a run to see its log")
    return ([log for log in logs if is_written(log)] or logs)[-1]


def is_written(log: Path) -> bool:
    """Return True while the matrix whose log this is is in progress."""
    return holder(log.parent, log.name) is not None


def _start(arguments: Sequence[str], out: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the command; its output is a log that its process, and no run, holds locked."""
    unnamed = out / f".matrix.{os.getpid()}.tmp"
    with open(unnamed, "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write(f"oelm {shlex.join(arguments)}\n".encode())
        log.flush()
        child = subprocess.Popen(
            [sys.executable, "-m", "oelm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # the end of a terminal or of a login is not signalled to it
        )
    named = out / f"matrix-{time.strftime('%Y%m%d-%H%M%S')}-{child.pid}.log"
    os.replace(unnamed, named)
    return child, named


def _in_progress(out: Path, runs: Sequence[str]) -> Detached | None:
    """Return the matrix in a folder that is in progress and has all of these runs; raise if it has no log there."""
    for folder in _matrices(out):
        if not set(runs) <= set(read_record(folder / "matrix.json")["runs"]):
            continue
        pid = holding_pid(folder)
        logs = [log for log in out.glob(f"matrix-*-{pid}.log") if is_written(log)]
        if pid is None or not logs:
            raise LabError(f"{out}: {holder(folder) or 'another process'} is running this matrix already")
        return Detached(pid, logs[0], True)
    return None


def _matrices(out: Path) -> list[Path]:
    """Return the folders of the matrices that are in progress in a folder, and not below it."""
    return [file.parent for file in (out / LAB).glob("*/matrix.json") if holder(file.parent) is not None]


def _processes(out: Path) -> set[int | None]:
    return {holding_pid(folder) for folder in _matrices(out)}
