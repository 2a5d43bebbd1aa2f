"""The first screen of a report: what was found in a sentence, a forest plot, and a table with the best in bold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..analysis import Analysis
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.compare import Comparison
from ..analysis.stats import ALPHA
from . import numbers
from .charts import Styles
from .document import Block, Cell, Heading, Paragraph, Table
from .forest import change_figures
from .sentences import count_text, opening, setup_label, setup_name, short_conclusion
from .words import Words

Outcome = Literal["better", "worse", "alike", "undecided", "open"]
OUTCOMES: tuple[Outcome, ...] = ("better", "worse", "alike", "undecided", "open")
# The most methods that a sentence names for one outcome, and the most setups that have a table on the first screen.
_NAMED, _SETUPS = 3, 6


def overview(analysis: Analysis, styles: Styles, say: Words) -> list[Block]:
    """Return the first section: a sentence, what to know about the runs, a figure, and a table for each setup."""
    blocks: list[Block] = [Heading(say("summary"), 2, "summary")]
    blocks += [Paragraph(text, tone="lead") for text in findings(analysis, say)]
    blocks.append(Paragraph(say.in_a_row(opening(analysis, say)), tone="muted"))
    blocks += change_figures(analysis, styles, say)
    setups = [setup for group in analysis.groups for setup in group.setups]
    for number, setup in enumerate(setups if len(setups) <= _SETUPS else (), start=1):
        if len(setups) > 1:
            blocks.append(Heading(setup_name(setup, say), 3, f"summary-{number}"))
        blocks.append(_table(analysis, setup, number, styles, say))
    return blocks


def findings(analysis: Analysis, say: Words) -> list[str]:
    """Return what the runs show: a sentence for each measure and reference, or for each setup that compares nothing."""
    by_subject: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in analysis.comparisons:
        by_subject.setdefault((comparison.measure.name, comparison.reference), []).append(comparison)
    if by_subject:
        return [_finding(comparisons, say) for comparisons in by_subject.values()]
    setups = [setup for group in analysis.groups for setup in group.setups]
    return [_without_comparison(setup, analysis, say) for setup in setups] or [say("found_nothing")]


def outcome(comparison: Comparison) -> Outcome:
    """Return what a comparison shows; "open" when nothing could be tested."""
    if comparison.adjusted is None or comparison.no_spread or not comparison.sound:
        return "open"
    if comparison.conclusive:
        return "better" if comparison.winner == comparison.arm else "worse"
    return "alike" if comparison.alike is not None and comparison.alike < ALPHA else "undecided"


def _finding(comparisons: Sequence[Comparison], say: Words) -> str:
    """Return what comparisons of one measure with one reference show; those without an outcome are only counted."""
    first, parts = comparisons[0], []
    values = {"reference": first.reference, "measure": say(f"m_{first.measure.name}")}
    by_outcome = {kind: [item for item in comparisons if outcome(item) == kind] for kind in OUTCOMES}
    if len(by_outcome["open"]) == len(comparisons):
        ordered = [numbers.change(item, say) for item in sorted(comparisons, key=numbers.size) if item.pairs]
        change = numbers.span(ordered[0], ordered[-1], say) if ordered else "–"
        methods = count_text("method", len({item.arm for item in comparisons}), say)
        one_seed = all(item.sound and item.n == 1 for item in comparisons if item.pairs)
        key = "found_only_one_seed" if ordered and one_seed else "found_only_open"
        return say(key, change=change, methods=methods, **values)
    several = len({id(item.setup) for item in comparisons}) > 1
    for kind, selected in by_outcome.items():
        if selected and several and kind in ("undecided", "open"):
            where = say("found_among", count=len(selected), total=len(comparisons))
            parts.append(say(f"found_{kind}", where=where))
        elif selected:
            arms = _arms(selected, comparisons if several else (), kind in ("better", "worse"), say)
            parts.append(say(f"found_{kind}", where=say("found_with", arms=arms)))
    return say("found", parts=say("and_then").join(parts), **values)


def _arms(selected: Sequence[Comparison], compared: Sequence[Comparison], extremes: bool, say: Words) -> str:
    """Return the arms of some comparisons with their changes: all by name, or their number and the extremes.

    `compared` are the comparisons of all arms where they are of several setups, and empty for a single setup.
    """
    by_arm: dict[str, list[Comparison]] = {}
    for comparison in sorted(selected, key=lambda comparison: abs(numbers.size(comparison))):
        by_arm.setdefault(comparison.arm, []).append(comparison)
    named = []
    for arm, own in by_arm.items():
        change = numbers.span(numbers.change(own[0], say), numbers.change(own[-1], say), say)
        total = sum(comparison.arm == arm for comparison in compared)
        if total > 1:
            change = say("found_in", count=len(own), total=total, change=change)
        named.append(say("in_brackets", text=arm, more=change))
    if len(named) <= _NAMED:
        return say("list").join(named)
    count = count_text("method", len(named), say)
    return say("found_from", count=count, first=named[0], last=named[-1]) if extremes else count


def _without_comparison(setup: Setup, analysis: Analysis, say: Words) -> str:
    """Return the best figure of a setup in which nothing can be compared."""
    name, means = setup.measure.name, _means(analysis, setup)
    if not means:
        return say("found_nothing")
    best = _best(setup, means)
    values = {"arm": best, "measure": say(f"m_{name}"), "value": numbers.figure(name, means[best])}
    text = say("found_alone", **values)
    if len(means) > 1:
        text = say("found_best", methods=count_text("method", len(means), say), **values)
    where = setup_label(setup, analysis, say)
    return say("sentence_on", dataset=where, sentence=text) if where else text


def _means(analysis: Analysis, setup: Setup) -> dict[str, float]:
    """Return the mean of the setup's measure for each arm that has one, at the learning rate that it is shown at."""
    means = {arm.method: mean_of(cell_to_show(analysis, setup, arm)[1], setup.measure) for arm in setup.arms}
    return {method: mean.mean for method, mean in means.items() if mean is not None}


