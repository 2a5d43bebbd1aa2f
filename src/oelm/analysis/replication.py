"""Compare published figures with the runs that replicate them: values, differences in the setup, a verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runs import published
from .arms import COUNTS, MEASURES, Arm, Difference, Group, Setup
from .compare import Compare, Comparison, best_rate, of_pairs
from .run import Run
from .stats import Estimate, estimate, too_noisy

AGREES, DIFFERS, UNDECIDED, NOT_JUDGED = "agrees", "differs", "undecided", "not-judged"

# The study kept its best checkpoint, so its figures are compared with those of a run's best model.
_OURS = {"perplexity": "best_perplexity", "accuracy": "best_accuracy", "val_loss": "best_val_loss"}
# The settings that a number of parameters follows from, and how far apart two numbers may be, as a share: the bias of a
# classification head is no difference.
_SIZES, _SAME_COUNT = {"model.name", "vocabulary"}, 1e-3


@dataclass(frozen=True, kw_only=True)
class Replication:
    """One published figure and what the runs of one setup measured. A change is relative to the published baseline.

    `value` is None where only the change was published.
    """

    experiment: published.PublishedExperiment
    metric: str
    value: float | None
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
                if arm is not None and matches(experiment, known, arm):
                    replications += _replications_of_arm(experiment, setup, arm, compare)
    return tuple(replications)


def matches(experiment: published.PublishedExperiment, known: published.Published, arm: Arm) -> bool:
    """Return True if an arm replicates a published experiment, by the name of one of its runs or by its data and model.

    A run that has the name of one published experiment is not matched with others by its data.
    """
    if any(_has_name_of(experiment, run) for run in arm.runs):
        return True
    named = {id(run) for run in arm.runs if any(_has_name_of(other, run) for other in known.experiments.values())}
    return any(_is_on_data_of(experiment, known, run) for run in arm.runs if id(run) not in named)


def _has_name_of(experiment: published.PublishedExperiment, run: Run) -> bool:
    """Return True for GPT-02, and what the lab adds to a name: GPT-02-lr-1e-3. Its equals' names are its own."""
    names = "|".join(re.escape(name) for name in (experiment.id, experiment.experiment))
    return any(re.fullmatch(rf"({names})([._-].*)?", name) for name in (run.experiment, *run.also))


def _is_on_data_of(experiment: published.PublishedExperiment, known: published.Published, run: Run) -> bool:
    """Return True if a run's data set and kind of model are those of a published experiment."""
    if run.task.name in known.datasets:  # XNLI's description names MNLI too, which it is trained on
        same_data = run.task.name == experiment.dataset
    else:
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
    for metric in {**experiment.figures, **experiment.ratios}:
        pairs = [(run, value) for run in runs if (value := _measured(run, metric)) is not None]
        if not pairs:
            continue
        measured_runs = tuple(run for run, _ in pairs)
        differs = dict.fromkeys(item for run in measured_runs for item in setup_differences(experiment, run))
        if metric in COUNTS and _SIZES & {item.field for item in differs}:
            continue  # of another model
        change = _published_change(experiment, baseline, metric)
        comparison = _change(by_measure, metric) if change is not None else None
        replication = Replication(
            experiment=experiment,
            metric=metric,
            value=experiment.figures.get(metric),
            setup=setup,
            runs=measured_runs,
            measured=estimate([value for _, value in pairs]),
            published_change=change,
            measured_change=comparison.change if comparison else None,
            comparison=comparison,
            differs=tuple(differs),
            stand_in=setup.stand_in,
            verdict=NOT_JUDGED,
        )
        # A run on synthetic data only shows that the tools work, so it gets no verdict.
        judged = not setup.runs[0].synthetic
        replications.append(replace(replication, verdict=_verdict(replication)) if judged else replication)
    return replications


def _published_change(
    experiment: published.PublishedExperiment, baseline: published.PublishedExperiment | None, metric: str
) -> float | None:
    """Return the change against the published baseline; None where nothing was published to compare with."""
    if metric in experiment.ratios:
        return experiment.ratios[metric] - 1
    baseline_value = baseline.figures.get(metric) if baseline else None
    return experiment.figures[metric] / baseline_value - 1 if baseline_value else None


def _verdict(replication: Replication) -> str:
    """Judge a change where the comparison is sound, and a bare value only where it was measured in the same setup."""
    value = replication.value
    if replication.metric in COUNTS and value is not None:  # no seed changes them
        return AGREES if math.isclose(replication.measured.mean, value, rel_tol=_SAME_COUNT) else DIFFERS
    if replication.published_change is not None:
        comparison, measured = replication.comparison, replication.measured_change
        if comparison is None or not comparison.sound or comparison.no_spread:
            return UNDECIDED
        return _agreement(replication.published_change, measured, measured)
    if replication.differs or not value:
        return NOT_JUDGED
    return _agreement(value, replication.measured, replication.measured.mapped(lambda bound: bound / value))


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
    for name, setting in experiment.setup.items():
        value, expected = settings.get(name), published.by_source(setting)
        same = str(setting) in str(value) if name == "hardware" else value in expected.values()
        if value is not None and not same:
            by_source = " / ".join(f"{_plain(item)} ({source})" for source, item in expected.items())
            differing.append(Difference(name, by_source if len(expected) > 1 else _plain(setting), _plain(value)))
    return tuple(differing)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
