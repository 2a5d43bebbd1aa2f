"""What a matrix, the demo and a report end with: a table of its methods, each compared with the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len

from ..analysis import Analysis, analyse
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Arm, Setup
from ..analysis.compare import Comparison
from ..base.text import WIDTH, plain_table, plain_text
from ..report import numbers
from ..report.overview import findings, table_notes
from ..report.plan import missing_lines, plan_lines
from ..report.sentences import opening, setup_label, short_conclusion, verdict_lines
from ..report.words import Words, words
from .terminal import count_of, fold, folded

# The longest name of a preset; longer names, of presets that were changed, are folded where a terminal has no room.
_METHOD_WIDTH = 22


def analyse_finished(folders: Sequence[Path]) -> Analysis | None:
    """Analyse those of these run folders that hold a result; return None where none does."""
    finished = [folder for folder in folders if (folder / "result.json").is_file()]
    return analyse(finished) if finished else None


def outcome_lines(analysis: Analysis) -> list[str]:
    """Return a table for each setup, and below them how many runs are in none of them."""
    lines = _tables(analysis, words("en"))
    if analysis.left_out:
        lines.append(f"{count_of(len(analysis.left_out))} left out; `oelm report` says why")
    return lines


def summary_lines(analysis: Analysis, language: str = "en") -> list[str]:
    """Return what `oelm report` prints: what was found, a table for each setup, and the verdicts on hypotheses."""
    say = words(language)
    lines = []
    if analysis.confirmed is not None:
        lines += [line for text in plan_lines(analysis.confirmed, say) for line in folded(text)]
        lines += missing_lines(analysis.confirmed, say)  # a command stays in one line, to be copied
        lines += ["", say("heading_of", head=say("descriptive"))]
    lines += [line for text in findings(analysis, say) for line in folded(text)]
    lines += [*folded(say.in_a_row(opening(analysis, say))), "", *_tables(analysis, say)]
    for text in verdict_lines(analysis, say)[1:]:
        bullet = "- " if text.startswith("- ") else ""
        first, *more = folded(text.removeprefix(bullet), len(bullet))
        lines += [bullet + first, *(" " * len(bullet) + line for line in more)]
    return lines


def _tables(analysis: Analysis, say: Words) -> list[str]:
    return [line for group in analysis.groups for setup in group.setups for line in _setup_lines(setup, analysis, say)]


def _setup_lines(setup: Setup, analysis: Analysis, say: Words) -> list[str]:
    comparisons = {comparison.arm: comparison for comparison in analysis.of(setup)}
    shown = [(arm, *cell_to_show(analysis, setup, arm)) for arm in setup.arms]
    means = {arm.method: mean_of(runs, setup.measure) for arm, _, runs in shown}

    def worse_last(entry: tuple[Arm, float, tuple[object, ...]]) -> float:
        mean = means[entry[0].method]
        return float("inf") if mean is None else mean.mean if setup.measure.lower_is_better else -mean.mean

    several_rates = len({rate for _, rate, _ in shown}) > 1
    reference = next((comparison.reference for comparison in comparisons.values()), None)
    rows = []
    for arm, rate, runs in sorted(shown, key=worse_last):
        mean = means[arm.method]
        cells = [arm.method, *([numbers.rate(rate)] if several_rates else [])]
        cells.append("–" if mean is None else numbers.figure(setup.measure.name, mean.mean))
        cells += _against(comparisons.get(arm.method), say) if reference else [str(len(runs))]
        rows.append(cells)
    rate_title = [say("col_rate_short")] if several_rates else []
    against = [f"{say('col_against')}\n{reference}", say("col_interval")] if reference else []
    numeric = [say(f"m_{setup.measure.name}"), *against]
    last = say("col_reading") if reference else say("col_seeds")
    table = plain_table()
    room = _room_beside([*rate_title, *numeric, last], [cells[1:] for cells in rows])
    table.add_column(say("col_method"), max_width=max(_METHOD_WIDTH, room), overflow="fold")
    for name in rate_title:
        table.add_column(name, no_wrap=True)
    for name in numeric:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    note = [line for text in table_notes(analysis, setup, say) for line in fold(text, WIDTH)]
    label = setup_label(setup, analysis, say)
    return [*(fold(label, WIDTH) if label else []), *plain_text(table).splitlines(), *note, ""]


def _room_beside(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width that a terminal has left for the first column, beside the others with their gaps."""
    columns = [[line for cell in column for line in cell.split("\n")] for column in zip(titles, *rows, strict=True)]
    return WIDTH - 1 - sum(2 + max(map(cell_len, lines)) for lines in columns)


def _against(comparison: Comparison | None, say: Words) -> list[str]:
    """Return the cells of a comparison: the change, its interval and the conclusion; the reference itself has none."""
    if comparison is None:
        return ["", "", ""]
    # Why a single pair has no interval is what the verdict says.
    interval = numbers.change_range(comparison, say).replace(" % – ", " – ") if comparison.n > 1 else "–"
    return [numbers.change(comparison, say), interval, short_conclusion(comparison, say)[0]]
