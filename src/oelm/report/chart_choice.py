"""Choose the charts that the runs of a setup have data for, and turn their records into the charts' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.compare import Comparison
from ..analysis.run import Attempt, finite, flop_ratio
from ..analysis.stats import Estimate, too_noisy
from ..runs.schema import AuditRow, TrainLine, ValLine
from .charts import Chart, ChartFigure, Grid, IntervalRow, Intervals, Lines, Series, Styles
from .words import Words

T = TypeVar("T")
# Most points of a curve and most dots of a row: more cannot be told apart on paper or on a phone.
_POINTS = 240
_DOTS = 80
# Most panels of a figure. When there are more methods, the caption says how many are left out.
_PANELS = 6
_ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out")


@dataclass(frozen=True, kw_only=True)
class _Context:
    """A setup, and what all of its charts share.

    `cells` has the runs of each method at the learning rate that the report shows it at.
    """

    setup: Setup
    cells: dict[str, tuple[Run, ...]]
    running: list[Attempt]
    comparisons: Sequence[Comparison]
    number: int
    styles: Styles
    say: Words

    @property
    def factor(self) -> float:
        """What the setup's measure is multiplied with in a chart: shares are shown in percent."""
        return 100.0 if self.setup.measure.points else 1.0

    @property
    def measure(self) -> str:
        """The name of the setup's measure in the report's language."""
        return self.say(f"m_{self.setup.measure.name}")

    @property
    def measure_axis(self) -> str:
        """The label of an axis with the setup's measure."""
        return f"{self.measure} (%)" if self.setup.measure.points else self.measure

    @property
    def time_axes(self) -> dict[str, str]:
        """The two axes of a chart over time."""
        return {"steps": self.say("axis_steps"), "seconds": self.say("axis_seconds")}

    def figure(self, kind: str, title: str, caption: str, chart: Chart) -> ChartFigure:
        """Return a figure of one chart, named after the setup's number and the kind of chart."""
        return ChartFigure(f"{self.number}-{kind}", title, caption, [chart])

    def panels(self, kind: str, charts: Sequence[Chart]) -> ChartFigure | None:
        """Return a figure of one panel per method, at most `_PANELS`, or None when there is none."""
        if not charts:
            return None
        caption = self.say(f"cap_{kind}")
        if len(charts) > _PANELS:
            caption = f"{caption} {self.say('cap_panels', shown=_PANELS, all=len(charts))}"
        return ChartFigure(f"{self.number}-{kind}", self.say(f"fig_{kind}"), caption, list(charts[:_PANELS]))


def setup_figures(
    analysis: Analysis, setup: Setup, number: int, styles: Styles, say: Words
) -> tuple[list[ChartFigure], list[str]]:
    """Return the figures of a setup, and the keys of the texts that say which ones its records cannot fill."""
    context = _Context(
        setup=setup,
        cells={arm.method: cell_to_show(analysis, setup, arm)[1] for arm in setup.arms},
        running=[run for run in analysis.running if run.dataset == setup.dataset and run.task == setup.task],
        comparisons=analysis.of(setup),
        number=number,
        styles=styles,
        say=say,
    )
    makers: list[tuple[Callable[[_Context], ChartFigure | None], str | None]] = [
        (_change, None),
        (_accuracy, None),
        (_validation, "missing_validation"),
        (_training, None),
        (_sweep, "missing_sweep"),
        (_parameters, None),
        (_time, "missing_time"),
        (_target, "missing_target"),
        (_map, "missing_map"),
        (_entropy, "missing_attention"),
        (_logits, None),
        (_confusion, "missing_confusion" if setup.task.kind == "classification" else None),
    ]
    figures, missing = [], []
    for make, missing_key in makers:
        figure = make(context)
        if figure is not None:
            figures.append(figure)
        elif missing_key is not None:
            missing.append(missing_key)
    return figures, missing


