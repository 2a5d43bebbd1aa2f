"""The commands run, matrix, experiments and demo, the live views, and (slow) every experiment in a short run."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from oelm.base.strict import merge
from oelm.cli import demo as demo_module
from oelm.cli.run_tables import MatrixView, status_table, watch
from oelm.lab.experiment import find_experiment, runnable_experiments
from oelm.lab.matrix import Matrix
from oelm.lab.plan import Request, plan_runs
from oelm.lab.status import RunState, list_runs, read_state
from tests.lab.test_matrix import ForkLauncher, plan
from tests.support.lab import experiment_file, lab, refusal, started
from tests.support.records import write_status
from tests.support.training import read, tiny
from tests.test_import import _loaded


def test_a_single_run_is_trained_in_this_process_and_not_twice(tmp_path):
    file = experiment_file(tmp_path)
    arguments = ("run", file, "--out", tmp_path / "runs", "train.max_steps=6", "--seed", 2)
    first = lab(*arguments)
    assert first.exit_code == 0, first.output
    folder = tmp_path / "runs" / "study-steps-6" / "baseline" / "seed-2"
    assert read(folder / "result.json")["steps"] == 6
    again = lab(*arguments)
    assert again.exit_code == 0
    assert (folder / "train.log").read_text().count("finished: ") == 1


def test_an_experiment_with_several_methods_is_run_as_a_matrix(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.local_launcher", lambda *_: ForkLauncher())
    file = experiment_file(tmp_path, axes={"method": ["baseline", "identity-key"]})
    result = lab("run", file, "--out", tmp_path / "runs")
    assert (result.exit_code, result.stdout.strip()) == (0, "2 finished")
    assert "2 runs; about" in result.stderr
    assert {run.method for run in list_runs(tmp_path / "runs")} == {"baseline", "identity-key"}


def test_a_matrix_with_a_failed_run_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.local_launcher", lambda *_: ForkLauncher())
    file = experiment_file(tmp_path, axes={"data.fraction": [1e-9, 1.0]})
    result = lab("matrix", file, "--out", tmp_path / "runs")
    assert (result.exit_code, result.stdout.strip()) == (1, "1 failed, 1 finished")


def test_listing_experiments_loads_no_heavy_module():
    code = "from typer.testing import CliRunner; from oelm.cli import app; "
    loaded = _loaded(code + "assert 'GPT-02' in CliRunner().invoke(app, ['experiments']).output")
    assert not loaded & {"torch", "transformers"}


def test_the_json_list_has_every_experiment():
    entries = json.loads(lab("experiments", "--json").stdout)
    assert [entry["id"] for entry in entries] == [experiment.id for experiment in runnable_experiments()]
    assert all(entry["asks"] for entry in entries)


# Live views


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, height=40)


def test_a_terminal_shows_events_and_a_live_table(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    console = terminal()
    with MatrixView(console, pause=0.0) as view:
        Matrix(planned, ForkLauncher(), notify=view.print_event).run(view.show)
    shown = console.file.getvalue()
    for text in ("started  study/baseline/seed-0", "tokens/s", "2 finished", "so far"):
        assert text in shown


def test_the_cursor_stays_visible_during_the_live_view():
    console = terminal()
    with MatrixView(console):
        shown = console.file.getvalue()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_the_status_table_shows_error_messages(tmp_path):
    write_status(tmp_path, "failed", message="TrainingError: loss is [nan]")
    console = terminal()
    console.print(status_table([read_state(tmp_path, "x")]))
    assert "x: TrainingError: loss is [nan]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "dropped"), [(130, []), (80, ["GPU memory", "host"]), (60, ["tokens/s", "train loss"])]
)
def test_a_narrow_terminal_drops_columns_and_keeps_words_whole(width, dropped, tmp_path):
    figures = {"step": 100000, "max_steps": 100000, "loss": 6.2354, "val_loss": 6.2573, "perplexity": 521.79}
    name = "GPT-02-lr-1e-3/oelm-random-matched/seed-10"
    run = RunState(name=name, path=tmp_path, state="finished", **figures, tokens_per_second=20521)
    console = terminal()
    console.width = width
    console.print(status_table([run], width))
    shown = console.file.getvalue()
    for word in ("finished", "100000/100000", "521.79"):
        assert word in shown
    assert all(name not in shown for name in dropped)


def test_watching_ends_when_no_run_is_in_progress(tmp_path):
    states = ["waiting", "running", "finished"]
    readings = [[RunState(name="study/x", path=tmp_path, state=state)] for state in states]
    watch(lambda: readings.pop(0), seconds=0)
    assert readings == []  # a fourth reading would raise


def test_watching_a_folder_without_runs_ends_at_once(tmp_path):
    readings = []
    watch(lambda: readings.append(0) or list_runs(tmp_path), seconds=60)
    assert readings == [0]


# The demo


@pytest.fixture
def small_demo(monkeypatch):
    """Replace the demo's experiment by one whose runs take a fraction of a second."""
    shipped = find_experiment("demo")
    config = {key: value for key, value in tiny(Path("x")).items() if key != "output"}
    small = shipped.model_copy(update={"config": config, "axes": {"method": ("baseline", "oelm-freeze")}})
    monkeypatch.setattr(demo_module, "find_experiment", lambda _: small)
    monkeypatch.setattr(demo_module, "STEPS", (8,))
    monkeypatch.setattr(demo_module, "ForkedLauncher", lambda slots, _: ForkLauncher(slots))


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


