"""The commands about runs and data: train, finetune, eval, predict, generate, bench, data prepare. Thin; see `cli`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import errors, progress_bar, quiet_libraries

data_app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value overrides, such as train.max_steps=100 method=oelm-freeze.")
]
_BERT = "bert-base-uncased"
_BENCH_ARMS = ["baseline", "oelm-freeze", "identity-key"]


class Recipe(StrEnum):
    """Which learning rate a fine-tuning run gets unless it is given one."""

    equal = "equal"
    reference = "reference"


class BenchTask(StrEnum):
    """Which steps are timed."""

    language = "language"
    classification = "classification"


RunArgument = Annotated[Path, typer.Argument(help="A run's folder: runs/<experiment>/<method>/seed-<n>.")]


def train(
    config: Annotated[Path, typer.Argument(help="A run's config: YAML or JSON.")],
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors and the result.")] = False,
) -> None:
    """Train a run, or resume one that was interrupted. Under torchrun: on several GPUs.

    Exits with 75 if a signal stopped it after saving (the same command resumes it), and with 1 if it diverged.
    """
    with errors():
        from ..config import RunConfig
        from ..errors import ConfigError

        if "=" in str(config) and not config.exists():
            raise ConfigError(f"{config}: the config file comes first, as in oelm train run.yaml {config}")
        _train(RunConfig.load(config, overrides), quiet)


def finetune(
    ctx: typer.Context,
    task: Annotated[
        str, typer.Argument(help="sst2, mnli, xnli, imdb, ag_news, folder, builtin:sentiment or builtin:inference.")
    ],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option("--model", help="A folder, a Hub name, gpt:SIZE or random:FAMILY.")] = _BERT,
    method: Annotated[str, typer.Option("--method", "-m", help="A preset or a method file.")] = "baseline",
    data: Annotated[Path | None, typer.Option("--data", help="A folder of local files, instead of the Hub.")] = None,
    recipe: Annotated[
        Recipe, typer.Option(help="equal: one learning rate for all methods; reference: the original study's rates.")
    ] = Recipe.equal,
    seed: Annotated[int, typer.Option(help="Seed of the head, the method and the order of the data.")] = 0,
    output: Annotated[Path, typer.Option("--out", "-o", "--output", help="Where runs are kept.")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors and the result.")] = False,
) -> None:
    """Fine-tune a model on a labelled task: 3 epochs of batches of 16, linear decay after 10 % warm-up.

    Give other settings as key=value, such as optimizer.learning_rate=5e-5 train.epochs=1 or task.text=review.
    """
    with errors():
        from ..config import RunConfig
        from ..errors import ConfigError
        from ..runs.recipes import reference_rate

        fields_of = {"method": "method", "model": "model.name", "data": "data.path", "seed": "seed", "output": "output"}
        given = {field for option, field in fields_of.items() if _is_given(ctx, option)}
        for one in overrides or []:
            if one.partition("=")[0] in given:
                raise ConfigError(f"{one}: an option gives that too; keep one of the two")
        fields: dict[str, Any] = {
            "experiment": task.replace(":", "-"),
            "task": {"name": task},
            "model": {"name": model},
            "method": written_method(method),
            "seed": seed,
            "output": str(output),
        }
        if data is not None:
            fields["data"] = {"path": str(data)}
        config = RunConfig.load(fields, overrides)
        if config.task.kind == "language":
            raise ConfigError("oelm finetune: 'language' learns from running text; use oelm train")
        if recipe is Recipe.reference:  # below the overrides, which may set another rate
            fields["optimizer"] = {"learning_rate": reference_rate(config.method)}
            config = RunConfig.load(fields, overrides)
        _train(config, quiet)


def _is_given(ctx: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line, and is not its default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def written_method(value: str) -> Any:
    """A method as the command line has it: a preset's name, or what a file holds."""
    from ..base.files import parse_yaml
    from ..errors import MethodError

    path = Path(value)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return value
    if not path.is_file():
        raise MethodError(f"{value}: no such file")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MethodError(f"{value}: not YAML or JSON ({error})") from None


def _train(config: Any, quiet: bool) -> None:
    from ..training.engine import Stopped
    from ..training.engine import train as run
    from ..training.result import exit_code

    quiet_libraries()
    try:
        result = run(config, quiet)
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from None
    if result and quiet:
        shown = ("val_loss", "perplexity", "accuracy", "best_accuracy", "exact_match", "steps", "tokens")
        typer.echo(json.dumps({key: result[key] for key in shown if key in result}))
    raise typer.Exit(exit_code(result))


def predict(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="The text to classify, or the source text to answer.")],
    pair: Annotated[str | None, typer.Argument(help="The second text, if the task has two.")] = None,
) -> None:
    """Run a fine-tuned model on one text, or one pair of texts; prints the answer as JSON."""
    with errors():
        from ..evaluation.trained import predict_one

        quiet_libraries()
        typer.echo(json.dumps(predict_one(run, text, pair), indent=2, ensure_ascii=False))


