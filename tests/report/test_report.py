"""The report's files: what they say, in both languages, and what happens where something is missing."""

import csv
import io
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from oelm.analysis import analyse
from oelm.base.locks import hold, holder
from oelm.cli import report as commands
from oelm.report import drawing, summary, write_report
from oelm.report import pdf as typesetting
from oelm.report.compose import settings
from oelm.report.document import Cell, Table
from oelm.report.sentences import conclusion, setup_name
from oelm.report.tables import latex, table_csv
from oelm.report.watch import watch
from oelm.report.words import words
from tests.support.records import (
    bench_row,
    change,
    classification_run,
    language_run,
    study,
    write,
    write_status,
)

pytest.importorskip("scipy", reason="scipy is not installed")
needs_typst = pytest.mark.skipif(not typesetting.available(), reason="typst is not installed")

APP = "import typer; from oelm.cli import report as c; a = typer.Typer(pretty_exceptions_enable=False); "
APP += "a.command('report')(c.report); a.command('compare')(c.compare); a()"


def oelm(*arguments, largest_file=resource.RLIM_INFINITY):
    """The commands in a process of their own, as a user starts them."""
    command = [sys.executable, "-c", APP, *map(str, arguments)]
    variables = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, preexec_fn=limit)


def oelm_here(*arguments):
    """The same in this process, where it is only the words that matter."""
    app = typer.Typer()
    app.command("report")(commands.report)
    app.command("compare")(commands.compare)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A study of language, one of classification, and runs that do not count."""
    root = tmp_path_factory.mktemp("runs")
    study(root)
    language_run(root, "oelm-random-matched", 0, 3.31)
    for seed, noise in enumerate((0.0, 0.003, -0.002)):
        for method, accuracy in (("baseline", 0.93), ("oelm-freeze", 0.91), ("freeze-pretrained", 0.925)):
            classification_run(root, method, seed, accuracy + noise * len(method) / 10)
    classification_run(root, "oelm-random", 0, 0.51, at_chance=True)
    failed = language_run(root, "oelm-core", 0, rate=4e-3)
    (failed / "result.json").unlink()
    write_status(failed, "failed", message="TrainingError: the disk is full")
    return root


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("report"))


def test_a_small_difference_that_is_certain_is_said_to_be_both(tmp_path):
    """Worse beyond chance, and within the margin: a reader needs the two words together."""
    for seed, noise in enumerate((0.0, 0.001, -0.001)):
        language_run(tmp_path / "runs", "baseline", seed, 3.0 + seed / 50)
        language_run(tmp_path / "runs", "identity-key", seed, 3.02 + seed / 50 + noise)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert "worse, within 5 %" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_an_interval_that_holds_zero_is_not_said_to_leave_it_out(tmp_path):
    """Perplexities are tested by their ratio: that their differences alone would pass a test says nothing."""
    for seed, (base, more) in enumerate(((10, 4), (30, 5), (60, 6))):
        language_run(tmp_path, "baseline", seed, math.log(base))
        language_run(tmp_path, "oelm-freeze", seed, math.log(base + more))
    (one,) = analyse([tmp_path]).comparisons
    assert one.difference.p < 0.05 < one.ratio.p == one.p == one.adjusted
    assert "show neither a difference nor equivalence" in conclusion(one, words("en"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pairs_that_all_differ_by_the_same_are_told_and_get_no_verdict(tmp_path, language):
    for seed, right in enumerate((798, 801, 805)):
        classification_run(tmp_path / "runs", "baseline", seed, right / 872)
        classification_run(tmp_path / "runs", "oelm-freeze", seed, (right + 2) / 872)
    made = write_report([tmp_path / "runs"], tmp_path / "out", language=language, formats=["md"])
    say, text = words(language), (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    lines = summary(made.analysis, language)
    (line,) = [line for line in lines if "oelm-freeze" in line]
    assert line.endswith(say("says_no_spread"))
    assert say("no_spread_short") in line
    assert not any(say(word) in "".join(lines) + text for word in ("says_better", "says_alike", "one_seed_short"))
    (row,) = [line for line in text.splitlines() if line.startswith("| `oelm-freeze`") and say("undecided") in line]
    assert say("no_spread_short") in row
    assert say("note_no_spread") in text


def test_every_form_is_written(report):
    folder = report.files[0].parent.parent
    assert report.problems == ()
    for name in ("report.md", "report.html", "report.pdf", "results.csv", "results.json"):
        assert (folder / name).stat().st_size > 500
    assert (folder / "report.pdf").read_bytes()[:5] == b"%PDF-"
    drawn = {path.name for path in (folder / "figures").iterdir()}
    kinds = {re.sub(r"^\d+-|\.\w+$", "", name) for name in drawn}
    assert kinds == {
        *("change", "accuracy", "validation", "training", "sweep", "parameters", "time", "target", "map"),
        *("entropy", "logits", "confusion"),
    }
    assert {name.replace(".svg", ".png") for name in drawn if name.endswith(".svg")} <= drawn


def test_a_picture_of_some_methods_says_so(tmp_path):
    methods = ["oelm-freeze", *({"preset": "oelm-freeze", "q": {"scale": scale}} for scale in range(2, 9))]
    for method in methods:
        language_run(tmp_path / "runs", method)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("html",))
    assert "Shown: the first 6 of 8 methods." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_summary_comes_first_and_says_what_holds_and_what_does_not(report):
    lines = summary(report.analysis)
    text = "\n".join(lines)
    assert lines[0].startswith("28 runs of 4 methods counted; 2 left out")
    assert "oelm-freeze against baseline: perplexity +10.5 %" in text
    assert "95 % interval" in text
    assert "Significantly worse." in text
    assert "one seed: no interval; both at learning rate 0.001). No verdict from one seed." in text
    places = [text.index(heading) for heading in ("What holds", "What does not hold", "What is undecided")]
    assert places == sorted(places)
    assert "- Nothing." in text[places[0] : places[1]]
    assert "TARGET-LOSS" in text[places[1] : places[2]]


def test_markdown_names_every_run_and_links_to_its_folder(report, runs):
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
    assert "accuracy 51.0%; always answering the most frequent class gives 51.0%" in text
    assert text.index("## Summary") < text.index("## Results")


def test_csv_has_one_line_for_every_run_counted_or_not(report, runs):
    folder = report.files[0].parent.parent
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows].count("finished") == 28
    assert {row["state"] for row in rows} == {"finished", "failed", "at-chance"}
    first = next(row for row in rows if row["run"] == "R1")
    assert float(first["val_loss"]) == pytest.approx(
        json.loads(Path(first["path"], "result.json").read_text())["val_loss"]
    )


def test_json_holds_what_the_report_says(report):
    folder = report.files[0].parent.parent
    data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (freeze,) = [one for one in data["comparisons"] if one["arm"] == "oelm-freeze" and one["measure"] == "perplexity"]
    assert freeze["ratio"]["low"] < freeze["ratio"]["mean"] < freeze["ratio"]["high"]
    assert freeze["n"] == 3
    verdicts = {one["id"]: one["verdict"] for one in data["hypotheses"]}
    assert verdicts["TARGET-LOSS"] == "refuted"
    assert {one["id"] for one in data["published"]} >= {"SST-2-01", "SST-2-02"}


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


def test_latex_tables_are_whole_and_escaped(report):
    folder = report.files[0].parent.parent
    for file in (folder / "tables").glob("*.tex"):
        text = file.read_text(encoding="utf-8")
        body = text[text.index("\\midrule") : text.index("\\bottomrule")]
        columns = len(re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1])
        for line in body.splitlines()[1:]:
            assert line.endswith(r" \\")
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1
    assert latex("50 % of a_b & {c} <d>") == r"50 \% of a\_b \& \{c\} \textless{}d\textgreater{}"


def test_a_report_in_chinese(runs, tmp_path):
    made = write_report([runs], tmp_path / "out", language="zh", formats=("md", "html"))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "## 摘要" in text
    assert "困惑度 +10.5 %" in text
    assert "显著更差。" in text
    english = [sentence for sentence in words("en").texts.values() if len(sentence) > 25 and "{" not in sentence]
    assert [sentence for sentence in english if sentence in text] == []
    assert 'lang="zh-CN"' in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert any("对比" in line for line in summary(made.analysis, "zh"))


@needs_typst
def test_without_a_chinese_font_the_pdf_says_so_and_the_rest_is_written(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(typesetting, "cjk_font", lambda: None)
    monkeypatch.setattr(drawing, "cjk_font", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.pdf").write_bytes(b"of an earlier report")
    made = write_report([runs / "lr-0.001" / "baseline"], out, language="zh")
    assert not (out / "report.pdf").exists()
    assert (out / "report.md").is_file()
    assert any("fonts-noto-cjk" in problem and "report.pdf" in problem for problem in made.problems)
    assert any("fonts-noto-cjk" in problem and "PNG" in problem for problem in made.problems)
    drawn = {path.suffix for path in (out / "figures").iterdir()}
    assert drawn == {".svg"}, "the letters of an SVG are the reader's; a PNG would hold boxes"
    assert "困惑度" in (out / "figures" / "1-validation.svg").read_text(encoding="utf-8")


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


def test_what_is_not_installed_is_named_and_the_rest_written(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(typesetting, "available", lambda: False)
    made = write_report([runs], tmp_path)
    assert [problem for problem in made.problems if "typst" in problem and "oelm[report]" in problem]
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "report.md").is_file()
    assert not (tmp_path / "report.pdf").exists()


def test_names_that_are_code_stay_text(tmp_path):
    """Whatever a record says is shown, never run: in the page, in Markdown, in typst."""
    evil = '</script><script>alert(1)</script><img src=x onerror=alert(2)> | `x` #emph[y] $z$ "q" \\'
    for seed, noise in enumerate((0.0, 0.01)):
        for method in ("baseline", "oelm-freeze"):
            folder = language_run(tmp_path / "runs", method, seed, 3.0 + noise, description=evil, notes=(evil,))
    failed = language_run(tmp_path / "runs", "oelm-core", 0)
    (failed / "result.json").unlink()
    write_status(failed, "failed", message=evil)
    made = write_report([tmp_path / "runs"], tmp_path / "out", title=evil)
    assert made.problems == ()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == 1
    assert page.count("</script") == 1
    assert "<img" not in page
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<script" not in text.replace("\\<script", "")
    assert folder.is_dir()


def test_folders_that_are_called_anything_are_linked_to(tmp_path):
    language_run(tmp_path / "100% a|b<c>", seed=0)
    write_report([tmp_path], tmp_path / "out", formats=["md"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "\n[R1]: <../100%25 a%7Cb%3Cc%3E/lr-0.001/baseline/seed-0>\n" in text
    assert "](<../100%25 a%7Cb%3Cc%3E/lr-0.001/baseline/seed-0>) |" in text


def test_no_spreadsheet_takes_a_records_words_for_a_formula(tmp_path):
    language_run(tmp_path / "runs", description="=1+1")
    write_report([tmp_path / "runs"], tmp_path / "out", formats=["md"])
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["dataset"] == "'=1+1"


@pytest.mark.parametrize("text", ["=1", "@SUM(A1)", "\t=1", "+1+cmd|' /C calc'!A0", "-HYPERLINK(1)"])
def test_what_would_be_a_formula_is_quoted(text):
    table = Table("1", ["a"], [[Cell(text)]])
    assert list(csv.reader(io.StringIO(table_csv(table))))[1] == [f"'{text}"]


@pytest.mark.parametrize("text", ["+19.0 %", "-0.5", "+1.2 % – +3.4 %", "a=b"])
def test_a_signed_number_stays_as_it_is(text):
    assert list(csv.reader(io.StringIO(table_csv(Table("1", ["a"], [[Cell(text)]])))))[1] == [text]


def test_a_report_removes_what_an_earlier_one_wrote_and_nothing_else(tmp_path):
    out, own = tmp_path / "out", {}
    for name in ("figures/1-model.svg", "figures/9-change.png", "tables/bench-by-hand.csv", "tables/notes.json"):
        own[out / name] = name
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    language_run(tmp_path / "runs", "oelm-freeze", 0, 3.2)
    language_run(tmp_path / "runs", "baseline", 0, 3.0)
    write_report([tmp_path / "runs"], out, formats=["md"])
    pictures = set((out / "figures").glob("1-*.svg")) - set(own)
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
    assert {path: path.read_text() for path in own} == own


def test_a_folder_whose_name_is_code_is_only_a_link(tmp_path):
    for seed in (0, 1):
        language_run(tmp_path / "a <img src=x onerror=alert(1)> b", "baseline", seed, 3.0 + seed / 100)
    write_report([tmp_path], tmp_path / "out", formats=["md", "html"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "[R1]: <../a %3Cimg src=x onerror=alert(1)%3E b/" in text
    assert "<img" not in text.replace("\\<img", "")
    assert "<img" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_times_that_say_nothing_are_not_given_bounds(tmp_path, language):
    """Two seeds, of which one ran beside something else: 70 times as slow."""
    for seed, slow in enumerate((1, 70)):
        language_run(tmp_path / "runs", "baseline", seed, 3.0)
        language_run(tmp_path / "runs", "oelm-freeze", seed, 3.1 + seed / 100, step_seconds=0.02 * slow)
    made = write_report([tmp_path / "runs"], tmp_path / "out", language=language, formats=["md"])
    say, text = words(language), (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    (line,) = [line for line in summary(made.analysis, language) if "TARGET-TIME" in line]
    assert say("too_noisy", n=2) in line
    assert say("note_uneven_times", arm="oelm-freeze", factor=70) in line
    (row,) = [line for line in text.split(say("time_runs"))[1].splitlines() if line.startswith("| `oelm-freeze`")]
    assert say("too_noisy", n=2) in row
    assert not re.search(r"\d,\d{3},\d{3}[\d,]*\.\d %", text), "no bounds of millions of percent"


def test_a_run_that_nearly_diverged_spoils_no_page(tmp_path):
    for seed, (loss, other) in enumerate([(3.0, 3.0), (3.01, 190.0)]):
        language_run(tmp_path / "runs", "baseline", seed, loss)
        language_run(tmp_path / "runs", "oelm-freeze", seed, other)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=["md", "html"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "too noisy to say" in text
    assert not re.search(r"[\d,]{30}", text)


def test_a_confusion_matrix_that_is_none_spoils_no_page(tmp_path):
    for seed, labels in enumerate((["a", "b", "c"], ["a", "b"])):
        folder = classification_run(tmp_path / "runs", "baseline", seed, 0.9)
        change(folder, "result.json", labels=labels)
    odd = classification_run(tmp_path / "runs", "oelm-freeze", 0, 0.8)
    change(odd, "result.json", last={"step": 300, "loss": 0.2, "confusion": [[1, 2], [3]]})
    made = write_report([tmp_path / "runs"], tmp_path / "out", formats=["html"])
    assert len(made.analysis.runs) == 3


def test_a_setup_is_named_by_what_sets_it_apart_and_shows_its_models_sizes(tmp_path):
    apart = [{}, {"data": {"fraction": 0.1}}, {"optimizer": {"layer_decay": 0.8}}]
    apart.append({"model": {"fields": {"hidden_size": 64}}})
    for number, changes in enumerate(apart):
        language_run(tmp_path / str(number), changes=changes)
    setups = {setup_name(setup): settings(setup) for setup in analyse([tmp_path]).groups[0].setups}
    named = ["", ", data.fraction 0.1", ", optimizer.layer_decay 0.8", ", model.fields.hidden_size 64"]
    assert set(setups) == {f"built-in stories{name}" for name in named}
    assert setups["built-in stories"].startswith("model.name gpt:tiny · train.batch_size 16 ")
    small = setups["built-in stories, model.fields.hidden_size 64"]
    assert small.startswith("model.name gpt:tiny · model.fields.hidden_size 64 · ")


def test_no_two_setups_have_one_name(tmp_path):
    language_run(tmp_path / "long", steps=800, changes={"optimizer": {"warmup_steps": 20}})
    language_run(tmp_path / "short")
    language_run(tmp_path / "spoilt", changes={"optimizer": {"warmup_steps": 1}})
    data = {"data": {"splits": {"train": {"sha256": "ef" * 32}}}}
    language_run(tmp_path / "other", steps=800, changes={"optimizer": {"warmup_steps": 20}}, environment=data)
    names = [setup_name(setup) for setup in analyse([tmp_path]).groups[0].setups]
    assert len(set(names)) == 4
    assert "built-in stories, train.max_steps 400, optimizer.warmup_steps 1" in names
    assert sum("environment.data.splits.train.sha256 efef" in name for name in names) == 1


def test_a_report_without_arms_to_compare_still_lists_its_runs(tmp_path):
    language_run(tmp_path / "runs", "oelm-freeze", 0, attention=False)
    made = write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert made.analysis.comparisons == ()
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "learning-rate sweep: no arm was run at more than one rate" in text
    assert "attention entropy" in text
    assert summary(made.analysis)[0] == "1 run of 1 method, all counted."
    assert "from 1 run in " in text


def test_only_runs_that_do_not_count_make_a_report_too(tmp_path):
    folder = language_run(tmp_path / "runs", loss=None)
    made = write_report([tmp_path / "runs"], tmp_path / "out", formats=("md", "html"))
    assert made.analysis.runs == ()
    assert folder.name in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert summary(made.analysis)[0].startswith("0 runs of 0 methods counted; 1 left out")


def test_a_bootstrap_stands_beside_the_interval_where_there_are_seeds_enough(tmp_path):
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


def test_figures_on_other_splits_say_of_which_step_they_are(tmp_path):
    """Where no best model was kept they are of the last one: nothing may call them the best model's."""
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


