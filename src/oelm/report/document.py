"""A report as a list of headings, paragraphs, tables and figures, from which Markdown, HTML and PDF are written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .charts import ChartFigure

# Where a figure is not broken: before a per cent sign or seconds, before the dash of an interval, after a p.
_TIGHT = re.compile(r"(?<=\d) (?=%|m?s\b)|(?<=[\d%]) (?=– [−+]?\d)|(?<=\bp) (?=\d)")


@dataclass(frozen=True)
class Cell:
    """A piece of text, in a table or alone, with what is shown along with it.

    `runs` are the handles of the runs that it comes from, `folder` is what it links to, `anchor` what others link to.
    `tone` is good, bad, open or empty and sets the colour. `style` is the number of the method that it names, whose
    colour in the figures is shown beside it.
    """

    text: str
    runs: tuple[str, ...] = ()
    folder: str | None = None
    tone: str = ""
    anchor: str | None = None
    code: bool = False
    strong: bool = False
    style: int | None = None


def spans(handles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return handles in order, with three neighbours or more as their first and last: (R3, R6) stands for R3 to R6."""
    numbers = sorted({int(handle[1:]) for handle in handles})
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    merged: list[tuple[str, ...]] = []
    for group in groups:
        if len(group) > 2:
            merged.append((f"R{group[0]}", f"R{group[-1]}"))
        else:
            merged += [(f"R{number}",) for number in group]
    return merged


def unbroken(text: str) -> str:
    """Return a text whose figures stay in one line with their per cent sign, and with what else belongs to them."""
    return _TIGHT.sub("\u00a0", text)


@dataclass(frozen=True)
class Heading:
    """A heading; `anchor` is what links lead to."""

    text: str
    level: int
    anchor: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; the tone "lead" is for the main finding, "muted" for remarks."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of points."""

    items: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table; `name` is the name of its files, `numeric` are the indices of the columns that are aligned right."""

    name: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    numeric: tuple[int, ...] = ()
    caption: str = ""

    def add(self, *cells: Cell | str) -> None:
        """Add a row; a text becomes a plain cell."""
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])


Block = Heading | Paragraph | Bullets | Table | ChartFigure


@dataclass(frozen=True)
class Document:
    """A whole report. `folders` maps the handles of runs to their folders, for links."""

    title: str
    language: str
    blocks: list[Block]
    footer: str
    folders: dict[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> list[ChartFigure]:
        """Return the figures, in order."""
        return [block for block in self.blocks if isinstance(block, ChartFigure)]

    @property
    def tables(self) -> list[Table]:
        """Return the tables, in order."""
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def headings(self) -> list[Heading]:
        """Return the headings, in order."""
        return [block for block in self.blocks if isinstance(block, Heading)]
