"""How a process that trained a run ended: from the run's status, its output and its exit code."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...errors import FileError
from ...runs.schema import Status, read_optional
from ...training.signals import EXIT_REQUEUE
from .interface import CONSOLE

# The exit code of a command that was refused.
_EXIT_REFUSED = 2
# Errors that would be the same in a second attempt.
_PERMANENT = ("ConfigError", "MethodError", "DataError", "ModelError", "FamilyError", "CheckpointError", "LabError")


def status_time(folder: Path) -> float | None:
    """Return when a run's status was last written, by the clock of its machine, or None if it has no status."""
    status = _read_status(folder)
    return None if status is None else status.updated


def new_status(folder: Path, old_time: float | None) -> Status | None:
    """Return a run's status if it was rewritten since the one of `old_time`, which an earlier attempt wrote.

    Times are only tested for equality, never compared with this machine's clock: the run may be on another machine.
    """
    status = _read_status(folder)
    return None if status is None or status.updated in (None, old_time) else status


def _read_status(folder: Path) -> Status | None:
    with suppress(FileError):  # a damaged status says nothing about any attempt
        return read_optional(folder / "status.json", Status)
    return None


def was_stopped(folder: Path, exit_code: int, old_time: float | None) -> bool:
    """Return True when a run that has no result was asked to stop.

    The exit code alone is not enough: torchrun turns every failure into 1, and a submitit job always ends with 0.
    """
    status = new_status(folder, old_time)
    return exit_code == EXIT_REQUEUE or (status is not None and status.state == "stopped")


def failure_reason(folder: Path, exit_code: int, old_time: float | None) -> tuple[str, bool]:
    """Return why a run failed, and True when a second attempt would fail for the same reason."""
    if exit_code < 0:
        return f"its process was killed by signal {-exit_code}", False
    status = new_status(folder, old_time)
    if status is not None and status.state == "failed":
        message = status.message or "it failed without a message"
        return message, message.startswith(_PERMANENT)
    console = folder / CONSOLE
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines() if console.is_file() else []
    last_line = next((line for line in reversed(lines) if line.strip()), "")
    return last_line.removeprefix("oelm: ") or f"its process ended with {exit_code}", exit_code == _EXIT_REFUSED
