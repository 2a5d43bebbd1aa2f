"""Applies a method to a model: plan, compute every new weight, and only then change, freeze and seal the model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import FreezeError, MethodError, ModelError
from . import matrices as init
from .adapters import adapter_targets, check_target, require_peft, with_adapter
from .families import Family
from .fused import unfuse
from .plan import Target, choose_sites, core_sides, plan
from .projections import CoreProjection, IdentityProjection, Replaced, SplitProjection
from .seal import DTYPES, FreezeReport, audit, record_of, seal, verify
from .sites import Site, find_sites, path_without_adapter, require_projection, weight_matrix, without_adapter
from .spec import FRESH, KEEPING, Method, Projection
from .trainable import frozen_by_rest


@dataclass
class Change:
    """One step of the operation, fully computed: put a module in place, or new values into the one that is there."""

    owner: nn.Module
    name: str
    module: nn.Module | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def commit(self) -> None:
        if self.module is not None:
            setattr(self.owner, self.name, self.module)
            return
        module = without_adapter(self.owner.get_submodule(self.name))
        with torch.no_grad():
            if self.weight is not None:
                weight_matrix(module).copy_(self.weight)
            if self.bias is not None:
                cast(Tensor, module.bias).copy_(self.bias)


def apply(model: nn.Module, method: Method | str | dict[str, Any] = "oelm-freeze", seed: int = 0) -> FreezeReport:
    """Set and freeze a Hugging Face model's attention in place, and report what was done.

    `method` is a preset's name, an `oelm.Method`, or a dict such as `{"preset": "oelm-freeze", "layers": "last:4"}`.
    Random matrices are a function of `seed` and each tensor's name. On any error the model is left as it was.
    """
    method = Method.load(method)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise MethodError(f"seed must be a whole number from 0, not {seed!r}")
    check_operable(model)
    if record_of(model) is not None:
        return _already_operated(model, method, seed)
    family, sites = find_sites(model)
    targets = plan(model, family, sites, method)
    for name in frozen_by_rest(model, family, sites, method):
        _require_sealable(model.get_parameter(name), name)
    for change in _all_changes(model, family, sites, targets, method, seed):
        change.commit()
    _own_config(model)
    idle = _idle_biases(model, family, targets, method)
    tensors = {target.path: [n for n in _freezing(model, target, method) if n not in idle] for target in targets}
    seal(model, method, seed, targets, tensors, [*frozen_by_rest(model, family, sites, method), *idle])
    verify(model)
    return audit(model)


def install(model: nn.Module, method: Method) -> None:
    """Give a freshly built model a method's structure, with values still to be loaded: the first half of `load`."""
    family, sites = find_sites(model)
    targets = plan(model, family, sites, method)
    for change in _all_changes(model, family, sites, targets, method, seed=None):
        change.commit()


def outline(model: nn.Module, method: Method) -> nn.Module:
    """A copy of a model as a method would leave it: its parts, and which of them train; values mean nothing."""
    copied = copy.deepcopy(model)
    install(copied, method)
    family, sites = find_sites(copied)
    targets = plan(copied, family, sites, method)
    frozen = {*frozen_by_rest(copied, family, sites, method), *_idle_biases(copied, family, targets, method)}
    if method.schedule.kind != "freeze":  # that one freezes later
        held = [target for target in targets if target.spec.frozen]
        frozen |= {name for target in held for name in _freezing(copied, target, method)}
    for name in frozen:
        copied.get_parameter(name).requires_grad_(False)
    return copied


