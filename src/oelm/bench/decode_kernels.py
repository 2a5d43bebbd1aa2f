"""Kernels for one token's attention over plain keys and values, registered as transformers' attention functions.

The forms of attention must be compared with the fastest multi-head attention there is, and which kernel that is depends
on the batch, the context and the GPU. So a benchmark tries those of `kernels_for`, and takes the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.gpt_config import OelmGPTConfig
from .caches import FLOAT8

_UNMASKED, _IN_PARTS = "oelm_unmasked", "oelm_in_parts"
# The sizes of a tile that are tried, each with launch options of its own.
_TILES = (64, 128)


@dataclass(frozen=True)
class DecodeKernel:
    """A way to compute one token's attention: a name, transformers' name of its function, and SDPA's backend if any."""

    name: str
    implementation: str
    backend: SDPBackend | None = None

    @contextmanager
    def chosen(self, model: Any) -> Iterator[None]:
        """Let the model use this kernel; what is compiled or recorded in this context keeps it."""
        before = model.config._attn_implementation
        model.config._attn_implementation = self.implementation
        try:
            if self.backend is None:
                yield
            else:
                with sdpa_kernel(self.backend):
                    yield
        finally:
            model.config._attn_implementation = before


def kernels_for(model: Any, device: torch.device, float8_cache: bool) -> list[DecodeKernel]:
    """Return the kernels that can compute a token of the project's GPT; none where only its own way is there."""
    if device.type != "cuda":
        return [DecodeKernel("sdpa", f"{_IN_PARTS}_{_TILES[0]}")] if float8_cache else []
    in_parts = [DecodeKernel(f"split-{tile}", f"{_IN_PARTS}_{tile}") for tile in _TILES]
    if float8_cache:
        return in_parts
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    plain = model.config.model_type == OelmGPTConfig.model_type and not any(
        block.attn.caches_latents() or (block.attn.caches_keys() and model.config.shared_kv)
        for block in model.transformer.h
    )
    if not half or not plain:
        return []
    unmasked = [
        DecodeKernel("flash", _UNMASKED, SDPBackend.FLASH_ATTENTION),
        DecodeKernel("cudnn", _UNMASKED, SDPBackend.CUDNN_ATTENTION),
    ]
    return [DecodeKernel("sdpa", "sdpa"), *unmasked, *(in_parts if find_spec("triton") else [])]


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return what is raised where a kernel does not take a shape, or its tiles do not fit the GPU."""
    if find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError

    return RuntimeError, TritonError


def _attend_unmasked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend to all places of the cache, the few that are not filled yet included: no kernel with a mask is as fast.

    A step reads as many places as the last of its round has to, and takes that long; its tokens are not the model's.
    """
    groups = module.num_key_value_groups
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=groups > 1)
    return out.transpose(1, 2), None


def _attend_in_parts(
    tile: int, module: Any, query: Tensor, key: Tensor, value: Tensor, length: Tensor, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend to the filled places with the project's kernel on a GPU, and with SDPA elsewhere.

    `cache_scales` (layers, 2, key-value heads), where it is given, multiplies keys and values, which are then 8-bit.
    """
    scales = kwargs.get("cache_scales")
    scales = None if scales is None else scales[module.layer_idx]
    if query.is_cuda:
        from .split_kernel import CachedPairs, attend_in_parts

        pairs = CachedPairs(key, value, length, scales)
        return attend_in_parts(query, pairs, scaling, tile)[:, None], None
    if scales is not None:
        key, value = (
            (cached.view(FLOAT8).float() * scale[:, None, None]).to(query.dtype)
            for cached, scale in zip((key, value), scales, strict=True)
        )
    filled = (torch.arange(key.shape[2], device=key.device) < length)[None, None, None]
    groups = module.num_key_value_groups
    out = F.scaled_dot_product_attention(query, key, value, filled, scale=scaling, enable_gqa=groups > 1)
    return out.transpose(1, 2), None


def _count_filled(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, **kwargs: Any) -> Tensor:
    """Return how many places of the cache one token sees: a number instead of a mask, for `_attend_in_parts`."""
    return torch.as_tensor(q_offset + q_length)


AttentionInterface.register(_UNMASKED, _attend_unmasked)
for _tile in _TILES:
    AttentionInterface.register(f"{_IN_PARTS}_{_tile}", partial(_attend_in_parts, _tile))
    AttentionMaskInterface.register(f"{_IN_PARTS}_{_tile}", _count_filled)
