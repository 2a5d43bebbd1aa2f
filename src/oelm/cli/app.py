"""The `oelm` command: every group of commands put together.

Commands import what they need when they run, so that `oelm --help` is instant.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import bench, data, experiments, manage, methods, report, train, use

app = typer.Typer(
    name="oelm",
    help="Frozen and orthogonal attention for Transformers: apply methods, verify them, train, and measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("train")(train.train)
app.command("finetune")(train.finetune)
app.command("eval")(use.evaluate)
app.command("predict")(use.predict)
app.command("generate")(use.generate)
app.command("bench")(bench.bench)
app.add_typer(data.data_app, name="data")
app.command("report")(report.report)
app.command("compare")(report.compare)
app.command("experiments")(experiments.experiments)
app.command("run")(experiments.run)
app.command("matrix")(experiments.matrix)
app.command("status")(manage.status)
app.command("logs")(manage.logs)
app.command("stop")(manage.stop)
app.command("clean")(manage.clean)
app.command("archive")(manage.archive)
app.command("demo")(experiments.demo)
app.command("diagnose")(methods.diagnose)
app.command("methods")(methods.methods)
app.command("families")(methods.families)
app.command("export")(methods.export)


def main() -> None:
    """Run the command line; the entry point of the `oelm` command."""
    app()


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"oelm {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
