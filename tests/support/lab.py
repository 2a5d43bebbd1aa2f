"""Helpers for tests of the lab: small experiments, and the `oelm` command in this process or in its own."""

from __future__ import annotations

import os
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
from oelm.lab.matrix import MatrixEvent

ROOT = Path(__file__).parents[2]


def lab(*arguments: object) -> Any:
    """Run an `oelm` command in this process; return its output and exit code."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """Run a command that must exit with code 2; return what it prints on stderr."""
    result = lab(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stderr.startswith("oelm: ")
    return str(result.stderr)


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start an `oelm` command in its own process, with stdout and stderr in one stream."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def into(lines: list[str]) -> Callable[[MatrixEvent], None]:
    """Return a function that appends the line of a matrix's event to a list."""
    return lambda event: lines.append(event_line(event))


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"did not happen in {seconds} s"
        time.sleep(0.01)


def experiment_file(folder: Path, name: str = "study", **fields: Any) -> Path:
    """Write the file of an experiment whose runs take a second."""
    from tests.support.training import tiny

    config = {key: value for key, value in tiny(folder).items() if key != "output"}
    content = {"id": name, "config": config, **fields}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file