def _change(context: _Context) -> ChartFigure | None:
    comparisons = [(one.arm, one) for one in context.comparisons]
    return change_figure(f"{context.number}-change", comparisons, context.styles, context.say)


def change_figure(
    name: str, comparisons: Sequence[tuple[str, Comparison]], styles: Styles, say: Words
) -> ChartFigure | None:
    """Return the figure of labelled comparisons of one measure, a row each, or None when none has a pair of runs."""
    rows = [row for label, one in comparisons if (row := _change_row(label, one, styles)) is not None]
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


def _change_row(label: str, one: Comparison, styles: Styles) -> IntervalRow | None:
    points = one.measure.points
    estimate = one.difference if points else one.change
    if estimate is None or not one.pairs:
        return None
    low, high = _percent_bounds(estimate)
    if not points and too_noisy(estimate):
        low = high = None
    pairs = [100 * ((a - b) if points else (a / b - 1)) for a, b in one.values]
    return IntervalRow(
        label=label,
        style=styles[one.arm],
        value=100 * estimate.mean,
        low=low,
        high=high,
        hollow=low is None or not one.sound,
        dots=pairs if len(pairs) > 1 else [],
    )


def _percent_bounds(estimate: Estimate) -> tuple[float | None, float | None]:
    if estimate.low is None or estimate.high is None:
        return None, None
    return 100 * estimate.low, 100 * estimate.high


def _accuracy(context: _Context) -> ChartFigure | None:
    """The measure of each method of a classifier, with a dot for each run."""
    setup, rows = context.setup, []
    if setup.task.kind == "language":
        return None
    for method, runs in context.cells.items():
        estimate = mean_of(runs, setup.measure)
        if estimate is not None:
            low, high = _percent_bounds(estimate)
            rows.append(
                IntervalRow(
                    label=method,
                    style=context.styles[method],
                    value=100 * estimate.mean,
                    low=low,
                    high=high,
                    hollow=low is None,
                    dots=[100 * value for run in runs if (value := run.figure(setup.measure.name)) is not None],
                )
            )
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


def _validation(context: _Context) -> ChartFigure | None:
    """The measure on the validation data over steps and time; runs in progress as faint lines."""
    metric = _Metric("val", context.setup.measure.name, context.factor)
    series = [_curve(method, context.styles[method], runs, metric) for method, runs in context.cells.items()]
    for run in context.running:
        name = context.say("series_running", method=run.method, seed=run.seed)
        series.append(_curve(name, context.styles[run.method], (run,), metric, faint=True))
    drawn = [one for one in series if one is not None]
    if not drawn:
        return None
    chart = Lines(axes=context.time_axes, y_label=context.measure_axis, series=drawn, log_y=context.setup.measure.log)
    caption = context.say("cap_validation", measure=context.measure.capitalize())
    return context.figure("validation", context.say("fig_validation"), caption, chart)


def _training(context: _Context) -> ChartFigure | None:
    """Training loss and learning rate over steps, side by side."""
    say, charts = context.say, []
    for key, label in (("loss", "axis_loss"), ("learning_rate", "axis_rate")):
        metric = _Metric("train", key, marks=False)
        series = [_curve(method, context.styles[method], runs, metric) for method, runs in context.cells.items()]
        drawn = [one for one in series if one is not None]
        charts.append(Lines(axes={"steps": say("axis_steps")}, y_label=say(label), series=drawn))
    if not charts[0].series:
        return None
    return ChartFigure(f"{context.number}-training", say("fig_training"), say("cap_training"), [*charts])


def _sweep(context: _Context) -> ChartFigure | None:
    """The measure over the learning rates that each method was run at."""
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
    if not any(len(one.y) > 1 for one in series):
        return None
    axes = {"rate": context.say("axis_rate")}
    chart = Lines(axes=axes, y_label=context.measure_axis, series=series, log_x=True)
    caption = context.say("cap_sweep", measure=context.measure)
    return context.figure("sweep", context.say("fig_sweep"), caption, chart)


