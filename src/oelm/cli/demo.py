"""The demo: train a tiny GPT with several methods on built-in stories and report the result, within a time limit.

A slow machine gets fewer seeds, and a very slow one fewer steps. Runs that would not end in time are not started.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean

import typer

from ..base.files import read_record, write_json, writing
from ..base.machine import cores
from ..base.strict import merge
from ..errors import LabError, OelmError
from ..lab.estimate import seconds_per_step
from ..lab.experiment import find_experiment
from ..lab.launch.forked import ForkedLauncher
from ..lab.matrix import Matrix
from ..lab.plan import PlannedRun, Request, plan_runs
from ..lab.status import read_state
from ..training.signals import EXIT_REQUEUE
from .run_tables import MatrixView
from .terminal import count_of, duration
from .train import train_and_exit

# The most seeds per method. All methods get their first seed before any gets its second.
SEEDS = 3
# Steps of each run: the first number that the machine can afford for one seed of every method.
STEPS = (180, 120, 80)
# The most runs at a time, on a machine with many cores.
_JOBS = 4
# Seconds that are reserved for the report.
_REPORT_SECONDS = 25.0
# Seconds from the start of a forked run, whose imports are done, to its first step.
_START_SECONDS = 4.0
_SETTINGS = "demo.json"


def run_demo(out: Path, budget: float) -> int:
    """Run the demo into a folder within `budget` seconds, write its report, print a summary; return the exit code."""
    start = time.monotonic()
    jobs = min(_JOBS, cores())
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    steps = _choose_steps(out, budget - _REPORT_SECONDS, jobs)
    typer.echo("Up to seven ways to set and freeze a tiny GPT's attention,")
    typer.echo(f"{steps} steps each on built-in stories (synthetic), {jobs} at a time on the CPU,")
    typer.echo(f"at most {duration(budget)} in all: what does not fit is left out. Runs go to {out / 'runs'}.\n")
    runs = _plan(out, steps, tuple(range(SEEDS)))
    launcher, deadline = ForkedLauncher(jobs, train_and_exit), start + budget - _REPORT_SECONDS
    with MatrixView() as view:
        matrix = Matrix(runs, launcher, retries=0, notify=view.print_event, deadline=deadline)
        counts = matrix.run(view.show)
    if matrix.stopped:
        typer.echo("stopped; the same command resumes it")
        return EXIT_REQUEUE
    _report(out, start)
    return 1 if counts.get("failed") else 0


def _choose_steps(out: Path, budget: float, jobs: int) -> int:
    """Return the steps of each run: those of an earlier demo in this folder, else the most that one seed can afford.

    Steps matter more than seeds: after too few steps all methods look alike, whatever the number of seeds.
    """
    if (out / _SETTINGS).is_file():
        steps = read_record(out / _SETTINGS).get("steps")
        if not isinstance(steps, int):
            raise LabError(f"{out / _SETTINGS}: holds no number of steps; remove {out} to start again")
        return steps
    runs = _plan(out, STEPS[0], (0,))
    rounds, per_step = math.ceil(len(runs) / jobs), seconds_per_step(runs[0])
    affordable = [steps for steps in STEPS if rounds * (_START_SECONDS + steps * per_step) <= budget]
    chosen = affordable[0] if affordable else STEPS[-1]
    write_json(out / _SETTINGS, {"steps": chosen})
    return chosen


def _plan(out: Path, steps: int, seeds: tuple[int, ...]) -> list[PlannedRun]:
    """Return the demo's runs with this many steps, each validated four times."""
    demo = find_experiment("demo")
    length = {"train": {"max_steps": steps}, "eval": {"every": max(1, steps // 4)}}
    shortened = demo.model_copy(update={"config": merge(demo.config, length)})
    return plan_runs([shortened], Request(seeds=seeds, output=str(out / "runs")))


def _report(out: Path, start: float) -> None:
    """Write the report and print what the runs show; without a report, print the perplexities."""
    try:
        from ..report import summary, write_report

        report = write_report([out / "runs"], out / "report", title="oelm demo")
    except (ImportError, OelmError) as error:
        typer.echo(f"\nNo report was written ({error}). Perplexity by method, mean over the finished seeds:")
        typer.echo("\n".join(_perplexity_table(out / "runs")))
        return
    typer.echo("\nWhat these small runs show (synthetic text and a tiny model: they say nothing about real text):")
    for line in summary(report.analysis):
        typer.echo(f"  {line}")
    typer.echo(f"\nThe report: {out / 'report' / 'report.html'}. Total time: {duration(time.monotonic() - start)}.")


def _perplexity_table(root: Path) -> list[str]:
    """Return the mean perplexity of each method, the lowest first."""
    by_method: dict[str, list[float]] = {}
    for result in sorted(root.glob("*/*/seed-*/result.json")):
        run = read_state(result.parent)
        if run.perplexity is not None and run.method is not None:
            by_method.setdefault(run.method, []).append(run.perplexity)
    ranked = sorted(by_method.items(), key=lambda item: fmean(item[1]))
    return [f"  {method:<22} {fmean(values):7.3f}  ({count_of(len(values), 'seed')})" for method, values in ranked]
