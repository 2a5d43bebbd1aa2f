"""What the tests of training share: a tiny run, real processes that start at once, and ways to sabotage them.

A process that imports torch and transformers takes seconds to start. `start` forks from one that has imported them
already: what it forks is a process like any other, which can be stopped, killed and resumed.
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
PRELOADED = ["oelm.cli.app", "oelm.evaluation.evaluate", "oelm.training.engine", "oelm.data", "yaml"]
SERVERS.set_forkserver_preload(PRELOADED)
_made: list[tempfile.TemporaryDirectory[str]] = []


@cache
def token_folder() -> Path:
    """A small prepared folder of the built-in stories: 400 entries in its vocabulary, made once per test session."""
    _made.append(tempfile.TemporaryDirectory(prefix="oelm-tokens-"))
    place = Path(_made[-1].name)
    text = place / "stories.txt"
    text.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories(0, 150)), encoding="utf-8")
    prepare(text, place / "tokens", train_bpe=400, val_fraction=0.1, workers=1, synthetic=True)
    return place / "tokens"


def tiny(output: Path, **changes: Any) -> dict[str, Any]:
    """The fields of a run that takes a fraction of a second: a GPT of 2 layers and width 32, with dropout."""
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
    """Train a tiny run in this process; its result."""
    return train(config(output, **changes), quiet=True)


def written(place: Path, fields: dict[str, Any]) -> Path:
    """The fields as a YAML file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return place


# Processes


class Process:
    """`oelm ARGUMENTS` in a process of its own. `output` is all that it printed."""

    def __init__(self, arguments: list[str], sabotage: Callable[[], None] | None, threads: int) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="r", suffix=".log")
        self._process = SERVERS.Process(target=_main, args=(arguments, sabotage, threads, self._log.name))
        self._process.start()

    def wait(self, seconds: float = 60) -> int:
        """Its exit code, which is minus the signal that killed it."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s; it said:\n{self.output}")
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

    def wait_for(self, happened: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until something happened while the process lives."""
        until = time.monotonic() + seconds
        while not happened():
            assert self.alive, f"ended with {self._process.exitcode} before it happened; it said:\n{self.output}"
            assert time.monotonic() < until, f"did not happen in {seconds} s; it said:\n{self.output}"
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
    """Start `oelm ARGUMENTS`, after `sabotage`, a picklable function, was called in its process."""
    return Process([str(argument) for argument in arguments], sabotage, threads)


def finished(*arguments: object, sabotage: Callable[[], None] | None = None, threads: int = 1) -> Process:
    """Run `oelm ARGUMENTS` to its end, which must be a good one."""
    process = start(*arguments, sabotage=sabotage, threads=threads)
    code = process.wait()
    assert code == 0, f"exit code {code}; it said:\n{process.output}"
    return process


def oelm(*arguments: object) -> subprocess.Popen[str]:
    """`python -m oelm ARGUMENTS`, started as a user starts it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# What a run left behind


def final_tensors(run: Path) -> dict[str, str]:
    """The hash of every tensor of a run's last checkpoint: weights and the optimiser's state."""
    return {name: content_hash(value) for name, value in checkpoint_tensors(run).items()}


def checkpoint_tensors(run: Path) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(run / "checkpoints")[-1] / "tensors.safetensors")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a run's last checkpoint."""
    return {k.removeprefix("model/"): v for k, v in checkpoint_tensors(run).items() if k.startswith("model/")}


def timeless(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what a clock said."""
    return [{key: value for key, value in line.items() if key != "time"} for line in read_metrics(run)]


def outcome(run: Path) -> dict[str, Any]:
    """The result of a run without what a clock said."""
    clocked = ("step_seconds", "tokens_per_second", "seconds", "gpu_hours")
    result = {key: value for key, value in read(run / "result.json").items() if key not in clocked}
    result["reached"] = {key: {**value, "seconds": None} for key, value in result["reached"].items()}
    return result


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def assert_same_run(run: Path, other: Path) -> None:
    """The same weights, optimiser state, metrics and result, to the bit."""
    assert final_tensors(run) == final_tensors(other)
    assert timeless(run) == timeless(other)
    assert outcome(run) == outcome(other)


# Sabotage, to be called in the process that trains


class Death:
    """Kills its process at the count-th of the things that a run does one after the other: steps, writes, renames."""

    def __init__(self, count: int) -> None:
        self.left = count

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
            self.left -= 1
            if self.left == 0:
                die()
            return function(*arguments, **options)

        return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """Steps that take a while, so that a signal meets one."""

    def __init__(self, seconds: float = 0.03) -> None:
        self.seconds = seconds

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        step = Stepper.step

        def slow(stepper: Stepper, state: Any) -> None:
            time.sleep(self.seconds)
            step(stepper, state)

        Stepper.step = slow  # type: ignore[method-assign]


class Noted:
    """Writes the number of every step that is taken, and of its samples, to a file."""

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
    """A small file system of its own at `place`, where this is allowed; skips the test where it is not."""
    import pytest

    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
