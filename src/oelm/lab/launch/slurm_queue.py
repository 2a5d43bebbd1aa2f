"""Ask Slurm how this user's jobs are: one call for all of them, and again only after a while."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

# Slurm's names for the states of a job that has ended. In every other state it waits, runs or is being requeued.
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
# States of jobs that Slurm itself ended, for no fault of theirs.
TAKEN = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED")
# The state of a job that Slurm knows nothing about any more.
FORGOTTEN = "FORGOTTEN"
# Seconds after which a command of Slurm's counts as not answered.
_PATIENCE = 120


@dataclass
class SlurmQueue:
    """The states of this user's jobs. `pause` is how many seconds an answer of squeue is used for."""

    pause: float = 5.0
    _states: dict[str, str] = field(default_factory=dict)
    _asked: float = float("-inf")  # time.monotonic()
    _answered: bool = False

    def state(self, job: str) -> str | None:
        """Return a job's state, such as "RUNNING" or FORGOTTEN, or None while Slurm does not answer."""
        old = time.monotonic() - self._asked < self.pause
        if not old:
            self._ask()
        if self._answered and job not in self._states:
            if old:  # it may have been submitted since
                self._ask()
            if self._answered and job not in self._states:
                self._states[job] = _accounted_state(job)
        return self._states[job] if self._answered else None

    def _ask(self) -> None:
        """Ask for all jobs, those that have ended included. squeue lists these for some minutes."""
        answer = _output(["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T"])
        self._answered = answer is not None
        self._states = dict(line.strip().split("|", 1) for line in (answer or "").splitlines() if "|" in line)
        self._asked = time.monotonic()


def has_ended(state: str | None) -> bool:
    """Return True for the state of a job that will not run again; None, without an answer, is no such state."""
    return state == FORGOTTEN or state in _ENDED


def gets_preempted(job: str) -> bool:
    """Return True when Slurm is about to take a running job's node and has left it some time to save.

    A job that ends in that time counts as completed: unlike one that is preempted at once, Slurm does not requeue it.
    """
    words = (_output(["scontrol", "--oneliner", "show", "job", job]) or "").split()
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    return fields.get("JobState") == "RUNNING" and fields.get("PreemptTime", "None") not in ("None", "N/A")


def _accounted_state(job: str) -> str:
    """Return the state of a job that squeue does not list, by Slurm's accounting, which many clusters do without."""
    fields = ["--noheader", "--allocations", "--parsable2", "--format=State"]
    words = (_output(["sacct", *fields, "--jobs", job]) or "").split()
    return words[0] if words else FORGOTTEN  # "CANCELLED by 1000" is more than one word


def _output(command: Sequence[str]) -> str | None:
    """Return what a command of Slurm's prints, or None if it cannot be run or does not succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
