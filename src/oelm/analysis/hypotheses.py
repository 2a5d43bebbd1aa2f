"""Judge hypotheses (supported, refuted, undecided) by rules that are written down as data before the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from ..base.strict import Strict, explain
from ..base.yaml_text import parse_yaml
from ..errors import AnalysisError, nearest
from .arms import COUNTS, MEASURES, TIMES, Arm, Group, Setup
from .compare import Compare, Comparison, Note, note, of_pairs
from .run import Run
from .stats import ALPHA, Estimate, above, below, estimate, holm, slope, slope_above, slope_below

SUPPORTED, REFUTED, UNDECIDED = "supported", "refuted", "undecided"
# The report says so when a step of one seed takes this many times as long as that of another seed of the same arm.
_UNEVEN = 3.0
# A one-sided test: the p of being above, or below, a bound.
_OneSided = Callable[[float], float]


class Rule(Strict, refusal=AnalysisError):
    """When a hypothesis holds: exactly one bound is given. `within: m` means between -m and m."""

    within: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Rule:
        bounds = list(self.model_dump(exclude_none=True))
        if len(bounds) != 1:
            raise ValueError(f"give exactly one of {', '.join(type(self).model_fields)}, not {bounds or 'none'}")
        if self.within is not None and not self.within > 0:
            raise ValueError(f"within {self.within}: a margin must be above 0")
        return self

    @property
    def low(self) -> float:
        """Return the lower bound, or minus infinity."""
        bounds = (-self.within if self.within is not None else None, self.at_least, self.above)
        return next((bound for bound in bounds if bound is not None), -math.inf)

    @property
    def high(self) -> float:
        """Return the upper bound, or infinity."""
        bounds = (self.within, self.at_most, self.below)
        return next((bound for bound in bounds if bound is not None), math.inf)

    @property
    def kind(self) -> str:
        """Return the name of the bound that is given."""
        return next(iter(self.model_dump(exclude_none=True)))

    def holds(self, value: float) -> bool:
        """Return True when a value keeps the bound."""
        strict = self.above is not None or self.below is not None or self.within is not None
        return self.low < value < self.high if strict else self.low <= value <= self.high


class Beside(Strict, refusal=AnalysisError):
    """A figure to show with the verdict, and the value that was expected."""

    measure: str
    expected: float


class Hypothesis(Strict, refusal=AnalysisError):
    """One claim and its rule. hypotheses.yaml explains the fields."""

    id: str
    title: str | dict[Literal["en", "zh"], str]
    arm: str
    against: str | None = None
    measure: str
    compare: Literal["change", "points", "difference", "value", "trend"] = "change"
    rule: Rule
    scenarios: bool = False
    beside: Beside | None = None
    model: str | None = None
    scratch: bool = False

    @model_validator(mode="after")
    def _check_fields_together(self) -> Hypothesis:
        for name in (self.measure, *([self.beside.measure] if self.beside else [])):
            if name not in MEASURES:
                raise ValueError(f"unknown measure {name!r}.{nearest(name, MEASURES)} Measures: {', '.join(MEASURES)}")
        if (self.against is None) != (self.compare == "value"):
            raise ValueError("compare 'value' takes no 'against'; every other kind of comparison needs one")
        if self.compare == "points" and not MEASURES[self.measure].points:
            raise ValueError(f"compare 'points' is for shares such as accuracy, not for {self.measure}")
        if self.compare == "change" and self.rule.low != -math.inf and self.rule.low <= -1:
            raise ValueError(f"a relative change is above -1, not {self.rule.low}")
        if self.scenarios and (self.compare != "change" or self.rule.within is None):
            raise ValueError("scenarios need compare 'change' and a rule 'within', whose margin says what 'like' means")
        return self

    def text(self, language: str) -> str:
        """Return the title in a language, or in the one that it has."""
        if isinstance(self.title, str):
            return self.title
        return self.title.get(language) or next(iter(self.title.values()))  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A hypothesis judged on the runs of one setup; `setup` is None where it needs several or there are no runs."""

    hypothesis: Hypothesis
    verdict: str
    setup: Setup | None = None
    comparison: Comparison | None = None
    estimate: Estimate | None = None
    p: float | None = None
    adjusted: float | None = None
    towards: str = UNDECIDED
    runs: tuple[Run, ...] = ()
    notes: tuple[Note, ...] = ()
    scenario: str | None = None
    beside: float | None = None


