"""oelm look: what it prints and writes, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from tests.support.lab import refusal
from tests.support.looks import TEXT, text_model


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def look(*arguments: object):
    return CliRunner().invoke(app, ["look", *map(str, arguments)])


def test_a_look_prints_the_strongest_heads_and_writes_three_files(gpt2, tmp_path):
    outcome = look(gpt2, "--text", TEXT, "--out", tmp_path / "look")
    assert outcome.exit_code == 0, outcome.output
    content = json.loads((tmp_path / "look" / "look.json").read_text(encoding="utf-8"))
    best = max(content["models"][0]["heads"], key=lambda head: head["previous"])
    line = next(line for line in outcome.stdout.splitlines() if line.strip().startswith("previous token"))
    assert line.split() == f"previous token layer {best['layer']}, head {best['head']} {best['previous']:.2f}".split()
    assert {file.name for file in (tmp_path / "look").iterdir()} == {"look.json", "look.html", "look.png"}
    assert outcome.stdout.count("wrote") == 3


def test_text_files_lengths_layers_and_a_second_model(gpt2, tmp_path):
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["--text-file", tmp_path / "story.txt", "--text", TEXT, "--context", 5, "--context", 9, "--layer", 1]
    outcome = look(gpt2, gpt2, *arguments, "--json", "--out", tmp_path / "look")
    assert outcome.exit_code == 0, outcome.output
    content = json.loads(outcome.stdout)
    assert len(content["models"]) == 2
    assert [len(text["tokens"]) for text in content["models"][0]["texts"]] == [5, 9, 5, 9]
    assert {head["layer"] for head in content["differences"]} == {1}
    assert {head["distance"] for head in content["differences"]} == {0.0}


def test_chinese(gpt2, tmp_path):
    outcome = look(gpt2, "--text", TEXT, "--lang", "zh", "--out", tmp_path / "look")
    assert outcome.exit_code == 0, outcome.output
    assert "前一词元" in outcome.stdout
    assert 'lang="zh-CN"' in (tmp_path / "look" / "look.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--text", TEXT), "nowhere"),
        (("GPT2", "--text-file", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (("GPT2",), "give a text to look at"),
        (("GPT2", "--text", TEXT, "--lang", "fr"), "language 'fr'"),
        (("GPT2", "GPT2", "--text", TEXT, "--drift"), "--drift follows one run"),
        (("GPT2", "--text", TEXT, "--out", __file__), "is a file; name a folder with --out"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(arguments, message, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal("look", *(str(gpt2) if word == "GPT2" else word for word in arguments))
