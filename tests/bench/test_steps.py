"""Step times of arms side by side: what is timed, and what is compared with what.

No time is asserted: machines are shared.
"""

import io
import json
import re
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.base.text import plain_text
from oelm.bench import steps as bench
from oelm.bench.steps import benchmark, plan_arms, summarise
from oelm.cli.app import app
from oelm.cli.tables import bench_table
from oelm.cli.terminal import progress_bar
from oelm.config import RunConfig
from oelm.errors import OelmError
from oelm.models.small import small_model
from oelm.training.tasks.classification import ClassifierLoss
from oelm.training.tasks.open import open_task
from tests.support.training import config

LENGTH = 16
BERT = {"model": "random:bert", "batch_size": 4, "length": LENGTH}


def command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch) -> Terminal:
    """A terminal as standard error, and what is shown there."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    return shown


@pytest.fixture(scope="module")
def unequal():
    """Rows of a benchmark of a small BERT, in which one arm has batches of its own, and the shapes that it saw."""
    shapes = []
    forward = ClassifierLoss.forward

    def seen(self, labels, **inputs):
        assert inputs["attention_mask"].all()
        assert (labels < 3).all()
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(self, labels, **inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassifierLoss, "forward", seen)
        arms = plan_arms(["baseline", "oelm-freeze", "oelm-freeze@2"], **BERT)
        rows = summarise(benchmark(arms, rounds=2, steps=2, warmup=1), "baseline")
    return rows, shapes


# What is timed


def test_the_benchmark_interleaves_and_compares(tmp_path):
    """No figure is asserted, only what is measured and how it is compared."""
    arms = {name: config(tmp_path, method=name) for name in ("baseline", "oelm-freeze")}
    rows = summarise(benchmark(arms, rounds=2, steps=2, warmup=1), "baseline")
    assert [row["arm"] for row in rows] == ["baseline", "oelm-freeze"]
    assert rows[0]["ratio"] == 1.0
    assert rows[0]["flop_bound"] == 1.0
    assert rows[1]["flop_bound"] < 1.0
    assert rows[0]["trainable"] - rows[1]["trainable"] == 2 * 2 * 32 * 32
    assert all(row["step_ms"] > 0 and row["rounds"] == 2 for row in rows)
    assert [row["warning"] for row in rows] == [None, None]


def test_an_encoder_is_timed_at_classification_in_whole_batches_of_the_full_length(unequal):
    rows, shapes = unequal
    steps = 1 + 2 * (1 + 2)  # warm-up, and in both rounds one to fill the caches and two that are timed
    assert shapes.count((4, LENGTH)) == 2 * steps
    assert shapes.count((2, LENGTH)) == steps
    assert rows[0]["trainable"] - rows[1]["trainable"] == 3 * 2 * (48 * 48 + 48)


def test_the_arms_take_turns(monkeypatch):
    turns = []
    forward = ClassifierLoss.forward

    def seen(self, labels, **inputs):
        turns.append(len(labels))
        return forward(self, labels, **inputs)

    monkeypatch.setattr(ClassifierLoss, "forward", seen)
    benchmark(plan_arms(["baseline@3", "baseline@2"], **BERT), rounds=2, steps=1, warmup=0)
    assert turns[-8:] == [3, 3, 2, 2, 3, 3, 2, 2]


def test_an_arms_memory_leaves_out_the_arms_built_before_it(monkeypatch):
    allocated, peaks = iter([100, 130, 160]), iter([150, 200, 175])
    monkeypatch.setattr(bench, "_allocated", lambda device: next(allocated))
    monkeypatch.setattr(bench, "_peak", lambda device: next(peaks))
    arms = benchmark(plan_arms(["baseline", "oelm-freeze", "head-only"], **BERT), rounds=1, steps=1, warmup=0)
    assert [arm.peak_memory for arm in arms] == [50, 70, 15]


@pytest.mark.gpu
def test_the_same_arm_takes_the_same_memory_first_and_last():
    size = {"model": "random:bert", "batch_size": 8, "length": 128, "compile_model": False}
    arms = plan_arms(["baseline", "head-only", "baseline@8"], **size, overrides=["model.fields.hidden_size=384"])
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
def test_the_model_says_what_it_learns(model, kind):
    arms = plan_arms(["baseline"], model)
    assert arms["baseline"].task.kind == kind


@pytest.mark.parametrize("model", ["random:roberta", "random:albert", "random:deberta-v2", "random:gpt2"])
def test_other_families_can_be_timed_at_classification(model):
    arms = plan_arms(["baseline", "oelm-freeze"], model, 2, LENGTH, kind="classification")
    rows = summarise(benchmark(arms, rounds=1, steps=1, warmup=0), "baseline")
    assert rows[1]["flop_bound"] < 1


def test_a_causal_model_of_another_family_can_be_timed():
    arms = plan_arms(["baseline"], "random:llama", 2, LENGTH, vocab_size=50)
    (arm,) = benchmark(arms, rounds=1, steps=1, warmup=0)
    changed = small_model("llama", vocab_size=50, max_position_embeddings=64)
    assert arm.trainable == sum(p.numel() for p in changed.parameters())


def test_settings_of_training_reach_every_arm():
    more = ["train.precision=bfloat16", "model.fields.num_hidden_layers=1", "train.batch_size=6"]
    arms = plan_arms(["baseline", "oelm-freeze@2"], **BERT, overrides=more)
    assert [arm.train.precision for arm in arms.values()] == ["bfloat16", "bfloat16"]
    assert [arm.model.fields["num_hidden_layers"] for arm in arms.values()] == [1, 1]
    assert [arm.train.batch_size for arm in arms.values()] == [6, 2]
    assert [arm.method.name for arm in arms.values()] == ["baseline", "oelm-freeze"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["baseline@0"], "'baseline@0': @ must be followed by the arm's batch size, 1 or more"),
        (["baseline@-2"], "'baseline@-2': @ must be followed"),
        (["baseline@x"], "'baseline@x': @ must be followed"),
        (["baseline@"], "'baseline@': @ must be followed"),
        (["oelm-freez@8"], "unknown preset 'oelm-freez'. Did you mean 'oelm-freeze'?"),
        (["baseline", "baseline"], "'baseline' is named twice"),
        (["task.name=sst2"], "a benchmark takes settings of model, optimizer, train"),
        (["model.name=random:gpt2"], "model.name=random:gpt2: a benchmark's model is named with --model"),
        (["model.name=x"], "model.name=x: a benchmark's model is named with --model"),
        (["train.precison=float32"], "Did you mean 'precision'?"),
        (["model.fields.hiden_size=96"], "bert has no field 'hiden_size'. Did you mean 'hidden_size'?"),
        (["--model", "random:t5"], "not those of a t5"),
        (["--model", "random:t5", "--task", "classification"], "not those of a t5"),
        (["--model", "random:vit"], "not those of a vit"),
        (["--task", "language"], "has no language-model head"),
        (["model.fields.max_position_embeddings=64"], "data.sequence_length 128 is more than the model's 64"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, says):
    done = command("--model", "random:bert", "--rounds", 1, "--steps", 1, *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


# What is compared with what


def test_steps_of_different_size_are_compared_by_the_example(unequal):
    baseline, frozen, small = unequal[0]
    assert [row["batch_size"] for row in unequal[0]] == [4, 4, 2]
    assert frozen["ratio_per_example"] == frozen["ratio"]
    assert small["ratio_per_example"] == pytest.approx(2 * small["ratio"])
    assert small["ratio_per_example_95"] == pytest.approx(2 * small["ratio_95"])
    assert small["flop_bound"] == frozen["flop_bound"]
    assert small["tokens_per_second"] == pytest.approx(2 * LENGTH / small["step_ms"] * 1000)
    assert baseline["warning"] is None
    assert frozen["warning"] is None
    assert "oelm-freeze@2 has batches of 2, baseline of 4: " in small["warning"]


def test_intervals_are_those_of_students_t():
    special = pytest.importorskip("scipy.special", reason="scipy is not installed")
    for rounds in range(2, 200):
        assert bench._t95(rounds) == pytest.approx(special.stdtrit(rounds - 1, 0.975), abs=5e-4)


def test_the_table_shows_both_ratios_whole(unequal):
    text = plain_text(bench_table(unequal[0]))
    small = unequal[0][2]
    (line,) = [line for line in text.splitlines() if "oelm-freeze@2" in line]
    assert f"{small['ratio']:.3f} ± " in line
    assert f"{small['ratio_per_example']:.3f} ± " in line
    assert "per example" not in " ".join(plain_text(bench_table(unequal[0][:2])).split())


def test_the_command_prints_json_and_warns_beside_it():
    small = ("--model", "random:bert", "--batch-size", 2, "--sequence-length", LENGTH, "--rounds", 1, "--steps", 1)
    done = command("baseline", "baseline@1", "train.precision=bfloat16", *small, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN is not JSON
    assert rows[1]["ratio_95"] is None
    assert [row["arm"] for row in rows] == ["baseline", "baseline@1"]
    (warning,) = done.stderr.splitlines()
    assert warning == f"warning: {rows[1]['warning']}"


@pytest.mark.parametrize("more", [(), ("--decode",)])
def test_a_line_below_the_table_says_how_the_ratio_is_made(more):
    done = command("oelm-freeze", "--sequence-length", 8, "--vocab-size", 64, "--rounds", 2, "--steps", 1, *more)
    assert done.exit_code == 0, done.output
    line = done.stdout.splitlines()[-1]
    assert "to oelm-freeze's within a round, averaged over the rounds" in line
    assert "the machine's speed changes between rounds" in line


def test_help_names_the_arms_that_run_unless_some_are_given(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_text = " ".join(command("--help").output.split())
    assert "Default: baseline, oelm-freeze, identity-key." in help_text
    planned = []
    monkeypatch.setattr(bench, "plan_arms", lambda names, *_: planned.extend(names) or {})
    command()
    assert planned == ["baseline", "oelm-freeze", "identity-key"]


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ((), ["building baseline and warming it up", "building identity-key and warming it up"]),
        (
            ("--decode",),
            ["building baseline", "building identity-key", "warming up baseline", "warming up identity-key"],
        ),
    ],
)
def test_progress_shows_in_a_terminal_and_nowhere_else(more, stages, monkeypatch, capsys):
    terminal = open_terminal(monkeypatch)
    small = ["--batch-size=2", "--sequence-length=8", "--vocab-size=64", "--rounds=2", "--steps=1", "--json"]
    app(["bench", "baseline", "identity-key", *small, *more], standalone_mode=False)
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == ["baseline", "identity-key"]
    shown = terminal.getvalue()
    places = [shown.find(stage) for stage in [*stages, "rounds measured"]]
    assert places[0] >= 0
    assert places == sorted(places)
    assert re.search(r"rounds measured [^\n]*1/2", shown)
    assert command("baseline", *small, *more).stderr == ""


def test_nothing_draws_while_steps_are_timed(monkeypatch):
    terminal = open_terminal(monkeypatch)
    threads = threading.active_count()
    with progress_bar() as tell:
        tell("rounds measured", 0, 2)
        assert threading.active_count() == threads
        drawn = terminal.getvalue()
    assert "rounds measured" in drawn


def test_rows_have_every_field_of_those_that_were_kept(unequal):
    kept = Path(__file__).parents[2] / "results" / "bench-h200" / "bench-8192.json"
    assert set(json.loads(kept.read_text())[0]) <= set(unequal[0][0])


@pytest.mark.parametrize("task", ["language", "builtin:sentiment"])
def test_a_size_that_the_family_does_not_have_is_refused(task):
    """transformers would take it, and the model would stay as small as it was."""
    run = RunConfig.load({"task": task, "model": {"name": "random:llama", "fields": {"n_layers": 12}}})
    with pytest.raises(OelmError, match=r"model\.fields: llama has no field 'n_layers'"):
        open_task(run).build_model(run)
