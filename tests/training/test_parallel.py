"""Training on many processes: the same numbers as on one, the same weights in all, and all processes end together."""

from __future__ import annotations

import shutil
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import oelm
from oelm.config import RunConfig
from oelm.evaluation.use import evaluate_run
from oelm.models.run_model import build_language_model
from oelm.runs.folder import read_metrics
from oelm.training.checkpoint import list_checkpoints
from oelm.training.engine import train
from oelm.training.tasks.text import open_dataset
from tests.support import finetuning
from tests.support.distributed import (
    At,
    Before,
    HeldInGroup,
    Torchrun,
    Watch,
    assert_close,
    fail,
    fields,
    finish,
    folder_of,
    hashes,
    hide_checkpoints,
    keep_first_wrapper,
    launch,
    poison,
    process_notes,
    tensors,
    wait_until,
)
from tests.support.training import Held, die, metrics_without_times, read, result_without_times

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
]

BOTH = ("ddp", "fsdp")
UNFREEZE = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [3, 7]}}
FREEZE = {"preset": "oelm-freeze", "schedule": {"kind": "freeze", "steps": [6]}}


def train_alone(config: dict[str, Any]) -> Path:
    """Train in this process and return the run's folder."""
    run = RunConfig.load(config)
    train(run, quiet=True)
    return run.folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single_run(runs: Path) -> Path:
    """Return the run on one process, with which all others are compared."""
    return train_alone(fields(runs / "one"))


@pytest.fixture(scope="module")
def ddp_run(runs: Path) -> Path:
    """Return the same run on two processes, by DDP."""
    return finish(fields(runs / "ddp"), sabotage=Watch(runs / "ddp-notes"))


@pytest.fixture(scope="module")
def fsdp_run(runs: Path) -> Path:
    """Return the same run on two processes, by FSDP."""
    return finish(fields(runs / "fsdp", "fsdp"), sabotage=Watch(runs / "fsdp-notes"))


@pytest.fixture(params=BOTH)
def parallel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def parallel_run(request: pytest.FixtureRequest, parallel: str) -> Path:
    """Return the same run on two processes, once by DDP and once by FSDP."""
    return Path(request.getfixturevalue(f"{parallel}_run"))


def assert_identical(run: Path, other: Path) -> None:
    """Require the same weights, optimiser state, metrics and result, to the bit."""
    assert hashes(run) == hashes(other)
    assert metrics_without_times(run) == metrics_without_times(other)
    assert result_without_times(run) == result_without_times(other)


# The same numbers


def test_two_processes_give_the_numbers_of_one(single_run: Path, parallel_run: Path) -> None:
    assert_close(parallel_run, single_run)


def test_frozen_weights_do_not_change(single_run: Path, parallel_run: Path, runs: Path, parallel: str) -> None:
    config = RunConfig.load(fields(runs / "start"))
    model = build_language_model(config.model, open_dataset(config.data.path).vocab_size, 32, config.seed)
    oelm.apply(model, config.method, config.seed)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 4
    final = tensors(parallel_run)
    for name, parameter in frozen.items():
        assert torch.equal(final[f"model/{name}"], parameter)
    for process in process_notes(runs / f"{parallel}-notes"):
        assert process["verified"] == 3, "at steps 5, 10 and 12"


def test_every_process_has_the_same_weights(parallel_run: Path, runs: Path, parallel: str) -> None:
    first, second = process_notes(runs / f"{parallel}-notes")
    assert first["weights"] == second["weights"] != {}


def test_nothing_holds_the_process_group_when_it_is_destroyed(parallel_run: Path, runs: Path, parallel: str) -> None:
    assert [process["leftovers"] for process in process_notes(runs / f"{parallel}-notes")] == [[], []]


