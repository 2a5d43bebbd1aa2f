"""Rotary position embeddings: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..gpt_config import OelmGPTConfig


class OelmGPTRotary(nn.Module):
    """Computes the cosines and sines of every position's angles.

    The frequencies follow from the config, so they are a buffer that is never saved.
    """

    frequencies: Tensor

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.register_buffer("frequencies", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        """Return one frequency per pair of dimensions of a head."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return torch.as_tensor(self.theta**-exponents)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.frequencies.float()
        angles_of_both_halves = torch.cat([angles, angles], dim=-1)[:, None]
        return angles_of_both_halves.cos().to(dtype), angles_of_both_halves.sin().to(dtype)


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys (batch, heads, tokens, d_head) by (cos, sin); dimension i is paired with i + d_head/2."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
