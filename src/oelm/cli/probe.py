"""The command probe: what attention can do, in small tasks that ask for one ability each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.machine import cores
from . import completion
from .options import RUNS, JsonOption, OutOption, YesOption
from .terminal import echo, errors, folded, quiet_libraries

if TYPE_CHECKING:
    from ..analysis.run import Run
    from ..evaluation.induction import Repetition
    from ..lab.plan import PlannedRun

_DEFAULT_ARMS = (
    "multi-head",
    "oelm-freeze",
    "frozen-offset",
    "frozen-channel",
    "identity-channel",
    "latent-frozen",
    "linear",
)


def probe(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="A run or a model's folder to look at. With --train: presets and forms of attention (`oelm bench "
            f"--forms`), and key=value settings. Default: {', '.join(_DEFAULT_ARMS)}.",
            autocompletion=completion.runs,
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Train small models on the tasks, and compare them.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="With --train: a task, such as recall; for several, repeat it. Default: all generated ones; "
            "stories-recall, which takes a GPU, by name.",
            autocompletion=completion.abilities,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --train: seeds 0 to N - 1.")] = 3,
    out: OutOption = RUNS,
    gpus: Annotated[str | None, typer.Option(help="With --train: GPUs to use, such as 0,1; '' for none.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="With --train: runs at once, on each GPU.")] = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Measure what attention can do, one ability at a time.

    Of a trained language model: how well it repeats random tokens that it has seen once, and which heads find them.

    With --train: small models learn generated tasks, a few minutes each on a CPU; tables show the right answers.

    The same command goes on where it was stopped.
    """
    with errors():
        if not train:
            _probe_model(names or [], as_json)
            return
        code = _train_probes(names or [], task, seeds, out, gpus, jobs, as_json, yes)
    raise typer.Exit(code)


def _probe_model(names: Sequence[str], as_json: bool) -> None:
    from ..errors import ConfigError

    if len(names) != 1:
        raise ConfigError("probe: name the folder of one run or model, or train on the tasks with --train")
    from ..evaluation.induction import measure_repetition
    from ..evaluation.load import find_model
    from ..training.parallel import device_for

    quiet_libraries()
    model, _ = find_model(names[0])
    rows = measure_repetition(model.to(device_for("auto")).eval())
    echo(json.dumps([asdict(row) for row in rows], indent=2) if as_json else _repetition_table(rows))


def _train_probes(
    names: Sequence[str],
    chosen: Sequence[str] | None,
    seeds: int,
    out: Path,
    gpus: str | None,
    jobs: int | None,
    as_json: bool,
    yes: bool,
) -> int:
    from ..bench.arms import arm_fields
    from ..data.synthetic.sequences import ABILITIES
    from ..lab.launch.forked import ForkedLauncher
    from ..lab.launch.local import local_launcher
    from ..lab.plan import Request
    from ..lab.probes import plan_probes
    from .experiments import exit_code, run_planned
    from .train import train_and_exit

    tasks = list(chosen or ABILITIES)
    overrides = tuple(name for name in names if "=" in name)
    arms = list(dict.fromkeys([name for name in names if "=" not in name] or _DEFAULT_ARMS))
    request = Request("full", tuple(range(seeds)), overrides=overrides, output=str(out))
    planned = plan_probes(arms, arm_fields, tasks, request)
    runs = [run for by_task in planned.values() for own in by_task.values() for run in own]
    runs.sort(key=lambda run: run.order)
    local = local_launcher(gpus, jobs, 1)
    on_gpus = any(slot.gpus for slot in local.all_slots)
    # On the CPU a run's imports would take longer than some of these runs.
    launcher = local if on_gpus else ForkedLauncher(jobs or cores(), train_and_exit)
    counts = run_planned(runs, launcher, 1, yes)
    rows = {arm: {task: _right_answers(task, own) for task, own in by_task.items()} for arm, by_task in planned.items()}
    echo(json.dumps(rows, indent=2) if as_json else _accuracy_table(rows, tasks))
    return exit_code(counts)


def _right_answers(task: str, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the mean share of right answers over the seeds that are done, and its interval."""
    from ..analysis.analyse import mean_of
    from ..lab.probes import STORIES

    name = "recall" if task == STORIES else "accuracy"
    done = [_read(run, name) for run in runs if (run.folder / "result.json").is_file()]
    mean = mean_of(done, name) if done else None
    if mean is None:
        return {"seeds": 0}
    return {"seeds": len(done), name: mean.mean, "low": mean.low, "high": mean.high}


def _read(planned: PlannedRun, figure: str) -> Run:
    """Return a run that is done with its records, with the stories' recall measured where it was not yet."""
    from ..analysis.load import load_run

    run = load_run(planned.folder)
    if figure != "recall" or run.figure(figure) is not None:
        return run
    from ..evaluation.recall import record_recall

    quiet_libraries()
    record_recall(planned.folder)
    return load_run(planned.folder)


def _accuracy_table(rows: Mapping[str, Mapping[str, dict[str, Any]]], tasks: Sequence[str]) -> str:
    """Return a table for each task, with a line for each arm."""
    from ..base.text import plain_table, plain_text
    from ..lab.probes import TASKS

    tables = []
    for task in tasks:
        table = plain_table()
        table.add_column("arm")
        for name in ("right answers", "95 % interval", "seeds"):
            table.add_column(name, justify="right")
        for arm, by_task in rows.items():
            cell = by_task[task]
            share = f"{cell.get('accuracy', cell.get('recall')):.1%}" if cell["seeds"] else "–"
            interval = f"{cell['low']:.1%} – {cell['high']:.1%}" if cell.get("low") is not None else "–"
            table.add_row(arm, share, interval, str(cell["seeds"]))
        tables.append(plain_text(table, f"{task}: {TASKS[task]}"))
    return "\n\n".join(tables)


def _repetition_table(rows: Sequence[Repetition]) -> str:
    from ..base.text import plain_table, plain_text

    table = plain_table()
    for name in ("block", "loss", "loss in its repetition", "right there", "best head", "mean head"):
        table.add_column(name, justify="right")
    for row in rows:
        matching = row.prefix_matching
        best = f"{matching.best:.1%} ({matching.layer}.{matching.head})" if matching else "–"
        mean = f"{matching.mean:.1%}" if matching else "–"
        losses = f"{row.first_loss:.3f}", f"{row.second_loss:.3f}"
        table.add_row(str(row.length), *losses, f"{row.accuracy:.1%}", best, mean)
    title = "blocks of random tokens, repeated at once"
    notes = ["Without a look at the first copy, the second one is as hard to predict as the first."]
    notes += [
        "Heads (layer.head, from 0): the attention from a repeated token to the one after its earlier copy."
        if rows[0].prefix_matching
        else f"Heads: not measured, since {rows[0].not_measured}."
    ]
    return "\n".join([plain_text(table, title), *(line for note in notes for line in folded(note))])
