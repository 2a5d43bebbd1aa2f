"""Text for people: tables without colours, and cells that a spreadsheet reads as they are."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# The width of a terminal that all tables should fit.
WIDTH = 80
# Characters that a formula of a spreadsheet needs to call or load anything.
_CALLS = frozenset("(|!=@")


def plain_table() -> Table:
    """Return an empty table with a line below its headings and no other lines, which leaves most room for its cells."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def plain_text(table: Table, title: str = "") -> str:
    """Return a table as text without colours below its title. It is as wide as its cells need: no number is cut."""
    from rich.console import Console
    from rich.measure import Measurement

    # In a notebook rich would display the table on its own and return an empty text.
    console = Console(file=io.StringIO(), color_system=None, legacy_windows=False, force_jupyter=False)
    console.width = Measurement.get(console, console.options.update(width=10_000), table).maximum
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().strip("\n").splitlines()
    return "\n".join([*([title] if title else []), *(line.rstrip() for line in lines if line.strip())])


def short_count(count: float) -> str:
    """Return a large number in three digits and a unit: 950, 44.9 M, 1.2 G, 12 k."""
    rounded = float(f"{count:.3g}")
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if rounded >= size:
            return f"{rounded / size:,.10g}{unit}"
    return f"{rounded:g}"


def spreadsheet_safe(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula: text that would be one gets a quote in front.

    A sign begins a formula as well, but signed numbers such as +1.2 % cannot call anything and stay as they are.
    """
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(("=", "@", "\t", "\r")) or (value.startswith(("+", "-")) and _CALLS & set(value))
    return f"'{value}" if is_formula else value
