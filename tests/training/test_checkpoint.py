"""A run's folder when things go wrong: full disks, damaged files, other runs and processes, failing trackers."""

import errno
import hashlib
import os
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import oelm
from oelm import analysis
from oelm.base import files
from oelm.base.files import read_json, write_json
from oelm.base.manifest import FileMark, files_in, write_manifest
from oelm.config import RunConfig
from oelm.errors import CheckpointError, ConfigError, FileError
from oelm.evaluation.load import load_run
from oelm.runs import schema
from oelm.runs.folder import RunFolder, differing, line_to_json, read_metrics
from oelm.runs.schema import AttentionLine, Clock, EventLine, TrainLine
from oelm.training import build, engine
from oelm.training.checkpoint import list_checkpoints, read_checkpoint
from oelm.training.engine import train
from tests.support.disks import NoSpaceCheck
from tests.support.training import (
    Held,
    assert_same_run,
    config,
    die,
    final_tensors,
    mounted,
    read,
    run_here,
    run_to_end,
    start,
    tiny,
    token_folder,
    write_yaml,
)


def checkpoint_names(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def update_manifest(checkpoint: Path) -> None:
    """Make a checkpoint's manifest agree with its files, which a test has changed."""
    write_manifest(checkpoint, {name: FileMark.of(checkpoint / name) for name in files_in(checkpoint)})


class SimulatedBug(Exception):
    """Ends a run at a chosen step."""


def fail_at(monkeypatch, step: int) -> None:
    """Make runs in this process fail at the start of a step, as a bug would."""
    from oelm.training.step import Stepper

    original_step = Stepper.step

    def failing_step(stepper, counters):
        if counters.step == step:
            raise SimulatedBug
        original_step(stepper, counters)

    monkeypatch.setattr(Stepper, "step", failing_step)


@pytest.fixture
def failed_run(tmp_path, monkeypatch) -> Path:
    """Return a run that failed in its eighth step, with a checkpoint at step 5."""
    with monkeypatch.context() as patched:
        fail_at(patched, 7)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path / "runs")
    return config(tmp_path / "runs").folder


# Checkpoints


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(1, [12]), (2, [10, 12]), (3, [8, 10, 12]), (99, [2, 4, 6, 8, 10, 12])],
)
def test_only_the_last_checkpoints_are_kept(keep, expected, tmp_path):
    run_here(tmp_path, checkpoint={"every": 2, "keep": keep})
    run = config(tmp_path).folder
    assert checkpoint_names(run) == [f"step-{step:08d}" for step in expected]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == checkpoint_names(run)


def test_a_run_can_do_without_a_best_model(tmp_path):
    run_here(tmp_path, checkpoint={"best": False})
    run = config(tmp_path).folder
    assert not (run / "best").exists()
    assert load_run(run).config.vocab_size == 400


def test_a_stale_best_model_is_not_loaded(failed_run, tmp_path):
    """The first part of the run kept its best model of step 4; the second part keeps none and was best at step 12."""
    assert torch.equal(load_run(failed_run).lm_head.weight, oelm.load(failed_run / "best").lm_head.weight)
    result = run_here(tmp_path / "runs", checkpoint={"best": False})
    assert result["best_step"] == 12
    message = r"step 4\b.* step 12\b.* last checkpoint"
    with pytest.warns(UserWarning, match=message):
        assert torch.equal(load_run(failed_run).lm_head.weight, load_run(failed_run, last=True).lm_head.weight)
    (failed_run / "result.json").unlink()
    with pytest.warns(UserWarning, match=message):
        load_run(failed_run)


def test_a_best_model_that_is_newer_than_the_last_checkpoint_is_loaded(tmp_path, monkeypatch):
    fail_at(monkeypatch, 9)
    with pytest.raises(SimulatedBug):
        run_here(tmp_path)
    run = config(tmp_path).folder
    assert (checkpoint_names(run), read(run / "best/step.json")) == (["step-00000005"], {"step": 8})
    assert torch.equal(load_run(run).lm_head.weight, oelm.load(run / "best").lm_head.weight)


