"""Batches of labelled tasks in a few widths, for code that is compiled or recorded for each: nothing else changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from oelm.config import RunConfig
from oelm.runs.folder import read_metrics
from oelm.training import step as training_step
from oelm.training.engine import train
from oelm.training.step import Stepper
from oelm.training.tasks import classification, text2text
from oelm.training.tasks.open import open_task
from oelm.training.timing import StepTimer
from tests.support import finetuning
from tests.support.training import assert_same_run, read

WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def uncompiled(monkeypatch):
    """Leave models as they are where they would be compiled."""
    monkeypatch.setattr(training_step.torch, "compile", lambda module, **_: module)


def run(output: Path, compiled: bool, **changes) -> RunConfig:
    own = {"model": {"fields": WITHOUT_DROPOUT}, **changes}
    own["train"] = {"compile": compiled, **changes.get("train", {})}
    return finetuning.config(output, **own)


def as_text(output: Path, **changes) -> RunConfig:
    base = finetuning.fields(output, task={"form": "text"}, train={"compile": True, **changes}, eval={"generations": 0})
    return RunConfig.load(base | {"model": {"name": "random:t5"}})


@pytest.mark.parametrize("micro", [16, 4])
def test_more_padding_changes_no_figure(micro, tmp_path, monkeypatch, uncompiled):
    monkeypatch.setattr(classification, "_MOST_WIDTHS", 1)
    changes = {"train": {"micro_batch_size": micro, "max_steps": 20}, "eval": {"every": 10}}
    own, padded = run(tmp_path / "own", False, **changes), run(tmp_path / "padded", True, **changes)
    assert open_task(own).widths == ()
    assert open_task(padded).widths == (24,)
    for config in (own, padded):
        train(config, quiet=True)
    lines, padded_lines = read_metrics(own.folder), read_metrics(padded.folder)
    assert [line.kind for line in lines] == [line.kind for line in padded_lines]
    for line, padded_line in zip(lines, padded_lines, strict=True):
        if line.kind in ("train", "val"):
            assert (padded_line.step, padded_line.tokens) == (line.step, line.tokens)
            assert padded_line.loss == pytest.approx(line.loss, rel=1e-4)


def test_tokens_and_targets_are_counted_without_padding(tmp_path, monkeypatch):
    own = open_task(run(tmp_path, False))
    monkeypatch.setattr(classification, "_MOST_WIDTHS", 1)
    padded = open_task(run(tmp_path, True))
    for first, count in ((0, 16), (16, 4), (0, own.samples_per_epoch)):
        assert padded.token_count(first, count) == own.token_count(first, count)
        assert padded.target_count(first, count) == own.target_count(first, count)
    wide, narrow = padded.batch(0, 16), own.batch(0, 16)
    assert wide["input_ids"].shape[1] > narrow["input_ids"].shape[1]
    assert wide["attention_mask"].sum() == narrow["attention_mask"].sum() == own.token_count(0, 16)


def test_all_parts_of_a_batch_and_validation_have_widths_of_the_set(tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "_MOST_WIDTHS", 2)
    task = open_task(run(tmp_path, True))
    assert len(task.widths) == 2
    widths = set()
    for first in range(0, task.samples_per_epoch, 16):
        whole = task.batch(first, 16)["input_ids"].shape[1]
        assert {task.batch(first + part, 4)["input_ids"].shape[1] for part in range(0, 16, 4)} == {whole}
        widths.add(whole)
    assert widths == set(task.widths)
    validation = {task.validation(first, 50, 50)["input_ids"].shape[1] for first in range(0, task.held_out_count, 50)}
    assert validation <= widths


def test_text_to_text_has_few_pairs_of_widths(tmp_path):
    task = open_task(as_text(tmp_path))
    pairs = set()
    for first in range(0, task.samples_per_epoch, 16):
        batch = task.batch(first, 16)
        pairs.add((batch["input_ids"].shape[1], batch["labels"].shape[1]))
        assert task.target_count(first, 16) == int((batch["labels"] != -100).sum())
    assert {source for source, _ in pairs} <= set(task.widths)
    assert {target for _, target in pairs} <= set(task.target_widths)
    assert len(task.widths) <= text2text._MOST_SOURCE_WIDTHS
    assert len(task.target_widths) <= text2text._MOST_TARGET_WIDTHS


@pytest.mark.full
def test_a_run_with_few_widths_resumes_exactly(tmp_path, monkeypatch, uncompiled):
    changes = {"model": {"fields": {}}, "checkpoint": {"every": 6}, "train": {"max_steps": 14}}
    whole, stopped = run(tmp_path / "whole", True, **changes), run(tmp_path / "stopped", True, **changes)
    train(whole, quiet=True)

    class Killed(Exception):
        pass

    step = Stepper.step

    def dying(stepper, state):
        if state.step == 9:
            raise Killed
        step(stepper, state)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", dying)
        with pytest.raises(Killed):
            train(stopped, quiet=True)
    train(stopped, quiet=True)
    assert_same_run(stopped.folder, whole.folder)


def test_the_first_step_of_each_width_is_no_step_of_the_statistics(tmp_path, monkeypatch, uncompiled):
    monkeypatch.setattr(StepTimer.__init__, "__defaults__", (None, 1))  # one more warm-up step at the start
    config = run(tmp_path, True)
    train(config, quiet=True)
    task = open_task(config)
    widths = {task.batch(16 * step, 16)["input_ids"].shape[1] for step in range(30)}
    assert len(widths) > 1
    recorded = read(config.folder / "timing.json")
    assert (recorded["warmup_steps"], recorded["steps"]) == (len(widths), 30 - len(widths))


@pytest.mark.full
@pytest.mark.parametrize("form", ["class", "text"])
def test_code_is_compiled_once_for_each_width_without_a_break(form, tmp_path, monkeypatch):
    graphs, limit = [], torch._dynamo.config.recompile_limit

    def count(graph, inputs):
        graphs.append(tuple(graph.graph.nodes))
        return graph.forward

    compiled = partial(torch.compile, backend=count, fullgraph=True)
    monkeypatch.setattr(training_step.torch, "compile", compiled)
    config = as_text(tmp_path) if form == "text" else run(tmp_path, True)
    train(config, quiet=True)
    task = open_task(config)

    def shapes_of(batches):
        return {(batch["input_ids"].shape, batch["labels"].shape) for batch in batches}

    shapes = shapes_of(task.batch(16 * step, 16) for step in range(30))
    validation = shapes_of(task.validation(first, 50, 50) for first in (0, 50))
    assert len(shapes) > 1
    assert len(graphs) == len(shapes) + len(validation)
    assert torch._dynamo.config.recompile_limit == limit, "the run's limit is its own"