@pytest.mark.parametrize(("language", "cross"), [("en", "The cross is the time expected"), ("zh", "叉号为仅按")])
def test_step_times_are_scaled_from_a_reference_only_where_there_is_one(tmp_path, language, cross):
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


def test_a_confounded_comparison_has_one_mark_in_the_table_and_in_its_note(tmp_path):
    for seed in (0, 1, 2):
        language_run(tmp_path / "runs", "baseline", seed)
        language_run(tmp_path / "runs", "oelm-freeze", seed, changes={"train": {"batch_size": 4}})
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| ❔ confounded |" in text
    assert re.search(r"^- ❔ oelm-freeze: .*confounded by", text, re.MULTILINE)


def test_where_no_scenario_is_selected_the_summary_says_what_stays_open(tmp_path):
    for seed, noise in enumerate((0.3, -0.4)):
        language_run(tmp_path, "oelm-nofreeze", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.0 + noise)
    found = analyse([tmp_path])
    for language, opens in (
        ("en", "These runs leave open whether oelm-freeze"),
        ("zh", "这些运行不足以判断 oelm-freeze"),
    ):
        line = summary(found, language)[-1]
        assert line.startswith(opens)
        assert "oelm-nofreeze" in line


def test_what_is_not_judged_on_synthetic_data_says_so(tmp_path):
    smoke, synthetic = {"experiment": "GPT-02-smoke"}, {"data": {"synthetic": True}}
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path / "runs", method, changes=smoke, environment=synthetic)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    section = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").split("## Published against measured")[1]
    assert "not judged (synthetic data)" in section
    assert "stand-in" not in section


