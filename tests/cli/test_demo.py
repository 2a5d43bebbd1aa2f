"""The demo: its steps, its time limit and its summary."""

from pathlib import Path

import pytest

from oelm.cli import demo as demo_module
from oelm.lab.experiment import find_experiment
from oelm.lab.matrix import Matrix
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
def test_the_demo_prints_a_summary_and_writes_a_report(small_demo, tmp_path):
    pytest.importorskip("scipy")
    result = lab("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert "oelm-freeze" in result.stdout.split("What these small runs show")[1]
    assert (tmp_path / "demo" / "report" / "report.html").is_file()
    assert len(list_runs(tmp_path / "demo" / "runs")) == 2 * demo_module.SEEDS
    again = lab("demo", "--out", tmp_path / "demo")
    assert again.exit_code == 0
    assert "started" not in again.stderr, "finished runs are not started again"


@pytest.mark.full
def test_the_demo_starts_no_run_that_would_miss_its_deadline(small_demo, tmp_path, monkeypatch):

    class SlowMatrix(Matrix):
        def _handle_end(self, entry, code):
            entry.started -= 300  # as if a run took five minutes
            super()._handle_end(entry, code)

    monkeypatch.setattr(demo_module, "Matrix", SlowMatrix)
    result = lab("demo", "--out", tmp_path / "demo", "--minutes", "4")
    assert result.exit_code == 0, result.output
    states = [run.state for run in list_runs(tmp_path / "demo" / "runs")]
    assert states == ["finished"] * 2, "the first seed of both methods"
    assert result.stdout.startswith("Up to seven ways")
    assert "what does not fit is left out" in result.stdout
    assert "4 runs" in result.stderr, "the runs that were not started"


def test_damaged_demo_settings_are_refused(tmp_path):
    (tmp_path / "demo.json").write_text("{}")
    message = refusal("demo", "--out", tmp_path)
    assert str(tmp_path / "demo.json") in message
    assert "steps" in message


def test_a_file_as_the_demos_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = refusal("demo", "--out", tmp_path / "file")
    assert str(tmp_path / "file") in message
    assert "File exists" in message


def test_the_demo_takes_fewer_steps_on_a_slow_machine(tmp_path, monkeypatch):
    for seconds, steps in ((0.01, 180), (0.25, 180), (0.27, 120), (0.45, 80), (9.0, 80)):
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _, seconds=seconds: seconds)
        folder = tmp_path / str(seconds)
        folder.mkdir()
        assert demo_module._choose_steps(folder, 205, 2) == steps
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _: 99.0)
        assert demo_module._choose_steps(folder, 205, 2) == steps, "a resumed demo keeps its number of steps"


@pytest.mark.full
def test_the_demo_prints_perplexities_if_no_report_can_be_written(small_demo, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "oelm.report", None)
    monkeypatch.setattr(demo_module, "SEEDS", 1)
    result = lab("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0
    assert "No report was written" in result.stdout
    assert "oelm-freeze" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_at_full_size(tmp_path):
    process = start_command("demo", "--out", tmp_path / "demo")
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "What these small runs show" in output
