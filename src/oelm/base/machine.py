"""What this machine lets a process use."""

from __future__ import annotations

import os


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """The threads of each of so many processes: the cores divided among them, and no more than OMP_NUM_THREADS says."""
    share = max(1, cores() // processes)
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    return min(share, int(asked)) if asked.isdecimal() and int(asked) > 0 else share
