"""Charts of metrics over the steps of a run: validation, training and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ..analysis.run import Attempt, finite
from ..runs.schema import TrainLine, ValLine
from .chart_context import ChartContext
from .charts import ChartFigure, Lines, Series

T = TypeVar("T")
# Most points of a curve: more cannot be told apart on paper or on a phone.
_POINTS = 240


def validation_figure(context: ChartContext) -> ChartFigure | None:
    """Show the measure on the validation data over steps and time; runs in progress as faint lines."""
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


def training_figure(context: ChartContext) -> ChartFigure | None:
    """Show training loss and learning rate over steps, side by side."""
    say, charts = context.say, []
    for key, label in (("loss", "axis_loss"), ("learning_rate", "axis_rate")):
        metric = _Metric("train", key, marks=False)
        series = [_curve(method, context.styles[method], runs, metric) for method, runs in context.cells.items()]
        drawn = [one for one in series if one is not None]
        charts.append(Lines(axes={"steps": say("axis_steps")}, y_label=say(label), series=drawn))
    if not charts[0].series:
        return None
    return ChartFigure(f"{context.number}-training", say("fig_training"), say("cap_training"), [*charts])


def entropy_figure(context: ChartContext) -> ChartFigure | None:
    """Show the entropy of the attention weights, as a share of its maximum."""
    return _attention(context, "entropy", "entropy_share")


def logits_figure(context: ChartContext) -> ChartFigure | None:
    """Show the standard deviation of the attention logits."""
    return _attention(context, "logits", "logit_std")


def _attention(context: ChartContext, kind: str, key: str) -> ChartFigure | None:
    """Show a value of the attention metrics over steps, a panel for each method with a line for each layer."""
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
