"""The files of a report: every format, the data files, both languages, and reasons for formats that are left out."""

import csv
import json
import re
from pathlib import Path

import pytest

from oelm.report import drawing, summary, write_report
from oelm.report import pdf as typesetting
from oelm.report.tables import latex
from oelm.report.words import words
from tests.support.records import (
    bench_row,
    classification_run,
    language_run,
    study,
    write,
)

needs_typst = pytest.mark.skipif(not typesetting.available(), reason="typst is not installed")


def test_every_format_is_written(report):
    folder = report.files[0].parent.parent
    assert report.problems == ()
    for name in ("report.md", "report.html", "report.pdf", "results.csv", "results.json"):
        assert (folder / name).stat().st_size > 500
    assert (folder / "report.pdf").read_bytes()[:5] == b"%PDF-"
    figure_files = {path.name for path in (folder / "figures").iterdir()}
    kinds = {re.sub(r"^\d+-|\.\w+$", "", name) for name in figure_files}
    assert kinds == {
        *("change", "accuracy", "validation", "training", "sweep", "parameters", "time", "target", "map"),
        *("entropy", "logits", "confusion"),
    }
    assert {name.replace(".svg", ".png") for name in figure_files if name.endswith(".svg")} <= figure_files


def test_markdown_lists_every_run_with_a_link_to_its_folder(report, runs):
    folder = report.files[0].parent.parent
    text = (folder / "report.md").read_text(encoding="utf-8")
    links = dict(re.findall(r"^\[(R\d+)\]: <(.+)>$", text, re.MULTILINE))
    assert len(links) == len(report.analysis.runs) == 28
    for handle, link in links.items():
        assert (folder / link / "result.json").is_file(), handle
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(pictures) > 15
    assert all((folder / picture).is_file() for picture in pictures)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert "the disk is full" in text
    assert re.search(r"accuracy 51\.0%.* 51\.0%", text)
    assert text.index("## Summary") < text.index("## Results")


def test_csv_has_a_line_for_every_run_counted_or_not(report, runs):
    folder = report.files[0].parent.parent
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows].count("finished") == 28
    assert {row["state"] for row in rows} == {"finished", "failed", "at-chance"}
    first = next(row for row in rows if row["run"] == "R1")
    assert float(first["val_loss"]) == pytest.approx(
        json.loads(Path(first["path"], "result.json").read_text())["val_loss"]
    )


def test_json_has_what_the_report_shows(report):
    folder = report.files[0].parent.parent
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (freeze,) = [
        comparison
        for comparison in data["comparisons"]
        if (comparison["arm"], comparison["measure"]) == ("oelm-freeze", "perplexity")
    ]
    assert freeze["ratio"]["low"] < freeze["ratio"]["mean"] < freeze["ratio"]["high"]
    assert freeze["n"] == 3
    verdicts = {hypothesis["id"]: hypothesis["verdict"] for hypothesis in data["hypotheses"]}
    assert verdicts["TARGET-LOSS"] == "refuted"
    assert {figure["id"] for figure in data["published"]} >= {"SST-2-01", "SST-2-02"}


def test_numbers_in_the_report_are_those_of_the_records(report):
    """The mean of an arm, recomputed from result.json files alone."""
    folder = report.files[0].parent.parent
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["method"] == "oelm-freeze" and row["learning_rate"] == "0.001"
        ]
    values = [json.loads(Path(row["path"], "result.json").read_text())["perplexity"] for row in rows]
    mean = f"{sum(values) / len(values):.2f}"
    table = (folder / "tables" / "2-arms.csv").read_text(encoding="utf-8")
    line = next(line for line in table.splitlines() if line.startswith("oelm-freeze,0.001"))
    assert mean in line


def test_latex_tables_are_complete_and_escaped(report):
    folder = report.files[0].parent.parent
    for file in (folder / "tables").glob("*.tex"):
        text = file.read_text(encoding="utf-8")
        body = text[text.index("\\midrule") : text.index("\\bottomrule")]
        columns = len(re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1])
        for line in body.splitlines()[1:]:
            assert line.endswith(r" \\")
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1
    assert latex("50 % of a_b & {c} <d>") == r"50 \% of a\_b \& \{c\} \textless{}d\textgreater{}"


@pytest.mark.full
def test_a_chinese_report_has_no_english_sentences(runs, tmp_path):
    report = write_report([runs], tmp_path / "out", language="zh", formats=("md", "html"))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "## 摘要" in text
    assert "困惑度：oelm-freeze（+10.5 %）显著更差" in text
    english = [sentence for sentence in words("en").texts.values() if len(sentence) > 25 and "{" not in sentence]
    assert [sentence for sentence in english if sentence in text] == []
    assert 'lang="zh-CN"' in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert any("对比" in line for line in summary(report.analysis, "zh"))