def check_operable(model: nn.Module) -> None:
    """Raises for a model that must be unwrapped, dequantised or loaded first."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a torch module, not {type(model).__name__}")
    for name, module in model.named_modules():  # FSDP may wrap blocks and not the model
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            raise ModelError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: "
                "apply the method to the bare model first, then wrap it"
            )
    if type(model).__name__ == "OptimizedModule":
        raise ModelError("the model is compiled: apply the method first, then torch.compile it")
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model carries peft adapters: apply the method first, then add adapters; or let oelm add them, "
            "with the preset 'lora' or 'oft'"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            "the model is quantised: load it without a quantization_config, apply the method, then quantise"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if on_meta:
        raise ModelError(f"{on_meta[0]} is on the meta device, without values: load the model's weights first")


def _already_operated(model: nn.Module, method: Method, seed: int) -> FreezeReport:
    record = record_of(model)
    assert record is not None
    done = Method.load(record["method"])
    if done != method or record["seed"] != seed:
        raise ModelError(
            f"the model was operated on already, with {done.name!r} (seed {record['seed']}); "
            f"{method.name!r} (seed {seed}) needs a fresh model"
        )
    try:
        verify(model)
    except FreezeError as error:
        raise ModelError(
            "the model's config says that a method was applied, but the model does not agree. Was its folder loaded "
            f"with plain from_pretrained? Use oelm.load for that. ({error})"
        ) from None
    return audit(model)


def _all_changes(
    model: nn.Module, family: Family, sites: list[Site], targets: list[Target], method: Method, seed: int | None
) -> list[Change]:
    """Every change, in the order to make them. A fused projection is taken apart where one of its roles is touched."""
    adapted = adapter_targets(choose_sites(family, sites, method), method.adapter)
    apart = {target.site.fused_path for target in targets if target.role in ("q", "k")}
    apart |= {site.fused_path for site, role, _ in adapted if site.fused is not None and role in site.fused.roles}
    splits = {site.fused_path: _unfused(model, site) for site in sites if site.fused and site.fused_path in apart}
    # Adapters come first: the layer that stands in one for a Conv1D is a copy, and the new values must go into that.
    changes = _adapter_changes(model, adapted, splits, method, seed)
    for site in sites:
        changes += _changes(model, family, site, targets, splits.get(site.fused_path), method, seed)
    return changes + [Change(*_owner(model, path), module=split) for path, split in splits.items()]


def _adapter_changes(
    model: nn.Module,
    adapted: list[tuple[Site, str, str]],
    splits: dict[str, SplitProjection],
    method: Method,
    seed: int | None,
) -> list[Change]:
    """The changes that put adapters in place."""
    if method.adapter.kind == "none":
        return []
    require_peft(method.adapter)
    changes: list[Change] = []
    for site, role, path in adapted:
        owner, name = _place(model, path, role, splits.get(site.fused_path))
        module = owner.get_submodule(name)
        _require_plain(module, path)
        check_target(module, path, method.adapter)
        changes.append(Change(owner, name, module=with_adapter(module, path, method.adapter, seed)))
    return changes


def _changes(
    model: nn.Module,
    family: Family,
    site: Site,
    targets: list[Target],
    split: SplitProjection | None,
    method: Method,
    seed: int | None,
) -> list[Change]:
    """The changes of values at one site. With no seed they are left undefined: only the structure is wanted."""
    mine = {target.path: target for target in targets if target.site == site}
    q, k = mine.get(site.roles["q"]), mine.get(site.roles["k"])
    changes = [_set(model, target, seed) for target in mine.values() if target.role.startswith("ffn")]
    return changes + _attention_changes(model, family, site, q, k, split, method, seed)


def _attention_changes(
    model: nn.Module,
    family: Family,
    site: Site,
    q: Target | None,
    k: Target | None,
    split: SplitProjection | None,
    method: Method,
    seed: int | None,
) -> list[Change]:
    sides = core_sides(model, family, method)
    coefficients: dict[str, Tensor | None] = {"q": None, "k": None}
    matrices: dict[str, Tensor | None] = {}
    places: dict[str, tuple[nn.Module, str]] = {}
    for target in (q, k):
        if target is None:
            continue
        role = target.role
        places[role] = _place(model, target.path, role, split)
        module = places[role][0].get_submodule(places[role][1])
        _require_plain(module, target.path)
        coefficients[role], matrices[role] = _make(module, target, seed)
    changes = []
    for target in (q, k):
        if target is None:
            continue
        role, (owner, name) = target.role, places[target.role]
        module = owner.get_submodule(name)
        bias = cast("Tensor | None", module.bias)
        new_bias = None if bias is None or seed is None else _new_bias(bias, target)
        identity = None
        if target.spec.init == "identity":
            rows = site.heads_of(role) * site.d_head
            identity = IdentityProjection(rows, site.width, target.factor, Replaced(module))
        if role in sides:
            core = _start_core(target, method, sides, coefficients, seed)
            if new_bias is not None and sides == ("q",) and coefficients["k"] is not None:
                new_bias = _through_key(new_bias, coefficients["k"], site)
            built = _core_projection(module, identity, matrices[role], core, new_bias)
            changes.append(Change(owner, name, module=built))
        elif identity is not None:
            changes.append(Change(owner, name, module=identity))
        else:
            if method.core == "matrix" and role == "k" and new_bias is not None:
                # It adds the same number to every score of a row, which the softmax takes out again.
                new_bias = torch.zeros_like(new_bias)
            changes.append(Change(owner, name, weight=matrices[role], bias=new_bias))
    return changes


def _unfused(model: nn.Module, site: Site) -> SplitProjection:
    """The site's fused projection taken apart; the model still has it as it was."""
    assert site.fused is not None
    holder = model.get_submodule(site.fused_path)
    _require_plain(holder, site.fused_path)
    return unfuse(holder, site.fused, site.heads, site.kv_heads)


