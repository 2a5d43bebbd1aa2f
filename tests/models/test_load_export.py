"""Saving, loading and exporting: what is restored, what is refused, and what works without oelm.

tests/method/test_families.py does all three for each family and structure.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

import oelm
from oelm.method.diagnose import sample_batch, train_steps
from tests.support.models import (
    assert_same_model,
    distance,
    flip_bit,
    lively_model,
    logits,
    model_with_method,
)

CORE = "transformer.h.1.attn.c_attn.q.core"
BASIS = "transformer.h.1.attn.c_attn.q.weight"
VALUE = "transformer.h.1.attn.c_attn.v.weight"


@pytest.fixture
def saved(tmp_path):
    """Return a GPT-2 with bases and cores, and the folder where it is saved."""
    model = model_with_method("gpt2", "oelm-exact", steps=2)
    model.save_pretrained(tmp_path)
    return model, tmp_path


# Loading


@pytest.mark.parametrize("name", ["gpt2", "vit", "gpt_neox", "t5", "falcon-40b"])
def test_sharded_folders_load(name, tmp_path):
    model = model_with_method(name, "oelm-exact", steps=1)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_model(oelm.load(tmp_path), model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "modernbert", "qwen3", "t5"])
@pytest.mark.parametrize("preset", ["oelm-freeze", "oelm-exact"])
def test_loading_in_bfloat16_casts_and_verifies(name, preset, tmp_path):
    model = model_with_method(name, preset, steps=1)
    model.save_pretrained(tmp_path)
    loaded = oelm.load(tmp_path, dtype=torch.bfloat16)
    verification = oelm.verify(loaded)
    assert (verification.exact, verification.casts) == (0, {"bfloat16": verification.tensors})
    expected = {n: (p.to(torch.bfloat16), p.requires_grad) for n, p in model.named_parameters()}
    for n, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[n][0])
        assert parameter.requires_grad is expected[n][1]
    train_steps(loaded, 1)
    oelm.verify(loaded)


def test_bfloat16_model_is_saved_and_loaded_in_bfloat16(tmp_path):
    lively_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "pretrained")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    oelm.apply(model, "oelm-exact")
    model.save_pretrained(tmp_path / "saved")
    loaded = oelm.load(tmp_path / "saved")
    assert loaded.dtype is torch.bfloat16
    assert_same_model(loaded, model)
    assert oelm.verify(loaded).casts == {}


def test_loaded_model_can_be_saved_loaded_and_exported_again(saved, tmp_path):
    model, folder = saved
    oelm.load(folder).save_pretrained(tmp_path / "again")
    loaded = oelm.load(tmp_path / "again")
    assert_same_model(loaded, model)
    oelm.export(loaded, tmp_path / "plain")
    assert distance(logits(GPT2LMHeadModel.from_pretrained(tmp_path / "plain")), logits(model)) < 1e-4


def _change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("key", [CORE, BASIS, VALUE, "transformer.wte.weight", "transformer.ln_f.bias"])
def test_missing_key_is_an_error_and_never_a_random_weight(saved, key):
    _change_tensors(saved[1], lambda tensors: tensors.pop(key))
    with pytest.raises(oelm.CheckpointError, match=f"missing keys.*{key}"):
        oelm.load(saved[1])


@pytest.mark.parametrize("key", ["surplus", "transformer.h.1.attn.c_attn.core", "transformer.h.1.attn.c_attn.k.core"])
def test_unexpected_key_is_an_error(saved, key):
    _change_tensors(saved[1], lambda tensors: tensors.update({key: torch.zeros(4, 12)}))
    with pytest.raises(oelm.CheckpointError, match=f"unexpected keys.*{key}"):
        oelm.load(saved[1])


@pytest.mark.parametrize("key", [CORE, VALUE])
def test_tensor_of_another_shape_is_an_error(saved, key):
    _change_tensors(saved[1], lambda tensors: tensors.update({key: torch.zeros(4, 3)}))
    with pytest.raises(oelm.CheckpointError, match=f"mismatched keys.*{key}"):
        oelm.load(saved[1])


def test_changed_frozen_tensor_is_an_error(saved):
    _change_tensors(saved[1], lambda tensors: tensors[BASIS].mul_(1.0001))
    with pytest.raises(oelm.FreezeError, match=f"{saved[1]}.*\n.*{BASIS}: its content changed"):
        oelm.load(saved[1])


@pytest.mark.parametrize("length", [0, 100, 0.5, 0.999])
def test_truncated_file_is_named(saved, length):
    file = saved[1] / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: length if isinstance(length, int) else int(len(content) * length)])
    with pytest.raises(oelm.CheckpointError, match=f"{file}: "):
        oelm.load(saved[1])


def test_truncated_or_missing_shard_is_named(tmp_path):
    model_with_method("gpt2").save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(oelm.CheckpointError, match=shard.name):
        oelm.load(tmp_path)
    shard.unlink()
    with pytest.raises(oelm.CheckpointError, match=shard.name):
        oelm.load(tmp_path)


def test_pickled_weights_are_not_read(saved):
    _, folder = saved
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(oelm.CheckpointError, match=r"no file named model\.safetensors"):
        oelm.load(folder)
    with pytest.raises(oelm.CheckpointError, match="use_safetensors=True"):
        oelm.load(folder, use_safetensors=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format=99), "format 99"),
        (lambda record: record.update(format=1), "format 1, .* reads format 3"),
        (lambda record: record.pop("method"), "config.oelm has no method"),
        (lambda record: record["method"].update(colour="red"), "colour: unknown key"),
        (lambda record: record["frozen"].update({"ghost.weight": record["frozen"][BASIS]}), "ghost.weight is gone"),
        (lambda record: record["method"]["q"].update(init="identity"), "missing|unexpected"),
    ],
    ids=["format", "older format", "no method", "unknown field", "ghost tensor", "another structure"],
)
def test_damaged_record_is_an_error(saved, change, message):
    file = saved[1] / "config.json"
    config = json.loads(file.read_text())
    change(config["oelm"])
    file.write_text(json.dumps(config))
    with pytest.raises(oelm.OelmError, match=message) as error:
        oelm.load(saved[1])
    assert str(saved[1]) in str(error.value)


def test_folder_without_a_method_is_refused(tmp_path):
    lively_model("bert").save_pretrained(tmp_path)
    with pytest.raises(oelm.CheckpointError, match=r"no record of a method.*from_pretrained"):
        oelm.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, "takes a folder or a Hub name, not NoneType"),
        ({"model_class": "GPT2LMHeadModel"}, "pass the class itself"),
        ({"model_class": BertForSequenceClassification}, "of type 'gpt2', not a BertForSequenceClassification"),
        (
            {"model_class": GPT2ForSequenceClassification},
            r"missing keys: score\.weight.*oelm\.export writes a plain folder",
        ),
        ({"num_labels": 3}, "'num_labels'. Options are those of from_pretrained; the config is the folder's"),
    ],
)
def test_mistaken_arguments_are_refused(saved, arguments, message):
    with pytest.raises(oelm.CheckpointError, match=message):
        oelm.load(**({"path": saved[1]} | arguments))


# Without oelm


@pytest.mark.parametrize(
    ("name", "preset"),
    [("gpt2", "oelm-freeze"), ("bert", "identity-key"), ("llama", "identity-core"), ("bert", "lora")],
    ids=["split", "identity", "core without a basis", "adapter"],
)
def test_plain_from_pretrained_refuses_a_folder_without_a_plain_matrix(name, preset, tmp_path):
    """Otherwise transformers would draw the matrix at random, and raise nothing."""
    model = model_with_method(name, preset)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)
    assert_same_model(oelm.load(tmp_path), model)


@pytest.mark.parametrize("preset", ["oelm-freeze", "oelm-exact"])
def test_plain_from_pretrained_of_any_folder_lists_a_key_that_names_oelm_load(preset, tmp_path):
    model_with_method("bert", preset).save_pretrained(tmp_path)
    plain, info = BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert "load_with_oelm._extra_state" in info["unexpected_keys"]
    message = r"not loaded by oelm: load its folder with oelm\.load"
    with pytest.raises(oelm.FreezeError, match=message):
        oelm.verify(plain)
    with pytest.raises(oelm.ModelError, match=message):
        oelm.apply(plain, preset)


def test_plain_from_pretrained_of_the_gpt_is_complete_and_verify_asks_for_oelm_load(tmp_path):
    model = model_with_method("oelm-gpt", {"preset": "oelm-freeze", "k": {"init": "identity", "scale": 2.0}})
    model.save_pretrained(tmp_path)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(plain), logits(model))
    with pytest.raises(oelm.FreezeError, match=r"load its folder with oelm\.load"):
        oelm.verify(plain)


def test_a_folder_that_an_older_version_saved_is_loaded(saved):
    """Its files have neither the record nor a stand-in for a matrix that is not there."""
    model, folder = saved
    written = [key for key in load_file(folder / "model.safetensors") if key not in dict(model.named_parameters())]
    assert len(written) == 1 + 3
    _change_tensors(folder, lambda tensors: [tensors.pop(key) for key in written])
    assert_same_model(oelm.load(folder), model)


_WITHOUT_OELM = """
import sys
sys.modules["oelm"] = None  # any import of oelm now raises
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder, inputs = sys.argv[1:]
batch = torch.load(inputs, weights_only=True)
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    torch.save(model.eval()(**batch).logits, inputs + ".out")
assert not [name for name in sys.modules if name.startswith("oelm.")]
"""


@pytest.mark.full
def test_export_works_where_oelm_is_not_installed(saved, tmp_path):
    model, _ = saved
    folder = oelm.export(model, tmp_path / "plain")
    inputs = tmp_path / "batch.pt"
    torch.save(sample_batch(model), inputs)
    command = [sys.executable, "-I", "-c", _WITHOUT_OELM, str(folder), str(inputs)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    outputs = torch.load(f"{inputs}.out", weights_only=True)
    assert distance(outputs, logits(model)) < 1e-4


# Exporting


def test_export_of_a_changed_frozen_tensor_is_refused(saved, tmp_path):
    model, _ = saved
    with torch.no_grad():
        model.get_parameter(BASIS)[0, 0] += 1
    with pytest.raises(oelm.FreezeError, match=BASIS):
        oelm.export(model, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_export_refuses_a_file_and_passes_options_to_save_pretrained(saved, tmp_path):
    model, _ = saved
    (tmp_path / "file").write_text("")
    with pytest.raises(oelm.CheckpointError, match=f"{tmp_path / 'file'} is a file"):
        oelm.export(model, tmp_path / "file")
    folder = oelm.export(model, tmp_path / "plain", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert distance(logits(plain), logits(model)) < 1e-4


def test_export_does_not_write_over_a_model_with_a_record(saved):
    model, folder = saved
    with pytest.raises(oelm.CheckpointError, match="name another folder"):
        oelm.export(model, folder)
    assert_same_model(oelm.load(folder), model)
    plain = oelm.export(model, folder / "plain")
    oelm.export(model, plain)  # an earlier export is replaced


def test_exported_model_is_plain_and_trainable(saved, tmp_path):
    model, _ = saved
    plain = GPT2LMHeadModel.from_pretrained(oelm.export(model, tmp_path / "plain"))
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert oelm.audit(plain).frozen == 0
    oelm.apply(plain, "oelm-freeze")  # a method can be applied again


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_is_exported_without_its_wrapper(wrap, tmp_path):
    model = model_with_method("gpt2", "oelm-exact")
    oelm.export(wrap(model), tmp_path)
    torch.testing.assert_close(logits(GPT2LMHeadModel.from_pretrained(tmp_path)), logits(model), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "preset", "targets"),
    [
        ("bert", "oelm-freeze", ["query", "value"]),
        ("llama", "oelm-exact", ["v_proj", "o_proj"]),
        ("gpt2", "oelm-freeze", ["q", "c_fc"]),
    ],
)
def test_adapters_that_peft_added_to_frozen_matrices_are_merged_by_an_export(name, preset, targets, tmp_path):
    peft = pytest.importorskip("peft")
    model = model_with_method(name, preset)
    batch = sample_batch(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False)).eval()
    with torch.no_grad():
        before = adapted(**batch).logits
        oelm.export(adapted, tmp_path)
        after = type(model).from_pretrained(tmp_path)(**batch).logits
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
        assert torch.equal(adapted(**batch).logits, before), "exporting must not change the model"
    oelm.verify(adapted)


def test_adapters_that_peft_cannot_merge_are_refused_with_the_way_out(tmp_path):
    peft = pytest.importorskip("peft")
    model = model_with_method("bert")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=4, init_lora_weights=False))
    with pytest.raises(oelm.ModelError, match="pass the model that get_peft_model returned"):
        oelm.export(model, tmp_path)
    merged = copy.deepcopy(adapted).merge_and_unload()
    with pytest.raises(oelm.FreezeError, match=r"\(merge_and_unload\), export the model before"):
        oelm.export(merged, tmp_path)
    with pytest.raises(oelm.FreezeError, match=r"\(merge_and_unload\), export the model before"):
        oelm.verify(merged)
    flip_bit(model.bert.encoder.layer[1].attention.self.query.base_layer.weight)
    with pytest.raises(oelm.FreezeError, match=r"query\.weight: its content changed") as changed:
        oelm.export(adapted, tmp_path)
    assert "merge_and_unload" not in str(changed.value), "its adapters stand beside the matrices still"
    assert not list(tmp_path.iterdir())
    adapted.save_pretrained(tmp_path)
    with pytest.raises(oelm.errors.CheckpointError, match="an adapter that peft saved by itself"):
        oelm.load(tmp_path)


@pytest.mark.parametrize("model_type", [[], {}, 3, None])
def test_a_model_type_that_is_no_word_ends_in_one_error(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(oelm.errors.CheckpointError, match="no config that transformers can read"):
        oelm.load(tmp_path)
