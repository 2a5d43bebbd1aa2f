"""Make charts of what the runs of a setup recorded: metrics over steps, frozen shares by layer, confusion matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ..analysis import Run
from ..analysis.arms import Measure, Setup
from ..analysis.run import Attempt, Bench, finite
from ..runs.schema import AuditRow, Reached, TrainLine, ValLine
from .charts import Chart, ChartFigure, Grid, Lines, Series, Styles
from .words import Words

T = TypeVar("T")
# The most points of a curve: more cannot be told apart on paper or on a phone.
_POINTS = 240
_ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out")
# How many targets a validation curve is cut at, when the runs recorded none.
_TARGETS = 5
# The most panels of a figure. When there are more methods, the caption says how many are shown.
MOST_PANELS = 6


@dataclass(frozen=True, kw_only=True)
class ChartContext:
    """A setup, and the values that all of its charts share.

    `cells` has the runs of each method at the learning rate that the report shows it at.
    """

    setup: Setup
    cells: dict[str, tuple[Run, ...]]
    running: list[Attempt]
    benches: Sequence[Bench]
    number: int
    styles: Styles
    say: Words

    @property
    def factor(self) -> float:
        """Return the factor of the measure's values in a chart: shares are shown in percent."""
        return 100.0 if self.setup.measure.points else 1.0

    @property
    def measure(self) -> str:
        """Return the name of the setup's measure in the report's language."""
        return self.say(f"m_{self.setup.measure.name}")

    @property
    def measure_axis(self) -> str:
        """Return the label of an axis with the setup's measure."""
        return f"{self.measure} (%)" if self.setup.measure.points else self.measure

    @property
    def time_axes(self) -> dict[str, str]:
        """Return the two axes of a chart over time."""
        return {"steps": self.say("axis_steps"), "seconds": self.say("axis_seconds")}

    def figure(self, kind: str, title: str, caption: str, chart: Chart) -> ChartFigure:
        """Return a figure of one chart, named after the setup's number and the kind of chart."""
        return ChartFigure(f"{self.number}-{kind}", title, caption, [chart])

    def panels(self, kind: str, charts: Sequence[Chart]) -> ChartFigure | None:
        """Return a figure of one panel per method, at most `MOST_PANELS`, or None when there is none."""
        if not charts:
            return None
        caption = self.say(f"cap_{kind}")
        if len(charts) > MOST_PANELS:
            caption = f"{caption} {self.say('cap_panels', shown=MOST_PANELS, all=len(charts))}"
        return ChartFigure(f"{self.number}-{kind}", self.say(f"fig_{kind}"), caption, list(charts[:MOST_PANELS]))


def validation_figure(context: ChartContext) -> ChartFigure | None:
    """Show the measure on the validation data over steps and time; runs in progress as faint lines."""
    metric = _Metric("val", context.setup.measure.name, context.factor)
    series = [_curve(method, context.styles[method], runs, metric) for method, runs in context.cells.items()]
    for run in context.running:
        name = context.say("series_running", method=run.method, seed=run.seed)
        series.append(_curve(name, context.styles[run.method], (run,), metric, faint=True))
    drawn = [curve for curve in series if curve is not None]
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
        drawn = [curve for curve in series if curve is not None]
        charts.append(Lines(axes={"steps": say("axis_steps")}, y_label=say(label), series=drawn))
    if not charts[0].series:
        return None
    return ChartFigure(f"{context.number}-training", say("fig_training"), say("cap_training"), [*charts])


def attention_figure(context: ChartContext, kind: str, key: str) -> ChartFigure | None:
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
            # The layers of a method have its colour, the last one the strongest: a colour stands for one method only.
            shade = 0.35 + 0.65 * (index + 1) / len(values)
            style = context.styles[method]
            series.append(Series(name=label, style=style, x={"steps": x}, y=y, shade=shade, pattern=index))
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
    """Return at most `most` values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def reached_on_curves(cells: Mapping[str, Sequence[Run]], measure: Measure) -> dict[str, list[dict[float, Reached]]]:
    """Return when the validation of each run first reached some targets, for the methods whose runs have curves.

    The targets lie between the values that every run began worse than, and ended better than or equal to.
    """
    sign = 1 if measure.lower_is_better else -1
    curves = {method: [_falling(run, measure.name, sign) for run in runs] for method, runs in cells.items()}
    curves = {method: of_runs for method, of_runs in curves.items() if all(len(curve) > 1 for curve in of_runs)}
    every_curve = [curve for of_runs in curves.values() for curve in of_runs]
    if not every_curve:
        return {}
    easiest = min(curve[0][1] for curve in every_curve)
    hardest = max(min(value for _, value in curve) for curve in every_curve)
    if hardest >= easiest:
        return {}
    targets = [*(easiest + (hardest - easiest) * part / _TARGETS for part in range(1, _TARGETS)), hardest]
    return {
        method: [{sign * target: _first_at(curve, target) for target in targets} for curve in of_runs]
        for method, of_runs in curves.items()
    }


def _falling(run: Run, name: str, sign: int) -> list[tuple[ValLine, float]]:
    """Return the validations of a run with their values of a measure, negative when a higher value is better."""
    lines = [line for line in run.metrics if isinstance(line, ValLine)]
    return [(line, sign * value) for line in lines if (value := finite(getattr(line, name))) is not None]


def _first_at(curve: Sequence[tuple[ValLine, float]], target: float) -> Reached:
    """Return the first point of a curve that is not above the target."""
    line = next(line for line, value in curve if value <= target)
    return Reached(step=line.step, tokens=line.tokens, seconds=line.time.seconds)


def map_figure(context: ChartContext) -> ChartFigure | None:
    """Show the frozen share of each matrix by layer and role, a panel for each method that freezes or removes any."""
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


def confusion_figure(context: ChartContext) -> ChartFigure | None:
    """Show the confusion matrix of each method, summed over its runs, as shares of each true class."""
    charts = []
    for method, runs in context.cells.items():
        # A matrix of the last epoch has a row per true class. One that is not square is left out.
        counts = [run.result.last.confusion or [] for run in runs]
        matrices = [matrix for matrix in counts if matrix and all(len(row) == len(matrix) for row in matrix)]
        if len({len(matrix) for matrix in matrices}) != 1:
            continue
        size = range(len(matrices[0]))
        total = [[sum(matrix[i][j] for matrix in matrices) for j in size] for i in size]
        class_names = runs[0].result.labels or []
        labels = [str(label) for label in (class_names if len(class_names) == len(total) else size)]
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
