"""Arm against arm: paired by seed, at equal rates and at each arm's best rate of a common grid, with what spoils it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from .arms import MEASURES, PRIMARY, TIMES, Arm, Difference, Measure, Setup, differences, group_runs
from .run import Run
from .stats import ALPHA, Estimate, estimate, holm, tost

# How far apart two arms may be and still be called alike: a share of the figure, or points of a hundred.
MARGINS = {"perplexity": 0.05, "best_perplexity": 0.05, "accuracy": 1.0, "best_accuracy": 1.0, "exact_match": 1.0}

# The confound of arms that lost seeds: no field of a config, so it needs a name.
FAILED = "seeds that failed"
# In how many fields of the config two setups may differ and still belong to one experiment.
_SAME_EXPERIMENT = 4


@dataclass(frozen=True)
class Note:
    """Something that a reader must know, as a code and its values; the report has the words."""

    code: str
    values: tuple[tuple[str, str], ...] = ()


def note(code: str, **values: object) -> Note:
    return Note(code, tuple((name, str(value)) for name, value in values.items()))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against another by one measure.

    `basis`: "equal" (both at one rate), "best" (each at its best rate of the grid that both have) or "confounded"
    (there is no common ground; the fields are named). `log_ratio` is the logarithm of arm / reference, `difference` is
    arm - reference in the measure's own unit; one of them is `tested`. With one pair neither has an interval, and none
    whose pairs all differ by the same. `adjusted` is the corrected p of no difference, `alike` that of TOST within the
    measure's margin.
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
        """How many pairs are in the difference: those of which both runs have the figure."""
        return len(self.values)

    @property
    def sound(self) -> bool:
        """Whether the two differ in nothing but the method."""
        return not self.confounds

    @property
    def tested(self) -> Estimate | None:
        """What gives a verdict both its p and its direction: the logarithm where the measure is read as a ratio."""
        return self.log_ratio if self.measure.log else self.difference

    @property
    def ratio(self) -> Estimate | None:
        return None if self.log_ratio is None else self.log_ratio.exp()

    @property
    def change(self) -> Estimate | None:
        """The ratio as a relative change: 0.05 is 5 % more."""
        return None if self.ratio is None else self.ratio.mapped(lambda ratio: ratio - 1)

    @property
    def no_spread(self) -> bool:
        """Whether all pairs differ by the same: chance cannot be judged from them, and the runs may be no repeats."""
        found = (self.log_ratio, self.difference)
        return self.n > 1 and any(one is not None and one.low is None for one in found)

    @property
    def logs(self) -> list[float]:
        """The pairs' differences of logarithms: what ratios are tested on."""
        return [math.log(a / b) for a, b in self.values]

    @property
    def values(self) -> list[tuple[float, float]]:
        found = [(one.figure(self.measure.name), other.figure(self.measure.name)) for one, other in self.pairs]
        return [(a, b) for a, b in found if a is not None and b is not None]

    @property
    def size(self) -> float:
        """The size of the figures compared: what rounding may do to their difference goes by it."""
        return max((abs(value) for both in self.values for value in both), default=0.0)

    @property
    def p(self) -> float | None:
        """The p of no difference, before any correction; none where there is nothing to test."""
        return self.tested.p if self.tested is not None and self.sound and not self.no_spread else None

    @property
    def conclusive(self) -> bool:
        """Whether the corrected test finds a difference, in a comparison that nothing spoils."""
        return self.sound and self.adjusted is not None and self.adjusted < ALPHA

    @property
    def winner(self) -> str | None:
        """The better arm where the difference is conclusive."""
        if not self.conclusive or self.tested is None:
            return None
        better = self.tested.mean < 0 if self.measure.lower_is_better else self.tested.mean > 0
        return self.arm if better else self.reference


def compare_runs(one: Run, other: Run) -> Comparison:
    """Two runs, `one` against `other`: their difference, and every field in which they differ."""
    setup = group_runs([other])[0].setups[0]
    measure = MEASURES[PRIMARY[one.task.kind]]
    basis = "equal" if one.rate == other.rate else "confounded"
    side, beside = (_Side(run.method, run.rate, (run,)) for run in (one, other))
    made = _compare(setup, measure, side, beside, basis, pair=False)
    if one.seed == other.seed:
        return made
    return replace(made, confounds=(*made.confounds, Difference("seed", str(one.seed), str(other.seed))))


