"""The modules that replace a projection: split, without a matrix, or with a trained core after a frozen basis.

Each takes and returns tensors of the shapes that the projection did, so the model's own forward pass stays as it is.
Each can be turned back into a plain projection with the same function (`plain`), which is how a model is exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from . import matrices


class IdentityProjection(nn.Module):
    """A projection whose row i reads coordinate i of the hidden state: a slice and a factor, no matrix product."""

    def __init__(self, rows: int, width: int, factor: float, replaced: Replaced) -> None:
        super().__init__()
        self.rows, self.width, self.factor, self.replaced = rows, width, factor, replaced

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor, for model code that initialises every projection or reads its dtype."""
        return torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden if self.rows == hidden.shape[-1] else hidden[..., : self.rows]
        return chosen if self.factor == 1.0 else chosen * self.factor

    def matrix(self) -> Tensor:
        """Return the matrix that it stands for."""
        return matrices.identity(self.rows, self.width) * self.factor

    def plain(self, like: Tensor) -> nn.Module:
        """Return a projection of the replaced class with the same function."""
        return self.replaced.build(self.matrix(), None, like)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, width={self.width}, factor={self.factor}"


class CoreProjection(nn.Module):
    """A frozen basis followed by a small trained core per head: a matrix (heads, d_head, d_head) or a gain (heads,).

    Neighbouring heads may share a matrix, which then reads and writes the rows of all of them: (groups, rows, rows).
    The core acts on activations rather than on the weight, so the product with the basis needs no weight gradient.
    The basis is a frozen weight, or an IdentityProjection, which has none.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        basis: nn.Parameter | IdentityProjection,
        core: nn.Parameter,
        bias: nn.Parameter | None,
        replaced: Replaced,
    ) -> None:
        super().__init__()
        self.identity = basis if isinstance(basis, IdentityProjection) else None
        # Beside an identity this is an empty tensor and no parameter, so it is neither trained nor saved.
        self.weight = basis.weight if isinstance(basis, IdentityProjection) else basis
        self.core = core
        self.register_parameter("bias", bias)
        self.replaced = replaced

    @property
    def groups(self) -> int:
        """Return the number of groups of heads that each have a core."""
        return int(self.core.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.identity(hidden) if self.identity is not None else F.linear(hidden, self.weight)
        out = self._apply_core(projected)
        return out if self.bias is None else out + self.bias

    def _apply_core(self, projected: Tensor) -> Tensor:
        if self.core.ndim == 1:
            by_group = projected.reshape(*projected.shape[:-1], self.groups, -1)
            return (by_group * self.core[:, None]).flatten(-2)
        if self.groups == 1:
            return F.linear(projected, self.core[0])
        by_group = projected.reshape(-1, self.groups, self.core.shape[1]).transpose(0, 1)
        return torch.bmm(by_group, self.core.mT).transpose(0, 1).reshape(projected.shape)

    def plain(self, like: Tensor) -> nn.Module:
        """Return a projection of the replaced class with the same function: the core merged into the basis."""
        weight = self.identity.matrix() if self.identity is not None else self.weight
        basis = weight.detach().to(self.core.device, torch.float64).view(self.groups, -1, weight.shape[1])
        core = self.core.detach().double()
        folded = core[:, None, None] * basis if core.ndim == 1 else core @ basis
        return self.replaced.build(folded.flatten(0, 1), self.bias, like)

    def extra_repr(self) -> str:
        return f"core={tuple(self.core.shape)}, bias={self.bias is not None}"


class SplitProjection(nn.Module):
    """Separate projections in place of a fused one, with their outputs in the order of the fused one's."""

    def __init__(
        self, parts: dict[str, nn.Module], layout: Literal["blocks", "groups"], kv_heads: int, replaced: Replaced
    ) -> None:
        super().__init__()
        self.parts, self.layout, self.kv_heads, self.replaced = tuple(parts), layout, kv_heads, replaced
        for role, module in parts.items():
            self.add_module(role, module)

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor, as an IdentityProjection does: the parts have the weights."""
        return torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = [self.get_submodule(role)(hidden) for role in self.parts]
        if self.layout == "groups":
            return torch.cat([out.unflatten(-1, (self.kv_heads, -1)) for out in outputs], dim=-1).flatten(-2)
        return torch.cat(outputs, dim=-1)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}, kv_heads={self.kv_heads}"


class Replaced:
    """The projection that a module replaced: its class and whether it had a bias, which is enough to build it again."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module)
        self.bias = getattr(module, "bias", None) is not None

    def build(self, matrix: Tensor, bias: Tensor | None, like: Tensor) -> nn.Module:
        """Return a projection of that class with this (rows, width) matrix, in `like`'s dtype and on its device.

        Where the replaced projection had a bias and none is given, the bias is zero.
        """
        rows, width = matrix.shape
        module: nn.Module
        with torch.random.fork_rng(devices=[]):  # the constructor draws values; later draws must not change
            if self.kind is Conv1D:
                module = Conv1D(rows, width)
                matrix = matrix.T
            else:
                module = cast(Callable[..., nn.Module], self.kind)(width, rows, bias=self.bias)
        module = module.to(device=like.device, dtype=like.dtype)
        with torch.no_grad():
            cast(Tensor, module.weight).copy_(matrix)
            if self.bias:
                cast(Tensor, module.bias).zero_() if bias is None else cast(Tensor, module.bias).copy_(bias)
        return module
