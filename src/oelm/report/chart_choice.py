"""Choose the charts that the runs of a setup have data for, and turn their records into the charts' data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.run import flop_ratio
from ..runs.schema import Reached
from .chart_records import (
    ChartContext,
    attention_figure,
    confusion_figure,
    map_figure,
    reached_on_curves,
    thinned,
    training_figure,
    validation_figure,
)
from .charts import ChartFigure, IntervalRow, Intervals, Lines, Series, Styles
from .forest import percent_row
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
        benches=analysis.benches,
        number=number,
        styles=styles,
        say=say,
    )
    # The narrow figures come first: two of them fit beside each other.
    makers: list[tuple[Callable[[ChartContext], ChartFigure | None], str | None]] = [
        (_accuracy, None),
        (_sweep, "missing_sweep"),
        (_parameters, "missing_parameters"),
        (_cache, "missing_cache" if setup.task.kind == "language" else None),
        (_time, "missing_time"),
        (validation_figure, "missing_validation"),
        (training_figure, None),
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


def _accuracy(context: ChartContext) -> ChartFigure | None:
    """Show the measure of each method where it is a share, such as accuracy, with a dot for each run."""
    setup, rows = context.setup, []
    if not setup.measure.points:
        return None
    for method, runs in context.cells.items():
        estimate = mean_of(runs, setup.measure)
        if estimate is not None:
            dots = [100 * value for run in runs if (value := run.figure(setup.measure.name)) is not None]
            rows.append(percent_row(method, context.styles[method], estimate, dots))
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
    trainable = {method: runs[0].figure("trainable") for method, runs in context.cells.items()}
    millions = {method: count / 1e6 for method, count in trainable.items() if count}
    chart = _points(context, millions, f"{context.say('m_trainable')} (10⁶)")
    title = _sentence_case(context.say("fig_parameters", measure=context.measure))
    return context.figure("parameters", title, context.say("cap_parameters"), chart) if chart is not None else None


def _cache(context: ChartContext) -> ChartFigure | None:
    """Show the measure over the size of the cache in generation, for the methods that a benchmark measured it for."""
    sizes = {row.arm: row.cache_bytes_per_token for bench in context.benches for row in bench.decoding}
    of_methods = {method: sizes[method] for method in context.cells if method in sizes}
    chart = _points(context, of_methods, context.say("axis_cache"))
    title = _sentence_case(context.say("fig_cache", measure=context.measure))
    return context.figure("cache", title, context.say("cap_cache"), chart) if chart is not None else None


def _points(context: ChartContext, sizes: Mapping[str, float], label: str) -> Lines | None:
    """Return the measure over a size of each method, or None when fewer than two sizes differ."""
    series, factor = [], context.factor
    for method, size in sizes.items():
        estimate = mean_of(context.cells[method], context.setup.measure)
        if estimate is not None:
            series.append(
                Series(
                    name=method,
                    style=context.styles[method],
                    x={"x": [size]},
                    y=[factor * estimate.mean],
                    low=[factor * (estimate.mean if estimate.low is None else estimate.low)],
                    high=[factor * (estimate.mean if estimate.high is None else estimate.high)],
                    line=False,
                )
            )
    if len({point.x["x"][0] for point in series}) < 2:
        return None
    return Lines(axes={"x": label}, y_label=context.measure_axis, series=series)


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


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
    return context.figure("time", say("fig_time"), say.in_a_row(captions), chart)


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
    """Show when each method reached each target, for the targets that all its seeds reached.

    Without two methods that reached targets of `eval.targets`, the targets come from the validation curves.
    """
    measure, caption = context.setup.measure, "cap_target"
    reached = {method: [run.result.reached for run in runs] for method, runs in context.cells.items()}
    if sum(bool(_common(of_runs)) for of_runs in reached.values()) < 2:
        reached, caption = reached_on_curves(context.cells, measure), "cap_target_curves"
    series = []
    for method, of_runs in reached.items():
        hardest_last = sorted(_common(of_runs), reverse=measure.lower_is_better)
        if hardest_last:
            x = {
                axis: [fmean(getattr(by_target[target], key) for by_target in of_runs) for target in hardest_last]
                for axis, key in (("steps", "step"), ("seconds", "seconds"))
            }
            y = [context.factor * target for target in hardest_last]
            series.append(Series(name=method, style=context.styles[method], x=x, y=y))
    if len(series) < 2:
        return None
    chart = Lines(axes=context.time_axes, y_label=context.measure_axis, series=series, log_y=measure.log)
    return context.figure("target", context.say("fig_target"), context.say(caption, measure=context.measure), chart)


def _common(of_runs: Sequence[Mapping[float, Reached]]) -> set[float]:
    """Return the targets that all runs reached."""
    return set.intersection(*(set(by_target) for by_target in of_runs))