def load_hypotheses(path: str | PathLike[str] | None = None) -> tuple[Hypothesis, ...]:
    """Return the built-in hypotheses and those of a file, if one is given."""
    text = resources.files(__package__).joinpath("hypotheses.yaml").read_text(encoding="utf-8")
    builtin = _parse(parse_yaml(text), "hypotheses.yaml")
    if path is None:
        return builtin
    try:
        content = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise AnalysisError(f"{path}: not YAML ({error})") from None
    added = _parse(content, str(path))
    duplicates = {hypothesis.id for hypothesis in builtin} & {hypothesis.id for hypothesis in added}
    if duplicates:
        raise AnalysisError(f"{path}: id {sorted(duplicates)[0]!r} is a built-in hypothesis; choose another id")
    return (*builtin, *added)


def judge(hypotheses: Sequence[Hypothesis], groups: Sequence[Group], compare: Compare) -> tuple[Verdict, ...]:
    """Judge every hypothesis on every setup that has its arms, corrected by setup; once where no setup has them.

    `compare` is `headline`, or a cached version of it.
    """
    verdicts: list[Verdict] = []
    for hypothesis in hypotheses:
        if hypothesis.compare == "trend":
            verdicts.append(_trend(hypothesis, groups, compare))
            continue
        judged = [verdict for group in groups for verdict in _in_group(hypothesis, group, compare)]
        undecided = Verdict(hypothesis=hypothesis, verdict=UNDECIDED, notes=(_why_none(hypothesis, groups),))
        verdicts += judged or [undecided]
    adjusted = _adjusted(hypotheses, verdicts)
    return tuple(_decided(verdict, p) for verdict, p in zip(verdicts, adjusted, strict=True))


def _adjusted(hypotheses: Sequence[Hypothesis], verdicts: Sequence[Verdict]) -> list[float | None]:
    """Return the corrected p of each verdict, or None where nothing was tested.

    A family of tests is what was declared for a setup, also where its arms were not run: such a test counts with a p
    of 1. So neither runs of other setups nor further arms of this one can take a verdict away. Trends, which are over
    several setups, are a family of their own.
    """
    adjusted: list[float | None] = [None] * len(verdicts)
    tested = [(index, verdict.setup, verdict.p) for index, verdict in enumerate(verdicts) if verdict.p is not None]
    for setup in dict.fromkeys(setup for _, setup, _ in tested):
        family = [(index, p) for index, its_setup, p in tested if its_setup is setup]
        declared = sum(_is_tested_on(hypothesis, setup) for hypothesis in hypotheses)
        values = [p for _, p in family] + [1.0] * (declared - len(family))
        for (index, _), p in zip(family, holm(values), strict=False):
            adjusted[index] = p
    return adjusted


def _is_tested_on(hypothesis: Hypothesis, setup: Setup | None) -> bool:
    """Return True for a hypothesis that could be tested on a setup if it had the arms; without a setup, for a trend."""
    if setup is None or hypothesis.compare == "trend":
        return setup is None and hypothesis.compare == "trend"
    if hypothesis.compare == "value" or hypothesis.measure in COUNTS or _unfit(hypothesis, setup) is not None:
        return False
    return any(run.figure(hypothesis.measure) is not None for run in setup.runs)


def _decided(verdict: Verdict, adjusted: float | None) -> Verdict:
    """Return a verdict after the correction; one that was not tested stays as it is."""
    if adjusted is None:
        return verdict
    decided = replace(verdict, adjusted=adjusted, verdict=verdict.towards if adjusted < ALPHA else UNDECIDED)
    return replace(decided, scenario=_scenario(decided))


def _in_group(hypothesis: Hypothesis, group: Group, compare: Compare) -> list[Verdict]:
    verdicts = []
    for setup in group.setups:
        arm = setup.arm(hypothesis.arm)
        if arm is None or all(run.figure(hypothesis.measure) is None for run in arm.runs):
            continue
        if _unfit(hypothesis, setup) is not None:
            continue
        if hypothesis.compare == "value":
            verdicts.append(_of_value(hypothesis, setup, arm.runs))
            continue
        reference = _reference(hypothesis, setup, group)
        if reference is None:
            continue
        # The learning rate is chosen by the task's measure, also where times are compared: the fastest rate is not
        # one that anybody would choose.
        chosen = compare(setup, arm, reference, setup.measure)
        if chosen is not None:
            verdicts.append(_of_comparison(hypothesis, setup, chosen))
    return verdicts


def _reference(hypothesis: Hypothesis, setup: Setup, group: Group) -> Arm | None:
    """Return the arm to compare with: the setup's, or another's of the group where no setup has both arms."""
    against = hypothesis.against or ""
    in_setup = setup.arm(against)
    if in_setup is not None or any(other.arm(hypothesis.arm) and other.arm(against) for other in group.setups):
        return in_setup
    return next((arm for other in group.setups if (arm := other.arm(against)) is not None), None)