def headline(setup: Setup, arm: Arm, reference: Arm, measure: Measure) -> Comparison | None:
    """The comparison to read first: at each arm's best rate where both have a grid, else at the one common rate."""
    common = sorted(set(arm.rates) & set(reference.rates))
    if not common:
        return _without_common_rate(setup, arm, reference, measure)
    if len(common) == 1:
        notes = [note("one_rate", rate=f"{common[0]:g}")]
        for which in (arm, reference):
            notes += _better_elsewhere(which, common, measure)
        return at_rate(setup, arm, reference, measure, common[0], notes)
    seeds = set.intersection(*(set(a.by_seed(rate)) for a in (arm, reference) for rate in common))
    if not seeds:
        rate = max(common, key=lambda r: (len(set(arm.by_seed(r)) & set(reference.by_seed(r))), -r))
        return at_rate(setup, arm, reference, measure, rate, [note("no_seed_at_every_rate")])
    chosen = {}
    for which in (arm, reference):
        best = _best(which, common, measure, seeds)
        if best is None:
            return None
        chosen[which.method] = best
    notes = [note("grid", rates=", ".join(f"{rate:g}" for rate in common), seeds=len(seeds))]
    for which in (arm, reference):
        rate, rates = chosen[which.method], which.rates
        if rate in (rates[0], rates[-1]):
            code = "edge_low" if rate == rates[0] else "edge_high"
            notes.append(note(code, arm=which.method, rate=f"{rate:g}"))
        notes += _better_elsewhere(which, common, measure)
    rate, reference_rate = chosen[arm.method], chosen[reference.method]
    made = _compare(setup, measure, _Side.of(arm, rate), _Side.of(reference, reference_rate), "best")
    return replace(made, notes=(*made.notes, *notes), grid=tuple(common))


def at_rate(
    setup: Setup, arm: Arm, reference: Arm, measure: Measure, rate: float, notes: Sequence[Note] = ()
) -> Comparison:
    """Both arms at one rate."""
    made = _compare(setup, measure, _Side.of(arm, rate), _Side.of(reference, rate), "equal")
    return replace(made, notes=(*made.notes, *notes))


def equal_rates(setup: Setup, arm: Arm, reference: Arm, measure: Measure) -> list[Comparison]:
    """Both arms at every rate that they share."""
    common = sorted(set(arm.rates) & set(reference.rates))
    return [at_rate(setup, arm, reference, measure, rate) for rate in common]


def of_pairs(comparison: Comparison, measure: Measure) -> Comparison:
    """The same pairs by another measure."""
    if measure == comparison.measure:
        return comparison
    if not comparison.pairs:
        return replace(comparison, measure=measure, log_ratio=None, difference=None)
    one, other = (tuple(pair[side] for pair in comparison.pairs) for side in (0, 1))
    made = _compare(
        comparison.setup,
        measure,
        _Side(comparison.arm, comparison.rate, one),
        _Side(comparison.reference, comparison.reference_rate, other),
        comparison.basis,
        pair=False,
    )
    # A run that came to nothing took as long for its steps as the others.
    failed = () if measure.name in TIMES else tuple(item for item in comparison.confounds if item.field == FAILED)
    return replace(made, grid=comparison.grid, confounds=(*failed, *made.confounds))


def best_rate(arm: Arm, measure: Measure) -> float:
    """An arm's best rate by itself; where no seed was run at every rate, the one with the most runs."""
    best = _best(arm, list(arm.rates), measure)
    return max(arm.rates, key=lambda rate: len(arm.at(rate))) if best is None else best


