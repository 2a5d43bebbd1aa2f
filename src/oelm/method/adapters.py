"""Adapters (LoRA, OFT): peft's own layers around frozen matrices, put in place and merged into them again.

Each layer is built around a stand-in of its matrix and then given the matrix itself. So peft never sees the model:
it marks nothing in it, names come from oelm's table of families, and an error leaves the model as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import MethodError, ModelError
from .fused import linear
from .matrices import generator
from .projections import Replaced
from .sites import Site, is_adapter, is_pefts, weight_matrix, without_adapter
from .spec import LORA_ALPHA, OFT_TERMS, Adapter


class AdapterTarget(NamedTuple):
    """One matrix that gets an adapter."""

    site: Site
    role: str
    path: str


def describe(model: nn.Module, adapter: Adapter) -> str:
    """Return an adapter in words, with its sizes in this model: 'lora, rank 8, alpha 16, on q, v'."""
    if adapter.kind == "none":
        return ""
    widths = [weight_matrix(module).shape[1] for module in model.modules() if is_adapter(module)]
    sizes = ", ".join(str(size) for size in sorted({adapter.size(width) for width in widths}))
    shape = f"rank {sizes}, alpha {adapter.alpha or LORA_ALPHA:g}" if adapter.kind == "lora" else f"blocks of {sizes}"
    dropout = f", dropout {adapter.dropout:g}" if adapter.dropout else ""
    return f"{adapter.kind}, {shape}{dropout}, on {', '.join(adapter.targets)}"


def adapter_targets(sites: list[Site], adapter: Adapter) -> list[AdapterTarget]:
    """Return every matrix of the sites that gets an adapter. Raise for a role that none of the sites has."""
    if adapter.kind == "none":
        return []
    targets: list[AdapterTarget] = []
    for site in sites:
        matrices = [*site.roles.items(), *site.feed_forward]
        targets += [AdapterTarget(site, role, path) for role, path in matrices if role in adapter.targets]
    absent = [role for role in adapter.targets if role not in {target.role for target in targets}]
    if absent:
        raise MethodError(f"adapter.targets {', '.join(absent)}: the chosen attentions have no such matrix")
    return list({target.path: target for target in targets}.values())  # K = V is one matrix with two roles


def _require_fit(module: nn.Module, path: str, adapter: Adapter) -> None:
    """Raise where the adapter does not fit a matrix; the message names the numbers."""
    rows, width = weight_matrix(module).shape
    size = adapter.size(width)
    if adapter.kind == "lora" and size > min(rows, width):
        raise MethodError(
            f"{path}: adapter.rank {size} is too high for a matrix of {rows} x {width}; use at most {min(rows, width)}"
        )
    if adapter.kind == "oft" and (width % size or size < 2):
        raise MethodError(
            f"{path}: OFT's blocks of {size} do not fit its width of {width}; set adapter.rank to 2 or more that "
            "divides it"
        )


def with_adapter(module: nn.Module, path: str, adapter: Adapter, seed: int | None) -> nn.Module:
    """Return peft's layer around a projection, in its dtype and on its device.

    Initial values are a function of the seed and the path alone. Without a seed they are left to be loaded.
    """
    _require_fit(module, path, adapter)
    try:
        import peft
    except ImportError as error:
        install = "pip install 'oelm[peft]'"
        raise MethodError(f"adapter {adapter.kind!r} needs the package peft ({error}): {install}") from None
    weight = cast(Tensor, module.weight)
    device = torch.device("meta" if weight.device.type == "meta" else "cpu")
    holder = nn.ModuleDict({"matrix": _stand_in(module, adapter, device)})
    with torch.random.fork_rng(devices=[]), device:
        if seed is not None:
            torch.default_generator.manual_seed(generator(seed, path).initial_seed())
        peft.inject_adapter_in_model(_peft_config(peft, module, adapter), holder)
    layer: Any = holder["matrix"]
    for name, child in layer.named_children():
        if name != "base_layer":
            child.to(weight.device, weight.dtype)
    for part in list(layer.modules()):
        for name, buffer in list(part.named_buffers(recurse=False)):
            # peft keeps OFT's indices out of the state dict, and transformers would load uninitialised memory for them.
            part.register_buffer(name, buffer, persistent=True)
    if adapter.kind == "oft" and isinstance(module, Conv1D):  # peft's OFT does not support Conv1D
        bias = cast("Tensor | None", module.bias)
        layer.replaced = Replaced(module)
        module = linear(weight_matrix(module).detach(), None if bias is None else bias.detach().clone(), like=module)
    layer.base_layer = module
    return cast(nn.Module, layer.train(module.training))


def merge_adapters(model: nn.Module) -> None:
    """Merge every adapter into its matrix, in place: computed in float64, then cast to the matrix's dtype."""
    for path, layer in [(path, module) for path, module in model.named_modules() if is_adapter(module)]:
        module = without_adapter(layer)
        dtype = cast(Tensor, module.weight).dtype
        cast(Any, layer.double()).merge()
        module.to(dtype)
        replaced = getattr(layer, "replaced", None)
        if isinstance(replaced, Replaced):
            weight = cast(Tensor, module.weight)
            module = replaced.build(weight, cast("Tensor | None", module.bias), like=weight)
        model.set_submodule(path, module)


def merged_by_peft(model: nn.Module) -> nn.Module:
    """Return a copy of the model inside a peft model, with what peft added merged into its matrices.

    A frozen matrix is no longer the sealed one then, so the model is to be verified before.
    """
    for module in model.modules():
        if is_pefts(module) and hasattr(module, "merge_and_unload"):
            return cast(nn.Module, cast(Any, copy.deepcopy(module)).merge_and_unload())
    raise ModelError(
        "the model carries adapters that peft added after oelm.apply, and none that it can merge: pass the model that "
        "get_peft_model returned, or take them off with its unload()"
    )


class Rotation(NamedTuple):
    """OFT's rotation of one matrix's input: its parameters, the input's width, the size of its blocks."""

    weight: nn.Parameter
    width: int
    block: int


def rotations(model: nn.Module) -> Iterator[Rotation]:
    """Yield the rotation of every OFT adapter in the model."""
    for layer in model.modules():
        if is_adapter(layer):
            modules: Any = getattr(layer, "oft_R", {})
            for module in modules.values():
                yield Rotation(module.weight, module.in_features, module.block_size)


def _stand_in(module: nn.Module, adapter: Adapter, device: torch.device) -> nn.Module:
    """Return a projection without values that has the module's shape and, where it matters to peft, its class."""
    rows, width = weight_matrix(module).shape
    with torch.device("meta"):
        as_conv = isinstance(module, Conv1D) and adapter.kind == "lora"
        empty = Conv1D(rows, width) if as_conv else nn.Linear(width, rows, bias=False)
    return empty.to_empty(device=device)


def _peft_config(peft: Any, module: nn.Module, adapter: Adapter) -> Any:
    """Return peft's config of the adapter for one projection."""
    size = adapter.size(weight_matrix(module).shape[1])
    if adapter.kind == "lora":
        return peft.LoraConfig(
            r=size,
            lora_alpha=adapter.alpha or LORA_ALPHA,
            lora_dropout=adapter.dropout,
            target_modules=["matrix"],
            fan_in_fan_out=isinstance(module, Conv1D),
        )
    # The approximate Cayley transform is peft's default. It is set here so that a new default of peft changes no run.
    return peft.OFTConfig(
        r=0,
        oft_block_size=size,
        module_dropout=adapter.dropout,
        target_modules=["matrix"],
        use_cayley_neumann=True,
        num_cayley_neumann_terms=OFT_TERMS,
    )