def test_a_verdict_on_a_stand_in_says_so(tmp_path):
    for seed, noise in enumerate((0.0, 0.004, -0.003)):
        for method, loss in (("baseline", 3.8), ("oelm-freeze", 3.94 + noise)):
            about = {"description": "old novels, a stand-in for OpenWebText"}
            language_run(tmp_path / "runs", method, seed, loss + noise, **about)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    section = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").split("## Published against measured")[1]
    assert "| GPT-05 | ✅ agrees (stand-in data) | perplexity |" in section


def test_a_benchmark_of_steps_of_different_size_says_so(tmp_path):
    language_run(tmp_path / "runs")
    half = bench_row("oelm-freeze@8", ratio=0.5, batch_size=8, ratio_per_example=0.97, warning="!")
    (tmp_path / "runs" / "bench.json").write_text(json.dumps([bench_row(), half]))
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert text.count("steps of different size") == 1
    assert "oelm-freeze@8" in text
    assert "Per example its ratio is 0.970" in text


def test_benchmarks_that_are_called_alike_keep_a_table_each(tmp_path):
    for name, ratio in (("a", 0.9), ("b", 0.8)):
        write(tmp_path / "runs" / name, "bench.json", [bench_row(ratio=ratio)])
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    tables = [(tmp_path / "out" / "tables" / name).read_text() for name in ("bench-bench.csv", "bench-bench-2.csv")]
    assert ["0.900" in tables[0], "0.800" in tables[1]] == [True, True]


