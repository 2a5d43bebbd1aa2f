"""Arms beside their references: a table for each group, a forest plot, and the change over the size of the cache.

A plan's report shows its arms so, and docs/results.md explored ones. No verdict is given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..analysis import Run
from ..analysis.confirm import Tested
from ..analysis.shown import NARROW, Shown, ShownArms, ratio_log
from ..analysis.stats import Estimate, estimate
from . import numbers
from .charts import ChartFigure, IntervalRow, Intervals, Lines, Series, Styles
from .document import Block, Cell, Heading, Table
from .forest import percent_row
from .words import Words

Handles = Callable[[tuple[Run, ...]], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What arms cost beside perplexity, by their ids.

    cache       bytes that a decoder keeps for a token, in each layer
    exponent    of the power law by which the reference's perplexity falls with the tokens that it is trained on
    """

    cache: Mapping[str, float] = field(default_factory=dict)
    exponent: float | None = None


def figures_of(
    groups: Sequence[ShownArms],
    name: str,
    styles: Styles,
    say: Words,
    tested: Sequence[Tested] = (),
    costs: Costs | None = None,
) -> list[Block]:
    """Return a forest plot of all groups, and for each the change over the size of the cache where that is given."""
    own = costs or Costs()
    figures = [forest_figure(groups, f"{name}-forest", styles, say, tested)]
    figures += [
        _cache_figure(shown, f"{name}-cache-{number}", own, styles, say) for number, shown in enumerate(groups, start=1)
    ]
    return [figure for figure in figures if figure is not None]


def tables_of(
    groups: Sequence[ShownArms], name: str, say: Words, handles: Handles, costs: Costs | None = None
) -> list[Block]:
    """Return a table of each group, below its title."""
    blocks: list[Block] = []
    for number, shown in enumerate(groups, start=1):
        anchor = f"{name}-shown-{number}"
        blocks += [Heading(shown.title, 3, anchor), arms_table(shown, anchor, costs or Costs(), say, handles)]
    return blocks


def arms_table(shown: ShownArms, name: str, costs: Costs, say: Words, handles: Handles) -> Table:
    """Return the arms of a group with their perplexities and changes, the reference first and then the best."""
    levels = [f"{100 * level:g}" for level in (shown.confidence, NARROW)]
    columns = [*say.all("col_method", f"m_{shown.measure}", "col_change")]
    columns += [*(say("col_level", level=level) for level in levels), *say.all("col_texts", "m_trainable")]
    columns += [say("col_cache_layer")] if costs.cache else []
    columns += [say("col_tokens_worth")] if costs.exponent else []
    table = Table(name, [*columns, say("col_runs")], numeric=tuple(range(1, len(columns))))
    captions = [say("shown_reading"), *([say("shown_tokens")] if costs.exponent else [])]
    table = replace(table, caption=say.in_a_row(captions))
    for arm in [None, *_ordered(shown.arms)]:
        runs = shown.runs if arm is None else arm.runs
        identity, title = (shown.reference_id, shown.reference) if arm is None else (arm.id, arm.name)
        cells = [_mean(runs, shown.measure), *_changes(arm), _trainable(runs)]
        cells += [_cache(costs, identity)] if costs.cache else []
        cells += [_tokens(costs, arm)] if costs.exponent else []
        table.add(Cell(title), *cells, Cell("", handles(runs)))
    return table


def forest_figure(
    groups: Sequence[ShownArms], name: str, styles: Styles, say: Words, tested: Sequence[Tested] = ()
) -> ChartFigure | None:
    """Return the changes of all groups, a panel each; the last panel has the hypotheses against other arms.

    The first row of a group is its reference: the dots are its own seeds, about their mean.
    """
    charts = []
    for shown in groups:
        margins = {
            item.hypothesis.arm: item.hypothesis.margin
            for item in tested
            if item.hypothesis.against == shown.reference_id
        }
        rows = [
            _row(arm.name, styles[arm.name], arm.change, _ratios(arm, shown.measure), margins.get(arm.id))
            for arm in _ordered(shown.arms)
            if arm.change is not None
        ]
        own = _about_mean(shown)
        if rows and own:
            strip = IntervalRow(label=shown.reference, style=styles["baseline"], value=0.0, dots=own)
            axis = say("axis_shown", measure=say(f"m_{shown.measure}"))
            charts.append(Intervals(x_label=axis, rows=[strip, *rows], line=0.0, title=shown.title))
    others = [item for item in tested if item.change is not None and not _is_shown(item, groups)]
    if charts and others:
        rows = [_against(item, _names(groups), styles, say) for item in others]
        charts.append(Intervals(x_label=charts[0].x_label, rows=rows, line=0.0, title=say("shown_against")))
    if not charts:
        return None
    captions = [say("cap_forest"), *([say("cap_forest_margin")] if tested else [])]
    return ChartFigure(name, say("fig_forest"), say.in_a_row(captions), [*charts])