def test_only_one_process_writes_the_records(single_run: Path, parallel_run: Path, parallel: str) -> None:
    lines = [(line.kind, line.step) for line in read_metrics(parallel_run)]
    assert len(set(lines)) == len(lines), "no line is written twice"
    assert read(parallel_run / "environment.json")["world_size"] == 2
    assert read(parallel_run / "status.json")["state"] == "finished"
    report, expected = read(parallel_run / "audit.json"), read(single_run / "audit.json")
    for row, expected_row in zip(report["rows"], expected["rows"], strict=True):
        same = row.pop("sha256") == expected_row.pop("sha256")
        assert same is (row["role"] in ("q", "k")), "frozen matrices are equal to the bit, trained ones are not"
    assert report == expected
    assert result_without_times(parallel_run).keys() == result_without_times(single_run).keys()
    assert {file.suffix for file in (parallel_run / "checkpoints").rglob("*") if file.is_file()} == {
        ".json",
        ".safetensors",
    }
    assert not list(parallel_run.rglob(".*"))
    (checkpoint,) = list_checkpoints(parallel_run / "checkpoints")
    assert len(list(checkpoint.glob("shards/*.safetensors"))) == (2 if parallel == "fsdp" else 0)


def test_the_best_model_loads_on_one_process(parallel_run: Path) -> None:
    model = oelm.load(parallel_run / "best")
    oelm.verify(model)
    best = read(parallel_run / "result.json")["best_val_loss"]
    assert evaluate_run(parallel_run, batch_size=5)["val_loss"] == pytest.approx(best, rel=1e-6)
    assert evaluate_run(parallel_run, last=True)["val_loss"] == pytest.approx(
        read(parallel_run / "result.json")["val_loss"], rel=1e-6
    )


@pytest.mark.full
def test_processes_can_train_several_runs_in_turn(ddp_run: Path, fsdp_run: Path, tmp_path: Path) -> None:
    first, second = (fields(tmp_path / parallel, parallel) for parallel in BOTH)
    finish(second, sabotage=Before(first))
    assert_identical(folder_of(tmp_path / "ddp"), ddp_run)
    assert_identical(folder_of(tmp_path / "fsdp"), fsdp_run)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 4])
