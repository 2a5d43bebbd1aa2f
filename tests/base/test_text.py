"""Tables as text."""

import builtins

from oelm.base.text import plain_table, plain_text


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
