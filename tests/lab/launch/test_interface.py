"""How a run ended, read from its status."""

from oelm.lab.launch.interface import CONSOLE, failure_reason, status_time, was_stopped
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


def test_the_reason_of_a_refusal_of_several_lines_is_its_first(tmp_path):
    console = tmp_path / CONSOLE
    console.write_text("oelm: unknown model_type 'olmo'. Known: bert.\noelm.register_family(\n    'olmo',\n)\n\n")
    assert failure_reason(tmp_path, 2, None) == ("unknown model_type 'olmo'. Known: bert.", True)
    console.write_text("Traceback\nKeyError: 'x'\n")
    assert failure_reason(tmp_path, 1, None) == ("KeyError: 'x'", False)
    console.write_text("Usage: oelm\nNo such option: --plugn\n")
    assert failure_reason(tmp_path, 2, None) == ("No such option: --plugn", True)