def has_unequal_seeds(analysis: Analysis, setup: Setup) -> bool:
    """Return True if the means of a setup's arms are over different seeds: then a change need not follow from them."""
    shown = [cell_to_show(analysis, setup, arm)[1] for arm in setup.arms]
    return len({frozenset(run.seed for run in runs) for runs in shown}) > 1


def table_notes(analysis: Analysis, setup: Setup, say: Words) -> list[str]:
    """Return what a reader must know below a table of means, changes, intervals and verdicts."""
    comparisons = analysis.of(setup)
    tested = [comparison for comparison in comparisons if comparison.adjusted is not None]
    # These look as if their verdict were wrong: each for itself would be a significant change.
    corrected = [item for item in tested if outcome(item) == "undecided" and item.p is not None and item.p < ALPHA]
    notes = [say("unequal_seeds")] if comparisons and has_unequal_seeds(analysis, setup) else []
    return [*notes, say("corrected_verdicts", count=len(tested))] if corrected else notes


def _best(setup: Setup, means: dict[str, float]) -> str:
    return (min if setup.measure.lower_is_better else max)(means, key=lambda method: means[method])


def _table(analysis: Analysis, setup: Setup, number: int, styles: Styles, say: Words) -> Table:
    """Return the four columns that matter most, in the order of the forest plot; the best method is in bold."""
    name, means = setup.measure.name, _means(analysis, setup)
    comparisons = {comparison.arm: comparison for comparison in analysis.of(setup)}
    columns = ["col_method", f"m_{name}", "col_change_interval", "col_reading"]
    if not comparisons:
        columns[2:] = ["col_interval", "col_seeds"]
    caption = say.in_a_row(table_notes(analysis, setup, say))
    numeric = (1,) if comparisons else (1, 2, 3)
    table = Table(f"{number}-summary", say.all(*columns), numeric=numeric, caption=caption)
    best = _best(setup, means) if len(means) > 1 else None
    sizes = {method: numbers.size(comparison) for method, comparison in comparisons.items()}
    direction = 1 if setup.measure.lower_is_better else -1
    rank = {method: direction * (sizes.get(method, 0.0) if comparisons else means[method]) for method in means}
    for method in sorted(means, key=lambda method: rank[method]):
        strong, comparison = method == best, comparisons.get(method)
        value = numbers.figure(name, means[method])
        first = Cell(method, code=True, strong=strong, style=styles[method]), Cell(value, strong=strong)
        if comparison is not None:
            word, tone = short_conclusion(comparison, say)
            table.add(*first, Cell(numbers.change_in_full(comparison, say), strong=strong), Cell(word, tone=tone))
        elif comparisons:
            table.add(*first, "–", say("reference"))
        else:
            arm = setup.arm(method)
            assert arm is not None, "the means are of the setup's arms"
            runs = cell_to_show(analysis, setup, arm)[1]
            table.add(*first, numbers.bounds(name, mean_of(runs, name), say), str(len(runs)))
    return table
