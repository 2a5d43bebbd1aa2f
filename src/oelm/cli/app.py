"""The `oelm` command: every group of commands put together.

Commands import what they need when they run, so that `oelm --help` is instant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..base.plugin import VARIABLE, load_plugin
from . import bench, data, experiments, look, manage, methods, probe, report, train, use
from .flags import Command, CommandGroup
from .terminal import echo, errors, unwritable_output

_HOME = re.compile(r"(--[a-z-]+=)(~.*)", re.DOTALL)
# The commands that take settings as KEY=VALUE.
_WITH_SETTINGS = {"train", "finetune", "run", "matrix"}


class _Root(CommandGroup):
    """The group of all commands: an option that a command has not got is refused with how to say what it means."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words with a ~ behind an option's = written out, as the shell does with a ~ that begins a word."""
        rest: list[str] = super().parse_args(ctx, [_HOME.sub(_with_home, word) for word in args])
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            option = getattr(error, "option_name", None)
            hint = None if option is None else _instead_of(option, ctx.invoked_subcommand)
            if hint is not None:
                error.message, error.possibilities = hint, []  # type: ignore[attr-defined]
            raise


def _with_home(match: re.Match[str]) -> str:
    return match[1] + os.path.expanduser(match[2])


def _instead_of(option: str, command: str | None) -> str | None:
    """Return what to type instead of an option that a command has not got, or None where that is not known."""
    if option == "--plugin":
        return f"--plugin stands before the command: oelm --plugin FILE {command or 'COMMAND'} ..."
    from ..base.strict import fields_called
    from ..config import RunConfig

    fields = fields_called(option.lstrip("-").replace("-", "_"), RunConfig) if command in _WITH_SETTINGS else []
    settings = " or ".join(f"{field}=VALUE" for field in fields)
    return f"No such option: {option}; a setting is given as {settings}" if settings else None


app = typer.Typer(
    name="oelm",
    cls=_Root,
    help="Frozen and orthogonal attention for Transformers: apply methods, verify them, train, and measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The groups of `oelm --help`, in its order: each command by its name, with examples for its own help.
_COMMANDS: dict[str, dict[str, tuple[Callable[..., Any], list[str]]]] = {
    "Apply a method": {
        "methods": (methods.methods, ["oelm methods"]),
        "families": (methods.families, ["oelm families", "oelm families --guess path/to/model"]),
        "diagnose": (
            methods.diagnose,
            [
                "oelm diagnose random:bert --method oelm-freeze",
                "oelm diagnose path/to/model --method method.yaml --steps 10",
            ],
        ),
        "export": (methods.export, ["oelm export runs/stories/oelm-freeze/seed-0 plain"]),
    },
    "Train a model and use it": {
        "train": (
            train.train,
            [
                "oelm train --data data/mine --model gpt:tiny method=identity-key",
                "oelm train run.yaml method=identity-key seed=1",
                "torchrun --nproc-per-node 2 -m oelm train run.yaml",
            ],
        ),
        "finetune": (
            train.finetune,
            [
                "oelm finetune sst2 --model bert-base-uncased --method oelm-freeze",
                "oelm finetune folder --data reviews/ task.text=review task.label=stars",
            ],
        ),
        "eval": (
            use.evaluate,
            [
                "oelm eval runs/sst2/oelm-freeze/seed-0",
                "oelm eval runs/stories/oelm-freeze/seed-0 --tasks arc_easy,my-tasks",
            ],
        ),
        "predict": (
            use.predict,
            [
                'oelm predict runs/sst2/oelm-freeze/seed-0 "A gripping, unusual film."',
                "oelm predict runs/sst2/oelm-freeze/seed-0 --file new.csv --out rated.csv",
            ],
        ),
        "generate": (
            use.generate,
            [
                'oelm generate runs/mine-gpt-tiny/oelm-freeze/seed-0 --prompt "Once upon"',
                "oelm generate plain --tokens 200 --temperature 0.7",
            ],
        ),
    },
    "Run experiments": {
        "demo": (experiments.demo, ["oelm demo", "oelm demo --minutes 1 --out quick"]),
        "experiments": (experiments.experiments, ["oelm experiments", "oelm experiments GPT-02"]),
        "run": (
            experiments.run,
            ["oelm run GPT-02 --scale smoke", "oelm run mine.yaml --seed 1 train.max_steps=500"],
        ),
        "matrix": (
            experiments.matrix,
            ["oelm matrix ABC-tinystories --seeds 3", "oelm matrix mine.yaml --seeds 3 --lr-grid 3e-4,1e-3 --gpus 0,1"],
        ),
        "stop": (manage.stop, ["oelm stop GPT-02/oelm-freeze/seed-0", "oelm stop --all"]),
        "clean": (manage.clean, ["oelm clean runs"]),
    },
    "Look at results": {
        "status": (manage.status, ["oelm status", "oelm status runs --json"]),
        "logs": (manage.logs, ["oelm logs GPT-02/oelm-freeze/seed-0 --follow"]),
        "report": (report.report, ["oelm report runs --out report", "oelm report runs --out report --lang zh"]),
        "compare": (report.compare, ["oelm compare runs/a/oelm-freeze/seed-0 runs/a/baseline/seed-0"]),
        "bench": (
            bench.bench,
            [
                "oelm bench baseline oelm-freeze identity-key --model gpt:small",
                "oelm bench --decode --batch-size 1,8 --sequence-length 1024",
            ],
        ),
        "probe": (
            probe.probe,
            [
                "oelm probe runs/mine-gpt-tiny/baseline/seed-0",
                "oelm probe --train multi-head latent-frozen --task recall",
            ],
        ),
        "look": (
            look.look,
            [
                'oelm look runs/mine-gpt-tiny/baseline/seed-0 --text "Once upon a time"',
                'oelm look path/to/t5 --text "translate: a house" --target "ein Haus"',
                "oelm look runs/a/baseline/seed-0 runs/a/oelm-freeze/seed-0 --text-file story.txt --context 64",
            ],
        ),
        "archive": (manage.archive, ["oelm archive runs --out results/mine"]),
    },
}

app.add_typer(data.data_app, name="data", rich_help_panel="Train a model and use it")
for _panel, _commands in _COMMANDS.items():
    for _name, (_command, _examples) in _commands.items():
        _epilog = "\n\n".join(["Examples:", *_examples])
        app.command(_name, cls=Command, rich_help_panel=_panel, epilog=_epilog)(_command)


def main() -> None:
    """Run the command line; the entry point of the `oelm` command."""
    with unwritable_output():
        app()


def _version(requested: bool) -> None:
    if requested:
        echo(f"oelm {__version__}")
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
