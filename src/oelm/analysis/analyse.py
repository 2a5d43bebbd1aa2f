"""Analyse the runs in folders: load, group, compare and judge them. The report has the words and the charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from os import PathLike

from ..runs.confirmation import Study
from .arms import JUDGED, MEASURES, Arm, Group, Measure, Setup, group_runs
from .compare import Compare, Comparison, best_rate, correct, equal_rates, headline, nearest_reference, of_pairs
from .confirm import Confirmed, confirm
from .hypotheses import Verdict, judge, load_hypotheses
from .load import load_runs
from .planned import planned_runs
from .replication import Replication, replicate
from .run import Attempt, Bench, LeftOut, Run
from .stats import Estimate, estimate


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """What a set of runs shows.

    `comparisons` are corrected together; `equal` are those at each common learning rate. `judged` are the pairs of
    `comparisons` by the test text, corrected in the same way, and `times` these pairs by their step times. `confirmed`
    are the hypotheses of a plan.
    """

    runs: tuple[Run, ...]
    running: tuple[Attempt, ...]
    left_out: tuple[LeftOut, ...]
    benches: tuple[Bench, ...]
    problems: tuple[str, ...]
    groups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]
    judged: tuple[Comparison, ...]
    equal: tuple[Comparison, ...]
    times: tuple[Comparison, ...]
    verdicts: tuple[Verdict, ...]
    replications: tuple[Replication, ...]
    confirmed: Confirmed | None = None

    def handle(self, run: Run) -> str:
        """Return a run's short name in this report: R1, R2, ... in the order of the folders."""
        return f"R{self._numbers[id(run)]}"

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(run): number for number, run in enumerate(self.runs, start=1)}

    def of(self, setup: Setup) -> tuple[Comparison, ...]:
        """Return the comparisons of one setup."""
        return tuple(comparison for comparison in self.comparisons if comparison.setup is setup)


def analyse(
    paths: Sequence[str | PathLike[str]],
    hypotheses: str | PathLike[str] | None = None,
    study: Study | None = None,
    any_version: bool = False,
) -> Analysis:
    """Analyse the runs in these folders. Raise AnalysisError where there is nothing to report on.

    The hypotheses of a plan's `study` are judged on the runs that carry its mark; with `any_version` on all runs that
    it names.
    """
    claims = load_hypotheses(hypotheses)
    compare: Compare = cache(headline)  # hypotheses and replications ask for the same comparisons again
    loaded = load_runs(paths)
    groups = group_runs(loaded.runs, [item.run for item in loaded.left_out if item.run is not None])
    comparisons: list[Comparison] = []
    equal: list[Comparison] = []
    for group in groups:
        for setup in group.setups:
            pairs = _against_reference(setup, group)
            headlines = [compare(setup, arm, reference, setup.measure) for arm, reference in pairs]
            comparisons += correct([comparison for comparison in headlines if comparison is not None])
            for arm, reference in pairs:
                equal += equal_rates(setup, arm, reference, setup.measure)
    judged: list[Comparison] = []
    for setup in {id(comparison.setup): comparison.setup for comparison in comparisons}.values():
        if setup.task.kind in JUDGED:
            measure = MEASURES[JUDGED[setup.task.kind]]
            of_setup = [of_pairs(comparison, measure) for comparison in comparisons if comparison.setup is setup]
            judged += correct([comparison for comparison in of_setup if comparison.n])
    times = [of_pairs(comparison, MEASURES["step_seconds"]) for comparison in comparisons if comparison.pairs]
    return Analysis(
        runs=loaded.runs,
        running=loaded.running,
        left_out=loaded.left_out,
        benches=loaded.benches,
        problems=loaded.problems,
        groups=groups,
        comparisons=tuple(comparisons),
        judged=tuple(judged),
        equal=tuple(equal),
        times=tuple(comparison for comparison in times if comparison.ratio is not None),
        verdicts=judge(claims, groups, compare),
        replications=replicate(groups, compare),
        confirmed=None if study is None else confirm(planned_runs(study, loaded, paths, any_version)),
    )


def _against_reference(setup: Setup, group: Group) -> list[tuple[Arm, Arm]]:
    """Return each arm with its setup's reference, or with that of the nearest setup, which confounds the comparison."""
    if setup.reference is not None:
        return [(arm, setup.reference) for arm in setup.arms if arm is not setup.reference]
    nearest = nearest_reference(setup, group.setups)
    return [(arm, nearest[1]) for arm in setup.arms] if nearest is not None else []


def cell_to_show(analysis: Analysis, setup: Setup, arm: Arm) -> tuple[float, tuple[Run, ...]]:
    """Return the learning rate at which an arm is shown, that of its comparison or its best one, and its runs there."""
    for comparison in analysis.of(setup):
        if comparison.arm == arm.method:
            return comparison.rate, arm.at(comparison.rate)
    rates = [
        comparison.reference_rate
        for comparison in analysis.of(setup)
        if comparison.basis == "best" and setup.reference is arm
    ]
    rate = max(set(rates), key=rates.count) if rates else best_rate(arm, setup.measure)
    return rate, arm.at(rate)


def mean_of(runs: Sequence[Run], measure: Measure | str) -> Estimate | None:
    """Return the mean of a figure over runs, with an interval from two runs on.

    The interval of a share stays in 0 to 1. That of a figure that is compared by its ratio, such as a perplexity, is
    left out when it would reach below zero.
    """
    name = measure if isinstance(measure, str) else measure.name
    values = [value for run in runs if (value := run.figure(name)) is not None]
    mean = estimate(values) if values else None
    if mean is None or mean.low is None or mean.high is None or name not in MEASURES:
        return mean
    if MEASURES[name].log and mean.low < 0:
        return replace(mean, low=None, high=None)
    if not MEASURES[name].points:
        return mean
    return replace(mean, low=max(0.0, mean.low), high=min(1.0, mean.high))
