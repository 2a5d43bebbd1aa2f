"""Proof of what is frozen: the record sealed into the model's config, the report of the model as it is, the check.

A record holds, for each frozen tensor, a SHA-256 of its bytes in its own dtype and in the others it may be cast to.
A cast is deterministic, so a model moved to bfloat16 on purpose still proves itself exactly, and a single flipped bit
does not hide behind rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import FreezeError, MethodError, OelmError
from .adapters import describe
from .matrices import orthogonality_error
from .plan import Target, block_parameters
from .projections import CoreProjection, IdentityProjection
from .sites import Site, find_sites, path_without_adapter, unwrapped, weight_matrix, without_adapter
from .spec import ORTHONORMAL, Method
from .trainable import adapter_parameters, head_of

FORMAT = 2
# Format 1 had whole hashes, in a dict by dtype; it is still read.
_READABLE = (1, 2)
# 128 bits of each hash: this guards against mistakes, and hundreds of tensors go into one config.json.
_DIGITS = 32
# How far from orthonormal a matrix may be after rounding to a dtype; the widest rows here are a few thousand long.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The dtypes that a frozen tensor may have.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHOWN_PROBLEMS = 8


@dataclass(frozen=True)
class Row:
    """One matrix of one block, with its bias and core: what it is, and how many of its parameters train."""

    kind: str
    layer: str
    role: str
    path: str
    init: str
    shape: tuple[int, ...]
    frozen: int
    trainable: int
    orthogonality_error: float | None
    sha256: str | None

    @property
    def state(self) -> str:
        if not self.frozen and not self.trainable:
            return "no parameters"
        if not self.trainable:
            return "frozen"
        return "trainable" if not self.frozen else "frozen, rest trained"


@dataclass(frozen=True)
class FreezeReport:
    """What is frozen in a model and what trains, counted from the model: tied weights once, buffers apart.

    `rest` is the method's; `adapter` is its adapter in words, if any. The rows count adapters with their matrices.
    """

    model: str
    method: str
    seed: int | None
    rows: tuple[Row, ...]
    total: int
    trainable: int
    buffers: int
    blocks: int
    frozen_in_blocks: int
    rest: str
    adapter: str
    adapter_trainable: int
    head: int
    head_trainable: int

    @property
    def frozen(self) -> int:
        return self.total - self.trainable

    @property
    def frozen_share(self) -> float:
        """The frozen share of all parameters."""
        return self.frozen / self.total if self.total else 0.0

    @property
    def frozen_share_of_blocks(self) -> float:
        """The frozen share of the blocks' parameters, embeddings and head aside."""
        return self.frozen_in_blocks / self.blocks if self.blocks else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a record."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rows"}
        shares = {"frozen": self.frozen, "frozen_share": self.frozen_share}
        rows = [{**row.__dict__, "shape": list(row.shape)} for row in self.rows]
        return {**fields, **shares, "frozen_share_of_blocks": self.frozen_share_of_blocks, "rows": rows}

    def __str__(self) -> str:
        from ..cli.tables import render_report

        return render_report(self)


@dataclass(frozen=True)
class Verification:
    """What `verify` found: how many frozen tensors are exactly as sealed, and how many are after a cast."""

    tensors: int
    exact: int
    casts: dict[str, int]

    def __str__(self) -> str:
        if not self.tensors:
            return "no tensor is frozen"
        said = f"{self.exact} of {self.tensors} frozen tensors are bit-identical to the sealed ones"
        for dtype, count in self.casts.items():
            said += f"; {count} are exactly what casting to {dtype} makes of them"
        return said


def record_of(model: nn.Module) -> dict[str, Any] | None:
    """The record that `apply` sealed into the model's config, if there is one; raises if it cannot be read."""
    return read_record(getattr(model, "config", None))


