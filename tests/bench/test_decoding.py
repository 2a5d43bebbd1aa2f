"""`oelm bench --decode`: the time of a token after a context, and the size of its cache. No time is asserted."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench import decoder, decoding
from oelm.bench.arms import BenchSetting, plan_arms
from oelm.bench.caches import enlarge, refill, shared_memory
from oelm.bench.decode_kernels import DecodeKernel
from oelm.bench.decoding import DecodePlan
from oelm.bench.forms import FORMS
from oelm.cli.app import app
from oelm.errors import ConfigError, OelmError
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.report import write_report

ARMS = ["baseline", "identity-key", "oelm-freeze"]
SMALL = ("--steps", 2, "--rounds", 1, "--vocab-size", 64, "model.fields.num_hidden_layers=2")


def planned(*names: str, length: int, **setting: object):
    """Return the run configs of arms of a small GPT."""
    return plan_arms(
        names, BenchSetting(**{"model": "gpt:tiny", "vocab_size": 64, "length": length, "decode": True, **setting})
    )


def make_decoder(name: str, batch: int, context: int, device: str = "cpu", **setting: object) -> decoder.Decoder:
    """Return an arm of a small GPT with a context in its cache, ready to generate."""
    places = decoder.places_needed(context, 4)
    (config,) = planned(name, length=places, **setting).values()
    arm = decoder.ArmModel(name, config, name in FORMS and FORMS[name].float8_cache)
    read = arm.read(decoder.rows_to_read(batch), context, places, seed=0)
    graphs = decoder.GraphMemory() if device == "cuda" else None
    return decoder.Decoder(arm, read, batch, shared_memory([read.cache], batch), graphs)


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
        plan = DecodePlan([2, 16], [20, 24], rounds=2, tokens=3)
        rows = decoding.benchmark_decoding(planned(*ARMS, length=plan.positions), plan)
    return rows, shapes


def test_single_tokens_are_timed_after_the_whole_context(measured):
    rows, shapes = measured
    read = [(rows_read, context) for rows_read in (2, 8) for context in (20, 24)]
    assert [shapes.count(shape) for shape in read] == [len(ARMS)] * 4
    generated = 3 + 2 * (1 + 3)  # three of warm-up; in each of two rounds, one untimed and three timed
    assert shapes.count((2, 1)) == shapes.count((16, 1)) == 2 * len(ARMS) * generated
    assert set(shapes) == {(1, 2), (2, 1), (16, 1), *read}  # two tokens tell the size of a cache
    assert [(row.batch_size, row.context, row.arm) for row in rows] == [
        (batch, context, arm) for batch in (2, 16) for context in (20, 24) for arm in ARMS
    ]
    assert all(row.token_ms > 0 and math.isfinite(row.ratio_95) and row.rounds == 2 for row in rows)


def test_ratios_are_to_the_first_arm_of_the_same_setting(measured):
    rows, _ = measured
    assert [row.ratio for row in rows if row.arm == "baseline"] == [1.0] * 4
    assert [row.prefill_rows for row in rows if row.arm == "baseline"] == [2, 2, 8, 8]
    assert all(row.prefill_ms > 0 and row.error is None and row.kernel is None for row in rows)


def test_cache_size_is_in_bytes_per_token_of_one_text(measured):
    rows, _ = measured
    width, layers = 256, 4
    assert [row.cache_bytes_per_token for row in rows[:3]] == [
        8 * width * layers,
        4 * width * layers,
        8 * width * layers,
    ]
    assert [row.cache_ratio for row in rows[:3]] == [1.0, 0.5, 1.0]
    assert {row.layers for row in rows} == {layers}


@pytest.mark.parametrize("name", ["identity-key", "grouped-2", "latent", "shared-kv", "orthogonal-key"])
def test_the_timed_tokens_are_those_of_greedy_generation(name):
    """So the timed work is real: greedy decoding with the model's own cache, half of whose rows are copies."""
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        arm = make_decoder(name, 16, 12)
        for _ in range(2):  # every round starts with the context
            arm.start()
            tokens = [arm.last.clone()]
            for _ in range(4):
                arm.generate(1)
                tokens.append(arm.last.clone())
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = arm.arm.model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[:, 12:]
    assert torch.equal(torch.cat(tokens, 1), expected.repeat(2, 1))


