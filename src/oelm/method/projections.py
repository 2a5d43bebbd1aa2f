"""The modules that take a projection's place: unfused, without a matrix, or with a trained core after a frozen basis.

Each computes what the projection it replaces would, so the model's own forward pass stays as it is, and each turns
back into a plain projection with the same function (`plain`), which is how a model is exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from . import matrices as init


class IdentityProjection(nn.Module):
    """Row i of the projection reads coordinate i of the hidden state: a slice and a factor, no matrix, no product."""

    def __init__(self, rows: int, width: int, factor: float, replaced: Replaced) -> None:
        super().__init__()
        self.rows, self.width, self.factor, self.replaced = rows, width, factor, replaced

    @property
    def weight(self) -> Tensor:
        """Empty: for model code that initialises every projection it knows, or reads its dtype."""
        return torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden if self.rows == hidden.shape[-1] else hidden[..., : self.rows]
        return chosen if self.factor == 1.0 else chosen * self.factor

    def matrix(self) -> Tensor:
        """The matrix that it stands for."""
        return init.identity(self.rows, self.width) * self.factor

    def plain(self, like: Tensor) -> nn.Module:
        return self.replaced.build(self.matrix(), None, like)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, width={self.width}, factor={self.factor}"


class CoreProjection(nn.Module):
    """A frozen basis followed by a small trained core per head: a matrix (heads, d_head, d_head) or a gain (heads,).

    Neighbouring heads may share a matrix, which then reads and writes all of theirs: (groups, rows, rows).
    The core acts on activations rather than on the weight: the product with the basis then needs no weight gradient.
    The basis is a frozen weight, or an IdentityProjection, which has none.
    """

    weight: Tensor
    core: nn.Parameter
    bias: nn.Parameter | None
    identity: IdentityProjection | None

    def __init__(
        self,
        basis: nn.Parameter | IdentityProjection,
        core: nn.Parameter,
        bias: nn.Parameter | None,
        replaced: Replaced,
    ) -> None:
        super().__init__()
        self.identity = basis if isinstance(basis, IdentityProjection) else None
        # Next to an identity it is that one's empty tensor: no parameter, so neither trained nor saved.
        self.weight = basis.weight if isinstance(basis, IdentityProjection) else basis
        self.core = core
        self.register_parameter("bias", bias)
        self.replaced = replaced

    @property
    def groups(self) -> int:
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
        weight = self.identity.matrix() if self.identity is not None else self.weight
        basis = weight.detach().to(self.core.device, torch.float64).view(self.groups, -1, weight.shape[1])
        core = self.core.detach().double()
        folded = core[:, None, None] * basis if core.ndim == 1 else core @ basis
        return self.replaced.build(folded.flatten(0, 1), self.bias, like)

    def extra_repr(self) -> str:
        return f"core={tuple(self.core.shape)}, bias={self.bias is not None}"


class SplitProjection(nn.Module):
    """What was one fused projection as separate ones, its output laid out as the fused one's was."""

    def __init__(
        self,
        parts: dict[str, nn.Module],
        layout: Literal["blocks", "groups"],
        kv_heads: int,
        replaced: Replaced,
    ) -> None:
        super().__init__()
        self.parts, self.layout, self.kv_heads, self.replaced = tuple(parts), layout, kv_heads, replaced
        for role, module in parts.items():
            self.add_module(role, module)

    @property
    def weight(self) -> Tensor:
        """Empty, as an IdentityProjection's: the parts have the weights."""
        return torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = [self.get_submodule(role)(hidden) for role in self.parts]
        if self.layout == "groups":
            return torch.cat([out.unflatten(-1, (self.kv_heads, -1)) for out in outputs], dim=-1).flatten(-2)
        return torch.cat(outputs, dim=-1)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}, kv_heads={self.kv_heads}"


class Replaced:
    """What a module took the place of: its class and whether it had a bias; enough to build it again."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module)
        self.bias = getattr(module, "bias", None) is not None

    def build(self, matrix: Tensor, bias: Tensor | None, like: Tensor) -> nn.Module:
        """A projection of that class with this (rows, width) matrix, in `like`'s dtype and on its device.

        A bias that the class has and the new function does not is zero.
        """
        rows, width = matrix.shape
        module: nn.Module
        with torch.random.fork_rng(devices=[]):  # a constructor draws first values; an export must not move the stream
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
