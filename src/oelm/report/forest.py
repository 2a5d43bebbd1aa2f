"""The forest plot: how each method differs from the reference, the best on top, and what counts as alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..analysis import Analysis
from ..analysis.compare import MARGINS, Comparison
from ..analysis.stats import Estimate, too_noisy
from . import numbers
from .chart_records import MOST_PANELS
from .charts import Chart, ChartFigure, IntervalRow, Intervals, Styles
from .sentences import setup_briefly
from .words import Words


def change_figures(analysis: Analysis, styles: Styles, say: Words) -> list[ChartFigure]:
    """Return a forest plot for each measure and reference, with a panel for each setup and its best arm on top."""
    by_subject: dict[tuple[str, str], dict[int, list[Comparison]]] = {}
    for comparison in analysis.comparisons:
        subject = by_subject.setdefault((comparison.measure.name, comparison.reference), {})
        subject.setdefault(id(comparison.setup), []).append(comparison)
    drawn = []
    for number, setups in enumerate(by_subject.values(), start=1):
        panels = []
        for comparisons in setups.values():
            ordered = sorted(comparisons, key=numbers.size, reverse=not comparisons[0].measure.lower_is_better)
            title = setup_briefly(comparisons[0].setup, analysis, say)
            panels.append((title, [(comparison.arm, comparison) for comparison in ordered]))
        figure = change_figure(f"{number}-change", panels, styles, say)
        drawn += [figure] if figure is not None else []
    return drawn


def change_figure(
    name: str, panels: Sequence[tuple[str, Sequence[tuple[str, Comparison]]]], styles: Styles, say: Words
) -> ChartFigure | None:
    """Return the figure of labelled comparisons of one measure, a row each, or None when none has a pair of runs.

    `panels` are titles with the comparisons below them. The band is the margin within which arms count as alike.
    """
    charts: list[Intervals] = []
    first = next(comparison for _, comparisons in panels for _, comparison in comparisons)
    reference, measure = first.reference, say(f"m_{first.measure.name}")
    axis = say("axis_points" if first.measure.points else "axis_change", measure=measure, reference=reference)
    margin = MARGINS.get(first.measure.name)
    reach = None if margin is None else margin if first.measure.points else 100 * margin
    band = None if reach is None else (-reach, reach)
    for title, comparisons in panels:
        rows = [row for label, comparison in comparisons if (row := _change_row(label, comparison, styles)) is not None]
        if rows:
            charts.append(Intervals(x_label=axis, rows=rows, line=0.0, band=band, title=title))
    if not charts:
        return None
    captions = [say("cap_change", measure=measure[:1].upper() + measure[1:], reference=reference)]
    captions += [say("cap_band", margin=numbers.margin(first.measure.name, say))] if band is not None else []
    captions += [say("cap_setups", shown=MOST_PANELS, all=len(charts))] if len(charts) > MOST_PANELS else []
    shown: list[Chart] = [*charts[:MOST_PANELS]]
    return ChartFigure(name, say("fig_change", reference=reference), say.in_a_row(captions), shown)


def _change_row(label: str, comparison: Comparison, styles: Styles) -> IntervalRow | None:
    points = comparison.measure.points
    estimate = comparison.difference if points else comparison.change
    if estimate is None or not comparison.pairs:
        return None
    if not points and too_noisy(estimate):
        estimate = replace(estimate, low=None, high=None)
    dots = [100 * ((a - b) if points else (a / b - 1)) for a, b in comparison.values]
    row = percent_row(label, styles[comparison.arm], estimate, dots if len(dots) > 1 else [])
    return row if comparison.sound else replace(row, hollow=True)


def percent_row(label: str, style: int, share: Estimate, dots: list[float]) -> IntervalRow:
    """Return the row of a share with its interval, in percent."""
    percent = share.mapped(lambda value: 100 * value)
    low, high = percent.low, percent.high
    return IntervalRow(label=label, style=style, value=percent.mean, low=low, high=high, hollow=low is None, dots=dots)