def evaluate(
    run: RunArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    last: Annotated[bool, typer.Option("--last", help="Use the last checkpoint, not the best model.")] = False,
) -> None:
    """Evaluate a run's model again, on all of its validation data and any other labelled split; prints JSON."""
    with errors():
        from ..evaluation.trained import evaluate_run

        quiet_libraries()
        typer.echo(json.dumps(evaluate_run(run, batch_size, last), indent=2))


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many tokens to add. Default: 100, or what fits.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Generate text from a prompt with a trained model."""
    with errors():
        from ..evaluation.trained import generate_text

        quiet_libraries()
        typer.echo(generate_text(run, prompt, tokens, temperature, top_k, seed))


def bench(
    arms: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Presets to compare; PRESET@N uses batches of N. Default: {', '.join(_BENCH_ARMS)}. Also "
            "key=value settings of model, optimizer and train, such as train.precision=bfloat16 or "
            "model.fields.num_hidden_layers=12."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="gpt:SIZE, random:FAMILY, a folder or a Hub name.")] = "gpt:tiny",
    task: Annotated[
        BenchTask | None,
        typer.Option(help="Default: classification (3 classes) for an encoder, else language."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=2, help="Default: 8192 for gpt:SIZE, else the model's own."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, with the arms interleaved in each.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each arm per round.")] = 10,
    compile_model: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Default: as in training (language on a GPU); off with --decode."),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Time generation: --steps tokens after --sequence-length others; show cache."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time whole optimiser steps of several methods side by side, on random tokens, as ratios to the first."""
    with errors():
        from ..base.files import to_json
        from ..bench import decoding
        from ..bench.steps import Kind, benchmark, plan_arms, summarise
        from .tables import bench_table, decoding_table, render_bench

        quiet_libraries()
        names = [one for one in arms or [] if "=" not in one] or _BENCH_ARMS
        overrides = [one for one in arms or [] if "=" in one]
        kind: Kind | None = None
        if task is not None:
            kind = "classification" if task is BenchTask.classification else "language"
        if decode:
            room = decoding.room_for(sequence_length, rounds, steps)
            planned = plan_arms(names, model, batch_size, room, vocab_size, kind, compile_model, overrides)
            with progress_bar() as tell:
                written = decoding.measure(planned, sequence_length, rounds, steps, tell=tell)
            rows = decoding.summarise(written, names[0])
            typer.echo(to_json(rows, indent=2) if as_json else render_bench(decoding_table(rows), names[0]))
            return
        planned = plan_arms(names, model, batch_size, sequence_length, vocab_size, kind, compile_model, overrides)
        with progress_bar() as tell:
            timed = benchmark(planned, rounds, steps, tell=tell)
        rows = summarise(timed, names[0])
        typer.echo(to_json(rows, indent=2) if as_json else render_bench(bench_table(rows), names[0]))
        for row in rows:
            if row["warning"]:
                typer.echo(f"warning: {row['warning']}", err=True)


@data_app.callback()
def _data() -> None:
    pass


@data_app.command("prepare")
def prepare_data(
    source: Annotated[str, typer.Argument(help="A file, folder or Hub dataset, such as tinystories or openwebtext.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    tokenizer: Annotated[str | None, typer.Option(help="A Hugging Face tokenizer's name or folder.")] = None,
    train_bpe: Annotated[int | None, typer.Option(min=257, help="Train a BPE of this size instead.")] = None,
    val: Annotated[str | None, typer.Option(help="A separate validation file.")] = None,
    val_fraction: Annotated[float, typer.Option(help="Share of the documents to hold out without --val.")] = 0.01,
    text_field: Annotated[str | None, typer.Option(help="The column or key of the text, if not detected.")] = None,
    description: Annotated[str | None, typer.Option(help="What this text is; stored in all records from it.")] = None,
) -> None:
    """Turn text into token files, from text, JSONL, CSV or Parquet (also compressed) or a Hub dataset."""
    with errors():
        from ..data.corpus.prepare import prepare
        from ..data.corpus.tokens import HEADER

        quiet_libraries()
        there = (out / HEADER).is_file()  # then it is this very dataset, or refused
        data = prepare(
            source,
            out,
            tokenizer=tokenizer,
            train_bpe=train_bpe,
            val=val,
            val_fraction=val_fraction,
            text_field=text_field,
            description=description,
            progress=True,
        )
        held = f" and {len(data.val):,} for validation" if data.val else ""
        fewer = train_bpe is not None and data.vocab_size < train_bpe
        why = f" (not {train_bpe:,}: the text has no more pairs to merge)" if fewer else ""
        counts = f"{len(data.train):,} tokens for training{held}, vocabulary {data.vocab_size:,}{why}"
        typer.echo(f"{out}: holds this data already, whole: {counts}" if there else f"wrote {out}: {counts}")
        if data.overlap:
            typer.echo(f"warning: {data.overlap}", err=True)