def test_the_chinese_readme_shows_only_code_that_the_english_one_tests():
    root = Path(__file__).parents[2]
    chinese, english = ((root / name).read_text(encoding="utf-8") for name in ("README.zh-CN.md", "README.md"))
    for link in re.findall(r"\]\(([^)#:]+)\)", chinese):
        assert (root / link).exists(), link
    block = re.search(r"```python\n(.*?)```", chinese, re.DOTALL)[1]
    tested = {line.split("  #")[0].strip() for line in english.splitlines()}
    assert {line.split("  #")[0].strip() for line in block.splitlines()} <= tested


def test_a_second_report_leaves_nothing_of_the_first(runs, tmp_path):
    write_report([runs], tmp_path / "out", formats=("html",))
    (tmp_path / "out" / "tables" / "mine.csv").write_text("kept")
    before = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    language_run(tmp_path / "alone", "baseline", 0)
    write_report([tmp_path / "alone"], tmp_path / "out", formats=("html",))
    left = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert {"mine.csv", "1-arms.csv"} <= left
    assert {"2-arms.csv", "1-comparisons.tex", "left-out.csv"} <= before - left


def test_the_command_writes_prints_and_warns(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = oelm("report", runs, empty, "--out", tmp_path / "out", "--formats", "html", "--title", "Mine")
    assert done.returncode == 0, done.stderr
    assert "oelm-freeze against baseline" in done.stdout
    assert f"wrote {tmp_path / 'out' / 'report.html'}" in done.stdout
    assert "empty: holds no run" in done.stderr
    assert "<title>Mine</title>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "report.pdf").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: no such file or folder"),
        ((".",), "no runs found"),
        (("RUNS", "--formats", "html,docx"), "format 'docx'"),
        (("RUNS", "--lang", "fr"), "language 'fr': use one of en, zh"),
        (("RUNS", "--hypotheses", "absent.yaml"), "absent.yaml: cannot be read"),
        (("RUNS", "--out", "FILE"), "a file; the report needs a folder"),
    ],
)
def test_bad_input_is_one_clear_line(runs, tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    given = [runs if argument == "RUNS" else argument for argument in arguments]
    done = oelm_here("report", *given, *(() if "--out" in given else ("--out", tmp_path / "out")))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_report_that_finds_no_room_is_one_clear_line(runs, tmp_path):
    """A limit on the size of files meets the figures as a full disk would."""
    done = oelm("report", runs, "--out", tmp_path / "out", "--quiet", largest_file=4000)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"oelm: {tmp_path / 'out' / 'figures'}/")
    assert "cannot be written (File too large)" in line
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()], "nothing is there by halves"


