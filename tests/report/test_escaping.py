"""Markup in records is shown as text: in the page, in Markdown, in typst and in spreadsheets."""

import csv
import io

import pytest

from oelm.report import write_report
from oelm.report.document import Cell, Table
from oelm.report.tables import table_csv
from tests.support.records import (
    language_run,
    write_status,
)


def test_markup_in_records_is_shown_as_text(tmp_path):
    evil = '</script><script>alert(1)</script><img src=x onerror=alert(2)> | `x` #emph[y] $z$ "q" \\'
    for seed, noise in enumerate((0.0, 0.01)):
        for method in ("baseline", "oelm-freeze"):
            folder = language_run(tmp_path / "runs", method, seed, 3.0 + noise, description=evil, notes=(evil,))
    failed = language_run(tmp_path / "runs", "oelm-core", 0)
    (failed / "result.json").unlink()
    write_status(failed, "failed", message=evil)
    report = write_report([tmp_path / "runs"], tmp_path / "out", title=evil)
    assert report.problems == ()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == 1
    assert page.count("</script") == 1
    assert "<img" not in page
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<script" not in text.replace("\\<script", "")
    assert folder.is_dir()


def test_links_to_folders_with_special_characters_work(tmp_path):
    language_run(tmp_path / "100% a|b<c>", seed=0)
    write_report([tmp_path], tmp_path / "out", formats=["md"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "\n[R1]: <../100%25 a%7Cb%3Cc%3E/lr-0.001/baseline/seed-0>\n" in text
    assert "](<../100%25 a%7Cb%3Cc%3E/lr-0.001/baseline/seed-0>) |" in text


def test_markup_in_the_name_of_a_folder_is_quoted(tmp_path):
    for seed in (0, 1):
        language_run(tmp_path / "a <img src=x onerror=alert(1)> b", "baseline", seed, 3.0 + seed / 100)
    write_report([tmp_path], tmp_path / "out", formats=["md", "html"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "[R1]: <../a %3Cimg src=x onerror=alert(1)%3E b/" in text
    assert "<img" not in text.replace("\\<img", "")
    assert "<img" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_formula_in_a_record_is_quoted_in_the_csv(tmp_path):
    language_run(tmp_path / "runs", description="=1+1")
    write_report([tmp_path / "runs"], tmp_path / "out", formats=["md"])
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["dataset"] == "'=1+1"


@pytest.mark.parametrize("text", ["=1", "@SUM(A1)", "\t=1", "+1+cmd|' /C calc'!A0", "-HYPERLINK(1)"])
def test_text_that_would_be_a_formula_is_quoted(text):
    table = Table("1", ["a"], [[Cell(text)]])
    assert list(csv.reader(io.StringIO(table_csv(table))))[1] == [f"'{text}"]


@pytest.mark.parametrize("text", ["+19.0 %", "-0.5", "+1.2 % – +3.4 %", "a=b"])
def test_a_signed_number_is_not_quoted(text):
    assert list(csv.reader(io.StringIO(table_csv(Table("1", ["a"], [[Cell(text)]])))))[1] == [text]