def test_arms_take_turns_in_the_same_memory():
    """All their caches together may be larger than a GPU's memory."""
    with torch.inference_mode():
        arms = [
            decoder.ArmModel(name, config, FORMS[name].float8_cache)
            for name, config in planned("multi-head", "latent", "multi-head-fp8", length=32).items()
        ]
        read = [arm.read(4, 12, 32, seed=0) for arm in arms]
        memory = shared_memory([one.cache for one in read], 8)
        large = [enlarge(one.cache, 8, memory) for one in read]
        for cache, one in zip(large, read, strict=True):
            refill(cache, one.cache)
            for layer, source in zip(cache.layers, one.cache.layers, strict=True):
                assert torch.equal(layer.keys, source.keys.repeat(2, 1, 1, 1))
                assert torch.equal(layer.values, source.values.repeat(2, 1, 1, 1))
                assert layer.cumulative_length == 12
    first_layers = [cache.layers[0].keys.data_ptr() for cache in large]
    assert len(set(first_layers)) == 1
    assert sum(one.nbytes for one in memory) == 8 * 32 * arms[0].cache_bytes


def test_an_8_bit_cache_attends_almost_as_the_whole_one():
    with torch.inference_mode():
        logits = []
        for name in ("multi-head", "multi-head-fp8"):
            arm = make_decoder(name, 2, 40)
            arm.start()
            with arm._chosen(arm._kernel):
                logits.append(arm.arm.model(input_ids=arm.last, **arm._inputs).logits)
            assert arm.cache.layers[0].cumulative_length == 41
    assert arm.cache.layers[0].keys.dtype == torch.uint8
    assert not torch.equal(*logits)
    assert torch.allclose(*logits, atol=0.05 * logits[0].std().item())


def test_the_fastest_kernel_that_works_is_used(monkeypatch):
    """On a GPU; here the steps are not recorded, and one of the kernels does not exist."""
    names = ["sdpa", "oelm_missing", "oelm_unmasked", "oelm_in_parts_64"]
    seconds = {"sdpa": 0.003, "oelm_unmasked": 0.002, "oelm_in_parts_64": 0.004}

    def time_steps(self, step, tokens):
        step()
        return [seconds[self.arm.model.config._attn_implementation]] * tokens

    def refuse_missing(self, step):
        if self.arm.model.config._attn_implementation == "oelm_missing":
            raise RuntimeError("No available kernel. Aborting execution.")
        return step

    kernels = [DecodeKernel(name, name) for name in names]
    monkeypatch.setattr(decoder, "kernels_for", lambda *arguments: kernels)
    monkeypatch.setattr(decoder.Decoder, "_time", time_steps)
    monkeypatch.setattr(decoder.Decoder, "_record", refuse_missing)
    with torch.inference_mode():
        arm = make_decoder("grouped-2", 2, 12)
    assert arm.kernel == "oelm_unmasked"
    assert arm.kernel_ms == {name: 1000 * second for name, second in seconds.items()}
    kernels[:] = [DecodeKernel("cudnn", "oelm_missing")] * 2
    with (
        pytest.raises(OelmError, match=r"no kernel computes its attention \(cudnn: No available kernel"),
        torch.inference_mode(),
    ):
        make_decoder("grouped-2", 2, 12)


