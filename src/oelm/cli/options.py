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
HostOption = Annotated[str | None, typer.Option(help="Another machine, by ssh: USER@MACHINE.")]
HostCommandOption = Annotated[
    str, typer.Option(envvar="OELM_HOST_COMMAND", help="With --host: the path of oelm there.")
]
HostFolderOption = Annotated[
    str, typer.Option(envvar="OELM_HOST_FOLDER", help="With --host: the folder to work in there. Default: home.")
]
# The parameters that say where a command runs; the command there does not get them.
HOST_PARAMETERS = ("host", "host_command", "host_folder")
