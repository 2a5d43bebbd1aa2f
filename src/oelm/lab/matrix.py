"""Runs a whole matrix: skips what is done, goes on with what was cut, tries again what failed, never one run twice.

A run is taken by a lock in its folder that the process which trains it inherits: it is held until that process is gone,
even when the runner was killed. Two matrices in one folder therefore share the work, and a matrix that is started
again waits for the processes that its killed predecessor left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..base.files import remove_leftovers, write_json, writing
from ..base.locks import hold, holder
from ..errors import FileError, OelmError
from ..runs.folder import STOP
from ..training.signals import StopRequest, listening
from .launch.local import CONSOLE, LAUNCH, Job, Launcher, fresh_status, launch_of, status_stamp, was_stopped
from .plan import PLAIN, Planned
from .status import LAB, RunState, is_done, look, so_many

# The lock of a run that a runner has taken; the run's own lock is held by the process that trains it.
TAKEN = "runner.lock"
PLAN = "planned.json"
# The exit code of the command line when oelm itself refused or gave up.
REFUSED = 2
# Errors of a run that would be the same again.
_REFUSALS = ("ConfigError", "MethodError", "DataError", "ModelError", "FamilyError", "CheckpointError", "LabError")
_PAUSE = 0.2

Tell = Callable[[str], None]


@dataclass
class Entry:
    """One run of the matrix: waiting, running (ours), elsewhere (another process has it), or an end it came to."""

    planned: Planned
    state: str = "waiting"
    attempts: int = 0
    message: str = ""
    started: float = 0.0  # by time.monotonic()
    status_before: Any = None
    seconds: float = 0.0
    job: Job | None = field(default=None, repr=False)
    lock: TextIO | None = field(default=None, repr=False)

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running", "elsewhere")


class Matrix:
    """A set of runs, a launcher, and how often to try again what failed."""

    def __init__(self, runs: Sequence[Planned], launcher: Launcher, retries: int = 1, tell: Tell = print) -> None:
        self.entries = [Entry(run) for run in runs]
        self.launcher, self.retries, self._tell = launcher, retries, tell
        self._by_folder = {entry.planned.folder: entry for entry in self.entries}
        self._stop: StopRequest | None = None
        self._asked = self._told = False
        self._root = Path(runs[0].config.output)
        self._place = ""
        self._took: list[float] = []
        # By time.monotonic(): no run is started that would not be done by then, and those that are not are stopped.
        self.deadline: float | None = None

    def run(self, each: Callable[[Matrix], None] | None = None) -> dict[str, int]:
        """Work until every run has come to an end, or until asked to stop; how many came to which end.

        `each` is called after every look around: it may show something.
        """
        with listening() as self._stop, self._announced():
            self._look_for_work_done()
            while any(entry.open for entry in self.entries):
                self._step()
                if each is not None:
                    each(self)
                if self._leaving and not self._running():
                    break
                time.sleep(_PAUSE)
            if each is not None:
                each(self)
        return self.counts()

    def counts(self) -> dict[str, int]:
        states = [entry.state for entry in self.entries]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    @property
    def stopped(self) -> bool:
        """Whether a signal asked the matrix to stop, or a file that `oelm stop` left on another machine."""
        return bool(self._stop) or self._told

    @property
    def _leaving(self) -> bool:
        return self.stopped or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _running(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == "running"]

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Write down what is planned, for `oelm status` and other matrices, and hold it as long as we live."""
        with writing(self._root / LAB):
            (self._root / LAB).mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=self._root / LAB))
        with hold(place):
            for other in place.parent.iterdir():  # left by runners that were killed
                with suppress(FileNotFoundError):  # by one that ends just now, and takes it away itself
                    if time.time() - other.stat().st_mtime > 60 and holder(other) is None:
                        shutil.rmtree(other, ignore_errors=True)
            names = [entry.planned.name for entry in self.entries]
            write_json(place / "matrix.json", {"runs": names, "argv": sys.argv})
            self._place = place.name
            try:
                yield
            finally:
                shutil.rmtree(place, ignore_errors=True)

    def _look_for_work_done(self) -> None:
        """Tell at once what is done already; a folder with another run's result is refused before anything starts."""
        for entry in self.entries:
            self._is_done(entry, "done before")

    def _is_done(self, entry: Entry, message: str = "") -> bool:
        """Whether a run's folder holds a result, which ends it here: its own, or one that nobody may write over."""
        folder = entry.planned.folder
        try:
            if not is_done(folder, entry.planned.config.id):
                return False
        except FileError as error:
            self._end(entry, "failed", str(error))
            return True
        run = look(folder)
        if run.state == "diverged":
            self._end(entry, "diverged", "its last validation loss is not a number; lower the learning rate")
        else:
            self._end(entry, "finished", message or _figures(run))
        return True

    def _step(self) -> None:
        """One look around: what ended, what can start."""
        self._told = self._told or (self._root / LAB / self._place / STOP).exists()
        if self._leaving:
            self._ask_to_stop()
        for entry in self._running():
            assert entry.job is not None
            code = entry.job.poll()
            if code is not None:
                self._ended(entry, code)
        for entry in self.entries:
            if entry.state == "elsewhere":
                self._look_elsewhere(entry)
        for entry in self.entries:
            if self._leaving:  # perhaps since the last one was started, which may take an export
                return
            if entry.state == "waiting" and self._ready(entry):
                if not self.launcher.ready(self._orphans()):
                    break
                if self._too_late():
                    self._leave_the_rest("too late to be done in time")
                    break
                self._start(entry)

    def _too_late(self) -> bool:
        """Whether a run that starts now would miss the deadline, judging by the last ones."""
        longest = max(self._took[-4:], default=0.0)
        return self.deadline is not None and time.monotonic() + longest > self.deadline

    def _leave_the_rest(self, why: str) -> None:
        """Runs that have not started stay for another time."""
        waiting = [entry for entry in self.entries if entry.state == "waiting"]
        for entry in waiting:
            entry.state = "left"
        if waiting:
            self._tell(f"left     {so_many(len(waiting))}: {why}")

    def _ready(self, entry: Entry) -> bool:
        """Whether the run that this one starts from is done; where it came to another end, this one cannot start."""
        if entry.planned.after is None:
            return True
        first = self._by_folder[entry.planned.after.folder]
        if not first.open and first.state != "finished":
            self._end(entry, "blocked", f"it starts from {first.planned.name}, which {first.state}")
        return first.state == "finished"

    def _start(self, entry: Entry) -> None:
        """Start a run; one that cannot be started is told, and the others go on."""
        try:
            self._take_and_start(entry)
        except (OelmError, OSError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
            if entry.job is not None:
                self._tell(f"started  {entry.planned.name}, but {why}")
                return
            self._release(entry)
            self._end(entry, "failed", f"it could not be started: {why}")

    def _take_and_start(self, entry: Entry) -> None:
        """Take a run and start it, or go on with the job that an earlier runner left in a queue."""
        folder = entry.planned.folder
        folder.mkdir(parents=True, exist_ok=True)
        entry.lock = lock = self._take(entry)
        if lock is None:
            return
        entry.status_before = status_stamp(folder)
        job = self._attach(folder)
        if job is None:
            first = entry.planned.after
            refusal = export_plain(first.folder) if first is not None else ""
            if refusal:
                self._release(entry)
                self._end(entry, "failed", f"its start could not be exported: {refusal}")
                return
            write_json(folder / PLAN, entry.planned.config.to_dict())
            job = self.launcher.start(folder / PLAN, folder, lock, self._orphans())
            entry.attempts += 1
        entry.job, entry.state, entry.started = job, "running", time.monotonic()
        write_json(folder / LAUNCH, {**job.about, "matrix": self._place})
        again = f", attempt {entry.attempts}" if entry.attempts > 1 else ""
        self._tell(f"started  {entry.planned.name} ({_where(job.about)}{again})")

    def _take(self, entry: Entry) -> TextIO | None:
        """The run's lock, or none if another process has it or it was finished meanwhile."""
        folder = entry.planned.folder
        try:
            lock = hold(folder, TAKEN, patience=0.1)
        except FileError:
            who = holder(folder) or holder(folder, TAKEN) or "another process"
        else:
            if self._is_done(entry, "done by another matrix"):
                lock.close()
                return None
            by = holder(folder)  # a process that no runner started
            if by is None:
                return lock
            lock.close()
            who = by
        entry.state = "elsewhere"
        self._tell(f"waiting  {entry.planned.name}: it is run by {who} already")
        return None

    def _orphans(self) -> list[dict[str, Any]]:
        """How runs that go on here were started whose runner is gone: nobody else counts their slots."""
        orphans = []
        for entry in self.entries:
            if entry.state == "elsewhere":
                with suppress(FileError):  # damaged: it says of no slot
                    launch = launch_of(entry.planned.folder)
                    if holder(self._root / LAB / str(launch.get("matrix"))) is None:
                        orphans.append(launch)
        return orphans

    def _attach(self, folder: Path) -> Job | None:
        about = launch_of(folder)
        return self.launcher.attach(about) if about else None

    def _look_elsewhere(self, entry: Entry) -> None:
        """A run that another process has: done, gone, or still at it."""
        folder = entry.planned.folder
        if self._is_done(entry, "by another process"):
            return
        if holder(folder, TAKEN) is None and holder(folder) is None:
            state = look(folder).state
            if state == "stopped":
                self._end(entry, "stopped", "it was asked to stop; the same command resumes it")
            else:
                entry.state = "waiting"
                self._tell(f"taking over {entry.planned.name}: its process is gone")
        elif self._leaving:
            entry.state = "left"

    def _ended(self, entry: Entry, code: int) -> None:
        """A job of ours is over: what its record says is what it came to."""
        folder, entry.seconds = entry.planned.folder, time.monotonic() - entry.started
        self._took.append(entry.seconds)
        about = entry.job.about if entry.job is not None else {}
        self._release(entry)
        if self._is_done(entry):  # its result is written last: whatever came after it changes no number
            return
        # torchrun has one code for every end but a good one; a run that has no status of this start had not begun.
        unbegun = about.get("processes", 1) > 1 and not fresh_status(folder, entry.status_before)
        if was_stopped(folder, code, entry.status_before):
            self._end(entry, "stopped", "saved; the same command resumes it")
        elif self._asked and (code == -signal.SIGTERM or unbegun):
            self._end(entry, "left", "it was stopped before its first step")
        elif about.get("job") and code == -signal.SIGTERM:
            self._end(entry, "stopped", "its job was cancelled; the same command submits it again")
        elif holder(folder) is not None:
            entry.state = "elsewhere"  # it lost the race for the folder to a process that no runner started
        else:
            self._failed(entry, code)

    def _failed(self, entry: Entry, code: int) -> None:
        folder = entry.planned.folder
        reason, refused = why(folder, code, entry.status_before)
        if not folder.is_dir():
            reason, refused = "its folder was removed while it ran", False
        if entry.attempts <= self.retries and not refused and not self._leaving:
            entry.state = "waiting"
            self._tell(f"failed   {entry.planned.name}: {reason}; it is tried again")
            self.entries.remove(entry)
            self.entries.append(entry)
        else:
            tries = "" if entry.attempts == 1 else f", after {entry.attempts} attempts"
            see = f"; see {folder / CONSOLE}" if (folder / CONSOLE).is_file() else ""
            self._end(entry, "failed", f"{reason}{tries}{see}")

    def _release(self, entry: Entry) -> None:
        if entry.lock is not None:
            entry.lock.close()
        entry.lock = entry.job = None

    def _end(self, entry: Entry, state: str, message: str) -> None:
        entry.state, entry.message = state, message
        counts = self.counts()
        resumable = {kind: counts[kind] for kind in ("stopped", "left") if kind in counts}
        done = sum(not other.open for other in self.entries) - sum(resumable.values())
        told = ", ".join([f"{done}/{len(self.entries)}", *(f"{count} {kind}" for kind, count in resumable.items())])
        took = f" in {entry.seconds:.0f} s" if entry.seconds else ""
        self._tell(f"{state:<8} {entry.planned.name}{took}: {message} [{told}]")

    def _ask_to_stop(self) -> None:
        """Ask our runs to save and stop, once."""
        if self._asked:
            return
        self._asked = True
        running = self._running()
        cause = "asked to stop by a file" if self._told else "out of time"
        cause = f"asked to stop by {self._stop.signal}" if self._stop else cause
        self._tell(f"{cause}: saving and stopping {so_many(len(running))}")
        for entry in running:
            assert entry.job is not None
            entry.job.stop()
        self._leave_the_rest("the same command resumes from here")


def export_plain(run: Path) -> str:
    """Write a run's best model as a plain one beside it, once; why that was not possible, or nothing."""
    with hold(run, TAKEN, patience=600):
        if any((run / PLAIN).glob("*.safetensors")):
            return ""
        shutil.rmtree(run / PLAIN, ignore_errors=True)  # left by an export that was cut
        remove_leftovers(run)
        command = [sys.executable, "-m", "oelm", "export", str(run), str(run / PLAIN)]
        # In a session of its own: what the terminal sends reaches the runner alone.
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def why(folder: Path, code: int, before: Any) -> tuple[str, bool]:
    """Why a run failed, and whether it would again: from its record, else from what it printed, else from its end."""
    if code < 0:
        return f"its process was killed by signal {-code}", False
    recorded = fresh_status(folder, before)
    if recorded.get("state") == "failed":
        message = str(recorded.get("message"))
        return message, message.startswith(_REFUSALS)
    console = folder / CONSOLE
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines() if console.is_file() else []
    said = next((line for line in reversed(lines) if line.strip()), "")
    return said.removeprefix("oelm: ") or f"its process ended with {code}", code == REFUSED


def _where(about: dict[str, Any]) -> str:
    if about.get("job"):
        return f"{about['launcher']} job {about['job']}"
    if about.get("gpus"):
        return f"GPU {','.join(about['gpus'])}"
    return f"CPU, {about.get('threads')} thread{'s' if about.get('threads') != 1 else ''}"


def _figures(run: RunState) -> str:
    if run.accuracy is not None:
        return f"accuracy {run.accuracy:.4f}"
    if run.perplexity is not None:
        return f"perplexity {run.perplexity:.3f}"
    return "done"
