"""The demo: train a tiny GPT with several methods on built-in stories and report the result, within a time limit.

A slow machine, or little time, first gets fewer seeds, then shorter runs, and only then fewer methods. The three that
matter are always there. Other runs that would not end in time are not started.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.files import read_record, write_json, writing
from ..base.machine import cores
from ..base.strict import merge
from ..base.text import WIDTH
from ..errors import AnalysisError, LabError, OelmError
from ..lab.estimate import seconds_per_step
from ..lab.experiment import find_experiment
from ..lab.launch.forked import ForkedLauncher
from ..lab.matrix import Matrix
from ..lab.plan import PlannedRun, Request, plan_runs
from ..training.signals import EXIT_REQUEUE
from .run_tables import MatrixView
from .terminal import duration, echo, repeat_command
from .train import train_and_exit

# The methods that no time limit leaves out: the reference, the study's method, and the one that docs/choosing.md names
# for a GPT that is to have one matrix less.
ALWAYS = ("baseline", "oelm-freeze", "identity-key")
# The most seeds per method. All methods get their first seed before any gets its second.
SEEDS = 3
# Steps of each run: the first number that the machine can afford for one seed of every method, or of those in ALWAYS.
STEPS = (180, 120, 80, 40, 20)
# The most runs at a time, on a machine with many cores.
_JOBS = 4
# Seconds that are reserved for the report.
_REPORT_SECONDS = 20.0
# Seconds until the process that forks the runs has imported what they need, which it does once.
_IMPORT_SECONDS = 6.0
# Seconds from the start of a forked run, whose imports are done, to its first step.
_START_SECONDS = 4.0
# The estimate of a step's time is rough, and other programs may be running.
_SLACK = 1.5
_SETTINGS = "demo.json"


@dataclass(frozen=True)
class DemoPlan:
    """How long the demo's runs are, and which methods it has."""

    steps: int
    methods: tuple[str, ...]


def run_demo(out: Path, budget: float) -> int:
    """Run the demo into a folder within `budget` seconds, write its report, print its outcome; return the exit code."""
    start = time.monotonic()
    jobs = min(_JOBS, cores())
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    deadline = start + budget - _REPORT_SECONDS
    plan = _choose_plan(out, deadline, jobs)
    introduction = (
        f"{len(plan.methods)} ways to set and freeze a tiny GPT's attention, {plan.steps} steps each on built-in "
        f"stories (synthetic), {jobs} at a time on the CPU, in {budget / 60:g} min. Runs that do not fit are left "
        f"out, but never the first of {', '.join(ALWAYS)}. They go to {out / 'runs'}."
    )
    echo(f"{textwrap.fill(introduction, WIDTH, break_on_hyphens=False, break_long_words=False)}\n")
    runs = _plan(out, plan, tuple(range(SEEDS)))
    first = [run for run in runs if run.config.seed == 0 and run.config.method.name in ALWAYS]
    others = [run for run in runs if run not in first]
    launcher = ForkedLauncher(jobs, train_and_exit)
    failed = 0
    with MatrixView() as view:
        for part, until in ((first, None), (others, deadline)):
            if not part:
                continue
            matrix = Matrix(part, launcher, retries=0, notify=view.print_event, deadline=until)
            failed += matrix.run(view.show).get("failed", 0)
            if matrix.stopped:
                echo(f"stopped; to go on from there: {repeat_command()}")
                return EXIT_REQUEUE
    _print_outcome(out, runs, start)
    return 1 if failed else 0


def _choose_plan(out: Path, deadline: float, jobs: int) -> DemoPlan:
    """Return the plan of an earlier demo in this folder, else the best one that ends by a time.monotonic().

    Steps matter more than seeds: after too few steps all methods look alike, whatever the number of seeds. And a
    method that is missing cannot be compared at all, so runs are shortened before methods are left out.
    """
    if (out / _SETTINGS).is_file():
        return _read_plan(out / _SETTINGS)
    methods = tuple(find_experiment("demo").axes["method"])
    ordered = (*(name for name in ALWAYS if name in methods), *(name for name in methods if name not in ALWAYS))
    per_step = seconds_per_step(_plan(out, DemoPlan(STEPS[0], ordered), (0,))[0])
    candidates = [DemoPlan(steps, names) for names in (ordered, ordered[: len(ALWAYS)]) for steps in STEPS]

    def seconds(plan: DemoPlan) -> float:
        return math.ceil(len(plan.methods) / jobs) * (_START_SECONDS + plan.steps * per_step * _SLACK)

    left = deadline - time.monotonic() - _IMPORT_SECONDS
    chosen = next((plan for plan in candidates if seconds(plan) <= left), candidates[-1])
    write_json(out / _SETTINGS, asdict(chosen))
    return chosen


def _read_plan(file: Path) -> DemoPlan:
    content: dict[str, Any] = read_record(file)
    steps, methods = content.get("steps"), content.get("methods")
    if not isinstance(steps, int) or not isinstance(methods, list):
        raise LabError(f"{file}: holds no number of steps and no methods; remove {file.parent} to start again")
    return DemoPlan(steps, tuple(map(str, methods)))


def _plan(out: Path, plan: DemoPlan, seeds: tuple[int, ...]) -> list[PlannedRun]:
    """Return the demo's runs, each validated four times."""
    demo = find_experiment("demo")
    length = {"train": {"max_steps": plan.steps}, "eval": {"every": max(1, plan.steps // 4)}}
    axes = {**demo.axes, "method": plan.methods}
    shortened = demo.model_copy(update={"config": merge(demo.config, length), "axes": axes})
    return plan_runs([shortened], Request(seeds=seeds, output=str(out / "runs")))


def _print_outcome(out: Path, runs: Sequence[PlannedRun], start: float) -> None:
    """Print a table of the methods, a sentence about them and the next command; write the report."""
    from ..report.overview import findings
    from ..report.words import words
    from .outcome import analyse_finished, outcome_lines

    try:
        analysis = analyse_finished([run.folder for run in runs])
    except AnalysisError as error:  # every run diverged
        echo(str(error), err=True)
        return
    if analysis is None:
        return
    echo("\n".join(["", *outcome_lines(analysis)]))
    caution = "The text is synthetic and the model tiny: this shows how the lab works, not what holds for real text."
    sentences = [*findings(analysis, words("en")), caution]
    echo(textwrap.fill(" ".join(sentences), WIDTH, break_on_hyphens=False))
    try:
        from ..report import write_report

        write_report([out / "runs"], out / "report", title="oelm demo")
        seconds = duration(time.monotonic() - start)
        echo(f"\nthe whole report, after {seconds} in all: {out / 'report' / 'report.html'}")
    except (ImportError, OelmError) as error:
        echo(f"\nno report was written: {error}")
    echo("next, on your own text: oelm data prepare TEXT --train-bpe 8192 --out data/mine")
