"""Small models with informative weights, and the checks that every model family must pass.

The checks are plain functions of a family's name, so that `tests/method/family_table.py` can run the same ones.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import oelm
from oelm.method.diagnose import diagnose, sample_batch, train_steps
from oelm.method.seal import content_hash
from oelm.method.sites import find_sites, weight_matrix
from oelm.models.small import small_model


def lively(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Return the model with random values in every parameter, in evaluation mode.

    A fresh model has biases of zero, norms of one and matrices so small that attention is uniform: dropping a bias or
    mixing up two heads would not show in its outputs. Every parameter is trainable, as in a model that was loaded: new
    ones of Whisper's class have its encoder's positions frozen, and loading switches their gradient on.
    """
    model.requires_grad_(True)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=rng)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def lively_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a lively small model of a family, by its name in SMALL; `changes` go into its config."""
    return lively(small_model(name, seed, **changes), seed)


def model_with_method(name: str, method: Any = "oelm-freeze", steps: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a lively model with a method applied, and trained for some steps after that."""
    model = lively_model(name, **changes)
    oelm.apply(model, method)
    if steps:
        train_steps(model, steps)
    return model.eval()


def logits(model: nn.Module, **more: Any) -> Tensor:
    """Return the model's logits on the built-in batch (padded, where it is text), in evaluation mode."""
    with torch.no_grad():
        return model.eval()(**sample_batch(model), **more).logits


def distance(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference between two tensors; NaN if either holds a NaN."""
    return float((left.detach().double() - right.detach().double()).abs().max())


def hashes(model: nn.Module, *, frozen: bool) -> dict[str, str]:
    """Return the content hash of every parameter that is frozen, or of every one that is not."""
    return {name: content_hash(p) for name, p in model.named_parameters() if p.requires_grad is not frozen}


def keys_on_disk(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder's safetensors files."""
    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            keys |= set(tensors.keys())
    return keys


def assert_same_model(left: nn.Module, right: nn.Module) -> None:
    """Assert that class, parameters, all buffers, requires_grad and outputs are the same to the bit."""
    assert type(left) is type(right)
    for kind in ("named_parameters", "named_buffers"):
        left_tensors, right_tensors = dict(getattr(left, kind)()), dict(getattr(right, kind)())
        assert list(left_tensors) == list(right_tensors)
        assert {n: content_hash(t) for n, t in left_tensors.items()} == {
            n: content_hash(t) for n, t in right_tensors.items()
        }
        assert {n: t.requires_grad for n, t in left_tensors.items()} == {
            n: t.requires_grad for n, t in right_tensors.items()
        }
    assert list(left.state_dict()) == list(right.state_dict())
    assert torch.equal(logits(left), logits(right))


def assert_loads_back(model: PreTrainedModel, folder: Path) -> None:
    """Assert that oelm.load restores from save_pretrained's folder a model that is the same in every respect."""
    model.save_pretrained(folder)
    loaded = oelm.load(folder)
    assert_same_model(loaded, model)
    verification = oelm.verify(loaded)
    assert verification.exact == verification.tensors


def assert_exports(model: PreTrainedModel, folder: Path) -> None:
    """Assert that the export has the keys that the family saves of a plain model, and the model's outputs."""
    before = logits(model)
    oelm.export(model, folder)
    # The project's own GPT is exported as a class of transformers; every other family keeps its class.
    cls = AutoModelForCausalLM if model.config.model_type == "oelm_gpt" else type(model)
    plain, info = cls.from_pretrained(folder, output_loading_info=True)
    assert type(plain).__module__.startswith("transformers.")
    assert not any(info.values()), info
    assert distance(logits(plain), before) < 1e-4
    assert (keys_on_disk(folder), list(plain.state_dict())) == _own_keys(plain)
    assert "oelm" not in json.loads((folder / "config.json").read_text())
    assert torch.equal(logits(model), before), "exporting must not change the model"
    oelm.verify(model)


def _own_keys(plain: PreTrainedModel) -> tuple[set[str], list[str]]:
    """Return the keys that save_pretrained writes of an untouched model of the class, and those of its state dict."""
    untouched = type(plain)(plain.config)
    with tempfile.TemporaryDirectory() as folder:
        untouched.save_pretrained(folder)
        return keys_on_disk(Path(folder)), list(untouched.state_dict())


# The checks that every family must pass. Each builds its own model.


def check_apply(name: str, folder: Path) -> None:
    """Check that oelm-freeze freezes Q and K with their biases alone, and that every head's rows are orthonormal."""
    model = lively_model(name)
    before, total = logits(model), sum(p.numel() for p in model.parameters())
    report = oelm.apply(model, "oelm-freeze")
    family, sites = find_sites(model)
    expected, divisor = set(), family.divisor(model.config)
    for site in sites:
        for role in ("q", "k"):
            module = model.get_submodule(site.roles[role])
            expected |= {id(parameter) for parameter in module.parameters()}
            # Computed without the record: T5 does not scale its scores, so its Q is shorter by sqrt(d_head).
            length = divisor * site.d_head**-0.5 if role == "q" and divisor is not None else 1.0
            by_head = weight_matrix(module).detach().reshape(site.heads_of(role), site.d_head, -1) / length
            assert distance(by_head @ by_head.mT, torch.eye(site.d_head)) < 1e-5
    assert {id(p) for p in model.parameters() if not p.requires_grad} == expected
    assert report.frozen == sum(p.numel() for p in model.parameters() if id(p) in expected) > 0
    assert report.total == total
    assert distance(logits(model), before) > 0.05, "new Q and K must change a lively model's outputs"


def check_verify(name: str, folder: Path) -> None:
    """Check that a model verifies right after apply, and fails with one flipped bit in any frozen tensor."""
    model = model_with_method(name)
    verification = oelm.verify(model)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert verification.tensors == verification.exact == len(frozen) > 0
    for tensor_name, parameter in frozen.items():
        flip_bit(parameter)
        assert tensor_name in freeze_error(model)
        flip_bit(parameter)
    oelm.verify(model)


def check_step(name: str, folder: Path) -> None:
    """Check that one AdamW step with weight decay changes every trainable tensor and no frozen one."""
    model = model_with_method(name)
    result = diagnose(model, steps=1)
    assert result.healthy, (result.frozen_but_moved, result.trainable_but_still)


def check_save_load(name: str, folder: Path) -> None:
    """Check that a trained model is loaded from its folder the same in every respect."""
    assert_loads_back(model_with_method(name, steps=1), folder)


def check_export(name: str, folder: Path) -> None:
    """Check that a trained model's export is a plain checkpoint of the family with the same outputs."""
    assert_exports(model_with_method(name, steps=1), folder)


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "apply": check_apply,
    "verify": check_verify,
    "step": check_step,
    "save/load": check_save_load,
    "export": check_export,
}


def flip_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of a tensor's middle element, in place."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    with torch.no_grad():
        tensor.detach().view(integer).view(-1)[tensor.numel() // 2] ^= 1


def freeze_error(model: nn.Module) -> str:
    """Return the message of the FreezeError that verify raises, or fail where it raises none."""
    try:
        oelm.verify(model)
    except oelm.FreezeError as error:
        return str(error)
    raise AssertionError("verify accepted the model")
