"""Compare two arms: runs paired by seed, at equal rates or each at its best rate, with the fields that confound it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from .arms import JUDGED, MEASURES, PRIMARY, TIMES, Arm, Difference, Measure, Setup, differences, group_runs
from .run import Run
from .stats import ALPHA, Estimate, estimate, holm, tost
from .texts import over_texts

# How far apart two arms may be and still be called alike: a share of the measure, or percentage points.
MARGINS = dict.fromkeys(("perplexity", "best_perplexity", "test_perplexity"), 0.05)
MARGINS |= dict.fromkeys(("masked_perplexity", "best_masked_perplexity", "test_masked_perplexity"), 0.05)
MARGINS |= dict.fromkeys(("accuracy", "best_accuracy", "exact_match", "token_accuracy"), 1.0)

# The name of the confound of arms that lost seeds. It is not a field of the config, as the other names are.
FAILED = "seeds that failed"
# Two setups that differ in more fields of the config than this belong to different experiments.
_SAME_EXPERIMENT = 4


@dataclass(frozen=True)
class Note:
    """Something that a reader must know, as a code and its values; the report has the sentence for each code."""

    code: str
    values: tuple[tuple[str, str], ...] = ()


def note(code: str, **values: object) -> Note:
    """Return a note with its values as text."""
    return Note(code, tuple((name, str(value)) for name, value in values.items()))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against another by one measure.

    `basis` is "equal" (both at one learning rate), "best" (each at its best rate of the grid that both have) or
    "confounded" (no common rate; the fields are named). `log_ratio` is the mean of log(arm / reference), `difference`
    that of arm - reference in the measure's unit; `tested` is the one that is tested. With one pair, or where all pairs
    differ by the same amount, neither has an interval. `adjusted` is the corrected p of no difference, `alike` that of
    TOST within the measure's margin.
    """

    setup: Setup
    measure: Measure
    arm: str
    reference: str
    basis: str
    rate: float
    reference_rate: float
    pairs: tuple[tuple[Run, Run], ...]
    unpaired: tuple[Run, ...]
    log_ratio: Estimate | None
    difference: Estimate | None
    confounds: tuple[Difference, ...] = ()
    cautions: tuple[Difference, ...] = ()
    notes: tuple[Note, ...] = ()
    grid: tuple[float, ...] = ()
    adjusted: float | None = None
    alike: float | None = None

    @property
    def n(self) -> int:
        """Return the number of pairs in which both runs have the measure."""
        return len(self.values)

    @property
    def sound(self) -> bool:
        """Return True when the two arms differ in nothing but the method."""
        return not self.confounds

    @property
    def tested(self) -> Estimate | None:
        """Return the estimate that decides p and direction: of the logarithms where the measure is read as a ratio."""
        return self.log_ratio if self.measure.log else self.difference

    @property
    def ratio(self) -> Estimate | None:
        """Return the ratio of the arm to the reference, as a geometric mean over the pairs."""
        return None if self.log_ratio is None else self.log_ratio.exp()

    @property
    def change(self) -> Estimate | None:
        """Return the ratio as a relative change: 0.05 is 5 % more."""
        return None if self.ratio is None else self.ratio.mapped(lambda ratio: ratio - 1)

    @property
    def no_spread(self) -> bool:
        """Return True when all pairs differ by the same amount: chance cannot be judged, and the runs may be copies."""
        estimates = (self.log_ratio, self.difference)
        return self.n > 1 and any(estimate is not None and estimate.low is None for estimate in estimates)

    @property
    def logs(self) -> list[float]:
        """Return the differences of logarithms of the pairs, on which ratios are tested."""
        return [math.log(a / b) for a, b in self.values]

    @cached_property
    def over_texts(self) -> tuple[float, float] | None:
        """Return the interval of the relative change over test texts; None where it is not of a test perplexity."""
        if self.measure.name not in JUDGED.values() or not self.pairs:
            return None
        logs = over_texts(self.pairs)
        return None if logs is None else (math.expm1(logs[0]), math.expm1(logs[1]))

    @property
    def values(self) -> list[tuple[float, float]]:
        """Return the measure of both runs of each pair, where both have it."""
        name = self.measure.name
        values = [(run.figure(name), reference_run.figure(name)) for run, reference_run in self.pairs]
        return [(a, b) for a, b in values if a is not None and b is not None]

    @property
    def size(self) -> float:
        """Return the largest of the numbers compared; rounding errors of their differences are relative to it."""
        return max((abs(value) for pair in self.values for value in pair), default=0.0)

    @property
    def p(self) -> float | None:
        """Return the p of no difference before any correction; None where there is nothing to test."""
        return self.tested.p if self.tested is not None and self.sound and not self.no_spread else None

    @property
    def conclusive(self) -> bool:
        """Return True when the comparison is sound and its corrected test finds a difference."""
        return self.sound and self.adjusted is not None and self.adjusted < ALPHA

    @property
    def winner(self) -> str | None:
        """Return the better arm if the difference is conclusive, else None."""
        if not self.conclusive or self.tested is None:
            return None
        better = self.tested.mean < 0 if self.measure.lower_is_better else self.tested.mean > 0
        return self.arm if better else self.reference


