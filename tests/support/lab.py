"""What the tests of the lab share: small experiments, the lab's commands in real processes, and fast jobs.

`python -m tests.support.lab COMMAND ...` is the lab's command line alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.testing import CliRunner

from oelm.cli import experiments as commands

ROOT = Path(__file__).parents[2]


def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    commands.register(made)
    return made


def lab(*arguments: object) -> Any:
    """A command of the lab in this process: what it printed and its exit code."""
    return CliRunner().invoke(app(), [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """What a command that must refuse says, on one line or a few, without a traceback."""
    result = lab(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stderr.startswith("oelm: ")
    return str(result.stderr)


def started(*arguments: object) -> subprocess.Popen[str]:
    """A command of the lab in a process of its own, its output in one stream."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.support.lab", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def wait_for(happened: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"did not happen in {seconds} s"
        time.sleep(0.01)


def experiment_file(place: Path, name: str = "study", **fields: Any) -> Path:
    """An experiment of the user's own, on a run that takes a second."""
    from tests.support.training import tiny

    config = {key: value for key, value in tiny(place).items() if key != "output"}
    content = {"id": name, "config": config, **fields}
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


if __name__ == "__main__":
    app()()
