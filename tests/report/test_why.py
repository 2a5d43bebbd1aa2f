"""docs/why.md: made of records alone, up to date with them, without measured numbers in its words."""

import json
from pathlib import Path

import pytest
import yaml

from oelm.analysis import AnalysisError
from oelm.report.markdown import to_markdown
from oelm.report.why import load_why, why_document, write_why
from oelm.runs.looks import Look
from tests.report.test_look import model_look
from tests.support.records import add_slices, change, classification_run, language_run, probe_run

ROOT = Path(__file__).parents[2]
SLICES = {"title": "By slice", "against": "plain", "rows": [{"arm": "offset"}], "slices": ["recall hit", "recall rest"]}
CHANGES = {"title": "In all", "against": "plain", "rows": [{"arm": "offset"}]}
PROBES = {"title": "Tasks", "arms": ["plain", "offset"], "tasks": ["recall"], "command": "do {arms} {tasks}"}
HEADS = {"title": "Heads", "arms": ["plain"], "figures": ["previous", "entropy"]}


def test_the_page_is_up_to_date():
    committed = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    assert to_markdown(why_document(ROOT / "results" / "why.yaml")) == committed, "run `make results`"
    assert committed.count("\n") <= 150


def write(folder: Path, **question) -> Path:
    """Write a file with one question about arms whose runs are in folders of their names."""
    arms = {
        name: {"label": name.title(), "runs": [f"*/{name}"], "looks": [f"looks/{name}-*"], "command": f"make {name}"}
        for name in ("plain", "offset", "longer", "other")
    }
    fields = {"id": "why", "question": "Why?", "answer": "So.", "open": "All.", **question}
    file = folder / "why.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "arms": arms, "questions": [fields]}))
    return file


def rows(file: Path) -> list[list[str]]:
    """Return the rows of all tables of the page."""
    return [[cell.text for cell in row] for table in why_document(file).tables for row in table.rows]


def language(root: Path, seed: int, hit: float, **model) -> None:
    run = language_run(root, "baseline", seed, 3 + hit / 10, changes={"model": {"fields": model}})
    add_slices(run, hit, 3.25)


def test_slices_show_each_difference_and_its_share_of_the_whole_one(tmp_path):
    for seed in range(3):
        language(tmp_path / "set" / "plain", seed, 2.0)
        language(tmp_path / "set" / "offset", seed, 2.5 + 0.01 * seed, key_offset=0.5)
    share, row = rows(write(tmp_path, slices=[SLICES]))
    assert share == ["share of the tokens", "", "100.0 %", "20.0 %", "80.0 %", ""]
    assert row == ["Offset", "Plain", "+0.102 ± 0.005", "+0.510 ± 0.025 (100 %)", "0.000 (0 %)", "3"]
    page = write_why(tmp_path / "why.yaml", tmp_path / "why.md").read_text(encoding="utf-8")
    assert "from 6 records (set)" in page
    assert "One seed" not in page
    assert "missing" not in page


def test_rows_of_one_seed_and_those_that_differ_in_more_are_named(tmp_path):
    language(tmp_path / "set" / "plain", 0, 2.0)
    run = language_run(tmp_path / "set" / "offset", "baseline", 0, 3.1, steps=800)
    add_slices(run, 2.5, 3.25)
    page = to_markdown(why_document(write(tmp_path, slices=[SLICES])))
    assert "One seed, so without an interval: all rows." in page
    assert "The runs differ in more than the form (eval.every, train.max\\_steps): all rows." in page


def test_changes_are_of_the_tasks_own_measure_or_the_one_that_is_named(tmp_path):
    for seed in range(2):
        classification_run(tmp_path / "set" / "plain", "baseline", seed, 0.9)
        classification_run(tmp_path / "set" / "offset", "oelm-freeze", seed, 0.8 + 0.01 * seed)
    own, named = rows(
        write(
            tmp_path,
            changes=[
                CHANGES | {"rows": [{"arm": "offset"}]},
                CHANGES | {"rows": [{"arm": "offset", "measure": "val_loss"}]},
            ],
        )
    )
    assert own[:5] == ["Offset", "Plain", "accuracy", "90.00 %", "−9.50 points"]
    assert named[2:5] == ["validation loss", "0.1000", "+0.0950"]
    with pytest.raises(AnalysisError, match="Offset against Plain: their runs have no perplexity"):
        rows(write(tmp_path, changes=[CHANGES | {"rows": [{"arm": "offset", "measure": "perplexity"}]}]))


