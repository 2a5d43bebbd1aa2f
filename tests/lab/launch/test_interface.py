"""How a run ended, read from its status."""

from oelm.lab.launch.interface import status_time, was_stopped
from oelm.runs.schema import Status


def test_a_new_status_is_recognised_even_if_the_clock_was_set_back(tmp_path):
    """A status belongs to the current attempt if its time differs from the previous attempt's, earlier or later."""
    Status(id="x", state="stopped", updated=1000.0).write(tmp_path / "status.json")
    before = status_time(tmp_path)
    assert not was_stopped(tmp_path, 1, before)
    Status(id="x", state="stopped", updated=400.0).write(tmp_path / "status.json")
    assert was_stopped(tmp_path, 1, before)
    (tmp_path / "status.json").write_text("[")
    assert not was_stopped(tmp_path, 1, before)
