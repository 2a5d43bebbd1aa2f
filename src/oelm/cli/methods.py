"""Commands about methods and models: methods, families, diagnose, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completion
from .options import JsonOption
from .terminal import echo, errors, fold_lines, listing, quiet_libraries, screen_width

if TYPE_CHECKING:
    from ..method.diagnose import Diagnosis


def methods(as_json: JsonOption = False) -> None:
    """List the presets: what each sets and freezes.

    A preset is a start: a method in a YAML file names one and changes its fields.

    For example, oelm-freeze with an adapter on q and k trains a LoRA beside frozen Q and K: see docs/methods.md.
    """
    from ..method.presets import ABOUT
    from ..method.spec import PRESETS

    if as_json:
        echo(json.dumps({name: preset.model_dump(mode="json") for name, preset in PRESETS.items()}, indent=2))
        return
    echo("\n".join(listing((name, ABOUT[name]) for name in PRESETS)))


def families(
    guess: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Suggest the call that registers this model's type: a folder, a Hub name or a config.json.",
        ),
    ] = None,
) -> None:
    """List the supported model types, or suggest how to register another.

    A suggestion is read off the names of the model's modules. Only its config is loaded, not its weights.
    """
    from ..method.families import known_types

    if guess is None:
        echo("\n".join(known_types()))
        return
    with errors():
        from ..method.guess import guess_layout
        from ..models.load import build_outline

        quiet_libraries()
        model = build_outline(guess)
        if model.config.model_type in known_types():
            echo(f"{model.config.model_type!r} is a supported model type: there is nothing to register")
        else:
            width = screen_width()
            text = str(guess_layout(model))
            echo(text if width is None else fold_lines(text, width))


def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder, a Hub name, random:NAME for a small random one (random:bert), a run's config file "
            "or a run's folder.",
            autocompletion=completion.models,
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="A preset or a method file; without it the model is tested as it is.",
            autocompletion=completion.presets,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random matrices and of the sample batch.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to take.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Apply a method, take real optimiser steps, and show which tensors changed.

    Exits with 1 if a frozen tensor changed or a trainable one did not.
    """
    with errors():
        from ..method.spec import Method

        # The method is checked before the model, which takes seconds to load.
        chosen_method = None if method is None else Method.load(read_method(method))
        from ..evaluation.load import find_model
        from ..method.diagnose import diagnose as run_diagnosis

        quiet_libraries()
        loaded_model, recorded_method = find_model(model, seed)
        diagnosis = run_diagnosis(loaded_model, chosen_method or recorded_method, seed, steps)
        if as_json:
            echo(json.dumps(diagnosis.to_dict(), indent=2))
        else:
            _print_diagnosis(diagnosis, steps)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A run's folder, or one that save_pretrained wrote after oelm.apply.", autocompletion=completion.runs
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write the plain transformers checkpoint to.")],
) -> None:
    """Write a plain transformers checkpoint with the same outputs and a model card; it loads without oelm."""
    with errors():
        from ..base.files import filled_folder, new_folder, undo_filling
        from ..errors import CheckpointError
        from ..lab.status import refuse_folder_of_runs

        refuse_folder_of_runs(Path(source))
        if out.is_dir():
            undo_filling(out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out} exists and is not empty: nothing was written")
        from ..evaluation.load import load_run_with_label, save_tokenizer
        from ..evaluation.training_facts import training_facts
        from ..models.export import export as export_model
        from ..models.load import load
        from ..runs.environment import is_run

        quiet_libraries()
        run = Path(source) if is_run(Path(source)) else None
        model, checkpoint = load_run_with_label(run) if run is not None else (load(source), "")
        training = training_facts(run) if run is not None else None
        # A new folder is renamed into place once it is complete. An existing empty one is filled where it is: it may
        # be a mount, which cannot be renamed over.
        with filled_folder(out) if out.is_dir() else new_folder(out) as folder:
            export_model(model, folder, training=training)
            save_tokenizer(Path(source), folder)
        echo(f"wrote {out}: {checkpoint}" if checkpoint else f"wrote {out}")


def read_method(value: str) -> Any:
    """Return a method as given on the command line: a preset's name, a mapping, or a YAML or JSON file."""
    from ..base.yaml_text import parse_yaml
    from ..errors import MethodError

    path = Path(value)
    written_out = value.lstrip().startswith("{")
    if not written_out and path.suffix not in (".yaml", ".yml", ".json"):
        return value
    if not written_out and not path.is_file():
        raise MethodError(f"{value}: no such file")
    try:
        return parse_yaml(value if written_out else path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MethodError(f"{value}: not YAML or JSON ({error})") from None


def _print_diagnosis(diagnosis: Diagnosis, steps: int) -> None:
    echo(str(diagnosis.report))
    losses = ", ".join(f"{loss:.4f}" for loss in diagnosis.losses)
    echo(f"\n{steps} AdamW steps with weight decay on a built-in batch: loss {losses}")
    echo(f"tensors that changed: {len(diagnosis.moved)}\n{diagnosis.verification}")
    for title, names in (
        ("FROZEN BUT MOVED", diagnosis.frozen_but_moved),
        ("TRAINABLE BUT DID NOT MOVE", diagnosis.trainable_but_still),
    ):
        for name in names:
            echo(f"{title}: {name}", fg="red")
    broken = "the method is broken: a frozen tensor changed, or a trainable one did not"
    verdict = "no frozen tensor changed, every trainable one did" if diagnosis.healthy else broken
    echo(verdict, fg="green" if diagnosis.healthy else "red")
