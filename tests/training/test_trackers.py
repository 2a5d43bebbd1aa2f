"""The real trackers, in processes that are killed and resumed; each test needs its package."""

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from oelm.training import trackers
from oelm.training.step import Stepper
from oelm.training.trackers import Tracker, Trackers
from tests.support.training import config, die, read, run_here, run_to_end, start, tiny, write_yaml


class Tracking:
    """Keeps what trackers write in a folder, waits for them, and kills the process at the start of a step, if given."""

    def __init__(self, folder: Path, dies_at: int | None = None) -> None:
        self.folder, self.dies_at = folder, dies_at

    def __call__(self) -> None:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{self.folder}/mlflow.db"
        os.environ["TRACKIO_DIR"] = str(self.folder / "trackio")
        os.environ["WANDB_MODE"] = "offline"
        trackers._START = trackers._FLUSH = trackers._CLOSE = 100.0  # for a busy machine
        step = Stepper.step

        def take(stepper, state):
            if state.step == self.dies_at:
                time.sleep(1)  # so that the tracker receives the metrics of the step before
                die()
            step(stepper, state)

        Stepper.step = take


def killed_and_resumed(folder: Path, name: str) -> Path:
    """Train a run of 12 steps: killed after step 8 with a checkpoint at 5, then resumed, then started again."""
    fields = tiny(folder / "runs", log={"trackers": [name], "every": 1, "note": "long " * 2000})
    file = write_yaml(folder / "run.yaml", fields)
    assert start("train", file, sabotage=Tracking(folder, dies_at=8)).wait() == -9
    time.sleep(1.1)  # TensorBoard orders its files by the second in which they were created
    for _ in range(2):
        assert "is off" not in run_to_end("train", file, sabotage=Tracking(folder)).output
    return config(folder / "runs").folder


def steps_of(rows: Iterable[tuple[int, dict]], key: str) -> list[int]:
    return [step for step, values in rows if key in values]


def test_mlflow_continues_the_run_that_was_killed(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    folder = killed_and_resumed(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("run").experiment_id])
    assert run.info.status == "FINISHED"
    history = {key: client.get_metric_history(run.info.run_id, key) for key in ("train/loss", "val/loss")}
    assert [metric.step for metric in history["train/loss"]] == list(range(1, 13))
    assert [metric.step for metric in history["val/loss"]] == [4, 8, 12]
    assert run.data.metrics["final/val_loss"] == read(folder / "result.json")["val_loss"]
    assert run.data.params["optimizer.learning_rate"] == "0.003"
    assert run.data.params["model.fields.hidden_size"] == "32"
    assert len(run.data.params["log.note"]) == 6000
    assert run.data.tags["oelm.run"] == read(folder / "trackers.json")["name"]


def test_mlflow_separates_runs_of_one_config_in_two_folders(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for output in ("one", "two"):
        run_here(tmp_path / output, log={"trackers": ["mlflow"]})
    runs = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    assert len({run.data.params["id"] for run in runs}) == 1


def test_trackio_continues_the_run_that_was_killed(tmp_path):
    pytest.importorskip("trackio")
    killed_and_resumed(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio/oelm.db") as store:
        stored = store.execute("select run_id, step, metrics from metrics order by id").fetchall()
    assert len({run for run, _, _ in stored}) == 1
    rows = [(step, json.loads(values)) for _, step, values in stored]
    assert steps_of(rows, "train/loss") == list(range(1, 13))
    assert steps_of(rows, "val/loss") == [4, 8, 12]
    assert steps_of(rows, "final/val_loss") == [12]


def test_tensorboard_continues_the_run_that_was_killed(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = killed_and_resumed(tmp_path, "tensorboard")
    shown = events.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in shown.Scalars("val/loss")] == [4, 8, 12]
    assert [event.step for event in shown.Scalars("final/val_loss")] == [12]
    assert "config/text_summary" in shown.Tags()["tensors"]


def test_wandb_keeps_every_part_under_one_name(tmp_path):
    pytest.importorskip("wandb")
    folder = killed_and_resumed(tmp_path, "wandb")
    name = read(folder / "trackers.json")["name"]
    parts = sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all(part.endswith(name) for part in parts)


# Trackers that fail


def fake_mlflow(monkeypatch, begin) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(trackers._STARTERS, "mlflow", begin)


def waiting_for(released: threading.Event):
    def wait(*arguments) -> None:
        released.wait()

    return wait


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["start", "send", "close"])
def test_a_tracker_that_does_not_answer_delays_nothing(where, tmp_path, monkeypatch):
    for limit in {"start": ("_START",), "send": ("_FLUSH", "_CLOSE"), "close": ("_CLOSE",)}[where]:
        monkeypatch.setattr(trackers, limit, 0.1)
    released, warnings = threading.Event(), []

    def begin(run):
        if where == "start":
            released.wait()
        functions = {
            part: waiting_for(released) if part == where else lambda *arguments: None for part in ("send", "close")
        }
        return Tracker(**functions)

    fake_mlflow(monkeypatch, begin)
    active = Trackers(["mlflow"], config(tmp_path), tmp_path, warnings.append)
    for step in range(1, 6):
        active.send({"train/loss": 1.0}, step)
        active.flush()
    active.close("finished")
    released.set()  # a run that waited for the tracker would never come here
    assert len(warnings) == 1
    assert ("has not answered" if where == "start" else "did not answer") in warnings[0]


def test_a_metric_that_the_tracker_has_is_not_sent_again(tmp_path, monkeypatch):
    sent, last_steps = [], {"train/loss": 7, "val/loss": 4}
    tracker = Tracker(
        lambda *metrics: sent.append(metrics), lambda ended: sent.append(ended), known=last_steps.__getitem__
    )
    fake_mlflow(monkeypatch, lambda run: tracker)
    active = Trackers(["mlflow"], config(tmp_path), tmp_path, pytest.fail, done=5)
    for step in (6, 7, 8):
        active.send({"train/loss": 1.0, "val/loss": 2.0}, step)
    active.close("stopped")
    both = {"train/loss": 1.0, "val/loss": 2.0}
    assert sent == [({"val/loss": 2.0}, 6), ({"val/loss": 2.0}, 7), (both, 8), "stopped"]


def test_a_tracker_that_is_not_installed_is_logged_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert run_here(tmp_path, log={"trackers": ["mlflow"]})["status"] == "finished"
    log = (config(tmp_path).folder / "train.log").read_text()
    assert log.count("tracker mlflow is off: it cannot be imported") == 1
    assert "pip install 'oelm[trackers]'" in log


@pytest.mark.parametrize("content", ['{"name": "ab', "[]", "{}"])
def test_a_damaged_name_is_replaced_by_a_new_one(content, tmp_path):
    (tmp_path / "trackers.json").write_text(content)
    name = trackers._name(config(tmp_path), tmp_path)
    assert name.startswith(config(tmp_path).id)
    assert trackers._name(config(tmp_path), tmp_path) == name


def test_parameters_are_shortened_to_the_limits_of_mlflow():
    assert trackers._mlflow_parameter("model.fields.a(b)", {"x": [1, None]}) == (
        "model.fields.a_b_",
        '{"x": [1, null]}',
    )
    key, value = trackers._mlflow_parameter("k" * 300, "v" * 7000)
    assert (len(key), len(value), value[-1]) == (250, 6000, "…")
    assert trackers.flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