def test_only_complete_checkpoints_are_listed(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("step-00000002", ".step-00000003.tmp", "step-00000001", "step-100000000", "step-7", "step-00000009"):
        (folder / name).mkdir(parents=True)
        if name != "step-00000009":
            (folder / name / "state.json").write_text("{}")
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000001", "step-00000002", "step-100000000"]


def test_a_run_can_be_resumed_after_an_unexpected_error(failed_run, tmp_path):
    assert read(failed_run / "status.json")["state"] == "failed"
    assert checkpoint_names(failed_run) == ["step-00000005"]
    run_here(tmp_path / "runs")
    run_here(tmp_path / "whole")
    assert_same_run(failed_run, config(tmp_path / "whole").folder)
    log = (failed_run / "train.log").read_text()
    assert "failed: " in log
    assert "resumed from step 5" in log


def test_a_target_that_was_reached_before_a_resume_is_in_the_result(tmp_path, monkeypatch):
    changes = {"eval": {"every": 4, "targets": [1e6]}}
    with monkeypatch.context() as patched:
        fail_at(patched, 7)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, **changes)
    run_here(tmp_path, **changes)
    (reached,) = schema.read(config(tmp_path, **changes).folder / "result.json", schema.Result).reached.values()
    assert (reached.step, reached.tokens) == (4, 4 * 8 * 32)


def test_step_times_from_two_gpus_are_marked_as_not_comparable(tmp_path, monkeypatch):
    run_identity, not_deterministic = build.run_identity, {"train": {"max_steps": 24, "deterministic": False}}

    def pretend_gpu(gpu):
        monkeypatch.setattr(build, "run_identity", lambda *arguments: {**run_identity(*arguments), "gpu": gpu})

    for folder, changes in ((tmp_path / "loose", not_deterministic), (tmp_path / "exact", {})):
        pretend_gpu("A")
        with monkeypatch.context() as patched:
            fail_at(patched, 7)
            with pytest.raises(SimulatedBug):
                run_here(folder, **changes)
    pretend_gpu("B")
    with pytest.raises(ConfigError, match=r"gpu A then, B now"):
        run_here(tmp_path / "exact")
    run_here(tmp_path / "loose", **not_deterministic)
    doubt = analysis.load_run(config(tmp_path / "loose", **not_deterministic).folder).times_doubt
    assert all(part in doubt for part in ("step 5", "gpu A then, B now"))


def test_a_run_with_a_parameter_without_gradient_resumes_exactly(tmp_path, monkeypatch):
    """GPT-2's cross-attention is trainable, but a language model never uses it."""
    model = {"model": {"name": "random:gpt2-cross", "fields": {"vocab_size": 400}}}
    runs, whole = (RunConfig.load({**tiny(tmp_path / name), **model}) for name in ("runs", "whole"))
    with monkeypatch.context() as patched:
        fail_at(patched, 7)
        with pytest.raises(SimulatedBug):
            train(runs, quiet=True)
    train(runs, quiet=True)
    train(whole, quiet=True)
    assert_same_run(runs.folder, whole.folder)


def test_a_checkpoint_without_optimiser_state_is_refused(failed_run, tmp_path):
    from safetensors.torch import load_file, save_file

    file = failed_run / "checkpoints/step-00000005/tensors.safetensors"
    remaining = {
        name: value for name, value in load_file(file).items() if "/transformer.h.0.mlp.fc_in.bias" not in name
    }
    remaining["model/transformer.h.0.mlp.fc_in.bias"] = load_file(file)["model/transformer.h.0.mlp.fc_in.bias"]
    save_file(remaining, file)
    update_manifest(file.parent)
    with pytest.raises(CheckpointError, match=r"3 tensors .*exp_avg/transformer\.h\.0\.mlp\.fc_in\.bias"):
        run_here(tmp_path / "runs")


