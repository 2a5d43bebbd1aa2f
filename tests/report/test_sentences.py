"""What a report says in words: conclusions, verdicts, notes and the names of setups."""

import math
import re

import pytest

from oelm.analysis import analyse
from oelm.report import summary, write_report
from oelm.report.compose import settings
from oelm.report.sentences import comparison_notes, conclusion, setup_name
from oelm.report.words import words
from tests.support.records import (
    classification_run,
    language_run,
)


def test_the_summary_groups_hypotheses_by_verdict(report):
    lines = summary(report.analysis)
    text = "\n".join(lines)
    assert lines[0].startswith("28 runs of 4 methods counted; 2 left out")
    assert "oelm-freeze against baseline: perplexity +10.5 %" in text
    assert "95 % interval" in text
    assert "Significantly worse." in text
    assert re.search(r"one seed: no interval.*0\.001\)\. No verdict", text)
    places = [text.index(heading) for heading in ("What holds", "What does not hold", "What is undecided")]
    assert places == sorted(places)
    assert "- Nothing." in text[places[0] : places[1]]
    assert "TARGET-LOSS" in text[places[1] : places[2]]


def test_a_note_that_begins_with_its_arm_has_no_second_name_in_front(tmp_path):
    for rate, loss in ((1e-3, 3.0), (2e-3, 2.9)):
        language_run(tmp_path / "runs", "baseline", 0, 3.1 - loss / 100, rate)
        language_run(tmp_path / "runs", "oelm-freeze", 0, loss, rate)
        language_run(tmp_path / "runs", "identity-key", 0, 5.9 - loss, rate)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "\n- oelm-freeze is best at the highest learning rate of its grid (0.002)" in text
    assert "every arm: learning rates" in text