def _parameters(context: _Context) -> ChartFigure | None:
    """The measure over the number of trainable parameters, a point for each method."""
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
    if len({one.x["x"][0] for one in series}) < 2:
        return None
    axes = {"x": f"{context.say('m_trainable')} (10⁶)"}
    title = context.say("fig_parameters", measure=context.measure)
    title = title[:1].upper() + title[1:]
    chart = Lines(axes=axes, y_label=context.measure_axis, series=series)
    return context.figure("parameters", title, context.say("cap_parameters"), chart)


def _time(context: _Context) -> ChartFigure | None:
    """The step times of each method, pooled over its runs, with the time that its FLOPs alone would need."""
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
    context: _Context, method: str, runs: tuple[Run, ...], reference_runs: tuple[Run, ...]
) -> IntervalRow | None:
    """The step times of one method in milliseconds: median, 10th and 90th percentile, and a sample of steps."""
    statistics = [run.timing.step_seconds for run in runs if run.timing.step_seconds is not None]
    if not statistics:
        return None
    middle, low, high = (1000 * fmean(getattr(one, key) for one in statistics) for key in ("median", "p10", "p90"))
    expected = None
    if reference_runs:
        base, ratio = mean_of(reference_runs, "step_seconds"), flop_ratio(runs[0], reference_runs[0])
        expected = 1000 * base.mean * ratio if base is not None and ratio is not None else None
    sample = [1000 * second for run in runs for second in run.timing.step_seconds_sample]
    # One step that was held up by something else would squeeze all others into a corner of the chart.
    sample = [one for one in sample if one <= 2 * high]
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


def _target(context: _Context) -> ChartFigure | None:
    """When each method reached each target, for the targets that all its seeds reached."""
    measure, series = context.setup.measure, []
    for method, runs in context.cells.items():
        reached = [run.result.reached for run in runs]
        targets = set.intersection(*(set(one) for one in reached))
        hardest_last = sorted(targets, reverse=measure.lower_is_better)
        if hardest_last:
            x = {
                axis: [fmean(getattr(one[target], key) for one in reached) for target in hardest_last]
                for axis, key in (("steps", "step"), ("seconds", "seconds"))
            }
            y = [context.factor * target for target in hardest_last]
            series.append(Series(name=method, style=context.styles[method], x=x, y=y))
    if len(series) < 2:
        return None
    chart = Lines(axes=context.time_axes, y_label=context.measure_axis, series=series, log_y=measure.log)
    caption = context.say("cap_target", measure=context.measure)
    return context.figure("target", context.say("fig_target"), caption, chart)


def _map(context: _Context) -> ChartFigure | None:
    """The frozen share of each matrix by layer and role, a panel for each method that freezes or removes any."""
    charts = []
    for method, runs in context.cells.items():
        rows = [row for row in runs[0].audit.rows if row.role in _ROLES]
        sites = {(f"{row.kind} {row.layer}", row.role): row for row in rows}
        if not any(row.frozen or row.init == "identity" for row in rows):
            continue
        layers = list(dict.fromkeys(layer for layer, _ in sites))
        kinds = {layer.split()[0] for layer in layers}
        roles = [role for role in _ROLES if any(name == role for _, name in sites)]
        values = [[_frozen_share(sites.get((layer, role))) for role in roles] for layer in layers]
        charts.append(
            Grid(
                rows=[layer.split(maxsplit=1)[1] if len(kinds) == 1 else layer for layer in layers],
                columns=roles,
                values=values,
                texts=[["–" if value is None else f"{100 * value:.0f}" for value in row] for row in values],
                title=method,
                x_label=context.say("axis_role"),
                y_label=context.say("axis_layer"),
            )
        )
    return context.panels("map", charts)


def _frozen_share(row: AuditRow | None) -> float | None:
    if row is None or row.init == "identity":
        return None
    return row.frozen / (row.frozen + row.trainable) if row.frozen + row.trainable else None


def _entropy(context: _Context) -> ChartFigure | None:
    return _attention(context, "entropy", "entropy_share")


