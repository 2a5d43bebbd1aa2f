"""A document as one HTML file that opens from disk: its styles, its script and its data are in it, nothing else."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from urllib.parse import quote

from .charts import COLOURS, DASHES, MARKS, Chart, Figure, Grid, as_data
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table, spans
from .words import words

# Nothing may be fetched from anywhere, whatever a run's name contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_WORDS = ("steps_axis", "seconds_axis", "linear", "log")


def to_html(document: Document, refresh: int | None = None) -> str:
    """The report as a page; with `refresh`, it loads itself again after so many seconds."""
    say = words(document.language)
    charts: dict[str, Chart] = {}
    body = "".join(_sections(document, charts))
    sections = [block for block in document.headings if block.level == 2]
    links = "".join(f'<li><a href="#{one.anchor}">{escape(one.text)}</a></li>' for one in sections)
    data = {
        "words": {key: say(key) for key in _WORDS} | {"hint": say("reset_zoom")},
        "colours": len(COLOURS),
        "dashes": DASHES,
        "marks": MARKS,
        "charts": {key: as_data(chart) for key, chart in charts.items()},
    }
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    language = {"en": "en", "zh": "zh-CN"}[document.language]
    return f"""<!doctype html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
{again}<title>{escape(document.title)}</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<div class="frame">
<nav aria-label="{escape(say("contents"))}"><strong>{escape(say("contents"))}</strong><ul>{links}</ul></nav>
<main>
<header><div><h1>{escape(document.title)}</h1><p class="by">{escape(document.footer)}</p></div>
<button type="button" id="theme">{escape(say("theme"))}</button></header>
<noscript><p class="muted">{escape(say("no_script"))}</p></noscript>
{body}
</main>
</div>
<script type="application/json" id="charts">{_inert(data)}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _sections(document: Document, charts: dict[str, Chart]) -> list[str]:
    """The blocks, with a section around each heading of the second level and what follows it."""
    parts, open_section = [], False
    for block in document.blocks:
        if isinstance(block, Heading) and block.level == 2:
            parts.append(("</section>" if open_section else "") + "<section>")
            open_section = True
        parts.append(_block(block, charts))
    return [*parts, "</section>" if open_section else ""]


def _block(block: Block, charts: dict[str, Chart]) -> str:
    if isinstance(block, Heading):
        return f'<h{block.level} id="{escape(block.anchor)}">{escape(block.text)}</h{block.level}>\n'
    if isinstance(block, Paragraph):
        return f'<p class="{escape(block.tone)}">{escape(block.text)}</p>\n'
    if isinstance(block, Bullets):
        items = "".join(f'<li class="{item.tone}">{_inline(item)}</li>' for item in block.items)
        return f'<ul class="points">{items}</ul>\n'
    if isinstance(block, Table):
        return _table(block)
    return _figure(block, charts)


def _table(table: Table) -> str:
    def kind(index: int) -> str:
        return ' class="number"' if index in table.numeric else ""

    head = "".join(f'<th scope="col"{kind(index)}>{escape(title)}</th>' for index, title in enumerate(table.columns))
    rows = []
    for row in table.rows:
        cells = []
        for index, cell in enumerate(row):
            text = index not in table.numeric and len(cell.text) > 36 and cell.folder is None
            wide = f' class="{"long" if len(cell.text) > 110 else "wide"}"' if text else kind(index)
            cells.append(f"<td{wide}>{_inline(cell, in_table=True)}</td>")
        anchor = next((f' id="{escape(cell.anchor)}"' for cell in row if cell.anchor), "")
        rows.append(f"<tr{anchor}>{''.join(cells)}</tr>")
    caption = f'<p class="muted">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="data"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{caption}\n"
    )


def _inline(cell: Cell, in_table: bool = False) -> str:
    text = escape(cell.text)
    if cell.badge:
        text = f'<span class="chip {cell.tone}">{escape(cell.badge)}</span> {text}'
    if cell.code:
        text = f"<code>{text}</code>"
    if cell.folder is not None:
        text = f'<a href="{escape(quote(cell.folder))}">{text}</a>'
    if cell.tone and in_table:
        text = f'<span class="chip {cell.tone}">{text}</span>'
    if cell.runs:
        text += f'<span class="refs">{" ".join("–".join(map(_reference, span)) for span in spans(cell.runs))}</span>'
    return text


def _reference(handle: str) -> str:
    return f'<a href="#run-{escape(handle)}">{escape(handle)}</a>'


def _figure(figure: Figure, charts: dict[str, Chart]) -> str:
    panels = []
    for index, chart in enumerate(figure.charts):
        if isinstance(chart, Grid):
            panels.append(_grid(chart))
            continue
        key = f"{figure.name}-{index}"
        charts[key] = chart
        title = f'<p class="grid-title">{escape(chart.title)}</p>' if chart.title else ""
        panels.append(f'<div>{title}<div data-chart="{escape(key)}"></div></div>')
    kind = "grids" if isinstance(figure.charts[0], Grid) else "one" if len(panels) == 1 else ""
    return (
        f'<figure id="figure-{escape(figure.name)}"><h4>{escape(figure.title)}</h4>'
        f'<div class="panels {kind}">{"".join(panels)}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
    )


def _grid(chart: Grid) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for label in chart.columns)
    rows = []
    for label, values, texts in zip(chart.rows, chart.values, chart.texts, strict=True):
        cells = []
        for value, text in zip(values, texts, strict=True):
            dark = ' class="dark"' if (value or 0) > 0.5 else ""
            cells.append(f'<td{dark} style="--v:{value or 0:.3f}">{escape(text)}</td>')
        rows.append(f"<tr><th>{escape(label)}</th>{''.join(cells)}</tr>")
    corner = f"<th>{escape(chart.y_label)} \\ {escape(chart.x_label)}</th>"
    return (
        f'<div><p class="grid-title">{escape(chart.title)}</p>'
        f'<table class="shares"><thead><tr>{corner}{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _inert(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return (
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
