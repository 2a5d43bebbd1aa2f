"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import completion
from .completion import RUNS as RUNS

MethodName: Any = typer.Option("--method", "-m", help="A preset or a method file.", autocompletion=completion.presets)
ModelName: Any = typer.Option(
    "--model", help="gpt:SIZE, random:FAMILY, a folder or a Hub name.", autocompletion=completion.models
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The folder that holds the runs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors and the result.")]
RunArgument = Annotated[
    Path,
    typer.Argument(help="A run's folder: runs/<experiment>/<method>/seed-<n>.", autocompletion=completion.runs),
]
RunsArgument = Annotated[Path, typer.Argument(help="The folder that holds the runs.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value overrides, such as train.max_steps=100 method=oelm-freeze.", autocompletion=completion.settings
    ),
]
