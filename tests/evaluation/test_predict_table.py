"""`oelm predict --file`: every row of a table with its prediction, and what is refused before the model is loaded."""

import csv
import json

import pytest
from typer.testing import CliRunner

from oelm.base.files import remove_leftovers
from oelm.cli.app import app
from oelm.evaluation.use import predict_one
from tests.support.finetuning import config, run_here


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    run_here(folder)
    return config(folder).folder


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict-pairs")
    changes = {"task": {"name": "builtin:inference"}, "train": {"max_steps": 2}}
    run_here(folder, **changes)
    return config(folder, **changes).folder


def predict(run, *arguments):
    return CliRunner().invoke(app, ["predict", *map(str, (run, *arguments))])


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_gets_the_prediction_that_its_text_gets_alone(run, tmp_path):
    texts = ["the film was good", "bad", "a very long and very dull story about nothing at all, with a comma"] * 15
    lines = [f'{number},"{text}"' for number, text in enumerate(texts)]
    (tmp_path / "x.csv").write_text("\n".join(["id,review", *lines, ""]))
    result = predict(run, "--file", tmp_path / "x.csv", "--out", tmp_path / "y.csv", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {tmp_path / 'y.csv'}: 45 rows with a prediction each\n"
    rows = read(tmp_path / "y.csv")
    assert [row["id"] for row in rows] == [str(number) for number in range(45)]
    assert [row["review"] for row in rows] == texts
    for row in rows[:3]:
        alone = predict_one(run, row["review"])
        assert row["prediction"] == alone["label"]
        assert float(row["probability"]) == pytest.approx(alone["probabilities"][alone["label"]], abs=1e-4)


def test_pairs_are_found_by_the_usual_names_and_json_lines_are_read_and_written(pair_run, tmp_path):
    rows = [{"hypothesis": "he slept", "premise": "a man slept", "n": number} for number in range(3)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = predict(pair_run, "--file", tmp_path / "x.jsonl", "--out", tmp_path / "y.jsonl")
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in (tmp_path / "y.jsonl").read_text().splitlines()]
    assert [row["n"] for row in written] == [0, 1, 2]
    assert written[0]["prediction"] == predict_one(pair_run, "a man slept", "he slept")["label"]


def test_cells_that_a_spreadsheet_would_compute_are_quoted(run, tmp_path):
    (tmp_path / "x.csv").write_text('text,note\n"=HYPERLINK(""x"")",+1.2 %\n')
    assert predict(run, "--file", tmp_path / "x.csv", "--out", tmp_path / "y.csv").exit_code == 0
    (row,) = read(tmp_path / "y.csv")
    assert row["text"] == '\'=HYPERLINK("x")'
    assert row["note"] == "+1.2 %", "a signed number computes nothing"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("id,words\n1,good\n", (), "no column 'text'"),
        ("id,words\n1,good\n", (), "it has 'id', 'words'; name the right one: --column NAME"),
        ("id,words\n1,good\n", ("--column", "word"), "no column 'word'; it has 'id', 'words'"),
        ("id,text\n1,good\n2, \n", (), "x.csv, line 3: 'text' is empty"),
        ("text,prediction\ngood,bad\n", (), "has a column 'prediction' already"),
        ("text\n", (), "holds no row"),
        ("text\ngood\n", ("--column", "text", "--pair-column", "text"), "trained on single texts: name --column alone"),
        ("text\ngood\n", ("--out", "y.xlsx"), "y.xlsx: its name must end in .csv, .tsv, .jsonl"),
        ("text\ngood\n", ("--out", "x.csv"), "is the file that is read"),
    ],
)
def test_a_file_that_cannot_be_predicted_is_refused_in_one_line(content, options, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oelm.evaluation.predict_table.load_run", None)  # the file is checked before the model
    (tmp_path / "x.csv").write_text(content)
    out = () if "--out" in options else ("--out", "y.csv")
    result = predict(run, "--file", "x.csv", *out, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_a_column_of_any_name_can_be_named(run, tmp_path):
    (tmp_path / "x.csv").write_text("id,words\n1,good\n")
    result = predict(run, "--file", tmp_path / "x.csv", "--out", tmp_path / "y.tsv", "--column", "words")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "y.tsv").read_text().splitlines()[0] == "id\twords\tprediction\tprobability"


def test_a_failure_while_writing_leaves_the_old_file(run, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device is lost")

    (tmp_path / "x.csv").write_text("text\ngood\n")
    (tmp_path / "y.csv").write_text("mine")
    monkeypatch.setattr("oelm.evaluation.predict_table.class_probabilities", fail)
    assert predict(run, "--file", tmp_path / "x.csv", "--out", tmp_path / "y.csv").exit_code == 1
    assert (tmp_path / "y.csv").read_text() == "mine"
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "y.csv"]


def test_a_text_and_a_file_are_not_given_together(run, tmp_path):
    for arguments, message in (
        ((), "give a text, or a table with --file"),
        (("good", "--file", "x.csv", "--out", "y.csv"), "leave it out"),
        (("--file", "x.csv"), "give --out too"),
    ):
        result = predict(run, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
