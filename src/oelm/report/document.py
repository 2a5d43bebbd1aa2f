"""A report before it has a form: headings, paragraphs, tables and figures, which every form then writes its own way."""

from __future__ import annotations

from dataclasses import dataclass, field

from .charts import ChartFigure


@dataclass(frozen=True)
class Cell:
    """A piece of text with what belongs to it: runs it comes from, a folder it links to, a tone, a word before it."""

    text: str
    runs: tuple[str, ...] = ()
    folder: str | None = None
    tone: str = ""
    anchor: str | None = None
    code: bool = False
    badge: str = ""


def spans(handles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Runs' handles in order, three neighbours or more together: (R3, R6) stands for R3 to R6."""
    numbers = sorted({int(handle[1:]) for handle in handles})
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    found: list[tuple[str, ...]] = []
    for group in groups:
        if len(group) > 2:
            found.append((f"R{group[0]}", f"R{group[-1]}"))
        else:
            found += [(f"R{number}",) for number in group]
    return found


@dataclass(frozen=True)
class Heading:
    text: str
    level: int
    anchor: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets:
    items: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table with a short name for its files. `numeric` are the columns that stand to the right."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]
    numeric: tuple[int, ...] = ()
    caption: str = ""


Block = Heading | Paragraph | Bullets | Table | ChartFigure


@dataclass(frozen=True)
class Document:
    """A whole report. `folders` are the run folders by handle, for links."""

    title: str
    language: str
    blocks: list[Block]
    footer: str
    folders: dict[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> list[ChartFigure]:
        return [block for block in self.blocks if isinstance(block, ChartFigure)]

    @property
    def tables(self) -> list[Table]:
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def headings(self) -> list[Heading]:
        return [block for block in self.blocks if isinstance(block, Heading)]
