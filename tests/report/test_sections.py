"""The sections of a report on unusual or incomplete records."""

import csv
import json
import math
import re

import pytest

from oelm.analysis import analyse
from oelm.report import summary, write_report
from oelm.report.chart_choice import setup_figures
from oelm.report.charts import Styles
from oelm.report.compose import arms_table
from oelm.report.words import words
from oelm.runs.schema import FORMAT
from tests.support.records import (
    bench_row,
    change,
    classification_run,
    decode_row,
    language_run,
    study,
    write,
)


def test_a_figure_says_how_many_of_the_methods_it_shows(tmp_path):
    methods = ["oelm-freeze", *({"preset": "oelm-freeze", "q": {"scale": scale}} for scale in range(2, 9))]
    for method in methods:
        language_run(tmp_path / "runs", method)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("html",))
    assert "6 of 8 methods" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def _figures(root):
    """Return the figures of the first setup of some runs, by kind."""
    analysis = analyse([root])
    setup = analysis.groups[0].setups[0]
    figures, _ = setup_figures(analysis, setup, 1, Styles(arm.method for arm in setup.arms), words("en"))
    return {figure.name.partition("-")[2]: figure for figure in figures}


def test_time_to_a_target_is_read_from_the_curves_of_runs_without_targets(tmp_path):
    for method, loss in (("baseline", 3.0), ("oelm-freeze", 3.1)):
        for seed in (0, 1):
            language_run(tmp_path, method, seed, loss + seed / 100, changes={"eval": {"targets": []}})
    figure = _figures(tmp_path)["target"]
    (chart,) = figure.charts
    baseline, freeze = chart.series
    assert baseline.y == freeze.y == sorted(baseline.y, reverse=True)
    assert baseline.y[-1] == pytest.approx(math.exp(3.11)), "what the worst run ends with is reached by all"
    assert all(one <= other for one, other in zip(baseline.x["steps"], freeze.x["steps"], strict=True))
    assert (baseline.x["steps"][-1], freeze.x["steps"][-1]) == (300, 400)
    assert "recorded no common targets" in figure.caption


def test_quality_is_shown_against_the_cache_that_a_benchmark_measured(tmp_path):
    for method, loss in (("baseline", 3.0), ("identity-key", 3.1), ("oelm-freeze", 3.2)):
        language_run(tmp_path, method, 0, loss)
    assert "cache" not in _figures(tmp_path)
    cache = {"baseline": 12288.0, "identity-key": 6144.0, "another": 1.0}
    write(tmp_path / "bench", "decode.json", [decode_row(arm, size) for arm, size in cache.items()])
    (chart,) = _figures(tmp_path)["cache"].charts
    assert {series.name: series.x["x"] for series in chart.series} == {"baseline": [12288.0], "identity-key": [6144.0]}


def test_the_layers_of_a_method_have_its_colour_in_shades(tmp_path):
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path, method)
    for chart, style in zip(_figures(tmp_path)["entropy"].charts, (0, 1), strict=True):
        assert {series.style for series in chart.series} == {style}
        assert sorted({series.shade for series in chart.series}) == [series.shade for series in chart.series]


