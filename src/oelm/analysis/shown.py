"""Arms beside a reference, in pairs of runs with one seed: estimates for a table and a forest plot, without verdicts.

The arms need not share a setup: they may differ in the form of attention. What they are judged on must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..runs.confirmation import Split
from .run import TEST, Run
from .stats import CONFIDENCE, Estimate, estimate
from .texts import over_texts_of

# Where a two-sided interval of this level ends below a margin, a one-sided test at half of the rest finds the same.
NARROW = 0.90

Pairs = tuple[tuple[Run, Run], ...]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An arm with its runs, and the pairs of them with the reference's of the same seed.

    change      the relative change of the perplexity with its interval over seeds; `narrow` is that of the level NARROW
    over_texts  the interval over the documents of the test text, None where that does not judge
    """

    id: str
    name: str
    runs: tuple[Run, ...]
    pairs: Pairs
    change: Estimate | None = None
    narrow: tuple[float, float] | None = None
    over_texts: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ShownArms:
    """A group of arms with all runs of their reference; `measure` is the perplexity that they are judged by."""

    title: str
    measure: str
    confidence: float
    reference_id: str
    reference: str
    runs: tuple[Run, ...]
    arms: tuple[Shown, ...]


@dataclass(frozen=True, kw_only=True)
class Named:
    """An arm to be shown: its id, the name that it is shown by, and its runs by their seeds."""

    id: str
    name: str
    runs: Mapping[int, Run]


def beside(
    title: str, reference: Named, arms: Sequence[Named], judges: Split, confidence: float = CONFIDENCE
) -> ShownArms:
    """Return arms beside their reference, judged on a split."""
    return ShownArms(
        title=title,
        measure=measure_of(judges),
        confidence=confidence,
        reference_id=reference.id,
        reference=reference.name,
        runs=tuple(reference.runs.values()),
        arms=tuple(_shown(arm, reference, judges, confidence) for arm in arms),
    )


def measure_of(judges: Split) -> str:
    """Return the figure of a run that is its perplexity on a split."""
    return f"{TEST}perplexity" if judges == "test" else "perplexity"


def _shown(arm: Named, reference: Named, judges: Split, confidence: float) -> Shown:
    measure = measure_of(judges)
    seeds = [seed for seed, run in arm.runs.items() if seed in reference.runs and run.figure(measure) is not None]
    pairs = tuple(
        (arm.runs[seed], reference.runs[seed]) for seed in seeds if reference.runs[seed].figure(measure) is not None
    )
    shown = Shown(id=arm.id, name=arm.name, runs=tuple(arm.runs.values()), pairs=pairs)
    if not pairs or not on_one_text([run for pair in pairs for run in pair], judges):
        return shown
    logs = [ratio_log(run, other, measure) for run, other in pairs]
    change, narrow = (_change(logs, level) for level in (confidence, NARROW))
    return replace(
        shown,
        change=change,
        narrow=None if narrow.low is None or narrow.high is None else (narrow.low, narrow.high),
        over_texts=over_texts([run for run, _ in pairs], [other for _, other in pairs], judges, confidence),
    )


def ratio_log(run: Run, other: Run, measure: str) -> float:
    """Return the logarithm of a run's perplexity over another's; both have one."""
    return math.log((run.figure(measure) or math.nan) / (other.figure(measure) or math.nan))


def _change(logs: Sequence[float], confidence: float) -> Estimate:
    return estimate(logs, confidence, scale=1.0).exp().mapped(lambda ratio: ratio - 1)


def on_one_text(runs: Sequence[Run], judges: Split) -> bool:
    """Return True when all runs were judged on the same text in the same tokens: else perplexities are not alike."""
    texts = set()
    for run in runs:
        split = run.environment.data.splits.get(judges)
        texts.add((None if split is None else split.sha256, run.environment.data.tokenizer))
    return len(texts) == 1


def over_texts(
    runs: Sequence[Run], references: Sequence[Run], judges: Split, confidence: float
) -> tuple[float, float] | None:
    """Return the interval of the change over the documents of the test text; None where it is not that which judges."""
    logs = over_texts_of(runs, references, confidence) if judges == "test" else None
    return None if logs is None else (math.expm1(logs[0]), math.expm1(logs[1]))