@pytest.mark.full
def test_a_compiled_model_is_one_graph_and_generates_the_same(monkeypatch):
    compile_options = []
    torch_compile = torch.compile

    def compile_eagerly(model, **options):
        compile_options.append(options)
        return torch_compile(model, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    arms = ("identity-wide", "identity-key", "shared-kv", "multi-head-fp8")
    result = command(*arms, "--compile", *SMALL, "--sequence-length", 12, "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert "1 interleaved rounds, compiled" in result.output
    assert "failed" not in result.output
    assert compile_options == [{"dynamic": False}] * 4
    tokens = []
    for compile_model in (True, False):
        with torch.inference_mode():
            arm = make_decoder("identity-key", 2, 12, compile_model=compile_model)
            arm.start()
            tokens.append([(arm.generate(1), arm.last.tolist())[1] for _ in range(4)])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["multi-head", "grouped-2", "identity-key", "shared-kv", "latent", "multi-head-fp8"])
def test_a_recorded_graph_generates_the_same_on_a_gpu(name):
    """The graph is recorded once and replayed while the cache grows."""
    tokens = []
    for compile_model in (True, False):
        with torch.inference_mode():
            arm = make_decoder(name, 16, 200, "cuda", compile_model=compile_model)
            arm.start()
            tokens.append([(arm.generate(1), arm.last.tolist())[1] for _ in range(4)])
    same = [one == other for pair in zip(*tokens, strict=True) for one, other in zip(*pair, strict=True)]
    assert sum(same) > 0.9 * len(same), "rounding may change a few tokens"
    assert set(arm.kernel_ms) >= ({"split-64", "split-128"} if arm.kernel else set())


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


@pytest.mark.full
def test_every_setting_has_a_table(tmp_path):
    settings = ("--batch-size", "1,16", "--sequence-length", "8,12", *SMALL)
    table = command("multi-head", "multi-query", *settings)
    assert table.exit_code == 0, table.output
    titles = [line.split(", 1 interleaved")[0] for line in table.stdout.splitlines() if line.startswith("one token")]
    assert titles == [f"one token after {tokens}, batches of {batch}" for batch in (1, 16) for tokens in (8, 12)]
    assert sum(line.strip().startswith("multi-query") for line in table.stdout.splitlines()) == 4
    assert "prefill: reading the context" in table.stdout
    as_json = command("multi-head", "multi-query", *settings, "--json")
    rows = json.loads(as_json.stdout)
    assert [(row["batch_size"], row["context"]) for row in rows[::2]] == [(1, 8), (1, 12), (16, 8), (16, 12)]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "decode.json").write_text(as_json.stdout)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert text.count("tokens of context") == 4
    assert "one token after 12 tokens of context, in batches of 16" in text


def test_an_arm_that_does_not_fit_in_memory_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "shared_memory", lambda caches, batch: _allocate(caches, batch))
    arms = ("latent", "multi-head", "multi-query")
    result = command(*arms, *SMALL, "--sequence-length", 12, "--batch-size", 2, "--json")
    assert result.exit_code == 0, result.output
    latent, multi_head, multi_query = json.loads(result.stdout)
    assert multi_head["error"] == "not enough memory"
    assert [multi_head[field] for field in ("token_ms", "tokens_per_second", "ratio")] == [None] * 3
    assert multi_head["cache_bytes_per_token"] > 0
    assert latent["ratio"] == 1.0
    assert multi_query["ratio"] > 0
    assert "multi-head, 12 tokens, batches of 2: not enough memory" in result.stderr
    assert " failed " in " ".join(command(*arms, *SMALL, "--batch-size", 2, "--sequence-length", 12).stdout.split())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "decode.json").write_text(result.stdout)
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("md",))
    assert "| `multi-head` | – | – | – |" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def _allocate(caches, batch):
    """Allocate memory as if there were none for a cache as large as multi-head attention's."""
    memory = shared_memory(caches, batch)
    if sum(one.nbytes for one in memory) > 2 * 32 * 2 * 1024:
        raise torch.OutOfMemoryError("too much")
    return memory


def test_a_benchmark_without_any_time_fails(monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(decoding, "shared_memory", refuse)
    plan = DecodePlan([2], [12], rounds=1, tokens=1)
    with pytest.raises(OelmError, match="no arm could be timed; multi-head: not enough memory"):
        decoding.benchmark_decoding(planned("multi-head", "multi-query", length=plan.positions), plan)


@pytest.mark.parametrize(
    ("arms", "model", "parts"),
    [
        (["baseline"], "random:bert", ["random:bert", "decoder"]),
        (["baseline", "baseline@4"], "gpt:tiny", ["'baseline@4'", "--decode"]),
    ],
)
def test_arms_that_cannot_decode_are_refused_before_a_model_is_built(arms, model, parts, monkeypatch):
    monkeypatch.setattr(decoder, "build_language_model", None)
    plan = DecodePlan([2], [12])
    with pytest.raises(ConfigError, match=".*".join(parts)):
        decoding.benchmark_decoding(planned(*arms, model=model, length=24, vocab_size=None), plan)
    result = command(*arms, "--model", model)
    assert result.exit_code == 2
    assert all(part in result.output for part in parts), result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--batch-size", "0"], ["--batch-size 0", "above 0"]),
        (["--batch-size", "8,"], ["--batch-size 8,", "above 0"]),
        (["--sequence-length", "4,x"], ["--sequence-length 4,x", "8,64"]),
        (["train.batch_size=4"], ["train.batch_size=4", "--batch-size"]),
    ],
)
def test_bad_sizes_are_refused(arguments, parts):
    result = command("baseline", *arguments)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr
