"""The command bench: measure the speed of several methods side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import JsonOption
from .terminal import errors, progress_bar, quiet_libraries

if TYPE_CHECKING:
    from ..runs.schema import BenchRows

_DEFAULT_ARMS = ["baseline", "oelm-freeze", "identity-key"]


def bench(
    arms: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Presets to compare; PRESET@N uses batches of N. Default: {', '.join(_DEFAULT_ARMS)}. Also "
            "key=value settings of model, optimizer and train, such as train.precision=bfloat16 or "
            "model.fields.num_hidden_layers=12."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="gpt:SIZE, random:FAMILY, a folder or a Hub name.")] = "gpt:tiny",
    task: Annotated[
        Literal["language", "classification"] | None,
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
        typer.Option("--decode", help="Time generation of --steps tokens after --sequence-length; show cache sizes."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time whole optimiser steps of several methods side by side, on random tokens, as ratios to the first."""
    with errors():
        from ..base.files import to_json
        from ..bench import decoding
        from ..bench.arms import BenchSetting, plan_arms
        from ..bench.steps import benchmark
        from .bench_tables import bench_table, decoding_table, render_bench

        quiet_libraries()
        names = [word for word in arms or [] if "=" not in word] or _DEFAULT_ARMS
        setting = BenchSetting(
            model=model,
            batch_size=batch_size,
            length=decoding.positions_needed(sequence_length, rounds, steps) if decode else sequence_length,
            vocab_size=vocab_size,
            kind=task,
            compile_model=compile_model,
            overrides=[word for word in arms or [] if "=" in word],
        )
        planned = plan_arms(names, setting)
        rows: BenchRows
        warnings: list[str | None] = []
        with progress_bar() as show:
            if decode:
                rows = decoding.benchmark_decoding(planned, sequence_length, rounds, steps, show=show)
                table = decoding_table(rows)
            else:
                rows = benchmark(planned, rounds, steps, show=show)
                table, warnings = bench_table(rows), [row.warning for row in rows]
        as_text = to_json([row.model_dump() for row in rows], indent=2) if as_json else render_bench(table, rows[0].arm)
        typer.echo(as_text)
        for warning in filter(None, warnings):
            typer.echo(f"warning: {warning}", err=True)