def test_probes_show_right_answers_and_when_they_came(tmp_path):
    for seed in range(3):
        probe_run(tmp_path / "set" / "plain", "plain", "recall", seed, {100: 0.25, 200: 0.25 + 0.01 * seed})
        shares = {100: 0.5, 200: 1.0} if seed else {100: 0.95, 200: 1.0}
        probe_run(tmp_path / "set" / "offset", "offset", "recall", seed, shares, key_offset=0.5)
    plain, offset, commonest = rows(write(tmp_path, probes=[PROBES]))
    assert plain[1:] == ["26.0 % (23.5 – 28.5)", "never", "3"]
    assert offset[1:] == ["100.0 %", "100, 200, 200", "3"]
    assert commonest[:2] == ["the commonest answer", "7.0 %"]


def test_heads_are_the_strongest_of_each_model(tmp_path):
    for number, previous in enumerate((0.25, 0.75)):
        folder = tmp_path / "looks" / f"plain-{number}"
        folder.mkdir(parents=True)
        look = model_look(entropy=0.5)
        second = [head.model_copy(update={"previous": previous}) for head in look.heads if head.layer == 1]
        first = [head.model_copy(update={"previous": 0.5, "entropy": 0.25}) for head in look.heads if head.layer == 0]
        Look(models=[look.model_copy(update={"heads": first + second})]).write(folder / "look.json")
    (row,) = rows(write(tmp_path, heads=[HEADS]))
    assert row == ["Plain", "0.62 (0.50 – 0.75), layer 0 in 1 of 2", "0.25 (0.25 – 0.25), layer 0", "2"]


def test_what_is_missing_is_named_with_its_command(tmp_path):
    file = write(tmp_path, slices=[SLICES], probes=[PROBES], heads=[HEADS])
    assert rows(file) == [
        ["Offset", "no runs", "make offset"],
        ["Plain", "no runs", "make plain"],
        ["Plain; Offset", "no runs of recall", "do plain offset --task recall"],
        ["Plain", "no look", "make plain"],
    ]
    assert to_markdown(why_document(file)).count("There is no record of this yet.") == 3
    language_run(tmp_path / "set" / "plain", "baseline", 0, 3.0)
    language(tmp_path / "set" / "offset", 1, 2.5, key_offset=0.5)
    assert rows(write(tmp_path, slices=[SLICES])) == [["Plain", "no slices of the validation text", "make plain"]]
    language(tmp_path / "set" / "plain", 0, 2.0)
    assert rows(write(tmp_path, slices=[SLICES])) == [["Offset", "no seed in common with Plain", "make offset"]]


@pytest.mark.parametrize("field", ["answer", "open"])
@pytest.mark.parametrize("words", ["It loses 13 %.", "It learns after 200 steps.", "It costs 0.18 nats."])
def test_words_with_a_measured_number_are_refused(tmp_path, field, words):
    with pytest.raises(AnalysisError, match="is a measured number: leave it to the tables"):
        load_why(write(tmp_path, **{field: words}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slices": [SLICES | {"slices": ["recall hits"]}]}, "no slice 'recall hits'; there are: whole, recall hit"),
        ({"slices": [SLICES | {"against": None}]}, "row 'offset': with what"),
        (
            {"slices": [SLICES | {"rows": [{"arm": "offsets"}]}]},
            "no arm 'offsets'; there are: longer, offset, other, plain",
        ),
        ({"slices": [SLICES | {"kind": "slices"}]}, "kind: unknown key"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, wrong, message):
    language(tmp_path / "set" / "plain", 0, 2.0)
    language(tmp_path / "set" / "offset", 0, 2.5, key_offset=0.5)
    with pytest.raises(AnalysisError, match=message):
        why_document(write(tmp_path, **wrong))


def test_a_table_of_different_texts_is_refused(tmp_path):
    for name, hits in (("plain", 200), ("offset", 200), ("longer", 300), ("other", 300)):
        run = add_slices(language_run(tmp_path / "set" / name, "baseline", 0, 3.0), 2.0, 3.25)
        last = json.loads((run / "result.json").read_text(encoding="utf-8"))["last"]
        last["slices"]["recall"]["hit"]["tokens"] = hits
        change(run, "result.json", last=last)
    table = SLICES | {"rows": [{"arm": "offset"}, {"arm": "longer", "against": "other"}]}
    with pytest.raises(AnalysisError, match="why-1: its rows are of different texts"):
        rows(write(tmp_path, slices=[table]))
