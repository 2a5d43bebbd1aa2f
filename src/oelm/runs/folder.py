"""A run's folder: its config, environment, metrics, result and status. The only thing that analysis reads.

config.json       the whole config            status.json   state, step, rates: rewritten while it runs
environment.json  versions, hardware, data    metrics.jsonl one line per log, validation or event, appended
audit.json        what was frozen             timing.json   whole optimiser steps, and what else took time
result.json       the figures, at the end     train.log     the same lines that the terminal shows
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from .. import __version__
from ..base.files import read_json, recover_folder, remove_leftovers, to_json, write_json, write_text
from ..base.locks import hold, holder
from ..config import WITHOUT_EFFECT, RunConfig
from ..errors import ConfigError, FileError

FORMAT = 1
# What config.json holds beside the config's own fields.
_STAMP = ("format", "id")
# States of a run. "stopped" is a run that was asked to stop and can go on; "failed" says why in its message.
STATES = ("running", "finished", "stopped", "failed")
# A note with these words, from the run itself or from whoever ran it, keeps its times out of every comparison.
UNCOMPARABLE_TIMES = "step times are not comparable"
# A file of this name in a run's folder asks the run to stop: it looks for one whenever it logs.
STOP = "stop"
# In the folder of a run or a matrix: the process that was asked to stop. Its number may be another's the next time.
ASKED = "stopping"
# What a run may have written before its first step, beside its config and its log.
_BEFORE_A_STEP = ("status.json", "environment.json", "audit.json", "metrics.jsonl", "trackers.json")
# How long a run on another machine may be silent before it counts as dead, where no lock is seen: some shared file
# systems keep locks to one machine.
SILENCE = 300.0


class RunFolder:
    """The records of one run, open for writing by one process at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, config.folder
        self._made: list[Path] = []
        self._lock: TextIO | None = None
        self._metrics: TextIO | None = None
        self._log: TextIO | None = None
        self._status: dict[str, Any] = {}

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def claimed(self) -> bool:
        """Whether this process may write here."""
        return self._log is not None

    def claim(self) -> None:
        """Make the folder this process's: raises if a live process has it, or if another run trained in it."""
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            for meant_for_another in (STOP, ASKED):  # for whoever had the folder before
                (self / meant_for_another).unlink(missing_ok=True)
            recover_folder(self.path / "best")
            remove_leftovers(self.path)
            self._make_room()
            write_json(self / "config.json", {"format": FORMAT, "id": self.config.id, **self.config.to_dict()})
            self._log = open(self / "train.log", "a", encoding="utf-8", buffering=1)
        except OSError as error:
            self.close()
            raise FileError(f"{self.path}: cannot be written ({error.strerror})") from None
        except BaseException:
            self.close()
            raise

    def withdraw(self) -> bool:
        """Undo a claim that nothing came of, with the folders that were made for it; whether that was so.

        A folder that was there before, of a runner that waits to read the reason say, stays.
        """
        if self._metrics is not None or self.path not in self._made:
            return False
        shutil.rmtree(self.path, ignore_errors=True)  # before the lock goes: another may wait for it
        self.close()
        for folder in self._made[1:]:
            with suppress(OSError):  # another run is in there by now
                folder.rmdir()
        return True

    def _make_room(self) -> None:
        """Raise if another run trained here. Of one that came to no step, for want of memory say, only the log stays.

        Steps that left neither a checkpoint nor a line of metrics are lost to their own run too: it would start anew.
        """
        there = self / "config.json"
        old = read_json(there) if there.exists() else {"id": self.config.id}
        if old.get("id") == self.config.id:
            return
        if self._trained():
            fields = ", ".join(differing(old, self.config.to_dict())) or "the version of oelm"
            raise ConfigError(
                f"{self.path}: holds another run; it differs in {fields}. Give this one another name "
                "(experiment=NAME) or output folder"
            )
        for name in _BEFORE_A_STEP:
            (self / name).unlink(missing_ok=True)

    def _trained(self) -> bool:
        """Whether anything here is of an optimiser step."""
        kept = (self / "result.json").exists() or (self / "best").exists() or any(self.checkpoints.iterdir())
        return kept or any(line["step"] > 0 for line in read_metrics(self.path))

    def start_metrics(self, step: int) -> bool:
        """Open the metrics for appending, without the lines of what will be done again after `step` steps.

        Whether the steps before have their lines; they do not if the file was removed. An event happens at the start of
        its step: after the checkpoint that has as many steps done.
        """
        path = self / "metrics.jsonl"
        there = path.exists() or step == 0
        kept = [line for line in _whole_lines(path) if _done_by(json.loads(line), step)]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._metrics = open(path, "a", encoding="utf-8", buffering=1)
        return there

    def metric(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append one line of metrics."""
        assert self._metrics is not None, "start_metrics comes first"
        line = {"kind": kind, "step": step, **values}
        _append(self._metrics, to_json(line))
        return line

    def log(self, text: str) -> None:
        if self._log is not None:
            _append(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def status(self, state: str, **values: Any) -> None:
        """Rewrite status.json: what a live table shows."""
        assert state in STATES, state
        here = {"host": socket.gethostname(), "pid": os.getpid(), "updated": time.time()}
        self._status = {**self._status, "format": FORMAT, "id": self.config.id, "state": state, **here, **values}
        write_json(self / "status.json", self._status)
        if state == "running":
            self._obey()

    def _obey(self) -> None:
        """Pass on a request to stop that was left here from another machine, as the signal it would be on this one."""
        if (self / STOP).exists() and callable(signal.getsignal(signal.SIGTERM)):
            (self / STOP).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        for file in (self._metrics, self._log, self._lock):
            if file is not None:
                with suppress(OSError):  # a line that a full disk refused is tried once more; it was told already
                    file.close()
        self._metrics = self._log = self._lock = None


def ending(loss: float | None) -> str:
    """What became of a run that took all its steps, by its last validation loss, a number or null."""
    return "finished" if loss is not None and math.isfinite(loss) else "diverged"


def is_alive(folder: Path, status: dict[str, Any]) -> bool:
    """Whether a process has a run now, whatever it wrote last: it holds the folder's lock, or its status is fresh.

    The status counts only for a run on another machine, whose lock may not be seen. A process number says nothing: it
    may be another's by now.
    """
    if holder(folder) is not None:
        return True
    updated = status.get("updated")
    elsewhere = status.get("state") == "running" and status.get("host") != socket.gethostname()
    return elsewhere and isinstance(updated, int | float) and time.time() - updated < SILENCE


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, whole lines only: the last one may have been cut by a kill."""
    return [json.loads(line) for line in _whole_lines(folder / "metrics.jsonl")]


def environment(data: dict[str, Any], device: str, world: int) -> dict[str, Any]:
    """Versions, hardware, code and data: what a number depends on beside its config."""
    import numpy
    import tokenizers
    import torch
    import transformers

    gpu = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
    return {
        "format": FORMAT,
        "versions": {
            "oelm": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": numpy.__version__,
        },
        "git_commit": _git_commit(),
        "system": platform.platform(),
        "cpu": {"count": os.cpu_count(), "machine": platform.machine(), "threads": torch.get_num_threads()},
        "gpu": gpu,
        "device": device,
        "world_size": world,
        "data": data,
    }


def config_fields(recorded: dict[str, Any]) -> dict[str, Any]:
    """The config's own fields in what a run's config.json holds."""
    return {key: value for key, value in recorded.items() if key not in _STAMP}


def differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of the fields in which two configs differ."""
    names = []
    for key in sorted(set(one) | set(other)):
        if not prefix and key in (*_STAMP, *WITHOUT_EFFECT):
            continue
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += differing(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names


def _done_by(line: dict[str, Any], step: int) -> bool:
    """Whether a line is of what `step` steps did. A run that starts anew has done nothing."""
    return bool(line["step"] < step or (line["step"] == step > 0 and line["kind"] != "event"))


def _append(file: TextIO, line: str) -> None:
    try:
        file.write(line + "\n")
    except OSError as error:
        raise FileError(f"{file.name}: cannot be written ({error.strerror})") from None


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written whole."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")[:-1]
    whole = []
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise FileError(f"{path}: line {number} is damaged") from None
        whole.append(line)
    return whole


def _git_commit() -> str | None:
    """The commit of the code that runs, marked if it was changed since; none outside a checkout.

    Where this package is installed below some other project, that project's commit says nothing: it has not this file.
    """
    here = Path(__file__)
    tracked = _git("ls-files", "--error-unmatch", here.name, cwd=here.parent)
    return tracked and _git("describe", "--always", "--dirty", "--abbrev=40", cwd=here.parent)


def _git(*arguments: str, cwd: Path) -> str | None:
    """What a git command prints; none if it fails."""
    try:
        run = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None
