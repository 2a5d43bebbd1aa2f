"""The demo: its steps, its time limit and its summary."""

import time
from pathlib import Path

import pytest

from oelm.cli import demo as demo_module
from oelm.lab.experiment import find_experiment
from oelm.lab.status import list_runs
from tests.support.lab import ForkLauncher, lab, refusal, start_command
from tests.support.training import tiny


@pytest.fixture
def small_demo(monkeypatch):
    """Replace the demo's experiment by one whose runs take a fraction of a second."""
    shipped = find_experiment("demo")
    config = {key: value for key, value in tiny(Path("x")).items() if key != "output"}
    small = shipped.model_copy(update={"config": config, "axes": {"method": ("baseline", "oelm-freeze")}})
    monkeypatch.setattr(demo_module, "find_experiment", lambda _: small)
    monkeypatch.setattr(demo_module, "STEPS", (8,))
    monkeypatch.setattr(demo_module, "ForkedLauncher", lambda slots, _: ForkLauncher(slots))


@pytest.mark.full
def test_the_demo_ends_with_a_table_a_sentence_and_the_next_command(small_demo, tmp_path):
    result = lab("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    outcome = result.stdout.split("demo/runs.")[1].strip().splitlines()
    assert sum("oelm-freeze" in line and "%" in line for line in outcome) == 2, "a row and a sentence"
    assert "this shows how the lab works" in " ".join(outcome)
    assert outcome[-1].startswith("next, on your own text: oelm data prepare")
    assert len(outcome) < 15, "no page of statistics"
    assert all(len(line) <= 80 for line in outcome if str(tmp_path) not in line)
    assert (tmp_path / "demo" / "report" / "report.html").is_file()
    assert len(list_runs(tmp_path / "demo" / "runs")) == 2 * demo_module.SEEDS
    again = lab("demo", "--out", tmp_path / "demo")
    assert again.exit_code == 0
    assert "started" not in again.stderr, "finished runs are not started again"


@pytest.mark.full
def test_the_demo_starts_no_run_that_would_miss_its_deadline_but_always_has_the_first(
    small_demo, tmp_path, monkeypatch
):
    monkeypatch.setattr(demo_module, "_REPORT_SECONDS", 60.0)  # no time is left for any run
    result = lab("demo", "--out", tmp_path / "demo", "--minutes", "0.5")
    assert result.exit_code == 0, result.output
    finished = {run.name for run in list_runs(tmp_path / "demo" / "runs") if run.state == "finished"}
    assert finished == {"demo/baseline/seed-0", "demo/oelm-freeze/seed-0"}
    assert "left     4 runs" in result.stderr, "the runs that were not started"


def test_damaged_demo_settings_are_refused(tmp_path):
    (tmp_path / "demo.json").write_text("{}")
    message = refusal("demo", "--out", tmp_path)
    assert str(tmp_path / "demo.json") in message
    assert "steps" in message
    assert f"remove {tmp_path}" in message


def test_a_file_as_the_demos_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = refusal("demo", "--out", tmp_path / "file")
    assert str(tmp_path / "file") in message
    assert "File exists" in message


def test_with_little_time_the_demo_shortens_its_runs_before_it_drops_methods(tmp_path, monkeypatch):
    every = len(find_experiment("demo").axes["method"])
    cases = [(0.01, 180, every), (0.2, 120, every), (0.35, 80, every), (1.0, 20, every), (3.0, 20, 3), (60.0, 20, 3)]
    for seconds, steps, methods in cases:
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _, seconds=seconds: seconds)
        folder = tmp_path / str(seconds)
        folder.mkdir()
        plan = demo_module._choose_plan(folder, time.monotonic() + 211, 2)
        assert (plan.steps, len(plan.methods)) == (steps, methods), seconds
        assert plan.methods[:3] == demo_module.ALWAYS
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _: 99.0)
        assert demo_module._choose_plan(folder, time.monotonic(), 2) == plan, "a resumed demo keeps its plan"


@pytest.mark.full
def test_the_demo_has_its_table_if_no_report_can_be_written(small_demo, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "oelm.report", None)
    monkeypatch.setattr(demo_module, "SEEDS", 1)
    result = lab("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0
    assert "no report was written: " in result.stdout
    assert "oelm-freeze" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_at_full_size(tmp_path):
    process = start_command("demo", "--out", tmp_path / "demo")
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "next, on your own text" in output
