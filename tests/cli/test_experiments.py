"""The commands experiments, run and matrix, and (slow) every experiment in a short run."""

import json

import pytest
import yaml

from oelm.base.strict import merge
from oelm.lab.experiment import runnable_experiments
from oelm.lab.plan import Request, plan_runs
from oelm.lab.status import list_runs
from tests.support.lab import ForkLauncher, experiment_file, lab, refusal, start_command
from tests.support.training import read, tiny, write_yaml
from tests.test_import import loaded_modules


def test_a_single_run_is_trained_in_this_process_and_only_once(tmp_path):
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
    assert result.exit_code == 0, result.output
    counts, *table, command = result.stdout.strip().splitlines()
    assert (counts, command) == ("2 finished", f"next: oelm report {tmp_path / 'runs'} --out report")
    rows = {line.split()[0]: line for line in table if line.strip()}
    assert "against" in table[1]
    assert "one seed" in rows["identity-key"]
    assert "%" in rows["identity-key"]
    assert "%" not in rows["baseline"]
    assert max(map(len, table)) <= 80
    assert "2 runs; about" in result.stderr
    assert {run.method for run in list_runs(tmp_path / "runs")} == {"baseline", "identity-key"}


def test_a_matrix_with_a_failed_run_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.local_launcher", lambda *_: ForkLauncher())
    file = experiment_file(tmp_path, axes={"data.fraction": [1e-9, 1.0]})
    result = lab("matrix", file, "--out", tmp_path / "runs")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "1 failed, 1 finished")
    assert "what went wrong: oelm logs" in result.stdout


def test_a_stopped_matrix_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.local_launcher", lambda *_: ForkLauncher())
    monkeypatch.setattr("oelm.lab.matrix.Matrix.stopped", True)
    result = lab("matrix", experiment_file(tmp_path), "--out", tmp_path / "runs")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (75, "1 left")
    assert "to go on from there: " in result.stdout


def test_a_runs_config_in_place_of_an_experiment_is_explained(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path))
    for command in ("matrix", "run"):
        message = refusal(command, file)
        assert f"oelm train {file}" in message
        assert "`config:`" in message


def test_a_dry_run_fits_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = experiment_file(tmp_path, axes={"method": ["baseline", "identity-key"]})
    lines = lab("matrix", file, "--dry-run").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("matrices set or frozen")], lines


@pytest.mark.parametrize("name", ["GPT-02", "demo", "rank-sst2", "ABC-tinystories"])
def test_an_experiment_in_full_fits_a_terminal_and_is_yaml(name):
    text = lab("experiments", name).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert yaml.safe_load(text) == json.loads(lab("experiments", name, "--json").stdout)


def test_listing_experiments_loads_no_heavy_module():
    code = "from typer.testing import CliRunner; from oelm.cli import app; "
    loaded = loaded_modules(code + "assert 'GPT-02' in CliRunner().invoke(app, ['experiments']).output")
    assert not loaded & {"torch", "transformers"}


def test_the_json_list_has_every_experiment():
    entries = json.loads(lab("experiments", "--json").stdout)
    assert [entry["id"] for entry in entries] == [experiment.id for experiment in runnable_experiments()]
    assert all(entry["asks"] for entry in entries)


@pytest.mark.slow
def test_every_experiment_trains_at_smoke_scale(tmp_path, monkeypatch):
    """Train each combination of task, model and method of the experiments for three steps."""
    from functools import cache

    from oelm.data import builtin
    from oelm.errors import OelmError
    from oelm.training.engine import train
    from oelm.training.tasks import language

    monkeypatch.setattr(language, "builtin", cache(builtin))
    trained, failed = set(), []
    for experiment in runnable_experiments():
        for run in plan_runs([experiment], Request(scale="smoke", output=str(tmp_path))):
            combination = (run.config.task.name, run.config.model.name, run.config.method.to_json())
            static = run.config.method.schedule.kind == "static"
            if combination in trained or run.starts_from is not None or not static:
                continue
            trained.add(combination)
            short = {"train": {"max_steps": 3}, "eval": {"every": 3, "sequences": 8}, "experiment": f"n{len(trained)}"}
            try:
                train(type(run.config).load(merge(run.config.to_dict(), short)), quiet=True)
            except OelmError as error:
                failed.append(f"{run.name}: {error}")
    assert failed == []
    assert len(trained) > 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pretrained_model_is_fine_tuned(tmp_path):
    """Run both stages of pretrain-finetune in real processes, with the export between them."""
    process = start_command("matrix", "pretrain-finetune", "--scale", "smoke", "--jobs", 2, "--out", tmp_path, "--yes")
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "6 finished" in output