def test_the_demo_starts_no_run_that_would_miss_its_deadline(small_demo, tmp_path, monkeypatch):

    class Slow(Matrix):
        def _handle_end(self, entry, code):
            entry.started -= 300  # as if a run took five minutes
            super()._handle_end(entry, code)

    monkeypatch.setattr(demo_module, "Matrix", Slow)
    result = lab("demo", "--out", tmp_path / "demo", "--minutes", "4")
    assert result.exit_code == 0, result.output
    states = [run.state for run in list_runs(tmp_path / "demo" / "runs")]
    assert states == ["finished"] * 2, "the first seed of both methods"
    assert result.stdout.startswith("Up to seven ways")
    assert "what does not fit is left out" in result.stdout
    assert "left     4 runs: too late to be done in time" in result.stderr


def test_damaged_demo_settings_are_refused(tmp_path):
    (tmp_path / "demo.json").write_text("{}")
    assert "demo.json: holds no number of steps; remove" in refusal("demo", "--out", tmp_path)


def test_a_file_as_the_demos_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'}: cannot be written (File exists)" in refusal("demo", "--out", tmp_path / "file")


def test_a_slow_machine_takes_fewer_steps(tmp_path, monkeypatch):
    for seconds, steps in ((0.01, 180), (0.25, 180), (0.27, 120), (0.45, 80), (9.0, 80)):
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _, seconds=seconds: seconds)
        folder = tmp_path / str(seconds)
        folder.mkdir()
        assert demo_module._choose_steps(folder, 205, 2) == steps
        monkeypatch.setattr(demo_module, "seconds_per_step", lambda _: 99.0)
        assert demo_module._choose_steps(folder, 205, 2) == steps, "a resumed demo keeps its number of steps"


def test_the_demo_prints_perplexities_if_no_report_can_be_written(small_demo, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "oelm.report", None)
    monkeypatch.setattr(demo_module, "SEEDS", 1)
    result = lab("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0
    assert "No report was written" in result.stdout
    assert "oelm-freeze" in result.stdout


# Slow


@pytest.mark.slow
def test_every_experiment_trains_at_smoke_scale(tmp_path, monkeypatch):
    """Train each combination of task, model and method of the experiments for three steps."""
    from functools import cache

    from oelm.data import builtin
    from oelm.errors import OelmError
    from oelm.training.engine import train
    from oelm.training.tasks import language

    monkeypatch.setattr(language, "builtin", cache(builtin))
    seen, failed = set(), []
    for experiment in runnable_experiments():
        for run in plan_runs([experiment], Request(scale="smoke", output=str(tmp_path))):
            what = (run.config.task.name, run.config.model.name, run.config.method.to_json())
            static = run.config.method.schedule.kind == "static"
            if what in seen or run.starts_from is not None or not static:
                continue
            seen.add(what)
            short = {"train": {"max_steps": 3}, "eval": {"every": 3, "sequences": 8}, "experiment": f"n{len(seen)}"}
            try:
                train(type(run.config).load(merge(run.config.to_dict(), short)), quiet=True)
            except OelmError as error:
                failed.append(f"{run.name}: {error}")
    assert failed == []
    assert len(seen) > 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pretrained_model_is_fine_tuned(tmp_path):
    """Run both stages of pretrain-finetune in real processes, with the export between them."""
    process = started("matrix", "pretrain-finetune", "--scale", "smoke", "--jobs", 2, "--out", tmp_path, "--yes")
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "6 finished" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_at_full_size(tmp_path):
    process = started("demo", "--out", tmp_path / "demo")
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "What these small runs show" in output
