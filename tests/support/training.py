"""Shared by the tests of training: a tiny run, real processes that start at once, and ways to sabotage them.

A process that imports torch and transformers takes seconds to start. `start` forks from one that has imported them
already. The forked process is like any other: it can be stopped, killed and resumed.

No test depends on how fast the machine is. Processes are held at a step until something has happened, and the limits
below only end a test that hangs.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from oelm.base.strict import merge
from oelm.config import RunConfig
from oelm.data import prepare, stories
from oelm.method.seal import content_hash
from oelm.runs.folder import read_metrics
from oelm.training.checkpoint import list_checkpoints
from oelm.training.engine import train

SERVERS = multiprocessing.get_context("forkserver")
PRELOADED = ["oelm.cli.app", "oelm.evaluation.use", "oelm.training.engine", "oelm.data", "yaml"]
SERVERS.set_forkserver_preload(PRELOADED)
_folders: list[tempfile.TemporaryDirectory[str]] = []
# Seconds after which a process counts as hanging: far more than any needs on a busy machine, but below a test's limit.
LIMIT = 150.0


@cache
def token_folder() -> Path:
    """Prepare a small token folder of built-in stories with a vocabulary of 400, once per test session."""
    _folders.append(tempfile.TemporaryDirectory(prefix="oelm-tokens-"))
    folder = Path(_folders[-1].name)
    text = folder / "stories.txt"
    text.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories(0, 150)), encoding="utf-8")
    prepare(text, folder / "tokens", train_bpe=400, val_fraction=0.1, workers=1, synthetic=True)
    return folder / "tokens"


def tiny(output: Path, **changes: Any) -> dict[str, Any]:
    """Return the fields of a run that takes a fraction of a second: a GPT of 2 layers and width 32, with dropout."""
    fields: dict[str, Any] = {
        "model": {
            "name": "gpt:tiny",
            "fields": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.1},
        },
        "data": {"path": str(token_folder()), "sequence_length": 32},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 3},
        "train": {"max_steps": 12, "batch_size": 8, "device": "cpu"},
        "eval": {"every": 4, "sequences": 12},
        "checkpoint": {"every": 5},
        "log": {"every": 3},
        "output": str(output),
    }
    return merge(fields, changes)


def config(output: Path, **changes: Any) -> RunConfig:
    return RunConfig.load(tiny(output, **changes))


def run_here(output: Path, **changes: Any) -> dict[str, Any]:
    """Train a tiny run in this process and return its result."""
    return train(config(output, **changes), quiet=True)


def write_yaml(path: Path, fields: dict[str, Any]) -> Path:
    """Write the fields to a YAML file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


# Processes


class Process:
    """`oelm ARGUMENTS` in a process of its own. `output` is everything it printed."""

    def __init__(self, arguments: list[str], sabotage: Callable[[], None] | None, threads: int) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="r", suffix=".log")
        self._process = SERVERS.Process(target=_main, args=(arguments, sabotage, threads, self._log.name))
        self._process.start()

    def wait(self, seconds: float = LIMIT) -> int:
        """Wait for the end and return the exit code, or minus the signal that killed the process."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s; its output:\n{self.output}")
        return code

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], bool], seconds: float = LIMIT) -> None:
        """Wait until a condition holds; fail when the process ends before that."""
        until = time.monotonic() + seconds
        while not condition():
            assert self.alive, (
                f"ended with {self._process.exitcode} before the condition held; its output:\n{self.output}"
            )
            assert time.monotonic() < until, (
                f"the condition did not hold within {seconds} s; its output:\n{self.output}"
            )
            time.sleep(0.005)


def _main(arguments: list[str], sabotage: Callable[[], None] | None, threads: int, log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(threads)
    from oelm.cli.app import main

    if sabotage is not None:
        sabotage()
    sys.argv = ["oelm", *arguments]
    main()


def start(*arguments: object, sabotage: Callable[[], None] | None = None, threads: int = 1) -> Process:
    """Start `oelm ARGUMENTS` in a process that calls `sabotage`, a picklable function, first."""
    return Process([str(argument) for argument in arguments], sabotage, threads)


def run_to_end(*arguments: object, sabotage: Callable[[], None] | None = None, threads: int = 1) -> Process:
    """Run `oelm ARGUMENTS` to its end and require exit code 0."""
    process = start(*arguments, sabotage=sabotage, threads=threads)
    code = process.wait()
    assert code == 0, f"exit code {code}; its output:\n{process.output}"
    return process


def oelm(*arguments: object) -> subprocess.Popen[str]:
    """Start `python -m oelm ARGUMENTS` as a user does."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# The records and tensors of a run


