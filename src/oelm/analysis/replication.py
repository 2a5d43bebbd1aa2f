"""Published against measured: for each published figure that has runs, ours, the set-ups' differences, a verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runs import published
from .arms import MEASURES, Arm, Difference, Group, Setup
from .compare import Comparison, best_rate, headline, of_pairs
from .run import Run
from .stats import Estimate, estimate, too_noisy

AGREES, DIFFERS, UNDECIDED, NOT_JUDGED = "agrees", "differs", "undecided", "not-judged"

# The study kept its best checkpoint, so its figures are laid beside the best ones of a run.
_OURS = {"perplexity": "best_perplexity", "accuracy": "best_accuracy", "val_loss": "best_val_loss"}


@dataclass(frozen=True, kw_only=True)
class Replication:
    """One published figure and what the runs of one setup say. `change` is relative to what it is compared with."""

    experiment: published.Experiment
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


def replicate(groups: Sequence[Group]) -> tuple[Replication, ...]:
    """Every published figure that an arm of these groups can be laid beside."""
    found = []
    known = published.load()
    for experiment in known:
        for group in groups:
            for setup in group.setups:
                arm = setup.arm(experiment.method)
                if arm is not None and matches(experiment, known, arm.runs[0]):
                    found += _of_arm(experiment, known, setup, arm)
    return tuple(found)


def matches(experiment: published.Experiment, known: published.Published, run: Run) -> bool:
    """Whether a run is of a published experiment: by its experiment's id, or by data, method and kind of model."""
    if re.fullmatch(rf"{re.escape(experiment.id)}([._-].*)?", run.experiment):
        return True
    if any(re.fullmatch(rf"{re.escape(other.id)}([._-].*)?", run.experiment) for other in known):
        return False
    text = " ".join([run.dataset, run.config.data.path or "", run.task.name]).lower()
    named = any(word in text for word in known.datasets[experiment.dataset])
    return named and _is_gpt(run) == str(experiment.setup["model.name"]).startswith("gpt")


def _is_gpt(run: Run) -> bool:
    return "gpt" in run.config.model.name.lower()


def _of_arm(experiment: published.Experiment, known: published.Published, setup: Setup, arm: Arm) -> list[Replication]:
    other = known[experiment.against] if experiment.against else None
    reference = setup.arm(other.method) if other else None
    chosen = headline(setup, arm, reference, setup.measure) if reference is not None and reference is not arm else None
    runs = arm.at(chosen.rate) if chosen is not None else arm.at(best_rate(arm, setup.measure))
    rows = []
    for figure in experiment.figures:
        pairs = [(run, value) for run in runs if (value := _measured(run, figure.metric)) is not None]
        if not pairs:
            continue
        before = other.value(figure.metric) if other else None
        change = figure.value / before - 1 if before else None
        ours = _change(chosen, figure.metric) if change is not None else None
        used = tuple(run for run, _ in pairs)
        differs = setup_differences(experiment, used[0])
        synthetic = setup.runs[0].synthetic
        sound = chosen is not None and ours is not None and ours.sound and not ours.no_spread
        measured = estimate([value for _, value in pairs])
        found = _verdict(figure.value, measured, change, ours.change if ours else None, sound, not differs)
        verdict = NOT_JUDGED if synthetic else found  # a smoke run shows that the tools work, and nothing else
        rows.append(
            Replication(
                experiment=experiment,
                metric=figure.metric,
                value=figure.value,
                setup=setup,
                runs=used,
                measured=measured,
                published_change=change,
                measured_change=ours.change if ours else None,
                comparison=ours,
                differs=differs,
                stand_in=setup.stand_in,
                verdict=verdict,
            )
        )
    return rows


def _verdict(
    value: float, measured: Estimate, change: float | None, ours: Estimate | None, sound: bool, same_setup: bool
) -> str:
    """Effects are judged where the pair is sound, bare values only in the same set-up."""
    if change is not None:
        return _beside(change, ours, ours) if sound else UNDECIDED
    if not same_setup:
        return NOT_JUDGED
    return _beside(value, measured, measured.mapped(lambda bound: bound / value) if value else None)


def _beside(value: float, ours: Estimate | None, relative: Estimate | None) -> str:
    """Whether our interval holds a published value; an interval so wide that it holds any agrees with nothing."""
    if ours is None or ours.low is None or ours.high is None or too_noisy(relative):
        return UNDECIDED
    return AGREES if ours.low <= value <= ours.high else DIFFERS


def _change(chosen: Comparison | None, metric: str) -> Comparison | None:
    """The comparison that a published change is laid beside; none for figures that are no measure of a run."""
    name = _OURS.get(metric, metric)
    if chosen is None or name not in MEASURES:
        return None
    found = of_pairs(chosen, MEASURES[name])
    return found if found.change is not None else None


def _measured(run: Run, metric: str) -> float | None:
    step = re.fullmatch(r"perplexity_at_step_(\d+)", metric)
    if step:
        return next((line.perplexity for line in run.metrics if line.kind == "val" and line.step == int(step[1])), None)
    if metric == "best_epoch":
        return run.result.best.epoch if run.result.best is not None else None
    if metric == "step_seconds" and run.times_doubt:
        return None
    return run.figure(_OURS.get(metric, metric)) or run.figure(metric)


def setup_differences(experiment: published.Experiment, run: Run) -> tuple[Difference, ...]:
    """Settings in which a run differs from the published set-up, where both are known."""
    environment = run.environment
    flat = {**run.flat_config, "hardware": environment.hardware, "vocabulary": environment.data.vocab_size}
    found = []
    for name, wanted in experiment.setup.items():
        ours = flat.get(name)
        same = str(wanted) in str(ours) if name == "hardware" else ours == wanted
        if ours is not None and not same:
            found.append(Difference(name, _plain(wanted), _plain(ours)))
    return tuple(found)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
