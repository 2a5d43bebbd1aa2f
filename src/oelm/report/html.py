"""Write a document as one HTML file that opens from disk: styles, script and figures are in it, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined

from .charts import colour_of
from .document import Block, Cell, Document, Heading, spans, unbroken
from .drawing import is_wide
from .svg import themed
from .words import words


@dataclass(frozen=True)
class _Section:
    """A heading of the second level and the blocks up to the next one; the heading itself is the first of them."""

    heading: Heading | None
    blocks: list[Block]


def to_html(document: Document, drawings: Mapping[str, str], refresh: int | None = None) -> str:
    """Return the report as a page. `drawings` are SVG texts by figure name; the page reloads after `refresh` seconds.

    Whatever a record contains is escaped by the template, which has autoescape on.
    """
    page = _environment().get_template("page.html.j2")
    html = page.render(
        document=document,
        sections=_sections(document),
        drawings={name: themed(svg) for name, svg in drawings.items()},
        language={"en": "en", "zh": "zh-CN"}[document.language],
        say=words(document.language),
        refresh=refresh,
        css=_read("page.css"),
        script=_read("page.js"),
    )
    return unbroken(html)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["link"] = quote
    environment.globals |= {"spans": spans, "cell_class": _cell_class, "kind_of": lambda block: type(block).__name__}
    environment.globals |= {"is_wide": is_wide, "colour_of": colour_of}
    return environment


def _sections(document: Document) -> list[_Section]:
    sections: list[_Section] = []
    for block in document.blocks:
        starts = isinstance(block, Heading) and block.level == 2
        if starts or not sections:
            sections.append(_Section(block if isinstance(block, Heading) and starts else None, []))
        sections[-1].blocks.append(block)
    return sections


def _cell_class(cell: Cell, numeric: bool) -> str | None:
    """Return the CSS class of a table's cell: numbers are aligned right, short names never broken."""
    if numeric:
        return "number" if len(cell.text) <= 11 else "number loose"
    if cell.code and len(cell.text) <= 20:
        return "short"
    if cell.folder is None and not cell.code and len(cell.text) <= 36:
        return None
    return "long" if len(cell.text) > 110 and not cell.code else "wide"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
