"""A run that is interrupted at any moment and resumed ends with the same bits as one that is not."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from oelm.base.files import read_json
from oelm.base.strict import merge
from oelm.evaluation.load import load_run
from oelm.training.checkpoint import list_checkpoints
from tests.support.training import (
    LIMIT,
    Death,
    Held,
    RecordSteps,
    assert_same_run,
    die,
    final_tensors,
    metrics_without_times,
    oelm,
    read,
    result_without_times,
    run_here,
    run_to_end,
    start,
    tiny,
    write_yaml,
)

# Checkpoints come every 3 steps, so that events of the schedules fall on one, right after one, and between two.
COMMON = {"train": {"micro_batch_size": 4}, "checkpoint": {"every": 3}, "log": {"every": 2}, "eval": {"targets": [390]}}
ARMS = {
    "baseline": {},
    "unfreeze": {"method": {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [3, 7]}}},
    "freeze": {"method": {"preset": "oelm-qk-ffn", "schedule": {"kind": "freeze", "steps": [6]}}},
    "share of the steps": {
        "model": {"fields": {"num_hidden_layers": 3}},
        "method": {"preset": "freeze-early", "schedule": {"shares": [0.6]}},  # step 7 of 12
    },
    "latent": {
        "model": {"name": "gpt:modern-tiny", "fields": {"latent": 16, "channel": 8}},
        "method": {"preset": "latent-frozen", "schedule": {"kind": "unfreeze", "steps": [3, 7]}},
    },
    "muon": {
        "optimizer": {"name": "muon"},
        "method": {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [3, 7]}},
    },
    "orthogonal key": {"model": {"fields": {"orthogonal_key": True, "convolution": 3}}},
}


def fields_of(name: str, output: Path) -> dict:
    """Return the fields of the run of an arm."""
    return merge(tiny(output, **COMMON, experiment=name.replace(" ", "-")), ARMS[name])


def folder_of(output: Path) -> Path:
    """Return the only run below an output folder."""
    (run,) = output.glob("*/*/seed-0")
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that gives the uninterrupted run of an arm: trained once, in a process of its own."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    runs = {}

    def get(name: str) -> Path:
        if name not in runs:
            file = write_yaml(folder / f"{name}.yaml", fields_of(name, folder / name))
            run_to_end("train", file, sabotage=RecordSteps(folder / f"{name}.steps"))
            runs[name] = folder_of(folder / name)
        return runs[name]

    return get


def assert_checkpoints_are_complete(run: Path) -> None:
    """Require that everything listed as a checkpoint can be loaded and verifies."""
    for checkpoint in list_checkpoints(run / "checkpoints"):
        assert sorted(file.name for file in checkpoint.iterdir()) == [
            "manifest.json",
            "state.json",
            "tensors.safetensors",
        ]
    if list_checkpoints(run / "checkpoints"):
        load_run(run, last=True)
    if (run / "best").exists():
        load_run(run)


def test_a_share_of_the_steps_is_recorded_as_a_step(uninterrupted):
    """So that a resumed run, and a model loaded from the run, know which step it is."""
    run = uninterrupted("share of the steps")
    schedule = read(run / "best" / "config.json")["oelm"]["method"]["schedule"]
    assert (schedule["shares"], schedule["steps"]) == ([0.6], [7])
    assert read(run / "config.json")["method"]["schedule"]["steps"] == []
    (event,) = [line for line in metrics_without_times(run) if line["kind"] == "event"]
    assert (event["step"], event["event"]) == (7, "unfreeze")
    assert event["matrices"] == [f"transformer.h.2.attn.{name}_proj" for name in "qk"]
    load_run(run, last=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ARMS)
def test_a_run_that_is_killed_many_times_ends_the_same(name, tmp_path, uninterrupted):
    """SIGKILL at random steps, writes, renames and removals, until the run ends by itself."""
    file = write_yaml(tmp_path / "run.yaml", fields_of(name, tmp_path / "runs"))
    draw = random.Random(name)
    kills = 0
    while (code := start("train", file, sabotage=Death(draw.randint(10, 90))).wait()) != 0:
        assert code == -signal.SIGKILL
        kills += 1
        run = folder_of(tmp_path / "runs")
        assert not (run / "result.json").exists() or read(run / "result.json")["status"] == "finished"
        assert_checkpoints_are_complete(run)
        assert kills < 40, "the run makes no progress"
    assert kills >= 3
    assert_same_run(folder_of(tmp_path / "runs"), uninterrupted(name))
    leftovers = [file for file in folder_of(tmp_path / "runs").rglob(".*") if not file.name.startswith(".gitignore")]
    assert leftovers == [], "nothing half written is left behind"


class HalfATensorFile:
    """Dies when the second checkpoint's tensors are half written."""

    def __call__(self):
        from oelm.training import checkpoint as state

        save, saved = state.save_file, []

        def save_half(tensors, path):
            save(tensors, path)
            saved.append(path)
            if len(saved) == 2:
                os.truncate(path, os.path.getsize(path) // 2)
                die()

        state.save_file = save_half


class DieAround:
    """Dies before or after the count-th rename to a given name."""

    def __init__(self, target: str, count: int, after: bool) -> None:
        self.target, self.remaining, self.after = target, count, after

    def __call__(self):
        replace = os.replace

        def deadly(source, target):
            hit = Path(target).name == self.target
            self.remaining -= hit
            if hit and self.remaining == 0 and not self.after:
                die()
            replace(source, target)
            if hit and self.remaining == 0:
                die()

        os.replace = deadly


class HalfALine:
    """Dies when a line of metrics is half written."""

    def __call__(self):
        from oelm.runs.folder import RunFolder

        metric, count = RunFolder.metric, []

        def half(folder, line):
            count.append(line.kind)
            if len(count) == 4:
                folder._metrics.write('{"kind": "train", "step": 6, "lo')
                folder._metrics.flush()
                die()
            metric(folder, line)

        RunFolder.metric = half


class AfterAnEvent:
    """Dies in the step after an event of the schedule, which is recorded but in no checkpoint."""

    def __init__(self, step: int) -> None:
        self.at = step

    def __call__(self):
        from oelm.training.step import Stepper

        step, at = Stepper.step, self.at

        def deadly(stepper, state):
            if state.step == at:
                die()
            step(stepper, state)

        Stepper.step = deadly


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("moment", "name"),
    [
        (HalfATensorFile(), "baseline"),
        (DieAround("step-00000006", 1, after=False), "baseline"),
        (DieAround("step-00000006", 1, after=True), "baseline"),  # two checkpoints exist
        (DieAround(".step-00000003.tmp", 1, after=True), "baseline"),  # the old one is half removed
        (DieAround("step-00000012", 1, after=True), "baseline"),  # the last one: no later save removes the old one
        (DieAround(".step-00000009.tmp", 1, after=True), "baseline"),
        (DieAround(".best.old", 1, after=True), "baseline"),  # the best model between two renames
        (DieAround("best", 2, after=True), "baseline"),
        (DieAround("result.json", 1, after=False), "baseline"),
        (HalfALine(), "baseline"),
        (AfterAnEvent(3), "unfreeze"),
        (AfterAnEvent(7), "share of the steps"),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(str(part) for part in (type(value).__name__, *vars(value).values()))
    ),
)
def test_a_run_that_is_killed_at_a_critical_moment_ends_the_same(moment, name, tmp_path, uninterrupted):
    file = write_yaml(tmp_path / "run.yaml", fields_of(name, tmp_path / "runs"))
    assert start("train", file, sabotage=moment).wait() == -signal.SIGKILL
    run = folder_of(tmp_path / "runs")
    resumed = run_to_end("train", file)
    assert sum(line.startswith("resumed from step") for line in resumed.output.splitlines()) == 1, resumed.output
    assert_same_run(run, uninterrupted(name))
    assert_checkpoints_are_complete(run)
    checkpoints = [
        sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, uninterrupted(name))
    ]
    assert checkpoints[0] == checkpoints[1]


