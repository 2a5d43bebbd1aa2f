"""docs/results.md and the README's headlines: up to date with the records, without measured numbers in their prose."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from oelm.analysis import AnalysisError
from oelm.report.evidence import evidence_pages, write_evidence, write_headlines
from oelm.report.markdown import to_markdown
from tests.support.records import language_run

ROOT = Path(__file__).parents[2]
QUESTION = {"id": "cost", "question": "Why?", "setting": "Here.", "conclusion": "So.", "open": "All."}
STUDY_QUESTION = {**QUESTION, "runs": ["study"]}


def details(file, id="cost"):
    """Return the page with the details of a question."""
    return evidence_pages(file, file.parent / "results.md")[file.parent / "results" / f"{id}.md"]


def test_the_pages_of_results_are_up_to_date():
    committed = ROOT / "docs" / "results.md"
    pages = evidence_pages(ROOT / "results/questions.yaml", committed)
    assert {*(ROOT / "docs/results").glob("*.md")} == set(pages) - {committed}, "run `make results`"
    for path, page in pages.items():
        assert to_markdown(page) == path.read_text(encoding="utf-8"), f"{path.name}: run `make results`"
    assert len(committed.read_text(encoding="utf-8").splitlines()) <= 150


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


@pytest.mark.parametrize("pages", ["docs/results.md", "docs/results/*.md"])
def test_a_folder_of_figures_has_exactly_the_linked_figures(pages):
    linked = set()
    for page in ROOT.glob(pages):
        linked |= {part.partition(")")[0] for part in page.read_text(encoding="utf-8").split("](figures/")[1:]}
    assert linked
    folder = (ROOT / pages).parent / "figures"
    assert sorted(path.name for path in folder.iterdir()) == sorted(linked)


def test_several_setups_share_a_table_and_a_figure(tmp_path):
    """A single setup has its own figure; several setups share one, whose rows are labelled with what differs."""
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [STUDY_QUESTION]}))

    def figures():
        return {figure.name: figure for figure in details(file).figures}

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
    overview = to_markdown(details(file)).split("| data |")[1].split("\n\n")[0]
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
    text = to_markdown(details(file))
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
    text = to_markdown(details(file))
    before, _, direct = text.partition("Arms against each other")
    assert "| `oelm-core` | `baseline` | ❔ undecided |" in before
    assert "| `oelm-core` | `oelm-freeze` | ✅ better |" in direct
    assert "| `oelm-freeze` | `oelm-global` | ✅ alike, within 5 % |" in direct
    pairs[0]["against"] = "oelm-frozen"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**STUDY_QUESTION, "pairs": pairs}]}))
    with pytest.raises(AnalysisError, match="'oelm-core' and 'oelm-frozen'"):
        details(file)


def test_details_are_bullet_points_below_the_conclusion(tmp_path):
    language_run(tmp_path / "study", "baseline", 0, 3.0)
    file = tmp_path / "questions.yaml"
    question = {**STUDY_QUESTION, "details": ["One thing.", "Another\nthing."]}
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [question]}))
    text = to_markdown(details(file))
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


def test_the_page_of_answers_links_to_details_and_leaves_no_page_of_a_question_that_is_gone(tmp_path):
    language_run(tmp_path / "study", "baseline", 0, 3.0)
    language_run(tmp_path / "study", "oelm-freeze", 0, 3.2)
    file, out = tmp_path / "questions.yaml", tmp_path / "results.md"
    file.write_text(
        yaml.safe_dump({"title": "T", "about": "A", "questions": [STUDY_QUESTION, {**QUESTION, "id": "b"}]})
    )
    assert write_evidence(file, out) == [out, tmp_path / "results/cost.md", tmp_path / "results/b.md"]
    text = out.read_text()
    assert "[Tables, figures and runs](<results/cost.md>)" in text
    assert "[R1]" not in text
    assert "[R1]: <../study/lr-0.001/baseline/seed-0>" in (tmp_path / "results/cost.md").read_text()
    assert (tmp_path / "results/figures/cost-1-change.svg").is_file()
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**QUESTION, "id": "b"}]}))
    write_evidence(file, out)
    assert sorted(path.name for path in (tmp_path / "results").rglob("*.*")) == ["b.md"]


def test_arms_of_different_setups_are_shown_beside_a_reference(tmp_path):
    for seed in range(3):
        language_run(tmp_path / "study", "baseline", seed, 3.0 + seed / 100)
        language_run(tmp_path / "other", "baseline", seed, 3.02 + seed / 90, steps=800)
    language_run(tmp_path / "one", "oelm-freeze", 0, 3.3)
    row = {"token_ms": None, "tokens_per_second": None, "ratio": None, "ratio_95": None, "cache_ratio": 1.0}
    row |= {"context": 8, "batch_size": 1, "compiled": False, "rounds": 1, "layers": 2}
    sizes = {"multi-head": 512.0, "identity-key": 256.0}
    bench = [{"arm": arm, "cache_bytes_per_token": size, **row} for arm, size in sizes.items()]
    (tmp_path / "decode.json").write_text(json.dumps(bench))
    shown = {
        "title": "A GPT",
        "reference": {"name": "the reference", "runs": ["study"], "form": "multi-head"},
        "arms": [{"name": "frozen", "runs": ["one"]}, {"name": "longer", "runs": ["other"], "form": "identity-key"}],
        "benches": ["decode.json"],
    }
    file = tmp_path / "questions.yaml"

    def page(**changes):
        question = {**QUESTION, "runs": ["study", "other", "one"], "shown": [{**shown, **changes}]}
        file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [question]}))
        return details(file)

    drawn = page()
    logs = np.array([0.02 + seed / 90 - seed / 100 for seed in range(3)])
    bounds = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in drawn.tables[0].rows}
    assert list(rows) == ["the reference", "longer", "frozen"]
    change, wide, narrow, texts, _, cache, _ = rows["longer"][1:]
    assert change == f"+{100 * np.expm1(logs.mean()):.2f} %"
    assert wide == " – ".join(f"+{100 * np.expm1(bound):.2f} %" for bound in (bounds.low, bounds.high))
    assert (narrow != wide, texts, cache) == (True, "–", "128")
    assert (rows["frozen"][1][:2], rows["frozen"][2], rows["frozen"][6]) == ("+3", "–", "–")
    assert [figure.name for figure in drawn.figures] == ["cost-forest", "cost-cache-1"]
    assert [series.x["x"] for series in drawn.figures[1].charts[0].series] == [[256.0], [128.0]]
    assert page(drawn=False).figures == []
    for changes, problem in [
        ({"benches": []}, "no benchmark of generation has the form 'multi-head'"),
        ({"arms": [{"name": "twice", "runs": ["study", "other"]}]}, "'twice' has two runs of seed 0"),
        ({"arms": [{"name": "none", "runs": ["*.json"]}]}, "'none' has no finished run"),
    ]:
        with pytest.raises(AnalysisError, match=problem):
            page(**changes)
