"""Attention of one new token over a cache of latents, from which every head's keys and values follow.

With a latent c and a rotary channel ρ for each token, head h's key is (U_h c, ρ) and its value W_h c. The query goes
through the transpose of U_h once, and the mixture of latents through W_h once. So no old token's key or value is
computed, and one pass over the cache serves all heads.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from .latent_launch import Device, choose_launch, shared_bytes
from .visible import Visible


@dataclass(frozen=True)
class LatentQuery:
    """The queries of one new token on the latent's side.

    `content` (batch, heads, r) is the transpose of U_h times the query; or (batch, heads, r / heads), where each head's
    key is its slice of the latent. `channel` (batch, heads, p) is the query's rotary part, rotated already.
    """

    content: Tensor
    channel: Tensor | None = None


@dataclass(frozen=True)
class LatentCache:
    """What is cached of every token: `latent` (batch, tokens, r) and `channel` (batch, tokens, p), rotated already.

    Rows may have any strides; the numbers of one row lie side by side. The kernel is fast if 16 divides the strides.
    """

    latent: Tensor
    channel: Tensor | None = None


def read_latents(
    query: LatentQuery,
    cache: LatentCache,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    *,
    visible: Visible | None = None,
    fused: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return every head's output (batch, heads, d_value), and the weights (batch, heads, 1, tokens).

    The output is W_h times the mixture of latents; `values` (heads, d_value, r) has each head's W_h. The mask is None
    or (batch or 1, 1 or heads, 1, tokens or more), boolean (True where to attend) or additive. Where `fused` allows it,
    a GPU kernel computes the output from half-precision tensors, and the weights are None. It reads `visible`, which
    is computed from the mask where it is not given.
    """
    if (query.channel is None) != (cache.channel is None):
        with_channel = "cache" if query.channel is None else "query"
        raise ValueError(
            f"only the {with_channel} has a rotary channel: query and cache must both have one, or neither"
        )
    device = _gpu_with_kernel(query, cache, values, mask) if fused else None
    if device is None:
        return _read_in_torch(query, cache, values, mask, scaling)
    from .latent_kernel import read_on_gpu

    parts = (query.content, query.channel), (cache.latent, cache.channel)
    return read_on_gpu(*parts, values, visible or Visible.of(mask), scaling, device), None


def _read_in_torch(
    query: LatentQuery, cache: LatentCache, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    heads, width = query.content.shape[1:]
    if width < cache.latent.shape[-1]:
        slices = cache.latent.view(*cache.latent.shape[:2], heads, width).transpose(1, 2)
        scores = (query.content[:, :, None] @ slices.mT).squeeze(2)
    else:
        scores = query.content @ cache.latent.mT
    if query.channel is not None and cache.channel is not None:
        scores = scores + query.channel @ cache.channel.mT
    scores = add_mask((scores * scaling)[:, :, None], mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.content.dtype)
    mixture = weights.squeeze(2) @ cache.latent
    return (mixture.transpose(0, 1) @ values.mT).transpose(0, 1), weights


def add_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores with a boolean mask (True where to attend) or an additive one applied.

    All scores stay finite, so that a text with every token hidden gets equal weights instead of NaN.
    """
    if mask is None:
        return scores
    mask, lowest = mask[..., : scores.shape[-1]], torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else (scores + mask).clamp(min=lowest)


def _gpu_with_kernel(query: LatentQuery, cache: LatentCache, values: Tensor, mask: Tensor | None) -> Device | None:
    """Return the GPU if its kernel takes these tensors."""
    if not _is_for_kernel(query, cache, values, mask):
        return None
    # Widths become plain numbers, also where the compiler holds every size as a symbol.
    r, p = operator.index(cache.latent.shape[-1]), 0
    if cache.channel is not None:
        p = operator.index(cache.channel.shape[-1])
    device: Device | None = _constant_gpu(query.content.device.index, r, p)
    return device


def _is_for_kernel(query: LatentQuery, cache: LatentCache, values: Tensor, mask: Tensor | None) -> bool:
    parts = (query.content, query.channel, cache.latent, cache.channel, values)
    return suit_a_kernel([tensor for tensor in parts if tensor is not None], mask)


def suit_a_kernel(tensors: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Return True for tensors of half precision on the current GPU, no gradient, and one mask for all heads."""
    dtype, device = tensors[0].dtype, tensors[0].device
    return (
        tensors[0].is_cuda
        and device.index == torch.cuda.current_device()
        and dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == dtype for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and (mask is None or mask.shape[1] == 1)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_gpu(index: int, r: int, p: int) -> Device | None:
    # The compiler takes the result as a constant and does not trace the query of the device.
    return _query_gpu(index, r, p)


@functools.cache
def _query_gpu(index: int, r: int, p: int) -> Device | None:
    """Return the GPU, or None with one warning that says why the kernel cannot run on it."""
    properties = torch.cuda.get_device_properties(index)
    if find_spec("triton") is None or properties.major < 8:
        reason = "triton is not installed" if properties.major >= 8 else f"{properties.name} is older than Ampere"
    else:
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        device = Device(properties.major, properties.multi_processor_count, shared)
        needed = shared_bytes(choose_launch(r, p, device), r, p)
        if needed <= device.shared_bytes:
            return device
        reason = f"it needs {needed:,} bytes of shared memory, and {properties.name} has {device.shared_bytes:,}"
    width = f"{r:,} + {p:,}"
    warnings.warn(f"attention over cached latents of width {width} cannot use its GPU kernel: {reason}", stacklevel=2)
    return None
