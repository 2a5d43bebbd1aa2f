"""Write a document as Markdown for GitHub and similar sites, with links to the figures and the folders of the runs."""

from __future__ import annotations

import re
from urllib.parse import quote

from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table, spans
from .words import words

_TONES = {"good": "✅ ", "bad": "❌ ", "open": "❔ "}


def to_markdown(document: Document) -> str:
    """Return the document as Markdown. Its figures are linked from the folder `figures` beside it."""
    say = words(document.language)
    parts = [f"# {escape(document.title)}"]
    sections = [block for block in document.headings if block.level == 2]
    links = [f"[{escape(section.text)}](#{section.anchor})" for section in sections]
    parts += [f"{say('contents')}: {' · '.join(links)}"] if links else []
    parts += [block_text(block) for block in document.blocks]
    parts.append(f"---\n\n{escape(document.footer)}")
    if document.folders:  # the targets of the links [R1], [R2], ... above
        parts.append("\n".join(f"[{handle}]: {_target(folder)}" for handle, folder in document.folders.items()))
    return "\n\n".join(parts) + "\n"


def block_text(block: Block) -> str:
    """Return one block of a document as Markdown."""
    if isinstance(block, Heading):
        return f'<a id="{block.anchor}"></a>\n\n{"#" * block.level} {escape(block.text)}'
    if isinstance(block, Paragraph):
        mark = {"lead": "**", "muted": "*"}.get(block.tone, "")
        return f"{mark}{escape(block.text)}{mark}"
    if isinstance(block, Bullets):
        return "\n".join(f"- {_cell(item, False)}" for item in block.items)
    if isinstance(block, Table):
        return _table(block)
    return f"![{escape(block.title)}](figures/{block.name}.svg)\n\n*{escape(block.title)}. {escape(block.caption)}*"


def _table(table: Table) -> str:
    lines = ["| " + " | ".join(escape(title) for title in table.columns) + " |"]
    marks = ("--:" if index in table.numeric else "---" for index in range(len(table.columns)))
    lines.append(f"|{'|'.join(marks)}|")
    lines += ["| " + " | ".join(_cell(cell, True) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines) + (f"\n\n{escape(table.caption)}" if table.caption else "")


def _cell(cell: Cell, in_table: bool) -> str:
    text = cell.text
    if cell.code:
        text = f"`{text.replace('`', '')}`".replace("|", "\\|")
    elif cell.folder is not None:
        text = f"[{escape(text)}]({_target(cell.folder)})"
    else:
        text = escape(text)
    if in_table and cell.text == "":
        text = ""
    runs = " ".join("–".join(f"[{handle}]" for handle in span) for span in spans(cell.runs))
    content = f"{text} {runs}".strip() if in_table else f"{text} {f'({runs})' if runs else ''}".strip()
    return _TONES.get(cell.tone, "") + (f"**{content}**" if cell.strong else content)


def _target(folder: str) -> str:
    """Return the target of a link, with the characters quoted that would end the link or the table's cell.

    What follows such a character in a folder's name would be read as HTML.
    """
    return "<" + re.sub(r"[%\\<>|\r\n]", lambda match: quote(match[0]), folder) + ">"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is: the name of a run may contain anything."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
