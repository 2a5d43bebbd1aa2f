"""Text for people: tables without colours, and text that neither a spreadsheet nor a terminal takes for a command."""

from __future__ import annotations

import io
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# The width of a terminal that all tables should fit.
WIDTH = 80
# Characters that a formula of a spreadsheet needs to call or load anything.
_CALLS = frozenset("(|!=@")
# Characters without a control's category that reorder the text around them, so that it reads as what it is not, or that
# begin a new line.
_REORDERING = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


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

    A sign begins a formula as well, but signed numbers such as +1.2 % cannot call anything and stay as they are. Spaces
    and invisible characters in front are passed over, as a spreadsheet may do, and wide forms of a sign count as signs.
    """
    if not isinstance(value, str):
        return value
    start = unicodedata.normalize("NFKC", value)
    while start and (start[0].isspace() or not start[0].isprintable()):
        start = start[1:]
    is_formula = start.startswith(("=", "@")) or (start.startswith(("+", "-")) and _CALLS & set(start))
    return f"'{value}" if is_formula or value.startswith(("\t", "\r", "\n")) else value


def visible(text: str) -> str:
    """Return text for a terminal: what it would obey, such as an escape or a reordering of letters, is written out.

    The form is that of JSON strings, so that JSON stays what it is.
    """
    return "".join(char if _is_harmless(char) else f"\\u{ord(char):04x}" for char in text)


def _is_harmless(char: str) -> bool:
    return char in "\n\t" or not (unicodedata.category(char) in ("Cc", "Cs") or char in _REORDERING)
