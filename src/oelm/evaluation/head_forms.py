"""The bilinear form of a head, W_qᵀ W_k: what two tokens must have in common for one to look at the other.

A projection's matrix is what it makes of the unit vectors, whatever module computes it: plain, fused, an identity, a
core after a frozen basis. The gains of norms on queries, keys and the latent belong to the form; the division by a
token's length does not change its rank. Positions, biases and a look at earlier tokens are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..method.fused import Layout, role_rows
from ..method.sites import Site, around_query


@dataclass(frozen=True)
class FormRank:
    """The effective and the numerical rank of a head's form, and the largest that the matrices' shapes allow."""

    effective: float
    numerical: int
    full: int


@torch.inference_mode()
def form_ranks(model: nn.Module, site: Site) -> list[FormRank]:
    """Return the ranks of the forms of a site's heads, in order."""
    query, key = _matrix(model, site, "q"), _matrix(model, site, "k")
    width_of_keys = key.shape[1]
    query_gain, key_gain = (_gain(model, site, name) for name in ("q_norm", "k_norm"))
    query = query if query_gain is None else query * query_gain.repeat(len(query) // len(query_gain))[:, None]
    key = key if key_gain is None else key * key_gain.repeat(len(key) // len(key_gain))[:, None]
    if site.latent:
        key = key @ _to_latent(model, site)
        width_of_keys = min(width_of_keys, key.shape[1])
    queries, keys = list(query.chunk(site.heads)), list(key.chunk(site.kv_heads))
    if site.channel:
        shared = _unit_outputs(model.get_submodule(site.roles["channel_k"]), site.width)
        parts = _unit_outputs(model.get_submodule(site.roles["channel_q"]), site.width).chunk(site.heads)
        queries = [torch.cat([own, part]) for own, part in zip(queries, parts, strict=True)]
        keys = [torch.cat([own, shared]) for own in keys]
    group = site.heads // site.kv_heads
    full = min(site.d_head, site.width, width_of_keys) + site.channel
    return [rank_of(own, keys[head // group], min(full, site.width)) for head, own in enumerate(queries)]


def rank_of(query: Tensor, key: Tensor, full: int) -> FormRank:
    """Return the ranks of queryᵀ key, for matrices (d_head, width); a form of zeros has rank 0.

    Both are factorised first, so that a matrix of d_head rows has to be decomposed and not one of the model's width.
    """
    triangle_q = torch.linalg.qr(query.T.double(), mode="r").R
    triangle_k = torch.linalg.qr(key.T.double(), mode="r").R
    values = torch.linalg.svdvals(triangle_q @ triangle_k.T)
    if not float(values[0]) > 0:
        return FormRank(0.0, 0, full)
    # What float32 weights leave of a singular value that is zero.
    numerical = int((values > values[0] * max(query.shape) * torch.finfo(torch.float32).eps).sum())
    shares = values / values.sum()
    return FormRank(float(torch.special.entr(shares).sum().exp()), numerical, full)


def _matrix(model: nn.Module, site: Site, role: str) -> Tensor:
    """Return the (rows, width) matrix of a role, from its own module or out of the fused one."""
    if site.fused is None or role not in site.fused.roles:
        return _unit_outputs(model.get_submodule(site.roles[role]), site.width_of(role))
    whole = _unit_outputs(model.get_submodule(site.fused_path), site.width)
    fused = site.fused
    rows = role_rows(len(whole), fused.roles, cast(Layout, fused.layout), site.heads, site.kv_heads)
    return whole[rows[role]]


def _unit_outputs(module: nn.Module, width: int) -> Tensor:
    """Return the matrix that a module multiplies with, without its bias: its outputs for the unit vectors."""
    like = next(module.parameters(), torch.empty(0))  # an identity has no parameters
    zeros = torch.zeros(1, width, dtype=like.dtype, device=like.device)
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    difference: Tensor = module(units).double() - module(zeros).double()
    return difference.T.cpu()


def _gain(model: nn.Module, site: Site, name: str) -> Tensor | None:
    """Return what a norm on queries or keys multiplies each dimension by, or None where the attention has none."""
    norm: Any = next((getattr(module, name) for module in around_query(model, site) if hasattr(module, name)), None)
    if norm is None or not hasattr(norm, "weight"):
        return None
    ones = torch.ones_like(norm.weight)
    gain: Tensor = norm(ones)  # some classes multiply by the weight, others by one more than it
    return gain.double().cpu()


def _to_latent(model: nn.Module, site: Site) -> Tensor:
    """Return the matrix from the hidden state to the latent, with the gain of the latent's norm."""
    down = _unit_outputs(model.get_submodule(site.roles["down"]), site.width)
    gain = _gain(model, site, "latent_norm")
    return down if gain is None else down * gain[:, None]
