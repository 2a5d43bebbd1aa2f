"""oelm probe: tables of what was trained and of what a model does, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from oelm.analysis.load import load_run
from oelm.cli.app import app
from oelm.models.small import small_model
from oelm.runs.schema import StoryRecall, read
from tests.support.lab import refusal

TINY = ["model.fields.hidden_size=32", "model.fields.num_hidden_layers=1", "train.max_steps=2", "train.batch_size=4"]


def probe(*arguments: str):
    return CliRunner().invoke(app, ["probe", *arguments])


@pytest.mark.full
def test_every_form_is_trained_on_every_task_and_shown_in_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--train", "multi-head", "frozen-offset", "latent-frozen", *TINY, "train.device=cpu"]
    arguments += ["--task", "recall", "--task", "sorting", "--seeds", "2", "--gpus", ""]
    outcome = probe(*arguments)
    assert outcome.exit_code == 0, outcome.output
    tables = outcome.stdout.split("\n\n")
    assert [table.splitlines()[0].partition(":")[0] for table in tables] == ["recall", "sorting"]
    for table in tables:
        for arm in ("multi-head", "frozen-offset", "latent-frozen"):
            assert [line for line in table.splitlines() if line.split()[0] == arm and line.endswith(" 2")], table
    assert all(len(line) <= 80 for line in outcome.stdout.splitlines())
    again = json.loads(probe(*arguments, "--json").stdout)
    assert again["latent-frozen"]["sorting"]["seeds"] == 2
    assert 0 <= again["latent-frozen"]["sorting"]["accuracy"] <= 1


@pytest.mark.full
def test_the_recall_of_the_stories_is_a_task_and_is_kept_with_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--train", "multi-head", "frozen-offset", *TINY, "train.device=cpu", "--seeds", "2", "--gpus", ""]
    arguments += ["--task", "stories-recall", "--task", "recall"]
    outcome = probe(*arguments)
    assert outcome.exit_code == 0, outcome.output
    by_task = dict(zip(("stories-recall", "recall"), outcome.stdout.split("\n\n"), strict=True))
    for task, table in by_task.items():
        assert table.splitlines()[0].startswith(f"{task}: ")
        assert [line for line in table.splitlines() if line.split()[0] == "frozen-offset" and line.endswith(" 2")]
    records = sorted(tmp_path.glob("runs/probe-*/*/*/recall.json"))
    assert len(records) == 4
    kept = [record.read_bytes() for record in records]
    again = json.loads(probe(*arguments, "--json").stdout)
    assert 0 <= again["multi-head"]["stories-recall"]["recall"] <= 1
    assert "accuracy" in again["multi-head"]["recall"]
    assert [record.read_bytes() for record in records] == kept, "a run that is done is not measured again"
    run = load_run(records[0].parent)
    assert run.config.model.name == "gpt:modern-tiny"
    assert run.config.data.path == "builtin:stories"
    assert run.figure("recall") == read(records[0], StoryRecall).recall
    archived = CliRunner().invoke(app, ["archive", "runs", "--out", "archive", "--changed-code"])
    assert archived.exit_code == 0, archived.output
    copies = list((tmp_path / "archive").rglob("recall.json"))
    assert len(copies) == 4
    assert load_run(copies[0].parent).figure("recall") is not None


def test_a_model_is_asked_to_repeat_random_tokens(tmp_path):
    small_model("gpt2", 0).save_pretrained(tmp_path / "model")
    outcome = probe(str(tmp_path / "model"))
    assert outcome.exit_code == 0, outcome.output
    assert "loss in its repetition" in outcome.stdout
    assert "best head" in outcome.stdout
    table, _, notes = outcome.stdout.partition("Without")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "layer.head" in notes
    rows = json.loads(probe(str(tmp_path / "model"), "--json").stdout)
    assert [row["length"] for row in rows][:2] == [8, 16]
    matching = rows[0]["prefix_matching"]
    assert matching["best"] == matching["heads"][matching["layer"]][matching["head"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the folder of one run or model"),
        (("a", "b"), "name the folder of one run or model"),
        (("--train", "latent-frozn"), "latent-frozen"),
        (("--train", "multi-head", "--task", "recal"), "Did you mean 'recall'"),
        (("--train", "multi-head", "--task", "storys-recall"), "Did you mean 'stories-recall'"),
        (("--train", "multi-head", "model.fields.hidden_sice=3"), "hidden_sice"),
    ],
)
def test_what_cannot_be_probed_is_refused(arguments, message):
    assert message in refusal("probe", *arguments)
