"""Computes everything that an operation changes in a model: new weights, biases, cores, adapters and split modules.

All of it is computed before the first change is made, so an error leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import MethodError, ModelError
from . import matrices
from .adapters import with_adapter
from .fused import unfuse
from .plan import Operation, Target
from .projections import CoreProjection, IdentityProjection, Replaced
from .record import DTYPES
from .sites import Site, require_projection, weight_matrix, without_adapter
from .spec import FRESH, KEEPING, Projection

# One change, fully computed: call it to make it.
Change = Callable[[], None]


def carry_out(model: nn.Module, operation: Operation, seed: int | None) -> None:
    """Compute every change of the operation, and then make them all.

    Without a seed no values are computed: the modules are put in place, and their values are loaded later.
    """
    for change in _Computation(model, operation, seed).changes():
        change()


@dataclass(frozen=True, kw_only=True)
class _NewProjection:
    """A site's Q or K as it is, and the matrix that it gets.

    `coefficient` is what QR or the polar decomposition split off the old matrix. `matrix` is None where the weight
    stays as it is or is replaced by an identity.
    """

    target: Target
    owner: nn.Module
    name: str
    module: nn.Module
    coefficient: Tensor | None
    matrix: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.module.bias)


class _Computation:
    """The model, the operation and the seed that all changes are computed from, and the split modules they share."""

    def __init__(self, model: nn.Module, operation: Operation, seed: int | None) -> None:
        self.model, self.operation, self.method, self.seed = model, operation, operation.method, seed
        # A fused projection is split where the method changes its Q or K or puts an adapter on one of its roles.
        paths = {target.site.fused_path for target in operation.targets if target.role in ("q", "k")}
        paths |= {site.fused_path for site, role, _ in operation.adapted if site.fused and role in site.fused.roles}
        self.splits = {
            site.fused_path: unfuse(_plain_module(model, site.fused_path), site.fused, site.heads, site.kv_heads)
            for site in operation.sites
            if site.fused is not None and site.fused_path in paths
        }

    def changes(self) -> list[Change]:
        """Return every change, in the order to make them."""
        # Adapters come first: OFT replaces a Conv1D by a Linear that is a copy, and the new values must go into that.
        changes: list[Change] = []
        for site, role, path in self.operation.adapted:
            owner, name, module = self._find(site, role, path)
            layer = with_adapter(module, path, self.method.adapter, self.seed)
            changes.append(partial(setattr, owner, name, layer))
        for site in self.operation.sites:
            targets = {target.path: target for target in self.operation.targets if target.site == site}
            changes += [self._matrix(target) for target in targets.values() if target.role not in ("q", "k")]
            changes += self._attention(site, [targets[site.roles[r]] for r in ("q", "k") if site.roles[r] in targets])
        return changes + [partial(self.model.set_submodule, path, split) for path, split in self.splits.items()]

    def _matrix(self, target: Target) -> Change:
        """Return the change of a matrix outside Q and K: new values in place, or an identity to the latent."""
        owner, name, module = self._find(target.site, target.role, target.path)
        if target.spec.init == "identity":
            width = target.site.width
            return partial(setattr, owner, name, IdentityProjection(width, width, 1.0, Replaced(module)))
        return partial(_set_values, owner, name, _new_matrix(module, target, self.seed)[1])

    def _attention(self, site: Site, targets: list[Target]) -> list[Change]:
        """Return the changes of a site's Q and K. Both are made first: a core on Q may need K's coefficient."""
        projections = []
        for target in targets:
            owner, name, module = self._find(site, target.role, target.path)
            coefficient, matrix = _new_matrix(module, target, self.seed)
            projections.append(
                _NewProjection(
                    target=target, owner=owner, name=name, module=module, coefficient=coefficient, matrix=matrix
                )
            )
        key_coefficient = next((p.coefficient for p in projections if p.target.role == "k"), None)
        return [self._projection(projection, key_coefficient) for projection in projections]

    def _projection(self, new: _NewProjection, key_coefficient: Tensor | None) -> Change:
        """Return the change of one Q or K: an identity, a core after a basis, or new values in place."""
        target = new.target
        bias = None
        if new.bias is not None and self.seed is not None:
            assert isinstance(target.spec, Projection)
            old = new.bias.detach()
            bias = torch.zeros_like(old) if target.spec.init in FRESH else old * target.spec.scale
        identity = None
        if target.spec.init == "identity":
            rows = target.site.heads_of(target.role) * target.site.d_head
            width = target.site.width_of(target.role)
            identity = IdentityProjection(rows, width, target.factor, Replaced(new.module))
        if target.role in self.operation.core_sides:
            # With the core on Q alone, what was split off K moves to Q's side.
            moved = key_coefficient if self.operation.core_sides == ("q",) else None
            if moved is not None:  # one matrix per query head, from one per key head
                moved = moved.repeat_interleave(target.site.heads // target.site.kv_heads, dim=0).mT
            core = self._initial_core(new, moved)
            if bias is not None and moved is not None:
                by_head = bias.to("cpu", moved.dtype).view(target.site.heads, target.site.d_head, 1)
                bias = (moved @ by_head).reshape(-1)
            return partial(setattr, new.owner, new.name, _core_projection(new, identity, core, bias))
        if identity is not None:
            return partial(setattr, new.owner, new.name, identity)
        if self.method.core == "matrix" and target.role == "k" and bias is not None:
            # It would add the same number to every score of a row, which the softmax cancels.
            bias = torch.zeros_like(bias)
        return partial(_set_values, new.owner, new.name, new.matrix, bias)

    def _initial_core(self, new: _NewProjection, moved: Tensor | None) -> Tensor:
        """Return a core's first value: where the basis was split off the weights, the one that restores the function.

        Otherwise it is the identity. Only between a query and a key that are the same slice of the hidden state it is
        a random orthogonal matrix: the identity would make every token attend to itself.
        """
        target, site = new.target, new.target.site
        heads, d_head = site.heads_of(target.role), site.d_head
        if self.method.core == "gain":
            return torch.ones(heads)
        size = target.reach * d_head
        both_identities = self.method.q.init == self.method.k.init == "identity"
        if both_identities and target.role == "q" and self.seed is not None:
            rng = matrices.generator(self.seed, f"{target.path}.core")
            return matrices.orthogonal(heads * d_head, size, heads // target.reach, rng).view(-1, size, size)
        core = torch.eye(d_head).repeat(heads, 1, 1) if new.coefficient is None else new.coefficient
        if moved is not None:
            core = moved @ core
        # Heads that share a core get one matrix with their own cores as blocks on its diagonal.
        by_group = core.view(-1, target.reach, d_head, d_head)
        block_diagonal = torch.eye(target.reach, dtype=core.dtype)[None, :, None, :, None] * by_group[:, :, :, None, :]
        return block_diagonal.reshape(-1, size, size)

    def _find(self, site: Site, role: str, path: str) -> tuple[nn.Module, str, nn.Module]:
        """Return (owner, name, module) of a role's projection: in the model, or in what its fused one is split into."""
        split = self.splits.get(site.fused_path)
        if split is not None and role in split.parts:
            return split, role, split.get_submodule(role)
        parent, _, name = path.rpartition(".")
        return self.model.get_submodule(parent), name, _plain_module(self.model, path)