@pytest.mark.full
def test_a_run_that_nearly_diverged_gives_no_numbers_with_dozens_of_digits(tmp_path):
    for seed, (baseline_loss, freeze_loss) in enumerate([(3.0, 3.0), (3.01, 190.0)]):
        language_run(tmp_path / "runs", "baseline", seed, baseline_loss)
        language_run(tmp_path / "runs", "oelm-freeze", seed, freeze_loss)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=["md", "html"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "too noisy to say" in text
    assert not re.search(r"[\d,]{30}", text)


def test_a_report_is_written_although_a_confusion_matrix_is_not_square(tmp_path):
    for seed, labels in enumerate((["a", "b", "c"], ["a", "b"])):
        folder = classification_run(tmp_path / "runs", "baseline", seed, 0.9)
        change(folder, "result.json", labels=labels)
    ragged = classification_run(tmp_path / "runs", "oelm-freeze", 0, 0.8)
    change(ragged, "result.json", last={"step": 300, "loss": 0.2, "confusion": [[1, 2], [3]]})
    report = write_report([tmp_path / "runs"], tmp_path / "out", formats=["html"])
    assert len(report.analysis.runs) == 3


def test_a_report_without_comparisons_still_lists_its_runs(tmp_path):
    language_run(tmp_path / "runs", "oelm-freeze", 0, attention=False)
    report = write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert report.analysis.comparisons == ()
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "learning-rate sweep: no arm was run at more than one rate" in text
    assert "attention entropy" in text
    assert summary(report.analysis)[0] == "1 run of 1 method, all counted."
    assert "from 1 run in " in text


def test_a_report_is_written_even_if_no_run_is_counted(tmp_path):
    folder = language_run(tmp_path / "runs", loss=None)
    report = write_report([tmp_path / "runs"], tmp_path / "out", formats=("md", "html"))
    assert report.analysis.runs == ()
    assert folder.name in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert summary(report.analysis)[0].startswith("0 runs of 0 methods counted; 1 left out")


@pytest.mark.full
def test_six_seeds_give_a_bootstrap_interval_as_well(tmp_path):
    write_report([study(tmp_path / "runs", seeds=6)], tmp_path / "out", formats=("html",))
    with open(tmp_path / "out" / "tables" / "1-comparisons.csv", encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    numbers = [float(n) for n in re.findall(r"[+−]([\d.]+) %", f"{row['95 % interval']} {row['bootstrap']}")]
    assert numbers[:2] == pytest.approx(numbers[2:], abs=0.5)
    assert row["seeds"] == "6"


def test_other_splits_and_notes_of_the_records_are_shown(tmp_path):
    for seed in (0, 1):
        for method in ("baseline", "oelm-freeze"):
            folder = classification_run(tmp_path / "runs", method, seed, 0.83 + seed / 100, task="mnli")
    change(folder, "result.json", warnings=["12 training texts were longer than 128 tokens: cut"])
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("html",))
    table = (tmp_path / "out" / "tables" / "1-other-splits.csv").read_text(encoding="utf-8")
    assert "baseline,mismatched,2e-05,2,82.50 %" in table
    assert "12 training texts were longer" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_results_on_other_splits_give_the_step_of_their_model(tmp_path):
    """If no best model was kept, the last model was evaluated, and the report must not say that it was the best one."""
    for seed, best in enumerate((200, 300)):
        folder = classification_run(tmp_path / "runs", "baseline", seed, 0.83 + seed / 100, task="mnli")
        change(folder, "result.json", best={"step": best, "loss": 0.2, "accuracy": 0.85})
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    section = text.split("### Other labelled splits")[1].split("##")[0]
    assert "model from step" in section
    assert re.search(r"mismatched .*\| 300 \|", section)
    assert "best model if it was kept, otherwise of its last one" in section
    evaluated = json.loads((folder / "result.json").read_text())["evaluations"]["mismatched"]
    change(folder, "result.json", evaluations={"mismatched": {**evaluated, "step": 200}})
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert re.search(r"mismatched .*\| 200 – 300 \|", (tmp_path / "out" / "report.md").read_text(encoding="utf-8"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("language", "cross"), [("en", "The cross is the time expected"), ("zh", "叉号为仅按")])
def test_the_flop_bound_is_shown_only_with_a_reference(tmp_path, language, cross):
    for seed in (0, 1):
        language_run(tmp_path / "without", "oelm-freeze", seed)
        language_run(tmp_path / "with", "oelm-freeze", seed)
        language_run(tmp_path / "with", "baseline", seed)
    captions = {}
    for runs in ("with", "without"):
        write_report([tmp_path / runs], tmp_path / "out" / runs, formats=("md",), language=language)
        text = (tmp_path / "out" / runs / "report.md").read_text(encoding="utf-8")
        (captions[runs],) = [line for line in text.splitlines() if words(language)("cap_time") in line]
    assert cross in captions["with"]
    assert "baseline" in captions["with"]
    assert cross not in captions["without"]


def test_a_benchmark_of_batches_of_different_size_has_a_warning(tmp_path):
    language_run(tmp_path / "runs")
    smaller_batches = bench_row("oelm-freeze@8", ratio=0.5, batch_size=8, ratio_per_example=0.97, warning="!")
    (tmp_path / "runs" / "bench.json").write_text(json.dumps([bench_row(), smaller_batches]))
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert text.count("steps of different size") == 1
    assert "oelm-freeze@8" in text
    assert "Per example its ratio is 0.970" in text


def test_the_interval_of_a_perplexity_that_would_reach_below_zero_is_left_out(tmp_path):
    for seed, loss in enumerate((3.0, 4.5)):
        language_run(tmp_path / "wide", "baseline", seed, loss)
        language_run(tmp_path / "narrow", "baseline", seed, 3.0 + 0.01 * seed)
    say = words("en")
    for runs, cell, note in (("wide", say("below_zero_short"), True), ("narrow", "18.90 – 21.47", False)):
        analysis = analyse([tmp_path / runs])
        table = arms_table(analysis, analysis.groups[0].setups[0], 1, say)
        assert table.rows[0][4].text == cell
        assert (say("note_below_zero") in table.caption) == note


def test_a_report_shows_the_texts_of_all_arms_side_by_side(tmp_path):
    study(tmp_path / "runs", seeds=2)
    scores = {"words": 9, "distinct": [0.5, 0.75, 1.0], "repetition": 0.25, "self_bleu": 12.5, "judge_perplexity": None}
    way = {"model": "best", "step": 400, "tokens": 8, "temperature": 0.8, "top_k": 50, "seed": 0, "judge": None}
    for folder in tmp_path.glob("runs/lr-0.001/*/seed-*"):
        method, seed = folder.parent.name, folder.name
        texts = [f" <b>{method}</b> of {seed}", "again"]
        prompts = [{"prompt": "Once upon", "texts": texts}]
        other = {"temperature": 1.0} if (method, seed) == ("oelm-freeze", "seed-1") else {}
        write(folder, "samples.json", {"format": FORMAT, **way, **other, "scores": scores, "prompts": prompts})
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md", "html"))
    table = (tmp_path / "out" / "tables" / "1-samples.csv").read_text(encoding="utf-8").splitlines()
    assert table[1].startswith("baseline,2,50.0 %,75.0 %,100.0 %,25.0 %,12.5,–,")
    assert table[2].startswith("oelm-freeze,1,"), "a run that was sampled in another way is not shown"
    texts = (tmp_path / "out" / "tables" / "1-samples-1.csv").read_text(encoding="utf-8")
    assert "baseline,<b>baseline</b> of seed-0" in texts
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<b>baseline</b>" not in html
    assert "After “Once upon”:" in html
