"""The folder of a run: one process at a time writes its records here, and any number of others read them.

config.json       the whole config            status.json   state, step, rates: rewritten while it runs
environment.json  versions, hardware, data    metrics.jsonl one line per log, validation or event, appended
audit.json        what was frozen             timing.json   whole optimiser steps, and what else took time
manifest.json     hashes of a finished run's records
result.json       the figures, at the end     train.log     the same lines that the terminal shows
downstream.json   scores on tasks, measured after the run; so are samples.json and recall.json

`schema.py` has the types of these files.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ..base.files import recover_folder, remove_leftovers, to_json, write_text, writing
from ..base.locks import hold, holder
from ..base.manifest import MANIFEST, FileMark, check_files, read_manifest, write_manifest
from ..config import WITHOUT_EFFECT, RunConfig
from ..errors import ConfigError, FileError
from .schema import (
    MetricLine,
    RecordedConfig,
    Result,
    State,
    Status,
    parse_line,
    read,
)

# A note with these words, from the run itself or from its user, keeps its times out of every comparison.
UNCOMPARABLE_TIMES = "step times are not comparable"
# A file of this name in a run's folder asks the run to stop: the run looks for it whenever it logs.
STOP = "stop"
# A file of this name in the folder of a run or a matrix names the process that was asked to stop. It is removed when
# another process takes the folder, whose id may be the same.
ASKED = "stopping"
# The records that a finished run's manifest has a hash of. Its config has an id, which is one.
SEALED = ("environment.json", "audit.json", "metrics.jsonl", "timing.json", "result.json")
# Records that may be added after the end, scores on tasks, written texts and the stories' recall; the manifest has
# their hashes too.
DOWNSTREAM, SAMPLES, RECALL = "downstream.json", "samples.json", "recall.json"
ADDED = (DOWNSTREAM, SAMPLES, RECALL)
# Seconds to wait for another process that adds a record to the same run.
_PATIENCE = 30.0
# Files that a run may have written before its first step, beside its config and its log.
_BEFORE_A_STEP = ("status.json", "environment.json", "audit.json", "metrics.jsonl", "trackers.json")
# Seconds without a new status after which a run on another machine counts as dead, unless its lock is visible here:
# some shared file systems keep locks to one machine.
SILENCE = 300.0


class RunFolder:
    """The records of one run, open for writing by one process at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, config.folder
        self._created: list[Path] = []
        self._lock: TextIO | None = None
        self._metrics: TextIO | None = None
        self._log: TextIO | None = None
        self._status: dict[str, Any] = {}

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def claimed(self) -> bool:
        """Return True when this process may write here."""
        return self._log is not None

    def claim(self) -> None:
        """Lock the folder for this process; raise if a live process has it, or if another run was trained in it."""
        self._created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            for request in (STOP, ASKED):  # these were meant for the process that had the folder before
                (self / request).unlink(missing_ok=True)
            recover_folder(self.path / "best")
            remove_leftovers(self.path)
            self._make_room()
            RecordedConfig(id=self.config.id, config=self.config).write(self / "config.json")
            self._log = open(self / "train.log", "a", encoding="utf-8", buffering=1)
        except OSError as error:
            self.close()
            raise FileError(f"{self.path}: cannot be written ({error.strerror})") from None
        except BaseException:
            self.close()
            raise

    def withdraw(self) -> bool:
        """Remove the folders that the claim created, if no metrics were written; return True if they were removed.

        A run's folder that existed before the claim stays: a launcher may be waiting to read the run's error there.
        """
        if self._metrics is not None or self.path not in self._created:
            return False
        shutil.rmtree(self.path, ignore_errors=True)  # before the lock is released: another process may wait for it
        self.close()
        for folder in self._created[1:]:
            with suppress(OSError):  # the folder may hold another run by now
                folder.rmdir()
        return True

    def _make_room(self) -> None:
        """Raise if another run was trained here; remove the records of one that failed before its first step.

        Steps that left neither a checkpoint nor a line of metrics do not count: that run could not resume from them.
        """
        path = self / "config.json"
        if not path.exists():
            return
        recorded = read(path, RecordedConfig)
        if recorded.id == self.config.id:
            return
        trained = (self / "result.json").exists() or (self / "best").exists() or any(self.checkpoints.iterdir())
        if trained or any(line.step > 0 for line in read_metrics(self.path)):
            fields = ", ".join(differing(recorded.config.to_dict(), self.config.to_dict())) or "the version of oelm"
            raise ConfigError(
                f"{self.path}: holds another run; it differs in {fields}. Give this one another name "
                "(experiment=NAME) or output folder"
            )
        for name in _BEFORE_A_STEP:
            (self / name).unlink(missing_ok=True)

    def start_metrics(self, step: int, saved: FileMark | None = None) -> str:
        """Open metrics.jsonl for appending, without the lines of steps after `step`, which will be repeated.

        `saved` is what the file was when the checkpoint of that step was written. Return what became of it since then,
        where that is not what it was: the lines that can still be read are kept.
        """
        (self / MANIFEST).unlink(missing_ok=True)  # the run was finished before, and its result was removed
        path, problem = self / "metrics.jsonl", ""
        if saved is not None and not path.exists():
            problem = f"{path} is missing; earlier lines are lost"
        elif saved is not None and not _begins_with(path, saved):
            problem = f"{path}: earlier lines are lost or were changed; those that can be read are kept"
        earlier = [text for text, line in _readable_lines(path) if line is not None and _was_done_by(step, line)]
        write_text(path, "".join(f"{text}\n" for text in earlier))
        self._metrics = open(path, "a", encoding="utf-8", buffering=1)
        return problem

    def metrics_mark(self) -> FileMark:
        """Flush metrics.jsonl to the disk, and return what it is now; in a process that writes none, an empty mark."""
        if self._metrics is None:
            return FileMark(0, "")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return FileMark.of(self / "metrics.jsonl")

    def finish(self, result: Result) -> None:
        """Write the manifest of a finished run's records, which readers check, and then its result.

        The result gets its name last: a run that has one is done, and must have its manifest.
        """
        self.metrics_mark()
        unnamed = self / f".result.json.{os.getpid()}.tmp"
        try:
            result.write(unnamed)
            _write_manifest(self.path, {"result.json": unnamed})
            with writing(self / "result.json"):
                os.replace(unnamed, self / "result.json")
        finally:
            unnamed.unlink(missing_ok=True)

    def metric(self, line: MetricLine) -> None:
        """Append one line of metrics."""
        assert self._metrics is not None, "call start_metrics first"
        _append(self._metrics, line_to_json(line))

    def log(self, text: str) -> None:
        """Append a line to train.log, with the time."""
        if self._log is not None:
            _append(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def status(self, state: State, **values: Any) -> None:
        """Rewrite status.json, which live tables show; `values` are fields of Status, and those given before stay."""
        process = {"host": socket.gethostname(), "pid": os.getpid(), "updated": time.time()}
        self._status = {**self._status, "id": self.config.id, "state": state, **process, **values}
        Status.model_validate(self._status).write(self / "status.json")
        # Another machine cannot signal this process, so it leaves a file instead: treat that as the signal.
        if state == "running" and (self / STOP).exists() and callable(signal.getsignal(signal.SIGTERM)):
            (self / STOP).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Close all files and release the lock."""
        for file in (self._metrics, self._log, self._lock):
            if file is not None:
                with suppress(OSError):  # closing retries a line that a full disk refused; that error was raised then
                    file.close()
        self._metrics = self._log = self._lock = None


def seal_records(folder: Path) -> None:
    """Write the manifest of the records in the folder of a finished run."""
    _write_manifest(folder, {})


def _write_manifest(folder: Path, unnamed: Mapping[str, Path]) -> None:
    """Write the manifest of a finished run's records; `unnamed` are those that have not got their names yet."""
    files = {name: unnamed.get(name, folder / name) for name in (*SEALED, *ADDED)}
    write_manifest(folder, {name: FileMark.of(file) for name, file in files.items() if file.is_file()})


@contextmanager
def changing_record(folder: Path, name: str) -> Iterator[Path]:
    """Yield the path of a record that is written in the block, and add its hash to a finished run's manifest.

    Raise where the run's records are not as they were when it ended: a new manifest would hide that. At no moment does
    the manifest have the hash of anything else than what is there.
    """
    with hold(folder, patience=_PATIENCE):
        check_records(folder)
        marks = read_manifest(folder) if (folder / MANIFEST).is_file() else None
        if marks is not None and marks.pop(name, None) is not None:
            write_manifest(folder, marks)
        try:
            yield folder / name
        finally:
            if marks is not None and (folder / name).is_file():
                write_manifest(folder, {**marks, name: FileMark.of(folder / name)})


def check_records(folder: Path) -> None:
    """Raise a FileError that names the first record of a finished run that has changed since then.

    Runs of earlier versions have no manifest.
    """
    if (folder / MANIFEST).is_file() and (folder / "result.json").is_file():
        check_files(folder, read_manifest(folder))


def ending(loss: float | None) -> str:
    """Return "finished" or, if the last validation loss is not finite, "diverged", for a run that took all steps."""
    return "finished" if loss is not None and math.isfinite(loss) else "diverged"


def is_alive(folder: Path, status: Status | None) -> bool:
    """Return True when a process has the run now: it holds the folder's lock, or its status is fresh.

    The status counts only for a run on another machine, whose lock may not be visible here. The process id is not
    used: another process may have it by now.
    """
    if holder(folder) is not None:
        return True
    if status is None or status.state != "running" or status.host == socket.gethostname():
        return False
    # A clock that is ahead of this one must not keep a run alive for ever.
    return status.updated is not None and abs(time.time() - status.updated) < SILENCE


def read_metrics(folder: Path) -> list[MetricLine]:
    """Return the metrics of a run, without a last line that was cut when the process was killed."""
    path = folder / "metrics.jsonl"
    lines = [line for _, line in _readable_lines(path)]
    if lines and lines[-1] is None:  # a line that a full disk cut, and that later lines did not follow
        lines.pop()
    complete = [line for line in lines if line is not None]
    if len(complete) < len(lines):
        raise FileError(f"{path}: line {lines.index(None) + 1} is damaged")
    return complete


def line_to_json(line: MetricLine) -> str:
    """Return a line of metrics as it is written to metrics.jsonl."""
    return to_json({"kind": line.kind, **line.model_dump(exclude_unset=True)})


def differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the fields in which two configs differ, apart from those that change no number."""
    names = []
    for key in sorted(set(one) | set(other)):
        if not prefix and key in WITHOUT_EFFECT:
            continue
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += differing(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names


def _was_done_by(step: int, line: MetricLine) -> bool:
    """Return True if a line is about the first `step` steps, of which a run that starts from scratch has none.

    An event happens at the start of its step, so it is later than the checkpoint with the same number of steps.
    """
    return line.step < step or (line.step == step > 0 and line.kind != "event")


def _append(file: TextIO, line: str) -> None:
    """Append a line to an open file; raise a FileError that names the file if that fails."""
    try:
        file.write(line + "\n")
    except OSError as error:
        raise FileError(f"{file.name}: cannot be written ({error.strerror})") from None


def _begins_with(path: Path, saved: FileMark) -> bool:
    """Return whether a file still begins with the bytes that it had."""
    with open(path, "rb") as file:
        start = file.read(saved.bytes)
    return len(start) == saved.bytes and hashlib.sha256(start).hexdigest() == saved.sha256


def _readable_lines(path: Path) -> list[tuple[str, MetricLine | None]]:
    """Return the complete lines of metrics.jsonl as text and parsed, None for one that is damaged."""
    if not path.exists():
        return []
    lines: list[tuple[str, MetricLine | None]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            lines.append((text, parse_line(text)))
        except ValueError:
            lines.append((text, None))
    return lines
