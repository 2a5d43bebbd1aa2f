"""Show the lists of fields in docstrings as lists: a name, two spaces or more, what it is, continued below that."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^(\S(?:.*?\S)?) {2,}(\S.*)$")


class FieldLists(griffe.Extension):
    """Rewrite every docstring that has such a list."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """Return a docstring with its lists of fields as Markdown lists."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        entries = [_ENTRY.match(line) for line in lines]
        if entries and entries[0]:
            lines = [
                f"- **{entry[1]}**: {entry[2]}" if entry else f"  {line.strip()}"
                for entry, line in zip(entries, lines, strict=True)
            ]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
