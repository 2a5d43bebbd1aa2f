"""`oelm bench --decode`: the time of a token after a context, and the size of its cache. No time is asserted."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench import decoding
from oelm.bench.arms import BenchSetting, plan_arms
from oelm.cli.app import app
from oelm.errors import ConfigError
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.report import write_report

ARMS = ["baseline", "identity-key", "oelm-freeze"]


def planned(*names: str, length: int, **setting: object):
    """Return the run configs of arms of a small GPT with batches of two."""
    fixed = {"model": "gpt:tiny", "batch_size": 2, "vocab_size": 64}
    return plan_arms(names, BenchSetting(**{**fixed, "length": length, **setting}))


def command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--decode"])


@pytest.fixture(scope="module")
def measured():
    """Return the rows of a small benchmark, and the shapes of its models' inputs."""
    shapes = []
    forward = OelmGPTForCausalLM.forward

    def record_shape(self, **inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(self, **inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OelmGPTForCausalLM, "forward", record_shape)
        arms = planned(*ARMS, length=decoding.positions_needed(20, 2, 3))
        rows = decoding.benchmark_decoding(arms, 20, rounds=2, tokens=3)
    return rows, shapes


def test_single_tokens_are_timed_after_the_whole_context(measured):
    rows, shapes = measured
    assert shapes.count((2, 20)) == len(ARMS)
    generated = 3 + 2 * (1 + 3)  # three of warm-up; in each of two rounds, one untimed and three timed
    assert shapes.count((2, 1)) == len(ARMS) * generated
    assert set(shapes) == {(2, 20), (2, 1)}
    assert [row.arm for row in rows] == ARMS
    assert rows[0].ratio == 1.0
    assert all(row.token_ms > 0 and math.isfinite(row.ratio_95) and row.rounds == 2 for row in rows)


def test_cache_size_is_in_bytes_per_token_of_one_text(measured):
    rows, _ = measured
    width, layers = 256, 4
    assert [row.cache_bytes_per_token for row in rows] == [
        8 * width * layers,
        4 * width * layers,
        8 * width * layers,
    ]
    assert [row.cache_ratio for row in rows] == [1.0, 0.5, 1.0]


def test_the_timed_tokens_are_those_of_greedy_generation():
    """So the timed work is real: greedy decoding with the model's own cache."""
    (arm,) = planned("identity-key", length=decoding.positions_needed(12, 1, 4)).values()
    with torch.inference_mode():
        decoder = decoding._Decoder("arm", arm, 12, seed=0)
        tokens = [decoder.last]
        for _ in decoder.generate(4):
            tokens.append(decoder.last)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(torch.cat(tokens, 1), decoder.model.generate(ids, **greedy)[:, 12:])


@pytest.mark.full
def test_a_compiled_model_is_one_graph_and_generates_the_same(monkeypatch):
    compile_options = []
    torch_compile = torch.compile

    def compile_eagerly(model, **options):
        compile_options.append(options)
        return torch_compile(model, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    small = ("--sequence-length", 12, "--steps", 2, "--rounds", 1, "--batch-size", 2, "--vocab-size", 64)
    result = command("identity-wide", "identity-key", "--compile", *small)
    assert result.exit_code == 0, result.output
    assert "1 interleaved rounds, compiled" in result.output
    assert compile_options == [{"dynamic": False, "mode": None}] * 2
    tokens = []
    for compile_model in (True, False):
        (arm,) = planned("identity-key", length=30, compile_model=compile_model).values()
        with torch.inference_mode():
            decoder = decoding._Decoder("arm", arm, 12, seed=0)
            tokens.append([decoder.last.tolist() for _ in decoder.generate(4)])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["baseline", "identity-key", "identity-wide"])
def test_a_recorded_graph_gives_the_same_logits_on_a_gpu(name):
    """The graph is recorded and replayed several times while the cache grows."""
    logits: list[list[torch.Tensor]] = []
    for compile_model in (True, False):
        (arm,) = planned(name, length=300, batch_size=4, compile_model=compile_model).values()
        with torch.inference_mode():
            decoder = decoding._Decoder("arm", arm, 200, seed=0)
            ids = torch.arange(4, device="cuda")[:, None]
            inputs = {"input_ids": ids, "past_key_values": decoder.cache, "use_cache": True}
            logits.append([decoder.step(**inputs).logits.float().clone() for _ in range(6)])
    assert all(torch.allclose(recorded, plain, atol=0.05) for recorded, plain in zip(*logits, strict=True))


def test_the_command_prints_a_table_or_json_that_a_report_reads(tmp_path):
    small = ("--sequence-length", 12, "--steps", 2, "--rounds", 2, "--batch-size", 2, "--vocab-size", 64)
    table = command("baseline", "identity-key", *small)
    assert table.exit_code == 0, table.output
    assert "one token after 12, batches of 2" in table.output
    one_round = command("baseline", "identity-key", *small[:4], "--rounds", 1)
    assert "nan" not in one_round.output, "one round has no interval"
    as_json = command("baseline", "identity-key", *small, "--json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "decode.json").write_text(as_json.output)
    assert json.loads(as_json.output)[1]["cache_ratio"] == 0.5
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md", "html"))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "one token after 12 tokens of context, in batches of 2" in text
    assert "| `identity-key` |" in text
    assert "| 4,096 | 0.500 | 2 |" in text
    assert "compiled" not in text
    (tmp_path / "runs" / "decode.json").write_text(as_json.output.replace('"compiled": false', '"compiled": true'))
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert "in batches of 2, compiled (" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arms", "model", "parts"),
    [
        (["baseline"], "random:bert", ["random:bert", "decoder"]),
        (["baseline", "baseline@4"], "gpt:tiny", ["'baseline@4'", "--decode"]),
    ],
)
def test_arms_that_cannot_decode_are_refused_before_a_model_is_built(arms, model, parts, monkeypatch):
    monkeypatch.setattr(decoding, "build_language_model", None)
    with pytest.raises(ConfigError, match=".*".join(parts)):
        decoding.benchmark_decoding(planned(*arms, model=model, length=24, vocab_size=None), 12)
    result = command(*arms, "--model", model)
    assert result.exit_code == 2
    assert all(part in result.output for part in parts), result.output