def nearest_reference(setup: Setup, others: Iterable[Setup]) -> tuple[Setup, Arm] | None:
    """A reference for arms whose own setup has none: that of the group's setup that differs in the fewest fields.

    One that differs in many has none to offer: it is another experiment, and a number beside it would mislead.
    """
    mine = dict(setup.settings)
    found = []
    for other in others:
        if other is not setup and other.reference is not None:
            theirs = dict(other.settings)
            apart = [name for name in set(mine) | set(theirs) if mine.get(name) != theirs.get(name)]
            if sum(not name.startswith("environment.") for name in apart) <= _SAME_EXPERIMENT:
                found.append((len(apart), other, other.reference))
    if not found:
        return None
    _, other, arm = min(found, key=lambda item: item[0])
    return other, arm


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Holm's correction over a setup's comparisons that are not spoilt: of the tests of a difference, and of TOST's.

    A setup is the family: its arms share a reference, and what else lies in a report cannot change their verdicts.
    """
    different = _corrected([one.p for one in comparisons])
    alike = _corrected([_tost(one) for one in comparisons])
    return [replace(one, adjusted=p, alike=same) for one, p, same in zip(comparisons, different, alike, strict=True)]


def between(setup: Setup, pairs: Iterable[tuple[str, str]]) -> list[Comparison]:
    """Arms of one setup against each other, as named: those pairs that it has, corrected together."""
    made = []
    for name, reference in pairs:
        arm, other = setup.arm(name), setup.arm(reference)
        if arm is not None and other is not None:
            made.append(headline(setup, arm, other, setup.measure))
    return correct([one for one in made if one is not None])


def _corrected(values: Sequence[float | None]) -> list[float | None]:
    adjusted = iter(holm([value for value in values if value is not None]))
    return [None if value is None else next(adjusted) for value in values]


def _tost(comparison: Comparison) -> float | None:
    margin = MARGINS.get(comparison.measure.name)
    if margin is None or comparison.p is None:
        return None
    if comparison.measure.log:
        return tost(comparison.logs, math.log1p(-margin), math.log1p(margin))
    return tost([100 * (a - b) for a, b in comparison.values], -margin, margin)


def _without_common_rate(setup: Setup, arm: Arm, reference: Arm, measure: Measure) -> Comparison:
    """Each arm at its best rate of its own grid: said to be confounded by the rate, and never a verdict."""
    rate, other = best_rate(arm, measure), best_rate(reference, measure)
    return _compare(setup, measure, _Side.of(arm, rate), _Side.of(reference, other), "confounded")


def _better_elsewhere(arm: Arm, common: Sequence[float], measure: Measure) -> list[Note]:
    """Whether an arm does better at a rate that the other arm was not run at."""
    better = _best(arm, list(arm.rates), measure)
    if better is None or better in common:
        return []
    return [note("better_elsewhere", arm=arm.method, rate=f"{better:g}")]


def _best(arm: Arm, rates: Sequence[float], measure: Measure, seeds: set[int] | None = None) -> float | None:
    """The rate with the best mean, over the same seeds at every rate."""
    if seeds is None:
        seeds = set.intersection(*(set(arm.by_seed(rate)) for rate in rates))
    means: dict[float, float] = {}
    for rate in rates:
        values = [run.figure(measure.name) for seed, run in arm.by_seed(rate).items() if seed in seeds]
        whole = [value for value in values if value is not None]
        if whole and len(whole) == len(values):
            means[rate] = fmean(whole)
    if not means:
        return None
    choose: Callable[..., float] = min if measure.lower_is_better else max
    return choose(means, key=lambda rate: means[rate])


@dataclass(frozen=True)
class _Side:
    """An arm at one rate: its runs there, and how many of that rate came to nothing."""

    method: str
    rate: float
    runs: tuple[Run, ...]
    lost: int = 0

    @classmethod
    def of(cls, arm: Arm, rate: float) -> _Side:
        return cls(arm.method, rate, arm.at(rate), len(arm.lost_at(rate)))

    @property
    def told(self) -> str:
        return f"{self.lost} of {self.lost + len(self.runs)}"


def _compare(
    setup: Setup, measure: Measure, side: _Side, reference: _Side, basis: str, pair: bool = True
) -> Comparison:
    theirs = {run.seed: run for run in reference.runs}
    if pair:
        pairs = [(run, theirs[run.seed]) for run in side.runs if run.seed in theirs]
    else:
        pairs = list(zip(side.runs, reference.runs, strict=True))
    paired = {id(run) for both in pairs for run in both}
    unpaired = tuple(run for run in [*side.runs, *reference.runs] if id(run) not in paired)
    confounds: dict[str, Difference] = {}
    cautions: dict[str, Difference] = {}
    if side.lost or reference.lost:
        # Seeds that came to nothing are no chance sample: what is left flatters the arm that lost them.
        confounds[FAILED] = Difference(FAILED, side.told, reference.told)
    for one, other in pairs or [(side.runs[0], reference.runs[0])]:
        spoiling, known = differences(one, other, rate=basis != "best")
        confounds |= {item.field: item for item in spoiling}
        cautions |= {item.field: item for item in known}
    notes = []
    if not pairs:
        notes.append(note("no_common_seed"))
    elif unpaired and pair:
        notes.append(note("unpaired", count=len(unpaired)))
    if measure.name in TIMES:
        doubts = {run.times_doubt for both in pairs for run in both if run.times_doubt}
        if doubts:
            confounds["timing"] = Difference("timing", *(sorted(doubts) * 2)[:2])
            notes.append(note("times_doubtful"))
    made = Comparison(
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
    values = made.values
    if not values:
        return made
    # Numbers are rounded in proportion to their size, so a logarithm of their ratio is by as much whatever the size.
    log_ratio = estimate(made.logs, scale=1.0) if all(a > 0 and b > 0 for a, b in values) else None
    made = replace(made, log_ratio=log_ratio, difference=estimate([a - b for a, b in values], scale=made.size))
    if len(values) == 1:
        return replace(made, notes=(*made.notes, note("one_seed")))
    return replace(made, notes=(*made.notes, note("no_spread"))) if made.no_spread else made