def _cache_figure(shown: ShownArms, name: str, costs: Costs, styles: Styles, say: Words) -> ChartFigure | None:
    points = [(shown.reference_id, shown.reference, styles["baseline"], Estimate(mean=0.0, n=len(shown.runs)))]
    points += [(arm.id, arm.name, styles[arm.name], arm.change) for arm in shown.arms if arm.change is not None]
    series = []
    for identity, title, style, change in points:
        if identity in costs.cache:
            percent = change.mapped(lambda value: 100 * value)
            low, high = (percent.mean if bound is None else bound for bound in (percent.low, percent.high))
            place = {"x": [costs.cache[identity]]}
            series.append(
                Series(name=title, style=style, x=place, y=[percent.mean], low=[low], high=[high], line=False)
            )
    if len({point.x["x"][0] for point in series}) < 2:
        return None
    axis = say("axis_shown", measure=say(f"m_{shown.measure}"))
    chart = Lines(axes={"x": say("axis_cache_layer")}, y_label=axis, series=series, title=shown.title)
    return ChartFigure(name, say("fig_frontier"), say("cap_frontier"), [chart])


def percent_range(bounds: tuple[float, float] | None) -> str:
    """Return an interval in percent, a dash where there is none."""
    return "–" if bounds is None else f"{numbers.percent(bounds[0], 2)} – {numbers.percent(bounds[1], 2)}"


def _ordered(arms: Sequence[Shown]) -> list[Shown]:
    """Return the arms with the best first; those that are not run yet come last, in the order given."""
    return sorted(arms, key=lambda arm: math.inf if arm.change is None else arm.change.mean)


def _names(groups: Sequence[ShownArms]) -> dict[str, str]:
    names = {shown.reference_id: shown.reference for shown in groups}
    return names | {arm.id: arm.name for shown in groups for arm in shown.arms}


def _mean(runs: Sequence[Run], measure: str) -> str:
    """Return the geometric mean of a perplexity, with half of its interval."""
    logs = _logs(runs, measure)
    if not logs:
        return "–"
    mean = estimate(logs, scale=1.0).exp()
    half = "" if mean.low is None or mean.high is None else f" ± {(mean.high - mean.low) / 2:.2f}"
    return f"{numbers.figure(measure, mean.mean)}{half}"


def _changes(arm: Shown | None) -> list[str]:
    """Return the change of an arm with its three intervals; dashes for the reference."""
    if arm is None or arm.change is None:
        return ["–"] * 4
    change = arm.change
    wide = None if change.low is None or change.high is None else (change.low, change.high)
    return [numbers.percent(change.mean, 2), *map(percent_range, (wide, arm.narrow, arm.over_texts))]


def _trainable(runs: Sequence[Run]) -> str:
    return numbers.figure("trainable", runs[0].figure("trainable")) if runs else "–"


def _cache(costs: Costs, identity: str) -> str:
    return f"{costs.cache[identity]:,.0f}" if identity in costs.cache else "–"


def _tokens(costs: Costs, arm: Shown | None) -> str:
    """Return the share of training tokens that the reference would need more to be ahead by as much as an arm is."""
    if arm is None or arm.change is None or not costs.exponent:
        return "–"
    return numbers.percent((1 + arm.change.mean) ** (1 / costs.exponent) - 1, 0)


def _logs(runs: Sequence[Run], measure: str) -> list[float]:
    return [math.log(value) for run in runs if (value := run.figure(measure)) is not None]


def _is_shown(tested: Tested, groups: Sequence[ShownArms]) -> bool:
    """Return True when a hypothesis is about an arm of a group against the group's reference."""
    arm, against = tested.hypothesis.arm, tested.hypothesis.against
    return any(against == shown.reference_id and any(arm == own.id for own in shown.arms) for shown in groups)


def _row(label: str, style: int, change: Estimate, dots: list[float], margin: float | None) -> IntervalRow:
    row = percent_row(label, style, change, dots if len(dots) > 1 else [])
    return replace(row, reach=(min(0.0, 100 * margin), max(0.0, 100 * margin)) if margin else None)


def _against(tested: Tested, names: dict[str, str], styles: Styles, say: Words) -> IntervalRow:
    arm, other = (names.get(name, name) for name in (tested.hypothesis.arm, tested.hypothesis.against))
    assert tested.change is not None, "only hypotheses with an estimate are drawn"
    label = say("shown_pair", arm=arm, against=other)
    return _row(label, styles[arm], tested.change, [], tested.hypothesis.margin)


def _ratios(arm: Shown, measure: str) -> list[float]:
    """Return the change of every pair in percent."""
    return [100 * math.expm1(ratio_log(run, other, measure)) for run, other in arm.pairs]


def _about_mean(shown: ShownArms) -> list[float]:
    """Return how far every seed of a reference is from their mean, in percent."""
    logs = _logs(shown.runs, shown.measure)
    return [100 * math.expm1(value - fmean(logs)) for value in logs]
