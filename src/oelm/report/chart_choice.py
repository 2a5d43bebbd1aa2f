"""Choose the charts that the runs of a setup have data for, and turn their records into the charts' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.compare import Comparison
from ..analysis.run import flop_ratio
from ..analysis.stats import Estimate, too_noisy
from .chart_records import (
    ChartContext,
    attention_figure,
    confusion_figure,
    map_figure,
    thinned,
    training_figure,
    validation_figure,
)
from .charts import ChartFigure, IntervalRow, Intervals, Lines, Series, Styles
from .words import Words

# The most dots of a row: more cannot be told apart on paper or on a phone.
_DOTS = 80


def setup_figures(
    analysis: Analysis, setup: Setup, number: int, styles: Styles, say: Words
) -> tuple[list[ChartFigure], list[str]]:
    """Return the figures of a setup, and the keys of the texts that say which figures its records have no data for."""
    context = ChartContext(
        setup=setup,
        cells={arm.method: cell_to_show(analysis, setup, arm)[1] for arm in setup.arms},
        running=[run for run in analysis.running if run.dataset == setup.dataset and run.task == setup.task],
        comparisons=analysis.of(setup),
        number=number,
        styles=styles,
        say=say,
    )
    makers: list[tuple[Callable[[ChartContext], ChartFigure | None], str | None]] = [
        (_change, None),
        (_accuracy, None),
        (validation_figure, "missing_validation"),
        (training_figure, None),
        (_sweep, "missing_sweep"),
        (_parameters, None),
        (_time, "missing_time"),
        (_target, "missing_target"),
        (map_figure, "missing_map"),
        (partial(attention_figure, kind="entropy", key="entropy_share"), "missing_attention"),
        (partial(attention_figure, kind="logits", key="logit_std"), None),
        (confusion_figure, "missing_confusion" if setup.task.kind == "classification" else None),
    ]
    figures, missing = [], []
    for make, missing_key in makers:
        figure = make(context)
        if figure is not None:
            figures.append(figure)
        elif missing_key is not None:
            missing.append(missing_key)
    return figures, missing


def _change(context: ChartContext) -> ChartFigure | None:
    comparisons = [(comparison.arm, comparison) for comparison in context.comparisons]
    return change_figure(f"{context.number}-change", comparisons, context.styles, context.say)


def change_figure(
    name: str, comparisons: Sequence[tuple[str, Comparison]], styles: Styles, say: Words
) -> ChartFigure | None:
    """Return the figure of labelled comparisons of one measure, a row each, or None when none has a pair of runs."""
    rows = [row for label, comparison in comparisons if (row := _change_row(label, comparison, styles)) is not None]
    if not rows:
        return None
    first = comparisons[0][1]
    reference, measure = first.reference, say(f"m_{first.measure.name}")
    axis = say("axis_points" if first.measure.points else "axis_change", measure=measure, reference=reference)
    return ChartFigure(
        name,
        say("fig_change", reference=reference),
        say("cap_change", measure=measure.capitalize(), reference=reference),
        [Intervals(x_label=axis, rows=rows, line=0.0)],
    )


def _change_row(label: str, comparison: Comparison, styles: Styles) -> IntervalRow | None:
    points = comparison.measure.points
    estimate = comparison.difference if points else comparison.change
    if estimate is None or not comparison.pairs:
        return None
    if not points and too_noisy(estimate):
        estimate = replace(estimate, low=None, high=None)
    dots = [100 * ((a - b) if points else (a / b - 1)) for a, b in comparison.values]
    row = _percent_row(label, styles[comparison.arm], estimate, dots if len(dots) > 1 else [])
    return row if comparison.sound else replace(row, hollow=True)


def _percent_row(label: str, style: int, share: Estimate, dots: list[float]) -> IntervalRow:
    percent = share.mapped(lambda value: 100 * value)
    bounds = {"low": percent.low, "high": percent.high}
    return IntervalRow(label=label, style=style, value=percent.mean, **bounds, hollow=percent.low is None, dots=dots)


def _accuracy(context: ChartContext) -> ChartFigure | None:
    """Show the measure of each method of a classifier, with a dot for each run."""
    setup, rows = context.setup, []
    if setup.task.kind == "language":
        return None
    for method, runs in context.cells.items():
        estimate = mean_of(runs, setup.measure)
        if estimate is not None:
            dots = [100 * value for run in runs if (value := run.figure(setup.measure.name)) is not None]
            rows.append(_percent_row(method, context.styles[method], estimate, dots))
    if not rows:
        return None
    majority = setup.runs[0].result.majority
    chart = Intervals(
        x_label=f"{context.measure} (%)",
        rows=rows,
        line=100 * majority.accuracy if majority is not None and setup.measure.name == "accuracy" else None,
        line_label=context.say("commonest"),
    )
    title = context.say("fig_accuracy", measure=context.measure).capitalize()
    return context.figure("accuracy", title, context.say("cap_accuracy"), chart)


def _sweep(context: ChartContext) -> ChartFigure | None:
    """Show the measure over the learning rates that each method was run at."""
    series = []
    for arm in context.setup.arms:
        points = []
        for rate, runs in arm.cells:
            figures = [run.figure(context.setup.measure.name) for run in runs]
            values = [context.factor * value for value in figures if value is not None]
            if values:
                points.append((rate, fmean(values), min(values), max(values)))
        if points:
            x, y, low, high = (list(column) for column in zip(*points, strict=True))
            style = context.styles[arm.method]
            series.append(Series(name=arm.method, style=style, x={"rate": x}, y=y, low=low, high=high))
    if not any(len(line.y) > 1 for line in series):
        return None
    axes = {"rate": context.say("axis_rate")}
    chart = Lines(axes=axes, y_label=context.measure_axis, series=series, log_x=True)
    caption = context.say("cap_sweep", measure=context.measure)
    return context.figure("sweep", context.say("fig_sweep"), caption, chart)


def _parameters(context: ChartContext) -> ChartFigure | None:
    """Show the measure over the number of trainable parameters, a point for each method."""
    series, factor = [], context.factor
    for method, runs in context.cells.items():
        estimate, trainable = mean_of(runs, context.setup.measure), runs[0].figure("trainable")
        if estimate is not None and trainable:
            series.append(
                Series(
                    name=method,
                    style=context.styles[method],
                    x={"x": [trainable / 1e6]},
                    y=[factor * estimate.mean],
                    low=[factor * (estimate.mean if estimate.low is None else estimate.low)],
                    high=[factor * (estimate.mean if estimate.high is None else estimate.high)],
                    line=False,
                )
            )
    if len({point.x["x"][0] for point in series}) < 2:
        return None
    axes = {"x": f"{context.say('m_trainable')} (10⁶)"}
    title = context.say("fig_parameters", measure=context.measure)
    title = title[:1].upper() + title[1:]
    chart = Lines(axes=axes, y_label=context.measure_axis, series=series)
    return context.figure("parameters", title, context.say("cap_parameters"), chart)


def _time(context: ChartContext) -> ChartFigure | None:
    """Show the step times of each method, pooled over its runs, with the time that its FLOPs alone would need."""
    say, reference = context.say, context.setup.reference
    reference_runs = context.cells[reference.method] if reference is not None else ()
    rows = [row for method, runs in context.cells.items() if (row := _time_row(context, method, runs, reference_runs))]
    if not rows:
        return None
    captions = [say("cap_time")]
    if reference is not None and any(row.cross is not None for row in rows):
        captions.append(say("cap_time_cross", reference=reference.method))
    if any(row.hollow for row in rows):
        captions.append(say("cap_time_doubt"))
    chart = Intervals(x_label=say("axis_step_ms"), rows=rows, cross_label=say("flop_bound"))
    return context.figure("time", say("fig_time"), " ".join(captions), chart)


def _time_row(
    context: ChartContext, method: str, runs: tuple[Run, ...], reference_runs: tuple[Run, ...]
) -> IntervalRow | None:
    """Return the step times of one method in milliseconds: median, 10th and 90th percentile, and a sample of steps."""
    seconds = [run.timing.step_seconds for run in runs if run.timing.step_seconds is not None]
    if not seconds:
        return None
    middle, low, high = (1000 * fmean(getattr(of_run, key) for of_run in seconds) for key in ("median", "p10", "p90"))
    expected = None
    if reference_runs:
        base, ratio = mean_of(reference_runs, "step_seconds"), flop_ratio(runs[0], reference_runs[0])
        expected = 1000 * base.mean * ratio if base is not None and ratio is not None else None
    sample = [1000 * second for run in runs for second in run.timing.step_seconds_sample]
    # One step that was delayed by something else would squeeze all others into a corner of the chart.
    sample = [milliseconds for milliseconds in sample if milliseconds <= 2 * high]
    return IntervalRow(
        label=method,
        style=context.styles[method],
        value=middle,
        low=low,
        high=high,
        hollow=any(run.times_doubt for run in runs),
        dots=thinned(sample, _DOTS),
        cross=expected,
    )


def _target(context: ChartContext) -> ChartFigure | None:
    """Show when each method reached each target, for the targets that all its seeds reached."""
    measure, series = context.setup.measure, []
    for method, runs in context.cells.items():
        reached = [run.result.reached for run in runs]
        targets = set.intersection(*map(set, reached))
        hardest_last = sorted(targets, reverse=measure.lower_is_better)
        if hardest_last:
            x = {
                axis: [fmean(getattr(by_target[target], key) for by_target in reached) for target in hardest_last]
                for axis, key in (("steps", "step"), ("seconds", "seconds"))
            }
            y = [context.factor * target for target in hardest_last]
            series.append(Series(name=method, style=context.styles[method], x=x, y=y))
    if len(series) < 2:
        return None
    chart = Lines(axes=context.time_axes, y_label=context.measure_axis, series=series, log_y=measure.log)
    caption = context.say("cap_target", measure=context.measure)
    return context.figure("target", context.say("fig_target"), caption, chart)
