"""The first screen of a report: what was found in a sentence, the forest plot, and the table with the best in bold."""

import re

import pytest

from oelm.analysis import analyse
from oelm.cli.outcome import summary_lines
from oelm.report import write_report
from oelm.report.charts import Styles
from oelm.report.document import Table
from oelm.report.forest import change_figures
from oelm.report.overview import findings, overview
from oelm.report.words import words
from tests.support.records import classification_run, language_run, study

NOISE = (0.0, 0.004, -0.003)


def three_arms(root):
    """Write runs of a baseline, of one method that is worse, and of one that is better."""
    for method, gap in (("baseline", 0.0), ("oelm-freeze", 0.1), ("identity-key", -0.1)):
        for seed, noise in enumerate(NOISE):
            language_run(root, method, seed, 3.2 + gap + noise * (1 + gap))
    return root


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        (
            "en",
            "Against baseline, perplexity is significantly better with identity-key (−9.5 %); "
            "significantly worse with oelm-freeze (+10.5 %).",
        ),
        ("zh", "与 baseline 相比，困惑度：identity-key（−9.5 %）显著更好；oelm-freeze（+10.5 %）显著更差。"),
    ],
)
def test_one_sentence_says_what_was_found(tmp_path, language, sentence):
    assert findings(analyse([three_arms(tmp_path)]), words(language)) == [sentence]


def test_many_methods_are_counted_with_the_smallest_and_the_largest_change(tmp_path):
    for seed, noise in enumerate(NOISE):
        language_run(tmp_path, "baseline", seed, 3.0 + noise)
        for number, method in enumerate(("oelm-freeze", "oelm-core", "oelm-global", "oelm-random"), start=1):
            language_run(tmp_path, method, seed, 3.0 + 0.1 * number + noise * 1.1)
    (sentence,) = findings(analyse([tmp_path]), words("en"))
    assert "significantly worse with 4 methods, from oelm-freeze (+10.5 %) to oelm-random (+49.2 %)." in sentence


def test_several_setups_are_counted_for_each_method(tmp_path):
    for batch in (8, 16):
        for seed, noise in enumerate(NOISE):
            changes = {"train": {"batch_size": batch}}
            language_run(tmp_path / str(batch), "baseline", seed, 3.0 + noise, changes=changes)
            gap = 0.1 if batch == 8 else 40 * noise
            language_run(tmp_path / str(batch), "oelm-freeze", seed, 3.0 + gap + noise * 1.1, changes=changes)
    analysis, say = analyse([tmp_path]), words("en")
    (sentence,) = findings(analysis, say)
    assert "worse with oelm-freeze (+10.5 %, 1 of 2 setups); undecided in 1 of 2 comparisons." in sentence
    (figure,) = change_figures(analysis, Styles(()), say)
    assert [chart.title for chart in figure.charts] == ["batch 8", "batch 16"]


def test_a_change_without_a_verdict_is_not_called_a_finding(tmp_path):
    language_run(tmp_path, "baseline", 0, 3.0)
    language_run(tmp_path, "oelm-freeze", 0, 3.1)
    (sentence,) = findings(analyse([tmp_path]), words("en"))
    assert sentence.startswith("No verdict yet: against baseline, perplexity changes by +10.5 % (1 method)")
    assert sentence.endswith("but one seed cannot tell a change from chance.")
    language_run(tmp_path, "oelm-core", 0, 3.2, changes={"train": {"max_steps": 99}})
    (sentence,) = findings(analyse([tmp_path]), words("en"))
    assert sentence.endswith("has a single seed, has no spread, or is confounded.")


def test_runs_without_a_comparison_give_their_figure(tmp_path):
    say = words("en")
    language_run(tmp_path / "one", "oelm-freeze", 0, 3.0)
    assert findings(analyse([tmp_path / "one"]), say) == [
        "oelm-freeze reaches perplexity 20.09. There is nothing to compare it with."
    ]
    language_run(tmp_path / "two", "oelm-freeze", 0, 3.0)
    language_run(tmp_path / "two", "oelm-core", 0, 2.9)
    (sentence,) = findings(analyse([tmp_path / "two"]), say)
    assert sentence.startswith("Of 2 methods, oelm-core has the best perplexity: 18.17.")
    language_run(tmp_path / "none", loss=None)
    assert findings(analyse([tmp_path / "none"]), say) == [say("found_nothing")]


