"""Which pictures a setup's runs can fill, from records to charts; what they lack is said once, not drawn empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeVar

from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.compare import Comparison
from ..analysis.flops import flop_ratio
from ..analysis.run import finite
from ..analysis.stats import too_noisy
from .charts import Chart, Figure, Grid, Intervals, Lines, Row, Series, Styles
from .words import Words

T = TypeVar("T")
Cells = dict[str, tuple[float, tuple[Run, ...]]]
# A curve on paper or a phone shows no more points than this.
_POINTS = 240
_DOTS = 80
# Panels in one picture; of more methods than this the caption says that they are left out.
_PANELS = 6


def pictures(
    analysis: Analysis, setup: Setup, number: int, styles: Styles, say: Words
) -> tuple[list[Figure], list[str]]:
    """The figures of a setup, and the keys of what is missing."""
    cells = {arm.method: cell_to_show(analysis, setup, arm) for arm in setup.arms}
    running = [run for run in analysis.running if run.dataset == setup.dataset and run.task == setup.task]
    makers: list[tuple[str, Callable[..., Figure | None], str | None]] = [
        ("change", _change, None),
        ("accuracy", _accuracy, None),
        ("validation", _validation, "missing_validation"),
        ("training", _training, None),
        ("sweep", _sweep, "missing_sweep"),
        ("parameters", _parameters, None),
        ("time", _time, "missing_time"),
        ("target", _target, "missing_target"),
        ("map", _map, "missing_map"),
        ("entropy", _attention("entropy_share", "entropy"), "missing_attention"),
        ("logits", _attention("logit_std", "logits"), None),
        ("confusion", _confusion, "missing_confusion" if setup.task.kind == "classification" else None),
    ]
    found, missing = [], []
    for name, make, absent in makers:
        made = make(f"{number}-{name}", analysis, setup, cells, running, styles, say)
        if made is not None:
            found.append(made)
        elif absent is not None:
            missing.append(absent)
    return found, missing


def _change(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    """Every arm's difference to the reference: what to look at first."""
    comparisons = analysis.of(setup)
    return changes(name, [(one.arm, one) for one in comparisons], styles, say)


def changes(name: str, comparisons: Sequence[tuple[str, Comparison]], styles: Styles, say: Words) -> Figure | None:
    """Comparisons of one measure below each other, each with the label that is given to it."""
    rows = [row for label, one in comparisons if (row := _change_row(label, one, styles)) is not None]
    if not rows:
        return None
    first = comparisons[0][1]
    reference, measure = first.reference, say(f"m_{first.measure.name}")
    axis = say("axis_points" if first.measure.points else "axis_change", measure=measure, reference=reference)
    return Figure(
        name,
        say("fig_change", reference=reference),
        say("cap_change", measure=measure.capitalize(), reference=reference),
        [Intervals(axis, rows, line=0.0)],
    )


def _change_row(label: str, one: Comparison, styles: Styles) -> Row | None:
    points = one.measure.points
    found = one.difference if points else one.change
    if found is None or not one.pairs:
        return None
    low, high = (None, None) if found.low is None or found.high is None else (100 * found.low, 100 * found.high)
    if not points and too_noisy(found):
        low = high = None
    pairs = [100 * ((a - b) if points else (a / b - 1)) for a, b in one.values]
    hollow = low is None or not one.sound
    return Row(label, styles[one.arm], 100 * found.mean, low, high, hollow, pairs if len(pairs) > 1 else [])


