"""Weights that are loaded into a model with a method: the record comes with them, or they are refused.

tests/models/test_trainer.py does the same with Hugging Face's Trainer in real processes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import oelm
from oelm.method.diagnose import sample_batch
from oelm.method.schedule import advance
from oelm.method.seal import CARRIER
from tests.support.models import assert_same_model, flip_bit, hashes, lively_model, logits, model_with_method

QUERY = "bert.encoder.layer.1.attention.self.query"
NAME = f"{QUERY}.weight"
RECORD = f"{CARRIER}._extra_state"


def _built_anew(name: str = "bert", method: Any = "oelm-freeze", seed: int = 0) -> nn.Module:
    """Return the model that a script builds when it is started again without a fixed seed: other first weights."""
    model = lively_model(name, seed=1)
    oelm.apply(model, method, seed=seed)
    return model


def _without_record(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.state_dict().items() if key != RECORD}


# The record comes with the weights


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("bert", "oelm-freeze"),
        ("gpt2", "oelm-exact"),
        ("llama", "identity-core"),
        ("oelm-gpt", "identity-key"),
        ("bert", "lora"),
        ("gpt2", {"preset": "oelm-freeze", "adapter": {"kind": "oft", "targets": ["q"]}}),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_takes_over_the_record_of_the_weights_it_loads(name, method, strict):
    saved, model = model_with_method(name, method, steps=1), _built_anew(name, method)
    assert model.config.oelm != saved.config.oelm or not saved.config.oelm["frozen"]
    result = model.load_state_dict(saved.state_dict(), strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert model.config.oelm == saved.config.oelm
    verification = oelm.verify(model)
    assert verification.exact == verification.tensors
    assert_same_model(model.eval(), saved)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_record_may_be_in_any_shard(reverse, tmp_path):
    """Transformers loads shards one by one, in no order: the record may come before or after the frozen tensors."""
    saved, model = model_with_method("bert", steps=1), _built_anew()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"), reverse=reverse)
    assert len(shards) > 3
    for shard in shards:
        model.load_state_dict(load_file(shard), strict=False)
    assert oelm.verify(model).exact == 12
    assert_same_model(model, saved)
    assert not model._forward_pre_hooks, "its first use has found it as sealed"


def test_a_compiled_model_loads_and_saves_the_record_too():
    saved, model = model_with_method("bert", steps=1), _built_anew()
    compiled = torch.compile(model)
    compiled.load_state_dict(torch.compile(saved).state_dict())
    oelm.verify(compiled)
    assert_same_model(model, saved)


def test_weights_are_loaded_beside_pefts_adapters():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["query"], r=4, init_lora_weights=False)
    saved, model = (peft.get_peft_model(m, options) for m in (model_with_method("bert"), _built_anew()))
    model.load_state_dict(saved.state_dict())
    assert oelm.verify(model).exact == 12
    torch.testing.assert_close(logits(model), logits(saved))


def test_accelerate_restores_its_state_into_a_model_built_anew(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    saved, model = model_with_method("bert", steps=1), _built_anew()
    for step, each in (("save_state", saved), ("load_state", model)):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(each)
        getattr(accelerator, step)(str(tmp_path))
    oelm.verify(model)
    assert_same_model(model.eval(), saved)


def test_torchs_distributed_state_dicts_carry_the_record():
    saved, model = model_with_method("gpt2", "oelm-exact", steps=1), _built_anew("gpt2", "oelm-exact")
    set_model_state_dict(model, get_model_state_dict(saved))
    oelm.verify(model)
    assert_same_model(model, saved)


def test_weights_of_a_later_event_of_a_schedule_bring_what_was_frozen_by_then():
    thaws = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [2]}}
    saved, model = model_with_method("bert", thaws), _built_anew(method=thaws)
    advance(saved, 2)
    assert len(hashes(saved, frozen=True)) == 8
    model.load_state_dict(saved.state_dict())
    assert_same_model(model, saved)
    assert not advance(model, 2)
    freezes = {"preset": "oelm-freeze", "schedule": {"kind": "freeze", "steps": [2]}}
    saved, model = model_with_method("bert", freezes), _built_anew(method=freezes)
    advance(saved, 2)
    model.load_state_dict(saved.state_dict())
    assert_same_model(model, saved)
    oelm.verify(model)


def test_a_cast_checkpoint_is_taken_over():
    saved, model = model_with_method("bert", steps=1), _built_anew()
    model.load_state_dict(copy.deepcopy(saved).to(torch.bfloat16).state_dict())
    assert oelm.verify(model).casts["bfloat16"] >= 6


def test_a_copy_of_a_model_loads_for_itself():
    model, other = model_with_method("bert"), _built_anew()
    copied, record = copy.deepcopy(model), copy.deepcopy(model.config.oelm)
    copied.load_state_dict(other.state_dict())
    oelm.verify(copied)
    assert model.config.oelm == record
    oelm.verify(model)


def test_its_own_weights_are_loaded_with_and_without_a_record_and_after_damage():
    model = model_with_method("bert")
    state = copy.deepcopy(model.state_dict())
    flip_bit(model.get_parameter(NAME))
    model.load_state_dict(state)
    oelm.verify(model)
    del state[RECORD]  # as an older version of oelm saved it
    flip_bit(model.get_parameter(NAME))
    model.load_state_dict(state)
    oelm.verify(model)


def test_the_average_of_two_trained_models_is_loaded():
    """An average of two records is no record, and of two equal matrices the matrix itself."""
    first, second = model_with_method("bert", steps=1), model_with_method("bert", steps=2)
    right = second.state_dict()
    average = OrderedDict((key, (value + right[key]) / 2) for key, value in first.state_dict().items())
    first.load_state_dict(average)
    oelm.verify(first)


def sample_loss(model: nn.Module) -> torch.Tensor:
    return model(**sample_batch(model)).loss


# Refused, and nothing is loaded


def _plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return lively_model("bert", seed=2).state_dict()


def _without_its_record(model: nn.Module) -> dict[str, torch.Tensor]:
    return _without_record(model)


def _changed_since(model: nn.Module) -> dict[str, torch.Tensor]:
    flip_bit(model.get_parameter(NAME))
    return model.state_dict()


@pytest.mark.parametrize("weights", [_plain_weights, _without_its_record, _changed_since])
def test_weights_that_were_not_frozen_are_refused_before_they_are_loaded(weights):
    model, other = _built_anew(), model_with_method("bert")
    before = hashes(model, frozen=True) | hashes(model, frozen=False)
    with pytest.raises(oelm.FreezeError, match=rf"(?s)none was loaded.*oelm\.load.*{NAME}: its content changed"):
        model.load_state_dict(weights(other), strict=False)
    assert hashes(model, frozen=True) | hashes(model, frozen=False) == before
    oelm.verify(model)


@pytest.mark.parametrize(("method", "seed"), [("oelm-polar", 0), ("oelm-freeze", 1), ("baseline", 0)])
def test_weights_of_another_method_or_seed_are_refused(method, seed):
    saved = model_with_method("bert")
    with pytest.raises(oelm.FreezeError, match=rf"saved with 'oelm-freeze' \(seed 0\).* '{method}' \(seed {seed}\)"):
        _built_anew(method=method, seed=seed).load_state_dict(saved.state_dict())


def test_a_plain_model_refuses_the_weights_of_a_model_without_a_matrix():
    with pytest.raises(RuntimeError, match=rf"(?s)Unexpected.*{CARRIER}.*size mismatch for .*key\.weight"):
        lively_model("bert").load_state_dict(model_with_method("bert", "identity-key").state_dict())


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("oelm-freeze", lambda model: {NAME: torch.zeros(48, 48)}),
        ("oelm-exact", _plain_weights),  # which have no cores
        ("oelm-freeze", lambda model: {k: v for k, v in _plain_weights(model).items() if "classifier" not in k}),
    ],
)
def test_a_part_without_a_record_is_loaded_and_refused_when_the_model_is_used(method, weights):
    model = model_with_method("bert", method)
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights(model), strict=False)
    for use in (oelm.verify, sample_loss, lambda model: sample_loss(torch.compile(model, backend="eager"))):
        with pytest.raises(oelm.FreezeError, match=f"{NAME}: its content changed"):
            use(model)
    with pytest.raises(oelm.FreezeError, match=r"apply the method afterwards, or load .* with oelm\.load"):
        sample_loss(copy.deepcopy(model))
    model.load_state_dict(before)
    for _ in range(2):  # the check is made once
        sample_loss(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("part", ["bert", "bert.encoder.layer.1", QUERY])
@pytest.mark.parametrize("wrap", [lambda part: part, torch.compile], ids=["plain", "compiled"])
def test_a_part_that_loads_other_frozen_weights_by_itself_is_refused(part, wrap):
    """The usual way to give a classifier a pretrained body, which after apply would overwrite what is frozen."""
    model, other = model_with_method("bert"), _built_anew()
    before = hashes(model, frozen=True) | hashes(model, frozen=False)
    message = rf"(?s)into {part} of .* none was loaded.*apply the method afterwards.*into the whole model.*{NAME}"
    for loading in (model, copy.deepcopy(model)):
        with pytest.raises(oelm.FreezeError, match=message):
            wrap(loading.get_submodule(part)).load_state_dict(wrap(other.get_submodule(part)).state_dict())
    assert hashes(model, frozen=True) | hashes(model, frozen=False) == before
    for state in (model.get_submodule(part).state_dict(), other.bert.embeddings.state_dict()):
        model.get_submodule(part).load_state_dict(state, strict=False)
    oelm.verify(model)


def test_a_part_that_is_copied_or_pickled_loads_what_it_is_given(tmp_path):
    """It belongs to no model with a record; a whole model that is pickled keeps its own check."""
    model, other = model_with_method("bert"), _built_anew()
    copied = copy.deepcopy(model.bert)
    copied.load_state_dict(other.bert.state_dict())
    assert hashes(copied, frozen=True) == hashes(other.bert, frozen=True)
    torch.save(model, tmp_path / "model.pt")
    unpickled = torch.load(tmp_path / "model.pt", weights_only=False)
    unpickled.load_state_dict(other.state_dict())
    oelm.verify(unpickled)
    oelm.verify(model)


def test_accelerates_dispatch_names_the_way_to_load_a_folder(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model_with_method("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a folder saved after oelm\.apply: oelm\.load\(folder\)"):
        accelerate.load_checkpoint_and_dispatch(_built_anew(), str(tmp_path), device_map={"": "cpu"})


def test_saving_whole_folders_needs_nothing_else(tmp_path: Path):
    """A folder of a model that took over a record is loaded and verified."""
    saved, model = model_with_method("gpt2", "oelm-exact", steps=1), _built_anew("gpt2", "oelm-exact")
    model.load_state_dict(saved.state_dict())
    model.save_pretrained(tmp_path)
    assert_same_model(oelm.load(tmp_path), saved)
