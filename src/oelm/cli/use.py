"""Commands that use a trained run: eval, predict, generate."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .options import RunArgument
from .terminal import errors, quiet_libraries


def evaluate(
    run: RunArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    last: Annotated[bool, typer.Option("--last", help="Use the last checkpoint, not the best model.")] = False,
) -> None:
    """Evaluate a run's model again, on all of its validation data and any other labelled split; prints JSON."""
    with errors():
        from ..evaluation.use import evaluate_run

        quiet_libraries()
        typer.echo(json.dumps(evaluate_run(run, batch_size, last), indent=2))


def predict(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="The text to classify, or the source text to answer.")],
    pair: Annotated[str | None, typer.Argument(help="The second text, if the task has two.")] = None,
) -> None:
    """Run a fine-tuned model on one text, or one pair of texts; prints the answer as JSON."""
    with errors():
        from ..evaluation.use import predict_one

        quiet_libraries()
        typer.echo(json.dumps(predict_one(run, text, pair), indent=2, ensure_ascii=False))


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
        from ..evaluation.use import generate_text

        quiet_libraries()
        typer.echo(generate_text(run, prompt, tokens, temperature, top_k, seed))
