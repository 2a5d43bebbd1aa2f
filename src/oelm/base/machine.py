"""Count the cores, the threads and the memory that a process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# The limit of a control group, in version 2 and version 1.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """Return the threads of each of several processes: an equal share of the cores, at most OMP_NUM_THREADS."""
    share = max(1, cores() // processes)
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has one number per nesting level
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share


def memory() -> int | None:
    """Return the machine's memory in bytes, or a smaller limit of the process; None where untold."""
    sizes = []
    with suppress(AttributeError, ValueError, OSError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # "max", where there is no limit
            sizes.append(int(Path(limit).read_text()))
    return min(sizes, default=None)
