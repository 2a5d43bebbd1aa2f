"""Training on generated sequences: the metrics of an oracle, whole runs, and settings that are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oelm.config import RunConfig
from oelm.data.synthetic.sequences import ABILITIES, VOCABULARY
from oelm.errors import OelmError
from oelm.evaluation.use import evaluate_run
from oelm.training.engine import train
from oelm.training.parallel import World
from oelm.training.tasks.generated import GeneratedSequences
from oelm.training.tasks.open import open_task
from oelm.training.validation import validate

SMALL = {"fields": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "name": "gpt:modern-tiny"}


def config(output, **changes) -> RunConfig:
    fields = {"task": "generated:recall", "train": {"max_steps": 6, "batch_size": 4, "device": "cpu"}}
    return RunConfig.load({"output": str(output), "model": SMALL, "eval": {"every": 3}, **fields, **changes})


class Oracle(nn.Module):
    """Predicts every token of a task's validation sequences, except the answers of every second sequence."""

    def __init__(self, task: GeneratedSequences) -> None:
        super().__init__()
        self.following = {}
        for row in range(task.held_out_count):
            batch = task.validation(row, 1, 1)
            answers = batch["targets"][0]
            inputs = batch["inputs"][0]
            following = torch.where(answers >= 0, answers, 0)
            self.following[tuple(inputs.tolist())] = following if row % 2 == 0 else (following + 1) % VOCABULARY

    def forward(self, input_ids, use_cache):
        nothing = torch.zeros(input_ids.shape[1], dtype=torch.long)  # for the rows that fill up a batch
        rows = torch.stack([self.following.get(tuple(row.tolist()), nothing) for row in input_ids])
        return SimpleNamespace(logits=20.0 * nn.functional.one_hot(rows, VOCABULARY))


@pytest.mark.parametrize("name", ABILITIES)
@pytest.mark.parametrize("batch_size", [37, 128])
def test_the_metrics_count_right_answers_whatever_the_batch(name, batch_size, tmp_path):
    task = open_task(config(tmp_path, task=f"generated:{name}"))
    world = World(0, 1, torch.device("cpu"))
    metrics = validate(task.loss(Oracle(task)), task, world, batch_size)
    answers = [int((task.validation(row, 1, 1)["targets"] >= 0).sum()) for row in range(task.held_out_count)]
    assert metrics["n"] == sum(answers)
    assert metrics["accuracy"] == pytest.approx(sum(answers[::2]) / sum(answers))
    if name == "counting":
        assert metrics["by_distance"] == {}, "a count follows from no single token"
    else:
        assert metrics["by_distance"]
        assert all(0 < share < 1 for share in metrics["by_distance"].values())
    assert 0 < metrics["majority"]["accuracy"] < 0.5


def test_a_run_records_what_it_measured(tmp_path):
    run = config(tmp_path)
    result = train(run, quiet=True)
    assert result["task"] == {"kind": "generated", "name": "generated:recall"}
    assert result["accuracy"] == result["last"]["accuracy"]
    assert set(result["last"]["by_distance"]) <= {"1-8", "9-16", "17-32", "33-64"}
    assert result["data"]["synthetic"]
    again = evaluate_run(run.folder)
    assert again["accuracy"] == pytest.approx(result["best_accuracy"])


def test_a_batch_has_the_length_of_the_config_and_no_sequence_twice(tmp_path):
    task = open_task(config(tmp_path, data={"sequence_length": 48}))
    batch = task.batch(0, 300)
    assert batch["inputs"].shape == batch["targets"].shape == (300, 48)
    assert len({tuple(row) for row in batch["inputs"].tolist()}) == 300
    assert task.target_count(0, 300) == int((batch["targets"] >= 0).sum())
    other_seed = open_task(config(tmp_path, data={"sequence_length": 48}, seed=1))
    assert not torch.equal(other_seed.batch(0, 300)["inputs"], batch["inputs"])
    assert other_seed.sha256 != task.sha256
    assert torch.equal(other_seed.validation(0, 8, 8)["inputs"], task.validation(0, 8, 8)["inputs"])


def test_settings_that_are_given_leave_the_other_defaults(tmp_path):
    run = RunConfig.load({"task": "generated:copying", "train": {"max_steps": 5}})
    assert (run.train.max_steps, run.train.batch_size, run.model.fields["hidden_size"]) == (5, 64, 64)
    assert RunConfig.load({"task": "generated:copying", "model": {"name": "gpt:tiny"}}).model.fields == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "generated:recal"}, "no generated task 'recal'. Did you mean 'recall'"),
        ({"data": {"path": "builtin:stories"}}, "leave out data.path"),
        ({"data": {"sequence_length": 16}}, "at least 32 tokens"),
        ({"task": {"name": "generated:recall", "form": "text"}}, "generates its sequences"),
        ({"task": {"name": "generated:recall", "label": "x"}}, "generates its sequences"),
        ({"eval": {"choose": "macro_f1"}}, "a metric of classification"),
        ({"model": {**SMALL, "fields": {**SMALL["fields"], "vocab_size": 64}}}, "vocabulary"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tmp_path):
    def build():
        run = config(tmp_path, **changes)
        return open_task(run).build_model(run)

    with pytest.raises(OelmError, match=message):
        build()


@pytest.mark.slow
def test_a_small_model_learns_to_copy(tmp_path):
    run = RunConfig.load(
        {"task": "generated:copying", "output": str(tmp_path), "data": {"sequence_length": 32}, "train": {"epochs": 2}}
    )
    assert train(run, quiet=True)["accuracy"] > 0.95