def test_the_times_of_a_resumed_run_include_all_its_parts(tmp_path, monkeypatch):
    changes = {"train": {"max_steps": 24}, "checkpoint": {"every": 12}}
    with monkeypatch.context() as patched:
        fail_at(patched, 14)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, **changes)
    run = config(tmp_path, **changes).folder
    first_validation_seconds = read_json(run / "checkpoints/step-00000012/state.json")["seconds_apart"]["validation"]
    run_here(tmp_path, **changes)
    timing = read(run / "timing.json")
    assert (timing["warmup_steps"], timing["steps"]) == (20, 4), "each of the two processes has 10 warm-up steps"
    assert timing["seconds_apart"]["validation"] > first_validation_seconds
    assert set(timing["seconds_apart"]) == {"validation", "checkpoint", "log"}


def test_the_seconds_in_a_checkpoint_include_the_validation_before_it(tmp_path, monkeypatch):
    validate = engine.validate

    def slow_validate(*arguments):
        time.sleep(0.5)
        return validate(*arguments)

    monkeypatch.setattr(engine, "validate", slow_validate)
    fail_at(monkeypatch, 5)
    with pytest.raises(SimulatedBug):
        run_here(tmp_path, checkpoint={"every": 4})
    counters = read_checkpoint(config(tmp_path).folder / "checkpoints/step-00000004").state
    assert counters.seconds > 0.5


def test_a_truncated_tensor_file_is_a_clear_error(failed_run, tmp_path):
    file = failed_run / "checkpoints/step-00000005/tensors.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    metrics = (failed_run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"step-00000005/tensors.safetensors: has \d+ of \d+ bytes"):
        run_here(tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"step-00000005/tensors.safetensors: has \d+ of \d+ bytes"):
        load_run(failed_run, last=True)
    assert (failed_run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "state.json: cannot be read as JSON"),
        ("{}", r"format is None\b.*\b4\b.*checkpoints"),
        ('{"format": 3}', r"format is 3\b.*\b4\b"),
    ],
)
def test_a_damaged_state_file_is_a_clear_error(content, message, failed_run, tmp_path):
    (failed_run / "checkpoints/step-00000005/state.json").write_text(content)
    with pytest.raises((CheckpointError, FileError), match=message):
        run_here(tmp_path / "runs")


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize(("keep", "next_start"), [(1, "beginning"), (2, "step-00000002")])
def test_the_error_for_a_damaged_checkpoint_says_where_the_run_would_start(
    file, keep, next_start, tmp_path, monkeypatch
):
    changes = {"checkpoint": {"every": 2, "keep": keep}}
    with monkeypatch.context() as patched:
        fail_at(patched, 5)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, **changes)
    newest = config(tmp_path).folder / "checkpoints/step-00000004"
    os.truncate(newest / file, (newest / file).stat().st_size // 2)
    with pytest.raises(CheckpointError) as error:
        run_here(tmp_path, **changes)
    assert str(newest / file) in str(error.value)
    assert f"folder {newest}" in str(error.value), "the one to delete"
    assert str(error.value).endswith(next_start)
    shutil.rmtree(newest)
    assert run_here(tmp_path, **changes)["steps"] == 12
    log = (config(tmp_path).folder / "train.log").read_text()
    assert ("resumed from step 2" in log) == (keep == 2)


def test_a_flipped_bit_in_a_frozen_tensor_is_found_on_resume(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    with monkeypatch.context() as patched:
        fail_at(patched, 7)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, method="oelm-freeze")
    run = config(tmp_path, method="oelm-freeze").folder
    file = run / "checkpoints/step-00000005/tensors.safetensors"
    tensors = load_file(file)
    tensors["model/transformer.h.1.attn.k_proj.weight"][3, 3] += 1e-3
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors: has changed"):
        run_here(tmp_path, method="oelm-freeze")
    update_manifest(file.parent)
    from oelm.errors import FreezeError

    with pytest.raises(FreezeError, match=r"h.1.attn.k_proj.weight: its content changed"):
        run_here(tmp_path, method="oelm-freeze")


def test_the_error_for_a_checkpoint_without_state_file_says_where_the_run_would_start(failed_run, tmp_path):
    checkpoint = failed_run / "checkpoints/step-00000005"
    (checkpoint / "state.json").unlink()
    with pytest.raises(CheckpointError) as error:
        run_here(tmp_path / "runs")
    assert f"{checkpoint / 'state.json'}: missing" in str(error.value)
    assert f"folder {checkpoint}" in str(error.value), "the one to delete"
    assert str(error.value).endswith("beginning")


def test_a_missing_metrics_file_is_noted_in_the_result(failed_run, tmp_path):
    (failed_run / "metrics.jsonl").unlink()
    result = run_here(tmp_path / "runs")
    assert any("metrics.jsonl" in note for note in result["notes"])


@pytest.mark.parametrize("damage", ["a digit", "a line", "nonsense"])
def test_metrics_that_changed_since_the_checkpoint_are_noted_in_the_result(damage, failed_run, tmp_path):
    file = failed_run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    changed = {
        "a digit": [lines[0], lines[1].replace("1", "2", 1), *lines[2:]],
        "a line": [lines[0], *lines[2:]],
        "nonsense": [lines[0], "{nonsense\n", *lines[2:]],
    }
    file.write_text("".join(changed[damage]))
    result = run_here(tmp_path / "runs")
    assert [note for note in result["notes"] if "step 5: " in note and "lost or were changed" in note]
    assert read_metrics(failed_run)


def test_metrics_that_are_as_they_were_are_not_noted(failed_run, tmp_path):
    assert run_here(tmp_path / "runs")["notes"] == []


def test_the_result_of_another_run_is_not_taken_for_this_ones(tmp_path):
    run_here(tmp_path)
    run_here(tmp_path, seed=1)
    shutil.copy(config(tmp_path, seed=1).folder / "result.json", config(tmp_path).folder / "result.json")
    with pytest.raises(FileError, match=r"result\.json: is another run's.*Delete the file"):
        run_here(tmp_path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(failed_run, tmp_path):
    checkpoint = failed_run / "checkpoints/step-00000005"
    checkpoint.rename(failed_run / "checkpoints/step-00000006")
    with pytest.raises(CheckpointError, match=r"state\.json: is of step 5\. Delete the folder .*step-00000006"):
        run_here(tmp_path / "runs")


def test_a_state_of_other_types_is_refused_though_its_hash_fits(failed_run, tmp_path):
    checkpoint = failed_run / "checkpoints/step-00000005"
    content = read_json(checkpoint / "state.json")
    content["state"]["tokens"] = "many"
    write_json(checkpoint / "state.json", content)
    with pytest.raises(CheckpointError, match=r"state\.json: has \d+ of \d+ bytes"):
        run_here(tmp_path / "runs")
    update_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"state\.json: state\.tokens"):
        run_here(tmp_path / "runs")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "step.json"])