def read_record(config: Any) -> dict[str, Any] | None:
    """The record that a config carries, if any; raises if this version cannot read it."""
    record = getattr(config, "oelm", None)
    if record is None:
        return None
    found = record.get("format") if isinstance(record, dict) else record
    if found not in _READABLE or not isinstance(record, dict):
        raise OelmError(f"config.oelm has format {found!r}; this oelm reads formats {_READABLE}")
    lacking = [key for key in ("method", "seed", "events", "matrices", "frozen") if key not in record]
    if lacking:
        raise OelmError(f"config.oelm has no {', '.join(lacking)}: it was changed after oelm.apply wrote it")
    return record


def seal(
    model: nn.Module,
    method: Method,
    seed: int,
    targets: Iterable[Target],
    tensors: dict[str, list[str]],
    rest: Iterable[str] = (),
) -> None:
    """Freeze, and write the method and every frozen tensor's hashes into the config, where save_pretrained keeps them.

    `tensors` names, for each matrix's path, the parameters that are frozen with it; `rest` all others to freeze.
    """
    targets = list(targets)
    config: Any = model.config
    config.oelm = {
        "format": FORMAT,
        "version": __version__,
        "method": method.model_dump(mode="json"),
        "seed": seed,
        "events": 0,
        "matrices": {
            target.path: {
                "init": target.spec.init,
                "frozen": False,
                "factor": target.factor,
                "orthonormal_blocks": target.blocks if target.spec.init in ORTHONORMAL else None,
                "tensors": tensors[target.path],
            }
            for target in targets
        },
        "frozen": {},
    }
    if method.schedule.kind != "freeze":
        _set_frozen(model, [target.path for target in targets if target.spec.frozen], True)
    for name in rest:
        parameter = model.get_parameter(name)
        parameter.requires_grad_(False)
        config.oelm["frozen"][name] = fingerprint(parameter)


def reseal(model: nn.Module, paths: Collection[str], freeze: bool) -> None:
    """Carry out one event of a schedule: freeze matrices as they are now, or let them train, and record it."""
    record = record_of(model)
    assert record is not None, "a schedule belongs to a method that was applied"
    if freeze:
        for path in paths:  # they were trained, so nothing but their bytes is promised of them any more
            record["matrices"][path]["orthonormal_blocks"] = None
    _set_frozen(model, paths, freeze)
    record["events"] += 1


def refreeze(model: nn.Module) -> None:
    """Freeze again what the record says is frozen: loading weights switches gradients back on."""
    record = record_of(model)
    assert record is not None, "only a model with a record is refrozen"
    for name, parameter in model.named_parameters():
        if name in record["frozen"]:  # one that the record names and the model has not is for verify to tell
            parameter.requires_grad_(False)


def audit(model: nn.Module) -> FreezeReport:
    """The freeze report of a model as it is now, counted anew. Works on any known model, operated on or not.

    One that was compiled, wrapped for data parallelism or given to peft after `apply` is looked at inside its wrapper.
    """
    model = unwrapped(model)
    _, sites = find_sites(model)
    record = record_of(model)
    matrices = record["matrices"] if record else {}
    rows = []
    for site in sites:
        rows += _rows(model, site, matrices)
    parameters = {id(p): p for p in model.parameters()}
    blocks = block_parameters(model, sites)
    method = Method.load(record["method"] if record else "baseline")
    head = head_of(model).parameters.values()
    return FreezeReport(
        model=type(model).__name__,
        method=method.name,
        seed=record["seed"] if record else None,
        rows=tuple(rows),
        total=_size(parameters.values()),
        trainable=_size(p for p in parameters.values() if p.requires_grad),
        buffers=_size({id(b): b for b in model.buffers()}.values()),
        blocks=_size(blocks.values()),
        frozen_in_blocks=_size(p for p in blocks.values() if not p.requires_grad),
        rest=method.rest,
        adapter=describe(model, method.adapter),
        adapter_trainable=_size(p for p in adapter_parameters(model).values() if p.requires_grad),
        head=_size(head),
        head_trainable=_size(p for p in head if p.requires_grad),
    )