def test_the_global_batch_is_the_same_for_any_number_of_processes(size: int, tmp_path: Path) -> None:
    finish(fields(tmp_path, train={"max_steps": 3}), size=size, sabotage=Watch(tmp_path / "notes"))
    for step in range(3):
        shares = [process["samples"][str(step)] for process in process_notes(tmp_path / "notes", size)]
        assert list(chain(*shares)) == list(range(8 * step, 8 * step + 8))
        assert {len(share) for share in shares} == {8 // size}


@pytest.mark.full
def test_accumulated_gradients_are_exchanged_once_per_step(parallel: str, single_run: Path, tmp_path: Path) -> None:
    config = fields(tmp_path, parallel, train={"micro_batch_size": 1})
    run = finish(config, sabotage=Watch(tmp_path / "notes"))
    assert_close(run, single_run)
    for process in process_notes(tmp_path / "notes"):
        assert process["without_sync"] == (12 * 3 if parallel == "ddp" else 0)
        assert all(len(samples) == 4 for samples in process["samples"].values())


@pytest.mark.full
def test_processes_stay_identical_under_a_freezing_schedule(tmp_path: Path) -> None:
    for name, method in (("unfreeze", UNFREEZE), ("freeze", FREEZE)):
        run = finish(fields(tmp_path / name, method=method), sabotage=Watch(tmp_path / f"{name}-notes"))
        first, second = process_notes(tmp_path / f"{name}-notes")
        assert first["weights"] == second["weights"]
        assert_close(run, train_alone(fields(tmp_path / f"{name}-alone", method=method)))


@pytest.mark.full
def test_processes_stay_identical_with_muon(tmp_path: Path) -> None:
    muon = {"optimizer": {"name": "muon"}}
    run = finish(fields(tmp_path / "two", **muon), sabotage=Watch(tmp_path / "notes"))
    first, second = process_notes(tmp_path / "notes")
    assert first["weights"] == second["weights"]
    assert hashes(finish(fields(tmp_path / "again", **muon))) == hashes(run)
    alone = read(train_alone(fields(tmp_path / "alone", **muon)) / "result.json")
    assert read(run / "result.json")["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-3)


@pytest.mark.full
def test_without_a_new_wrapper_a_schedule_makes_the_processes_diverge(tmp_path: Path) -> None:
    config = fields(tmp_path, method=UNFREEZE, train={"max_steps": 8})
    finish(config, sabotage=Watch(tmp_path / "notes", keep_first_wrapper))
    first, second = process_notes(tmp_path / "notes")
    assert {name for name in first["weights"] if first["weights"][name] != second["weights"][name]}


# Resuming


def kill_at_step(config: dict[str, Any], step: int, size: int) -> None:
    """Start a run and kill all its processes at the start of a step."""
    group = launch(config, size=size, sabotage=At(step, die))
    assert group.wait() == [-signal.SIGKILL] * size


@pytest.mark.sample(1)
def test_a_killed_run_resumes_exactly(parallel_run: Path, parallel: str, tmp_path: Path) -> None:
    config = fields(tmp_path, parallel)
    kill_at_step(config, 7, 2)
    assert_identical(finish(config), parallel_run)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_run_resumes_with_another_number_of_processes_only_if_allowed(
    before: int, after: int, parallel: str, single_run: Path, tmp_path: Path
) -> None:
    config = fields(tmp_path, parallel)
    kill_at_step(config, 7, before)
    refused = launch(config, size=after)
    assert refused.wait() == [2] * after
    assert all("world_size" in output and "inexact" in output for output in refused.outputs)
    run = finish(config, "checkpoint.resume=inexact", size=after)
    assert_close(run, single_run)
    (note,) = read(run / "result.json")["notes"]
    assert "step 5" in note
    assert f"world_size {before} then, {after} now" in note
    assert read(run / "environment.json")["world_size"] == after


@pytest.mark.full
def test_three_processes_resume_exactly(tmp_path: Path) -> None:
    """With three or more, the result of a sum depends on its order."""
    batch = {"train": {"batch_size": 12}}
    whole = finish(fields(tmp_path / "whole", **batch), size=3)
    kill_at_step(fields(tmp_path / "cut", **batch), 7, 3)
    assert_identical(finish(fields(tmp_path / "cut", **batch), size=3), whole)


@pytest.mark.full
def test_a_schedule_resumes_exactly(tmp_path: Path) -> None:
    config = fields(tmp_path / "cut", method=UNFREEZE, checkpoint={"every": 4})
    kill_at_step(config, 6, 2)
    whole = finish(fields(tmp_path / "whole", method=UNFREEZE, checkpoint={"every": 4}))
    assert_identical(finish(config, sabotage=Watch(tmp_path / "notes")), whole)
    first, second = process_notes(tmp_path / "notes")
    assert first["weights"] == second["weights"]


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (Path.unlink, "missing"),
        (flip, "has changed since it was written"),
        (lambda shard: shutil.copy(shard, shard.with_name("another.safetensors")), "was not there"),
    ],
)
def test_a_damaged_shard_is_an_error_that_names_it(damage: Any, problem: str, tmp_path: Path) -> None:
    config = fields(tmp_path, "fsdp")
    kill_at_step(config, 7, 2)
    shard = max(tmp_path.rglob("shards/*.safetensors"))
    damage(shard)
    group = launch(config)
    assert group.wait() == [2, 2]
    name = "another.safetensors" if problem == "was not there" else shard.name
    assert all(f"{name}: {problem}" in output for output in group.outputs)


