"""Commands that train a run from a config or from options: train, finetune."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from . import completion
from .methods import read_method
from .options import RUNS, MethodName, ModelName, Overrides, QuietOption
from .terminal import echo, errors, quiet_libraries, repeat_command, unwritable_output

if TYPE_CHECKING:
    from ..config import RunConfig

_BERT = "bert-base-uncased"
# What a file of rows is called that may have labels.
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
# The options of `finetune` that set a field of the config, and which.
_FIELD_OF_OPTION = {"model": "model.name", "data": "data.path", "method": "method", "seed": "seed", "output": "output"}


def train(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG KEY=VALUE",
            help="A run's config, YAML or JSON, and overrides such as train.max_steps=100 method=oelm-freeze.",
            autocompletion=completion.settings,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="A folder that `oelm data prepare` wrote.")] = None,
    model: Annotated[str | None, ModelName] = None,
    method: Annotated[str | None, MethodName] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", "--output", help="Where runs are kept.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Train a run, or resume one that was interrupted. Under torchrun: on several GPUs.

    Without a config, --data or --model is enough: the rest is chosen from them, and printed.

    Exits with 75 if a signal stopped it after saving (the same command resumes it), and with 1 if it diverged.
    """
    with errors():
        from ..config import GENERATED, RunConfig
        from ..errors import ConfigError

        names, overrides = (words or [])[:1], (words or [])[1:]
        if names and "=" in names[0] and not Path(names[0]).exists():
            names, overrides = [], words or []
        _refuse_field_given_twice(ctx, overrides)
        given = {"data.path": data, "model.name": model, "output": output and str(output)}
        given["method"] = None if method is None else read_method(method)
        # JSON is YAML too, so that a path with a colon or a number for a name stays a string.
        options = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
        if names:
            _refuse_no_config(Path(names[0]))
            train_and_print(RunConfig.load(names[0], [*overrides, *options]), quiet)
        set_by_user = dict(override.partition("=")[::2] for override in overrides)
        task = set_by_user.get("task", set_by_user.get("task.name", ""))
        if task.startswith(GENERATED):  # it needs no data, and has a model of its own
            train_and_print(RunConfig.load({"experiment": task.replace(":", "-")}, [*overrides, *options]), quiet)
        if data is None and model is None:
            first = f"{overrides[0]}: the config file comes first" if overrides else "no config file"
            order = " ".join(["oelm train run.yaml", *overrides[:1]])
            raise ConfigError(
                f"{first}, as in {order}; without one, name data or a model, as in "
                "oelm train --data data/mine --model gpt:tiny"
            )
        _refuse_labelled(data, model, overrides)
        from .quick_run import describe, quick_config

        fields = {name: given[name] for name in ("method", "output") if given[name] is not None}
        config = quick_config(data, model, fields, overrides)
        if not quiet:
            echo(describe(config), err=True)
        train_and_print(config, quiet)


def train_and_exit(config: str) -> None:
    """Do what `oelm train CONFIG --quiet` does, then end this process with its exit code."""
    from ..config import RunConfig

    try:
        with unwritable_output(), errors():
            train_and_print(RunConfig.load(config), quiet=True)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def finetune(
    ctx: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="sst2, mnli, xnli, imdb, ag_news, folder, builtin:sentiment, builtin:inference, builtin:translation.",
            autocompletion=completion.tasks,
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[str, ModelName] = _BERT,
    method: Annotated[str, MethodName] = "baseline",
    data: Annotated[Path | None, typer.Option("--data", help="A folder of local files, instead of the Hub.")] = None,
    recipe: Annotated[
        Literal["equal", "reference"],
        typer.Option(help="equal: one learning rate for all methods; reference: the original study's rates."),
    ] = "equal",
    seed: Annotated[int, typer.Option(help="Seed of the head, the method and the order of the data.")] = 0,
    output: Annotated[Path, typer.Option("--out", "-o", "--output", help="Where runs are kept.")] = RUNS,
    quiet: QuietOption = False,
) -> None:
    """Fine-tune a model on a labelled task: 3 epochs of batches of 16, linear decay after 10 % warm-up.

    Give other settings as key=value, such as optimizer.learning_rate=5e-5 train.epochs=1 or task.text=review.
    """
    with errors():
        from ..config import LANGUAGE, MASKED, RunConfig
        from ..data.labelled.tasks import FOLDER, NAMES
        from ..errors import ConfigError
        from ..runs.published import reference_rate
        from .quick_run import experiment_name, folder_name

        _refuse_field_given_twice(ctx, overrides or [])
        if task not in NAMES and Path(task).exists():
            command = f"oelm finetune folder --data {task}" if Path(task).is_dir() else _finetune_command(Path(task))
            raise ConfigError(f"{task}: not a task but data of your own: {command}")
        # Data of one's own are told apart by the name of their folder.
        own = experiment_name(folder_name(str(data))) if task == FOLDER and data is not None else None
        fields: dict[str, Any] = {
            "experiment": own or task.replace(":", "-"),
            "task": {"name": task},
            "model": {"name": model},
            "method": read_method(method),
            "seed": seed,
            "output": str(output),
        }
        if data is not None:
            fields["data"] = {"path": str(data)}
        config = RunConfig.load(fields, overrides)
        if config.task.kind in (LANGUAGE, MASKED):
            raise ConfigError(f"oelm finetune: {task!r} learns from running text; use oelm train")
        if recipe == "reference":
            # The recipe's rate is a field of the config, so that an override can still set another.
            fields["optimizer"] = {"learning_rate": reference_rate(config.method)}
            config = RunConfig.load(fields, overrides)
        train_and_print(config, quiet)


