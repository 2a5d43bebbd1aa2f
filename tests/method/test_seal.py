"""The freeze report counts what is in the model, and verify detects every change of a frozen tensor."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import oelm
from oelm.method import plan, seal
from oelm.method.diagnose import sample_batch
from oelm.method.record import DTYPES
from oelm.method.seal import fingerprint
from oelm.method.sites import find_sites
from oelm.models.small import small_model
from tests.support.models import flip_bit, freeze_error, hashes, lively_model, logits, model_with_method

QUERY = "bert.encoder.layer.1.attention.self.query"
NAME = f"{QUERY}.weight"


def _weight(model: nn.Module) -> torch.Tensor:
    return model.get_parameter(NAME)


# Counting


def test_bert_base_reference_counts():
    model = BertForSequenceClassification(BertConfig(num_labels=3))
    assert oelm.audit(model).total == 109_484_547
    report = oelm.apply(model, "oelm-freeze")
    assert report.total == 109_484_547
    assert report.frozen == 14_174_208
    assert report.trainable == 95_310_339
    assert round(report.frozen_share, 3) == 0.129
    assert sum(row.frozen for row in report.rows if row.role in "qk") == 14_174_208
    assert "14,174,208 frozen: 12.9% of the model" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80, "it fits a terminal"


@pytest.mark.parametrize(
    ("name", "share"), [("bert", 0.96), ("llama", 0.923)], ids=["one core between", "a core on each side"]
)
def test_exact_freezes_nearly_all_query_and_key_weights(name, share):
    """With a width of 768 and 12 heads of 64, a core has a twelfth of the entries of the matrix beside it."""
    size = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1}
    model = small_model(name, **size, **({"num_key_value_heads": 12} if name == "llama" else {}))
    oelm.apply(model, "oelm-exact")
    site = find_sites(model)[1][0]
    modules = [model.get_submodule(site.roles[role]) for role in ("q", "k")]
    frozen = sum(module.weight.numel() for module in modules)
    cores = sum(module.core.numel() for module in modules if hasattr(module, "core"))
    assert frozen == 2 * 768 * 768
    assert frozen / (frozen + cores) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("name", "copies"), [("gpt2", 2), ("llama", 2), ("bart", 4)])
def test_tied_weights_are_counted_once(name, copies):
    tied, untied = small_model(name, tie_word_embeddings=True), small_model(name, tie_word_embeddings=False)
    assert oelm.audit(untied).total - oelm.audit(tied).total == (copies - 1) * 96 * 48


def test_buffers_are_counted_separately():
    model = small_model("bert")
    before = oelm.audit(model)
    assert before.buffers == sum(buffer.numel() for buffer in model.buffers()) > 0
    model.register_buffer("hidden", torch.zeros(7, 3))
    after = oelm.audit(model)
    assert (after.buffers, after.total) == (before.buffers + 21, before.total)


def test_report_describes_every_matrix():
    report = oelm.audit(model_with_method("gpt2", {"preset": "oelm-exact", "layers": "last:1"}))
    rows = {(row.layer, row.role): row for row in report.rows}
    assert rows["0", "q+k+v"].state == "trainable"
    query, key, value = (rows["2", role] for role in ("q", "k", "v"))
    assert (query.state, key.state, value.state) == ("frozen, rest trained", "frozen", "trainable")
    assert (query.frozen, query.trainable) == (48 * 48 + 48, 4 * 12 * 12)
    assert query.init == "qr"
    assert query.orthogonality_error < 1e-6
    assert value.orthogonality_error is None
    assert sum(row.frozen for row in report.rows) == report.frozen
    assert oelm.audit(model_with_method("gpt2", "identity-query")).rows[0].state == "no parameters"


def test_audit_reads_the_model_again_at_every_call():
    model = model_with_method("bert")
    before = oelm.audit(model)
    _weight(model).requires_grad_(True)
    flip_bit(_weight(model))
    after = oelm.audit(model)
    assert after.trainable - before.trainable == 48 * 48
    changed = [row.path for row, old in zip(after.rows, before.rows, strict=True) if row.sha256 != old.sha256]
    assert changed == [QUERY]


def test_apply_finds_sites_and_measures_each_tensor_once(monkeypatch):
    """Sealing, the check after it and the report share one measurement; a later audit or verify measures again."""
    calls: list[str] = []  # several threads append to it

    def counted(function):
        def call(*arguments):
            calls.append(function.__name__)
            return function(*arguments)

        return call

    monkeypatch.setattr(plan, "find_sites", counted(plan.find_sites))
    for name in ("content_hash", "orthogonality_error"):
        monkeypatch.setattr(seal, name, counted(getattr(seal, name)))
    model = model_with_method("bert")
    # 12 frozen weights and biases in three dtypes; and one hash in the report for each of the 12 trained matrices.
    assert Counter(calls) == {"find_sites": 1, "content_hash": 12 * 3 + 12, "orthogonality_error": 6}
    calls.clear()
    oelm.verify(model)
    assert Counter(calls) == {"find_sites": 1, "content_hash": 12, "orthogonality_error": 6}


# The hashes of each tensor's bytes in float32, float16 and bfloat16.
GOLDEN = {
    "query.weight": "18cd0085c45fa9cc8e19f39217f98eae 939ae3783fb5697310162093029944e8 "
    "035589e3d53af4ae9ec1dcfcf76d6876",
    "query.bias": "5d89f056865052bcb89c910d2d62872e 2ea9ab9198d1638007400cd2c3bef1cc 2ea9ab9198d1638007400cd2c3bef1cc",
    "key.weight": "24c6ab650ccdb386ca8119d4c04df7f8 dd7317dea18e2a189a829fb9bebe5a68 3a8a21790c7c1b2def5572a7eba5debb",
    "key.bias": "0608224043aae069689d6f2254103b33 142eadff7b959d15e056ffdb82489acd 8cdbb0d5ae42786b446c60353faf9282",
}


def test_a_record_is_the_same_on_every_machine_and_version():
    """These matrices need no library for linear algebra, whose last bits depend on the machine and its threads."""
    model = small_model("bert", num_hidden_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.arange(parameter.numel()) % 127 - 63).view_as(parameter) / 49)
    hadamard, kept = ({"init": init, "frozen": True} for init in ("hadamard", "pretrained"))
    oelm.apply(model, {"q": hadamard, "k": kept, "layers": "last:1"}, seed=3)
    attention = QUERY.removesuffix("query")
    golden = []
    for name, digests in GOLDEN.items():
        own, half, bfloat = digests.split()
        golden.append((f"{attention}{name}", f"float32:{own} float16:{half} bfloat16:{bfloat}"))
    assert list(model.config.oelm["frozen"].items()) == golden


# Every kind of damage to a frozen tensor is detected, and the message names the tensor.


def _switch_gradient_on(model):
    _weight(model).requires_grad_(True)
    return "is now trainable"


def _write_another_checkpoint_into_a_module(model):
    other_model = lively_model("bert", seed=1)
    oelm.apply(other_model, "oelm-freeze")
    for name, tensor in other_model.get_submodule(QUERY).state_dict().items():
        model.get_submodule(QUERY).get_parameter(name).data.copy_(tensor)
    return "its content changed"


def _change_the_matrix_and_its_recorded_hash(model):
    """Change the matrix and its hash in the record, so that only the check of orthonormality can find it."""
    with torch.no_grad():
        _weight(model)[0] *= 1.001
    model.config.oelm["frozen"][NAME] = fingerprint(_weight(model))
    return "lost its orthogonality"


def _replace_the_module(model):
    model.set_submodule(QUERY, nn.Linear(48, 48).requires_grad_(False))
    return "its content changed"


def _replace_by_a_module_without_that_tensor(model):
    model.set_submodule(QUERY, nn.Identity())
    return "is gone"


def _set_an_entry_to_nan(model):
    with torch.no_grad():
        _weight(model)[0, 0] = torch.nan
    return "its content changed"


@pytest.mark.parametrize(
    "damage",
    [
        _switch_gradient_on,
        _write_another_checkpoint_into_a_module,
        _change_the_matrix_and_its_recorded_hash,
        _replace_the_module,
        _replace_by_a_module_without_that_tensor,
        _set_an_entry_to_nan,
    ],
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_damage_is_detected_and_named(damage):
    model = model_with_method("bert")
    oelm.verify(model)
    expected = damage(model)
    line = next(line for line in freeze_error(model).splitlines() if QUERY in line)
    assert expected in line


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_putting_a_fused_projection_back_is_detected(name):
    model = model_with_method(name)
    site = find_sites(model)[1][0]
    plain = lively_model(name).get_submodule(site.fused_path)
    model.set_submodule(site.fused_path, plain)
    assert f"{site.roles['q']}.weight is gone" in freeze_error(model)


def test_a_changed_identity_is_detected():
    model = model_with_method("bert", "identity-query")
    oelm.verify(model)
    model.get_submodule(QUERY).factor = 1.0
    assert f"{QUERY} was the identity times 2.0" in freeze_error(model)
    model.set_submodule(QUERY, nn.Linear(48, 48))
    assert f"{QUERY} was the identity times 2.0" in freeze_error(model)


def test_frozen_feed_forward_and_bias_are_sealed_too():
    model = model_with_method("bert", "oelm-qk-ffn")
    for name in ("bert.encoder.layer.2.output.dense.weight", f"{QUERY}.bias"):
        flip_bit(model.get_parameter(name))
        assert name in freeze_error(model)
        flip_bit(model.get_parameter(name))
    oelm.verify(model)


def test_a_model_without_a_record_cannot_be_verified():
    with pytest.raises(oelm.FreezeError, match="carries no record of a method"):
        oelm.verify(small_model("bert"))


# A wrapper around the model does not count as damage.


def _peft(model: nn.Module, *targets: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), r=4, init_lora_weights=False))


WRAPPERS = {
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "distributed": nn.parallel.DistributedDataParallel,
    "compiled and distributed": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
    "an adapter elsewhere": lambda model: _peft(model, "value"),
    "an adapter on a frozen matrix": lambda model: _peft(model, "query", "value"),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_verified_inside_its_wrapper(wrap):
    model = model_with_method("bert")
    wrapped = wrap(model)
    for wrapped_or_not in (model, wrapped):
        assert oelm.verify(wrapped_or_not).exact == 12
        assert oelm.audit(wrapped_or_not) == oelm.audit(model)
    parameters = dict(model.named_parameters())
    flip_bit(parameters.get(NAME, parameters.get(f"{QUERY}.base_layer.weight")))
    for wrapped_or_not in (model, wrapped):
        assert f"{NAME}: its content changed" in freeze_error(wrapped_or_not)


# A cast does not count as damage; a bit flipped after it does.


@pytest.mark.parametrize("sealed", DTYPES)
@pytest.mark.parametrize("cast", DTYPES)
def test_cast_models_verify_and_the_result_names_the_cast(sealed, cast):
    # Wide enough to have entries so small that bfloat16 can represent them and float16 cannot.
    model = lively_model("bert", hidden_size=192, num_hidden_layers=2).to(DTYPES[sealed])
    oelm.apply(model, "oelm-freeze")
    flipped = copy.deepcopy(model)
    flip_bit(_weight(flipped))
    assert NAME in freeze_error(flipped)
    if sealed == cast:
        assert str(oelm.verify(model)) == "8 of 8 frozen tensors are bit-identical to the sealed ones"
        return
    verification = oelm.verify(model.to(DTYPES[cast]))
    assert (verification.exact, verification.casts) == (0, {cast: 8})
    assert f"8 are exactly what casting to {cast} makes of them" in str(verification)
    for dtype in (cast, sealed):  # after the cast, and after casting back
        model.to(DTYPES[dtype])
        oelm.verify(model)
        flip_bit(_weight(model))
        assert NAME in freeze_error(model)
        flip_bit(_weight(model))


def test_a_cast_down_and_up_again_is_verified_and_named():
    model = model_with_method("bert").to(torch.bfloat16).float()
    verification = oelm.verify(model)
    assert verification.casts["bfloat16"] + verification.exact == verification.tensors
    assert verification.casts["bfloat16"] >= 6  # every weight; a bias may hold values of bfloat16 anyway
    assert "casting to bfloat16" in str(verification)


# Models that share a config, and applying twice.


def test_models_of_one_config_object_do_not_share_the_record():
    first = small_model("bert")
    second = BertForSequenceClassification(first.config)
    oelm.apply(first, "oelm-freeze")
    assert not hasattr(second.config, "oelm")
    assert oelm.audit(second).frozen == 0
    assert not hasattr(BertForSequenceClassification(second.config).config, "oelm")
    oelm.apply(second, "oelm-exact")
    oelm.verify(first)
    oelm.verify(second)


@pytest.mark.parametrize("preset", ["oelm-freeze", "oelm-exact", "identity-key", "oelm-random-orthogonal"])
def test_applying_the_same_again_changes_nothing(preset):
    model = model_with_method("gpt2", preset)
    before, outputs = {**hashes(model, frozen=True), **hashes(model, frozen=False)}, logits(model)
    report = oelm.audit(model)
    assert oelm.apply(model, preset) == report
    assert {**hashes(model, frozen=True), **hashes(model, frozen=False)} == before
    assert torch.equal(logits(model), outputs)


@pytest.mark.parametrize(("preset", "seed"), [("oelm-exact", 0), ("baseline", 0), ("oelm-freeze", 1)])
def test_applying_another_method_or_seed_is_refused(preset, seed):
    model = model_with_method("bert")
    with pytest.raises(oelm.ModelError, match=r"'oelm-freeze' \(seed 0\)"):
        oelm.apply(model, preset, seed=seed)
    oelm.verify(model)


def test_training_changes_a_core_and_not_its_basis():
    model = model_with_method("deberta-v2", "oelm-exact")
    before = hashes(model, frozen=False)
    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.1
    )  # frozen ones included, as in many trainers
    for _ in range(3):
        optimiser.zero_grad()
        model(**sample_batch(model)).loss.backward()
        optimiser.step()
    after = hashes(model, frozen=False)
    cores = [name for name in before if name.endswith(".core")]
    assert len(cores) == 6
    assert all(before[name] != after[name] for name in cores)
    oelm.verify(model)
