"""Step times of arms side by side: what is timed, and how the arms are compared.

No time is asserted, because machines are shared.
"""

import io
import json
import re
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.bench import steps as bench
from oelm.bench.arms import BenchSetting, plan_arms
from oelm.bench.rounds import ratio_of_rounds
from oelm.bench.steps import benchmark
from oelm.cli.app import app
from oelm.cli.bench_tables import bench_table, render_bench
from oelm.cli.terminal import progress_bar
from oelm.config import RunConfig
from oelm.errors import OelmError
from oelm.models.small import small_model
from oelm.runs.schema import DecodeBench, StepBench
from oelm.training.tasks.classification import ClassifierLoss
from oelm.training.tasks.open import open_task
from tests.support.training import config

LENGTH = 16
BERT = {"model": "random:bert", "batch_size": 4, "length": LENGTH}


def planned(*names: str, **setting: object):
    """Return the run configs of arms; `setting` has the fields of BenchSetting."""
    return plan_arms(names, BenchSetting(**{"model": "random:bert", **setting}))


def command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch) -> Terminal:
    """Make standard error a terminal, and return it with the text that is written to it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


@pytest.fixture(scope="module")
def unequal():
    """Return the rows of a benchmark where one of three arms has smaller batches, and the shapes of all batches."""
    shapes = []
    forward = ClassifierLoss.forward

    def record_shape(self, labels, **inputs):
        assert inputs["attention_mask"].all()
        assert (labels < 3).all()
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(self, labels, **inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassifierLoss, "forward", record_shape)
        arms = planned("baseline", "oelm-freeze", "oelm-freeze@2", **BERT)
        rows = benchmark(arms, rounds=2, steps=2, warmup=1)
    return rows, shapes


# What is timed


@pytest.mark.full
def test_a_row_compares_an_arm_with_the_reference(tmp_path):
    arms = {name: config(tmp_path, method=name) for name in ("baseline", "oelm-freeze")}
    rows = benchmark(arms, rounds=2, steps=2, warmup=1)
    assert [row.arm for row in rows] == ["baseline", "oelm-freeze"]
    assert rows[0].ratio == 1.0
    assert rows[0].flop_bound == 1.0
    assert rows[1].flop_bound < 1.0
    assert rows[0].trainable - rows[1].trainable == 2 * 2 * 32 * 32
    assert all(row.step_ms > 0 and row.rounds == 2 for row in rows)
    assert [row.warning for row in rows] == [None, None]


def test_encoders_are_timed_on_full_batches_of_full_length(unequal):
    rows, shapes = unequal
    steps = 1 + 2 * (1 + 2)  # one of warm-up; in each of two rounds, one untimed and two timed
    assert shapes.count((4, LENGTH)) == 2 * steps
    assert shapes.count((2, LENGTH)) == steps
    assert rows[0].trainable - rows[1].trainable == 3 * 2 * (48 * 48 + 48)


def test_arms_are_interleaved_in_rounds(monkeypatch):
    batch_sizes = []
    forward = ClassifierLoss.forward

    def record_batch_size(self, labels, **inputs):
        batch_sizes.append(len(labels))
        return forward(self, labels, **inputs)

    monkeypatch.setattr(ClassifierLoss, "forward", record_batch_size)
    benchmark(planned("baseline@3", "baseline@2", **BERT), rounds=2, steps=1, warmup=0)
    assert batch_sizes[-8:] == [3, 3, 2, 2, 3, 3, 2, 2]


def test_peak_memory_excludes_the_arms_built_before(monkeypatch):
    allocated, peaks = iter([100, 130, 160]), iter([150, 200, 175])
    monkeypatch.setattr(bench, "_allocated", lambda device: next(allocated))
    monkeypatch.setattr(bench, "_peak", lambda device: next(peaks))
    arms = benchmark(planned("baseline", "oelm-freeze", "head-only", **BERT), rounds=1, steps=1, warmup=0)
    assert [arm.peak_memory for arm in arms] == [50, 70, 15]


@pytest.mark.gpu
def test_peak_memory_does_not_depend_on_the_order_of_arms():
    wide = {"compile_model": False, "overrides": ["model.fields.hidden_size=384"]}
    arms = planned("baseline", "head-only", "baseline@8", **wide)
    first, small, last = benchmark(arms, rounds=1, steps=1, warmup=3)
    assert last.peak_memory == pytest.approx(first.peak_memory, rel=0.02)
    assert small.peak_memory < first.peak_memory


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("random:bert", "classification"),
        ("random:modernbert", "classification"),
        ("random:llama", "language"),
        ("random:bert-cross", "language"),
        ("gpt:tiny", "language"),
    ],
)
def test_the_model_decides_the_kind_of_task(model, kind):
    arms = planned("baseline", model=model)
    assert arms["baseline"].task.kind == kind


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["random:roberta", "random:albert", "random:deberta-v2", "random:gpt2"])
def test_other_families_can_be_timed_at_classification(model):
    arms = planned("baseline", "oelm-freeze", model=model, batch_size=2, length=LENGTH, kind="classification")
    rows = benchmark(arms, rounds=1, steps=1, warmup=0)
    assert rows[1].flop_bound < 1


def test_a_causal_model_of_another_family_can_be_timed():
    arms = planned("baseline", model="random:llama", batch_size=2, length=LENGTH, vocab_size=50)
    (arm,) = benchmark(arms, rounds=1, steps=1, warmup=0)
    same_size = small_model("llama", vocab_size=50, max_position_embeddings=64)
    assert arm.trainable == sum(p.numel() for p in same_size.parameters())


def test_overrides_apply_to_every_arm():
    overrides = ["train.precision=bfloat16", "model.fields.num_hidden_layers=1", "train.batch_size=6"]
    arms = planned("baseline", "oelm-freeze@2", **BERT, overrides=overrides)
    assert [arm.train.precision for arm in arms.values()] == ["bfloat16", "bfloat16"]
    assert [arm.model.fields["num_hidden_layers"] for arm in arms.values()] == [1, 1]
    assert [arm.train.batch_size for arm in arms.values()] == [6, 2]
    assert [arm.method.name for arm in arms.values()] == ["baseline", "oelm-freeze"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["baseline@0"], ["'baseline@0'", "batch size", "1 or more"]),
        (["baseline@-2"], ["'baseline@-2'", "batch size"]),
        (["baseline@x"], ["'baseline@x'", "batch size"]),
        (["baseline@"], ["'baseline@'", "batch size"]),
        (["oelm-freez@8"], ["'oelm-freez'", "'oelm-freeze'"]),
        (["baseline", "baseline"], ["'baseline'", "twice"]),
        (["task.name=sst2"], ["task.name=sst2", "model, optimizer, train"]),
        (["model.name=random:gpt2"], ["model.name=random:gpt2", "--model"]),
        (["model.name=x"], ["model.name=x", "--model"]),
        (["train.precison=float32"], ["precison", "'precision'"]),
        (["model.fields.hiden_size=96"], ["bert", "'hiden_size'", "'hidden_size'"]),
        (["--model", "random:t5"], ["model.name random:t5", "language models", "text encoders"]),
        (["--model", "random:t5", "--task", "classification"], ["model.name random:t5", "text encoders"]),
        (["--model", "random:vit"], ["model.name random:vit", "text encoders"]),
        (["--task", "language"], ["model.name random:bert", "no language-model head"]),
        (["model.fields.max_position_embeddings=64"], ["data.sequence_length 128", "64"]),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, parts):
    result = command("--model", "random:bert", "--rounds", 1, "--steps", 1, *arguments)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


# How arms are compared


def test_arms_with_different_batch_sizes_are_compared_per_example(unequal):
    baseline, frozen, small = unequal[0]
    assert [row.batch_size for row in unequal[0]] == [4, 4, 2]
    assert frozen.ratio_per_example == frozen.ratio
    assert small.ratio_per_example == pytest.approx(2 * small.ratio)
    assert small.ratio_per_example_95 == pytest.approx(2 * small.ratio_95)
    assert small.flop_bound == frozen.flop_bound
    assert small.tokens_per_second == pytest.approx(2 * LENGTH / small.step_ms * 1000)
    assert baseline.warning is None
    assert frozen.warning is None
    assert all(part in small.warning for part in ("oelm-freeze@2", "batches of 2", "baseline", "of 4"))


def test_ratio_of_rounds_is_the_mean_of_ratios_with_students_interval():
    # Ratios of the medians within the rounds: 2.0, 3.0 and 4.0. The 97.5 % quantile of t with 2 degrees is 4.3027.
    ratio, half_interval = ratio_of_rounds([[2, 2, 9], [6, 6], [4]], [[1, 1, 5], [2, 2], [1]])
    assert ratio == pytest.approx(3.0)
    assert half_interval == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert ratio_of_rounds([[3.0]], [[2.0]]) == (1.5, None)


def test_the_table_shows_both_ratios_untruncated(unequal):
    text = bench_table(unequal[0])
    small = unequal[0][2]
    (line,) = [line for line in text.splitlines() if "oelm-freeze@2" in line]
    assert f"{small.ratio:.3f} ± " in line
    assert f"{small.ratio_per_example:.3f} ± " in line
    assert "per example" not in " ".join(bench_table(unequal[0][:2]).split())


def test_the_tables_of_a_gpu_fit_a_terminal_too():
    """With memory, MFU and kernels, which a CPU has none of."""
    step = StepBench(
        arm="oelm-freeze",
        step_ms=123.456,
        tokens_per_second=1234567.0,
        mfu=0.512,
        ratio=0.971,
        ratio_95=0.012,
        flop_bound=0.977,
        trainable=124_009_728,
        peak_memory=45_678_000_000,
        rounds=5,
        batch_size=64,
        ratio_per_example=0.971,
        ratio_per_example_95=0.01,
        warning=None,
    )
    decode = DecodeBench(
        arm="identity-channel",
        token_ms=12.345,
        tokens_per_second=12345.6,
        ratio=0.612,
        ratio_95=0.012,
        cache_bytes_per_token=98304.0,
        cache_ratio=0.5,
        layers=12,
        context=16384,
        batch_size=64,
        compiled=True,
        rounds=5,
        prefill_ms=1234.5,
        prefill_rows=8,
        kernel="split-128",
    )
    for row, shown in ((step, ("51.2%", "45,678", "124.01 M")), (decode, ("split-128", "12.345", "8,192", "1,234.5"))):
        text = render_bench([row])
        assert all(figure in text for figure in shown)
        assert max(map(len, text.splitlines())) <= 80, text


def test_json_goes_to_stdout_and_the_warning_to_stderr():
    small = ("--model", "random:bert", "--batch-size", 2, "--sequence-length", LENGTH, "--rounds", 1, "--steps", 1)
    result = command("baseline", "baseline@1", "train.precision=bfloat16", *small, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout, parse_constant=pytest.fail)  # NaN is not JSON
    assert rows[1]["ratio_95"] is None, "one round has no interval"
    assert [row["arm"] for row in rows] == ["baseline", "baseline@1"]
    (warning,) = result.stderr.splitlines()
    assert warning == f"warning: {rows[1]['warning']}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("decode_option", [(), ("--decode",)])
def test_the_line_below_the_table_explains_the_ratio(decode_option):
    result = command(
        "oelm-freeze", "--sequence-length", 8, "--vocab-size", 64, "--rounds", 2, "--steps", 1, *decode_option
    )
    assert result.exit_code == 0, result.output
    (note,) = [" ".join(part.split()) for part in result.stdout.split("ratio: ")[1:]]
    assert "oelm-freeze" in note
    assert "in the same round, averaged over the rounds" in note
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_names_the_default_arms(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_text = " ".join(command("--help").output.split())
    assert "Default: baseline, oelm-freeze, identity-key." in help_text
    names = []
    monkeypatch.setattr("oelm.bench.arms.plan_arms", lambda planned, _: names.extend(planned) or {})
    command()
    assert names == ["baseline", "oelm-freeze", "identity-key"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("decode_option", "stages"),
    [
        ((), ["building baseline and warming it up", "building identity-key and warming it up"]),
        (
            ("--decode",),
            ["building baseline", "building identity-key", "warming up baseline", "warming up identity-key"],
        ),
    ],
)
def test_progress_is_shown_only_in_a_terminal(decode_option, stages, monkeypatch, capsys):
    terminal = open_terminal(monkeypatch)
    small = ["--batch-size=2", "--sequence-length=8", "--vocab-size=64", "--rounds=2", "--steps=1", "--json"]
    app(["bench", "baseline", "identity-key", *small, *decode_option], standalone_mode=False)
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == ["baseline", "identity-key"]
    shown = terminal.getvalue()
    offsets = [shown.find(stage) for stage in [*stages, "rounds measured"]]
    assert offsets[0] >= 0
    assert offsets == sorted(offsets)
    assert re.search(r"rounds measured [^\n]*1/2", shown)
    assert command("baseline", *small, *decode_option).stderr == ""


def test_the_progress_bar_starts_no_thread_that_would_disturb_timing(monkeypatch):
    terminal = open_terminal(monkeypatch)
    threads = threading.active_count()
    with progress_bar() as show:
        show("rounds measured", 0, 2)
        assert threading.active_count() == threads
        drawn = terminal.getvalue()
    assert "rounds measured" in drawn


def test_rows_have_every_field_of_the_published_ones(unequal):
    published = Path(__file__).parents[2] / "results" / "bench-h200" / "bench-8192.json"
    assert set(json.loads(published.read_text())[0]) <= set(unequal[0][0].model_dump())


@pytest.mark.parametrize("task", ["language", "builtin:sentiment"])
def test_a_field_that_the_family_does_not_have_is_refused(task):
    """transformers would accept the field and ignore it."""
    run = RunConfig.load({"task": task, "model": {"name": "random:llama", "fields": {"n_layers": 12}}})
    with pytest.raises(OelmError, match=r"model\.fields.*llama.*'n_layers'"):
        open_task(run).build_model(run)
