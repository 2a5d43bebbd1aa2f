"""Starting runs: as processes on this machine, one for each free GPU or several on the CPU, or through torchrun.

A launcher has slots; a job is a run in one of them. Slurm's launcher is in `slurm.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from ...base.files import read_record
from ...base.machine import threads_each
from ...errors import FileError, LabError
from ...training.signals import EXIT_REQUEUE

# In a run's folder: how it was started last, and all that its process printed.
LAUNCH = "launch.json"
CONSOLE = "console.log"
# A GPU with more of its memory taken than this is not free.
_TAKEN = 0.1
# One of these exists where a GPU has a driver: CUDA's, Windows' own below WSL, and ROCm's.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class Job(Protocol):
    """A run that was started. `about` goes into its folder, so that another runner can find it."""

    about: dict[str, Any]

    def poll(self) -> int | None:
        """Its exit code, or none while it goes on."""

    def stop(self) -> None:
        """Ask it to save and stop; asked again, it ends at once."""


class Launcher(Protocol):
    """Starts runs as long as it has slots free."""

    @property
    def slots(self) -> int: ...

    def ready(self, busy: Sequence[dict[str, Any]]) -> bool:
        """Whether a slot is free. `busy` says how runs were started that go on here unattended."""

    def start(self, config: Path, folder: Path, lock: TextIO, busy: Sequence[dict[str, Any]]) -> Job:
        """Start a run in a free slot. Its process inherits the lock, where it runs on this machine."""

    def attach(self, about: dict[str, Any]) -> Job | None:
        """A job that an earlier runner submitted and that is still queued or going on; none where there is none."""


@dataclass(frozen=True)
class Slot:
    """Room for one run: its GPUs, or so many threads of the CPU."""

    gpus: tuple[str, ...]
    threads: int


@dataclass
class LocalJob:
    """A run's process on this machine, in a session of its own: what the terminal sends reaches the runner alone."""

    process: subprocess.Popen[bytes]
    slot: Slot
    about: dict[str, Any]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)


@dataclass
class LocalLauncher:
    """Runs as processes of this machine, each with a slot of its own."""

    room: list[Slot]
    processes: int = 1
    _running: list[LocalJob] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return len(self.room)

    def ready(self, busy: Sequence[dict[str, Any]]) -> bool:
        return self._free(busy) is not None

    def start(self, config: Path, folder: Path, lock: TextIO, busy: Sequence[dict[str, Any]]) -> LocalJob:
        free = self._free(busy)
        assert free is not None, "ask whether it is ready first"
        slot = Slot(free.gpus, _threads_before(folder) or free.threads)
        with open(folder / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                command(config, self.processes),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment(slot),
                start_new_session=True,
                pass_fds=(lock.fileno(),),  # the run is taken for as long as its process lives, whatever becomes of us
            )
        about = {"launcher": "local", "host": socket.gethostname(), "pid": process.pid, "gpus": list(slot.gpus)}
        job = LocalJob(process, slot, {**about, "threads": slot.threads, "processes": self.processes})
        self._running.append(job)
        return job

    def attach(self, about: dict[str, Any]) -> None:
        """A process whose runner has died is nobody's child: its lock says when it is done."""
        return

    def _free(self, busy: Sequence[dict[str, Any]]) -> Slot | None:
        self._running = [job for job in self._running if job.poll() is None]
        mine = {job.about["pid"] for job in self._running}
        here = [other for other in busy if other.get("host") == socket.gethostname() and other.get("pid") not in mine]
        used = Counter([job.slot.gpus for job in self._running] + [tuple(other.get("gpus", ())) for other in here])
        for slot, runs in Counter(self.room).items():
            overlaps = any(set(slot.gpus) & set(gpus) for gpus in used if gpus != slot.gpus)
            if not overlaps and used[slot.gpus] < runs:
                return slot
        return None


def command(config: Path, processes: int = 1) -> list[str]:
    """The command that trains a run: `oelm train`, below torchrun where it takes several processes.

    torchrun finds a free port by itself, so that runs side by side do not meet.
    """
    if processes == 1:
        return [sys.executable, "-m", "oelm", "train", str(config)]
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    launch = ["--standalone", "--nproc-per-node", str(processes), "--signals-to-handle", signals]
    return [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "oelm", "train", str(config)]


