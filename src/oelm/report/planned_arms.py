"""The arms that a plan shows beside their references: a table and a forest plot for each group, without verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ..analysis import Analysis, Run
from ..analysis.confirm import NARROW, Confirmed, Shown, ShownArms, Tested
from ..analysis.planned import ArmRuns
from ..analysis.stats import Estimate, estimate
from . import numbers
from .charts import ChartFigure, IntervalRow, Intervals, Styles
from .document import Block, Cell, Heading, Table
from .forest import percent_row
from .sections import handles
from .words import Words


def shown_blocks(confirmed: Confirmed, analysis: Analysis, styles: Styles, say: Words) -> list[Block]:
    """Return a forest plot of all groups and a table of each; nothing for a plan that shows no arms."""
    figure = forest_figure(confirmed, styles, say)
    blocks: list[Block] = [] if figure is None else [figure]
    for number, shown in enumerate(confirmed.shown, start=1):
        blocks += [
            Heading(shown.group.title, 3, f"plan-shown-{number}"),
            arms_table(shown, confirmed, analysis, f"plan-shown-{number}", say),
        ]
    return blocks


def arms_table(shown: ShownArms, confirmed: Confirmed, analysis: Analysis, name: str, say: Words) -> Table:
    """Return the arms of a group with their perplexities and changes, the reference first and then the best."""
    confirmation = confirmed.planned.study.confirmation
    levels = [f"{100 * level:g}" for level in (1 - confirmation.alpha, NARROW)]
    columns = [*say.all("col_method", f"m_{confirmation.measure}", "col_change")]
    columns += [*(say("col_level", level=level) for level in levels), *say.all("col_texts", "m_trainable", "col_runs")]
    table = Table(name, columns, numeric=(1, 2, 3, 4, 5, 6), caption=say("shown_reading"))
    reference = shown.group.reference[shown.group.reference_arm]
    own = tuple(shown.reference.runs.values())
    numbered = set(analysis.runs)
    table.add(Cell(reference), _mean(own, confirmation.measure), *["–"] * 4, *_figures(own, numbered, analysis))
    for arm in _ordered(shown.arms):
        change = arm.change
        texts = arm.over_texts
        wide = None if change is None or change.low is None or change.high is None else (change.low, change.high)
        table.add(
            Cell(arm.name),
            _mean(tuple(arm.arm.runs.values()), confirmation.measure),
            "–" if change is None else numbers.percent(change.mean, 2),
            *(percent_range(bounds) for bounds in (wide, arm.narrow, texts)),
            *_figures(tuple(arm.arm.runs.values()), numbered, analysis),
        )
    return table


def forest_figure(confirmed: Confirmed, styles: Styles, say: Words) -> ChartFigure | None:
    """Return the changes of all groups, a panel each; the last panel has the hypotheses against other arms.

    The first row of a group is its reference: the dots are its own seeds, about their mean.
    """
    measure = confirmed.planned.study.confirmation.measure
    charts = []
    for shown in confirmed.shown:
        margins = _margins(confirmed.tested, shown)
        rows = [
            _row(arm.name, styles[arm.name], arm.change, _ratios(arm, measure), margins.get(arm.arm.arm))
            for arm in _ordered(shown.arms)
            if arm.change is not None
        ]
        own = _about_mean(shown.reference, measure)
        if rows and own:
            name = shown.group.reference[shown.group.reference_arm]
            strip = IntervalRow(label=name, style=styles["baseline"], value=0.0, dots=own)
            axis = say("axis_shown", measure=say(f"m_{measure}"))
            charts.append(Intervals(x_label=axis, rows=[strip, *rows], line=0.0, title=shown.group.title))
    against = [tested for tested in confirmed.tested if not _is_shown(tested, confirmed) and tested.change is not None]
    if charts and against:
        names = {arm: name for shown in confirmed.shown for arm, name in shown.group.names.items()}
        rows = [_against(tested, names, styles, say) for tested in against]
        charts.append(Intervals(x_label=charts[0].x_label, rows=rows, line=0.0, title=say("shown_against")))
    if not charts:
        return None
    return ChartFigure("plan-forest", say("fig_forest"), say("cap_forest"), [*charts])


def percent_range(bounds: tuple[float, float] | None) -> str:
    """Return an interval in percent, a dash where there is none."""
    return "–" if bounds is None else f"{numbers.percent(bounds[0], 2)} – {numbers.percent(bounds[1], 2)}"


def _ordered(arms: Sequence[Shown]) -> list[Shown]:
    """Return the arms with the best first; those that are not run yet come last, as the plan has them."""
    return sorted(arms, key=lambda arm: math.inf if arm.change is None else arm.change.mean)


def _mean(runs: Sequence[Run], measure: str) -> str:
    """Return the geometric mean of a perplexity, with its interval."""
    logs = [math.log(value) for run in runs if (value := run.figure(measure)) is not None]
    if not logs:
        return "–"
    mean = estimate(logs, scale=1.0).exp()
    half = "" if mean.low is None or mean.high is None else f" ± {(mean.high - mean.low) / 2:.2f}"
    return f"{numbers.figure(measure, mean.mean)}{half}"


def _figures(runs: Sequence[Run], numbered: set[Run], analysis: Analysis) -> tuple[str, Cell]:
    trainable = runs[0].figure("trainable") if runs else None
    shown = "–" if trainable is None else numbers.figure("trainable", trainable)
    return shown, Cell("", handles(analysis, tuple(run for run in runs if run in numbered)))


def _margins(tested: Sequence[Tested], shown: ShownArms) -> dict[str, float]:
    """Return the margins of the hypotheses about a group's arms against its reference."""
    return {
        item.hypothesis.arm: item.hypothesis.margin
        for item in tested
        if item.hypothesis.against == shown.group.reference_arm
    }


def _is_shown(tested: Tested, confirmed: Confirmed) -> bool:
    """Return True when a hypothesis is about an arm of a group against the group's reference."""
    return any(
        tested.hypothesis.against == shown.group.reference_arm and tested.hypothesis.arm in shown.group.arms
        for shown in confirmed.shown
    )


def _row(label: str, style: int, change: Estimate, dots: list[float], margin: float | None) -> IntervalRow:
    row = percent_row(label, style, change, dots if len(dots) > 1 else [])
    return replace(row, reach=(min(0.0, 100 * margin), max(0.0, 100 * margin)) if margin else None)


def _against(tested: Tested, names: dict[str, str], styles: Styles, say: Words) -> IntervalRow:
    arm, other = (names.get(name, name) for name in (tested.hypothesis.arm, tested.hypothesis.against))
    label = say("shown_pair", arm=arm, against=other)
    assert tested.change is not None, "only hypotheses with an estimate are drawn"
    return _row(label, styles[arm], tested.change, [], tested.hypothesis.margin)


def _ratios(arm: Shown, measure: str) -> list[float]:
    """Return the change of every pair in percent."""
    values = [(run.figure(measure), reference.figure(measure)) for run, reference in _pairs(arm)]
    return [100 * (one / other - 1) for one, other in values if one is not None and other]


def _pairs(arm: Shown) -> list[tuple[Run, Run]]:
    return list(zip(arm.pairs.runs, arm.pairs.references, strict=True))


def _about_mean(reference: ArmRuns, measure: str) -> list[float]:
    """Return how far every seed of a reference is from their mean, in percent."""
    logs = [math.log(value) for run in reference.runs.values() if (value := run.figure(measure)) is not None]
    return [100 * math.expm1(value - fmean(logs)) for value in logs]
