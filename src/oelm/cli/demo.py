"""The main job on a bare machine: seven methods, a tiny GPT, built-in stories, a report, within a bound of time.

What bounds it is a budget: a slow machine gets fewer seeds, a very slow one fewer steps; what does not fit is stopped.
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
from ..lab.estimate import seconds_per_step, spell
from ..lab.experiment import find
from ..lab.launch.forked import ForkedLauncher
from ..lab.matrix import Matrix
from ..lab.plan import Planned, Request, expand
from ..lab.status import look, so_many
from ..training.signals import EXIT_REQUEUE
from .run_tables import MatrixView
from .train import train_and_exit

# As many seeds as are tried for. Arms come first: a machine that is slow does the first seed of all of them.
SEEDS = 3
# Steps of each run, from what is wanted down to what still shows something.
STEPS = (180, 120, 80)
# Runs at a time, where there are cores for more than two.
_JOBS = 4
# What the report is left, in seconds.
REPORT = 25.0
# Starting a run whose imports are done: its data and its model.
_START = 4.0
_SETTINGS = "demo.json"


def run_demo(out: Path, budget: float) -> int:
    """Run the demo into a folder: the runs, the report, and in plain words what they show. The exit code."""
    began = time.monotonic()
    deadline = began + budget - REPORT
    jobs = min(_JOBS, cores())
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    steps = _steps(out, budget - REPORT, jobs)
    _say("Up to seven ways to set and freeze a tiny GPT's attention,")
    _say(f"{steps} steps each on built-in stories (synthetic), {jobs} at a time on the CPU,")
    _say(f"at most {spell(budget)} in all: what does not fit into that is left out. Runs go to {out / 'runs'}.\n")
    with MatrixView() as view:
        work = Matrix(
            _runs(out, steps, tuple(range(SEEDS))), ForkedLauncher(jobs, train_and_exit), retries=0, tell=view.say
        )
        work.deadline = deadline
        counts = work.run(view)
    if work.stopped:
        _say("stopped; the same command resumes it")
        return EXIT_REQUEUE
    _report(out, began)
    return 1 if counts.get("failed") else 0


def _steps(out: Path, budget: float, jobs: int) -> int:
    """How many steps each run takes: those of an earlier demo in this folder, else the most that one seed can afford.

    More steps come before more seeds: after too few the methods are alike, and any number of seeds says so.
    """
    if (out / _SETTINGS).is_file():
        steps = read_record(out / _SETTINGS).get("steps")
        if not isinstance(steps, int):
            raise LabError(f"{out / _SETTINGS}: holds no number of steps; remove {out} to start anew")
        return steps
    runs = _runs(out, STEPS[0], (0,))
    rounds, per_step = math.ceil(len(runs) / jobs), seconds_per_step(runs[0])
    fits = [steps for steps in STEPS if rounds * (_START + steps * per_step) <= budget]
    chosen = fits[0] if fits else STEPS[-1]
    write_json(out / _SETTINGS, {"steps": chosen})
    return chosen


def _runs(out: Path, steps: int, seeds: tuple[int, ...]) -> list[Planned]:
    """The demo's runs, so many steps long, validated four times on the way."""
    demo = find("demo")
    length = {"train": {"max_steps": steps}, "eval": {"every": max(1, steps // 4)}}
    sized = demo.model_copy(update={"config": merge(demo.config, length)})
    return expand([sized], Request(seeds=seeds, output=str(out / "runs")))


def _report(out: Path, began: float) -> None:
    """Write the report and say what the runs show."""
    try:
        from ..report import summary, write_report
    except ImportError as error:
        _say(f"\nNo report was written ({error}). Perplexity by method, mean over the finished seeds:")
        _say("\n".join(_plain_table(out / "runs")))
        return
    try:
        report = write_report([out / "runs"], out / "report", title="oelm demo")
    except OelmError as error:
        _say(f"\nNo report was written: {error}\nPerplexity by method, mean over the finished seeds:")
        _say("\n".join(_plain_table(out / "runs")))
        return
    _say("\nWhat these small runs show (synthetic text and a tiny model: they say nothing about real text):")
    for line in summary(report.analysis):
        _say(f"  {line}")
    _say(f"\nThe report: {out / 'report' / 'report.html'}. Total time: {spell(time.monotonic() - began)}.")


def _plain_table(root: Path) -> list[str]:
    """Perplexities by method, the least first, for want of a report."""
    found: dict[str, list[float]] = {}
    for result in sorted(root.glob("*/*/seed-*/result.json")):
        run = look(result.parent)
        if run.perplexity is not None and run.method is not None:
            found.setdefault(run.method, []).append(run.perplexity)
    ranked = sorted(found.items(), key=lambda item: fmean(item[1]))
    return [f"  {method:<22} {fmean(values):7.3f}  ({so_many(len(values), 'seed')})" for method, values in ranked]


def _say(text: str) -> None:
    typer.echo(text)