# The signature of `headline`, so that an analysis can pass on a version that computes each comparison once.
Compare = Callable[[Setup, Arm, Arm, Measure], Comparison | None]


def compare_runs(one: Run, other: Run) -> Comparison:
    """Compare one run with another: their difference, and every field in which they differ."""
    setup = group_runs([other])[0].setups[0]
    measure = MEASURES[PRIMARY[one.task.kind]]
    basis = "equal" if one.rate == other.rate else "confounded"
    side, reference = (Side(run.method, run.rate, (run,)) for run in (one, other))
    comparison = compare_sides(setup, measure, side, reference, basis, pair=False)
    if one.seed == other.seed:
        return comparison
    seeds = Difference("seed", str(one.seed), str(other.seed))
    return replace(comparison, confounds=(*comparison.confounds, seeds))


def headline(setup: Setup, arm: Arm, reference: Arm, measure: Measure) -> Comparison | None:
    """Return the comparison to read first: each arm at its best rate of a common grid, or both at the one rate."""
    common = sorted(set(arm.rates) & set(reference.rates))
    if not common:
        # Each arm at the best rate of its own grid: confounded by the rate, so never a verdict.
        side = Side.of(arm, best_rate(arm, measure))
        return compare_sides(setup, measure, side, Side.of(reference, best_rate(reference, measure)), "confounded")
    if len(common) == 1:
        notes = [note("one_rate", rate=f"{common[0]:g}")]
        for candidate in (arm, reference):
            notes += _better_elsewhere(candidate, common, measure)
        return at_rate(setup, arm, reference, measure, common[0], notes)
    seeds = set.intersection(*(set(a.by_seed(rate)) for a in (arm, reference) for rate in common))
    if not seeds:
        rate = max(common, key=lambda r: (len(set(arm.by_seed(r)) & set(reference.by_seed(r))), -r))
        return at_rate(setup, arm, reference, measure, rate, [note("no_seed_at_every_rate")])
    chosen = {}
    for candidate in (arm, reference):
        best = _best(candidate, common, measure, seeds)
        if best is None:
            return None
        chosen[candidate.method] = best
    notes = [note("grid", rates=", ".join(f"{rate:g}" for rate in common), seeds=len(seeds))]
    for candidate in (arm, reference):
        rate, rates = chosen[candidate.method], candidate.rates
        if rate in (rates[0], rates[-1]):
            code = "edge_low" if rate == rates[0] else "edge_high"
            notes.append(note(code, arm=candidate.method, rate=f"{rate:g}"))
        notes += _better_elsewhere(candidate, common, measure)
    rate, reference_rate = chosen[arm.method], chosen[reference.method]
    comparison = compare_sides(setup, measure, Side.of(arm, rate), Side.of(reference, reference_rate), "best")
    return replace(comparison, notes=(*comparison.notes, *notes), grid=tuple(common))


def at_rate(
    setup: Setup, arm: Arm, reference: Arm, measure: Measure, rate: float, notes: Sequence[Note] = ()
) -> Comparison:
    """Compare both arms at one learning rate."""
    comparison = compare_sides(setup, measure, Side.of(arm, rate), Side.of(reference, rate), "equal")
    return replace(comparison, notes=(*comparison.notes, *notes))