def test_the_forest_plot_has_the_best_method_on_top_and_the_margin_as_a_band(tmp_path):
    (figure,) = change_figures(analyse([three_arms(tmp_path / "runs")]), Styles(()), words("en"))
    (chart,) = figure.charts
    assert [row.label for row in chart.rows] == ["identity-key", "oelm-freeze"]
    assert chart.band == (-5.0, 5.0)
    assert "±5 %" in figure.caption
    for seed, noise in enumerate(NOISE):
        for method, accuracy in (("baseline", 0.9), ("oelm-freeze", 0.85), ("oelm-core", 0.92)):
            classification_run(tmp_path / "classifiers", method, seed, accuracy + noise)
    (figure,) = change_figures(analyse([tmp_path / "classifiers"]), Styles(()), words("en"))
    assert [row.label for row in figure.charts[0].rows] == ["oelm-core", "oelm-freeze"]
    assert figure.charts[0].band == (-1.0, 1.0)
    assert "±1 point:" in figure.caption
    (figure,) = change_figures(analyse([tmp_path / "classifiers"]), Styles(()), words("zh"))
    assert "±1 个百分点" in figure.caption


def test_the_table_has_four_columns_and_the_best_method_in_bold(tmp_path):
    write_report([three_arms(tmp_path / "runs")], tmp_path / "out", formats=("md", "html"))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    table = text[text.index("| method |") :].split("\n\n")[0].splitlines()
    assert table[0] == "| method | perplexity | change (95 % interval) | verdict |"
    assert [row.split("|")[1].strip() for row in table[2:]] == ["**`identity-key`**", "`baseline`", "`oelm-freeze`"]
    assert table[2].count("**") == 6
    assert "**" not in "".join(table[3:])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<strong><code>identity-key</code></strong>" in page


def test_no_verdict_is_repeated_beside_its_sentence(tmp_path):
    write_report([study(tmp_path / "runs")], tmp_path / "out", formats=("html",))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    bullets = [part.split("</ul>")[0] for part in page.split('<ul class="points">')[1:]]
    assert bullets
    assert not any('class="chip' in part for part in bullets)


def test_one_seed_is_said_once_and_a_number_stays_beside_its_per_cent_sign(tmp_path):
    for method, loss in (("baseline", 3.0), ("oelm-freeze", 3.1)):
        language_run(tmp_path / "runs", method, 0, loss)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("html",))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '<span class="chip open">one seed</span>' in page
    assert "+10.5\u00a0%" in page
    assert not re.search(r"\d %", page)


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 2)])
def test_a_note_below_the_table_says_when_means_are_over_different_seeds(tmp_path, seeds):
    for method, of_method, gap in (("baseline", (0, 1, 2), 0.0), ("oelm-freeze", seeds, 0.1)):
        for seed in of_method:
            language_run(tmp_path / "runs", method, seed, 3.0 + gap + NOISE[seed] * (1 + gap))
    analysis, say = analyse([tmp_path / "runs"]), words("en")
    (table,) = [block for block in overview(analysis, Styles(()), say) if isinstance(block, Table)]
    assert table.caption == ("" if len(seeds) == 3 else say("unequal_seeds"))


@pytest.mark.parametrize("methods", [1, 4])
def test_a_note_below_the_table_says_that_verdicts_are_corrected_where_an_interval_suggests_another(tmp_path, methods):
    """The same change is significant by itself, and undecided among four."""
    for seed, noise in enumerate((0.0, 0.01, 0.02)):
        language_run(tmp_path, "baseline", seed, 3.0)
        for method in ("oelm-freeze", "oelm-core", "oelm-global", "oelm-random")[:methods]:
            language_run(tmp_path, method, seed, 3.03 + noise)
    analysis, say = analyse([tmp_path]), words("en")
    (table,) = [block for block in overview(analysis, Styles(()), say) if isinstance(block, Table)]
    note = say("corrected_verdicts", count=4)
    assert table.caption == ("" if methods == 1 else note)
    lines = " ".join(" ".join(summary_lines(analysis)).split())
    assert (note in lines) == (methods == 4)


def test_chinese_sentences_follow_each_other_without_a_space(tmp_path):
    (figure,) = change_figures(analyse([three_arms(tmp_path)]), Styles(()), words("zh"))
    assert "。" in figure.caption
    assert "。 " not in figure.caption