def test_compare_prints_the_figures_and_what_differs(tmp_path):
    one = language_run(tmp_path, "oelm-freeze", 0, 3.1, 2e-3, environment={"gpu": {"name": "Another GPU"}})
    other = language_run(tmp_path, "baseline", 0, 3.0, 1e-3)
    done = oelm("compare", one, other)
    assert done.returncode == 0, done.stderr
    assert re.search(r"perplexity +22\.20 +20\.09 +\+10\.5 %", done.stdout)
    assert "optimizer.learning_rate  0.002  /  0.001" in done.stdout
    assert "environment.gpu.name" in done.stdout
    assert "no interval" in done.stdout
    same = oelm_here("compare", language_run(tmp_path, "oelm-freeze", 0, 3.1), other)
    assert "they differ only in the method" in same.stdout
    data = json.loads(oelm_here("compare", one, other, "--json").stdout)
    assert data["ratio"]["mean"] == pytest.approx(1.10517, abs=1e-4)


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    language, sentiment = language_run(tmp_path), classification_run(tmp_path)
    for pair, message in (
        ((language, sentiment), "runs of different tasks are not compared"),
        ((language, tmp_path), "holds no run"),
        ((language, tmp_path / "absent"), "no such folder"),
        ((language, language_run(tmp_path, seed=1, loss=None)), "not a number"),
    ):
        done = oelm_here("compare", *pair)
        assert done.exit_code == 2, done.stdout
        assert message in done.stderr