def equal_rates(setup: Setup, arm: Arm, reference: Arm, measure: Measure) -> list[Comparison]:
    """Compare both arms at every learning rate that they share."""
    common = sorted(set(arm.rates) & set(reference.rates))
    return [at_rate(setup, arm, reference, measure, rate) for rate in common]


def of_pairs(comparison: Comparison, measure: Measure) -> Comparison:
    """Compare the same pairs by another measure."""
    if measure == comparison.measure:
        return comparison
    if not comparison.pairs:
        return replace(comparison, measure=measure, log_ratio=None, difference=None)
    arm_runs, reference_runs = (tuple(pair[side] for pair in comparison.pairs) for side in (0, 1))
    side = Side(comparison.arm, comparison.rate, arm_runs)
    reference = Side(comparison.reference, comparison.reference_rate, reference_runs)
    other_measure = compare_sides(comparison.setup, measure, side, reference, comparison.basis, pair=False)
    # A run that failed took as long for its steps as the others, so it does not confound times.
    failed = () if measure.name in TIMES else tuple(item for item in comparison.confounds if item.field == FAILED)
    return replace(other_measure, grid=comparison.grid, confounds=(*failed, *other_measure.confounds))


def best_rate(arm: Arm, measure: Measure) -> float:
    """Return an arm's best learning rate by itself; where no seed was run at every rate, the one with the most runs."""
    best = _best(arm, list(arm.rates), measure)
    return max(arm.rates, key=lambda rate: len(arm.at(rate))) if best is None else best


def nearest_reference(setup: Setup, others: Iterable[Setup]) -> tuple[Setup, Arm] | None:
    """Return a reference for arms whose setup has none: that of the setup which differs in the fewest fields.

    A setup that differs in many fields is another experiment, and a number beside it would mislead.
    """
    settings = dict(setup.settings)
    candidates = []
    for other in others:
        if other is not setup and other.reference is not None:
            theirs = dict(other.settings)
            differing = [name for name in set(settings) | set(theirs) if settings.get(name) != theirs.get(name)]
            if sum(not name.startswith("environment.") for name in differing) <= _SAME_EXPERIMENT:
                candidates.append((len(differing), other, other.reference))
    if not candidates:
        return None
    _, nearest, arm = min(candidates, key=lambda item: item[0])
    return nearest, arm


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Apply Holm's correction over the sound comparisons of a setup: to the tests of a difference, and to TOST's.

    A setup is one family of tests, since its arms share a reference. Other setups in a report do not change its
    verdicts.
    """
    p_differ = _corrected([comparison.p for comparison in comparisons])
    p_alike = _corrected([_tost(comparison) for comparison in comparisons])
    return [
        replace(comparison, adjusted=p, alike=alike)
        for comparison, p, alike in zip(comparisons, p_differ, p_alike, strict=True)
    ]


def between(setup: Setup, pairs: Iterable[tuple[str, str]]) -> list[Comparison]:
    """Compare the named pairs of arms that a setup has with each other, corrected together."""
    comparisons = []
    for name, reference in pairs:
        arm, other = setup.arm(name), setup.arm(reference)
        if arm is not None and other is not None:
            comparisons.append(headline(setup, arm, other, setup.measure))
    return correct([comparison for comparison in comparisons if comparison is not None])


def _corrected(values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values with Holm's correction; None stays None and is not counted."""
    adjusted = iter(holm([value for value in values if value is not None]))
    return [None if value is None else next(adjusted) for value in values]


def _tost(comparison: Comparison) -> float | None:
    """Return the p of both arms being alike within the measure's margin; None where that is not tested."""
    margin = MARGINS.get(comparison.measure.name)
    if margin is None or comparison.p is None:
        return None
    if comparison.measure.log:
        return tost(comparison.logs, math.log1p(-margin), math.log1p(margin))
    return tost([100 * (a - b) for a, b in comparison.values], -margin, margin)


def _better_elsewhere(arm: Arm, common: Sequence[float], measure: Measure) -> list[Note]:
    """Return a note if an arm does better at a rate that the other arm was not run at."""
    better = _best(arm, list(arm.rates), measure)
    if better is None or better in common:
        return []
    return [note("better_elsewhere", arm=arm.method, rate=f"{better:g}")]


