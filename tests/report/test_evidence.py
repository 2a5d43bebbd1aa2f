"""docs/results.md and the README's headlines: up to date with the records, without measured numbers in their prose."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

from oelm.analysis import AnalysisError
from oelm.report.evidence import evidence_document, write_evidence, write_headlines
from oelm.report.markdown import to_markdown
from tests.support.records import language_run

ROOT = Path(__file__).parents[2]
QUESTION = {"id": "cost", "question": "Why?", "setting": "Here.", "conclusion": "So.", "open": "All."}
STUDY_QUESTION = {**QUESTION, "runs": ["study"]}


def test_the_results_document_is_up_to_date():
    committed = ROOT / "docs" / "results.md"
    expected = to_markdown(evidence_document(ROOT / "results/questions.yaml", committed.parent))
    assert expected == committed.read_text(encoding="utf-8"), "run `make results`"


@pytest.mark.parametrize(("name", "language"), [("README.md", "en"), ("README.zh-CN.md", "zh")])
def test_the_headlines_of_a_readme_are_up_to_date(name, language, tmp_path):
    committed = (ROOT / name).read_text(encoding="utf-8")
    assert committed.count("\n| [") == 4
    copy = tmp_path / name
    copy.write_text(committed.replace("oelm-freeze` |", "oelm-freeze` | 1 %"), encoding="utf-8")
    write_headlines(ROOT / "results/questions.yaml", copy, language)
    assert copy.read_text(encoding="utf-8") == committed, "run `make results`"


def test_the_pictures_of_the_readmes_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "attention")
    overview = runpy.run_path(str(ROOT / "docs" / "attention" / "overview.py"))
    assert overview["TEXTS"]["en"].keys() == overview["TEXTS"]["zh"].keys()
    for language, readme in (("en", "README.md"), ("zh", "README.zh-CN.md")):
        file = overview["FILES"][language]
        assert file.read_text(encoding="utf-8") == overview["svg"](language), "run `make results`"
        assert f"(docs/{file.name})" in (ROOT / readme).read_text(encoding="utf-8")


def test_headlines_are_written_between_their_markers_and_each_needs_one_comparison(tmp_path):
    for seed, noise in enumerate((0.0, 0.01)):
        language_run(tmp_path / "study", "baseline", seed, 3.0 + noise)
        language_run(tmp_path / "study", "oelm-freeze", seed, 3.2 + 2 * noise)
    headline = {"text": {"en": "both frozen"}, "arm": "oelm-freeze", "runs": ["study"], "question": "cost"}
    file, readme = tmp_path / "questions.yaml", tmp_path / "README.md"

    def write(**changes):
        content = {"title": "T", "about": "A", "questions": [STUDY_QUESTION], "headlines": [{**headline, **changes}]}
        file.write_text(yaml.safe_dump(content))
        return write_headlines(file, readme).read_text()

    readme.write_text("# Nothing\n")
    with pytest.raises(AnalysisError, match=r"README\.md.*headlines: written by make results"):
        write()
    readme.write_text("# Head\n<!-- headlines: written by make results -->\nold\n<!-- /headlines -->\ntail\n")
    text = write()
    assert text.startswith("# Head\n<!--")
    assert text.endswith("<!-- /headlines -->\ntail\n")
    assert "old" not in text
    assert "| [both frozen](<docs/results.md#cost>) | `oelm-freeze` | perplexity +22." in text
    for wrong in ({"arm": "oelm-frozen"}, {"question": "costs"}):
        with pytest.raises(AnalysisError, match=f"headline of '{wrong.get('arm', 'oelm-freeze')}'"):
            write(**wrong)
    write()
    with pytest.raises(AnalysisError, match="has no text in 'zh'"):
        write_headlines(file, readme, "zh")
    assert readme.read_text() == text
    language_run(tmp_path / "other", "freeze-pretrained", 0, 3.0)
    language_run(tmp_path / "other", "oelm-freeze", 0, 3.2)
    other_question = {**STUDY_QUESTION, "id": "other", "runs": ["other"]}
    headlines = [headline, {**headline, "runs": ["other"], "question": "other"}]
    for wrong, message in ((headlines, "baseline, freeze-pretrained"), ([], "no headlines")):
        content = {"title": "T", "about": "A", "questions": [STUDY_QUESTION, other_question], "headlines": wrong}
        file.write_text(yaml.safe_dump(content))
        with pytest.raises(AnalysisError, match=message):
            write_headlines(file, readme)


def test_docs_figures_has_exactly_the_linked_figures():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    linked = [part.partition(")")[0] for part in text.split("](figures/")[1:]]
    assert linked
    assert sorted(path.name for path in (ROOT / "docs/figures").iterdir()) == sorted(linked)


def test_several_setups_share_a_table_and_a_figure(tmp_path):
    """A single setup has its own figure; several setups share one, whose rows are labelled with what differs."""
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [STUDY_QUESTION]}))

    def figures():
        return {figure.name: figure for figure in evidence_document(file, tmp_path).figures}

    for seed in (0, 1):
        language_run(tmp_path / "study", "baseline", seed, 3.0)
        language_run(tmp_path / "study", "oelm-freeze", seed, 3.2 + seed / 100)
    assert set(figures()) == {"cost-1-change"}
    language_run(tmp_path / "study" / "long", "baseline", 0, 2.9, steps=800)
    language_run(tmp_path / "study" / "long", "oelm-freeze", 0, 3.1, steps=800)
    assert set(figures()) == {"cost-all"}
    (chart,) = figures()["cost-all"].charts
    assert sorted(row.label for row in chart.rows) == [
        "oelm-freeze: 400 steps",
        "oelm-freeze: 800 steps",
    ]
    assert [row.hollow for row in chart.rows] == [False, True], "one seed gives no interval"
    overview = to_markdown(evidence_document(file, tmp_path)).split("| data |")[1].split("\n\n")[0]
    assert [row.split("|")[1].strip() for row in overview.splitlines()[2:]] == [
        "[built-in stories, 400 steps](<#cost-1>)",
        "[built-in stories, 800 steps](<#cost-2>)",
    ]


def test_a_setup_and_a_note_on_several_arms_are_written_once(tmp_path):
    for method in ("baseline", "oelm-freeze", "oelm-core", "oelm-global"):
        for seed in (0, 1):
            language_run(tmp_path / "study", method, seed, 3.0 + seed / 100)
    for method in ("baseline", "oelm-core"):
        language_run(tmp_path / "study", method, 0, 3.3, rate=2e-3)
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path / "study" / "long", method, 0, 2.9, steps=800)
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [STUDY_QUESTION]}))
    text = write_evidence(file, tmp_path / "results.md", draw=False).read_text()
    overview = text.split("| data |")[1].split("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip()[:1] for row in overview] == ["[", "", "", "["]
    one_rate = "0.001 is the only learning rate that both arms were run at"
    short, long = text.split('<a id="cost-2"></a>')
    assert short.count(one_rate) == 1
    assert f"- every arm but oelm-core: {one_rate}" in short
    assert "- oelm-core: learning rates 0.001, 0.002" in short
    assert f"- oelm-freeze: {one_rate}" in long


def test_arms_are_compared_with_each_other_when_a_question_lists_the_pair(tmp_path):
    """Against a noisy baseline no arm differs significantly, but compared by seed the arms differ from each other."""
    for seed, noise in enumerate((0.0, 0.4, -0.3)):
        language_run(tmp_path / "study", "baseline", seed, 3.0 + noise)
        language_run(tmp_path / "study", "oelm-freeze", seed, 3.2)
        language_run(tmp_path / "study", "oelm-core", seed, 3.1 + 0.001 * seed)
        language_run(tmp_path / "study", "oelm-global", seed, 3.2 + 0.001 * (seed - 1))
    pairs = [{"arm": "oelm-core", "against": "oelm-freeze"}, {"arm": "oelm-freeze", "against": "oelm-global"}]
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**STUDY_QUESTION, "pairs": pairs}]}))
    text = write_evidence(file, tmp_path / "results.md", draw=False).read_text()
    before, _, direct = text.partition("Arms against each other")
    assert "| `oelm-core` | `baseline` | ❔ undecided |" in before
    assert "| `oelm-core` | `oelm-freeze` | ✅ better |" in direct
    assert "| `oelm-freeze` | `oelm-global` | ✅ alike, within 5 % |" in direct
    pairs[0]["against"] = "oelm-frozen"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**STUDY_QUESTION, "pairs": pairs}]}))
    with pytest.raises(AnalysisError, match="'oelm-core' and 'oelm-frozen'"):
        write_evidence(file, tmp_path / "results.md", draw=False)


def test_details_are_bullet_points_below_the_conclusion(tmp_path):
    language_run(tmp_path / "study", "baseline", 0, 3.0)
    file = tmp_path / "questions.yaml"
    question = {**STUDY_QUESTION, "details": ["One thing.", "Another\nthing."]}
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [question]}))
    text = write_evidence(file, tmp_path / "results.md", draw=False).read_text()
    assert "\nSo.\n\n- One thing.\n- Another thing.\n\n*Here.*\n" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conclusion": "It loses 12.3 % there."}, "conclusion.*12.3 %"),
        ({"details": ["It loses.", "By 3 points."]}, "details.*3 points"),
        ({"runs": ["nothing-*"]}, r"nothing-\*"),
        ({"asks": "x"}, "asks"),
    ],
)
def test_bad_questions_are_refused(changes, message, tmp_path):
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**QUESTION, **changes}]}))
    with pytest.raises(AnalysisError, match=message):
        write_evidence(file, tmp_path / "results.md", draw=False)
