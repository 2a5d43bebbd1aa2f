"""What the runs of a setup scored on tasks of lm-eval, with the spread over seeds beside that over questions."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show
from ..analysis.arms import Arm, Setup, downstream_measure
from ..analysis.compare import Comparison, of_pairs
from ..analysis.stats import Estimate, estimate
from ..runs.schema import DownstreamMetric, DownstreamTask
from . import numbers
from .document import Block, Cell, Heading, Table
from .words import Words

# A run with its score on a task.
_Score = tuple[Run, DownstreamTask, DownstreamMetric]


def downstream_blocks(analysis: Analysis, setup: Setup, number: int, say: Words) -> list[Block]:
    """Return the table of a setup's scores, task by task; nothing where no run was evaluated on any."""
    columns = ["col_task", "col_metric", "col_method", "col_rate", "col_seeds", "col_questions", "col_mean"]
    columns += ["col_interval", "col_question_error", "col_change_interval", "col_runs"]
    about = say("downstream_about")
    table = Table(f"{number}-downstream", say.all(*columns), numeric=tuple(range(3, 10)), caption=about)
    shown = {arm: cell_to_show(analysis, setup, arm) for arm in setup.arms}
    for name in sorted({name for _, runs in shown.values() for run in runs for name in run.scores}):
        for arm, (rate, runs) in shown.items():
            for scores in _by_questions(runs, name):
                table.add(*_cells(analysis, setup, arm, rate, name, scores, say))
    return [Heading(say("downstream"), 3, f"downstream-{number}"), table] if table.rows else []


def _by_questions(runs: tuple[Run, ...], name: str) -> list[list[_Score]]:
    """Return the scores of runs by what they were asked: only answers to the same questions are averaged."""
    groups: dict[str, list[_Score]] = {}
    for run in runs:
        if name in run.scores:
            task, metric = run.scores[name]
            groups.setdefault(task.sha256, []).append((run, task, metric))
    return list(groups.values())


def _cells(
    analysis: Analysis, setup: Setup, arm: Arm, rate: float, name: str, scores: list[_Score], say: Words
) -> list[Cell | str]:
    _, task, metric = scores[0]
    mean = estimate([metric.value for _, _, metric in scores])
    errors = [metric.standard_error for _, _, metric in scores if metric.standard_error is not None]
    return [
        task.key,
        metric.name,
        Cell(arm.method, code=True),
        numbers.rate(rate),
        str(mean.n),
        f"{task.items:,}",
        numbers.score(metric, mean.mean),
        _interval(metric, mean, say),
        f"± {numbers.score(metric, fmean(errors))}" if errors else "–",
        _change(analysis, setup, arm, name, metric, say),
        Cell("", tuple(analysis.handle(run) for run, _, _ in scores)),
    ]


def _interval(metric: DownstreamMetric, mean: Estimate, say: Words) -> str:
    """Return the interval of a mean over seeds; that of a share stays in 0 to 1."""
    if mean.low is None or mean.high is None:
        return numbers.bounds(metric.name, mean, say)
    low, high = (max(0.0, mean.low), min(1.0, mean.high)) if metric.share else (mean.low, mean.high)
    return f"{numbers.score(metric, low)} – {numbers.score(metric, high)}"


def _change(analysis: Analysis, setup: Setup, arm: Arm, name: str, metric: DownstreamMetric, say: Words) -> str:
    """Return the change against the setup's reference over pairs of seeds that answered the same questions."""
    comparison = next((one for one in analysis.of(setup) if one.arm == arm.method and one.pairs), None)
    if comparison is None or not same_questions(comparison, name):
        return "–"
    return numbers.change_in_full(of_pairs(comparison, downstream_measure(name, metric)), say)


def same_questions(comparison: Comparison, name: str) -> bool:
    """Return True when every pair of a comparison has a score of this name, on the same questions."""
    runs = [run for pair in comparison.pairs for run in pair]
    return all(name in run.scores for run in runs) and len({run.scores[name][0].sha256 for run in runs}) == 1


def paired_error(metric: DownstreamMetric, other: DownstreamMetric) -> float | None:
    """Return the standard error, over the questions, of the difference of two shares of right answers.

    It is smaller than those of the shares, since most questions are as hard for one model as for the other. None for
    other metrics, and for fewer than two questions.
    """
    if not (metric.share and other.share) or len(metric.items) != len(other.items) or len(metric.items) < 2:
        return None
    differences = [one - two for one, two in zip(metric.items, other.items, strict=True)]
    return stdev(differences) / math.sqrt(len(differences))