# Signals to stop


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "number"), [("ddp", signal.SIGTERM), ("fsdp", signal.SIGUSR2)], indirect=["parallel"]
)
def test_a_signal_to_one_process_stops_all_at_the_same_step(
    number: int, parallel: str, parallel_run: Path, tmp_path: Path
) -> None:
    """The signalled process is held at step 3 until the signal arrives, and the other one waits for it there."""
    config = fields(tmp_path, parallel, log={"every": 12})
    notes = tmp_path / "notes"
    group = launch(config, sabotage={0: Watch(notes), 1: Watch(notes, HeldInGroup(3))})
    run = folder_of(tmp_path)
    wait_until(lambda: (run / "metrics.jsonl").is_file())
    group.signal(number, 1)
    assert group.wait() == [75, 75]
    status = read(run / "status.json")
    assert status["state"] == "stopped"
    assert 0 < status["step"] <= 4
    assert [len(process["samples"]) for process in process_notes(notes)] == [status["step"]] * 2
    assert [process["leftovers"] for process in process_notes(notes)] == [[], []]
    finish(config, "log.every=3")
    assert hashes(run) == hashes(parallel_run)
    assert result_without_times(run) == result_without_times(parallel_run)


@pytest.mark.full
def test_a_repeated_signal_counts_once_in_a_group(ddp_run: Path, tmp_path: Path) -> None:
    """A launcher passes on a signal that the scheduler may have sent to every process already."""
    group = launch(fields(tmp_path), sabotage=HeldInGroup(3))
    wait_until(lambda: (folder_of(tmp_path) / "metrics.jsonl").is_file())
    group.signal(signal.SIGTERM)
    group.signal(signal.SIGTERM)
    assert group.wait() == [75, 75]
    assert_identical(finish(fields(tmp_path)), ddp_run)


# Failures


def assert_resumes(config: dict[str, Any], run: Path) -> None:
    """Require that the folder is free again and that the run ends like one that never failed."""
    assert_identical(finish(config), run)


def test_a_batch_that_the_processes_cannot_share_is_refused_by_all(tmp_path: Path) -> None:
    group = launch(fields(tmp_path), size=3)
    assert group.wait() == [2, 2, 2]
    for output in group.outputs:
        assert "train.batch_size 8" in output
        assert "3 processes" in output


@pytest.mark.full
@pytest.mark.parametrize(("parallel", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)], indirect=["parallel"])
def test_a_failure_of_one_process_ends_all(rank: int, parallel: str, parallel_run: Path, tmp_path: Path) -> None:
    config = fields(tmp_path, parallel)
    watch = Watch(tmp_path / "notes")
    group = launch(config, sabotage={rank: Watch(tmp_path / "notes", At(7, fail)), 1 - rank: watch})
    codes = group.wait()
    assert codes[rank] == 1
    assert codes[1 - rank] == 2
    assert [process["leftovers"] for process in process_notes(tmp_path / "notes")] == [[], []]
    assert "ValueError: this window cannot be read" in group.outputs[rank]
    status = read(folder_of(tmp_path) / "status.json")
    assert status["state"] == "failed"
    if rank == 1:  # the first process writes the records, and got the reason from the second
        assert "process 1" in group.outputs[0]
        assert repr(ValueError("this window cannot be read")) in group.outputs[0]
        assert "this window cannot be read" in status["message"]
    assert_resumes(config, parallel_run)


@pytest.mark.full
def test_a_non_finite_gradient_in_one_process_ends_all(parallel: str, tmp_path: Path) -> None:
    group = launch(fields(tmp_path, parallel), sabotage={1: At(3, poison)})
    assert group.wait() == [2, 2]
    for output in group.outputs:
        assert "step 3 (samples 24 to 31 of the run)" in output
        assert "non-finite gradient" in output
    assert "non-finite gradient" in read(folder_of(tmp_path) / "status.json")["message"]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all(rank: int, ddp_run: Path, tmp_path: Path) -> None:
    config = fields(tmp_path)
    group = launch(config, sabotage={rank: At(7, die)})
    codes = group.wait()
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 2
    assert "lost contact with another process" in group.outputs[1 - rank]
    assert_resumes(config, ddp_run)


