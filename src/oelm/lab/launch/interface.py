"""The interface between launchers and the matrix: start a run as a job, record how it was started, tell how it ended.

A launcher has slots; a job is a run that was started in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TextIO

from ...base.files import read_record, shortage, write_json
from ...base.strict import Strict
from ...errors import FileError, LabError
from ...runs.schema import Status, read_optional
from ...training.signals import EXIT_REQUEUE

# Files in a run's folder: how it was last started, and everything that its process printed.
LAUNCH = "launch.json"
CONSOLE = "console.log"
# The exit code of a command that was refused.
_EXIT_REFUSED = 2
# What a job's `poll` returns when its scheduler took its machine away: its run is started again, and did not fail. No
# process ends with this code.
TAKEN_AWAY = 1000
# Errors that would be the same in a second attempt.
_PERMANENT = ("ConfigError", "MethodError", "DataError", "ModelError", "FamilyError", "CheckpointError", "LabError")


class LaunchInfo(Strict, refusal=FileError):
    """How a run was started, so that another matrix or `oelm stop` can find it.

    host, pid   the process, where it was started on a machine directly
    gpus        the GPUs that it was given; none on the CPU
    threads     CPU threads per process
    processes   how many processes train the run together
    job, folder the id of its job, where a scheduler started it, and the folder of that job's files
    run         the run's folder, where a scheduler started it
    matrix      the name of the folder, below `.lab`, of the matrix that started it
    """

    launcher: str
    host: str | None = None
    pid: int | None = None
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    processes: int = 1
    job: str | None = None
    folder: str | None = None
    run: str | None = None
    matrix: str | None = None


class GpuGoneError(LabError):
    """A run that could not be started because its GPU has disappeared: another slot may be free."""


class Job(Protocol):
    """A run that was started."""

    @property
    def info(self) -> LaunchInfo: ...

    def poll(self) -> int | None:
        """Return its exit code, or None while it is in progress."""

    def stop(self) -> None:
        """Ask it to save and stop. A second request ends it at once."""


class Launcher(Protocol):
    """Starts runs as long as it has free slots."""

    @property
    def slots(self) -> int: ...

    def ready(self, orphans: Sequence[LaunchInfo]) -> bool:
        """Return True when a slot is free. `orphans` are live runs whose matrix died; their slots are still taken."""

    def start(self, config: Path, folder: Path, lock: TextIO, orphans: Sequence[LaunchInfo]) -> Job:
        """Start a run in a free slot. Its process inherits the lock if it runs on this machine.

        Raise a GpuGoneError if the slot's GPU has disappeared, and a LaterError if no run can be started now, but
        perhaps later; `attach` may raise that too.
        """

    def lost(self, gpus: Sequence[str]) -> list[str]:
        """Return a line for each of these GPUs that has disappeared; nothing is started on them any more."""

    def attach(self, info: LaunchInfo) -> Job | None:
        """Return the job that an earlier matrix submitted if it is still queued or running, else None."""


def read_launch(folder: Path) -> LaunchInfo | None:
    """Return how the run in a folder was last started, or None if no launcher has started it."""
    file = folder / LAUNCH
    if not file.is_file():
        return None
    record = read_record(file)
    try:
        return LaunchInfo(**record)
    except FileError as error:
        raise FileError(f"{file}: {error}") from None


def write_launch(folder: Path, info: LaunchInfo) -> None:
    """Write how a run was started into its folder."""
    write_json(folder / LAUNCH, info.model_dump(mode="json"))


def status_time(folder: Path) -> float | None:
    """Return the time at which a run's status was last written, by its machine's clock, or None without a status."""
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
    refused = exit_code == _EXIT_REFUSED
    written = [line for line in lines if line.strip()]
    # A refusal may have several lines, and the first of them says what is wrong.
    refusals = [line for line in written if refused and line.startswith("oelm: ")]
    last_line = (refusals or written or [""])[-1]
    # A process whose disk is full can say nothing.
    short = shortage(folder) if folder.is_dir() else ""
    silent = f"its process ended with {exit_code}{f', and {short}' if short else ''}"
    return last_line.removeprefix("oelm: ") or silent, refused
