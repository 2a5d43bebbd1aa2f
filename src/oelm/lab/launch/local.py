"""Start runs as processes on this machine: one for each free GPU, several on the CPU, or several processes per run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from ...base.machine import threads_each
from ...errors import LabError
from .gpus import choose_gpus, uuids, why_gone
from .interface import CONSOLE, GpuGoneError, LaunchInfo, read_launch


@dataclass(frozen=True)
class Slot:
    """Room for one run: its GPUs (none on the CPU) and its CPU threads."""

    gpus: tuple[str, ...]
    threads: int


@dataclass
class LocalJob:
    """A run's process on this machine. It has its own session, so that Ctrl-C reaches only the launcher."""

    process: subprocess.Popen[bytes]
    info: LaunchInfo

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.terminate()


@dataclass
class LocalLauncher:
    """Starts runs as processes of this machine, one in each slot.

    `uuids` are those of the GPUs that nvidia-smi listed at the start. A GPU that it no longer lists is left out.
    """

    all_slots: list[Slot]
    processes: int = 1
    uuids: dict[str, str] = field(default_factory=dict)
    _running: list[LocalJob] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return len(self.all_slots)

    def ready(self, orphans: Sequence[LaunchInfo]) -> bool:
        return self._free_slot(orphans) is not None

    def start(self, config: Path, folder: Path, lock: TextIO, orphans: Sequence[LaunchInfo]) -> LocalJob:
        free = self._free_slot(orphans)
        assert free is not None, "call ready() first"
        gone = self.lost(free.gpus)
        if gone:
            raise GpuGoneError("; ".join(gone))
        slot = Slot(free.gpus, _threads_before(folder) or free.threads)
        with open(folder / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                command(config, self.processes),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment(slot, self.uuids),
                start_new_session=True,
                pass_fds=(lock.fileno(),),  # the run stays locked while its process lives, even if this one dies
            )
        location = {"host": socket.gethostname(), "pid": process.pid, **asdict(slot)}
        self._running.append(LocalJob(process, LaunchInfo(launcher="local", processes=self.processes, **location)))
        return self._running[-1]

    def attach(self, info: LaunchInfo) -> None:
        """Return None: a process whose launcher died cannot be waited for; its lock shows when it is done."""
        return

    def lost(self, gpus: Sequence[str]) -> list[str]:
        reasons = {gpu: why_gone(self.uuids[gpu]) for gpu in gpus if gpu in self.uuids}
        gone = {gpu: reason for gpu, reason in reasons.items() if reason}
        self.all_slots = [slot for slot in self.all_slots if not gone.keys() & set(slot.gpus)]
        return [f"GPU {gpu} is left out: {reason}" for gpu, reason in gone.items()]

    def _free_slot(self, orphans: Sequence[LaunchInfo]) -> Slot | None:
        """Return a slot that neither a job of this launcher nor an orphan on this machine occupies."""
        self._running = [job for job in self._running if job.poll() is None]
        our_pids = {job.info.pid for job in self._running}
        local_orphans = [info for info in orphans if info.host == socket.gethostname() and info.pid not in our_pids]
        used = Counter(info.gpus for info in [*(job.info for job in self._running), *local_orphans])
        # The same slot may be listed several times: as often as runs may share its GPUs.
        for slot, capacity in Counter(self.all_slots).items():
            overlaps = any(set(slot.gpus) & set(gpus) for gpus in used if gpus != slot.gpus)
            if not overlaps and used[slot.gpus] < capacity:
                return slot
        return None


def command(config: Path, processes: int = 1) -> list[str]:
    """Return the command that trains a run: `oelm train`, under torchrun if it takes several processes.

    With --standalone torchrun finds a free port itself, so that runs side by side do not collide.
    """
    if processes == 1:
        return [sys.executable, "-m", "oelm", "train", str(config)]
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    launch = ["--standalone", "--nproc-per-node", str(processes), "--signals-to-handle", signals]
    return [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "oelm", "train", str(config)]


def environment(slot: Slot, uuids: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a run's process: its GPUs, possibly none, and its threads."""
    gpus = ",".join(uuids.get(gpu, gpu) for gpu in slot.gpus)
    resources = {"OMP_NUM_THREADS": str(slot.threads), "CUDA_VISIBLE_DEVICES": gpus}
    return {**os.environ, **resources, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def local_launcher(gpus: str | None = None, jobs: int | None = None, processes: int = 1) -> LocalLauncher:
    """Return a launcher for this machine.

    gpus        which GPUs to use, as in "0,1" or "0-3"; None for all that are free, "" for none: the CPU
    jobs        how many runs at once: on the CPU (default 1), or on every set of GPUs (default 1)
    processes   how many processes, and so GPUs, each run takes
    """
    if processes < 1 or (jobs is not None and jobs < 1):
        at_once = 1 if jobs is None else jobs
        raise LabError(f"{at_once} runs at once with {processes} processes each: both numbers must be at least 1")
    chosen = choose_gpus(gpus)
    if not chosen:
        jobs = jobs or 1
        return LocalLauncher([Slot((), threads_each(jobs * processes))] * jobs, processes)
    if len(chosen) < processes:
        raise LabError(f"a run takes {processes} GPUs, but only {len(chosen)} can be used: {', '.join(chosen)}")
    sets = [tuple(chosen[first : first + processes]) for first in range(0, len(chosen) - processes + 1, processes)]
    threads = threads_each(len(sets) * (jobs or 1) * processes)
    return LocalLauncher([Slot(names, threads) for names in sets] * (jobs or 1), processes, uuids(chosen))


def _threads_before(folder: Path) -> int | None:
    """Return the number of threads that an interrupted run had: only with as many can it resume exactly."""
    has_checkpoint = any((folder / "checkpoints").glob("step-*"))
    info = read_launch(folder) if has_checkpoint else None
    return None if info is None else info.threads
