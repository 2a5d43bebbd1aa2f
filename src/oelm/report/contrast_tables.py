"""Tables of chosen runs against others: the difference of their loss in slices of the text, and of their measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..analysis import AnalysisError, Run
from ..analysis.arms import MEASURES
from ..analysis.compare import Comparison, of_pairs
from ..analysis.contrast import contrast
from ..analysis.slices import WHOLE, SliceGap, has_slices, slice_gaps
from . import numbers
from .contrasts import ChangesTable, Row, SlicesTable, Sources
from .document import Block, Cell, Paragraph, Table
from .slices import slice_name
from .words import Words


@dataclass
class RowNotes:
    """What a reader must know of a table's rows: which have one seed, and whose runs differ in more than the form."""

    rows: list[str] = field(default_factory=list)
    single: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)

    def add(self, label: str, seeds: int, fields: Iterable[str]) -> None:
        """Note a row with its number of seeds and the fields, beside the form, in which its runs differ."""
        self.rows.append(label)
        if seeds == 1:
            self.single.append(label)
        names = ", ".join(sorted(set(fields)))
        if names:
            self.differing.setdefault(names, []).append(label)

    def below(self, title: str, table: Table) -> list[Block]:
        """Return a table below its title, with these notes; a sentence where it has no rows."""
        blocks: list[Block] = [Paragraph(title, tone="lead")]
        if not table.rows:
            return [*blocks, Paragraph("There is no record of this yet.")]
        sentences = [f"One seed, so without an interval: {self._named(self.single)}."] if self.single else []
        for fields, labels in self.differing.items():
            sentences.append(f"The runs differ in more than the form ({fields}): {self._named(labels)}.")
        return [*blocks, table, *([Paragraph(" ".join(sentences), tone="muted")] if sentences else [])]

    def _named(self, labels: Sequence[str]) -> str:
        return "all rows" if len(labels) == len(self.rows) else "; ".join(dict.fromkeys(labels))


def slices_blocks(spec: SlicesTable, name: str, sources: Sources, say: Words) -> list[Block]:
    """Return a table of differences of the loss, with what each slice adds to the whole difference in brackets."""
    keys = (WHOLE, *spec.slices)
    what = f"slices of the {spec.text} text"
    found: list[tuple[Comparison, dict[str, SliceGap]]] = []
    for row in spec.rows:
        comparison = _compared(row, spec, what, sources, lambda run: has_slices(run, spec.text))
        if comparison is not None:
            gaps = {_key(gap): gap for gap in slice_gaps(comparison, spec.text)}
            unknown = [key for key in keys if key not in gaps]
            if unknown:
                problem = f"no slice {unknown[0]!r}; there are: {', '.join(gaps)}" if gaps else "it read other tokens"
                raise AnalysisError(f"{name}, {comparison.arm} against {comparison.reference}: {problem}")
            found.append((comparison, gaps))
    notes = RowNotes()
    if not found:
        return notes.below(spec.title, Table(name, []))
    columns = ["form", "against", *(slice_name(found[0][1][key], say) for key in keys), "seeds"]
    table = Table(name, columns, numeric=tuple(range(2, len(columns))))
    shares = {tuple(f"{100 * gaps[key].share:.1f} %" for key in keys) for _, gaps in found}
    if len(shares) > 1:
        raise AnalysisError(f"{name}: its rows are of different texts; give each text a table of its own")
    table.add(Cell("share of the tokens", strong=True), "", *shares.pop(), "")
    for comparison, gaps in found:
        cells = [_difference(gaps[key]) for key in keys]
        table.add(comparison.arm, comparison.reference, *cells, str(len(comparison.pairs)))
        notes.add(comparison.arm, len(comparison.pairs), (item.field for item in comparison.confounds))
    return notes.below(spec.title, table)


def _key(gap: SliceGap) -> str:
    return WHOLE if gap.part == WHOLE else f"{gap.part} {gap.name}"


def _difference(gap: SliceGap) -> str:
    estimate = gap.difference
    text = numbers.signed(estimate.mean, 3)
    if estimate.low is not None and estimate.high is not None:
        text += f" ± {(estimate.high - estimate.low) / 2:.3f}"
    if gap.part == WHOLE or gap.gap_share is None:
        return text
    return f"{text} ({numbers.signed(100 * gap.gap_share, 0).removeprefix('+')} %)"


def changes_blocks(spec: ChangesTable, name: str, sources: Sources, say: Words) -> list[Block]:
    """Return a table of the change of each measure with its interval."""
    columns = ["form", "against", "measure", "reference", "change", "interval", "seeds"]
    table, notes = Table(name, columns, numeric=(3, 4, 5, 6)), RowNotes()
    for row in spec.rows:
        comparison = _compared(row, spec, "figures", sources, lambda run: True)
        if comparison is None:
            continue
        own = of_pairs(comparison, MEASURES[row.measure or comparison.measure.name])
        if not own.n:
            raise AnalysisError(f"{name}, {own.arm} against {own.reference}: their runs have no {row.measure}")
        table.add(
            own.arm,
            own.reference,
            say(f"m_{own.measure.name}"),
            numbers.figure(own.measure.name, fmean(value for _, value in own.values)),
            numbers.change(own, say),
            numbers.change_range(own, say),
            str(own.n),
        )
        notes.add(comparison.arm, len(comparison.pairs), (item.field for item in comparison.confounds))
    return notes.below(spec.title, table)


def _compared(
    row: Row, spec: SlicesTable | ChangesTable, what: str, sources: Sources, suitable: Callable[[Run], bool]
) -> Comparison | None:
    """Return the comparison of a row; None where a side has no suitable runs, which sources then lists as missing."""
    against = row.against or spec.against
    if against is None:
        raise AnalysisError(f"row {row.arm!r}: with what? Give `against` to the row or to its table")
    arm, reference = (sources.runs(side, what, suitable) for side in (row.arm, against))
    if not arm.runs or not reference.runs:
        return None
    comparison = contrast(arm, reference)
    if comparison is None:
        sources.miss(sources.arm(row.arm), f"no seed in common with {reference.name}")
    return comparison