def _accuracy(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    """A classifier's figure by arm, with every run."""
    if setup.task.kind == "language":
        return None
    rows = []
    for method, (_, runs) in cells.items():
        found = mean_of(runs, setup.measure)
        if found is not None:
            dots = [100 * value for run in runs if (value := run.figure(setup.measure.name)) is not None]
            low, high = (None, None) if found.low is None or found.high is None else (100 * found.low, 100 * found.high)
            rows.append(Row(method, styles[method], 100 * found.mean, low, high, low is None, dots))
    if not rows:
        return None
    majority = (setup.runs[0].result.get("majority") or {}).get("accuracy")
    measure = say(f"m_{setup.measure.name}")
    chart = Intervals(
        f"{measure} (%)",
        rows,
        line=100 * majority if majority is not None and setup.measure.name == "accuracy" else None,
        line_label=say("commonest"),
    )
    return Figure(name, say("fig_accuracy", measure=measure).capitalize(), say("cap_accuracy"), [chart])


def _validation(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    measure = setup.measure.name
    factor = 100.0 if setup.measure.points else 1.0
    series = [
        made
        for method, (_, runs) in cells.items()
        if (made := _curve(method, styles[method], runs, "val", measure, factor)) is not None
    ]
    for run in running:
        label = say("series_running", method=run.method, seed=run.seed)
        made = _curve(label, styles[run.method], (run,), "val", measure, factor, faint=True)
        series += [made] if made is not None else []
    if not series:
        return None
    label = say(f"m_{measure}")
    axes = {"steps": say("axis_steps"), "seconds": say("axis_seconds")}
    chart = Lines(
        axes,
        f"{label} (%)" if setup.measure.points else label,
        series,
        log_y=setup.measure.log,
        can_log=setup.measure.log,
    )
    return Figure(name, say("fig_validation"), say("cap_validation", measure=label.capitalize()), [chart])


def _training(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    axes = {"steps": say("axis_steps")}
    losses, rates = [], []
    for method, (_, runs) in cells.items():
        loss = _curve(method, styles[method], runs, "train", "loss", marks=False)
        rate = _curve(method, styles[method], runs, "train", "learning_rate", marks=False)
        losses += [loss] if loss is not None else []
        rates += [rate] if rate is not None else []
    if not losses:
        return None
    charts = [Lines(axes, say("axis_loss"), losses), Lines(axes, say("axis_rate"), rates)]
    return Figure(name, say("fig_training"), say("cap_training"), [*charts])


def _sweep(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    factor = 100.0 if setup.measure.points else 1.0
    series = []
    for arm in setup.arms:
        points = []
        for rate, runs in arm.cells:
            values = [factor * value for run in runs if (value := run.figure(setup.measure.name)) is not None]
            if values:
                points.append((rate, fmean(values), min(values), max(values)))
        if points:
            x, y, low, high = (list(column) for column in zip(*points, strict=True))
            series.append(Series(arm.method, styles[arm.method], {"rate": x}, y, low, high))
    if not any(len(one.y) > 1 for one in series):
        return None
    label = say(f"m_{setup.measure.name}")
    axis = f"{label} (%)" if setup.measure.points else label
    chart = Lines({"rate": say("axis_rate")}, axis, series, log_x=True, can_log=False)
    return Figure(name, say("fig_sweep"), say("cap_sweep", measure=label), [chart])


def _parameters(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    series = []
    factor = 100.0 if setup.measure.points else 1.0
    for method, (_, runs) in cells.items():
        found, trainable = mean_of(runs, setup.measure), runs[0].figure("trainable")
        if found is not None and trainable:
            low = [factor * (found.mean if found.low is None else found.low)]
            high = [factor * (found.mean if found.high is None else found.high)]
            made = Series(
                method, styles[method], {"x": [trainable / 1e6]}, [factor * found.mean], low, high, line=False
            )
            series.append(made)
    if len({one.x["x"][0] for one in series}) < 2:
        return None
    label = say(f"m_{setup.measure.name}")
    axis = f"{label} (%)" if setup.measure.points else label
    chart = Lines({"x": f"{say('m_trainable')} (10⁶)"}, axis, series, can_log=False)
    title = say("fig_parameters", measure=label)
    return Figure(name, title[:1].upper() + title[1:], say("cap_parameters"), [chart])


def _time(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    """The distribution of step times, pooled over an arm's runs, against what the FLOPs alone would give."""
    rows, doubtful = [], False
    reference = setup.reference
    base = mean_of(cells[reference.method][1], "step_seconds") if reference is not None else None
    for method, (_, runs) in cells.items():
        statistics = [run.timing.get("step_seconds") or run.result.get("step_seconds") or {} for run in runs]
        statistics = [one for one in statistics if one.get("median") and None not in (one.get("p10"), one.get("p90"))]
        if not statistics:
            continue
        middle, low, high = (1000 * fmean(one[key] for one in statistics) for key in ("median", "p10", "p90"))
        ratio = flop_ratio(runs[0], cells[reference.method][1][0]) if reference is not None else None
        cross = 1000 * base.mean * ratio if base is not None and ratio is not None else None
        doubt = any(run.times_doubt for run in runs)
        doubtful = doubtful or doubt
        sample = [1000 * second for run in runs for second in run.timing.get("step_seconds_sample") or []]
        sample = [one for one in sample if one <= 2 * high]  # a step that met something else would flatten the rest
        rows.append(Row(method, styles[method], middle, low, high, doubt, thinned(sample, _DOTS), cross))
    if not rows:
        return None
    captions = [say("cap_time")]
    if reference is not None and any(row.cross is not None for row in rows):
        captions.append(say("cap_time_cross", reference=reference.method))
    if doubtful:
        captions.append(say("cap_time_doubt"))
    chart = Intervals(say("axis_step_ms"), rows, cross_label=say("flop_bound"))
    return Figure(name, say("fig_time"), " ".join(captions), [chart])


def _target(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    """When each arm reached each target: only targets that all its seeds reached."""
    series = []
    factor = 100.0 if setup.measure.points else 1.0
    for method, (_, runs) in cells.items():
        reached = [run.result.get("reached") or {} for run in runs]
        common = set.intersection(*(set(one) for one in reached))
        hardest_last = sorted(common, key=float, reverse=setup.measure.lower_is_better)
        if hardest_last:
            x = {
                axis: [fmean(float(one[t][key]) for one in reached) for t in hardest_last] for axis, key in _TARGET_AXES
            }
            series.append(Series(method, styles[method], x, [factor * float(target) for target in hardest_last]))
    if len(series) < 2:
        return None
    axes = {"steps": say("axis_steps"), "seconds": say("axis_seconds")}
    label = say(f"m_{setup.measure.name}")
    log = setup.measure.log
    chart = Lines(axes, f"{label} (%)" if setup.measure.points else label, series, log_y=log, can_log=log)
    return Figure(name, say("fig_target"), say("cap_target", measure=label), [chart])


_TARGET_AXES = (("steps", "step"), ("seconds", "seconds"))
_ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out")


def _map(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    """Layers by roles, one panel for each method that freezes or removes something."""
    charts = []
    for method, (_, runs) in cells.items():
        rows = runs[0].audit.get("rows") or []
        places = {(f"{row['kind']} {row['layer']}", row["role"]): row for row in rows if row.get("role") in _ROLES}
        if not any(row.get("frozen") or row.get("init") == "identity" for row in places.values()):
            continue
        layers = list(dict.fromkeys(layer for layer, _ in places))
        kinds = {layer.split()[0] for layer in layers}
        roles = [role for role in _ROLES if any(found == role for _, found in places)]
        values = [[_frozen_share(places.get((layer, role))) for role in roles] for layer in layers]
        texts = [["–" if value is None else f"{100 * value:.0f}" for value in row] for row in values]
        labels = [layer.split(maxsplit=1)[1] if len(kinds) == 1 else layer for layer in layers]
        charts.append(Grid(labels, roles, values, texts, method, say("axis_role"), say("axis_layer")))
    return _panels(name, "map", charts, say)


def _frozen_share(row: dict[str, object] | None) -> float | None:
    if row is None or row.get("init") == "identity":
        return None
    frozen, trainable = float(str(row.get("frozen") or 0)), float(str(row.get("trainable") or 0))
    return frozen / (frozen + trainable) if frozen + trainable else None


def _attention(key: str, which: str) -> Callable[..., Figure | None]:
    """A figure of the attention lines of the metrics, one panel for each method, one line for each layer."""

    def make(
        name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
    ) -> Figure | None:
        charts = []
        for method, (_, runs) in cells.items():
            values: dict[str, dict[int, list[float]]] = {}
            for run in runs:
                for line in run.metrics:
                    if line["kind"] == "attention":
                        for layer in line.get("layers", []):
                            if (value := finite(layer.get(key))) is not None:
                                at = values.setdefault(str(layer["label"]), {}).setdefault(int(line["step"]), [])
                                at.append(value)
            series = [
                Series(
                    label, index, {"steps": [float(step) for step in sorted(by)]}, [fmean(by[s]) for s in sorted(by)]
                )
                for index, (label, by) in enumerate(values.items())
            ]
            if series:
                charts.append(Lines({"steps": say("axis_steps")}, say(f"axis_{which}"), series, method, can_log=False))
        return _panels(name, which, charts, say)

    return make


def _confusion(
    name: str, analysis: Analysis, setup: Setup, cells: Cells, running: list[Run], styles: Styles, say: Words
) -> Figure | None:
    charts = []
    for method, (_, runs) in cells.items():
        tables = [table for run in runs if (table := confusion_of(run))]
        if not tables or len({len(table) for table in tables}) != 1:
            continue
        total = [[sum(table[i][j] for table in tables) for j in range(len(tables[0]))] for i in range(len(tables[0]))]
        named = runs[0].result.get("labels") or []
        labels = [str(label) for label in (named if len(named) == len(total) else range(len(total)))]
        values: list[list[float | None]] = [[n / sum(row) if sum(row) else None for n in row] for row in total]
        texts = [["–" if value is None else f"{100 * value:.1f}" for value in row] for row in values]
        charts.append(Grid(labels, labels, values, texts, method, say("axis_answer"), say("axis_truth")))
    return _panels(name, "confusion", charts, say)


def _panels(name: str, which: str, charts: Sequence[Chart], say: Words) -> Figure | None:
    """One panel for each method, of many the first ones."""
    if not charts:
        return None
    caption = say(f"cap_{which}")
    if len(charts) > _PANELS:
        caption = f"{caption} {say('cap_panels', shown=_PANELS, all=len(charts))}"
    return Figure(name, say(f"fig_{which}"), caption, list(charts[:_PANELS]))


def confusion_of(run: Run) -> list[list[int]] | None:
    """A classifier's confusion matrix of its last epoch, rows the truth; none where it is not square."""
    found = (run.result.get("last") or {}).get("confusion") or run.result.get("confusion")
    if not found or any(len(row) != len(found) for row in found):
        return None
    return [[int(cell) for cell in row] for row in found]


def _curve(
    name: str,
    style: int,
    runs: Sequence[Run],
    kind: str,
    key: str,
    factor: float = 1.0,
    faint: bool = False,
    marks: bool = True,
) -> Series | None:
    """The mean of a metric over seeds at the steps that all of them have, with the lowest and the highest."""
    tables = []
    for run in runs:
        table = {}
        for line in run.metrics:
            value = finite(line.get(key))
            if line["kind"] == kind and value is not None:
                table[int(line["step"])] = (
                    factor * value,
                    float((line.get("time") or {}).get("seconds") or 0.0),
                )
        tables.append(table)
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if len(steps) < 2:
        return None
    steps = thinned(steps)
    values = [[table[step][0] for table in tables] for step in steps]
    clock = [fmean(table[step][1] for table in tables) for step in steps]
    x = {"steps": [float(step) for step in steps]} | ({"seconds": clock} if any(clock) else {})
    several = len(tables) > 1
    return Series(
        name,
        style,
        x,
        [fmean(at) for at in values],
        [min(at) for at in values] if several else None,
        [max(at) for at in values] if several else None,
        marks=marks and len(steps) <= 40,
        faint=faint,
    )


def thinned(values: list[T], most: int = _POINTS) -> list[T]:
    """Evenly spaced ones of many values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
