"""A rotary channel: a small trained part of queries and keys that carries the positions beside the content."""

from __future__ import annotations

from torch import Tensor, nn

from ..gpt_config import OelmGPTConfig
from .interface import split_heads
from .rotary import Rotation, rotate


class RotaryChannel(nn.Module):
    """Gives every head p more query dimensions, and all heads together one key part of p dimensions, both rotated."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        self.dim = config.channel
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.channel, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.channel, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return the query part (batch, heads, tokens, p) and the shared key part (batch, 1, tokens, p)."""
        query, key = split_heads(self.q_proj(hidden), self.dim), self.k_proj(hidden)[:, None]
        return rotate(query, rotation), rotate(key, rotation)
