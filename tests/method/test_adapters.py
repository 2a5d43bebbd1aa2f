"""Adapters, biases, last blocks and heads train beside a frozen body, and are verified, saved, loaded and exported."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import oelm
from oelm.method.apply import install
from oelm.method.diagnose import diagnose, sample_batch, train_steps
from oelm.method.plan import plan
from oelm.method.projections import SplitProjection
from oelm.method.seal import content_hash, fingerprint
from oelm.method.sites import find_sites, weight_matrix, without_adapter
from oelm.method.spec import PRESETS, Adapter, Method
from oelm.method.trainable import frozen_by_rest, head_of
from oelm.models.small import small_model
from oelm.training.optim import placements
from tests.support.models import assert_exports, distance, flip_bit, freeze_error, hashes, lively, lively_model, logits
from tests.support.training import Death, assert_same_run, run_to_end, start, tiny, write_yaml

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")

EVERYWHERE = ["q", "k", "v", "o", "ffn_in", "ffn_out"]
ARMS: dict[str, Any] = {
    "lora": "lora",
    "oft": "oft",
    "bitfit": "bitfit",
    "last-layers": "last-layers",
    "head-only": "head-only",
    "lora everywhere": {"preset": "lora", "rest": "biases", "adapter": {"rank": 3, "dropout": 0.2}},
    "oft everywhere": {"preset": "oft", "adapter": {"rank": 4, "dropout": 0.5}},
}
for name in ("lora everywhere", "oft everywhere"):
    ARMS[name]["adapter"]["targets"] = EVERYWHERE
# Not every model has biases, or a head that is not tied to its embedding.
CASES = [
    ("bert", ["lora", "oft", "bitfit", "last-layers", "head-only", "lora everywhere"]),
    ("roberta", ["lora", "head-only"]),
    ("distilbert", ["oft", "bitfit"]),
    ("gpt2", ["lora", "oft", "bitfit", "last-layers", "lora everywhere", "oft everywhere"]),
    ("gpt2-classifier", ["lora", "head-only"]),
    ("llama", ["lora", "oft", "head-only", "oft everywhere"]),
    ("t5", ["lora", "oft", "last-layers"]),
    ("t5-classifier", ["lora", "head-only"]),
    ("oelm-gpt", ["lora", "oft", "bitfit"]),
    ("oelm-gpt-classifier", ["lora"]),
]


def model_of(name: str) -> PreTrainedModel:
    """Return a lively small model: as in `SMALL`, or with a classifier's head."""
    if not name.endswith("-classifier"):
        return lively_model(name)
    config = small_model(name.removesuffix("-classifier")).config
    config.pad_token_id, config.num_labels = 0, 3
    config.bos_token_id, config.eos_token_id = 1, 2
    torch.manual_seed(0)
    return lively(AutoModelForSequenceClassification.from_config(config))


def model_with(name: str, method: Any, **options: Any) -> PreTrainedModel:
    """Return a lively small model with a method applied."""
    model = model_of(name)
    oelm.apply(model, method, **options)
    return model


def cases_with_marks(cases: list[tuple[str, list[str]]]) -> list[Any]:
    """Return one parameter set per model and arm; those with adapters are skipped where peft is not installed."""
    pairs = [(name, arm) for name, arms in cases for arm in arms]
    return [pytest.param(*pair, marks=needs_peft if re.match("lora|oft", pair[1]) else ()) for pair in pairs]


# From apply to export, on every kind of model


def assert_trains_and_loads(model, folder):
    """Assert that training changes every trainable and no frozen tensor; return the model saved and loaded again."""
    before, frozen, trained = logits(model), hashes(model, frozen=True), hashes(model, frozen=False)
    train_steps(model, 20, weight_decay=0.1)
    assert hashes(model, frozen=True) == frozen
    after = hashes(model, frozen=False)
    assert [n for n in trained if after[n] == trained[n]] == []
    assert distance(logits(model), before) > 1e-4
    oelm.verify(model)
    model.save_pretrained(folder)
    loaded = oelm.load(folder)
    assert_same_tensors(loaded, model)
    return loaded


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "arm"), cases_with_marks(CASES))
def test_an_arm_trains_loads_and_exports(name, arm, tmp_path):
    model = model_of(name)
    before = logits(model)
    report = oelm.apply(model, ARMS[arm])
    assert torch.equal(logits(model), before), "the outputs at step 0 must be those of the model"
    frozen, trained = hashes(model, frozen=True), hashes(model, frozen=False)
    assert report.trainable == sum(p.numel() for n, p in model.named_parameters() if n in trained)
    verification = oelm.verify(model)
    assert verification.tensors == verification.exact == len(frozen), "every frozen tensor must be sealed"

    loaded = assert_trains_and_loads(model, tmp_path / "saved")
    if name != "oelm-gpt-classifier":  # only the language model has a plain counterpart
        assert_exports(loaded, tmp_path / "plain")


