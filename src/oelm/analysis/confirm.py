"""Judge the hypotheses of a plan on its runs: one family, each against the margin that was written down before.

The arms that a plan shows beside a reference get the same estimates, and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..runs.confirmation import TOKENS_TOLERANCE, Confirmation, PlannedHypothesis, ShownGroup
from .arms import differences
from .compare import Note, note
from .planned import ArmRuns, PlannedRuns
from .run import Run
from .shown import Named, ShownArms, beside, on_one_text, over_texts
from .stats import Estimate, Welch, below, estimate, holm

HOLDS, DOES_NOT_HOLD, NOT_SHOWN, NOT_RUN = "holds", "does-not-hold", "not-shown", "not-run"


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A planned hypothesis and what its runs show.

    change      the relative change of the perplexity, with its interval over seeds; `over_texts` is that over texts
    p           the one-sided p of "the change is below the margin"; `adjusted` is that after Holm's correction
    counts      pairs, or seeds of each arm, against those planned; `runs` are these runs
    """

    hypothesis: PlannedHypothesis
    arm: ArmRuns
    against: ArmRuns
    counts: tuple[tuple[int, int], ...]
    verdict: str = NOT_RUN
    change: Estimate | None = None
    over_texts: tuple[float, float] | None = None
    p: float | None = None
    adjusted: float | None = None
    notes: tuple[Note, ...] = ()
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class _Sample:
    """The runs of a hypothesis that are judged: in pairs by position, or two independent samples."""

    runs: tuple[Run, ...]
    references: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """The runs of a plan, its hypotheses judged in the order of the plan, and the arms that it shows."""

    planned: PlannedRuns
    tested: tuple[Tested, ...]
    shown: tuple[ShownArms, ...] = ()


def confirm(planned: PlannedRuns) -> Confirmed:
    """Judge the hypotheses of a plan.

    The family is all that the plan declares: one that cannot be tested yet counts with a p of 1, so that runs which are
    still missing can take no verdict away. A claim holds where its corrected p is below half of alpha, which its
    two-sided interval then confirms: it ends below the margin.
    """
    confirmation = planned.study.confirmation
    tested = [_test(hypothesis, planned) for hypothesis in confirmation.hypotheses]
    open_to_holding = [item.p is not None and not item.arm.lost and _is_complete(item) for item in tested]
    values = [item.p if can and item.p is not None else 1.0 for item, can in zip(tested, open_to_holding, strict=True)]
    judged = []
    for item, can, adjusted in zip(tested, open_to_holding, holm(values), strict=True):
        corrected = replace(item, adjusted=adjusted if can else None)
        judged.append(replace(corrected, verdict=_verdict(corrected, confirmation.alpha)))
    shown = tuple(_shown(group, planned) for group in planned.study.shown)
    return Confirmed(planned=planned, tested=tuple(judged), shown=shown)


def _verdict(tested: Tested, alpha: float) -> str:
    """Return the verdict. A run that was lost speaks against its arm: what is left makes that arm look better."""
    if not _is_complete(tested):
        return NOT_RUN
    if tested.adjusted is not None and tested.adjusted < alpha / 2:
        return HOLDS
    low = tested.change.low if tested.change is not None and tested.p is not None else None
    beyond = low is not None and low > tested.hypothesis.margin
    return DOES_NOT_HOLD if beyond and not tested.against.lost else NOT_SHOWN


def _is_complete(tested: Tested) -> bool:
    """Return True when every planned run has ended, and the finished ones were judged."""
    unjudged = any(item.code == "plan_unjudged" for item in tested.notes)
    return not (tested.arm.missing or tested.against.missing or unjudged)


def _test(hypothesis: PlannedHypothesis, planned: PlannedRuns) -> Tested:
    """Return the estimates and the test of a hypothesis on the runs that are there, before any correction."""
    confirmation = planned.study.confirmation
    arm, against = _sides(hypothesis.arm, hypothesis.against, hypothesis.test, planned)
    sample, counts = _sample(hypothesis.test, arm, against, confirmation.measure)
    notes = [*_notes(arm, against, confirmation), *_differences(sample)]
    runs = (*sample.runs, *sample.references)
    tested = Tested(hypothesis=hypothesis, arm=arm, against=against, counts=counts, runs=runs)
    one, other = (_logs(runs, confirmation.measure) for runs in (sample.runs, sample.references))
    if one and other:
        test = _paired if hypothesis.test == "paired" else _welch
        change, p = test(one, other, hypothesis.margin, 1 - confirmation.alpha)
        if p is None and min(len(one), len(other)) > 1:
            notes.append(note("plan_no_spread"))
        if not on_one_text(runs, confirmation.judges):
            notes.append(note("plan_texts"))
            p = None
        tested = replace(
            tested,
            change=change,
            p=p,
            over_texts=over_texts(sample.runs, sample.references, confirmation.judges, 1 - confirmation.alpha),
        )
    return replace(tested, notes=tuple(notes))


