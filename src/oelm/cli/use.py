"""Commands that use a trained run: eval, predict, generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from . import completion
from .options import JsonOption, RunArgument
from .terminal import count_of, echo, errors, progress_bar, quiet_libraries

if TYPE_CHECKING:
    from ..evaluation.generate import Sampling


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder; with --tasks also one of a model: exported, saved after oelm.apply, or any other.",
            autocompletion=completion.runs,
        ),
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    last: Annotated[bool, typer.Option("--last", help="Use the last checkpoint, not the best model.")] = False,
    tasks: Annotated[
        str | None, typer.Option(help="Evaluate on tasks instead: names of lm-eval's, or folders of YAML, with commas.")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="With --tasks: examples shown first. Default: 0.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: only the first items of each.")] = None,
) -> None:
    """Evaluate a run's model again, on all of its validation data and any other labelled split; prints JSON.

    With --tasks: on tasks of lm-eval, which the extra `eval` installs. What a run scores is added to its records.
    """
    with errors():
        from ..lab.status import refuse_folder_of_runs
        from ..runs.environment import config_of

        refuse_folder_of_runs(run)
        if tasks is not None:
            options = {"shots": shots or 0, "limit": limit, "batch_size": batch_size, "last": last}
            _evaluate_on_tasks(run, tasks, options)
            return
        if shots is not None or limit is not None:
            raise ConfigError("--shots and --limit are for tasks: name some with --tasks")
        config_of(run)  # another folder is refused before the libraries are loaded, which takes seconds
        from ..evaluation.use import evaluate_run

        quiet_libraries()
        echo(json.dumps(evaluate_run(run, batch_size, last), indent=2))


def _evaluate_on_tasks(source: Path, tasks: str, options: dict[str, Any]) -> None:
    from ..base.files import require_reachable

    require_reachable(source)
    from ..evaluation.downstream import evaluate_downstream

    quiet_libraries()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with progress_bar() as show:
        scores = evaluate_downstream(source, names, **options, show=show)
    for score in scores:
        if score.cut:
            texts = "1 text" if score.cut == 1 else f"{score.cut} texts"
            echo(f"warning: {score.task}: {texts} lost their start: the model reads too few tokens", err=True)
    # The values of single items stay in the run's record.
    content = [score.model_dump(exclude={"metrics": {"__all__": {"items", "weights"}}}) for score in scores]
    echo(json.dumps({"source": str(source), "tasks": content}, indent=2))


def predict(
    run: RunArgument,
    text: Annotated[str | None, typer.Argument(help="The text to classify, or the source text to answer.")] = None,
    pair: Annotated[str | None, typer.Argument(help="The second text, if the task has two.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A table: predict all of its rows, in batches.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The .csv, .tsv or .jsonl file to write.")] = None,
    column: Annotated[str | None, typer.Option(help="The file's column of texts, if not the task's.")] = None,
    pair_column: Annotated[str | None, typer.Option(help="Its column of second texts.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time, with --file.")] = 32,
) -> None:
    """Run a fine-tuned model on one text or pair of texts, or on all rows of a file.

    For one text the answer is printed as JSON. With --file, every row is written to --out with its prediction.
    """
    with errors():
        from ..lab.status import refuse_folder_of_runs
        from ..runs.environment import config_of

        refuse_folder_of_runs(run)
        config_of(run)
        quiet_libraries()
        if file is None:
            if text is None or out is not None:
                raise ConfigError("predict: give a text, or a table with --file and where to write it with --out")
            from ..evaluation.use import predict_one

            echo(json.dumps(predict_one(run, text, pair), indent=2, ensure_ascii=False))
            return
        if text is not None or out is None:
            problem = f"{text!r} is a text of its own; leave it out" if text is not None else "give --out too"
            raise ConfigError(f"predict --file {file}: {problem}")
        from ..evaluation.predict_table import predict_table

        with progress_bar() as show:
            columns = {"column": column, "pair_column": pair_column}
            rows = predict_table(run, file, out, **columns, batch_size=batch_size, show=show)
        echo(f"wrote {out}: {count_of(rows, 'row')} with a prediction each")


def generate(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, or one of a model: exported, saved after oelm.apply, or any other.",
            autocompletion=completion.runs,
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many tokens to add. Default: 100, or what fits.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    score: Annotated[
        bool, typer.Option("--score", help="Write several samples of several prompts, and score and keep them.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="With --score: a file with a prompt a line. Default: a run's validation documents."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="With --score: texts for each prompt.")] = 4,
    judge: Annotated[
        Path | None, typer.Option(help="With --score: another language model, whose perplexity is computed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a prompt with a trained model. A prompt that does not fit loses its start, and says so.

    With --score: how varied the texts are and how much they repeat; a run keeps them, and reports show them.
    """
    with errors():
        from ..base.files import require_reachable
        from ..lab.status import refuse_folder_of_runs

        for folder in [source] if judge is None else [source, judge]:
            require_reachable(folder)
            refuse_folder_of_runs(folder)
        from ..evaluation.generate import Sampling, generate_text

        quiet_libraries()
        sampling = Sampling(tokens, temperature, top_k, seed)
        if score:
            _score_texts(source, prompts, samples, sampling, judge, as_json)
            return
        if prompts is not None or judge is not None:
            raise ConfigError(f"generate: {'--prompts' if prompts else '--judge'} goes with --score")
        continuation = generate_text(source, prompt, sampling)
        if continuation.cut_tokens:
            end = continuation.cut[-40:].strip()
            echo(
                f"warning: the model has {continuation.positions} positions, so the first "
                f"{count_of(continuation.cut_tokens, 'token')} of the prompt were cut, up to {end!r}",
                err=True,
            )
        echo(continuation.text)


def _score_texts(
    source: Path, prompts: Path | None, samples: int, sampling: Sampling, judge: Path | None, as_json: bool
) -> None:
    """Write samples, keep them in the run's folder, and print their scores."""
    from ..evaluation.samples import keep_samples, read_prompts, sample_texts
    from ..runs.environment import is_run

    chosen = None if prompts is None else read_prompts(prompts)
    with progress_bar() as show:
        written = sample_texts(source, chosen, samples, sampling, judge, show)
    kept = keep_samples(source, written) if is_run(source) else None
    if as_json:
        echo(json.dumps(written.model_dump(), indent=2, ensure_ascii=False))
        return
    scores = written.scores
    rows = [(f"different runs of {count_of(n, 'word')}", share) for n, share in enumerate(scores.distinct, start=1)]
    rows.append(("4 words in a row that the text had before", scores.repetition))
    for name, share in rows:
        echo(f"{name:<42} {'-' if share is None else f'{100 * share:.1f} %':>8}")
    more = [("BLEU against the prompt's other texts", scores.self_bleu)]
    more += [] if judge is None else [("perplexity under the judge", scores.judge_perplexity)]
    for name, number in more:
        echo(f"{name:<42} {'-' if number is None else f'{number:.1f}':>8}")
    texts = count_of(sum(len(prompt.texts) for prompt in written.prompts), "text")
    where = "" if kept is None else f", kept in {kept}"
    echo(f"{texts} of {count_of(len(written.prompts), 'prompt')}, {count_of(scores.words, 'word')}{where}")