def assert_same_tensors(left: nn.Module, right: nn.Module) -> None:
    """Assert that class, parameters, buffers and requires_grad are the same, to the bit.

    Outputs are compared with a tolerance: a loaded tensor may be aligned differently, and rounding then differs.
    """
    assert type(left) is type(right)
    for kind in ("named_parameters", "named_buffers"):
        left_tensors, right_tensors = dict(getattr(left, kind)()), dict(getattr(right, kind)())
        assert {n: (content_hash(t), t.dtype, t.requires_grad) for n, t in left_tensors.items()} == {
            n: (content_hash(t), t.dtype, t.requires_grad) for n, t in right_tensors.items()
        }
    assert list(left.state_dict()) == list(right.state_dict())
    assert distance(logits(left), logits(right)) < 1e-5


_PLAIN = """
import sys
sys.modules["oelm"] = sys.modules["peft"] = None  # importing either raises from now on
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    cls = AutoModelForSequenceClassification if "bert" in folder else AutoModelForCausalLM
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        torch.save(model.eval()(**torch.load(folder + ".pt", weights_only=True)).logits, folder + ".out")
"""


@pytest.mark.full
@needs_peft
def test_exports_work_where_neither_oelm_nor_peft_is_installed(tmp_path):
    expected = {}
    for name, arm in itertools.product(("bert", "gpt2", "oelm-gpt"), ("lora everywhere", "oft everywhere")):
        model = model_with(name, ARMS[arm])
        train_steps(model, 3)
        folder = oelm.export(model, tmp_path / f"{name}-{arm}")
        torch.save(sample_batch(model), f"{folder}.pt")
        expected[str(folder)] = logits(model)
    result = subprocess.run(
        [sys.executable, "-I", "-c", _PLAIN, *expected],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    for folder, output in expected.items():
        assert distance(torch.load(f"{folder}.out", weights_only=True), output) < 1e-4
        assert "lora" not in (Path(folder) / "config.json").read_text()


# Adapters beside matrices that the method itself freezes, while the rest trains


def preset_with_adapter(preset: str, kind: str, targets: list[str], **changes: Any) -> dict[str, Any]:
    """Return a preset with an adapter of rank 4 on the targets."""
    return {"preset": preset, "adapter": {"kind": kind, "rank": 4, "targets": targets}, **changes}


def matrices(model: PreTrainedModel) -> dict[str, str]:
    """Return the hash of every matrix that the method set, by path, as (rows out, width in)."""
    return {path: content_hash(weight_matrix(model.get_submodule(path))) for path in model.config.oelm["matrices"]}


QK, QK_FFN = ["q", "k"], ["q", "k", "ffn_in", "ffn_out"]
ADAPTER_BESIDE_FROZEN = [
    ("bert", preset_with_adapter("oelm-freeze", "lora", QK)),
    ("bert", preset_with_adapter("oelm-qk-ffn", "oft", QK_FFN, biases="trained", layers="last:2")),
    ("gpt2", preset_with_adapter("oelm-freeze", "lora", QK)),
    ("gpt2", preset_with_adapter("oelm-qk-ffn", "lora", QK_FFN)),
    # OFT copies the Conv1D of GPT-2's feed-forward into a Linear.
    ("gpt2", preset_with_adapter("oelm-qk-ffn", "oft", QK_FFN)),
    ("gpt_neox", preset_with_adapter("oelm-random-orthogonal", "oft", ["k"])),
    ("t5", preset_with_adapter("oelm-random-matched", "lora", ["q"], attention=["decoder", "cross"])),
    ("oelm-gpt", preset_with_adapter("oelm-freeze", "lora", QK)),
    ("oelm-gpt", preset_with_adapter("identity-key", "oft", ["q"], q={"init": "polar", "frozen": True})),
]


@pytest.mark.sample(3)
@needs_peft
@pytest.mark.parametrize(("name", "method"), ADAPTER_BESIDE_FROZEN, ids=lambda value: str(value)[:60])
def test_an_adapter_beside_frozen_matrices_trains_loads_and_exports(name, method, tmp_path):
    unadapted = model_with(name, {key: value for key, value in method.items() if key != "adapter"})
    model = model_of(name)
    report = oelm.apply(model, method)
    assert torch.equal(logits(model), logits(unadapted)), "at step 0 the adapter must change nothing"
    frozen = hashes(model, frozen=True)
    assert {n.replace(".base_layer", "") for n in frozen} == set(hashes(unadapted, frozen=True))
    assert matrices(model) == matrices(unadapted)
    assert report.frozen == oelm.audit(unadapted).frozen
    assert report.trainable - report.adapter_trainable == oelm.audit(unadapted).trainable
    verification = oelm.verify(model)
    assert verification.tensors == verification.exact == len(frozen)

    loaded = assert_trains_and_loads(model, tmp_path / "saved")
    assert_exports(loaded, tmp_path / "plain")


@needs_peft
def test_counts_of_adapters_beside_frozen_matrices_equal_those_computed_by_hand():
    rank = 2
    method = {"preset": "oelm-freeze", "adapter": {"kind": "lora", "rank": rank, "targets": QK}, "layers": "last:1"}
    report = oelm.apply(model_of("bert"), method)
    rows = {(row.layer, row.role): row for row in report.rows}
    for role in QK:
        row = rows["2", role]
        assert (row.frozen, row.trainable) == (WIDTH * WIDTH + WIDTH, rank * 2 * WIDTH)
        assert row.init == "qr"
        assert row.orthogonality_error is not None
        assert row.orthogonality_error < 1e-5
        assert (rows["1", role].frozen, rows["1", role].trainable) == (0, WIDTH * WIDTH + WIDTH)
    assert report.frozen == 2 * (WIDTH * WIDTH + WIDTH)
    assert report.adapter_trainable == 2 * rank * 2 * WIDTH
    elsewhere = report.trainable - report.adapter_trainable - HEAD
    adapters = f"{report.adapter_trainable:,} in adapters (lora, rank 2, alpha 16, on q, k)"
    assert f"{adapters},\n{HEAD:,} in the head, {elsewhere:,} elsewhere" in str(report)


@needs_peft
@pytest.mark.parametrize(("name", "kind"), [("bert", "lora"), ("gpt2", "oft")])
def test_damage_to_a_frozen_matrix_with_an_adapter_is_detected(name, kind):
    model = model_with(name, preset_with_adapter("oelm-freeze", kind, QK))
    path = {"bert": "bert.encoder.layer.1.attention.self.query", "gpt2": "transformer.h.1.attn.c_attn.q"}[name]
    weight = model.get_parameter(f"{path}.base_layer.weight")
    flip_bit(weight)
    assert f"{path}.base_layer.weight: its content changed" in freeze_error(model)
    flip_bit(weight)
    oelm.verify(model)
    weight.requires_grad_(True)
    assert f"{path}.base_layer.weight was frozen and is now trainable" in freeze_error(model)
    weight.requires_grad_(False)

    sealed = model.config.oelm["frozen"][f"{path}.base_layer.weight"]
    weight.data.mul_(1.01)
    model.config.oelm["frozen"][f"{path}.base_layer.weight"] = fingerprint(weight)
    assert f"{path} lost its orthogonality" in freeze_error(model)
    weight.data.div_(1.01)
    model.config.oelm["frozen"][f"{path}.base_layer.weight"] = sealed

    model.set_submodule(path, without_adapter(model.get_submodule(path)))
    assert f"{path}.base_layer.weight is gone" in freeze_error(model)


@needs_peft
def test_only_the_targets_of_the_adapter_get_one():
    model = model_with("gpt2", preset_with_adapter("oelm-freeze", "lora", ["k"], layers="last:1"))
    first, last = model.transformer.h[0].attn.c_attn, model.transformer.h[2].attn.c_attn
    assert not isinstance(first, SplitProjection)
    assert without_adapter(last.q) is last.q
    assert without_adapter(last.k) is not last.k
    frozen = {n.removeprefix("transformer.h.2.attn.c_attn.") for n in hashes(model, frozen=True)}
    assert frozen == {"q.weight", "q.bias", "k.base_layer.weight", "k.base_layer.bias"}


@needs_peft
def test_a_matrix_has_the_same_role_for_the_optimiser_with_an_adapter_and_without():
    places = placements(model_with("bert", preset_with_adapter("oelm-freeze", "lora", QK, biases="trained")))
    query = "bert.encoder.layer.1.attention.self.query"
    assert places[f"{query}.base_layer.bias"].role == "q"
    assert places[f"{query}.lora_A.default.weight"].role == "adapter"


@needs_peft
def test_a_model_with_adapters_verifies_after_a_cast(tmp_path):
    model_with("oelm-gpt", preset_with_adapter("oelm-freeze", "lora", QK)).save_pretrained(tmp_path)
    verification = oelm.verify(oelm.load(tmp_path, dtype=torch.bfloat16))
    assert verification.casts == {"bfloat16": verification.tensors}


@pytest.mark.full
@needs_peft
@pytest.mark.parametrize("kind", ["lora", "oft"])
def test_a_compiled_model_is_one_graph_with_the_same_gradients(kind):
    model = lively_model("oelm-gpt", num_hidden_layers=1).train()
    oelm.apply(model, preset_with_adapter("oelm-freeze", kind, QK))
    ids = sample_batch(model)["input_ids"]

    def gradients(module: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        module(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    eager = gradients(model)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert list(compiled) == list(eager) == list(hashes(model, frozen=False))
    assert max(distance(compiled[n], eager[n]) for n in eager) < 1e-5


# What trains


WIDTH, FFN, LAYERS = 48, 96, 3
HEAD = (WIDTH * WIDTH + WIDTH) + (WIDTH * 2 + 2)  # the pooler, and a classifier of two labels
BLOCK = 4 * (WIDTH * WIDTH + WIDTH) + (WIDTH * FFN + FFN) + (FFN * WIDTH + WIDTH) + 4 * WIDTH
BIASES = LAYERS * (4 * WIDTH + FFN + WIDTH + 2 * WIDTH) + WIDTH  # matrices and norms; the embedding's norm


@pytest.mark.parametrize(
    ("name", "method", "trainable"),
    [
        pytest.param("bert", "lora", LAYERS * 2 * 8 * (WIDTH + WIDTH) + HEAD, marks=needs_peft),
        pytest.param("bert", {"preset": "lora", "adapter": {"rank": 2}}, LAYERS * 2 * 2 * 96 + HEAD, marks=needs_peft),
        # 32 does not divide 48, so blocks of 24: two of them, each a skew-symmetric matrix.
        pytest.param("bert", "oft", LAYERS * 2 * 2 * (24 * 23 // 2) + HEAD, marks=needs_peft),
        pytest.param(
            "bert", {"preset": "oft", "adapter": {"rank": 16}}, LAYERS * 2 * 3 * (16 * 15 // 2) + HEAD, marks=needs_peft
        ),
        pytest.param("bert", {"preset": "lora", "layers": "last:1"}, 2 * 8 * 96 + HEAD, marks=needs_peft),
        pytest.param(
            "bert", {"preset": "lora", "rest": "biases"}, LAYERS * 2 * 8 * 96 + HEAD + BIASES, marks=needs_peft
        ),
        pytest.param("gpt2", "lora", LAYERS * 2 * 8 * 96, marks=needs_peft),  # Q and V, not all of c_attn
        pytest.param("llama", "lora", LAYERS * 8 * (96 + 48 + 24), marks=needs_peft),  # two key-value heads of 12 rows
        ("bert", "bitfit", BIASES + HEAD),
        ("bert", "last-layers", 2 * BLOCK + HEAD),
        ("bert", {"rest": "last:3"}, 3 * BLOCK + HEAD),
        ("bert", "head-only", HEAD),
        ("llama", "head-only", 96 * WIDTH),
    ],
)
def test_trainable_counts_equal_those_computed_by_hand(name, method, trainable):
    report = oelm.apply(small_model(name), method)
    assert report.trainable == trainable
    assert report.frozen == report.total - trainable


@needs_peft
@pytest.mark.parametrize("preset", ["lora", "oft", "bitfit", "last-layers", "head-only"])
def test_the_documented_counts_of_bert_base(preset):
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(num_labels=3))
    install(model, PRESETS[preset])
    frozen = set(frozen_by_rest(model, plan(model, PRESETS[preset])))
    trained = sum(p.numel() for n, p in model.named_parameters() if n not in frozen)
    head = sum(p.numel() for p in head_of(model).parameters.values())
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{preset}` |"))
    assert row.endswith(f"| {trained:,}, {head:,} |")


@pytest.mark.parametrize(
    ("name", "method", "pattern"),
    [
        ("bert", "head-only", r"bert\.pooler\.dense\.|classifier\."),
        ("roberta", "head-only", r"classifier\.(dense|out_proj)\."),
        ("distilbert", "head-only", r"pre_classifier\.|classifier\."),
        ("electra", "head-only", r"classifier\."),
        ("albert", "head-only", r"albert\.pooler\.|classifier\."),
        ("deberta-v2", "head-only", r"pooler\.|classifier\."),
        ("gpt2-classifier", "head-only", r"score\."),
        ("t5-classifier", "head-only", r"classification_head\."),
        ("vit", "head-only", r"classifier\."),
        ("distilbert", "bitfit", r".*\.bias$|pre_classifier\.|classifier\."),
        # A language model's output layers were pretrained: they count as its last layer, not as a task's head.
        ("llama", "head-only", r"lm_head\."),
        ("llama", "last-layers", r"model\.layers\.[12]\.|lm_head\."),
        ("llama", "bitfit", r"model\.layers\.\d\.self_attn\.\w+\.bias"),
        ("gpt2", "last-layers", r"transformer\.h\.[12]\."),
        ("t5", "last-layers", r"encoder\.block\.[01]\.|decoder\.block\.[12]\."),
        ("bert-cross", "head-only", r"cls\.predictions\.(bias|transform\.)"),  # its matrix is the embedding
    ],
)
def test_each_method_trains_the_expected_parameters(name, method, pattern):
    model = model_with(name, method)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if re.match(pattern, n)}


@needs_peft
def test_a_language_models_output_layer_is_frozen_beside_adapters():
    trained = [n for n, p in model_with("llama", "lora").named_parameters() if p.requires_grad]
    assert all(re.search(r"self_attn\.[qv]_proj\.lora_[AB]\.", name) for name in trained)
    assert len(trained) == LAYERS * 2 * 2


@needs_peft
def test_a_base_model_without_a_head_trains_its_adapters_alone():
    torch.manual_seed(0)
    model = BertModel(BertConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96))
    report = oelm.apply(model, "lora")
    assert report.trainable == report.adapter_trainable == 2 * 2 * 8 * 96
    assert report.head == 0


@needs_peft
def test_only_fused_projections_that_get_an_adapter_are_split():
    model = model_with("gpt2", {"preset": "lora", "layers": "last:1", "adapter": {"targets": ["q"]}})
    first, last = model.transformer.h[0].attn.c_attn, model.transformer.h[2].attn.c_attn
    assert isinstance(last, SplitProjection)
    assert without_adapter(last.q) is not last.q
    assert without_adapter(last.v) is last.v
    assert not isinstance(first, SplitProjection)
    assert not any(p.requires_grad for p in first.parameters())


@needs_peft
@pytest.mark.parametrize("arm", ["lora", "oft everywhere"])
def test_diagnosis_is_healthy_and_its_report_counts_what_trains(arm):
    model = model_of("bert")
    result = diagnose(model, ARMS[arm])
    assert result.healthy, (result.frozen_but_moved, result.trainable_but_still)
    report = result.report
    assert report.head == report.head_trainable == HEAD
    assert report.adapter_trainable == report.trainable - HEAD
    assert sum(row.trainable for row in report.rows) == report.adapter_trainable
    described = {
        "lora": "lora, rank 8, alpha 16, on q, v",
        "oft everywhere": "oft, blocks of 4, dropout 0.5, on q, k, v, o",
    }[arm]
    assert f"{report.adapter_trainable:,} in adapters ({described}" in str(report)
    assert f"{HEAD:,} in the head, 0 elsewhere" in str(report)
    record = report.to_dict()
    assert (record["rest"], record["head_trainable"]) == ("head", HEAD)
    assert record["adapter"].startswith(described)


# Verification


@needs_peft
@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.1.attention.self.query.base_layer.weight",
        "bert.encoder.layer.1.attention.self.key.bias",
        "bert.encoder.layer.0.output.dense.weight",
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.2.output.LayerNorm.bias",
    ],
)
def test_one_flipped_bit_in_the_body_is_detected_and_named(name):
    model = model_with("bert", "lora")
    flip_bit(model.get_parameter(name))
    assert f"{name}: its content changed" in freeze_error(model)
    flip_bit(model.get_parameter(name))
    oelm.verify(model)
    model.get_parameter(name).requires_grad_(True)
    assert f"{name} was frozen and is now trainable" in freeze_error(model)


@pytest.mark.parametrize("method", ["bitfit", "last-layers", "head-only"])
def test_switching_all_gradients_on_again_is_detected(method):
    model = model_with("bert", method)
    model.requires_grad_(True)
    assert "and is now trainable" in freeze_error(model)


@needs_peft
def test_merging_an_adapter_into_a_sealed_matrix_is_detected():
    model = model_with("bert", "lora")
    train_steps(model, 2)
    model.bert.encoder.layer[0].attention.self.query.merge()
    assert "layer.0.attention.self.query.base_layer.weight: its content changed" in freeze_error(model)


@needs_peft
def test_applying_the_same_arm_again_changes_nothing_and_another_is_refused():
    model = model_with("gpt2", "lora", seed=3)
    train_steps(model, 2)
    before = {n: content_hash(p) for n, p in model.named_parameters()}
    oelm.apply(model, "lora", seed=3)
    assert {n: content_hash(p) for n, p in model.named_parameters()} == before
    with pytest.raises(oelm.ModelError, match="'lora'"):
        oelm.apply(model, "oft", seed=3)


def test_a_record_of_hundreds_of_tensors_stays_small():
    model = model_with("bert", "head-only")
    record = json.dumps(model.config.oelm, indent=2)
    frozen = model.config.oelm["frozen"]
    assert len(frozen) == len(hashes(model, frozen=True)) > 50
    assert len(record) / len(frozen) < 230, "some 40 kB for BERT-base"


# Seeds


@needs_peft
def test_initial_values_of_adapters_depend_on_the_seed_and_the_name_alone():
    def lora_a(model: nn.Module, layer: int) -> torch.Tensor:
        return model.get_parameter(f"bert.encoder.layer.{layer}.attention.self.value.lora_A.default.weight")

    state = torch.get_rng_state()
    torch.manual_seed(5)
    model = small_model("bert")
    state_before = torch.get_rng_state()
    oelm.apply(model, "lora", seed=1)
    assert torch.equal(torch.get_rng_state(), state_before), "the global generator must stay unchanged"
    torch.set_rng_state(state)
    same_seed, other_seed, last_layer = small_model("bert"), small_model("bert"), small_model("bert")
    oelm.apply(same_seed, "lora", seed=1)
    oelm.apply(other_seed, "lora", seed=2)
    oelm.apply(last_layer, {"preset": "lora", "layers": "last:1", "adapter": {"targets": ["v", "o"]}}, seed=1)
    for layer in range(LAYERS):
        assert torch.equal(lora_a(model, layer), lora_a(same_seed, layer))
        assert not torch.equal(lora_a(model, layer), lora_a(other_seed, layer))
    assert torch.equal(lora_a(model, 2), lora_a(last_layer, 2)), (
        "other random draws of a method must make no difference"
    )
    assert not torch.equal(lora_a(model, 0), lora_a(model, 1))


# Saving, loading, resuming


@pytest.mark.sample(1)
@needs_peft
@pytest.mark.parametrize("arm", ["lora", "oft"])
def test_adapters_work_in_other_dtypes(arm, tmp_path):
    model = model_with("gpt2", arm)
    train_steps(model, 1)
    model.save_pretrained(tmp_path / "float32")
    in_bfloat16 = oelm.load(tmp_path / "float32", dtype=torch.bfloat16)
    assert {p.dtype for p in in_bfloat16.parameters()} == {torch.bfloat16}
    verification = oelm.verify(in_bfloat16)
    assert verification.casts["bfloat16"] + verification.exact == verification.tensors
    train_steps(in_bfloat16, 1)
    oelm.verify(in_bfloat16)

    adapted = lively_model("llama").to(torch.bfloat16)
    oelm.apply(adapted, arm)
    assert {p.dtype for p in adapted.parameters()} == {torch.bfloat16}, "adapters must have their matrix's dtype"
    adapted.save_pretrained(tmp_path / "bfloat16")
    loaded = oelm.load(tmp_path / "bfloat16")
    assert {n: content_hash(p) for n, p in loaded.named_parameters()} == {
        n: content_hash(p) for n, p in adapted.named_parameters()
    }
    in_float64 = lively_model("bert").double()
    before = logits(in_float64)
    oelm.apply(in_float64, arm)
    assert distance(logits(in_float64), before) < 1e-12


@needs_peft
@pytest.mark.parametrize("arm", ["lora", "oft"])
def test_plain_from_pretrained_loads_the_projects_own_gpt_with_its_adapters(arm, tmp_path):
    model = model_with("oelm-gpt", arm)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    assert distance(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model)) < 1e-5


@needs_peft
def test_a_missing_adapter_tensor_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    model_with("bert", "lora").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.query.lora_B.default.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(oelm.CheckpointError, match=f"missing keys.*{name}"):
        oelm.load(tmp_path)


@pytest.mark.sample(1)
@needs_peft
@pytest.mark.parametrize("arm", ["lora", "oft", "bitfit"])
def test_hugging_faces_trainer_works_after_apply_alone(arm, tmp_path):
    model = model_with("bert", arm)
    model.gradient_checkpointing_enable()
    frozen, trained = hashes(model, frozen=True), hashes(model, frozen=False)
    batch = sample_batch(model)
    rows = [{key: value[i] for key, value in batch.items()} for i in range(len(batch["labels"]))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        learning_rate=1e-3,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert hashes(model, frozen=True) == frozen
    after = hashes(model, frozen=False)
    assert [n for n in trained if after[n] == trained[n]] == []
    assert_same_tensors(oelm.load(tmp_path / "checkpoint-3"), model)


@pytest.mark.full
@needs_peft
@pytest.mark.parametrize(
    ("preset", "adapter"),
    [
        ("lora", {}),
        ("oft", {}),
        ("oelm-freeze", {"kind": "lora", "targets": ["q", "k"]}),
        ("oelm-qk-ffn", {"kind": "oft", "targets": ["q", "k", "ffn_in"]}),
    ],
)
def test_a_killed_and_resumed_run_ends_with_the_same_bits(preset, adapter, tmp_path):
    """In real processes: one run is killed halfway and resumed, the other runs without interruption."""
    method = {"preset": preset, "adapter": {"dropout": 0.3, "rank": 4, **adapter}}
    interrupted_file = write_yaml(
        tmp_path / "interrupted.yaml", tiny(tmp_path / "interrupted", method=method, checkpoint={"every": 3})
    )
    uninterrupted_file = write_yaml(
        tmp_path / "whole.yaml", tiny(tmp_path / "whole", method=method, checkpoint={"every": 3})
    )
    assert start("train", interrupted_file, sabotage=Death(45)).wait() < 0
    (run,) = (tmp_path / "interrupted").glob("*/*/seed-0")
    assert list((run / "checkpoints").glob("step-*")), "it must have been killed after a checkpoint"
    run_to_end("train", interrupted_file)
    run_to_end("train", uninterrupted_file)
    (uninterrupted,) = (tmp_path / "whole").glob("*/*/seed-0")
    assert_same_run(run, uninterrupted)
    best = oelm.load(run / "best")
    assert oelm.audit(best).adapter.startswith(Method.load(method).adapter.kind)
    run_to_end("export", run, tmp_path / "plain")
    assert distance(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(best)) < 1e-4


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rest": "all"}, "rest 'all': use 'trained', 'biases', 'head' or 'last:N'"),
        ({"rest": "last:0"}, "rest 'last:0'"),
        ({"rest": "first:2"}, "rest 'first:2'"),
        ({"adapter": {"kind": "lora"}}, "rest is 'trained': set rest to 'head'"),
        ({"preset": "lora", "rest": "last:2"}, "rest is 'last:2': set rest to 'head'"),
        ({"adapter": {"rank": 4}}, "rank .*without an adapter; set kind to 'lora' or 'oft'"),
        ({"preset": "lora", "adapter": {"kind": "dora"}}, "adapter.kind: .*'lora'.*got 'dora'"),
        ({"preset": "lora", "adapter": {"rank": 0}}, "adapter.rank: .*greater than 0"),
        ({"preset": "lora", "adapter": {"alpha": -1}}, "adapter.alpha: .*greater than 0"),
        ({"preset": "lora", "adapter": {"dropout": 1}}, "adapter.dropout: .*less than 1"),
        ({"preset": "lora", "adapter": {"targets": []}}, "name at least one role"),
        ({"preset": "lora", "adapter": {"targets": ["q", "q"]}}, "each once"),
        ({"preset": "lora", "adapter": {"targets": ["query"]}}, "adapter.targets.0: .*'ffn_out'.*got 'query'"),
        ({"preset": "lora", "adapter": {"r": 4}}, "adapter.r: unknown key.* Known keys: kind, rank"),
        ({"preset": "oft", "adapter": {"alpha": 8}}, "a rotation has no scale"),
        ({"preset": "oft", "adapter": {"rank": 1}}, "blocks of 2 or more"),
        ({"preset": "lora", "q": {"init": "qr"}}, "adapter 'lora' .* leave q, k"),
        ({"preset": "oelm-freeze", "rest": "head"}, "rest 'head' .* leave q, k"),
        ({"preset": "bitfit", "layers": "last:1"}, "rest 'biases' is about the whole model"),
        ({"preset": "bitfit", "attention": ["encoder"]}, "rest 'biases' is about the whole model"),
        ({"preset": "bitfit", "biases": "trained"}, "use rest 'biases'"),
        ({"preset": "lora", "freeze_ratio": "qk"}, "freeze_ratio"),
        ({"preset": "head-only", "schedule": {"kind": "freeze", "steps": [3]}}, "freeze_ratio or a schedule"),
        ({"preset": "lora", "core": "matrix"}, "core 'matrix' sits between two frozen bases"),
        (
            preset_with_adapter("oelm-freeze", "lora", ["q", "v"]),
            "'lora' on v adds nothing beside a matrix .* freezes .here q, k.",
        ),
        (preset_with_adapter("oelm-freeze", "oft", ["ffn_in", "o"]), "'oft' on ffn_in, o adds nothing"),
        (preset_with_adapter("oelm-nofreeze", "lora", ["q"]), "'lora' on q adds nothing .* freezes .here none."),
        (
            preset_with_adapter("oelm-ffn", "lora", ["ffn_out", "k"]),
            "'lora' on k adds nothing .* freezes .here ffn_in, ffn_out.",
        ),
        (preset_with_adapter("oelm-core", "oft", ["v"]), "'oft' on v adds nothing .* freezes .here none."),
        (preset_with_adapter("identity-query", "lora", ["q"]), "'lora' on q: init 'identity' has no matrix"),
        (preset_with_adapter("oelm-exact", "lora", ["q"]), "'lora' on q: core 'matrix'"),
        (preset_with_adapter("oelm-freeze", "lora", ["q"], freeze_ratio="qk"), "'lora' .* freeze_ratio or a schedule"),
        (
            preset_with_adapter("oelm-freeze", "oft", ["q"], schedule={"kind": "unfreeze", "steps": [3]}),
            "'oft' .* not allowed with freeze_ratio or a schedule",
        ),
        (preset_with_adapter("oelm-freeze", "lora", ["q"], rest="last:1"), "rest is 'last:1': set rest to 'head'"),
        (preset_with_adapter("oelm-freeze", "lora", ["q"], rest="head"), "leave q, k"),
    ],
)
def test_contradictory_methods_are_refused(fields, message):
    with pytest.raises(oelm.MethodError, match=message):
        Method.load(fields)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gpt2", "head-only", "nothing would train: GPT2LMHeadModel .*its output layer is its embedding"),
        ("t5", "bitfit", "T5ForConditionalGeneration has no biases"),
        ("bert", {"rest": "last:4"}, "'last:4' does not fit a model of 3 encoder layers"),
        ("t5", {"rest": "last:3"}, "'last:3' does not fit a model of 2 encoder layers"),
        ("albert", "last-layers", "one block for all its layers"),
        pytest.param("bert", {"preset": "lora", "layers": [7]}, "layers .7. are out of range", marks=needs_peft),
        pytest.param(
            "bert",
            {"preset": "lora", "adapter": {"rank": 49}},
            "adapter.rank 49 is too high .* 48 x 48; use at most 48",
            marks=needs_peft,
        ),
        pytest.param(
            "bert",
            {"preset": "oft", "adapter": {"rank": 32}},
            "blocks of 32 do not fit its width of 48",
            marks=needs_peft,
        ),
        pytest.param(
            "gpt2",
            {"preset": "oelm-qk-ffn", "adapter": {"kind": "oft", "rank": 32, "targets": ["ffn_out", "k"]}},
            "attn.c_attn.k: OFT's blocks of 32 do not fit its width of 48",
            marks=needs_peft,
        ),
        pytest.param(
            "t5",
            {"preset": "lora", "attention": ["cross"], "adapter": {"targets": ["q", "ffn_in"]}},
            "adapter.targets ffn_in: the chosen attentions have no such matrix",
            marks=needs_peft,
        ),
    ],
)
def test_a_method_that_does_not_fit_is_refused_and_leaves_the_model_unchanged(name, fields, message):
    model = model_of(name)
    before = {n: (content_hash(p), p.requires_grad) for n, p in model.named_parameters()}
    with pytest.raises(oelm.MethodError, match=message):
        oelm.apply(model, fields)
    assert {n: (content_hash(p), p.requires_grad) for n, p in model.named_parameters()} == before
    assert not hasattr(model.config, "oelm")


def test_without_peft_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it raises, as if it were not installed
    model = model_of("bert")
    before = hashes(model, frozen=False)
    for kind in ("lora", "oft"):
        with pytest.raises(oelm.MethodError, match=re.escape(f"adapter '{kind}' needs the package peft")) as error:
            oelm.apply(model, kind)
        assert "pip install 'oelm[peft]'" in str(error.value)
    assert hashes(model, frozen=False) == before
    oelm.apply(model, "bitfit")  # methods without adapters do not need peft


@pytest.mark.parametrize("preset", ["bitfit", "last-layers", "head-only", pytest.param("lora", marks=needs_peft)])
def test_a_model_is_refused_if_parameters_that_the_method_trains_are_frozen(preset):
    """They would stay frozen: for instance a classifier's head at its random initial values."""
    model = model_of("bert").requires_grad_(False)
    with pytest.raises(oelm.MethodError, match=r"\d+ more.* requires_grad"):
        oelm.apply(model, preset)
    model.requires_grad_(True)
    model.bert.embeddings.word_embeddings.requires_grad_(False)  # the method freezes these too
    assert oelm.apply(model, preset).head_trainable > 0


@needs_peft
def test_loading_an_adapter_without_peft_is_refused(tmp_path, monkeypatch):
    model_with("bert", "lora").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(oelm.MethodError, match="needs the package peft"):
        oelm.load(tmp_path)


@needs_peft
def test_adapters_that_peft_added_before_are_refused():
    import peft

    model = model_of("bert")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), model)
    with pytest.raises(oelm.ModelError, match="carries peft adapters"):
        oelm.apply(model, "bitfit")


def test_a_method_with_an_adapter_is_restored_from_json():
    method = Method.load({"preset": "lora", "adapter": {"rank": 16, "targets": ["q", "k"]}})
    assert method.adapter == Adapter(kind="lora", rank=16, targets=("q", "k"))
    assert Method.load(json.loads(method.to_json())) == method
    assert method.name == "custom"
    example = Method.load(preset_with_adapter("oelm-freeze", "lora", ["q", "k"]))
    assert (example.rest, example.q, example.k) == ("trained", PRESETS["oelm-freeze"].q, PRESETS["oelm-freeze"].k)
    assert Method.load(json.loads(example.to_json())) == example
    assert PRESETS["lora"].adapter == Adapter(kind="lora")


@needs_peft
def test_find_sites_returns_the_same_for_a_model_with_adapters():
    plain, adapted = find_sites(model_of("llama"))[1], find_sites(model_with("llama", "oft"))[1]
    assert adapted == plain
