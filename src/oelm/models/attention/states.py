"""Attention of one new token over cached hidden states, which are every head's keys and what its values are made of.

A head's key is its own slice of a state, and its value a product with the whole of it. Mixing the states first and
projecting the mixture makes no old token's value again, and it reads the cache once where keys and values are two.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor


def mix(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Every head's mixture (batch, heads, width) of states (batch, heads, tokens, d_head), and its weights.

    The query is (batch, heads, 1, d_head), the mask None or (batch or 1, 1, 1, tokens or more).
    """
    scores = masked(query @ states.mT * scaling, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    # Slice by slice, as the cache has them: put together they would be a copy of it.
    mixed = weights.transpose(1, 2) @ states
    return mixed.transpose(1, 2).flatten(2), weights


def mix_fused(query: Tensor, states: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """What `mix` makes, in one pass over the cache; where `fuses` says that there is a kernel for it."""
    from .states_kernel import mix_on_gpu

    return mix_on_gpu(query, states, mask, scaling)


def fuses(query: Tensor, states: Tensor) -> bool:
    """Whether these tensors are for the kernel: half precision on a GPU that has room for a tile of such states."""
    _, heads, _, d_head = states.shape
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and states.dtype == query.dtype
        and not (torch.is_grad_enabled() and (query.requires_grad or states.requires_grad))
        and query.device.index == torch.cuda.current_device()
        and _has_room(query.device.index, heads, d_head)
    )


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with a mask laid over them: boolean (true where to attend) or additive."""
    if mask is None:
        return scores
    mask = mask[..., : scores.shape[-1]]
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_room(device: int, heads: int, d_head: int) -> bool:
    """Asked once; the compiler asks while it compiles and does not look inside."""
    return _find_room(device, heads, d_head)


@cache
def _find_room(device: int, heads: int, d_head: int) -> bool:
    if find_spec("triton") is None:
        return False
    from .states_kernel import shared_bytes

    about = torch.cuda.get_device_properties(device)
    return about.major >= 8 and shared_bytes(heads, d_head) <= getattr(about, "shared_memory_per_block_optin", 0)