def verify(model: nn.Module) -> Verification:
    """Raise FreezeError unless every frozen tensor is as sealed: in place, without gradient, to the bit, orthonormal.

    A model cast to another dtype on purpose passes if its tensors are exactly that cast's; the result says so. One that
    was compiled, wrapped for data parallelism or given to peft after `apply` is looked at inside its wrapper.
    """
    model = unwrapped(model)
    record = record_of(model)
    if record is None:
        raise FreezeError(f"{type(model).__name__} carries no record of a method: call oelm.apply or oelm.load first")
    problems: list[str] = []
    casts: dict[str, int] = {}
    exact = 0
    parameters = dict(model.named_parameters())
    for name, sealed in record["frozen"].items():
        parameter = parameters.get(name, parameters.get(_beside_adapter(model, name)))
        if parameter is None:
            problems.append(f"{name} is gone: was its module replaced?")
            continue
        if parameter.requires_grad:
            problems.append(f"{name} was frozen and is now trainable (requires_grad is True)")
        try:
            cast_to = _match(parameter, sealed)
        except FreezeError as error:
            problems.append(f"{name}: {error}")
            continue
        if cast_to is None:
            exact += 1
        else:
            casts[cast_to] = casts.get(cast_to, 0) + 1
    for path, matrix in record["matrices"].items():
        if matrix["frozen"]:
            problems += _matrix_problems(model, path, matrix)
    if problems:
        shown = "\n  ".join(problems[:_SHOWN_PROBLEMS])
        more = f"\n  and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise FreezeError(f"{type(model).__name__} is not frozen as sealed:\n  {shown}{more}")
    return Verification(len(record["frozen"]), exact, casts)


def _beside_adapter(model: nn.Module, name: str) -> str:
    """A tensor's name once peft has put an adapter beside it: the tensor is then its base's."""
    path, _, leaf = name.rpartition(".")
    try:
        return f"{path_without_adapter(model, path)}.{leaf}"
    except AttributeError:  # the module is gone altogether
        return name


def _set_frozen(model: nn.Module, paths: Iterable[str], freeze: bool) -> None:
    record = record_of(model)
    assert record is not None
    parameters = dict(model.named_parameters())
    for path in paths:
        matrix = record["matrices"][path]
        matrix["frozen"] = freeze
        for name in matrix["tensors"]:
            parameters[name].requires_grad_(not freeze)
            if freeze:
                record["frozen"][name] = fingerprint(parameters[name])
            else:
                del record["frozen"][name]