def _refuse_field_given_twice(ctx: typer.Context, overrides: list[str]) -> None:
    """Raise if an override sets a field that an option on the command line sets too."""
    from ..errors import ConfigError

    sources = {option: ctx.get_parameter_source(option) for option in _FIELD_OF_OPTION}
    set_by_option = {
        _FIELD_OF_OPTION[option] for option, source in sources.items() if source and source.name == "COMMANDLINE"
    }
    for override in overrides:
        if override.partition("=")[0] in set_by_option:
            raise ConfigError(f"{override}: an option sets this field too; keep one of the two")


def _refuse_no_config(path: Path) -> None:
    """Raise if a folder, or a file of text or rows, stands where a config belongs; say what would take it."""
    from ..errors import ConfigError

    if (path / "config.json").is_file():
        raise ConfigError(f"{path}: a run's folder; to go on with the run: oelm train {path / 'config.json'}")
    if (path / "data.json").is_file():
        raise ConfigError(f"{path}: a data folder; to train on it: oelm train --data {path}")
    if path.is_file() and path.suffix not in (".yaml", ".yml", ".json"):
        labels = f"; to learn its labels: {_finetune_command(path)}" if path.suffix in _TABLES else ""
        raise ConfigError(
            f"{path}: not a config (.yaml or .json); to learn its text, prepare that first: "
            f"oelm data prepare {path} --train-bpe 8192 --out data/{path.stem}{labels}"
        )


def _finetune_command(table: Path) -> str:
    """Return the command that learns the labels of a table."""
    if table.stem == "train":
        return f"oelm finetune folder --data {table.parent}"
    return f"oelm finetune folder --data FOLDER, with that file in it as train{table.suffix}"


def _refuse_labelled(data: str | None, model: str | None, overrides: list[str]) -> None:
    """Raise if a run without a config is to learn labels; name the command that does."""
    from ..config import LANGUAGE, MASKED
    from ..errors import ConfigError

    options = "" if model is None else f" --model {model}"
    for override in overrides:
        name, _, task = override.partition("=")
        if name in ("task", "task.name") and task not in (LANGUAGE, MASKED):
            options = options + ("" if data is None else f" --data {data}")
            raise ConfigError(f"{override}: without a config file, use: oelm finetune {task}{options}")
    folder = Path(data or "")
    if data is None or (folder / "data.json").exists():
        return
    tables = sorted(path for path in folder.glob("train.*") if path.suffix in _TABLES)
    if tables:
        raise ConfigError(
            f"{data}: not a prepared data folder; to learn the labels of {tables[0].name}: "
            f"oelm finetune folder --data {data}{options}; to learn its text, prepare that first: "
            f"oelm data prepare {tables[0]} --train-bpe 8192 --out FOLDER"
        )


def train_and_print(config: RunConfig, quiet: bool) -> NoReturn:
    """Train a run, with `quiet` print only its main figures as JSON, and exit with the run's exit code."""
    from ..training.engine import Stopped
    from ..training.engine import train as train_run
    from ..training.result import exit_code

    quiet_libraries()
    try:
        result = train_run(config, quiet)
    except Stopped as stopped:
        if not quiet and os.environ.get("RANK", "0") == "0":
            again = "the same command" if "RANK" in os.environ else repeat_command()
            echo(f"to go on from there: {again}", err=True)
        raise typer.Exit(stopped.code) from None
    if result and quiet:
        perplexities = ("perplexity", "masked_perplexity")
        names = ("val_loss", *perplexities, "accuracy", "best_accuracy", "exact_match", "steps", "tokens")
        figures = {key: result[key] for key in names if key in result}
        splits = {
            name: split[metric]
            for name, split in result["evaluations"].items()
            for metric in ("accuracy", *perplexities)
            if metric in split
        }
        echo(json.dumps(figures | ({"evaluations": splits} if splits else {})))
    raise typer.Exit(exit_code(result))
