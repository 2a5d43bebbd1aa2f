"""The command bench: measure the speed of several methods and forms of attention side by side."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..bench.forms import DEFAULT_FORMS, FORMS
from ..errors import ConfigError
from . import completion
from .options import JsonOption, ModelName
from .terminal import echo, errors, listing, progress_bar, quiet_libraries

if TYPE_CHECKING:
    from ..runs.schema import BenchRows

_DEFAULT_ARMS = ("baseline", "oelm-freeze", "identity-key")


def bench(
    arms: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets (see `oelm methods`) and, on gpt:SIZE, forms of attention (see --forms); NAME@N uses batches "
            f"of N. Default: {', '.join(_DEFAULT_ARMS)}. With --decode on gpt:SIZE: {', '.join(DEFAULT_FORMS)}. A name "
            "that is both a form and a preset is the form on gpt:SIZE. Also key=value settings of model, optimizer and "
            "train, such as train.precision=bfloat16 or model.fields.num_hidden_layers=12.",
            autocompletion=completion.presets,
        ),
    ] = None,
    model: Annotated[str, ModelName] = "gpt:tiny",
    task: Annotated[
        Literal["language", "classification"] | None,
        typer.Option(
            metavar="KIND",
            help="language or classification. Default: classification (3 classes) for an encoder, else language.",
        ),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Sequences per step; with --decode also several, such as 1,8,64.")
    ] = "8",
    sequence_length: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens per sequence; with --decode also several: 1024,16384.")
    ] = "128",
    vocab_size: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Default: 8192 for gpt:SIZE, else the model's own."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds, with the arms interleaved in each.")] = 5,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each arm per round.")] = 10,
    compile_model: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Default: as in training (language on a GPU); off with --decode."),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Time generation of --steps tokens after --sequence-length; show cache sizes."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also show where the time of a step or token goes, by torch's profiler."),
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also time the steps of another tool: hf-trainer (transformers' Trainer) or nanogpt=CLONE, a folder.",
        ),
    ] = None,
    forms: Annotated[bool, typer.Option("--forms", help="List the forms of attention, and time nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time whole optimiser steps of several methods side by side, on random tokens, as ratios to the first.

    With --decode, time generation: one more token after a context, its bytes in the cache, and reading the context.

    On a GPU each arm with plain keys and values uses the fastest of several kernels, which the table names.

    At most 8 sequences are read; the rows of a larger batch are copies. An arm that does not fit in memory is named.
    """
    if forms:
        echo("\n".join(listing((name, form.about) for name, form in FORMS.items())))
        return
    with errors():
        from ..base.files import to_json
        from ..bench.arms import BenchSetting, plan_arms
        from ..bench.decoding import DecodePlan, benchmark_decoding
        from ..bench.peers import Peer
        from ..bench.steps import benchmark
        from ..config import GPT
        from ..runs.environment import bench_origin
        from .bench_tables import render_bench

        quiet_libraries()
        peers = [Peer.parse(text) for text in peer or []]
        if peers and decode:
            raise ConfigError("--peer times training steps: leave out --decode")
        plan = DecodePlan(
            _counts("--batch-size", batch_size, decode),
            _counts("--sequence-length", sequence_length, decode),
            rounds,
            steps,
            profile,
        )
        setting = BenchSetting(
            model=model,
            batch_size=plan.batch_sizes[0],
            length=plan.positions if decode else plan.contexts[0],
            vocab_size=vocab_size,
            kind=task,
            compile_model=compile_model,
            overrides=[word for word in arms or [] if "=" in word],
            decode=decode,
        )
        default_arms = DEFAULT_FORMS if decode and model.startswith(GPT) else _DEFAULT_ARMS
        planned = plan_arms([word for word in arms or [] if "=" not in word] or default_arms, setting)
        rows: BenchRows
        with progress_bar() as show:
            if decode:
                rows = benchmark_decoding(planned, plan, show=show)
                warnings = [
                    f"{row.arm}, {row.context:,} tokens, batches of {row.batch_size}: {row.error}"
                    for row in rows
                    if row.error
                ]
            else:
                rows = benchmark(planned, rounds, steps, show=show, profiled=profile, peers=peers)
                warnings = [row.warning for row in rows if row.warning]
        origin = bench_origin(sys.argv[1:])
        records = [row.model_copy(update={"origin": origin}).model_dump() for row in rows]
        echo(to_json(records, indent=2) if as_json else render_bench(rows))
        for warning in warnings:
            echo(f"warning: {warning}", err=True)


def _counts(option: str, text: str, several: bool) -> list[int]:
    """Return the whole numbers of an option; raise where there are several and only one makes sense."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} {text}: must be a whole number above 0, or with --decode several such as 8,64")
    if len(words) > 1 and not several:
        raise ConfigError(f"{option} {text}: training steps are timed with one value; several need --decode")
    return [int(word) for word in words]