def _set(model: nn.Module, target: Target, seed: int | None) -> Change:
    """A feed-forward matrix set in place."""
    owner, name = _owner(model, target.path)
    module = owner.get_submodule(name)
    _require_plain(module, target.path)
    return Change(owner, name, weight=_make(module, target, seed)[1])


def _make(module: nn.Module, target: Target, seed: int | None) -> tuple[Tensor | None, Tensor | None]:
    """(coefficient, matrix): the new matrix times its factor, and what QR or polar split off. None: leave it."""
    spec, name = target.spec, f"{target.path}.weight"
    if seed is None or spec.init == "identity" or (spec.init in KEEPING and target.factor == 1.0):
        return None, None
    old = weight_matrix(module).detach()
    work = torch.promote_types(old.dtype, torch.float32)
    rows, width = old.shape
    coefficient = None
    if spec.init not in FRESH and not old.isfinite().all():
        raise ModelError(f"{name} holds values that are not finite, and init {spec.init!r} builds on them")
    if spec.init in KEEPING:
        new = old.to("cpu", work)
    elif spec.init == "orthogonal":
        new = init.orthogonal(rows, width, target.blocks, init.generator(seed, name), work)
    elif spec.init == "hadamard":
        new = init.hadamard(rows, width, target.blocks, init.generator(seed, name), work)
    elif spec.init == "gaussian":
        std = width**-0.5 if spec.std == "matched" else float(cast(float, spec.std))
        new = init.gaussian(rows, width, std, init.generator(seed, name), work)
    else:
        factor = init.factor_qr if spec.init == "qr" else init.factor_polar
        coefficient, new = factor(old.to("cpu", work), target.blocks)
    new = new * target.factor
    if not new.to(old.dtype).isfinite().all():
        raise MethodError(f"{name}: a factor of {target.factor:g} overflows {old.dtype}; use a smaller scale")
    return coefficient, new


def _new_bias(bias: Tensor, target: Target) -> Tensor:
    assert isinstance(target.spec, Projection)
    if target.spec.init in FRESH:
        return torch.zeros_like(bias)
    return bias.detach().clone() * target.spec.scale


