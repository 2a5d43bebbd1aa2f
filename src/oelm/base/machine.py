"""Count the cores and threads that a process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """Return the threads of each of several processes: an equal share of the cores, at most OMP_NUM_THREADS."""
    share = max(1, cores() // processes)
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has one number per nesting level
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share
