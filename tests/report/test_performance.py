"""docs/performance.md: made of records alone, up to date with them, and its commands are ones that oelm takes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.analysis import AnalysisError
from oelm.cli.app import app
from oelm.report.markdown import to_markdown
from oelm.report.performance import performance_document, write_performance
from oelm.runs.schema import BenchOrigin, DecodeBench, StepBench, Versions

ROOT = Path(__file__).parents[2]
VERSIONS = Versions(oelm="0", python="3", torch="2", transformers="5", tokenizers="0", numpy="2")
PARTS = ("peers", "kernels", "grow", "forms", "decode")


def origin(command: str) -> BenchOrigin:
    return BenchOrigin(
        command=command, git_commit="0123456789abcdef", device="A GPU", clock_mhz=1980, versions=VERSIONS
    )


def step(command: str, arm: str, step_ms: float, batch: int, length: int, **changes) -> StepBench:
    values = {
        "origin": origin(command),
        "arm": arm,
        "step_ms": step_ms,
        "tokens_per_second": 1000 * batch * length / step_ms,
        "mfu": 0.25,
        "ratio": 1.0,
        "ratio_95": 0.0,
        "flop_bound": 1.0,
        "trainable": 1_000_000,
        "peak_memory": 2_000_000_000,
        "rounds": 4,
        "batch_size": batch,
        "ratio_per_example": 1.0,
        "ratio_per_example_95": 0.0,
        "warning": None,
    }
    return StepBench(**values | changes)


def token(command: str, arm: str, token_ms: float | None, batch: int, context: int, ratio: float | None) -> DecodeBench:
    return DecodeBench(
        origin=origin(command),
        arm=arm,
        token_ms=token_ms,
        tokens_per_second=None,
        ratio=ratio,
        ratio_95=None,
        cache_bytes_per_token=2048.0,
        cache_ratio=1.0,
        layers=2,
        context=context,
        batch_size=batch,
        compiled=True,
        rounds=4,
    )


def write(path: Path, *rows: StepBench | DecodeBench) -> None:
    path.write_text(json.dumps([row.model_dump() for row in rows]))


def page(*folders: Path) -> str:
    return to_markdown(performance_document(folders, folders[0]))


def test_the_page_is_up_to_date():
    folders = [ROOT / "results" / name for name in ("speed-h200", "bench-h200")]
    expected = to_markdown(performance_document(folders, ROOT / "docs"))
    assert expected == (ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), "run `make results`"


def test_absent_records_are_named_and_written_about(tmp_path):
    path = write_performance([tmp_path / "nowhere"], tmp_path / "page.md")
    assert path.read_text().count("There is no record of this yet") == 5
    grow = "oelm bench baseline --model gpt:tiny model.fields.hidden_size=64 model.fields.num_hidden_layers=2"
    write(tmp_path / "grow-batch.json", step(grow, "baseline", 1.0, 8, 16), step(grow, "baseline@4", 1.0, 4, 16))
    text = page(tmp_path)
    assert text.count("There is no record of several sizes of") == 3
    assert "several sizes of the batch" not in text


def test_growth_has_the_exponent_of_its_rows(tmp_path):
    def command(width: int, layers: int) -> str:
        fields = f"model.fields.hidden_size={width} model.fields.num_hidden_layers={layers}"
        return f"oelm bench baseline --model gpt:tiny --vocab-size 60 {fields} train.compile=true train.graphs=true"

    base = command(64, 2)
    write(
        tmp_path / "grow-batch.json", *(step(base, f"baseline@{batch}", batch**0.5, batch, 16) for batch in (16, 4, 8))
    )
    write(tmp_path / "grow-length.json", step(base, "baseline", 8.0, 8, 32))
    write(tmp_path / "grow-width.json", step(command(128, 2), "baseline", 16 * 8**0.5, 8, 16))
    write(
        tmp_path / "grow-layers.json",
        step(command(64, 4), "baseline", 2 * 8**0.5, 8, 16),
        step(base, "other", 9, 8, 16),
    )
    text = page(tmp_path)
    assert "grows with the batch to the power of 0.50" in text
    assert "| 4 | 2.00 | 32,000 | 25.0 % | 2.00 | – |\n| 8 | 2.83 | 45,255 | 25.0 % | 2.00 | 1.41 |" in text
    assert "grows with the length of the sequences to the power of 1.50" in text
    assert "grows with the model's width to the power of 4.00" in text
    assert "grows with the number of layers to the power of 1.00" in text
    assert "Kept: batch 8, length 16, width 64." in text, "of the layers"
    assert "gpt:tiny, compiled, with steps recorded" in text


def test_peers_and_forms_have_their_ratios_and_a_tokens_cost(tmp_path):
    command = "oelm bench baseline --model gpt:tiny --vocab-size 600 --peer nanogpt=../clone --no-compile"
    peer = step(command, "hf-trainer", 30.0, 8, 16, ratio_per_example=1.5, ratio_per_example_95=0.25, mfu=None)
    write(tmp_path / "speed-a.json", step(command, "baseline", 20.0, 8, 16), peer)
    write(tmp_path / "forms-steps.json", step(command, "multi-head", 2.0, 8, 1000))
    decode = "oelm bench --decode --compile --model=gpt:tiny"
    rows = (
        token(decode, "multi-head", 0.8, 8, 1024, 1.0),
        token(decode, "latent", 0.4, 8, 1024, 0.5),
        token(decode, "latent", None, 64, 1024, None),
    )
    write(tmp_path / "decode-a.json", *rows)
    text = page(tmp_path)
    assert "### gpt:tiny, 8 × 16, a vocabulary of 600, not compiled" in text
    assert "| `hf-trainer` | 30.00 | 4,267 | 1.500 ± 0.250 | 1.000 | – | 2.00 | 1.0 |" in text
    assert "| `multi-head` | 2.00 | 0.250 |" in text
    assert "| `latent` | 1,024 | 50.00 (0.50) | – |" in text
    assert "| `multi-head` | 1,024 | 100.00 (1.00) | – |" in text
    assert f"- `{command.replace('../clone', 'CLONE')}`" in text
    assert "commit 012345678" in text


def test_the_time_of_a_step_is_split_over_kinds_of_kernels(tmp_path):
    kernels = [
        {"name": name, "kind": kind, "ms": ms, "launches": 1}
        for name, kind, ms in (("a", "matrix products", 4.0), ("b", "matrix products", 2.5), ("c", "attention", 1.25))
    ]
    write(
        tmp_path / "profile-a.json",
        step("oelm bench", "baseline", 8.0, 8, 16, kernels=kernels),
        step("oelm bench", "other", 6.0, 8, 16, kernels=kernels[:2], ratio_per_example=0.75),
    )
    text = page(tmp_path)
    assert "| arm | step | attention | matrix products | left | ratio |" in text
    assert "| `baseline` | 8.00 | 1.25 | 6.50 | 0.25 | 1.000 |" in text
    assert "| `other` | 6.00 | 0.00 | 6.50 | -0.50 | 0.750 |" in text


def test_of_records_of_one_name_that_in_the_first_folder_counts(tmp_path):
    for name, time in (("first", 7.0), ("second", 9.0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "speed-a.json", step("oelm bench", "baseline", time, 8, 16))
    text = page(tmp_path / "first", tmp_path / "second")
    assert "7.00" in text
    assert "9.00" not in text


def test_a_file_that_is_no_record_is_an_error_that_names_it(tmp_path):
    (tmp_path / "speed-a.json").write_text("[1]")
    with pytest.raises(AnalysisError, match=r"speed-a\.json.*measure it again"):
        page(tmp_path)


def test_what_oelm_bench_prints_is_shown(tmp_path):
    sizes = ["--batch-size", "2", "--sequence-length", "8", "--rounds", "2", "--steps", "1", "--vocab-size", "60"]
    fields = [f"model.fields.{name}=2" for name in ("num_hidden_layers", "num_attention_heads")]
    arguments = ["bench", "baseline", "baseline@4", *fields, "model.fields.hidden_size=16", *sizes, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    for row in rows:
        row["origin"]["command"] = shlex.join(["oelm", *arguments])  # the runner leaves it out
    (tmp_path / "grow-batch.json").write_text(json.dumps(rows))
    (tmp_path / "speed-tiny.json").write_text(json.dumps(rows))
    text = page(tmp_path)
    assert "a step's time grows with the batch to the power of" in text
    assert "### gpt:tiny, 2 × 8, a vocabulary of 60, compiled as by default" in text


def test_the_scripts_commands_are_planned_as_they_stand(tmp_path, monkeypatch):
    recorder = tmp_path / "oelm"
    recorder.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\necho "[]"\n')
    recorder.chmod(0o755)
    environment = {**os.environ, "OELM": str(recorder), "NANOGPT": str(tmp_path)}
    (tmp_path / "model.py").write_text("")

    def speed(*parts: str) -> subprocess.CompletedProcess[str]:
        command = [ROOT / "results" / "speed.sh", tmp_path / "records", *parts]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert speed(*PARTS).returncode == 0
    commands = (tmp_path / "commands").read_text().splitlines()
    assert len(commands) == len(list((tmp_path / "records").glob("*.json"))) == 19
    assert speed(*PARTS).stdout.count("is there") == 19, "records are kept"
    assert (speed("all").returncode, "unknown part all" in speed("all").stderr) == (2, True)

    arms: list[str] = []
    for module, name in (("steps", "benchmark"), ("decoding", "benchmark_decoding")):
        monkeypatch.setattr(f"oelm.bench.{module}.{name}", lambda planned, *_, **options: arms.extend(planned) or [])
    for command in commands:
        result = CliRunner().invoke(app, command.split())
        assert (result.exit_code, result.stdout.strip()) == (0, "[]"), f"{command}\n{result.output}"
    assert len(arms) > 70
