"""The command line: parse, call, print. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from . import lab as lab_commands
from . import report as report_commands
from . import runs as commands
from .terminal import errors, quiet_libraries

app = typer.Typer(
    name="oelm",
    help="Frozen and orthogonal attention for Transformers: apply methods, verify them, train, and measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("train")(commands.train)
app.command("finetune")(commands.finetune)
app.command("eval")(commands.evaluate)
app.command("predict")(commands.predict)
app.command("generate")(commands.generate)
app.command("bench")(commands.bench)
app.add_typer(commands.data_app, name="data")
app.command("report")(report_commands.report)
app.command("compare")(report_commands.compare)
lab_commands.register(app)

SeedOption = Annotated[int, typer.Option(help="Seed of random matrices and of the sample batch.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line; the entry point of the `oelm` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oelm {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder, a Hub name, random:NAME for a small random one (random:bert), a run's config file "
            "or a run's folder."
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="A preset or a method file; without it the model is tested as it is."),
    ] = None,
    seed: SeedOption = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to take.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Apply a method, take real optimiser steps, and show which tensors changed.

    Exits with 1 if a frozen tensor changed or a trainable one did not.
    """
    with errors():
        from ..method.spec import Method

        chosen = None if method is None else Method.load(commands.written_method(method))
        from ..evaluation.trained import find_model
        from ..method.diagnose import diagnose as run

        quiet_libraries()
        found, own = find_model(model, seed)
        result = run(found, chosen or own, seed, steps)
        if as_json:
            typer.echo(json.dumps(result.to_dict(), indent=2))
        else:
            _print_diagnosis(result, steps)
    if not result.healthy:
        raise typer.Exit(1)


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the presets: what each sets and freezes.

    A preset is a start: a method in a YAML file names one and changes its fields.

    So oelm-freeze with an adapter on q and k has a trained LoRA beside frozen Q and K; docs/methods.md shows how.
    """
    from ..method.spec import ABOUT, PRESETS

    if as_json:
        typer.echo(json.dumps({name: preset.model_dump(mode="json") for name, preset in PRESETS.items()}, indent=2))
        return
    width = max(len(name) for name in PRESETS)
    for name in PRESETS:
        typer.echo(f"{name:<{width}}  {ABOUT[name]}")


@app.command()
def families() -> None:
    """List the supported model types."""
    from ..method.families import known_types

    typer.echo("\n".join(known_types()))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A run's folder, or one that save_pretrained wrote after oelm.apply.")],
    out: Annotated[Path, typer.Argument(help="The folder to write the plain transformers checkpoint to.")],
) -> None:
    """Write a plain transformers checkpoint with the same outputs, which loads without oelm."""
    with errors():
        from ..errors import CheckpointError

        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out} exists and is not empty: nothing was written")
        from ..base.files import empty_folder, new_folder
        from ..evaluation.trained import is_run, load_named, save_tokenizer_of
        from ..models.checkpoint import export as write
        from ..models.checkpoint import load

        quiet_libraries()
        model, which = load_named(Path(source)) if is_run(Path(source)) else (load(source), "")
        # Whole or not at all; a folder that is there may be a mount, which nothing can take the place of.
        with empty_folder(out) if out.is_dir() else new_folder(out) as folder:
            write(model, folder)
            save_tokenizer_of(Path(source), folder)
        typer.echo(f"wrote {out}: {which}" if which else f"wrote {out}")


def _print_diagnosis(result: Any, steps: int) -> None:
    typer.echo(str(result.report))
    losses = ", ".join(f"{loss:.4f}" for loss in result.losses)
    typer.echo(f"\n{steps} AdamW steps with weight decay on a built-in batch: loss {losses}")
    typer.echo(f"tensors that changed: {len(result.moved)}; {result.verification}")
    for title, names in (
        ("FROZEN BUT MOVED", result.frozen_but_moved),
        ("TRAINABLE BUT DID NOT MOVE", result.trainable_but_still),
    ):
        for name in names:
            typer.secho(f"{title}: {name}", fg="red")
    verdict = "no frozen tensor changed, every trainable one did" if result.healthy else "not as it should be"
    typer.secho(verdict, fg="green" if result.healthy else "red")
