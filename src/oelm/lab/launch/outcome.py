"""How a process that trained a run ended: from the run's status, its output and its exit code."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.files import read_record
from ...errors import FileError
from ...training.signals import EXIT_REQUEUE
from .interface import CONSOLE

# The exit code of a command that was refused.
_EXIT_REFUSED = 2
# Errors that would be the same in a second attempt.
_PERMANENT = ("ConfigError", "MethodError", "DataError", "ModelError", "FamilyError", "CheckpointError", "LabError")


def status_time(folder: Path) -> float | None:
    """Return when a run's status was last written, by the clock of its machine, or None if it has no status."""
    file = folder / "status.json"
    with suppress(FileError):  # a damaged status belongs to no attempt
        return read_record(file).get("updated") if file.is_file() else None
    return None


def new_status(folder: Path, old_time: float | None) -> dict[str, Any]:
    """Return a run's status if it was written after the one of `old_time`; an old attempt's counts as empty.

    Times are only tested for equality, never compared with this machine's clock: the run may be on another machine.
    """
    time = status_time(folder)
    return {} if time is None or time == old_time else read_record(folder / "status.json")


def was_stopped(folder: Path, exit_code: int, old_time: float | None) -> bool:
    """Return True when a run that has no result was asked to stop.

    The exit code alone is not enough: torchrun turns every failure into 1, and a submitit job always ends with 0.
    """
    return exit_code == EXIT_REQUEUE or new_status(folder, old_time).get("state") == "stopped"


def failure_reason(folder: Path, exit_code: int, old_time: float | None) -> tuple[str, bool]:
    """Return why a run failed, and True when a second attempt would fail for the same reason."""
    if exit_code < 0:
        return f"its process was killed by signal {-exit_code}", False
    status = new_status(folder, old_time)
    if status.get("state") == "failed":
        message = str(status.get("message"))
        return message, message.startswith(_PERMANENT)
    console = folder / CONSOLE
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines() if console.is_file() else []
    last_line = next((line for line in reversed(lines) if line.strip()), "")
    return last_line.removeprefix("oelm: ") or f"its process ended with {exit_code}", exit_code == _EXIT_REFUSED
