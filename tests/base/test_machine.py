"""The memory that a process may use."""

import os

from oelm.base import machine


def test_the_limit_of_a_group_counts_where_it_is_smaller(tmp_path, monkeypatch):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", (str(limit),))
    assert machine.memory() == physical
    for content, expected in (("max\n", physical), ("4096\n", 4096), (f"{10 * physical}\n", physical)):
        limit.write_text(content)
        assert machine.memory() == expected