def _start_core(
    target: Target, method: Method, sides: tuple[str, ...], coefficients: dict[str, Tensor | None], seed: int | None
) -> Tensor:
    """The core's first value: what leaves the function unchanged where the basis came from the weights, else one.

    Between a query and a key that are the same slice, one would have every token attend to itself: there it is a random
    orthogonal matrix.
    """
    site, role = target.site, target.role
    heads, d_head = site.heads_of(role), site.d_head
    if method.core == "gain":
        return torch.ones(heads)
    rows = target.reach * d_head
    if method.q.init == method.k.init == "identity" and role == "q" and seed is not None:
        draw = init.generator(seed, f"{target.path}.core")
        return init.orthogonal(heads * d_head, rows, heads // target.reach, draw).view(-1, rows, rows)
    own = coefficients[role]
    core = torch.eye(d_head).repeat(heads, 1, 1) if own is None else own
    if sides == ("q",) and coefficients["k"] is not None:
        core = _per_query_head(coefficients["k"], site).mT @ core
    by_group = core.view(-1, target.reach, d_head, d_head)
    side_by_side = torch.eye(target.reach, dtype=core.dtype)[None, :, None, :, None] * by_group[:, :, :, None, :]
    return side_by_side.reshape(-1, rows, rows)


def _through_key(bias: Tensor, coefficient: Tensor, site: Site) -> Tensor:
    """The query's bias, seen through the key's coefficient that moved to the query's side."""
    by_head = bias.to("cpu", coefficient.dtype).view(site.heads, site.d_head, 1)
    return (_per_query_head(coefficient, site).mT @ by_head).reshape(-1)


def _per_query_head(per_key_head: Tensor, site: Site) -> Tensor:
    return per_key_head.repeat_interleave(site.heads // site.kv_heads, dim=0)


def _core_projection(
    module: nn.Module, identity: IdentityProjection | None, matrix: Tensor | None, core: Tensor, bias: Tensor | None
) -> CoreProjection:
    old, old_bias = weight_matrix(module).detach(), cast("Tensor | None", module.bias)

    def parameter(value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(old.device, old.dtype).contiguous())

    basis: nn.Parameter | IdentityProjection
    basis = identity if identity is not None else parameter(old.clone() if matrix is None else matrix)
    new_bias = old_bias.detach().clone() if bias is None and old_bias is not None else bias
    if identity is not None:
        new_bias = None
    built = CoreProjection(basis, parameter(core), None if new_bias is None else parameter(new_bias), Replaced(module))
    return built.train(module.training)


def _freezing(model: nn.Module, target: Target, method: Method) -> list[str]:
    """The names of the parameters that are frozen when the target's matrix is."""
    leaves = ("weight", "bias") if target.role in ("q", "k") and method.biases == "frozen" else ("weight",)
    return [name for leaf in leaves for name in _parameter_of(model, target, leaf)]


def _idle_biases(model: nn.Module, family: Family, targets: list[Target], method: Method) -> list[str]:
    """The biases that never train, whatever a schedule does: a key's does nothing next to a one-sided core."""
    if method.core != "matrix" or core_sides(model, family, method) != ("q",):
        return []
    return [name for target in targets if target.role == "k" for name in _parameter_of(model, target, "bias")]


def _parameter_of(model: nn.Module, target: Target, leaf: str) -> list[str]:
    """The name of a target's own weight or bias, if it has one."""
    path = path_without_adapter(model, target.path)
    return [f"{path}.{leaf}"] if isinstance(getattr(model.get_submodule(path), leaf, None), nn.Parameter) else []


def _own_config(model: nn.Module) -> None:
    """Give the model a config of its own: models built from one config share it, and the record is one model's."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _place(model: nn.Module, path: str, role: str, split: SplitProjection | None) -> tuple[nn.Module, str]:
    """(owner, name) of a role's projection: in the model, or in what its fused one is taken apart into."""
    return (split, role) if split is not None and role in split.parts else _owner(model, path)


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _require_plain(module: nn.Module, path: str) -> None:
    require_projection(module, path)
    _require_sealable(cast(Tensor, module.weight), f"{path}.weight")


def _require_sealable(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in DTYPES.values():
        raise ModelError(
            f"{name} has dtype {tensor.dtype}, not one of {', '.join(DTYPES)}: is it quantised? "
            "Apply the method before quantising"
        )