def test_a_resumed_run_takes_exactly_the_steps_after_the_checkpoint(tmp_path, uninterrupted):
    """On the same samples as in the uninterrupted run."""
    file = write_yaml(tmp_path / "run.yaml", fields_of("baseline", tmp_path / "runs"))
    assert start("train", file, sabotage=DieAround("step-00000006", 1, after=True)).wait() == -signal.SIGKILL
    run_to_end("train", file, sabotage=RecordSteps(tmp_path / "steps"))
    all_steps = (uninterrupted("baseline").parents[3] / "baseline.steps").read_text().splitlines()
    assert all_steps[:4] == ["step 0", "samples 0 4", "samples 4 4", "step 1"]
    assert [line for line in all_steps if line.startswith("step")] == [f"step {step}" for step in range(12)]
    assert (tmp_path / "steps").read_text().splitlines() == all_steps[all_steps.index("step 6") :]


@pytest.mark.full
def test_a_process_killed_from_outside_is_resumed_by_the_same_command(tmp_path, uninterrupted):
    """`python -m oelm train`, SIGKILL at a random time after a checkpoint, and the same command again."""
    file = write_yaml(tmp_path / "run.yaml", fields_of("unfreeze", tmp_path / "runs"))
    process = oelm("train", file)
    while not list((tmp_path / "runs/unfreeze").glob("*/seed-0/checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    time.sleep(random.Random().uniform(0, 0.1))
    process.kill()
    process.communicate()
    again = oelm("train", file, "--quiet")
    output, errors = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, errors
    assert errors == ""
    assert json.loads(output)["steps"] == 12
    assert_same_run(folder_of(tmp_path / "runs"), uninterrupted("unfreeze"))


@pytest.mark.full
def test_a_run_goes_on_when_its_output_is_closed(tmp_path):
    """As in `oelm train ... 2>&1 | head -1`."""
    process = oelm("train", write_yaml(tmp_path / "run.yaml", fields_of("unfreeze", tmp_path / "runs")), "log.every=1")
    assert process.stderr.readline()
    process.stderr.close()
    process.stdout.close()
    process.wait(timeout=LIMIT)
    run = folder_of(tmp_path / "runs")
    assert read_json(run / "status.json")["state"] == "finished"
    assert "step 12/12" in (run / "train.log").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_stops_after_the_step_and_a_checkpoint(number, tmp_path, uninterrupted):
    name = {signal.SIGTERM: "baseline", signal.SIGINT: "unfreeze", signal.SIGUSR2: "freeze"}[number]
    file = write_yaml(tmp_path / "run.yaml", fields_of(name, tmp_path / "runs"))
    process = start("train", file, sabotage=Held(4))
    process.wait_for(lambda: any((tmp_path / "runs").glob("*/*/*/metrics.jsonl")))
    run = folder_of(tmp_path / "runs")
    process.signal(number)
    assert process.wait() == 75
    status = read(run / "status.json")
    assert (status["state"], status["signal"]) == ("stopped", signal.Signals(number).name)
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    assert 0 < status["step"] <= 5
    assert checkpoint.name == f"step-{status['step']:08d}"
    assert not (run / "result.json").exists()
    assert f"stopped by {signal.Signals(number).name} at step {status['step']}: saved" in process.output

    resumed = run_to_end("train", file)
    assert f"resumed from step {status['step']}" in resumed.output
    assert read(run / "status.json")["state"] == "finished"
    assert_same_run(run, uninterrupted(name))


class EndlessSave:
    """Never finishes saving the second checkpoint; writes a file when that begins and one when a signal was handled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self):
        from oelm.training import checkpoint as state
        from oelm.training.signals import StopRequest

        save, saved, handle = state.save_file, [], StopRequest.handle

        def endless(tensors, path):
            saved.append(path)
            if len(saved) == 2:
                (self.folder / "saving").touch()
                while True:
                    time.sleep(0.01)
            save(tensors, path)

        def noting_handle(request, number, frame):
            handle(request, number, frame)
            (self.folder / "signalled").touch()

        state.save_file = endless
        StopRequest.handle = noting_handle


def test_a_second_signal_ends_at_once(tmp_path, uninterrupted):
    file = write_yaml(tmp_path / "run.yaml", fields_of("baseline", tmp_path / "runs"))
    process = start("train", file, sabotage=EndlessSave(tmp_path))
    process.wait_for((tmp_path / "saving").exists)
    process.signal(signal.SIGTERM)
    process.wait_for((tmp_path / "signalled").exists)
    assert process.alive, "the first signal waits for the checkpoint"
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    run = folder_of(tmp_path / "runs")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    run_to_end("train", file)
    assert_same_run(run, uninterrupted("baseline"))


class SignalAtTheLastStep:
    """Sends its process SIGTERM in the last step."""

    def __call__(self):
        from oelm.training.step import Stepper

        step = Stepper.step

        def signalled(stepper, state):
            if state.step == 11:
                os.kill(os.getpid(), signal.SIGTERM)
            step(stepper, state)

        Stepper.step = signalled


def test_a_run_finishes_when_the_signal_comes_in_its_last_step(tmp_path, uninterrupted):
    file = write_yaml(tmp_path / "run.yaml", fields_of("baseline", tmp_path / "runs"))
    run_to_end("train", file, sabotage=SignalAtTheLastStep())
    assert_same_run(folder_of(tmp_path / "runs"), uninterrupted("baseline"))


def test_a_finished_run_is_not_trained_again(tmp_path):
    fields = tiny(tmp_path / "runs")
    first = run_here(tmp_path / "runs")
    run = folder_of(tmp_path / "runs")
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in ("lock", "train.log")]
    before = {file: file.read_bytes() for file in files}
    process = run_to_end("train", write_yaml(tmp_path / "run.yaml", fields), sabotage=RecordSteps(tmp_path / "steps"))
    assert not (tmp_path / "steps").exists()
    assert {file: file.read_bytes() for file in before} == before
    assert run_here(tmp_path / "runs") == first
    assert "Traceback" not in process.output
    assert str(run) in process.output, "it names the folder of the finished run"


def test_a_run_whose_result_was_lost_writes_it_again_without_a_step(tmp_path):
    """The checkpoint of the last step is there, so only the final records are written again."""
    run_here(tmp_path / "runs")
    run = folder_of(tmp_path / "runs")
    tensors_before, result_before = final_tensors(run), result_without_times(run)
    (run / "result.json").unlink()
    os.replace(run / "best", run / ".best.old")  # as a kill between two renames leaves it
    run_to_end(
        "train", write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs")), sabotage=RecordSteps(tmp_path / "steps")
    )
    assert not (tmp_path / "steps").exists()
    assert final_tensors(run) == tensors_before
    assert result_without_times(run) == result_before
    assert load_run(run).config.oelm["seed"] == 0
    assert (run / "best").is_dir()


@pytest.mark.full
def test_another_number_of_threads_is_refused_unless_allowed(tmp_path):
    fields = tiny(tmp_path / "runs")
    file = write_yaml(tmp_path / "run.yaml", fields)
    sabotage = DieAround("step-00000010", 1, after=False)
    assert start("train", file, sabotage=sabotage).wait() == -signal.SIGKILL
    run = folder_of(tmp_path / "runs")
    metrics, before = (run / "metrics.jsonl").read_bytes(), final_tensors(run)
    refused = start("train", file, threads=2)
    assert refused.wait() == 2
    assert "threads 1 then, 2 now" in refused.output
    assert "checkpoint.resume" in refused.output
    assert (run / "metrics.jsonl").read_bytes() == metrics, "a refusal changes nothing"
    assert final_tensors(run) == before
    allowed = run_to_end("train", file, "checkpoint.resume=inexact", threads=2)
    assert "resumed from step 5" in allowed.output
    notes = read(run / "result.json")["notes"]
    assert any("threads 1 then, 2 now" in note for note in notes), notes


def test_resume_never_refuses_a_folder_with_a_checkpoint(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    assert start("train", file, sabotage=DieAround("step-00000010", 1, after=False)).wait() == -signal.SIGKILL
    refused = start("train", file, "checkpoint.resume=never")
    assert refused.wait() == 2
    assert "checkpoint.resume is 'never'" in refused.output


def test_weights_do_not_depend_on_how_often_a_run_validates_saves_and_logs(tmp_path):
    often = run_here(tmp_path / "a", eval={"every": 1}, checkpoint={"every": 1}, log={"every": 1})
    seldom = run_here(tmp_path / "b", eval={"every": 50}, checkpoint={"every": 50}, log={"every": 50})
    often_folder, seldom_folder = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    assert final_tensors(often_folder) == final_tensors(seldom_folder)
    assert often["val_loss"] == seldom["val_loss"]
    losses = [line["loss"] for line in metrics_without_times(often_folder) if line["kind"] == "train"]
    (mean,) = [line["loss"] for line in metrics_without_times(seldom_folder) if line["kind"] == "train"]
    assert mean == pytest.approx(sum(losses) / 12, rel=1e-12)


def test_equal_seeds_give_equal_weights_and_another_data_seed_gives_others(tmp_path):
    run_here(tmp_path / "a")
    run_here(tmp_path / "b")
    run_here(tmp_path / "c", data={"seed": 1})
    assert final_tensors(folder_of(tmp_path / "a")) == final_tensors(folder_of(tmp_path / "b"))
    assert final_tensors(folder_of(tmp_path / "a")) != final_tensors(folder_of(tmp_path / "c"))


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    """They may be as large as a model."""
    run_here(tmp_path / "runs")
    run = folder_of(tmp_path / "runs")
    (run / "result.json").unlink()
    dead = subprocess.Popen(["true"])
    dead.wait()
    shutil.copytree(run / "best", run / f".best.{dead.pid}.tmp")
    (run / f".status.json.{dead.pid}.tmp").write_text("{")
    (run / f".launch.json.{os.getppid()}.tmp").write_text("{")
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    os.replace(run / "best", run / ".best.old")
    run_here(tmp_path / "runs")
    hidden_files = [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert hidden_files == [f".launch.json.{os.getppid()}.tmp"], "a live process is about to rename its file"
    assert read_json(run / "best" / "config.json")["model_type"] == "oelm_gpt"


class SignalledTwice:
    """Sends its process SIGTERM twice in a step, as Slurm does: once to the job, once to its step."""

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        step = Stepper.step

        def signalled_step(stepper, state):
            if state.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            step(stepper, state)

        os.environ["SLURM_JOB_ID"] = "17"
        Stepper.step = signalled_step


def test_in_a_slurm_job_a_signal_that_comes_twice_is_one(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", fields_of("baseline", tmp_path / "runs"))
    assert start("train", file, sabotage=SignalledTwice()).wait() == 75
    assert [path.name for path in list_checkpoints(folder_of(tmp_path / "runs") / "checkpoints")][-1] == "step-00000004"
