"""Compare published figures with the runs that replicate them: values, differences in the setup, a verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runs import published
from .arms import MEASURES, Arm, Difference, Group, Setup
from .compare import Compare, Comparison, best_rate, of_pairs
from .run import Run
from .stats import Estimate, estimate, too_noisy

AGREES, DIFFERS, UNDECIDED, NOT_JUDGED = "agrees", "differs", "undecided", "not-judged"

# The study kept its best checkpoint, so its figures are compared with those of a run's best model.
_OURS = {"perplexity": "best_perplexity", "accuracy": "best_accuracy", "val_loss": "best_val_loss"}


@dataclass(frozen=True, kw_only=True)
class Replication:
    """One published figure and what the runs of one setup measured. A change is relative to the published baseline."""

    experiment: published.PublishedExperiment
    metric: str
    value: float
    setup: Setup
    runs: tuple[Run, ...]
    measured: Estimate
    published_change: float | None
    measured_change: Estimate | None
    comparison: Comparison | None
    differs: tuple[Difference, ...]
    stand_in: bool
    verdict: str


def replicate(groups: Sequence[Group], compare: Compare) -> tuple[Replication, ...]:
    """Return a replication for every published figure that an arm of these groups measured.

    `compare` is `headline`, or a cached version of it.
    """
    replications = []
    known = published.load()
    for experiment in known.experiments.values():
        for group in groups:
            for setup in group.setups:
                arm = setup.arm(experiment.method)
                if arm is not None and matches(experiment, known, arm.runs[0]):
                    replications += _replications_of_arm(experiment, setup, arm, compare)
    return tuple(replications)


def matches(experiment: published.PublishedExperiment, known: published.Published, run: Run) -> bool:
    """Return True if a run replicates a published experiment, by its name, or by its data and kind of model."""
    if re.fullmatch(rf"{re.escape(experiment.id)}([._-].*)?", run.experiment):
        return True
    if any(re.fullmatch(rf"{re.escape(other)}([._-].*)?", run.experiment) for other in known.experiments):
        return False
    text = " ".join([run.dataset, run.config.data.path or "", run.task.name]).lower()
    same_data = any(word in text for word in known.datasets[experiment.dataset])
    return same_data and _is_gpt(run) == str(experiment.setup["model.name"]).startswith("gpt")


def _is_gpt(run: Run) -> bool:
    return "gpt" in run.config.model.name.lower()


def _replications_of_arm(
    experiment: published.PublishedExperiment, setup: Setup, arm: Arm, compare: Compare
) -> list[Replication]:
    """Return a replication for every published figure of an experiment that an arm measured."""
    baseline = published.load()[experiment.against] if experiment.against else None
    reference = setup.arm(baseline.method) if baseline else None
    by_measure = None
    if reference is not None and reference is not arm:
        by_measure = compare(setup, arm, reference, setup.measure)
    runs = arm.at(best_rate(arm, setup.measure) if by_measure is None else by_measure.rate)
    replications = []
    for metric, published_value in experiment.figures.items():
        pairs = [(run, value) for run in runs if (value := _measured(run, metric)) is not None]
        if not pairs:
            continue
        baseline_value = baseline.figures.get(metric) if baseline else None
        change = published_value / baseline_value - 1 if baseline_value else None
        comparison = _change(by_measure, metric) if change is not None else None
        measured_runs = tuple(run for run, _ in pairs)
        differs = setup_differences(experiment, measured_runs[0])
        replication = Replication(
            experiment=experiment,
            metric=metric,
            value=published_value,
            setup=setup,
            runs=measured_runs,
            measured=estimate([value for _, value in pairs]),
            published_change=change,
            measured_change=comparison.change if comparison else None,
            comparison=comparison,
            differs=differs,
            stand_in=setup.stand_in,
            verdict=NOT_JUDGED,
        )
        # A run on synthetic data only shows that the tools work, so it gets no verdict.
        judged = not setup.runs[0].synthetic
        replications.append(replace(replication, verdict=_verdict(replication)) if judged else replication)
    return replications


def _verdict(replication: Replication) -> str:
    """Judge a change where the comparison is sound, and a bare value only where it was measured in the same setup."""
    if replication.published_change is not None:
        comparison, measured = replication.comparison, replication.measured_change
        if comparison is None or not comparison.sound or comparison.no_spread:
            return UNDECIDED
        return _agreement(replication.published_change, measured, measured)
    if replication.differs:
        return NOT_JUDGED
    relative = replication.measured.mapped(lambda bound: bound / replication.value) if replication.value else None
    return _agreement(replication.value, replication.measured, relative)


def _agreement(value: float, measured: Estimate | None, relative: Estimate | None) -> str:
    """Return AGREES if the measured interval contains a published value, else DIFFERS.

    Return UNDECIDED if there is no interval, or if it is too wide by `relative`, the same interval on a relative scale.
    """
    if measured is None or measured.low is None or measured.high is None or too_noisy(relative):
        return UNDECIDED
    return AGREES if measured.low <= value <= measured.high else DIFFERS


def _change(chosen: Comparison | None, metric: str) -> Comparison | None:
    """Return the comparison by a published metric; None for metrics that runs are not compared by."""
    name = _OURS.get(metric, metric)
    if chosen is None or name not in MEASURES:
        return None
    comparison = of_pairs(chosen, MEASURES[name])
    return comparison if comparison.change is not None else None


def _measured(run: Run, metric: str) -> float | None:
    """Return a run's value of a published metric."""
    step = re.fullmatch(r"perplexity_at_step_(\d+)", metric)
    if step:
        return next((line.perplexity for line in run.metrics if line.kind == "val" and line.step == int(step[1])), None)
    if metric == "best_epoch":
        return run.result.best.epoch if run.result.best is not None else None
    if metric == "step_seconds" and run.times_doubt:
        return None
    return run.figure(_OURS.get(metric, metric)) or run.figure(metric)


def setup_differences(experiment: published.PublishedExperiment, run: Run) -> tuple[Difference, ...]:
    """Return the settings in which a run differs from the published setup, where both are known."""
    environment = run.environment
    settings = {**run.flat_config, "hardware": environment.hardware, "vocabulary": environment.data.vocab_size}
    differing = []
    for name, expected in experiment.setup.items():
        value = settings.get(name)
        same = str(expected) in str(value) if name == "hardware" else value == expected
        if value is not None and not same:
            differing.append(Difference(name, _plain(expected), _plain(value)))
    return tuple(differing)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
