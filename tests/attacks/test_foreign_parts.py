"""Projections of other classes, sharded ones and packed ones: compared like plain ones, or refused by name."""

import copy
import random
from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import oelm
from oelm.method.record import record_hash
from oelm.method.sites import find_sites, path_without_adapter
from tests.support.damage import mutated_record
from tests.support.models import flip_bit, freeze_error, model_with_method

# bitfit leaves the fused projection of GPT-2 as it is; the others set Q and K.
MODELS = [("bert", "oelm-freeze"), ("llama", "oelm-freeze"), ("bert", "lora"), ("gpt2", "bitfit")]


class Own(nn.Module):
    """A projection that shares nothing with Linear but its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


def projections(model: nn.Module) -> list[str]:
    """Return the paths of every Q and K, or of the fused projections that hold them."""
    paths = []
    for site in find_sites(model)[1]:
        fused = site.fused is not None and not hasattr(model.get_submodule(site.fused_path), "q")
        paths += [site.fused_path] if fused else [site.roles["q"], site.roles["k"]]
    return [path_without_adapter(model, path) for path in paths]


def _subclass(model: nn.Module, path: str) -> None:
    module = model.get_submodule(path)
    module.__class__ = type("Float8", (type(module),), {})


def _own_class(model: nn.Module, path: str) -> None:
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        model.set_submodule(path, Own(module))
    else:
        _subclass(model, path)


def _shard(model: nn.Module, path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.get_submodule(path))


def _shard_by_rows(model: nn.Module, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if isinstance(model.get_submodule(path), Conv1D):
        _shard(model, path)
    else:
        parallelize_module(model.get_submodule(path), init_device_mesh("cpu", (1,)), ColwiseParallel())


CHANGES = [_subclass, _own_class, _shard, _shard_by_rows]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize(("name", "method"), MODELS, ids=lambda value: str(value))
def test_a_foreign_projection_is_compared_like_a_plain_one(name, method, change, rounds):
    """With the same record, damaged in the same way, `verify` says the same of both models."""
    if method == "lora":
        pytest.importorskip("peft")
    plain, foreign = (model_with_method(name, method) for _ in range(2))
    for path in projections(foreign):
        change(foreign, path)
    assert oelm.verify(foreign) == oelm.verify(plain)
    assert oelm.audit(foreign).frozen == oelm.audit(plain).frozen
    sound, randomness, outcomes = plain.config.oelm, random.Random(f"{name} {method} {change.__name__}"), Counter()
    for _ in range(rounds(5)):
        record, _ = mutated_record(sound, randomness)
        record["sha256"] = record_hash(record)
        problems = []
        for model in (plain, foreign):
            model.config.oelm = copy.deepcopy(record)
            try:
                oelm.verify(model)
                problems.append("")
            except oelm.FreezeError as error:
                problems.append(str(error))
        assert problems[0] == problems[1]
        outcomes["refused" if problems[0] else "another method or seed"] += 1
    print(f"foreign projections, {change.__name__.strip('_')} of {name} with {method}: {dict(outcomes)}")


@pytest.mark.parametrize("change", [_subclass, _own_class])
def test_a_bit_flipped_in_a_foreign_projection_is_found(change):
    model = model_with_method("bert")
    paths = projections(model)
    for path in paths:
        change(model, path)
    for path in paths:
        flip_bit(model.get_submodule(path).weight)
        assert f"{path}.weight: its content changed" in freeze_error(model)
        flip_bit(model.get_submodule(path).weight)
    oelm.verify(model)


class Packed(torch.Tensor):
    """A tensor that says it is float32, and holds one byte of each value, as quantised ones do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.packed = (values * 100).to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError(f"{function} of packed values")


def test_a_trained_query_that_was_packed_is_named():
    """Its rows cannot be counted, so the record cannot be compared with its method: `verify` says so."""
    model = model_with_method("bert", "oelm-ffn")
    for path in projections(model):
        if path.endswith("query"):
            module = model.get_submodule(path)
            module.weight = nn.Parameter((module.weight.detach() * 100).to(torch.int8), requires_grad=False)
    (note,) = oelm.verify(model).notes
    assert "the record could not be compared with its method (bert.encoder.layer.0.attention.self.query is a" in note


@pytest.mark.parametrize("role", ["q", "k"])
def test_a_tensor_that_computes_its_values_is_refused(role):
    model = model_with_method("bert")
    path = find_sites(model)[1][1].roles[role]
    module = model.get_submodule(path)
    module.weight = nn.Parameter(Packed(module.weight.detach()), requires_grad=False)
    assert f"{path}.weight: a Packed computes its values from others: was it quantised?" in freeze_error(model)
    with pytest.raises(oelm.OelmError, match="a Packed computes its values"):
        oelm.audit(model)