def _set_values(owner: nn.Module, name: str, weight: Tensor | None, bias: Tensor | None = None) -> None:
    # An adapter may have been put around the module by now: the values go into its base layer.
    module = without_adapter(owner.get_submodule(name))
    with torch.no_grad():
        if weight is not None:
            weight_matrix(module).copy_(weight)
        if bias is not None:
            cast(Tensor, module.bias).copy_(bias)


def _plain_module(model: nn.Module, path: str) -> nn.Module:
    """Return the projection at a path. Raise where it cannot be set and sealed."""
    module = model.get_submodule(path)
    require_projection(module, path)
    require_sealable(cast(Tensor, module.weight), f"{path}.weight")
    return module


def require_sealable(tensor: Tensor, name: str) -> None:
    """Raise for a tensor whose dtype cannot be sealed."""
    if tensor.dtype not in DTYPES.values():
        raise ModelError(
            f"{name} has dtype {tensor.dtype}, not one of {', '.join(DTYPES)}: is it quantised? "
            "Apply the method before quantising"
        )


def _new_matrix(module: nn.Module, target: Target, seed: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (coefficient, matrix): what QR or polar splits off, and the new matrix times its factor.

    The matrix is None where the weight stays as it is, and where there is no seed.
    """
    spec, name = target.spec, f"{target.path}.weight"
    if seed is None or spec.init == "identity" or (spec.init in KEEPING and target.factor == 1.0):
        return None, None
    old = weight_matrix(module).detach()
    work = torch.promote_types(old.dtype, torch.float32)
    rows, width = old.shape
    coefficient = None
    if spec.init not in FRESH and not _all_finite(old):
        raise ModelError(f"{name} holds values that are not finite, and init {spec.init!r} builds on them")
    if spec.init in KEEPING:
        new = old.to("cpu", work)
    elif spec.init == "orthogonal":
        new = matrices.orthogonal(rows, width, target.blocks, matrices.generator(seed, name), work)
    elif spec.init == "hadamard":
        new = matrices.hadamard(rows, width, target.blocks, matrices.generator(seed, name), work)
    elif spec.init == "gaussian":
        std = width**-0.5 if spec.std == "matched" else float(cast(float, spec.std))
        new = matrices.gaussian(rows, width, std, matrices.generator(seed, name), work)
    else:
        factor = matrices.factor_qr if spec.init == "qr" else matrices.factor_polar
        coefficient, new = factor(old.to("cpu", work), target.blocks)
    if target.factor != 1.0:
        new = new * target.factor
    if not _all_finite(new.to(old.dtype)):
        raise MethodError(f"{name}: a factor of {target.factor:g} overflows {old.dtype}; use a smaller scale")
    return coefficient, new


def _all_finite(tensor: Tensor) -> bool:
    """Return True when no value is infinite or not a number. The extremes show it, and need no copy of the tensor."""
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _core_projection(
    new: _NewProjection, identity: IdentityProjection | None, core: Tensor, bias: Tensor | None
) -> CoreProjection:
    """Return the module with a core after the new basis, in the dtype and on the device of the old projection."""
    old = weight_matrix(new.module).detach()

    def parameter(value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(old.device, old.dtype).contiguous())

    replaced = Replaced(new.module)
    if identity is not None:
        built = CoreProjection(identity, parameter(core), None, replaced)
    else:
        if bias is None and new.bias is not None:
            bias = new.bias.detach().clone()
        basis = parameter(old.clone() if new.matrix is None else new.matrix)
        built = CoreProjection(basis, parameter(core), None if bias is None else parameter(bias), replaced)
    return built.train(new.module.training)