def content_hash(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = whole(tensor).to("cpu").contiguous().view(-1)  # flat, since a scalar cannot be viewed as bytes
    return hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """The tensor without its gradient and, where it is sharded over processes, gathered: all of them must ask."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else cast(Tensor, gather()).detach()


def fingerprint(tensor: Tensor) -> str:
    """What a record keeps of a tensor: 'float32:3a7b... float16:... bfloat16:...', its own dtype first."""
    own = str(tensor.dtype).removeprefix("torch.")
    if own not in DTYPES:
        raise MethodError(f"cannot seal a tensor of dtype {own}: use one of {', '.join(DTYPES)}")
    # A wider dtype holds every value as it is, so a cast to it needs no hash. float16 and bfloat16 do not hold each
    # other's values.
    narrower = [name for name, dtype in DTYPES.items() if dtype.itemsize <= tensor.dtype.itemsize and name != own]
    content = whole(tensor)
    return " ".join(f"{name}:{content_hash(content.to(DTYPES[name]))[:_DIGITS]}" for name in (own, *narrower))


def _read_fingerprint(sealed: Any) -> tuple[str, dict[str, str]]:
    """(own dtype, the start of the hash in every dtype) of what a record keeps of a tensor."""
    if isinstance(sealed, dict):
        return sealed["dtype"], sealed["sha256"]
    hashes = dict(part.split(":", 1) for part in sealed.split())
    return next(iter(hashes)), hashes


def _match(tensor: Tensor, sealed: Any) -> str | None:
    """None if the tensor is as sealed, the dtype's name if it is exactly a cast of it; raises if it is neither."""
    tensor = whole(tensor)
    (sealed_as, hashes), own = _read_fingerprint(sealed), str(tensor.dtype).removeprefix("torch.")
    if own == sealed_as and content_hash(tensor).startswith(hashes[own]):
        return None
    for name, digest in hashes.items():
        there = tensor.to(DTYPES[name])
        if own == sealed_as == name or not torch.equal(there.to(tensor.dtype), tensor):
            continue  # not a value of that dtype, so no cast to it made this tensor
        if content_hash(there).startswith(digest):
            return own if own != sealed_as else name
    raise FreezeError(f"its content changed (sealed as {sealed_as}, {hashes[sealed_as][:12]}...)")


def _matrix_problems(model: nn.Module, path: str, matrix: dict[str, Any]) -> list[str]:
    try:
        module = without_adapter(model.get_submodule(path))
    except AttributeError:
        return [f"{path} is gone: was its module replaced?"]
    basis = module.identity if isinstance(module, CoreProjection) else module
    if matrix["init"] == "identity":
        if not isinstance(basis, IdentityProjection) or basis.factor != matrix["factor"]:
            return [f"{path} was the identity times {matrix['factor']} and is not any more"]
        return []
    if matrix["orthonormal_blocks"] is None or not isinstance(getattr(module, "weight", None), Tensor):
        return []
    error = _orthogonality(module, matrix)
    tolerance = _TOLERANCE.get(cast(Tensor, module.weight).dtype, 1e-2)
    # A model sealed, cast down and cast up again is as orthonormal as the narrow dtype left it; its bytes proved that.
    allowed = _TOLERANCE[torch.bfloat16] if error > tolerance and _was_cast(module) else tolerance
    if not error <= allowed:  # written so that an error that is not a number fails too
        return [f"{path} lost its orthogonality: |W Wᵀ - I| is {error:.1e}, more than {tolerance:.0e}"]
    return []


def _was_cast(module: nn.Module) -> bool:
    weight = cast(Tensor, module.weight).detach()
    return any(torch.equal(weight.to(narrow).to(weight.dtype), weight) for narrow in (torch.bfloat16, torch.float16))


def _orthogonality(module: nn.Module, matrix: dict[str, Any]) -> float:
    return orthogonality_error(whole(weight_matrix(module)).double() / matrix["factor"], matrix["orthonormal_blocks"])


def _rows(model: nn.Module, site: Site, matrices: dict[str, Any]) -> list[Row]:
    rows = []
    counted: set[int] = set()
    for role, path in (*site.roles.items(), *site.feed_forward()):
        try:
            module = model.get_submodule(path)
        except AttributeError:  # fused: one row for the whole projection, where its first role stands
            if site.fused is None or role != site.fused.roles[0]:
                continue
            role, path = "+".join(site.fused.roles), site.fused_path
            module = model.get_submodule(path)
        rows.append(_row(site, role, path, module, matrices.get(path, {}), counted))
    return rows


def _row(site: Site, role: str, path: str, module: nn.Module, matrix: dict[str, Any], counted: set[int]) -> Row:
    parameters = {id(p): p for p in module.parameters() if id(p) not in counted}
    counted |= set(parameters)
    weight = getattr(without_adapter(module), "weight", None)
    has_matrix = isinstance(weight, Tensor) and weight.numel() > 0
    orthonormal = has_matrix and matrix.get("orthonormal_blocks") is not None
    return Row(
        kind=site.kind,
        layer=site.label,
        role=role,
        path=path,
        init=matrix.get("init", "default"),
        shape=tuple(weight_matrix(module).shape) if has_matrix else (),
        frozen=_size(p for p in parameters.values() if not p.requires_grad),
        trainable=_size(p for p in parameters.values() if p.requires_grad),
        orthogonality_error=_orthogonality(module, matrix) if orthonormal else None,
        sha256=content_hash(cast(Tensor, weight)) if has_matrix else None,
    )


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
