"""The `oelm` command: every group of commands put together.

Commands import what they need when they run, so that `oelm --help` is instant.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..base.plugin import VARIABLE, load_plugin
from . import bench, data, experiments, manage, methods, report, train, use
from .terminal import errors

app = typer.Typer(
    name="oelm",
    help="Frozen and orthogonal attention for Transformers: apply methods, verify them, train, and measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The groups of `oelm --help`, in its order.
_APPLY, _TRAIN, _RUN, _LOOK = "Apply a method", "Train a model and use it", "Run experiments", "Look at results"


def examples(*lines: str) -> str:
    """Return command lines as the end of a help text, each on a line of its own."""
    return "\n\n".join(["Examples:", *lines])


def _add(panel: str, name: str, command: Callable[..., Any], *lines: str) -> None:
    app.command(name, rich_help_panel=panel, epilog=examples(*lines))(command)


_add(_APPLY, "methods", methods.methods, "oelm methods")
_add(_APPLY, "families", methods.families, "oelm families")
_add(
    *(_APPLY, "diagnose", methods.diagnose),
    "oelm diagnose random:bert --method oelm-freeze",
    "oelm diagnose path/to/model --method method.yaml --steps 10",
)
_add(_APPLY, "export", methods.export, "oelm export runs/stories/oelm-freeze/seed-0 plain")

app.add_typer(data.data_app, name="data", rich_help_panel=_TRAIN)
_add(
    *(_TRAIN, "train", train.train),
    "oelm train --data data/mine --model gpt:tiny method=oelm-freeze",
    "oelm train run.yaml method=identity-key seed=1",
    "torchrun --nproc-per-node 2 -m oelm train run.yaml",
)
_add(
    *(_TRAIN, "finetune", train.finetune),
    "oelm finetune sst2 --model bert-base-uncased --method oelm-freeze",
    "oelm finetune folder --data reviews/ task.text=review task.label=stars",
)
_add(_TRAIN, "eval", use.evaluate, "oelm eval runs/sst2/oelm-freeze/seed-0")
_add(
    *(_TRAIN, "predict", use.predict),
    'oelm predict runs/sst2/oelm-freeze/seed-0 "A gripping, unusual film."',
    "oelm predict runs/sst2/oelm-freeze/seed-0 --file new.csv --out rated.csv",
)
_add(
    *(_TRAIN, "generate", use.generate),
    'oelm generate runs/mine-gpt-tiny/oelm-freeze/seed-0 --prompt "Once upon"',
    "oelm generate plain --tokens 200 --temperature 0.7",
)

_add(_RUN, "demo", experiments.demo, "oelm demo", "oelm demo --minutes 1 --out quick")
_add(_RUN, "experiments", experiments.experiments, "oelm experiments", "oelm experiments GPT-02")
_add(_RUN, "run", experiments.run, "oelm run GPT-02 --scale smoke", "oelm run mine.yaml --seed 1 train.max_steps=500")
_add(
    *(_RUN, "matrix", experiments.matrix),
    "oelm matrix GPT-01 GPT-02 --seeds 3",
    "oelm matrix mine.yaml --seeds 3 --lr-grid 3e-4,1e-3 --gpus 0,1",
)
_add(_RUN, "stop", manage.stop, "oelm stop GPT-02/oelm-freeze/seed-0", "oelm stop --all")
_add(_RUN, "clean", manage.clean, "oelm clean runs")

_add(_LOOK, "status", manage.status, "oelm status", "oelm status runs --json")
_add(_LOOK, "logs", manage.logs, "oelm logs GPT-02/oelm-freeze/seed-0 --follow")
_add(_LOOK, "report", report.report, "oelm report runs --out report", "oelm report runs --out report --lang zh")
_add(_LOOK, "compare", report.compare, "oelm compare runs/a/oelm-freeze/seed-0 runs/a/baseline/seed-0")
_add(
    *(_LOOK, "bench", bench.bench),
    "oelm bench baseline oelm-freeze identity-key --model gpt:small",
    "oelm bench --decode --batch-size 1,8 --sequence-length 1024",
)
_add(_LOOK, "archive", manage.archive, "oelm archive runs --out results/mine")


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
    plugin: Annotated[
        Path | None,
        typer.Option(
            envvar=VARIABLE, help="A Python file of yours to run first: it may register a family or a model class."
        ),
    ] = None,
) -> None:
    if plugin is not None:
        with errors():
            load_plugin(plugin)
