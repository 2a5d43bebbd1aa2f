"""Write a document as a PDF, typeset by the PyPI package typst. From the system only a Chinese font is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import TypeGuard

from matplotlib import get_data_path
from rich.cells import cell_len

from ..base.files import write_bytes
from .charts import COLOURS, ChartFigure, colour_of
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table, spans, unbroken
from .drawing import CJK_FONTS, FULL_WIDTH, height, is_wide, width

# Environment variable with a folder of fonts, for systems where none can be installed.
FONTS_VARIABLE = "OELM_FONTS"
_LATIN = "Libertinus Serif"
# The height in inches at which a figure still fits on a page together with its caption, and on the first page together
# with the title and the finding: without this, that page would be empty below them.
_HIGHEST, _HIGHEST_FIRST = 9.5, 6.6
# Columns with longer texts than this share the rest of the page's width; the others are as wide as they need.
_WIDE = 34


def available() -> bool:
    """Return True when typst is installed."""
    try:
        import_module("typst")
    except ImportError:
        return False
    return True


def cjk_font() -> str | None:
    """Return the name of a font with Chinese characters that typst can use, or None: then it would print boxes."""
    families = import_module("typst").Fonts(font_paths=_font_folders()).families()
    known = {family.lower(): family for family in families}
    return next((known[name.lower()] for name in CJK_FONTS if name.lower() in known), None)


def write_pdf(document: Document, path: Path) -> None:
    """Write the PDF. The SVG files of the figures must be in the folder `figures` beside it."""
    typst = import_module("typst")
    fonts = [_LATIN]
    if document.language == "zh":
        chinese = cjk_font()
        assert chinese is not None, "the caller checks this first"
        fonts.append(chinese)
    source = to_typst(document, fonts)
    write_bytes(path, typst.compile(source.encode(), root=str(path.parent.resolve()), font_paths=_font_folders()))


def _font_folders() -> list[str]:
    """Return the folders where typst looks for fonts besides the system's: the user's, and those of the figures."""
    folder = os.environ.get(FONTS_VARIABLE)
    of_figures = str(Path(get_data_path(), "fonts", "ttf"))
    return [folder, of_figures] if folder else [of_figures]


def to_typst(document: Document, fonts: list[str]) -> str:
    """Return the report in typst's language. What comes from a record becomes a string literal, never markup."""
    head = resources.files(__package__).joinpath("page.typ").read_text(encoding="utf-8")
    families = "".join(f"{_string(font)}, " for font in fonts)
    parts = [f"heading(level: 1, {_string(document.title)})", *_parts(document.blocks)]
    language = _string(document.language)
    body = "\n".join(parts)
    return (
        f"{head}\n#page-setup({_string(document.title)}, {_string(document.footer)}, ({families}), {language}, {{\n"
        f"{body}\n}})\n"
    )


def _parts(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the calls for some blocks: two narrow figures that follow each other are beside each other."""
    waiting = list(blocks)
    first = next((block for block in blocks if isinstance(block, ChartFigure)), None)
    while waiting:
        block = waiting.pop(0)
        after = waiting[0] if waiting else None
        if _is_narrow(block) and _is_narrow(after):
            del waiting[0]
            yield f"beside({_picture(block, 1.0)}, {_picture(after, 1.0)})"
        elif isinstance(block, ChartFigure):
            highest = _HIGHEST_FIRST if block is first else _HIGHEST
            share = width(block) / FULL_WIDTH * min(1.0, highest / height(block))
            yield _picture(block, share)
        else:
            yield _block(block)


def _is_narrow(block: Block | None) -> TypeGuard[ChartFigure]:
    return isinstance(block, ChartFigure) and not is_wide(block)


def _picture(figure: ChartFigure, share: float) -> str:
    """Return the call for a figure that takes this share of the width."""
    file = _string(f"/figures/{figure.name}.svg")
    return f"picture({file}, {round(100 * share)}%, {_string(figure.title)}, {_string(figure.caption)})"


def _block(block: Heading | Paragraph | Bullets | Table) -> str:
    if isinstance(block, Heading):
        return f"heading(level: {block.level}, {_string(block.text)})"
    if isinstance(block, Paragraph):
        function = {"lead": "lead", "muted": "aside"}.get(block.tone)
        return f"par({function}({_string(block.text)}))" if function else f"par({_string(block.text)})"
    if isinstance(block, Bullets):
        return "\n".join(f"point({_string(item.tone)}, {_cell(item)})" for item in block.items)
    return _table(block)


def _table(table: Table) -> str:
    columns_of_cells = zip(*table.rows, strict=True)
    needed = [max(map(_cell_size, cells)) for cells in columns_of_cells]
    total = sum(min(size, _WIDE) for size in needed)
    if total < 90:
        columns = ", ".join(f"{min(4, size / 30):.2f}fr" if size > _WIDE else "auto" for size in needed)
    else:
        # Every column gives way: short ones by little, long ones by more, and none below the words of its title.
        titles = [max(map(cell_len, title.split())) for title in table.columns]
        wanted = [min(size, 16) + 2 * max(0, size - 16) ** 0.5 for size in needed]
        weights = [max(title + 3, size) for title, size in zip(titles, wanted, strict=True)]
        # A short name at the start of a row cannot be broken, and would stand behind the chip beside it.
        columns = ", ".join(
            "auto" if index == 0 and needed[0] <= 14 else f"{weight:.1f}fr" for index, weight in enumerate(weights)
        )
    align = ", ".join("right" if index in table.numeric else "left" for index in range(len(table.columns)))
    letters = "8pt" if len(table.columns) <= 7 and total < 90 else "6.6pt"
    header = "".join(f"{_string(title)}, " for title in table.columns)
    cells = "".join(f"{_cell(cell, in_table=True)}, " for row in table.rows for cell in row)
    return f"grid-of(({columns},), ({align},), {letters}, ({header}), ({cells}), {_string(table.caption)})"


def _cell_size(cell: Cell) -> int:
    """Return how many letters wide a cell is in one line; a chip has an edge, and its letters are bold."""
    return max(cell_len(cell.text) + (6 if cell.tone else 0), 8 * len(spans(cell.runs)))


def _cell(cell: Cell, in_table: bool = False) -> str:
    parts = []
    if cell.style is not None:
        parts += [f'dot("{COLOURS[colour_of(cell.style)]}")', '" "']
    if cell.anchor is not None:
        parts.append(f"target({_string(cell.text)})")
    elif cell.code:
        parts.append(f"raw({_string(_breakable(cell.text))})")
    elif cell.tone and in_table:
        parts.append(f"chip({_string(cell.tone)}, {_string(cell.text)})")
    else:
        parts.append(_string(_breakable(cell.text) if cell.folder is not None else cell.text))
    if cell.strong:
        parts[-1] = f"strong({parts[-1]})"
    for span in spans(cell.runs):
        parts += ['" "', '; "–"; '.join(f"ref-to({_string(handle)})" for handle in span)]
    return "{ " + "; ".join(parts) + " }"


def _breakable(text: str) -> str:
    """Return a name or path that may be broken after a dash or a slash, when it is long."""
    return text.replace("/", "/\u200b").replace("-", "-\u200b") if len(text) > 14 else text


def _string(text: str) -> str:
    """Return the text as a string literal of typst, in one line."""
    escaped = unbroken(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", " ").replace("\r", " ").replace("\t", " ") + '"'