def _unfit(hypothesis: Hypothesis, setup: Setup) -> Note | None:
    """Return why a setup's models are not those that a hypothesis is about, or None if they are."""
    run = setup.runs[0]
    if hypothesis.model not in (None, run.config.model.name):
        return note("other_model", model=hypothesis.model)
    return note("pretrained") if hypothesis.scratch and not run.from_scratch else None


def _why_none(hypothesis: Hypothesis, groups: Sequence[Group]) -> Note:
    """Return why no setup was judged: none has the arm, or the hypothesis is about other models."""
    with_arm = [setup for group in groups for setup in group.setups if setup.arm(hypothesis.arm)]
    reasons = [reason for setup in with_arm if (reason := _unfit(hypothesis, setup)) is not None]
    return reasons[0] if reasons else note("no_runs")


def _of_value(hypothesis: Hypothesis, setup: Setup, runs: tuple[Run, ...]) -> Verdict:
    """Judge a figure that follows from the settings alone, so that there is nothing to test."""
    values = [value for run in runs if (value := run.figure(hypothesis.measure)) is not None]
    holds = [hypothesis.rule.holds(value) for value in values]
    verdict = SUPPORTED if all(holds) else REFUTED if not any(holds) else UNDECIDED
    beside = runs[0].figure(hypothesis.beside.measure) if hypothesis.beside else None
    judged = Verdict(hypothesis=hypothesis, verdict=verdict, towards=verdict, setup=setup, runs=runs, beside=beside)
    return replace(judged, estimate=Estimate(mean=values[0], n=len(values)))


def _of_comparison(hypothesis: Hypothesis, setup: Setup, chosen: Comparison) -> Verdict:
    """Judge a hypothesis on the pairs of a comparison, by the hypothesis's own measure."""
    comparison = of_pairs(chosen, MEASURES[hypothesis.measure])
    runs = tuple(run for pair in comparison.pairs for run in pair)
    undecided = Verdict(hypothesis=hypothesis, verdict=UNDECIDED, setup=setup, comparison=comparison, runs=runs)
    undecided = replace(undecided, notes=uneven_times(comparison))
    if hypothesis.compare == "change" and comparison.values and comparison.ratio is None:
        return replace(undecided, notes=(note("no_ratio"),))
    sample = _sample(hypothesis, comparison)
    if not sample:
        return replace(undecided, notes=(note("no_common_seed"),))
    estimated = _estimate(hypothesis, comparison)
    undecided = replace(undecided, estimate=estimated)
    if not comparison.sound:
        fields = [item.field for item in comparison.confounds]
        reason = note("times_doubtful") if fields == ["timing"] else note("confounded", fields=", ".join(fields))
        return replace(undecided, notes=(reason,))
    if len(sample) < 2:
        return replace(undecided, notes=(note("one_seed"),))
    if comparison.no_spread and hypothesis.measure in COUNTS:
        assert estimated is not None
        verdict = SUPPORTED if hypothesis.rule.holds(estimated.mean) else REFUTED
        return replace(undecided, verdict=verdict, towards=verdict)
    if comparison.no_spread:
        return replace(undecided, notes=(note("no_spread"),))
    low, high = _bounds(hypothesis)
    towards, p = decide(sample, low, high)
    return replace(undecided, p=p, towards=towards)


def decide(sample: Sequence[float], low: float, high: float) -> tuple[str, float]:
    """Return SUPPORTED or REFUTED for "the mean of the sample is between low and high", and the p of that."""
    return _towards(partial(above, sample), partial(below, sample), low, high)


def _towards(above: _OneSided, below: _OneSided, low: float, high: float) -> tuple[str, float]:
    """Return SUPPORTED or REFUTED for "the number is between low and high" by one-sided tests, and the p of that.

    With one bound the tests are both sides of a two-sided test: supported where the 95 % interval lies inside. With two
    bounds, inside is TOST, and outside means beyond one of them.
    """
    if low > -math.inf and high < math.inf:
        inside = max(above(low), below(high))
        outside = min(1.0, 2 * min(above(high), below(low)))
    else:
        inside = min(1.0, 2 * (below(high) if high < math.inf else above(low)))
        outside = min(1.0, 2 * (above(high) if high < math.inf else below(low)))
    return (SUPPORTED, inside) if inside <= outside else (REFUTED, outside)


def _sample(hypothesis: Hypothesis, comparison: Comparison) -> list[float]:
    if hypothesis.compare == "change":
        return comparison.logs
    return [_unit(hypothesis) * (a - b) for a, b in comparison.values]


