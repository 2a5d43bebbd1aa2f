"""Rich tables as plain text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table


def plain_text(table: Table, width: int = 118) -> str:
    """Return a rich table as text without colours, at most `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")