def _best(arm: Arm, rates: Sequence[float], measure: Measure, seeds: set[int] | None = None) -> float | None:
    """Return the rate with the best mean over the same seeds at every rate; None where there is none to choose from."""
    if seeds is None:
        seeds = set.intersection(*(set(arm.by_seed(rate)) for rate in rates))
    means: dict[float, float] = {}
    for rate in rates:
        values = [run.figure(measure.name) for seed, run in arm.by_seed(rate).items() if seed in seeds]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            means[rate] = fmean(known)
    if not means:
        return None
    choose: Callable[..., float] = min if measure.lower_is_better else max
    return choose(means, key=lambda rate: means[rate])


@dataclass(frozen=True)
class Side:
    """An arm at one learning rate: its runs there, and how many runs of that rate failed."""

    method: str
    rate: float
    runs: tuple[Run, ...]
    lost: int = 0

    @classmethod
    def of(cls, arm: Arm, rate: float) -> Side:
        return cls(arm.method, rate, arm.at(rate), len(arm.lost_at(rate)))

    @property
    def lost_share(self) -> str:
        return f"{self.lost} of {self.lost + len(self.runs)}"


def compare_sides(
    setup: Setup, measure: Measure, side: Side, reference: Side, basis: str, pair: bool = True
) -> Comparison:
    """Compare the runs of two sides, paired by seed, or with pair=False in the order given."""
    by_seed = {run.seed: run for run in reference.runs}
    if pair:
        pairs = [(run, by_seed[run.seed]) for run in side.runs if run.seed in by_seed]
    else:
        pairs = list(zip(side.runs, reference.runs, strict=True))
    paired = {id(run) for pair_of_runs in pairs for run in pair_of_runs}
    unpaired = tuple(run for run in [*side.runs, *reference.runs] if id(run) not in paired)
    confounds, cautions = _confounds(side, reference, pairs or [(side.runs[0], reference.runs[0])], basis)
    notes = []
    if not pairs:
        notes.append(note("no_common_seed"))
    elif unpaired and pair:
        notes.append(note("unpaired", count=len(unpaired)))
    if measure.name in TIMES:
        doubts = sorted({run.times_doubt for pair_of_runs in pairs for run in pair_of_runs if run.times_doubt})
        if doubts:
            confounds["timing"] = Difference("timing", *(doubts * 2)[:2])
            notes.append(note("times_doubtful"))
    comparison = Comparison(
        setup=setup,
        measure=measure,
        arm=side.method,
        reference=reference.method,
        basis=basis,
        rate=side.rate,
        reference_rate=reference.rate,
        pairs=tuple(pairs),
        unpaired=unpaired,
        log_ratio=None,
        difference=None,
        confounds=tuple(confounds.values()),
        cautions=tuple(cautions.values()),
        notes=tuple(notes),
    )
    values = comparison.values
    if not values:
        return comparison
    # Rounding errors are relative to the numbers, so those of the logarithm of a ratio do not depend on their size.
    log_ratio = estimate(comparison.logs, scale=1.0) if all(a > 0 and b > 0 for a, b in values) else None
    difference = estimate([a - b for a, b in values], scale=comparison.size)
    comparison = replace(comparison, log_ratio=log_ratio, difference=difference)
    if len(values) == 1:
        return replace(comparison, notes=(*comparison.notes, note("one_seed")))
    return replace(comparison, notes=(*comparison.notes, note("no_spread"))) if comparison.no_spread else comparison


def _confounds(
    side: Side, reference: Side, pairs: Sequence[tuple[Run, Run]], basis: str
) -> tuple[dict[str, Difference], dict[str, Difference]]:
    """Return the fields that confound a comparison, and those that a reader should know of, by name."""
    confounds: dict[str, Difference] = {}
    cautions: dict[str, Difference] = {}
    if side.lost or reference.lost:
        # Seeds do not fail at random: the remaining ones make the arm that lost them look better than it is.
        confounds[FAILED] = Difference(FAILED, side.lost_share, reference.lost_share)
    for run, reference_run in pairs:
        confounding, cautionary = differences(run, reference_run, rate=basis != "best")
        confounds |= {item.field: item for item in confounding}
        cautions |= {item.field: item for item in cautionary}
    return confounds, cautions
