"""Splits a fused QKV projection into separate Linears, and fuses them again, bit for bit.

Masking the gradient of a slice of a fused weight does not freeze it: weight decay still moves it. A frozen part needs
a parameter of its own.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .families import Fused
from .projections import Replaced, SplitProjection
from .sites import require_projection, weight_matrix

Layout = Literal["blocks", "groups"]


def unfuse(module: nn.Module, fused: Fused, heads: int, kv_heads: int) -> SplitProjection:
    """Return the separate projections of a fused one, each a Linear with its own rows of the weight and bias."""
    require_projection(module, fused.path)
    weight, bias = weight_matrix(module), cast("Tensor | None", module.bias)
    layout = cast(Layout, fused.layout)
    parts: dict[str, nn.Module] = {}
    for role, index in role_rows(weight.shape[0], fused.roles, layout, heads, kv_heads).items():
        parts[role] = linear(_take(weight, index), None if bias is None else _take(bias, index), like=module)
    return SplitProjection(parts, layout, kv_heads, Replaced(module))


def fuse(split: SplitProjection, heads: int) -> nn.Module:
    """Return the fused projection that `unfuse` split. Its parts must be plain Linears; no bias counts as zero."""
    parts = {role: split.get_submodule(role) for role in split.parts}
    for role, part in parts.items():
        if type(part) is not nn.Linear:
            raise ModelError(f"part {role!r} is a {type(part).__name__}: only plain Linears can be fused")
    matrices = {role: weight_matrix(part).detach() for role, part in parts.items()}
    total = sum(matrix.shape[0] for matrix in matrices.values())
    first = next(iter(matrices.values()))
    rows = role_rows(total, split.parts, split.layout, heads, split.kv_heads)
    weight = first.new_empty(total, first.shape[1])
    bias = first.new_zeros(total) if split.replaced.bias else None
    for role, part in parts.items():
        weight[rows[role]] = matrices[role]
        part_bias = cast("Tensor | None", part.bias)
        if bias is not None and part_bias is not None:
            bias[rows[role]] = part_bias.detach()
    return split.replaced.build(weight, bias, like=first)


def role_rows(total: int, roles: tuple[str, ...], layout: Layout, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Return which output rows of the fused projection belong to each role."""
    per_group = {"q": heads // kv_heads, "k": 1, "v": 1}
    shares = {role: per_group[role] * kv_heads for role in roles}
    d_head, rest = divmod(total, sum(shares.values()))
    if rest:
        raise ModelError(f"{total} rows cannot be cut into {shares} heads")
    index = torch.arange(total)
    if layout == "blocks":
        return dict(zip(roles, torch.split(index, [share * d_head for share in shares.values()]), strict=True))
    grouped = torch.split(index.view(kv_heads, -1), [per_group[role] * d_head for role in roles], dim=1)
    return {role: part.reshape(-1) for role, part in zip(roles, grouped, strict=True)}


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return a copy of some rows of a tensor; on the meta device, which has no values, only its shape."""
    if tensor.device.type == "meta":
        return tensor.new_empty(len(index), *tensor.shape[1:])
    return tensor.detach()[index.to(tensor.device)]


def linear(weight: Tensor, bias: Tensor | None, like: nn.Module) -> nn.Linear:
    """Return a Linear that owns these tensors, trainable where the module it comes from was."""
    rows, width = weight.shape
    module = nn.Linear(width, rows, bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight.contiguous(), cast(Tensor, like.weight).requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias.contiguous(), cast(Tensor, like.bias).requires_grad)
    return module.train(like.training)
