"""Runs as processes forked from one that has imported everything: they start at once. For many short runs on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from ...base.machine import threads_each
from .local import CONSOLE

# What the process that the runs are forked from imports, once.
_PRELOADED = ["oelm.cli", "oelm.evaluation.trained", "oelm.training.engine", "oelm.training.tasks.open", "oelm.data"]


@dataclass
class WarmJob:
    """A run's process."""

    process: Any
    about: dict[str, Any]

    def poll(self) -> int | None:
        code = self.process.exitcode
        return None if code is None else int(code)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)


class WarmLauncher:
    """Starts runs in a fraction of a second, so many at a time. On the CPU alone: a GPU's context cannot be forked."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._threads = threads_each(slots)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._running: list[WarmJob] = []

    def ready(self, busy: Sequence[dict[str, Any]]) -> bool:
        self._running = [job for job in self._running if job.poll() is None]
        here = [other for other in busy if other.get("host") == socket.gethostname()]
        return len(self._running) + len(here) < self.slots

    def start(self, config: Path, folder: Path, lock: TextIO, busy: Sequence[dict[str, Any]]) -> WarmJob:
        # What the server forks inherits no file of ours: should we be killed, the run's own lock says that it goes on.
        process = self._context.Process(target=_train, args=(str(config), str(folder / CONSOLE), self._threads))
        with _without_main():
            process.start()
        about = {"launcher": "warm", "host": socket.gethostname(), "pid": process.pid, "threads": self._threads}
        self._running.append(WarmJob(process, about))
        return self._running[-1]

    def attach(self, about: dict[str, Any]) -> None:
        """A process whose runner has died is nobody's child: its lock says when it is done."""
        return


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the program's main module: a new process would import it, and a script without a guard would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _train(config: str, console: str, threads: int) -> None:
    """`oelm train CONFIG` in a process of its own, out of the terminal's reach: Ctrl-C is for the runner alone."""
    os.setsid()
    handle = os.open(console, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import torch

    from ...cli.app import main

    torch.set_num_threads(threads)
    sys.argv = ["oelm", "train", config, "--quiet"]
    main()