def final_tensors(run: Path) -> dict[str, str]:
    """Return the hash of every tensor in a run's last checkpoint: weights and optimiser state."""
    return {name: content_hash(value) for name, value in checkpoint_tensors(run).items()}


def checkpoint_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a run's last checkpoint."""
    return load_file(list_checkpoints(run / "checkpoints")[-1] / "tensors.safetensors")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors in a run's last checkpoint."""
    return {k.removeprefix("model/"): v for k, v in checkpoint_tensors(run).items() if k.startswith("model/")}


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without its times."""
    return [{"kind": line.kind, **line.model_dump(exclude={"time"}, exclude_unset=True)} for line in read_metrics(run)]


def result_without_times(run: Path) -> dict[str, Any]:
    """Return the result of a run without its times."""
    timed_keys = ("step_seconds", "tokens_per_second", "seconds", "gpu_hours")
    result = {key: value for key, value in read(run / "result.json").items() if key not in timed_keys}
    result["reached"] = {key: {**value, "seconds": None} for key, value in result["reached"].items()}
    return result


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def assert_same_run(run: Path, other: Path) -> None:
    """Require the same weights, optimiser state, metrics and result, to the bit."""
    assert final_tensors(run) == final_tensors(other)
    assert metrics_without_times(run) == metrics_without_times(other)
    assert result_without_times(run) == result_without_times(other)


# Sabotage, called in the process that trains


class Death:
    """Kills its process at the count-th of the steps, writes, renames and removals that a run does."""

    def __init__(self, count: int) -> None:
        self.remaining = count

    def __call__(self) -> None:
        import shutil

        from oelm.runs.folder import RunFolder
        from oelm.training import checkpoint as state
        from oelm.training.step import Stepper

        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (shutil, "rmtree"),
            (RunFolder, "metric"),
            (RunFolder, "log"),
            (Stepper, "step"),
            (Stepper, "_update"),
            (state, "save_file"),
        ):
            setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.remaining -= 1
            if self.remaining == 0:
                die()
            return function(*arguments, **options)

        return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """Makes every step take a while."""

    def __init__(self, seconds: float = 0.03) -> None:
        self.seconds = seconds

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        step = Stepper.step

        def slow(stepper: Stepper, state: Any) -> None:
            time.sleep(self.seconds)
            step(stepper, state)

        Stepper.step = slow  # type: ignore[method-assign]


class Held:
    """Holds its process at the start of a step: until a file appears, or without a file until a signal arrives."""

    def __init__(self, step: int, until: Path | None = None) -> None:
        self.step, self.until, self.signalled = step, until, False

    def __call__(self) -> None:
        from oelm.training.signals import StopRequest
        from oelm.training.step import Stepper

        handle, step = StopRequest.handle, Stepper.step

        def noting_handle(request: StopRequest, number: int, frame: Any) -> None:
            handle(request, number, frame)
            self.signalled = True

        def held_step(stepper: Stepper, state: Any) -> None:
            while state.step == self.step and not (self.signalled if self.until is None else self.until.exists()):
                time.sleep(0.005)
            step(stepper, state)

        StopRequest.handle = noting_handle  # type: ignore[method-assign]
        Stepper.step = held_step  # type: ignore[method-assign]


class RecordSteps:
    """Writes the number of every step, and the numbers of its samples, to a file."""

    def __init__(self, file: Path, then: Callable[[], None] | None = None) -> None:
        self.file, self.then = file, then

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        step, batch = Stepper._step, Stepper._batch

        def noted_step(stepper: Stepper, state: Any) -> None:
            self._note(f"step {state.step}")
            step(stepper, state)

        def noted_batch(stepper: Stepper, first: int, count: int) -> Any:
            self._note(f"samples {first} {count}")
            return batch(stepper, first, count)

        Stepper._step, Stepper._batch = noted_step, noted_batch  # type: ignore[method-assign]
        if self.then is not None:
            self.then()

    def _note(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{line}\n")


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Any:
    """Mount a small file system at `place`; skip the test where that is not allowed."""
    import pytest

    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
