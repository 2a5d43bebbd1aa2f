"""What belongs to another command, or to another place of it, is refused with the command that takes it."""

import json

import pytest

from tests.support.lab import lab, refusal


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make a folder of labelled rows, a file of them, a run's folder and a data folder, as far as names tell them."""
    monkeypatch.chdir(tmp_path)
    for folder, file in (("rated", "train.csv"), ("run", "config.json"), ("mine", "data.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "rows.csv").write_text("review,opinion\n")
    (tmp_path / "mine.txt").write_text("Once upon a time: there was\n  - a\nstory")
    (tmp_path / "run.yaml").write_text("{}")
    for seed in range(2):
        (tmp_path / "runs" / "a" / "baseline" / f"seed-{seed}").mkdir(parents=True)
        (tmp_path / "runs" / "a" / "baseline" / f"seed-{seed}" / "result.json").write_text("{}")


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
        (("train", "mine.txt"), "first: oelm data prepare mine.txt --train-bpe 8192 --out data/mine"),
        (("train", "rows.csv"), "labels: oelm finetune folder --data FOLDER, with that file in it as train.csv"),
        (("train", "rated/train.csv"), "to learn its labels: oelm finetune folder --data rated"),
        (("train", "--data", "."), "not a prepared data folder (data.json is missing); name the one in it: mine"),
        (("train", "run.yaml", "batch_size=8"), "unknown key. Did you mean 'train.batch_size' or 'eval.batch_size'?"),
        (("train", "run.yaml", "train.lr=1"), "train.lr: unknown key. Did you mean 'optimizer.learning_rate'?"),
        (("finetune", "rated"), "not a task but data of your own: oelm finetune folder --data rated"),
        (("finetune", "rows.csv"), "oelm finetune folder --data FOLDER, with that file in it as train.csv"),
        (("finetune", "ratde"), "no task called 'ratde'"),
    ],
)
def test_the_command_that_takes_it_is_named(arguments, message):
    assert message in refusal(*arguments)


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("command", [("generate",), ("eval",), ("predict",), ("export",)])
def test_a_folder_above_runs_is_refused_with_the_name_of_one(command):
    arguments = ("plain",) if command == ("export",) else ()
    message = refusal(*command, "runs", *arguments)
    assert "not a run but a folder above runs; name one (there are 2), such as runs/a/baseline/seed-0" in message


@pytest.mark.parametrize(
    ("command", "option", "settings"),
    [
        ("train", "--lr", "optimizer.learning_rate=VALUE"),
        ("matrix", "--batch-size", "train.batch_size=VALUE or eval.batch_size=VALUE"),
        ("finetune", "--epochs", "train.epochs=VALUE"),
    ],
)
def test_an_option_that_is_a_setting_is_told_how_that_is_given(command, option, settings):
    result = lab(command, "x", option, 1)
    assert result.exit_code == 2
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert f"No such option: {option}; a setting is given as {settings}" in shown
    unknown = lab("status", option, 1).stderr
    assert "a setting is given" not in unknown, "status takes no settings"


def test_text_that_is_missing_is_prepared_by_the_command_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axes = {"method": ["baseline", "identity-key"]}
    (tmp_path / "mine.yaml").write_text(json.dumps({"config": {"model": {"name": "gpt:tiny"}}, "axes": axes}))
    message = refusal("matrix", "mine.yaml", "--data", "nowhere")
    assert "oelm data prepare SOURCE --train-bpe 8192 --out nowhere" in message
