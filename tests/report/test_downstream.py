"""Scores on tasks of lm-eval: as figures of a run, in a report, in results.json and in `oelm compare`."""

import json

import pytest

from oelm.analysis import analyse
from oelm.analysis.load import load_run
from oelm.analysis.run import Run
from oelm.cli.comparison import compare_text
from oelm.lab.archive import archive
from oelm.report import write_report
from oelm.runs.folder import check_records, seal_records
from oelm.runs.schema import Downstream, DownstreamMetric, read
from tests.support.records import language_run, task_score, write_scores, write_status


@pytest.fixture
def runs(tmp_path):
    """Return the folder of two methods with two seeds each; frozen answers two questions fewer."""
    for seed in (0, 1):
        for method, right in (("baseline", 7), ("oelm-freeze", 5)):
            run = language_run(tmp_path / "runs", method, seed, 3.0 + seed / 100)
            perplexity = DownstreamMetric(name="word_perplexity", value=50.0 - right + seed, higher_is_better=False)
            text = task_score("texts", shots=2, metrics=[perplexity])
            write_scores(run, task_score(right=right + seed), text)
    return tmp_path / "runs"


def test_scores_are_figures_of_a_run_while_the_model_is_the_results(runs):
    run = load_run(runs / "lr-0.001" / "baseline" / "seed-0")
    assert (run.figure("choices.acc"), run.figure("texts@2.word_perplexity")) == (0.7, 43.0)
    assert run.figure("choices.acc_norm") is None
    write_scores(run.path, task_score(step=100))
    assert load_run(run.path).figure("choices.acc") is None, "the result is about a later model"
    (run.path / "downstream.json").write_text('{"format": 2, "tasks": [{"task": "a"}]}')
    loaded = analyse([runs])
    assert [item.reason.partition(": ")[0] for item in loaded.left_out] == [str(run.path / "downstream.json")]


def test_a_report_shows_the_spread_over_seeds_beside_that_over_questions(runs, tmp_path):
    report = write_report([runs], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    section = text.partition("### Tasks\n")[2]
    lines = [line for line in section.splitlines() if line.startswith("| choices")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[2] for line in cells] == ["`baseline`", "`oelm-freeze`"]
    assert cells[0][5:9] == ["10", "75.00 %", "11.47 % – 100.00 %", "± 14.30 %"]
    assert "−20.00 points" in cells[1][9].replace("\u00a0", " "), "paired by seed"
    perplexity = next(line for line in section.splitlines() if "texts@2" in line and "oelm-freeze" in line)
    assert "45.50" in perplexity
    assert "+4.6" in perplexity, "a perplexity is compared by its ratio"
    assert report.analysis.runs
    row = json.loads((tmp_path / "out" / "results.json").read_text())["runs"][0]
    assert [task["task"] for task in row["downstream"]] == ["choices", "texts"]
    assert "items" not in row["downstream"][0]["metrics"][0]


def test_answers_to_other_questions_are_not_averaged_or_compared(runs, tmp_path):
    folders = [runs / "lr-0.001" / "oelm-freeze" / f"seed-{seed}" for seed in (0, 1)]
    write_scores(folders[1], task_score(right=9, sha256="cd", limit=10))
    write_report([runs], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| choices") and "oelm-freeze" in line]
    assert ["50.00 %" in line or "90.00 %" in line for line in lines] == [True, True]
    baseline = load_run(runs / "lr-0.001" / "baseline" / "seed-1")
    assert "other questions" in compare_text(load_run(folders[1]), baseline)


def test_two_runs_are_compared_with_their_errors_over_questions(runs):
    run, baseline = (load_run(runs / "lr-0.001" / method / "seed-0") for method in ("oelm-freeze", "baseline"))
    lines = [line.split() for line in compare_text(run, baseline).splitlines()]
    (row,) = [line for line in lines if line[:2] == ["choices", "acc"]]
    assert " ".join(row[2:]) == "50.00 % ± 16.67 % 70.00 % ± 15.28 % −20.00 points ± 13.33", (
        "two of ten questions differ"
    )
    assert isinstance(run, Run)


def test_an_archive_has_the_scores_also_those_that_were_added_later(runs, tmp_path):
    run = runs / "lr-0.001" / "baseline" / "seed-0"
    write_status(run, "finished")
    scores = read(run / "downstream.json", Downstream).tasks
    (run / "downstream.json").unlink()
    seal_records(run)
    outcomes = []
    for added in ((), scores[:1], scores, scores):
        if added:
            write_scores(run, *added)
        outcomes += [entry.outcome for entry in archive([run], tmp_path / "kept", 10)]
    assert outcomes == ["archived", "archived", "archived", "there"]
    kept = tmp_path / "kept" / "lr-0.001" / "baseline" / "seed-0"
    check_records(kept)
    assert read(kept / "downstream.json", Downstream).tasks == scores
