"""Rotary positions: pairs of dimensions turned by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .visible import Visible

# Cosines and sines of every position's angles, each (batch or 1, 1, tokens, dimensions).
Rotation = tuple[Tensor, Tensor]


class OelmGPTRotary(nn.Module):
    """Computes the cosines and sines of every position's angles.

    The frequencies follow from the config, so they are a buffer that is never saved.
    """

    frequencies: Tensor

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self.register_buffer("frequencies", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        """Return one frequency per pair of dimensions."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        # As transformers computes them: theta**-exponents differs in its last bit, which shows at late positions.
        return torch.as_tensor(1.0 / self.theta**exponents)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        angles = positions[..., None].float() * self.frequencies.float()
        angles_of_both_halves = torch.cat([angles, angles], dim=-1)[:, None]
        return angles_of_both_halves.cos().to(dtype), angles_of_both_halves.sin().to(dtype)


@dataclass(frozen=True)
class TokenPlaces:
    """Where the tokens of a call stand, computed once for all layers.

    rotation        the rotation of queries and keys at the tokens' positions, or of the channel where there is one;
                    None without rotary positions
    rotary          what computes it for other positions
    predecessors    (batch or 1, tokens): how many tokens before each belong to the same document; None where no
                    attention looks back
    visible         of one new token, what kernels read to know which cached tokens it sees; None where none needs it
    """

    rotation: Rotation | None = None
    rotary: OelmGPTRotary | None = None
    predecessors: Tensor | None = None
    visible: Visible | None = None


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (batch, heads, tokens, d_head) by (cos, sin); dimension i is paired with i + d_head/2."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
