"""Format numbers: one way for each metric, interval and share, so that all forms of a report agree."""

from __future__ import annotations

from ..analysis.compare import MARGINS, Comparison
from ..analysis.hypotheses import Hypothesis, Verdict
from ..analysis.stats import Estimate, too_noisy
from ..runs.schema import DownstreamMetric
from .words import Words

MINUS = "−"
_FIXED = "\N{NO-BREAK SPACE}"
# Larger numbers get an exponent: a run that nearly diverged may have a perplexity of a hundred digits.
_LONG = 1e9


def signed(value: float, digits: int) -> str:
    """Return a number with its sign, with a typographic minus; zero has none."""
    text = f"{abs(value):,.{digits}f}" if abs(value) < _LONG else f"{abs(value):.3g}"
    zero = float(text.replace(",", "")) == 0
    return text if zero else f"{'+' if value > 0 else MINUS}{text}"


def percent(value: float, digits: int = 1) -> str:
    """Return a share as signed percent."""
    return f"{signed(100 * value, digits)} %"


def figure(name: str, value: float | None) -> str:
    """Return a metric of a run in its usual unit and precision, a dash for None."""
    if value is None:
        return "–"
    if name in ("accuracy", "best_accuracy", "macro_f1", "exact_match", "token_accuracy", "recall"):
        return f"{100 * value:.2f} %"
    if name == "frozen_share":
        return f"{100 * value:.1f} %"
    if name in ("frozen", "trainable", "total", "steps", "steps_per_hour"):
        return f"{value:,.0f}"
    if name in ("val_loss", "best_val_loss", "bits_per_byte", "matthews"):
        return f"{value:.4f}"
    if name == "step_seconds":
        return f"{1000 * value:.2f} ms"
    if name == "peak_memory":
        return f"{value / 2**30:.2f} GiB"
    if name == "seconds":
        return f"{value:,.1f} s"
    if abs(value) >= _LONG:
        return f"{value:.3g}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def score(metric: DownstreamMetric, value: float | None) -> str:
    """Return a score on a task of lm-eval: a share in percent, else the number; a dash for None."""
    return figure("accuracy" if metric.share else metric.name, value)


def bounds(name: str, estimate: Estimate | None, say: Words) -> str:
    """Return the interval of a metric's mean, or why there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return _without_interval(estimate, say)
    return f"{figure(name, estimate.low)} – {figure(name, estimate.high)}"


def change(comparison: Comparison, say: Words) -> str:
    """Return how much an arm differs: points for shares, percent for ratios, else the difference."""
    estimate = comparison.difference
    if comparison.measure.points:
        return "–" if estimate is None else say("points", value=signed(100 * estimate.mean, 2))
    if not comparison.measure.log:
        return "–" if estimate is None else signed(estimate.mean, 4)
    relative = comparison.change
    return "–" if relative is None else percent(relative.mean)


def size(comparison: Comparison) -> float:
    """Return the number that `change` formats, to sort by; zero where there is none."""
    estimate = comparison.change if comparison.measure.log else comparison.difference
    return 0.0 if estimate is None else estimate.mean


def change_in_full(comparison: Comparison, say: Words) -> str:
    """Return a change with its interval, if it has one, for a narrow cell: a number and its % stay together."""
    limits = _limits(comparison)
    text = change(comparison, say).replace(" %", f"{_FIXED}%")
    if limits is None:
        return text
    fixed = [limit.replace(" ", _FIXED) for limit in limits]
    return say("in_brackets", text=text, more=span(fixed[0], fixed[1], say))


def span(low: str, high: str, say: Words) -> str:
    """Return "low to high", with a unit that both have written once; or the number alone when both are the same."""
    number, gap, unit = low.replace(_FIXED, " ").partition(" ")
    same_unit = gap != "" and high.endswith(unit)
    return low if low == high else say("range", low=number if same_unit else low, high=high)


def change_range(comparison: Comparison, say: Words) -> str:
    """Return the interval of a change for a table's cell, or why there is none."""
    limits = _limits(comparison)
    return f"{limits[0]} – {limits[1]}" if limits else _no_interval(comparison, say)


def loss_range(estimate: Estimate, say: Words) -> str:
    """Return the interval of a difference of losses, or why there is none."""
    if estimate.low is None or estimate.high is None:
        return _without_interval(estimate, say)
    return f"{signed(estimate.low, 4)} – {signed(estimate.high, 4)}"


def bootstrap_bounds(comparison: Comparison) -> str:
    """Return the bootstrap interval of a change, a dash when there is none."""
    limits = _limits(comparison, bootstrap=True)
    return f"{limits[0]} – {limits[1]}" if limits else "–"


def bounds_over_texts(comparison: Comparison) -> str:
    """Return the interval of a change over the documents of the test text, a dash when there is none."""
    limits = comparison.over_texts
    return f"{percent(limits[0])} – {percent(limits[1])}" if limits else "–"