def environment(slot: Slot) -> dict[str, str]:
    """The environment of a run: its GPUs, which may be none, and its threads."""
    own = {"OMP_NUM_THREADS": str(slot.threads), "CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}
    return {**os.environ, **own, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def local_launcher(gpus: str | None = None, jobs: int | None = None, processes: int = 1) -> LocalLauncher:
    """A launcher for this machine.

    gpus        which GPUs to use, as in "0,1"; none for all that are free, "" for none: the CPU
    jobs        how many runs at once: on the CPU (default 1), or on every set of GPUs (default 1)
    processes   how many processes, and so GPUs, each run takes
    """
    if processes < 1 or (jobs is not None and jobs < 1):
        raise LabError(f"{jobs} runs at once of {processes} processes each: both start at 1")
    visible = _visible_gpus()
    if not visible or gpus == "":
        if gpus:
            raise LabError(f"--gpus {gpus}: torch sees no GPU on this machine; leave the option out to use the CPU")
        jobs = jobs or 1
        return LocalLauncher([Slot((), threads_each(jobs * processes))] * jobs, processes)
    chosen = _free_gpus(visible) if gpus is None else _named_gpus(gpus, visible)
    if len(chosen) < processes:
        raise LabError(f"a run takes {processes} GPUs and {len(chosen)} can be used: {', '.join(chosen) or 'none'}")
    sets = [tuple(chosen[at : at + processes]) for at in range(0, len(chosen) - processes + 1, processes)]
    threads = threads_each(len(sets) * (jobs or 1) * processes)
    return LocalLauncher([Slot(names, threads) for names in sets] * (jobs or 1), processes)


def was_stopped(folder: Path, code: int, before: Any) -> bool:
    """Whether a run that is not finished stopped when asked.

    The record is asked too: torchrun turns every exit code but 0 into 1, and a job of submitit's ends with 0.
    """
    return code == EXIT_REQUEUE or fresh_status(folder, before).get("state") == "stopped"


def status_stamp(folder: Path) -> Any:
    """When a run's status was written, by the clock of whoever wrote it; none where there is no status."""
    file = folder / "status.json"
    with suppress(FileError):  # a damaged status is of no attempt
        return read_record(file).get("updated") if file.is_file() else None
    return None


def fresh_status(folder: Path, before: Any) -> dict[str, Any]:
    """A run's status if it has another stamp than `before` its start; the same one tells of another attempt.

    No two clocks are compared: a run may be on another machine, and any clock may be set back.
    """
    stamp = status_stamp(folder)
    return {} if stamp is None or stamp == before else read_record(folder / "status.json")


def launch_of(folder: Path) -> dict[str, Any]:
    """How a run was started last; empty where no runner has started it."""
    file = folder / LAUNCH
    return read_record(file) if file.is_file() else {}


def _threads_before(folder: Path) -> int | None:
    """The threads that a run which goes on had: with others it could not go on exactly."""
    begun = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").glob("step-*"))
    threads = launch_of(folder).get("threads") if begun else None
    return threads if isinstance(threads, int) else None


def _visible_gpus() -> list[str]:
    """The GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES gives them."""
    if not any(Path(device).exists() for device in _DRIVERS):
        return []  # without importing torch, which takes seconds
    import torch

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if listed is None else _split(listed)
    return names[:count]


def _named_gpus(text: str, visible: list[str]) -> list[str]:
    names = _split(text)
    absent = [name for name in names if name not in visible]
    if absent:
        raise LabError(f"--gpus {text}: there is no GPU {', '.join(absent)} here; there are {', '.join(visible)}")
    if len(set(names)) < len(names):
        raise LabError(f"--gpus {text}: names a GPU twice; for several runs on one use --jobs")
    return names


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _free_gpus(visible: list[str]) -> list[str]:
    """Those of the GPUs that nobody computes on, as far as nvidia-smi can tell."""
    taken = _taken_gpus()
    free = [name for name in visible if name not in taken]
    if not free:
        raise LabError(f"all GPUs here ({', '.join(visible)}) are in use; name some with --gpus to share them")
    return free


def _taken_gpus() -> set[str]:
    # Not through torch: asking it would make a context on every GPU, which takes memory for as long as we live.
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in found.splitlines()]
        return {name for *names, used, total in rows for name in names if float(used) > _TAKEN * float(total)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()