def test_a_best_model_that_changed_is_not_used(file, failed_run):
    content = bytearray((failed_run / "best" / file).read_bytes())
    content[-3] ^= 1
    (failed_run / "best" / file).write_bytes(content)
    with pytest.raises((CheckpointError, FileError), match=f"best/{file}"):
        load_run(failed_run)


def test_a_damaged_result_says_what_to_do(tmp_path):
    first = run_here(tmp_path)
    file = config(tmp_path).folder / "result.json"
    file.write_text("{")
    with pytest.raises(FileError, match=r"result\.json: .*[Dd]elete the file"):
        run_here(tmp_path)
    file.unlink()
    assert run_here(tmp_path)["val_loss"] == first["val_loss"]


def test_a_checkpoint_of_another_run_is_refused(failed_run, tmp_path):
    """The checkpoint was copied by hand, from a run with the same method or another one."""
    other = config(tmp_path / "other", seed=1)
    (other.folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(failed_run / "checkpoints/step-00000005", other.folder / "checkpoints/step-00000005")
    with pytest.raises(CheckpointError, match="belongs to another config"):
        train(other, quiet=True)

    method = config(tmp_path / "method", method="oelm-core")
    copied = method.folder / "checkpoints/step-00000005"
    shutil.copytree(failed_run / "checkpoints/step-00000005", copied)
    content = read_json(copied / "state.json")
    content["identity"]["id"] = method.id
    write_json(copied / "state.json", content)
    update_manifest(copied)
    with pytest.raises(CheckpointError, match=r"does not fit this run: \d+ tensors differ"):
        train(method, quiet=True)


def test_other_data_under_the_same_name_is_refused(tmp_path, monkeypatch):
    """Even where an inexact resume is allowed: on other data it would be another run."""
    tokens = shutil.copytree(token_folder(), tmp_path / "tokens")
    changes = {"data": {"path": str(tokens)}, "checkpoint": {"resume": "inexact"}}
    with monkeypatch.context() as patched:
        fail_at(patched, 7)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, **changes)
    changed = np.fromfile(tokens / "train.bin", "<u2")[::-1].tobytes()  # the same tokens in another order
    (tokens / "train.bin").write_bytes(changed)
    content = read_json(tokens / "data.json")
    content["splits"]["train"]["sha256"] = hashlib.sha256(changed).hexdigest()
    del content["sha256"]
    write_json(tokens / "data.json", content)
    with pytest.raises(CheckpointError, match=r"data\.path .*tokens has changed"):
        run_here(tmp_path, **changes)