def _logits(context: _Context) -> ChartFigure | None:
    return _attention(context, "logits", "logit_std")


def _attention(context: _Context, kind: str, key: str) -> ChartFigure | None:
    """A value of the attention metrics over steps, a panel for each method with a line for each layer."""
    charts = []
    for method, runs in context.cells.items():
        values: dict[str, dict[int, list[float]]] = {}
        for run in runs:
            for line in run.metrics:
                if line.kind == "attention":
                    for layer in line.layers:
                        if (value := finite(getattr(layer, key))) is not None:
                            values.setdefault(layer.label, {}).setdefault(line.step, []).append(value)
        series = []
        for index, (label, by_step) in enumerate(values.items()):
            steps = sorted(by_step)
            x, y = [float(step) for step in steps], [fmean(by_step[step]) for step in steps]
            series.append(Series(name=label, style=index, x={"steps": x}, y=y))
        if series:
            axes, label = {"steps": context.say("axis_steps")}, context.say(f"axis_{kind}")
            charts.append(Lines(axes=axes, y_label=label, series=series, title=method))
    return context.panels(kind, charts)


def _confusion(context: _Context) -> ChartFigure | None:
    """The confusion matrix of each method, summed over its runs, as shares of each true class."""
    charts = []
    for method, runs in context.cells.items():
        matrices = [matrix for run in runs if (matrix := confusion_of(run))]
        if not matrices or len({len(matrix) for matrix in matrices}) != 1:
            continue
        size = range(len(matrices[0]))
        total = [[sum(matrix[i][j] for matrix in matrices) for j in size] for i in size]
        named = runs[0].result.labels or []
        labels = [str(label) for label in (named if len(named) == len(total) else size)]
        values: list[list[float | None]] = [[n / sum(row) if sum(row) else None for n in row] for row in total]
        charts.append(
            Grid(
                rows=labels,
                columns=labels,
                values=values,
                texts=[["–" if value is None else f"{100 * value:.1f}" for value in row] for row in values],
                title=method,
                x_label=context.say("axis_answer"),
                y_label=context.say("axis_truth"),
            )
        )
    return context.panels("confusion", charts)


def confusion_of(run: Run) -> list[list[int]] | None:
    """Return a classifier's confusion matrix of the last epoch, a row per true class, or None when it is not square."""
    matrix = run.result.last.confusion
    return None if not matrix or any(len(row) != len(matrix) for row in matrix) else matrix


@dataclass(frozen=True)
class _Metric:
    """A value of the metric lines of one kind, and how its curve is shown."""

    kind: str
    key: str
    factor: float = 1.0
    marks: bool = True


def _curve(name: str, style: int, runs: Sequence[Attempt], metric: _Metric, faint: bool = False) -> Series | None:
    """Return the mean of a metric over runs at the steps that all of them have, with the lowest and the highest.

    None when fewer than two steps are left.
    """
    tables = []
    for run in runs:
        table = {}
        for line in run.metrics:
            value = finite(getattr(line, metric.key, None))
            if isinstance(line, TrainLine | ValLine) and line.kind == metric.kind and value is not None:
                table[line.step] = (metric.factor * value, line.time.seconds)
        tables.append(table)
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if len(steps) < 2:
        return None
    steps = thinned(steps)
    values = [[table[step][0] for table in tables] for step in steps]
    clock = [fmean(table[step][1] for table in tables) for step in steps]
    several = len(tables) > 1
    return Series(
        name=name,
        style=style,
        x={"steps": [float(step) for step in steps]} | ({"seconds": clock} if any(clock) else {}),
        y=[fmean(at_step) for at_step in values],
        low=[min(at_step) for at_step in values] if several else None,
        high=[max(at_step) for at_step in values] if several else None,
        marks=metric.marks and len(steps) <= 40,
        faint=faint,
    )


def thinned(values: list[T], most: int = _POINTS) -> list[T]:
    """Return at most so many values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