@needs_typst
def test_without_a_chinese_font_pdf_and_png_are_left_out_with_a_reason(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(typesetting, "cjk_font", lambda: None)
    monkeypatch.setattr(drawing, "cjk_font", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.pdf").write_bytes(b"of an earlier report")
    report = write_report([runs / "lr-0.001" / "baseline"], out, language="zh")
    assert not (out / "report.pdf").exists()
    assert (out / "report.md").is_file()
    assert any("fonts-noto-cjk" in problem and "report.pdf" in problem for problem in report.problems)
    assert any("fonts-noto-cjk" in problem and "PNG" in problem for problem in report.problems)
    suffixes = {path.suffix for path in (out / "figures").iterdir()}
    assert suffixes == {".svg"}, "an SVG uses the reader's fonts; a PNG would show boxes"
    assert "困惑度" in (out / "figures" / "1-validation.svg").read_text(encoding="utf-8")


@needs_typst
def test_no_page_of_the_pdf_is_empty(report):
    """Every page but the last has something in its lower half: a figure that does not fit leaves no page behind."""
    pdfium = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    document = pdfium.PdfDocument(report.files[0].parent.parent / "report.pdf")
    lowest = []
    for page in document:
        dark = page.render(scale=0.5, grayscale=True).to_numpy().min(axis=1) < 200
        content = dark[: int(0.92 * len(dark))]  # without the line at the foot of the page
        lowest.append(max((row / len(dark) for row in content.nonzero()[0]), default=0.0))
    assert len(lowest) > 5
    assert min(lowest[:-1]) > 0.5, lowest


@needs_typst
def test_names_and_chips_in_a_table_of_the_pdf_do_not_overlap(tmp_path):
    """They cannot be broken: a column that is too narrow would let them run into the next one."""
    pdfium = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    study(tmp_path / "runs")
    for method in ("oelm-random-matched", {"preset": "oelm-freeze", "layers": "except-first:2"}):
        language_run(tmp_path / "runs", method, 0, 3.2)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("pdf",))
    gaps = []
    for page in pdfium.PdfDocument(tmp_path / "out" / "report.pdf"):
        text = page.get_textpage()
        for match in re.finditer(r"(ORTHOGONAL|TARGET-TIME|GPT-\d\d|undecided) (?=\w)", text.get_text_range()):
            box, after = text.get_charbox(match.end() - 2), text.get_charbox(match.end())
            if abs(box[1] - after[1]) < 1:  # in the same line
                gaps.append((match[1], after[0] - box[2]))
    assert {"ORTHOGONAL", "undecided"} <= {name for name, _ in gaps}
    assert [gap for gap in gaps if gap[1] < 4] == []


@needs_typst
@pytest.mark.skipif(
    not (typesetting.available() and typesetting.cjk_font()), reason="no CJK font: fonts-noto-cjk has one"
)
def test_the_chinese_pdf_embeds_a_chinese_font(runs, tmp_path):
    pdfium = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    write_report([runs / "lr-0.001" / "baseline"], tmp_path, language="zh", formats=("pdf",))
    document = pdfium.PdfDocument(tmp_path / "report.pdf")
    text = "".join(page.get_textpage().get_text_range() for page in document)
    assert "摘要" in text
    assert "困惑度" in text


@pytest.mark.full
def test_without_typst_the_pdf_is_left_out_with_a_reason(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(typesetting, "available", lambda: False)
    report = write_report([runs], tmp_path)
    assert [problem for problem in report.problems if "typst" in problem and "oelm[report]" in problem]
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "report.md").is_file()
    assert not (tmp_path / "report.pdf").exists()


def test_a_report_removes_only_files_that_an_earlier_one_listed(tmp_path):
    out, unrelated = tmp_path / "out", {}
    for name in ("figures/1-model.svg", "figures/9-change.png", "tables/bench-by-hand.csv", "tables/notes.json"):
        unrelated[out / name] = name
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    language_run(tmp_path / "runs", "oelm-freeze", 0, 3.2)
    language_run(tmp_path / "runs", "baseline", 0, 3.0)
    write_report([tmp_path / "runs"], out, formats=["md"])
    pictures = set((out / "figures").glob("1-*.svg")) - set(unrelated)
    assert pictures
    assert (out / "tables" / "1-comparisons.csv").is_file()
    (out / "tables" / "files.json").write_text(
        json.dumps([*json.loads((out / "tables" / "files.json").read_text()), "../runs", "figures/../../x.csv", 3])
    )
    classification_run(tmp_path / "others", "baseline", 0, 0.8)
    write_report([tmp_path / "others"], out, formats=["html"])
    assert not any(path.exists() for path in pictures)
    assert not (out / "tables" / "1-comparisons.csv").exists()
    assert (tmp_path / "runs").is_dir()
    assert {path: path.read_text() for path in unrelated} == unrelated


@pytest.mark.full
def test_a_report_removes_the_tables_that_only_an_earlier_one_had(runs, tmp_path):
    write_report([runs], tmp_path / "out", formats=("html",))
    (tmp_path / "out" / "tables" / "mine.csv").write_text("kept")
    before = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    language_run(tmp_path / "alone", "baseline", 0)
    write_report([tmp_path / "alone"], tmp_path / "out", formats=("html",))
    after = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert {"mine.csv", "1-arms.csv"} <= after
    assert {"2-arms.csv", "1-comparisons.tex", "left-out.csv"} <= before - after


def test_benchmarks_with_the_same_name_have_a_table_each(tmp_path):
    for name, ratio in (("a", 0.9), ("b", 0.8)):
        write(tmp_path / "runs" / name, "bench.json", [bench_row(ratio=ratio)])
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    tables = [(tmp_path / "out" / "tables" / name).read_text() for name in ("bench-bench.csv", "bench-bench-2.csv")]
    assert "0.900" in tables[0]
    assert "0.800" in tables[1]
