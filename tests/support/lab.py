"""Helpers for tests of the lab: small experiments, a fast launcher, and the `oelm` command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.cli.run_tables import event_line
from oelm.config import RunConfig
from oelm.lab.experiment import load_experiment
from oelm.lab.launch.interface import LaunchInfo
from oelm.lab.matrix import MatrixEvent
from oelm.lab.plan import Request, plan_runs
from oelm.training.engine import train
from tests.support.training import Process, start, tiny

ROOT = Path(__file__).parents[2]
# The axes of a small matrix: four runs.
AXES = {"method": ["baseline", "oelm-freeze"], "seed": [0, 1]}


def lab(*arguments: object) -> Any:
    """Run an `oelm` command in this process; return its output and exit code."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """Run a command that must exit with code 2; return what it prints on stderr."""
    result = lab(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stderr.startswith("oelm: ")
    return str(result.stderr)


def start_command(*arguments: object) -> subprocess.Popen[str]:
    """Start an `oelm` command in its own process, with stdout and stderr in one stream."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def line_appender(lines: list[str]) -> Callable[[MatrixEvent], None]:
    """Return a function that appends the log line of each matrix event to a list."""
    return lambda event: lines.append(event_line(event))


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"did not happen in {seconds} s"
        time.sleep(0.01)


def experiment_file(folder: Path, name: str = "study", **fields: Any) -> Path:
    """Write the file of an experiment whose runs take a second."""
    config = {key: value for key, value in tiny(folder).items() if key != "output"}
    content = {"id": name, "config": config, **fields}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


class ForkJob:
    """A run in a forked process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.info = LaunchInfo(launcher="test", pid=process.pid, host="here")

    def poll(self) -> int | None:
        return None if self.process.alive else self.process.wait()

    def stop(self) -> None:
        self.process.signal(signal.SIGTERM)


class ForkLauncher:
    """Start runs as forked processes, which need not import torch. `sabotage` is keyed by the number of the start."""

    def __init__(self, slots: int = 2, sabotage=None) -> None:
        self.slots, self.jobs, self._sabotage = slots, [], sabotage or {}

    def ready(self, orphans):
        return sum(job.poll() is None for job in self.jobs) < self.slots

    def start(self, config: Path, folder: Path, lock, orphans):
        number = len(self.jobs)
        process = start("train", config, "--quiet", sabotage=self._sabotage.get(number))
        self.jobs.append(ForkJob(process))
        return self.jobs[-1]

    def attach(self, info):
        return None


def plan(folder: Path, name: str = "study", **fields):
    """Plan the runs of a small experiment, to be kept below `folder`."""
    fields = {"axes": AXES, **fields}
    return plan_runs([load_experiment(experiment_file(folder, name, **fields))], Request(output=str(folder / "runs")))


def count_finishes(folder: Path) -> int:
    """Return how many times the run in a folder finished, according to its log."""
    return (folder / "train.log").read_text(encoding="utf-8").count("finished: ")


def train_uninterrupted(planned, output: Path) -> dict[str, Path]:
    """Train planned runs in this process, without interruption; return their folders by run name."""
    folders = {}
    for run in planned:
        config = RunConfig.load({**run.config.to_dict(), "output": str(output)})
        train(config, quiet=True)
        folders[run.name] = config.folder
    return folders


def longer_config(folder: Path, steps: int, checkpoint: int):
    """Return the config of a run with this many steps and a checkpoint after every `checkpoint` of them."""
    fields = tiny(folder, train={"max_steps": steps}, checkpoint={"every": checkpoint}, eval={"every": 100})
    return {key: value for key, value in fields.items() if key != "output"}
