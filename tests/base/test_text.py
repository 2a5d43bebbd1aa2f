"""Text for people: tables, cells of a spreadsheet, and what a terminal would obey."""

import builtins
import io
import json

import pytest
from rich.text import Text

from oelm.base.console import Console
from oelm.base.text import plain_table, plain_text, spreadsheet_safe, visible


def test_a_table_is_text_in_a_notebook_too(monkeypatch):
    """A report that is printed, or stands in a model card, has its table wherever it was made."""
    table = plain_table()
    table.add_column("matrix")
    table.add_row("query")
    expected = "title\n matrix\n ──────\n query"
    assert plain_text(table, "title") == expected
    shell = type("ZMQInteractiveShell", (), {})()  # by which rich knows a notebook
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert plain_text(table, "title") == expected


@pytest.mark.parametrize(
    "cell",
    [
        "=1+1",
        "@SUM(A1)",
        "+cmd|' /C calc'!A0",
        "-2+3=5",
        "  =1+1",
        "\u200b=1+1",
        "\ufeff@A1",
        "\x00=1",
        "\uff1d1+1",
        "\t1",
    ],
)
def test_a_formula_is_no_formula_for_a_spreadsheet(cell):
    assert spreadsheet_safe(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["+1.2 %", "-0.5", "a = b", " text", "", "50 % (n = 3)", 3, -1.5, None])
def test_a_cell_that_calls_nothing_stays_as_it_is(cell):
    assert spreadsheet_safe(cell) == cell


def test_what_a_terminal_would_obey_is_written_out():
    shown = visible("a\x1b[2Jb\x07\r\x9b31m\u202eevil\x7f\ud800")
    assert shown == r"a\u001b[2Jb\u0007\u000d\u009b31m\u202eevil\u007f\ud800"
    assert visible("a\u2028b\u2029c\u061cd\u200fe") == r"a\u2028b\u2029c\u061cd\u200fe"
    plain = "two\nlines\tand 中文, é, \u200d emoji \U0001f44d, no\u00a0break"
    assert visible(plain) == plain


def test_json_for_a_terminal_is_still_the_same_json():
    value = {"name": "a\x1b[2J\u202e\x9b\x7f", "text": "中文\n"}
    assert json.loads(visible(json.dumps(value, ensure_ascii=False, indent=2))) == value


def test_a_console_writes_out_what_comes_from_data_and_keeps_its_own_colours():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(Text("a\x1b[2Jb", style="red"))
    assert out.getvalue().strip() == "\x1b[31ma\\u001b[2Jb\x1b[0m"
