"""Makes the freeze report of a model as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .adapters import describe
from .freeze_report import FreezeReport, MatrixRow
from .guess import require_known_type
from .plan import block_parameters
from .seal import Measurements, record_of
from .sites import Site, find_sites, unwrapped, weight_matrix, without_adapter
from .spec import Method
from .trainable import adapter_parameters, head_of


def audit(model: nn.Module) -> FreezeReport:
    """Return the freeze report of a model as it is now, counted anew. The model may have a method or not.

    A model that was compiled, wrapped for data parallelism or given to peft after `apply` is looked at inside its
    wrapper.
    """
    model = unwrapped(model)
    require_known_type(model)
    return report_on(model, find_sites(model)[1], Measurements())


def report_on(model: nn.Module, sites: Sequence[Site], measurements: Measurements) -> FreezeReport:
    """Return the freeze report of a model without a wrapper, given its sites and what was measured of it already."""
    record = record_of(model)
    matrices = record["matrices"] if record else {}
    parameters = {id(p): p for p in model.parameters()}
    blocks = block_parameters(model, sites)
    method = Method.load(record["method"] if record else "baseline")
    head = head_of(model).parameters.values()
    modules = [module for site in sites for _, _, module in _modules(model, site)]
    measurements.hash_ahead([weight for module in modules if (weight := _weight(module)) is not None])
    return FreezeReport(
        model=type(model).__name__,
        method=method.name,
        seed=record["seed"] if record else None,
        rows=tuple(row for site in sites for row in _rows(model, site, matrices, measurements)),
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


def _rows(model: nn.Module, site: Site, matrices: dict[str, Any], measurements: Measurements) -> Iterator[MatrixRow]:
    """Yield the rows of one site, each parameter counted in one of them, given the record's entries for matrices."""
    counted: set[int] = set()
    for role, path, module in _modules(model, site):
        parameters = [p for p in module.parameters() if id(p) not in counted]
        counted |= {id(p) for p in parameters}
        matrix = matrices.get(path, {})
        weight = _weight(module)
        orthonormal = weight is not None and matrix.get("orthonormal_blocks") is not None
        yield MatrixRow(
            kind=site.kind,
            layer=site.label,
            role=role,
            path=path,
            init=matrix.get("init", "default"),
            shape=() if weight is None else tuple(weight_matrix(module).shape),
            frozen=_size(p for p in parameters if not p.requires_grad),
            trainable=_size(p for p in parameters if p.requires_grad),
            orthogonality_error=measurements.orthogonality_error(path, module, matrix) if orthonormal else None,
            sha256=None if weight is None else measurements.content_hash(weight),
        )


def _modules(model: nn.Module, site: Site) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (role, path, module) of each projection and feed-forward matrix of one site."""
    for role, path in (*site.roles.items(), *site.feed_forward):
        if role == "v" and path == site.roles["k"]:
            continue  # K = V: one matrix, one row
        try:
            yield role, path, model.get_submodule(path)
        except AttributeError:  # still fused: one row for the whole projection, in the place of its first role
            if site.fused is not None and role == site.fused.roles[0]:
                yield "+".join(site.fused.roles), site.fused_path, model.get_submodule(site.fused_path)


def _weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a projection, or None where it has no matrix."""
    weight = getattr(without_adapter(module), "weight", None)
    return weight if isinstance(weight, Tensor) and weight.numel() > 0 else None


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
