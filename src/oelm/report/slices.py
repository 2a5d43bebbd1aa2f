"""Where the loss of a method lies: tables of its difference to the reference in every slice of the text."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis import Analysis
from ..analysis.compare import Comparison
from ..analysis.slices import TEXTS, SliceGap, Text, slice_gaps
from . import numbers
from .document import Block, Cell, Heading, Paragraph, Table
from .sections import handles, runs_of
from .words import Words


def slice_blocks(analysis: Analysis, comparisons: Sequence[Comparison], number: int, say: Words) -> list[Block]:
    """Return the tables of a setup's comparisons by slice, for each text that runs have slices of."""
    tables = [_table(analysis, comparisons, number, text, say) for text in TEXTS]
    shown = [table for table in tables if table.rows]
    if not shown:
        return []
    return [Heading(say("slices"), 3, f"slices-{number}"), Paragraph(say("slices_about")), *shown]


def _table(analysis: Analysis, comparisons: Sequence[Comparison], number: int, text: Text, say: Words) -> Table:
    """Return a table with the slices of each comparison that is not confounded."""
    columns = ["col_method", "col_against", "col_slice", "col_share", "col_reference_loss", "col_difference"]
    columns += ["col_interval", "col_gap_share", "col_runs"]
    name, caption = f"{number}-slices-{text}", say(f"slices_{text}")
    table = Table(name, say.all(*columns), numeric=(3, 4, 5, 6, 7), caption=caption)
    for comparison in comparisons:
        if comparison.sound:
            for gap in slice_gaps(comparison, text):
                share, loss, difference, gap_share = slice_numbers(gap)
                table.add(
                    Cell(comparison.arm, code=True),
                    Cell(comparison.reference, code=True),
                    slice_name(gap, say),
                    share,
                    loss,
                    difference,
                    numbers.loss_range(gap.difference, say),
                    gap_share,
                    Cell("", handles(analysis, runs_of(comparison))),
                )
    return table


def slice_name(gap: SliceGap, say: Words) -> str:
    """Return what a slice has, in words."""
    if gap.part == "frequency":
        recall, frequency = gap.name.split()
        return say("headed", head=say(f"slice_{recall}"), text=say(f"slice_{frequency}"))
    if gap.part in ("repeat", "position"):
        return say(f"slice_{gap.part}", tokens=gap.name)
    return say(f"slice_{gap.name}")


def slice_numbers(gap: SliceGap) -> tuple[str, str, str, str]:
    """Return the share of the tokens, the reference's loss, the difference and its share of the whole difference."""
    of_gap = "–" if gap.gap_share is None else f"{numbers.signed(100 * gap.gap_share, 1).removeprefix('+')} %"
    return (
        f"{100 * gap.share:.1f} %",
        numbers.figure("val_loss", gap.reference_loss),
        numbers.signed(gap.difference.mean, 4),
        of_gap,
    )
