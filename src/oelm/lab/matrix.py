"""Run a whole matrix: skip what is done, resume what was interrupted, retry what failed, and never run anything twice.

While a run is in progress, a lock in its folder is held by the matrix and by the process that trains it, which inherits
the lock: it stays locked until that process ends, even if the matrix is killed. So two matrices in one folder share the
work, and a matrix that is started again waits for the processes that its killed predecessor left behind.
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
from typing import TextIO

from ..base.files import remove_leftovers, write_json, writing
from ..base.locks import hold, holder
from ..errors import FileError, LaterError, OelmError
from ..runs.folder import STOP
from ..training.signals import StopRequest, listening
from .launch.interface import (
    CONSOLE,
    TAKEN_AWAY,
    GpuGoneError,
    Job,
    Launcher,
    LaunchInfo,
    failure_reason,
    new_status,
    read_launch,
    status_time,
    was_stopped,
    write_launch,
)
from .plan import PLAIN, PlannedRun
from .status import LAB, RunState, is_done, read_state

# The lock of a run that a matrix has taken. The run's own lock is held by the process that trains it.
RUNNER_LOCK = "runner.lock"
# The config that the process of a run is started with.
PLANNED_CONFIG = "planned.json"
_PAUSE_SECONDS = 0.2


@dataclass
class MatrixEntry:
    """One run of the matrix.

    Its state is waiting, running (started here), elsewhere (another process has it), or how it ended: finished,
    diverged, failed, stopped, blocked (the run that it starts from did not finish) or left (not started).
    """

    run: PlannedRun
    state: str = "waiting"
    attempts: int = 0
    started: float = 0.0  # time.monotonic()
    old_status_time: float | None = None
    seconds: float = 0.0
    job: Job | None = field(default=None, repr=False)
    lock: TextIO | None = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running", "elsewhere")


@dataclass(frozen=True)
class MatrixEvent:
    """Something that happened in a matrix, to be shown to the user.

    kind        started, waiting (another process has the run, or it cannot be started now), takeover (that process
                died), retry, lost (a GPU has disappeared), leaving (runs stay unstarted), stopping (running ones are
                asked to save and stop), or the state that a run ended in
    message     why, or the run's main figure
    states      how many runs of the matrix are in each state now
    entry       the run that the event is about, or None if it is about several
    count       how many runs the event is about
    """

    kind: str
    message: str
    states: dict[str, int]
    entry: MatrixEntry | None = None
    count: int = 1


class Matrix:
    """A set of runs and the launcher that starts them.

    retries     how often a failed run is started again
    notify      called with every event
    deadline    a time.monotonic() by which all runs must have ended: no run is started that would take longer
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        launcher: Launcher,
        retries: int = 1,
        notify: Callable[[MatrixEvent], object] = lambda event: None,
        deadline: float | None = None,
    ) -> None:
        self.entries = [MatrixEntry(run) for run in runs]
        self._entry_by_folder = {entry.run.folder: entry for entry in self.entries}
        self._launcher, self._retries, self._notify, self._deadline = launcher, retries, notify, deadline
        self._root = Path(runs[0].config.output)
        self._folder_name = ""  # this matrix's folder below LAB
        self._signal: StopRequest | None = None
        self._stop_file_seen = self._runs_asked_to_stop = False
        self._durations: list[float] = []
        self._last_refusal = ""
        self._lost: set[str] = set()  # GPUs that have disappeared, as they were reported

    def run(self, watch: Callable[[Matrix], object] = lambda matrix: None) -> dict[str, int]:
        """Work until every run has ended, or until asked to stop; return how many runs ended in each state.

        `watch` is called after every round, for a live view.
        """
        with listening() as self._signal, self._announced():
            for entry in self.entries:
                self._end_if_done(entry, "done before")
            while not all(entry.ended for entry in self.entries):
                self._step()
                watch(self)
                if self._leaving and not self._running():
                    break
                time.sleep(_PAUSE_SECONDS)
            watch(self)
        return self.counts()

    def counts(self) -> dict[str, int]:
        """Return how many runs are in each state."""
        states = [entry.state for entry in self.entries]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    @property
    def stopped(self) -> bool:
        """Return True when the matrix was asked to stop: by a signal, or from another machine by a file."""
        return bool(self._signal) or self._stop_file_seen

    @property
    def _leaving(self) -> bool:
        return self.stopped or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _running(self) -> list[MatrixEntry]:
        return [entry for entry in self.entries if entry.state == "running"]

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """List the planned runs in a locked folder below LAB, for `oelm status` and other matrices."""
        lab = self._root / LAB
        with writing(lab):
            lab.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=lab))
        with hold(folder):
            for other in lab.iterdir():  # folders of matrices that were killed
                with suppress(FileNotFoundError):  # one that ends at this moment removes its own
                    if time.time() - other.stat().st_mtime > 60 and holder(other) is None:
                        shutil.rmtree(other, ignore_errors=True)
            write_json(folder / "matrix.json", {"runs": [entry.run.name for entry in self.entries], "argv": sys.argv})
            self._folder_name = folder.name
            try:
                yield
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _step(self) -> None:
        """Do one round: handle the runs that have ended, and start those that can start."""
        self._stop_file_seen = self._stop_file_seen or (self._root / LAB / self._folder_name / STOP).exists()
        if self._leaving:
            self._ask_runs_to_stop()
        for entry in self._running():
            assert entry.job is not None
            code = entry.job.poll()
            if code is not None:
                self._handle_end(entry, code)
        for entry in self.entries:
            if entry.state == "elsewhere":
                self._check_elsewhere(entry)
        for entry in self.entries:
            if self._leaving:  # checked each time: starting a run may include an export, which takes a while
                return
            if entry.state == "waiting" and self._can_start(entry):
                if not self._launcher.ready(self._orphans()):
                    if not self._launcher.slots:
                        self._leave_waiting_runs("no GPU is left; the same command goes on with those that it finds")
                    break
                if self._too_late():
                    self._leave_waiting_runs("too late to be done in time")
                    break
                self._start(entry)

    def _too_late(self) -> bool:
        """Return True when a run that starts now would miss the deadline if it took as long as the last few."""
        longest = max(self._durations[-4:], default=0.0)
        return self._deadline is not None and time.monotonic() + longest > self._deadline

    def _can_start(self, entry: MatrixEntry) -> bool:
        """Return True when the run that this one starts from is finished; block this one if it ended otherwise."""
        if entry.run.starts_from is None:
            return True
        predecessor = self._entry_by_folder[entry.run.starts_from.folder]
        if predecessor.ended and predecessor.state != "finished":
            self._end(entry, "blocked", f"it starts from {predecessor.run.name}, which is {predecessor.state}")
        return predecessor.state == "finished"

    def _start(self, entry: MatrixEntry) -> None:
        """Start a run. If that fails, report it and leave the other runs alone."""
        try:
            self._lock_and_start(entry)
        except GpuGoneError as error:  # the run waits for another one
            self._release(entry)
            self._report_lost(str(error))
        except LaterError as error:
            self._release(entry)
            if str(error) != self._last_refusal:  # a launcher may say the same every half minute, for hours
                self._last_refusal = str(error)
                self._emit("waiting", str(error), entry)
        except (OelmError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.filename:
                reason = f"{error.filename}: {error.strerror}"
            if entry.job is not None:
                self._emit("started", f"but {reason}", entry)
                return
            self._release(entry)
            self._end(entry, "failed", f"it could not be started: {reason}")

    def _lock_and_start(self, entry: MatrixEntry) -> None:
        """Lock a run and start it, or attach to the job that an earlier matrix left in a queue."""
        folder = entry.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        entry.lock = lock = self._lock(entry)
        if lock is None:
            return
        entry.old_status_time = status_time(folder)
        info = read_launch(folder)
        job = None if info is None else self._launcher.attach(info)
        trainer = holder(folder)
        if job is None and trainer is not None:  # a process that no matrix started, or that a killed one left behind
            self._release(entry)
            self._wait_for_other(entry, trainer)
            return
        if job is None:
            predecessor = entry.run.starts_from
            problem = "" if predecessor is None else export_plain(predecessor.folder)
            if problem:
                self._release(entry)
                self._end(entry, "failed", f"the model that it starts from could not be exported: {problem}")
                return
            write_json(folder / PLANNED_CONFIG, entry.run.config.to_dict())
            job = self._launcher.start(folder / PLANNED_CONFIG, folder, lock, self._orphans())
            entry.attempts += 1
        entry.job, entry.state, entry.started = job, "running", time.monotonic()
        write_launch(folder, job.info.model_copy(update={"matrix": self._folder_name}))
        self._emit("started", "", entry)

    def _lock(self, entry: MatrixEntry) -> TextIO | None:
        """Return the run's lock, or None if another process has the run or has finished it by now."""
        folder = entry.run.folder
        try:
            lock = hold(folder, RUNNER_LOCK, patience=0.1)
        except FileError:
            process = holder(folder) or holder(folder, RUNNER_LOCK) or "another process"
        else:
            if self._end_if_done(entry, "done by another matrix"):
                lock.close()
                return None
            return lock
        self._wait_for_other(entry, process)
        return None

    def _wait_for_other(self, entry: MatrixEntry, process: str) -> None:
        entry.state = "elsewhere"
        self._emit("waiting", f"{process} is running it already", entry)

    def _orphans(self) -> list[LaunchInfo]:
        """Return the launch info of live runs whose matrix died; their slots are still taken."""
        orphans = []
        for entry in self.entries:
            if entry.state == "elsewhere":
                with suppress(FileError):  # a damaged file names no slot
                    info = read_launch(entry.run.folder)
                    if info is not None and holder(self._root / LAB / str(info.matrix)) is None:
                        orphans.append(info)
        return orphans

    def _check_elsewhere(self, entry: MatrixEntry) -> None:
        """Check whether the other process that has a run has finished it, died, or is still running it."""
        folder = entry.run.folder
        if self._end_if_done(entry, "by another process"):
            return
        if holder(folder, RUNNER_LOCK) is None and holder(folder) is None:
            if read_state(folder).state == "stopped":
                self._end(entry, "stopped", "it was asked to stop; the same command resumes it")
            else:
                entry.state = "waiting"
                self._emit("takeover", "its process is gone", entry)
        elif self._leaving:
            entry.state = "left"

    def _end_if_done(self, entry: MatrixEntry, message: str = "") -> bool:
        """End a run whose folder holds a result and return True. Another run's result counts as a failure."""
        folder = entry.run.folder
        try:
            if not is_done(folder, entry.run.config.id):
                return False
        except FileError as error:
            self._end(entry, "failed", str(error))
            return True
        state = read_state(folder)
        if state.state == "diverged":
            self._end(entry, "diverged", "its last validation loss is not a number; lower the learning rate")
        else:
            self._end(entry, "finished", message or _main_figure(state))
        return True

    def _handle_end(self, entry: MatrixEntry, code: int) -> None:
        """Set the state of a run whose job ended with this exit code, by the run's records."""
        folder, entry.seconds = entry.run.folder, time.monotonic() - entry.started
        self._durations.append(entry.seconds)
        assert entry.job is not None
        info = entry.job.info
        self._release(entry)
        if self._end_if_done(entry):  # the result is written last: an error after it changes no number
            return
        # torchrun exits with 1 after any error or signal; a run without a new status had not begun to train.
        not_begun = info.processes > 1 and not new_status(folder, entry.old_status_time)
        if code == TAKEN_AWAY and not self._leaving:
            entry.state, entry.attempts = "waiting", max(0, entry.attempts - 1)  # the run itself did not fail
            self._emit("waiting", "its scheduler took its machine away", entry)
        elif code == TAKEN_AWAY or was_stopped(folder, code, entry.old_status_time):
            self._end(entry, "stopped", "saved; the same command resumes it")
        elif self._runs_asked_to_stop and (code == -signal.SIGTERM or not_begun):
            self._end(entry, "left", "it was stopped before its first step")
        elif info.job and code == -signal.SIGTERM:
            self._end(entry, "stopped", "its job was cancelled; the same command submits it again")
        elif holder(folder) is not None:
            entry.state = "elsewhere"  # a process that no matrix started took the folder first
        else:
            self._handle_failure(entry, code, info.gpus)

    def _handle_failure(self, entry: MatrixEntry, code: int, gpus: Sequence[str]) -> None:
        folder = entry.run.folder
        gone = self._launcher.lost(gpus) if gpus else []
        if gone:
            self._report_lost("; ".join(gone))
            if not self._leaving:  # it counts as no attempt of the run, which goes on elsewhere
                entry.attempts, entry.state = entry.attempts - 1, "waiting"
                return
        reason, permanent = failure_reason(folder, code, entry.old_status_time)
        if not folder.is_dir():
            reason, permanent = "its folder was removed while it ran", False
        if entry.attempts <= self._retries and not permanent and not self._leaving:
            entry.state = "waiting"
            self._emit("retry", reason, entry)
            self.entries.remove(entry)  # it comes after the runs that have not been tried yet
            self.entries.append(entry)
        else:
            attempts = "" if entry.attempts == 1 else f", after {entry.attempts} attempts"
            console = f"; see {folder / CONSOLE}" if (folder / CONSOLE).is_file() else ""
            self._end(entry, "failed", f"{reason}{attempts}{console}")

    def _release(self, entry: MatrixEntry) -> None:
        if entry.lock is not None:
            entry.lock.close()
        entry.lock = entry.job = None

    def _end(self, entry: MatrixEntry, state: str, message: str) -> None:
        entry.state = state
        self._emit(state, message, entry)

    def _ask_runs_to_stop(self) -> None:
        """Ask the running runs to save and stop, once, and leave the others unstarted."""
        if self._runs_asked_to_stop:
            return
        self._runs_asked_to_stop = True
        cause = "asked to stop by a file" if self._stop_file_seen else "out of time"
        cause = f"asked to stop by {self._signal.signal}" if self._signal else cause
        running = self._running()
        self._emit("stopping", cause, count=len(running))
        for entry in running:
            assert entry.job is not None
            entry.job.stop()
        self._leave_waiting_runs("the same command resumes from here")

    def _leave_waiting_runs(self, reason: str) -> None:
        """Mark the runs that have not started as left."""
        waiting = [entry for entry in self.entries if entry.state == "waiting"]
        for entry in waiting:
            entry.state = "left"
        if waiting:
            self._emit("leaving", reason, count=len(waiting))

    def _report_lost(self, gpus: str) -> None:
        """Report GPUs that have disappeared once: the run on them may end before or after another is to start there."""
        if gpus not in self._lost:
            self._lost.add(gpus)
            self._emit("lost", gpus)

    def _emit(self, kind: str, message: str, entry: MatrixEntry | None = None, count: int = 1) -> None:
        self._notify(MatrixEvent(kind, message, self.counts(), entry, count))


def export_plain(run: Path) -> str:
    """Write a run's best model into its folder as a plain transformers model, once; return why it failed, or ""."""
    with hold(run, RUNNER_LOCK, patience=600):
        if any((run / PLAIN).glob("*.safetensors")):
            return ""
        shutil.rmtree(run / PLAIN, ignore_errors=True)  # left by an export that was interrupted
        remove_leftovers(run)
        command = [sys.executable, "-m", "oelm", "export", str(run), str(run / PLAIN)]
        # It gets a session of its own, so that Ctrl-C reaches only this process.
        export = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    return (export.stderr.strip().splitlines() or ["no reason given"])[-1] if export.returncode else ""


def _main_figure(run: RunState) -> str:
    if run.accuracy is not None:
        return f"accuracy {run.accuracy:.4f}"
    if run.perplexity is not None:
        return f"perplexity {run.perplexity:.3f}"
    if run.masked_perplexity is not None:
        return f"masked perplexity {run.masked_perplexity:.3f}"
    return "done"