def _limits(comparison: Comparison, bootstrap: bool = False) -> tuple[str, str] | None:
    """Return the limits of the difference that `change` gives, or None when it has no interval."""
    estimate = comparison.change if comparison.measure.log else comparison.difference
    if estimate is None or (comparison.measure.log and too_noisy(estimate)):
        return None
    low, high = (estimate.boot_low, estimate.boot_high) if bootstrap else (estimate.low, estimate.high)
    if low is None or high is None:
        return None
    if comparison.measure.points:
        return signed(100 * low, 2), signed(100 * high, 2)
    return (percent(low), percent(high)) if comparison.measure.log else (signed(low, 4), signed(high, 4))


def interval(comparison: Comparison, say: Words) -> str:
    """Return the interval of a change as part of a sentence, or why there is none."""
    limits = _limits(comparison)
    if limits is None:
        return _no_interval(comparison, say)
    return say("interval", low=limits[0], high=limits[1], n=comparison.n)


def _no_interval(comparison: Comparison, say: Words) -> str:
    if comparison.measure.log and too_noisy(comparison.change):
        return say("too_noisy", n=comparison.n)
    if not comparison.pairs:
        return say("no_pair_short")
    return _without_interval(comparison.change if comparison.measure.log else comparison.difference, say)


def _without_interval(estimate: Estimate | None, say: Words) -> str:
    """Return why a mean has no interval: it is of one value or of equal values, or would reach below zero."""
    if estimate is None or estimate.n == 1:
        return say("one_seed_short")
    return say("below_zero_short" if estimate.spread else "no_spread_short")


def margin(name: str, say: Words) -> str:
    """Return the margin within which two arms count as alike by a measure."""
    value = MARGINS[name]
    return f"{100 * value:g} %" if value < 1 else say("one_point" if value == 1 else "points", value=f"{value:g}")


def p_value(value: float | None) -> str:
    """Return a p-value with three digits, a dash for None."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def verdict_value(verdict: Verdict, say: Words) -> str:
    """Return the value that a verdict rests on, with its interval."""
    hypothesis, estimate = verdict.hypothesis, verdict.estimate
    if estimate is None:
        return "–"
    text = amount(hypothesis, estimate.mean, say)
    if hypothesis.compare == "value":
        return text
    if estimate.low is None or estimate.high is None:
        return say("in_brackets", text=text, more=_without_interval(estimate, say))
    if hypothesis.compare == "change" and too_noisy(estimate):
        return say("in_brackets", text=text, more=say("too_noisy", n=estimate.n))
    limits = {"low": amount(hypothesis, estimate.low, say), "high": amount(hypothesis, estimate.high, say)}
    if hypothesis.compare == "trend":
        more = say("slope_interval", n=estimate.n, **limits)
        return say("in_brackets", text=say("per_doubling", value=text), more=more)
    return say("in_brackets", text=text, more=say("interval", n=estimate.n, **limits))


def amount(hypothesis: Hypothesis, value: float, say: Words) -> str:
    """Return a bound or a result in the unit of a hypothesis."""
    if hypothesis.compare == "value":
        return figure(hypothesis.measure, value)
    if hypothesis.compare in ("change", "trend"):
        return percent(value)
    if hypothesis.compare == "points":
        return say("points", value=signed(value, 2))
    return signed(value, 4)


def rule(hypothesis: Hypothesis, say: Words) -> str:
    """Return the rule by which a hypothesis is judged, as a formula."""
    kind = hypothesis.rule.kind
    bound = getattr(hypothesis.rule, kind)
    key = {"value": "rule_what_value", "trend": "rule_what_trend"}.get(hypothesis.compare, "rule_what")
    subject = say(key, measure=say(f"m_{hypothesis.measure}"), arm=hypothesis.arm, against=hypothesis.against)
    text = figure(hypothesis.measure, bound) if hypothesis.compare == "value" else _bound(hypothesis, bound, say)
    if kind == "within":
        text = text.removeprefix("+")
    return say(f"rule_{kind}", what=subject, bound=text)


def _bound(hypothesis: Hypothesis, bound: float, say: Words) -> str:
    """Return the number of a rule without trailing zeros: +5 %, 0 %."""
    if hypothesis.compare in ("change", "trend"):
        return short_percent(bound)
    text = _short(bound)
    return say("points", value=text) if hypothesis.compare == "points" else text


def short_percent(value: float) -> str:
    """Return a share that somebody chose as signed percent, without trailing zeros: +5 %, 0 %."""
    return f"{_short(round(100 * value, 6))} %"


def _short(value: float) -> str:
    return f"{'+' if value > 0 else MINUS if value < 0 else ''}{abs(value):g}"


def rate(value: float) -> str:
    """Return a learning rate in its shorter form: 0.002 or 2e-05."""
    return f"{value:g}"
