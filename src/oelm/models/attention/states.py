"""Attention of one new token over cached hidden states, from which every head's keys and values follow.

A head's key is its own slice of a state, and its value a matrix times the whole state. Mixing the states first and
projecting the mixture afterwards recomputes no old token's value, and it reads one cache instead of two.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_states(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Return every head's mixture (batch, heads, width) of states (batch, heads, tokens, d_head), and the weights.

    The query is (batch, heads, 1, d_head), the mask None or (batch or 1, 1, 1, tokens or more).
    """
    scores = add_mask(query @ states.mT * scaling, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    # The product is taken slice by slice, as the cache holds them: joining the slices would copy the whole cache.
    mixed = weights.transpose(1, 2) @ states
    return mixed.transpose(1, 2).flatten(2), weights


def mix_states_fused(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return the mixture of `mix_states` from one pass over the cache. Only for tensors that `can_fuse` accepts."""
    from .states_kernel import mix_on_gpu

    return mix_on_gpu(query, states, mask, scaling)


def can_fuse(query: Tensor, states: Tensor) -> bool:
    """Return True for tensors that the kernel takes: half precision, on a GPU with enough shared memory for a tile."""
    _, heads, _, d_head = states.shape
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and states.dtype == query.dtype
        and not (torch.is_grad_enabled() and (query.requires_grad or states.requires_grad))
        and query.device.index == torch.cuda.current_device()
        and _has_shared_memory(query.device.index, heads, d_head)
    )


def add_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores with a boolean mask (True where to attend) or an additive one applied."""
    if mask is None:
        return scores
    mask = mask[..., : scores.shape[-1]]
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_shared_memory(device: int, heads: int, d_head: int) -> bool:
    # The compiler takes the result as a constant and does not trace the query of the device.
    return _query_shared_memory(device, heads, d_head)


@cache
def _query_shared_memory(device: int, heads: int, d_head: int) -> bool:
    if find_spec("triton") is None:
        return False
    from .states_kernel import shared_bytes

    properties = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.major >= 8 and shared_bytes(heads, d_head) <= available