# Disks


def test_a_full_disk_is_an_error_before_anything_is_written(failed_run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    with pytest.raises(FileError, match=r"MB .*67 MB .*10\.0 MB"):
        run_here(tmp_path / "runs")
    assert checkpoint_names(failed_run) == ["step-00000005"]
    load_run(failed_run, last=True)
    monkeypatch.undo()
    run_here(tmp_path / "runs")
    run_here(tmp_path / "whole")
    assert_same_run(failed_run, config(tmp_path / "whole").folder)


def test_a_run_without_room_for_a_checkpoint_takes_no_step(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    with pytest.raises(FileError, match=r"67 MB .*10\.0 MB"):
        run_here(tmp_path)
    assert not read_metrics(config(tmp_path).folder)
    monkeypatch.undo()
    assert run_here(tmp_path)["steps"] == 12


SAVING = {"checkpoint": {"every": 2, "keep": 5}}
KEEPING_BEST = {"eval": {"every": 1}, "checkpoint": {"every": 50}}
LOGGING = {"log": {"every": 1}, "checkpoint": {"every": 500}, "eval": {"every": 500}, "train": {"max_steps": 120}}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "changes"),
    [("100k", SAVING), ("700k", SAVING), ("1400k", SAVING), ("150k", KEEPING_BEST), ("36k", LOGGING)],
    ids=["first-checkpoint", "second-checkpoint", "third-checkpoint", "best", "metrics"],
)
def test_a_disk_that_fills_up_is_reported_in_one_line(size, changes, tmp_path):
    """On a real, tiny file system: no traceback, no partial checkpoint, and an exact resume once there is room."""
    fields = tiny(tmp_path / "disk", **changes)
    file = write_yaml(tmp_path / "run.yaml", fields)
    with mounted(tmp_path / "disk", f"size={size}"):
        process = start("train", file, sabotage=NoSpaceCheck())
        assert process.wait() == 2, process.output
        assert "Traceback" not in process.output
        (message,) = [line for line in process.output.splitlines() if line.startswith("oelm: ")]
        assert "No space left on device" in message
        run = RunConfig.load(fields).folder
        complete = ["manifest.json", "state.json", "tensors.safetensors"]
        assert all(sorted(os.listdir(path)) == complete for path in list_checkpoints(run / "checkpoints"))
        assert [path for path in run.rglob("*.tmp") if path.is_dir()] == [], "incomplete folders were removed"
        shutil.copytree(run, tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", run)
    run_to_end("train", file)
    run_here(tmp_path / "whole", **changes)
    assert_same_run(run, config(tmp_path / "whole", **changes).folder)


@pytest.mark.parametrize(
    ("earlier", "checkpoint_left"), [(False, "no earlier checkpoint"), (True, "step-00000005 is intact")]
)
def test_a_disk_that_reports_no_room_only_when_flushed_is_a_clear_error(
    earlier, checkpoint_left, tmp_path, monkeypatch
):
    """As on a network file system: every write succeeds, and the flush reports that there is no room."""
    if earlier:
        with monkeypatch.context() as patched:
            fail_at(patched, 7)
            with pytest.raises(SimulatedBug):
                run_here(tmp_path)
    real_sync = files.sync

    def refuse(path):
        if path.name == "tensors.safetensors":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real_sync(path)

    monkeypatch.setattr(files, "sync", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot be written \(.*quota exceeded\); .*{checkpoint_left}$"):
        run_here(tmp_path)


def test_a_read_only_disk_is_a_clear_error(tmp_path):
    with mounted(tmp_path / "disk", "ro,size=1m"), pytest.raises(FileError, match="Read-only file system"):
        run_here(tmp_path / "disk")


def test_an_output_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(FileError, match="cannot be written"):
        run_here(tmp_path / "runs")
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_a_clear_error(tmp_path, monkeypatch):
    """Tests may run as root, who may write anywhere, so the system's refusal is simulated."""
    real_mkdir = Path.mkdir

    def refuse(path, *arguments, **options):
        if "runs" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FileError, match=r"cannot be written \(Permission denied\)"):
        run_here(tmp_path / "runs")


# Other runs, other processes


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path):
    run_here(tmp_path)
    run = config(tmp_path).folder
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "lock"}
    changes = {"optimizer": {"learning_rate": 0.1}, "train": {"max_steps": 13}, "model": {"fields": {"dropout": 0.3}}}
    with pytest.raises(ConfigError) as error:
        run_here(tmp_path, **changes)
    message = str(error.value)
    assert str(run) in message
    assert "model.fields.dropout, optimizer.learning_rate, train.max_steps" in message
    assert {file: file.read_bytes() for file in before} == before
    assert run_here(tmp_path)["steps"] == 12, "the refusal released the folder"


