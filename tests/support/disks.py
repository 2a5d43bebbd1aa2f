"""Small file systems that fill up or turn read-only, and system errors at a file operation, which need no mount."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.training import mounted


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[Callable[[str], None]]:
    """Mount a small file system, and yield what mounts it anew with other options, as someone who makes room does."""
    with mounted(place, options):

        def remount(options: str) -> None:
            subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)

        yield remount


class NoSpaceCheck:
    """Disables the check for free space, so that the disk fills up while it is written to. Does `then` after that."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.then = then

    def __call__(self) -> None:
        from oelm.base import files
        from oelm.training import best, build, checkpoint

        for module in (files, checkpoint, best, build):
            module.require_space = lambda folder, needed: None
        if self.then is not None:
            self.then()


class ForkedRuns:
    """Makes `oelm matrix` fork its runs, which need not import torch then, without their check for free space."""

    def __call__(self) -> None:
        from oelm.lab.launch import local
        from oelm.lab.launch.forked import ForkedLauncher

        local.local_launcher = lambda gpus, jobs, processes: ForkedLauncher(2, train_without_check)


def train_without_check(config: str) -> None:
    """Do what the process of a run does, on a disk that may fill up."""
    from oelm.cli.train import train_and_exit

    NoSpaceCheck()()
    train_and_exit(config)


class BrokenDisk:
    """Refuses every change below a folder from the count-th file operation on, with a system error."""

    def __init__(self, folder: Path, count: int, code: int = errno.ENOSPC) -> None:
        self.folder, self.remaining, self.code = str(folder), count, code

    def __call__(self) -> None:
        for name in ("replace", "rename", "mkdir", "fsync"):
            setattr(os, name, self._guarded(getattr(os, name)))
        if self.code == errno.EROFS:  # a full disk lets files be removed
            for name in ("unlink", "remove", "rmdir"):
                setattr(os, name, self._guarded(getattr(os, name)))
        opened = builtins.open

        def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if set(mode) & set("wax+"):
                self._count(file)
            return opened(file, mode, *arguments, **options)

        builtins.open = io.open = opening  # type: ignore[assignment]

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(path: Any, *arguments: Any, **options: Any) -> Any:
            self._count(path)
            return function(path, *arguments, **options)

        return guarded

    def _count(self, path: Any) -> None:
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(path)
        if not name.startswith(self.folder):
            return
        self.remaining -= 1
        if self.remaining <= 0:
            raise OSError(self.code, os.strerror(self.code), name)
