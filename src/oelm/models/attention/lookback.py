"""Queries and keys that also depend on the tokens before: a key offset, or a causal convolution.

A token never looks back beyond its own document. How many tokens before it belong to that (`predecessors`) is its
position: 0 at a text's first token, after left padding, and where positions start again in a packed row. The shift
comes before the rotation: what is taken from the token before is rotated with the position of the token that takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..gpt_config import OelmGPTConfig


class KeyOffset(nn.Module):
    """Takes a share of each head's key dimensions from the token before; at a document's first token they are zero.

    Dimension i moves together with i + d_head/2, its partner in a rotation.
    """

    taps = 1
    moved: Tensor

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        assert config.key_dim is not None
        self.share, self.key_dim = config.key_offset, config.key_dim
        self.register_buffer("moved", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        """Return which of a head's dimensions come from the token before."""
        pairs = self.key_dim // 2
        return torch.arange(self.key_dim) % pairs >= round(pairs * (1 - self.share))

    def forward(self, query: Tensor, key: Tensor, past: _Past) -> tuple[Tensor, Tensor]:
        before = past.shifted(key)[1]
        return query, torch.where(self.moved, before, key)


class CausalConvolution(nn.Module):
    """A depthwise convolution over the last tokens, on queries and on keys; it starts as the identity."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        assert config.key_dim is not None
        assert config.num_key_value_heads is not None
        self.taps = config.convolution - 1
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # Tap t multiplies the token t places before. They are what is added to the identity, so that they start at 0,
        # and weight decay draws them back there.
        self.query_taps = nn.Parameter(torch.empty(config.convolution, heads, 1, config.key_dim))
        self.key_taps = nn.Parameter(torch.empty(config.convolution, kv_heads, 1, config.key_dim))

    def forward(self, query: Tensor, key: Tensor, past: _Past) -> tuple[Tensor, Tensor]:
        heads = query.shape[1]
        own = torch.cat([query, key], dim=1)
        taps = torch.cat([self.query_taps, self.key_taps], dim=1)
        mixed = own + sum(tap * states for tap, states in zip(taps, past.shifted(own), strict=True))
        return mixed[:, :heads], mixed[:, heads:]


class _Past:
    """The tokens before those of a call: how many each may see, and the cache with the last ones of earlier calls."""

    def __init__(self, taps: int, predecessors: Tensor, cache: Cache | None, layer: int) -> None:
        self.taps, self.predecessors, self.cache, self.layer = taps, predecessors, cache, layer

    def shifted(self, states: Tensor) -> list[Tensor]:
        """Return the states of (batch, heads, tokens, dim), and those of one, two, ... tokens before, zero beyond."""
        tokens = states.shape[2]
        row = states
        if self.cache is not None:
            # transformers keeps such states as (batch, channels, tokens).
            flat = states.transpose(2, 3).flatten(1, 2)
            flat = self.cache.update_conv_state(flat, self.layer, conv_kernel_size=self.taps)
            row = flat.unflatten(1, (states.shape[1], -1)).transpose(2, 3)
        row = F.pad(row, (0, 0, self.taps, 0))[:, :, -(tokens + self.taps) :]
        out = [states]
        for back in range(1, self.taps + 1):
            visible = (self.predecessors >= back)[:, None, :, None]
            before = row[:, :, self.taps - back : self.taps - back + tokens]
            out.append(torch.where(visible, before, torch.zeros((), dtype=before.dtype, device=before.device)))
        return out


def make_lookback(config: OelmGPTConfig) -> KeyOffset | CausalConvolution | None:
    """Return what lets queries and keys depend on earlier tokens, or None where the config has neither."""
    if config.key_offset:
        return KeyOffset(config)
    return CausalConvolution(config) if config.convolution else None


def look_back(
    module: Any, query: Tensor, key: Tensor, predecessors: Tensor, cache: Cache | None, layer: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys (batch, heads, tokens, dim) after the module's look at the tokens before."""
    out: tuple[Tensor, Tensor] = module(query, key, _Past(module.taps, predecessors, cache, layer))
    return out