def test_a_run_that_was_refused_before_its_first_step_can_be_corrected(tmp_path):
    """A folder made for it is removed; one that existed, such as a matrix's, records the reason and can be reused."""
    run = config(tmp_path).folder
    other_folder = run.parent.with_name("other")
    other_folder.mkdir(parents=True)
    for existed in (False, True):
        if existed:
            run.mkdir(parents=True)
        with pytest.raises(ConfigError, match="16 positions"):
            run_here(tmp_path, model={"fields": {"max_position_embeddings": 16}})
        assert [path.exists() for path in (other_folder, run.parent, run)] == [True, existed, existed]
    assert "16 positions" in read(run / "status.json")["message"]
    assert run_here(tmp_path)["steps"] == 12


def test_a_run_that_failed_in_its_first_step_can_be_corrected(tmp_path, monkeypatch):
    """It recorded its attention and trained nothing, so only its log is kept."""
    run = config(tmp_path).folder
    with monkeypatch.context() as patch:
        fail_at(patch, step=0)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, data={"sequence_length": 48})
    assert {line.step for line in read_metrics(run)} == {0}
    with pytest.raises(ConfigError, match="16 positions"):
        run_here(tmp_path, model={"fields": {"max_position_embeddings": 16}})
    assert sorted(file.name for file in run.glob("*.json*")) == ["config.json", "status.json"], (
        "nothing of the first run is left"
    )
    assert run_here(tmp_path)["steps"] == 12
    run_here(tmp_path / "clean")
    assert_same_run(run, config(tmp_path / "clean").folder)
    assert "failed: " in (run / "train.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "leftover", ["a line of metrics", "checkpoints/step-00000001", "checkpoints/.step-00000001.tmp", "best"]
)
def test_a_folder_with_a_recorded_step_refuses_another_config(leftover, tmp_path):
    run = config(tmp_path).folder
    folder = RunFolder(config(tmp_path))
    folder.claim()
    folder.start_metrics(0)
    folder.metric(AttentionLine(step=0, layers=[]))
    if leftover == "a line of metrics":
        folder.metric(TrainLine(step=1, tokens=8, loss=1.0, time=Clock(seconds=1.0)))
    else:
        (run / leftover).mkdir()
    folder.close()
    before = sorted(run.rglob("*")), (run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"train\.max_steps"):
        run_here(tmp_path, train={"max_steps": 13})
    assert (sorted(run.rglob("*")), (run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes()) == before


def test_a_folder_of_a_live_process_refuses_another_config(tmp_path):
    first, second = RunFolder(config(tmp_path)), RunFolder(config(tmp_path, train={"max_steps": 13}))
    first.claim()
    first.start_metrics(0)
    with pytest.raises(FileError, match="in use by process"):
        second.claim()
    assert (first / "metrics.jsonl").exists()
    first.close()
    second.claim()
    assert read(second / "config.json")["train"]["max_steps"] == 13
    second.close()


def test_settings_without_effect_on_numbers_may_change_on_resume(failed_run, tmp_path):
    result = run_here(tmp_path / "runs", log={"every": 1, "note": "later"}, checkpoint={"every": 4, "keep": 2})
    assert result["notes"] == ["later"]
    assert checkpoint_names(failed_run) == ["step-00000008", "step-00000012"]
    run_here(tmp_path / "whole")
    assert final_tensors(failed_run) == final_tensors(config(tmp_path / "whole").folder)


def test_a_folder_in_use_by_a_live_process_is_refused(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    process = start("train", file, sabotage=Held(3))
    run = config(tmp_path / "runs").folder
    process.wait_for((run / "metrics.jsonl").exists)
    second = start("train", file)
    assert second.wait() == 2
    assert second.output.startswith(f"oelm: {run}: in use by process {process.pid} on ")
    assert len(second.output.splitlines()) == 1
    assert process.alive
    process.signal(signal.SIGKILL)
    process.wait()
    free = RunFolder(config(tmp_path / "runs"))
    free.claim()  # the lock ended with its process
    free.close()


class DieInFirstStep:
    """Kills its process in the first step."""

    def __call__(self):
        from oelm.training.step import Stepper

        Stepper.step = lambda stepper, counters: die()


def test_the_folder_of_a_dead_process_is_free(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    assert start("train", file, sabotage=DieInFirstStep()).wait() == -signal.SIGKILL
    run = config(tmp_path / "runs").folder
    assert read(run / "status.json")["state"] == "running", "it had no time to write another state"
    run_to_end("train", file)
    assert read(run / "status.json")["state"] == "finished"


# Metrics


def test_metrics_are_read_up_to_a_truncated_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first, second, third = (line_to_json(AttentionLine(step=step, layers=[])) for step in (1, 2, 3))
    complete = f"{first}\n{second}\n"
    for truncated in ("", '{"kind": "tr', third, '{"kind": "tr\n', "\x00\x00\x00\n"):
        file.write_text(complete + truncated)
        assert [line.step for line in read_metrics(tmp_path)] == [1, 2], repr(truncated)
    file.write_text('{"kind": "tr\n' + complete)
    with pytest.raises(FileError, match=r"metrics.jsonl: line 1 is damaged"):
        read_metrics(tmp_path)
    file.unlink()
    assert read_metrics(tmp_path) == []


def test_a_resume_drops_the_metrics_of_steps_that_are_repeated(tmp_path):
    folder = RunFolder(config(tmp_path))
    folder.claim()
    folder.start_metrics(0)
    for step in range(1, 6):
        folder.metric(EventLine(step=step - 1, event="freeze", matrices=[], trainable=0))
        folder.metric(TrainLine(step=step, tokens=8 * step, loss=float(step), time=Clock(seconds=1.0)))
    folder.start_metrics(3)
    folder.metric(TrainLine(step=4, tokens=32, loss=float("nan"), time=Clock(seconds=1.0)))
    folder.close()
    lines = [(line.kind, line.step) for line in read_metrics(folder.path)]
    assert lines == [
        ("event", 0),
        *(pair for s in (1, 2) for pair in (("train", s), ("event", s))),
        ("train", 3),
        ("train", 4),
    ]
    assert read_metrics(folder.path)[-1].loss is None


def test_differing_fields_have_dotted_names():
    first = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "output": "x", "log": {"every": 1}}
    second = {"a": 1, "b": {"c": 5, "d": {"e": 4}}, "output": "y", "log": {"every": 2}, "f": None, "g": 1}
    assert differing(first, first) == []
    assert differing(first, second) == ["b.c", "b.d.e", "g"]


# Trackers


def fake_module(monkeypatch, name: str, **parts: object) -> None:
    """Put a module with the given attributes into sys.modules."""
    module = types.ModuleType(name)
    for key, value in parts.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


class FakeTracker:
    """Records what a run sends to its tracker; if `fails`, sending and closing raise."""

    def __init__(self, fails: bool = False) -> None:
        self.sent, self.fails, self.finished, self.step, self._next_step = [], fails, 0, 0, 0

    def init(self, **options):
        self.options = options
        return self

    def log(self, values, step):
        if self.fails:
            raise ConnectionError("no route to host")
        self.sent.append((step, values))

    def finish(self, exit_code=0):
        self.finished += 1
        if self.fails:
            raise ConnectionError("still no route")


def test_trackers_get_the_recorded_metrics(tmp_path, monkeypatch):
    tracker = FakeTracker()
    fake_module(monkeypatch, "wandb", init=tracker.init)
    run_here(tmp_path, log={"trackers": ["wandb"]})
    run = config(tmp_path)
    lines = [line for line in read_metrics(run.folder) if line.kind in ("train", "val")]
    *sent, (last_step, final) = tracker.sent
    assert [step for step, _ in sent] == [line.step for line in lines]
    for (_, values), line in zip(sent, lines, strict=True):
        assert values[f"{line.kind}/loss"] == line.loss
    assert (last_step, final["final/val_loss"]) == (12, lines[-1].loss)
    assert tracker.options["id"].startswith(f"{run.id}-")
    assert tracker.options["resume"] == "allow"
    assert tracker.finished == 1


def test_a_tracker_that_fails_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    tracker = FakeTracker(fails=True)
    fake_module(monkeypatch, "trackio", init=tracker.init)
    result = run_here(tmp_path, log={"trackers": ["trackio"]})
    assert result["status"] == "finished"
    assert tracker.finished == 1, "a failed tracker is still closed"
    log = (config(tmp_path).folder / "train.log").read_text()
    assert log.count("tracker trackio is off: ConnectionError: no route to host") == 1
    assert log.count("tracker trackio is off") == 1


def test_tensorboard_writes_its_files(tmp_path):
    pytest.importorskip("tensorboard")
    run_here(tmp_path, log={"trackers": ["tensorboard"]})
    assert list((config(tmp_path).folder / "tensorboard").glob("events*"))


def test_tensorboard_purges_the_steps_that_are_repeated(tmp_path, monkeypatch):
    """An earlier part sent steps 6 to 8 and failed after its checkpoint of step 5."""
    purged = []
    nothing = dict.fromkeys(("add_scalar", "add_text", "flush", "close"), lambda *values: None)
    writer = types.SimpleNamespace(**nothing)
    fake_module(
        monkeypatch,
        "torch.utils.tensorboard",
        SummaryWriter=lambda folder, purge_step: purged.append(purge_step) or writer,
    )
    with monkeypatch.context() as patched:
        fail_at(patched, 8)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, log={"trackers": ["tensorboard"]})
    run_here(tmp_path, log={"trackers": ["tensorboard"]})
    assert purged == [0, 6]


def test_tensorboard_shows_a_repeated_step_once(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changes = {"log": {"trackers": ["tensorboard"], "every": 1}}
    with monkeypatch.context() as patched:
        fail_at(patched, 8)
        with pytest.raises(SimulatedBug):
            run_here(tmp_path, **changes)
    time.sleep(1.1)  # its files are named and ordered by the second in which they were created
    run_here(tmp_path, **changes)
    shown = events.EventAccumulator(str(config(tmp_path).folder / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in shown.Scalars("val/loss")] == [4, 8, 12]


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"log.trackers.*'wandbb'"):
        config(tmp_path, log={"trackers": ["wandbb"]})