def test_a_small_significant_difference_is_worse_and_within_the_margin(tmp_path):
    for seed, noise in enumerate((0.0, 0.001, -0.001)):
        language_run(tmp_path / "runs", "baseline", seed, 3.0 + seed / 50)
        language_run(tmp_path / "runs", "identity-key", seed, 3.02 + seed / 50 + noise)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert "worse, within 5 %" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_perplexities_are_tested_by_their_ratio(tmp_path):
    """A comparison is undecided by its ratio, even if a test of the differences would be significant."""
    for seed, (perplexity, increase) in enumerate(((10, 4), (30, 5), (60, 6))):
        language_run(tmp_path, "baseline", seed, math.log(perplexity))
        language_run(tmp_path, "oelm-freeze", seed, math.log(perplexity + increase))
    (comparison,) = analyse([tmp_path]).comparisons
    assert comparison.difference.p < 0.05 < comparison.ratio.p == comparison.p == comparison.adjusted
    assert "neither a difference nor equivalence" in conclusion(comparison, words("en"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_pairs_that_all_differ_by_the_same_amount_get_a_note_and_no_verdict(tmp_path, language):
    for seed, correct in enumerate((798, 801, 805)):
        classification_run(tmp_path / "runs", "baseline", seed, correct / 872)
        classification_run(tmp_path / "runs", "oelm-freeze", seed, (correct + 2) / 872)
    report = write_report([tmp_path / "runs"], tmp_path / "out", language=language, formats=["md"])
    say, text = words(language), (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    lines = summary(report.analysis, language)
    (line,) = [line for line in lines if "oelm-freeze" in line]
    assert line.endswith(say("says_no_spread"))
    assert say("no_spread_short") in line
    assert not any(say(word) in "".join(lines) + text for word in ("says_better", "says_alike", "one_seed_short"))
    (row,) = [line for line in text.splitlines() if line.startswith("| `oelm-freeze`") and say("undecided") in line]
    assert say("no_spread_short") in row
    assert say("note_no_spread") in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_step_times_that_are_too_noisy_have_no_interval(tmp_path, language):
    """One of two seeds ran on a busy machine, 70 times as slow."""
    for seed, slowdown in enumerate((1, 70)):
        language_run(tmp_path / "runs", "baseline", seed, 3.0)
        language_run(tmp_path / "runs", "oelm-freeze", seed, 3.1 + seed / 100, step_seconds=0.02 * slowdown)
    report = write_report([tmp_path / "runs"], tmp_path / "out", language=language, formats=["md"])
    say, text = words(language), (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    (line,) = [line for line in summary(report.analysis, language) if "TARGET-TIME" in line]
    assert say("too_noisy", n=2) in line
    assert say("note_uneven_times", arm="oelm-freeze", factor=70) in line
    (row,) = [line for line in text.split(say("time_runs"))[1].splitlines() if line.startswith("| `oelm-freeze`")]
    assert say("too_noisy", n=2) in row
    assert not re.search(r"\d,\d{3},\d{3}[\d,]*\.\d %", text), "an interval of millions of percent"


def test_a_setup_is_named_by_the_settings_in_which_it_differs(tmp_path):
    changes_of_setups = [{}, {"data": {"fraction": 0.1}}, {"optimizer": {"layer_decay": 0.8}}]
    changes_of_setups += [{"optimizer": {"name": "muon"}}, {"model": {"fields": {"hidden_size": 64}}}]
    for number, changes in enumerate(changes_of_setups):
        language_run(tmp_path / str(number), changes=changes)
    say = words("en")
    setups = {setup_name(setup, say): settings(setup, say) for setup in analyse([tmp_path]).groups[0].setups}
    suffixes = ["", ", 0.1 of the data", ", layer decay 0.8", ", optimiser muon", ", hidden size 64"]
    assert set(setups) == {f"built-in stories{name}" for name in suffixes}
    assert setups["built-in stories"].startswith("model gpt:tiny · batch 16 · 400 steps · ")
    narrow = setups["built-in stories, hidden size 64"]
    assert narrow.startswith("model gpt:tiny · hidden size 64 · ")


def test_a_setup_without_multipliers_is_named_in_words(tmp_path):
    language_run(tmp_path / "equal", changes={"optimizer": {"multipliers": {}}})
    language_run(tmp_path / "part", changes={"optimizer": {"multipliers": {"v": 3.0}}})
    names = {setup_name(setup, words("en")) for setup in analyse([tmp_path]).groups[0].setups}
    assert names == {"built-in stories, one rate for all matrices", "built-in stories, multipliers v 3"}


def test_no_two_setups_have_the_same_name(tmp_path):
    language_run(tmp_path / "long", steps=800, changes={"optimizer": {"warmup_steps": 20}})
    language_run(tmp_path / "short")
    language_run(tmp_path / "other-warmup", changes={"optimizer": {"warmup_steps": 1}})
    data = {"data": {"splits": {"train": {"sha256": "ef" * 32}}}}
    language_run(tmp_path / "other", steps=800, changes={"optimizer": {"warmup_steps": 20}}, environment=data)
    names = [setup_name(setup, words("en")) for setup in analyse([tmp_path]).groups[0].setups]
    assert len(set(names)) == 4
    assert "built-in stories, 400 steps, warm-up of 1 steps" in names
    assert sum("training data efef" in name for name in names) == 1


@pytest.mark.full
def test_a_confounded_comparison_has_the_same_mark_in_its_table_and_its_note(tmp_path):
    for seed in (0, 1, 2):
        language_run(tmp_path / "runs", "baseline", seed)
        language_run(tmp_path / "runs", "oelm-freeze", seed, changes={"train": {"batch_size": 4}})
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| ❔ confounded |" in text
    assert re.search(r"^- ❔ oelm-freeze: .*confounded by", text, re.MULTILINE)


def test_the_summary_says_when_the_runs_select_no_scenario(tmp_path):
    for seed, noise in enumerate((0.3, -0.4)):
        language_run(tmp_path, "oelm-nofreeze", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.0 + noise)
    analysis = analyse([tmp_path])
    for language, start_of_line in (
        ("en", "These runs leave open whether oelm-freeze"),
        ("zh", "这些运行不足以判断 oelm-freeze"),
    ):
        line = summary(analysis, language)[-1]
        assert line.startswith(start_of_line)
        assert "oelm-nofreeze" in line


@pytest.mark.full
def test_a_published_figure_is_not_judged_on_synthetic_data(tmp_path):
    smoke, synthetic = {"experiment": "GPT-02-smoke"}, {"data": {"synthetic": True}}
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path / "runs", method, changes=smoke, environment=synthetic)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    section = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").split("## Published against measured")[1]
    assert "not judged (synthetic data)" in section
    assert "stand-in" not in section


@pytest.mark.full
def test_a_verdict_on_stand_in_data_says_so(tmp_path):
    for seed, noise in enumerate((0.0, 0.004, -0.003)):
        for method, loss in (("baseline", 3.8), ("oelm-freeze", 3.94 + noise)):
            options = {"description": "old novels, a stand-in for OpenWebText"}
            language_run(tmp_path / "runs", method, seed, loss + noise, **options)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    section = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").split("## Published against measured")[1]
    assert "| GPT-05 | ✅ agrees (stand-in data) | perplexity |" in section


@pytest.mark.parametrize(
    ("language", "note"),
    [("en", "also different: number of threads, commit of oelm"), ("zh", "另有不同：线程数、oelm 的提交")],
)
def test_what_differs_in_the_environment_is_named_in_words(tmp_path, language, note):
    for method, values in (("baseline", ("one", 1)), ("oelm-freeze", ("two", 2))):
        environment = {"git_commit": values[0], "cpu": {"threads": values[1]}}
        language_run(tmp_path, method, 0, 3.0 + values[1] / 10, environment=environment)
    (comparison,) = analyse([tmp_path]).comparisons
    assert comparison_notes(comparison, words(language))[-1] == note
