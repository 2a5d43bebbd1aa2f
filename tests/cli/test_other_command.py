"""What belongs to another command, or to another place of it, is refused with the command that takes it."""

import json

import pytest

from tests.support.lab import refusal


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make a folder of labelled rows, a file of them, a run's folder and a data folder, as far as names tell them."""
    monkeypatch.chdir(tmp_path)
    for folder, file in (("rated", "train.csv"), ("run", "config.json"), ("mine", "data.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "rows.csv").write_text("review,opinion\n")


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--data", "rated"), "labels of train.csv: oelm finetune folder --data rated; to learn its text"),
        (("train", "--data", "rated", "--model", "random:bert"), "folder --data rated --model random:bert;"),
        (
            ("train", "--model", "random:bert", "task.name=builtin:sentiment"),
            "without a config file, use: oelm finetune builtin:sentiment --model random:bert",
        ),
        (("train", "--data", "rated", "task=folder"), "use: oelm finetune folder --data rated"),
        (("train", "run"), "run: a run's folder; to go on with the run: oelm train run/config.json"),
        (("train", "mine"), "mine: a data folder; to train on it: oelm train --data mine"),
        (("finetune", "rated"), "not a task but data of your own: oelm finetune folder --data rated"),
        (("finetune", "rows.csv"), "oelm finetune folder --data FOLDER, with that file in it as train.csv"),
        (("finetune", "ratde"), "no task called 'ratde'"),
    ],
)
def test_the_command_that_takes_it_is_named(arguments, message):
    assert message in refusal(*arguments)


def test_text_that_is_missing_is_prepared_by_the_command_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axes = {"method": ["baseline", "identity-key"]}
    (tmp_path / "mine.yaml").write_text(json.dumps({"config": {"model": {"name": "gpt:tiny"}}, "axes": axes}))
    message = refusal("matrix", "mine.yaml", "--data", "nowhere")
    assert "oelm data prepare SOURCE --train-bpe 8192 --out nowhere" in message
