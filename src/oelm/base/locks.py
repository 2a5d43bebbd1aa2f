"""Locks on folders, which the system releases whatever happens to the process that has one."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ..errors import FileError

# Whoever looks whether a lock is held holds it for an instant: a lock that is taken is tried again for so many seconds.
_PATIENCE = 1.0


def hold(folder: Path, name: str = "lock", patience: float = _PATIENCE) -> TextIO:
    """A folder's lock, which this process has until the file is closed, or it and all who inherited the file have died.

    Raises if a live process has it.
    """
    until = time.monotonic() + patience
    lock = open(folder / name, "a+", encoding="utf-8")
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(lock, folder / name):
                break
            # Whoever had it removed the folder, and another may have made it anew, with a lock of its own.
            lock.close()
            lock = open(folder / name, "a+", encoding="utf-8")
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            lock.seek(0)
            who = lock.read().strip() or "another process"
            lock.close()
            raise FileError(f"{folder}: in use by {who}") from None
        except OSError:
            lock.close()
            raise
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    except OSError as error:  # a full disk, which does not name what it could not hold
        with suppress(OSError):
            lock.close()
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    return lock


def _is_there(lock: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def holder(folder: Path, name: str = "lock") -> str | None:
    """Which live process has a folder's lock, in its own words; none if no process has."""
    try:
        with open(folder / name, encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another process"
    except OSError:  # there is no lock, or no locks on this file system
        return None
    return None