def _unit(hypothesis: Hypothesis) -> float:
    return 100.0 if hypothesis.compare == "points" else 1.0


def _bounds(hypothesis: Hypothesis) -> tuple[float, float]:
    """Return the rule's bounds on the scale of the test: a change of 5 % is log 1.05, or log 0.95 downwards."""
    rule = hypothesis.rule
    if hypothesis.compare != "change":
        return rule.low, rule.high
    return (math.log1p(rule.low) if rule.low > -math.inf else -math.inf), math.log1p(rule.high)


def _estimate(hypothesis: Hypothesis, comparison: Comparison) -> Estimate | None:
    if hypothesis.compare == "change":
        return comparison.change
    return estimate(_sample(hypothesis, comparison), scale=_unit(hypothesis) * comparison.size)


def _scenario(verdict: Verdict) -> str | None:
    """Return better, like (within the margin) or worse; None for an undecided verdict or one without scenarios."""
    if not verdict.hypothesis.scenarios or verdict.verdict == UNDECIDED:
        return None
    if verdict.verdict == SUPPORTED:
        return "like"
    assert verdict.comparison is not None
    lower = sum(verdict.comparison.logs) < 0
    return "better" if lower == verdict.comparison.measure.lower_is_better else "worse"


def uneven_times(comparison: Comparison) -> tuple[Note, ...]:
    """Return a note for each arm whose seeds differ so much in their times that other work must have disturbed them."""
    if comparison.measure.name not in TIMES or comparison.ratio is None:
        return ()
    notes = []
    for arm, values in zip((comparison.arm, comparison.reference), zip(*comparison.values, strict=True), strict=True):
        factor = max(values) / min(values)
        if factor > _UNEVEN:
            notes.append(note("uneven_times", arm=arm, factor=f"{factor:.0f}"))
    return tuple(notes)


def _trend(hypothesis: Hypothesis, groups: Sequence[Group], compare: Compare) -> Verdict:
    """Judge the slope of the change over the logarithm of the data's size.

    Each data set gives one point, from its setup with the most seeds.
    """
    points: list[tuple[float, float, Comparison]] = []
    for group in groups:
        candidates = [(setup, _change_in(hypothesis, setup, compare)) for setup in group.setups]
        changes = [(setup, comparison) for setup, comparison in candidates if comparison is not None]
        if changes:
            setup, comparison = max(changes, key=lambda item: item[1].n)
            mean = sum(comparison.logs) / len(comparison.logs)
            points.append((math.log2(setup.runs[0].train_tokens or 1.0), mean, comparison))
    runs = tuple(run for _, _, comparison in points for pair in comparison.pairs for run in pair)
    undecided = Verdict(hypothesis=hypothesis, verdict=UNDECIDED, runs=runs)
    if len({size for size, _, _ in points}) < 3:
        reason = note("few_datasets", count=len(points)) if points else note("no_runs")
        return replace(undecided, notes=(reason,))
    line = slope([size for size, _, _ in points], [value for _, value, _ in points], scale=1.0)
    if line.p is None:
        return replace(undecided, estimate=line, notes=(note("no_scatter"),))
    tests = partial(slope_above, line), partial(slope_below, line)
    towards, p = _towards(*tests, hypothesis.rule.low, hypothesis.rule.high)
    return replace(undecided, estimate=line, p=p, towards=towards)


def _change_in(hypothesis: Hypothesis, setup: Setup, compare: Compare) -> Comparison | None:
    """Return a setup's sound comparison of both arms, where the size of its data is known; None otherwise."""
    arm, reference = setup.arm(hypothesis.arm), setup.arm(hypothesis.against or "")
    if arm is None or reference is None or not setup.runs[0].train_tokens:
        return None
    comparison = compare(setup, arm, reference, MEASURES[hypothesis.measure])
    sound = comparison is not None and comparison.sound and comparison.ratio is not None
    return comparison if sound else None


def _parse(content: Any, where: str) -> tuple[Hypothesis, ...]:
    if not isinstance(content, list):
        raise AnalysisError(f"{where}: should be a list of hypotheses, each with id, title, arm, measure and rule")
    parsed: dict[str, Hypothesis] = {}
    for number, entry in enumerate(content, start=1):
        try:
            hypothesis = Hypothesis.model_validate(entry)
        except ValidationError as error:
            name = entry.get("id") if isinstance(entry, dict) else None
            raise AnalysisError(f"{where}: hypothesis {name or number}: {explain(error, Hypothesis)}") from None
        if hypothesis.id in parsed:
            raise AnalysisError(f"{where}: two hypotheses have the id {hypothesis.id!r}")
        parsed[hypothesis.id] = hypothesis
    return tuple(parsed.values())
