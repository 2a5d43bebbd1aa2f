"""What every launcher offers to the matrix, and what it leaves in a run's folder.

A launcher has slots; a job is a run that was started in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

from ...base.files import read_record, write_json
from ...base.strict import Strict
from ...errors import FileError

# Files in a run's folder: how it was last started, and everything that its process printed.
LAUNCH = "launch.json"
CONSOLE = "console.log"


class LaunchInfo(Strict, refusal=FileError):
    """How a run was started, so that another matrix or `oelm stop` can find it.

    host, pid   the process, where it was started on a machine directly
    gpus        the GPUs that it was given; none on the CPU
    threads     CPU threads per process
    processes   how many processes train the run together
    job         the id of its job, where a scheduler started it, and the folder of that job's files
    run         the run's folder, for jobs
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
        """Start a run in a free slot. Its process inherits the lock if it runs on this machine."""

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
    except (FileError, TypeError) as error:
        raise FileError(f"{file}: {error}") from None


def write_launch(folder: Path, info: LaunchInfo) -> None:
    """Write how a run was started into its folder."""
    write_json(folder / LAUNCH, info.model_dump(mode="json"))