@pytest.mark.full
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    config = fields(tmp_path)
    first = launch(config, sabotage=Held(3, until=tmp_path / "second has ended"))
    wait_until(lambda: (folder_of(tmp_path) / "metrics.jsonl").is_file())
    second = launch(config)
    assert second.wait() == [2, 2]
    assert "in use by process" in second.outputs[0]
    (tmp_path / "second has ended").touch()
    assert first.wait() == [0, 0]
    assert read(folder_of(tmp_path) / "status.json")["state"] == "finished"


@pytest.mark.full
def test_processes_that_see_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """As on machines that do not share their file system."""
    config = fields(tmp_path)
    kill_at_step(config, 7, 2)
    group = launch(config, sabotage={1: hide_checkpoints})
    assert group.wait() == [2, 2]
    for rank, (output, name) in enumerate(zip(group.outputs, ("step-00000005", "none"), strict=True)):
        assert f"process {rank} has {name}" in output.replace("\n", " ")


# Fine-tuning, with padded batches and a short last batch


@pytest.mark.full
@pytest.mark.parametrize("parallel", BOTH)
@pytest.mark.parametrize("form", ["labels", "text"])
def test_two_processes_fine_tune_with_the_numbers_of_one(form: str, parallel: str, tmp_path: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = {"labels": ("random:bert", no_dropout), "text": ("random:bart", {"dropout": 0.0})}[form]

    def config(place: str) -> dict[str, Any]:
        return finetuning.fields(
            tmp_path / place,
            experiment="run",
            method="oelm-freeze",
            task={"name": "builtin:inference", "form": form},
            data={"fraction": 0.02},
            train={"parallel": parallel, "max_steps": 8},
            eval={"every": 4, "sequences": 70, "batch_size": 20, "generations": 7 if parallel == "ddp" else 0},
        ) | {"model": {"name": model[0], "fields": model[1]}}

    assert_close(finish(config("two")), train_alone(config("one")))


@pytest.mark.full
def test_a_sharded_run_notes_once_that_it_writes_no_answers(tmp_path: Path) -> None:
    config = finetuning.fields(
        tmp_path,
        experiment="run",
        method="oelm-freeze",
        task={"name": "builtin:inference", "form": "text"},
        data={"fraction": 0.02},
        train={"parallel": "fsdp", "max_steps": 4},
        eval={"every": 4, "sequences": 8, "generations": 3},
        checkpoint={"every": 2},
    ) | {"model": {"name": "random:bart"}}
    kill_at_step(config, 3, 2)
    (note,) = read(finish(config) / "result.json")["notes"]
    assert "sharded model writes no answers" in note


# Under torchrun, whose exit code is 1 whatever the exit codes of its processes are


@pytest.mark.full
def test_a_signal_to_torchrun_stops_all(ddp_run: Path, tmp_path: Path) -> None:
    config = fields(tmp_path)
    torchrun = Torchrun(config, sabotage="hold")
    wait_until(lambda: (folder_of(tmp_path) / "metrics.jsonl").is_file())
    torchrun.signal(signal.SIGTERM)
    code, output = torchrun.wait()
    assert code == 1
    status = read(folder_of(tmp_path) / "status.json")
    assert (status["state"], status["signal"]) == ("stopped", "SIGTERM"), output
    assert f"stopped by SIGTERM at step {status['step']}: saved" in output
    code, output = Torchrun(config).wait()
    assert code == 0, output
    assert f"resumed from step {status['step']}" in output
    assert_identical(folder_of(tmp_path), ddp_run)


@pytest.mark.full
def test_torchrun_ends_when_a_restarted_run_fails_again(fsdp_run: Path, tmp_path: Path) -> None:
    config = fields(tmp_path, "fsdp")
    code, output = Torchrun(config, "--max-restarts", "1", sabotage="fail").wait()
    assert code == 1
    assert output.count("ValueError: this window cannot be read") == 2, output
    assert output.count("resumed from step 5") == 1
    status = read(folder_of(tmp_path) / "status.json")
    assert (status["state"], status["step"]) == ("failed", 6)
    assert_resumes(config, fsdp_run)