def _shown(group: ShownGroup, planned: PlannedRuns) -> ShownArms:
    """Return the arms of a group beside its reference."""
    confirmation, seeds = planned.study.confirmation, planned.study.seeds
    reference, *arms = (
        Named(id=arm, name=name, runs=planned.of(arm, seeds(arm)).runs) for arm, name in group.names.items()
    )
    return beside(group.title, reference, arms, confirmation.judges, 1 - confirmation.alpha)


def _sides(arm: str, against: str, test: str, planned: PlannedRuns) -> tuple[ArmRuns, ArmRuns]:
    """Return what became of the runs of both arms that a test needs: a seed of one alone is in no pair."""
    one, other = map(planned.study.seeds, (arm, against))
    if test == "paired":
        one = other = tuple(seed for seed in one if seed in other)
    return planned.of(arm, one), planned.of(against, other)


def _sample(test: str, arm: ArmRuns, against: ArmRuns, measure: str) -> tuple[_Sample, tuple[tuple[int, int], ...]]:
    """Return the runs that are judged, with their numbers against those planned."""
    one, other = (
        {seed: run for seed, run in side.runs.items() if run.figure(measure) is not None} for side in (arm, against)
    )
    if test == "welch":
        counts = (len(one), len(arm.planned)), (len(other), len(against.planned))
        return _Sample(tuple(one.values()), tuple(other.values())), counts
    seeds = [seed for seed in one if seed in other]
    pairs = _Sample(tuple(one[seed] for seed in seeds), tuple(other[seed] for seed in seeds))
    return pairs, ((len(seeds), len(arm.planned)),)


def _logs(runs: Sequence[Run], measure: str) -> list[float]:
    return [math.log(run.figure(measure) or math.nan) for run in runs]


def _paired(one: list[float], other: list[float], margin: float, confidence: float) -> tuple[Estimate, float | None]:
    """Return the change over pairs, and the one-sided p of its being below the margin; None where that is no test."""
    logs = [a - b for a, b in zip(one, other, strict=True)]
    mean = estimate(logs, confidence, scale=1.0)
    p = None if mean.low is None else below(logs, math.log1p(margin))
    return mean.exp().mapped(lambda ratio: ratio - 1), p


def _welch(one: list[float], other: list[float], margin: float, confidence: float) -> tuple[Estimate, float | None]:
    """Return the change of the means, and the one-sided p of its being below the margin; None where that is no test."""
    count = min(len(one), len(other))
    difference = Welch.of(one, other)
    if difference is None:
        return Estimate(mean=math.expm1(sum(one) / len(one) - sum(other) / len(other)), n=count), None
    low, high = difference.interval(confidence)
    change = Estimate(mean=difference.mean, n=count, low=low, high=high).exp().mapped(lambda ratio: ratio - 1)
    return change, difference.below(math.log1p(margin))


def _notes(arm: ArmRuns, against: ArmRuns, confirmation: Confirmation) -> list[Note]:
    """Return what a reader must know about the runs of a hypothesis: those missing, lost, or not judged."""
    notes = []
    sides = (arm, against)
    missing = sum(len(side.missing) for side in sides)
    if missing:
        notes.append(note("plan_missing", count=missing, all=sum(len(side.planned) for side in sides)))
    for side in sides:
        if side.lost:
            notes.append(note("plan_lost", arm=side.arm, count=len(side.lost), all=len(side.planned)))
    runs = [run for side in sides for run in side.runs.values()]
    unjudged = [run for run in runs if run.figure(confirmation.measure) is None]
    if unjudged:
        notes.append(note("plan_unjudged", count=len(unjudged)))
    tokens = confirmation.tokens
    if not isinstance(tokens, str):
        trained = sorted({run.result.tokens for run in runs})
        others = [f"{count:,}" for count in trained if abs(count - tokens) > TOKENS_TOLERANCE * tokens]
        if others:
            notes.append(note("plan_tokens", found=" / ".join(others), planned=f"{tokens:,.0f}"))
    return notes


def _differences(sample: _Sample) -> list[Note]:
    """Return a note that names the fields, beside the method, in which the runs differ."""
    if not sample.references:
        return []
    found = [item for run in (*sample.runs, *sample.references) for item in differences(run, sample.references[0])[0]]
    fields = sorted({item.field for item in found})
    return [note("plan_differs", fields=", ".join(fields))] if fields else []
