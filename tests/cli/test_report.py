"""The commands `oelm report` and `oelm compare`: their output, and one clear line for each mistake."""

import json
import os
import re
import resource
import subprocess
import sys
from functools import partial

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from oelm.cli import report as commands
from tests.support.records import (
    classification_run,
    language_run,
    study,
)
from tests.test_import import loaded_modules

APP = "import typer; from oelm.cli import report as c; a = typer.Typer(pretty_exceptions_enable=False); "
APP += "a.command('report')(c.report); a.command('compare')(c.compare); a()"


def oelm(*arguments, largest_file=resource.RLIM_INFINITY):
    """Run the commands in a separate process, as a user does."""
    command = [sys.executable, "-c", APP, *map(str, arguments)]
    variables = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, preexec_fn=limit)


def oelm_here(*arguments):
    """Run the commands in this process, when only their output matters."""
    app = typer.Typer()
    app.command("report")(commands.report)
    app.command("compare")(commands.compare)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return study(tmp_path_factory.mktemp("runs"))


def test_report_writes_the_files_and_prints_the_summary(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    result = oelm("report", runs, empty, "--out", tmp_path / "out", "--formats", "html", "--title", "Mine")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Against baseline, perplexity is significantly worse with oelm-freeze (+10.5 %)."
    assert any(re.fullmatch(r" oelm-freeze +[\d.]+ +\+10\.5 % .* worse", line) for line in lines)
    assert f"wrote {tmp_path / 'out' / 'report.html'}" in result.stdout
    assert str(empty) in result.stderr
    assert "<title>Mine</title>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "report.pdf").exists()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_report_is_summed_up_in_80_columns(tmp_path, monkeypatch, language):
    for seed in (0, 1, 2):
        language_run(tmp_path / "runs", "baseline", seed, 3.0 + seed / 50)
        for layers in ("except-first:1", "except-first:2"):
            method = {"preset": "oelm-freeze", "layers": layers}
            language_run(tmp_path / "runs" / layers, method, seed, 3.1 + seed / 50)
        schedule = {"kind": "unfreeze", "order": "bottom-up", "steps": [1], "layers_each": 2}
        method = {"preset": "oelm-freeze", "schedule": schedule}
        language_run(tmp_path / "runs" / "schedule", method, seed, 3.2 + seed / 10)
    monkeypatch.setenv("COLUMNS", "80")
    result = oelm_here("report", tmp_path / "runs", "--out", tmp_path / "out", "--formats", "md", "--lang", language)
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if cell_len(line) > 80 and str(tmp_path) not in line] == []
    assert "…" not in result.stdout
    for words in ("(layers=except-first:1)", "(layers=except-first:2)", "schedule.order=bottom-up,"):
        assert words in result.stdout, "a setting is in one line where there is room for it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere"),
        ((".",), "no runs"),
        (("RUNS", "--formats", "html,docx"), "'docx'"),
        (("RUNS", "--lang", "fr"), "'fr': use one of en, zh"),
        (("RUNS", "--hypotheses", "absent.yaml"), "absent.yaml"),
        (("RUNS", "--out", "FILE"), "FILE"),
    ],
)
def test_bad_input_gives_one_line_that_names_it(runs, tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    paths_and_options = [runs if argument == "RUNS" else argument for argument in arguments]
    result = oelm_here(
        "report", *paths_and_options, *(() if "--out" in paths_and_options else ("--out", tmp_path / "out"))
    )
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_full_disk_gives_one_line_and_no_incomplete_file(runs, tmp_path):
    """A limit on the size of files makes writing the figures fail, as a full disk would."""
    result = oelm("report", runs, "--out", tmp_path / "out", "--quiet", largest_file=4000)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"oelm: {tmp_path / 'out' / 'figures'}/")
    assert "cannot be written (File too large)" in line
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()], "an incomplete file is left"


def test_compare_prints_the_metrics_and_the_differences(tmp_path):
    freeze = language_run(tmp_path, "oelm-freeze", 0, 3.1, 2e-3, environment={"gpu": {"name": "Another GPU"}})
    baseline = language_run(tmp_path, "baseline", 0, 3.0, 1e-3)
    result = oelm("compare", freeze, baseline)
    assert result.returncode == 0, result.stderr
    assert re.search(r"perplexity +22\.20 +20\.09 +\+10\.5 %", result.stdout)
    assert "optimizer.learning_rate  0.002  /  0.001" in result.stdout
    assert "environment.gpu.name" in result.stdout
    assert "no interval" in result.stdout
    same_settings = oelm_here("compare", language_run(tmp_path, "oelm-freeze", 0, 3.1), baseline)
    assert "they differ only in the method" in same_settings.stdout
    data = json.loads(oelm_here("compare", freeze, baseline, "--json").stdout)
    assert data["ratio"]["mean"] == pytest.approx(1.10517, abs=1e-4)


def test_compare_refuses_runs_that_cannot_be_compared(tmp_path):
    language, sentiment = language_run(tmp_path), classification_run(tmp_path)
    for pair, message in (
        ((language, sentiment), "different tasks"),
        ((language, tmp_path), str(tmp_path)),
        ((language, tmp_path / "absent"), str(tmp_path / "absent")),
        ((language, language_run(tmp_path, seed=1, loss=None)), "not a number"),
    ):
        result = oelm_here("compare", *pair)
        assert result.exit_code == 2, result.stdout
        assert message in result.stderr


def test_importing_the_report_commands_loads_no_heavy_module():
    assert not loaded_modules("import oelm.cli.report") & {
        "torch",
        "transformers",
        "matplotlib",
        "scipy",
        "typst",
        "numpy",
        "pydantic",
    }