def test_watching_refreshes_until_no_run_is_left(tmp_path):
    """From a folder with no runs yet, to one that trains, to none left."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    runs.mkdir()
    aside = tmp_path / "aside"
    language_run(aside, "baseline", 0)
    going = language_run(aside, "oelm-freeze", 0, 3.1)
    result = (going / "result.json").read_text()
    (going / "result.json").unlink()
    alive = {"host": socket.gethostname(), "pid": os.getpid(), "step": 200}
    write_status(going, "running", **alive, updated=time.time())

    command = [sys.executable, "-u", "-c", APP, "report", runs, "--out", out, "--watch", "--every", "0.3"]
    command += ["--formats", "html"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with hold(going), subprocess.Popen([*map(str, command)], **piped) as watcher:

        def wait_for(words):
            for line in watcher.stdout:
                if words in line:
                    return
            raise AssertionError(f"ended without saying {words!r}")

        wait_for("no runs yet")
        aside.rename(runs / "all")
        going = runs / "all" / going.relative_to(aside)
        wait_for("1 done, 1 running")
        page = (out / "report.html").read_text(encoding="utf-8")
        assert 'http-equiv="refresh"' in page
        assert "oelm-freeze, seed 0, running" in page
        (going / "result.json").write_text(result)
        change(going, "status.json", state="finished")
        wait_for("2 done, 0 running")
        assert "oelm-freeze against baseline" in watcher.stdout.read()  # the summary at the end
    assert watcher.returncode == 0
    assert 'http-equiv="refresh"' not in (out / "report.html").read_text(encoding="utf-8")


def test_watching_ends_when_the_last_run_is_killed(tmp_path):
    """A killed run writes nothing: only its lock tells that it is gone."""
    going = language_run(tmp_path / "runs")
    (going / "result.json").unlink()
    write_status(going, "running", host=socket.gethostname(), step=200)
    script = "import pathlib, sys, time, oelm.base.locks as l; lock = l.hold(pathlib.Path(sys.argv[1])); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", script, str(going)])
    while holder(going) is None:
        assert process.poll() is None
        time.sleep(0.05)
    seen: list[int] = []

    def told(report):
        seen.append(len(report.analysis.running))
        process.kill()
        process.wait()

    def follow():
        watch([tmp_path / "runs"], tmp_path / "out", 0.2, told, formats=("md",))

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    watcher.join(30)
    assert not watcher.is_alive()
    assert seen == [1, 0]


def test_help_needs_no_heavy_module():
    script = "import sys; import oelm.cli.report; print(*[m for m in sys.modules])"
    loaded = set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.split())
    assert not loaded & {"torch", "transformers", "matplotlib", "scipy", "typst", "numpy", "pydantic"}


def test_the_statistics_say_what_they_need(runs, monkeypatch):
    from oelm.analysis import AnalysisError, analyse

    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(AnalysisError, match=r"need scipy: pip install 'oelm\[report\]'"):
        analyse([runs])
