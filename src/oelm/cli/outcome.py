"""What a matrix or the demo ends with: a table of its methods, each compared with the baseline."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..analysis import Analysis, analyse
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Arm, Setup
from ..analysis.compare import Comparison
from ..base.text import WIDTH, plain_table, plain_text
from ..report import numbers
from ..report.sentences import setup_label, short_conclusion
from ..report.words import Words, words
from .terminal import count_of

# The longest name of a preset; longer names, of presets that were changed, are folded.
_METHOD_WIDTH = 22


def analyse_finished(folders: Sequence[Path]) -> Analysis | None:
    """Analyse those of these run folders that hold a result; return None where none does."""
    finished = [folder for folder in folders if (folder / "result.json").is_file()]
    return analyse(finished) if finished else None


def outcome_lines(analysis: Analysis) -> list[str]:
    """Return a table for each setup, and below them how many runs are in none of them."""
    say = words("en")
    lines = [line for group in analysis.groups for setup in group.setups for line in _setup_lines(setup, analysis, say)]
    if analysis.left_out:
        lines.append(f"{count_of(len(analysis.left_out))} left out; `oelm report` says why")
    return lines


def _setup_lines(setup: Setup, analysis: Analysis, say: Words) -> list[str]:
    comparisons = {comparison.arm: comparison for comparison in analysis.of(setup)}
    shown = [(arm, *cell_to_show(analysis, setup, arm)) for arm in setup.arms]
    means = {arm.method: mean_of(runs, setup.measure) for arm, _, runs in shown}

    def worse_last(entry: tuple[Arm, float, tuple[object, ...]]) -> float:
        mean = means[entry[0].method]
        return float("inf") if mean is None else mean.mean if setup.measure.lower_is_better else -mean.mean

    several_rates = len({rate for _, rate, _ in shown}) > 1
    reference = next((comparison.reference for comparison in comparisons.values()), None)
    table = plain_table()
    table.add_column("method", max_width=_METHOD_WIDTH)
    if several_rates:
        table.add_column("rate", no_wrap=True)
    for name in (say(f"m_{setup.measure.name}"), *([f"against\n{reference}", "95 % interval"] if reference else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict" if reference else "", no_wrap=True)
    for arm, rate, runs in sorted(shown, key=worse_last):
        mean = means[arm.method]
        cells = [arm.method, *([numbers.rate(rate)] if several_rates else [])]
        cells.append("–" if mean is None else numbers.figure(setup.measure.name, mean.mean))
        cells += _against(comparisons.get(arm.method), say) if reference else [count_of(len(runs), "seed")]
        table.add_row(*cells)
    unequal = len({len(runs) for _, _, runs in shown}) > 1
    note = "A mean is over a method's own seeds, a change over those that the baseline has too." if unequal else ""
    lines = [*plain_text(table).splitlines(), *textwrap.wrap(note, WIDTH), ""]
    return [*textwrap.wrap(setup_label(setup, analysis, say), WIDTH), *lines]


def _against(comparison: Comparison | None, say: Words) -> list[str]:
    """Return the cells of a comparison: the change, its interval and the conclusion; the reference itself has none."""
    if comparison is None:
        return ["", "", ""]
    verdict, interval = short_conclusion(comparison, say)[0], numbers.change_range(comparison, say)
    if interval == verdict:  # why there is no interval is said once
        return [numbers.change(comparison, say), "–", verdict.partition(":")[0]]
    return [numbers.change(comparison, say), interval.replace(" % – ", " – "), verdict]
