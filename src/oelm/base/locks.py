"""Locks on folders. The system releases them when the process that holds one ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ..errors import FileError

# What a process writes first into the lock that it holds.
_HOLDER = re.compile(r"process (\d+) on (.+)")
# Seconds for which a taken lock is tried again: `holder` below takes a lock for an instant, just to test it.
_PATIENCE = 1.0


def hold(folder: Path, name: str = "lock", patience: float = _PATIENCE) -> TextIO:
    """Take a folder's lock and return its open file; raise a FileError if a live process has it.

    The lock is held until the file is closed, or until this process and all that inherited the file have ended.
    """
    deadline = time.monotonic() + patience
    lock = open(folder / name, "a+", encoding="utf-8")
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, folder / name):
                break
            # The process that held the lock removed the folder, and another may have made it again with a new lock.
            lock.close()
            lock = open(folder / name, "a+", encoding="utf-8")
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            lock.seek(0)
            process = lock.readline().strip() or "another process"
            lock.close()
            raise FileError(f"{folder}: in use by {process}") from None
        except OSError:
            lock.close()
            raise
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n{_identity(os.getpid())}\n")
        lock.flush()
    except OSError as error:  # such as a full disk: the error does not name the file
        with suppress(OSError):
            lock.close()
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    return lock


def _is_at(lock: TextIO, path: Path) -> bool:
    """Return True when an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def holder(folder: Path, name: str = "lock") -> str | None:
    """Return the live process that holds a folder's lock, as "process N on HOST", or None."""
    try:
        with open(folder / name, encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.readline().strip() or "another process"
    except OSError:  # there is no lock file, or the file system has no locks
        return None
    return None


def holding_pid(folder: Path, name: str = "lock") -> int | None:
    """Return the id of the live process that holds a folder's lock, or None where it is not a process seen from here.

    Another machine or container may have the same host name, and another process may have the id by now: so the boot,
    the namespace of process ids and the start of the process must be those that its holder wrote.
    """
    process = holder(folder, name)
    match = _HOLDER.fullmatch(process or "")
    if match is None or match[2] != socket.gethostname():
        return None
    pid = int(match[1])
    with suppress(OSError):
        written = (folder / name).read_text(encoding="utf-8").splitlines()[1:]
        return pid if written == [_identity(pid)] else None
    return None


def _identity(pid: int) -> str:
    """Return what tells a process from any other with its id: boot, namespace and start; no more where untold."""
    parts = []
    with suppress(OSError, IndexError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(f"/proc/{pid}/ns/pid"))
        # The name of the program, in brackets, may hold spaces and brackets itself. The start is field 22.
        parts.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return " ".join(parts)
