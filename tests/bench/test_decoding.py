"""`oelm bench --decode`: a token on top of a context, and what its cache takes. No time is asserted."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench import decoding
from oelm.bench.steps import plan_arms
from oelm.cli.app import app
from oelm.errors import ConfigError
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.report import write_report

ARMS = ["baseline", "identity-key", "oelm-freeze"]


def command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--decode"])


@pytest.fixture(scope="module")
def seen():
    """Rows of a small benchmark, and the shapes of what its models read."""
    shapes = []
    forward = OelmGPTForCausalLM.forward

    def watched(self, **inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(self, **inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OelmGPTForCausalLM, "forward", watched)
        arms = plan_arms(ARMS, "gpt:tiny", 2, decoding.room_for(20, 2, 3), vocab_size=64)
        rows = decoding.summarise(decoding.measure(arms, 20, rounds=2, tokens=3), "baseline")
    return rows, shapes


def test_single_tokens_are_timed_on_top_of_the_whole_context(seen):
    rows, shapes = seen
    assert shapes.count((2, 20)) == len(ARMS)
    written = 3 + 2 * (1 + 3)  # warm-up; in both rounds one, and three that are timed
    assert shapes.count((2, 1)) == len(ARMS) * written
    assert set(shapes) == {(2, 20), (2, 1)}
    assert [row["arm"] for row in rows] == ARMS
    assert rows[0]["ratio"] == 1.0
    assert all(row["token_ms"] > 0 and math.isfinite(row["ratio_95"]) and row["rounds"] == 2 for row in rows)


def test_the_cache_is_counted_in_bytes_of_one_token_of_one_text(seen):
    rows, _ = seen
    width, layers = 256, 4
    assert [row["cache_bytes_per_token"] for row in rows] == [
        8 * width * layers,
        4 * width * layers,
        8 * width * layers,
    ]
    assert [row["cache_ratio"] for row in rows] == [1.0, 0.5, 1.0]


def test_what_is_written_is_what_generation_writes():
    """The arms do real work: greedy tokens on the model's own cache."""
    (arm,) = plan_arms(["identity-key"], "gpt:tiny", 2, decoding.room_for(12, 1, 4), vocab_size=64).values()
    with torch.inference_mode():
        writer = decoding._Writer(arm, 12, seed=0)
        written = [writer.last]
        for _ in writer.write(4):
            written.append(writer.last)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(torch.cat(written, 1), writer.model.generate(ids, **how)[:, 12:])


def test_compiled_it_is_one_graph_that_writes_the_same(monkeypatch):
    compiled = []

    compiler = torch.compile

    def whole(model, **options):
        compiled.append(options)
        return compiler(model, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", whole)
    small = ("--sequence-length", 12, "--steps", 2, "--rounds", 1, "--batch-size", 2, "--vocab-size", 64)
    shown = command("identity-wide", "identity-key", "--compile", *small)
    assert shown.exit_code == 0, shown.output
    assert "1 interleaved rounds, compiled" in shown.output
    assert compiled == [{"dynamic": False, "mode": None}] * 2
    written = []
    for how in (True, False):
        (arm,) = plan_arms(["identity-key"], "gpt:tiny", 2, 30, vocab_size=64, compile_model=how).values()
        with torch.inference_mode():
            writer = decoding._Writer(arm, 12, seed=0)
            written.append([writer.last.tolist() for _ in writer.write(4)])
    assert written[0] == written[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["baseline", "identity-key", "identity-wide"])
def test_a_recorded_token_is_the_same_on_a_gpu(name):
    """Recorded, played back and played back again, with a cache that grows meanwhile."""
    logits: list[list[torch.Tensor]] = []
    for how in (True, False):
        (arm,) = plan_arms([name], "gpt:tiny", 4, 300, vocab_size=64, compile_model=how).values()
        with torch.inference_mode():
            writer = decoding._Writer(arm, 200, seed=0)
            ids = torch.arange(4, device="cuda")[:, None]
            told = {"input_ids": ids, "past_key_values": writer.cache, "use_cache": True}
            logits.append([writer.step(**told).logits.float().clone() for _ in range(6)])
    assert all(torch.allclose(one, other, atol=0.05) for one, other in zip(*logits, strict=True))


def test_the_command_prints_a_table_or_json_and_a_report_reads_that(tmp_path):
    small = ("--sequence-length", 12, "--steps", 2, "--rounds", 2, "--batch-size", 2, "--vocab-size", 64)
    shown = command("baseline", "identity-key", *small)
    assert shown.exit_code == 0, shown.output
    assert "one token after 12, batches of 2" in shown.output
    once = command("baseline", "identity-key", *small[:4], "--rounds", 1)
    assert "nan" not in once.output, "one round has no interval"
    printed = command("baseline", "identity-key", *small, "--json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "decode.json").write_text(printed.output)
    assert json.loads(printed.output)[1]["cache_ratio"] == 0.5
    pytest.importorskip("scipy")
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md", "html"))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "one token after 12 tokens of context, in batches of 2" in text
    assert "| `identity-key` |" in text
    assert "| 4,096 | 0.500 | 2 |" in text
    assert "compiled" not in text
    (tmp_path / "runs" / "decode.json").write_text(printed.output.replace('"compiled": false', '"compiled": true'))
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert "in batches of 2, compiled (" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arms", "model", "says"),
    [
        (["baseline"], "random:bert", "only a decoder writes token by token"),
        (["baseline", "baseline@4"], "gpt:tiny", "in batches of one size"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_built(arms, model, says, monkeypatch):
    monkeypatch.setattr(decoding, "build_for_run", None)
    names, overrides = [one for one in arms if "=" not in one], [one for one in arms if "=" in one]
    planned = plan_arms(names, model, 2, 24, overrides=overrides)
    with pytest.raises(ConfigError, match=says):
        decoding.measure(planned, 12)
    failed = command(*arms, "--model", model)
    assert failed.exit_code == 2
    assert says in failed.output
