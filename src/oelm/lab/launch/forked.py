"""Start runs by forking a process that has already imported torch, which takes no time. For short runs on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TextIO

from ...base.machine import threads_each
from .interface import CONSOLE, LaunchInfo

# Modules that the process that is forked imports once, beside the module of the training function.
_PRELOADED = ["oelm.evaluation.use", "oelm.training.engine", "oelm.training.tasks.open", "oelm.data"]


@dataclass
class ForkedJob:
    """A run in a forked process."""

    process: BaseProcess
    info: LaunchInfo

    def poll(self) -> int | None:
        return self.process.exitcode

    def stop(self) -> None:
        self.process.terminate()


class ForkedLauncher:
    """Starts up to `slots` runs at a time, each within a fraction of a second.

    `train` trains the run of a config file and ends the process with an exit code. It is sent to the new process by
    its name, so it must be a function at the top level of a module. Only for the CPU: a CUDA context cannot be forked.
    """

    def __init__(self, slots: int, train: Callable[[str], None]) -> None:
        self.slots = slots
        self._train = train
        self._threads = threads_each(slots)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([train.__module__, *_PRELOADED])
        self._running: list[ForkedJob] = []

    def ready(self, orphans: Sequence[LaunchInfo]) -> bool:
        self._running = [job for job in self._running if job.poll() is None]
        local_orphans = [info for info in orphans if info.host == socket.gethostname()]
        return len(self._running) + len(local_orphans) < self.slots

    def start(self, config: Path, folder: Path, lock: TextIO, orphans: Sequence[LaunchInfo]) -> ForkedJob:
        # A process forked by the server does not inherit `lock`. If this process is killed, the run's own lock, which
        # the run takes itself, still shows that it is in progress.
        with open(folder / CONSOLE, "ab"):  # a full disk is noticed here, not in the new process
            pass
        arguments = (self._train, str(config), str(folder / CONSOLE), self._threads)
        process = self._context.Process(target=_train_detached, args=arguments)
        with _without_main():
            process.start()
        info = LaunchInfo(launcher="forked", host=socket.gethostname(), pid=process.pid, threads=self._threads)
        self._running.append(ForkedJob(process, info))
        return self._running[-1]

    def lost(self, gpus: Sequence[str]) -> list[str]:
        """Return nothing: a forked process uses none."""
        return []

    def attach(self, info: LaunchInfo) -> None:
        """Return None: a process whose launcher died cannot be waited for; its lock shows when it is done."""
        return


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which a new process would import: a script without a `__main__` guard would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _train_detached(train: Callable[[str], None], config: str, console: str, threads: int) -> None:
    """Train a run with its output in a file and in a session of its own, so that Ctrl-C reaches only the launcher."""
    os.setsid()
    handle = os.open(console, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import torch

    torch.set_num_threads(threads)
    train(config)
