"""The GPT's multi-head attention and its rotary positions.

The cache holds keys and values or, where keys are identities, hidden states.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...method.projections import IdentityProjection
from ..gpt_config import OelmGPTConfig
from .states import add_mask, can_fuse, mix_states, mix_states_fused


class OelmGPTAttention(nn.Module):
    """Causal self-attention through torch's scaled-dot-product kernels.

    Where the key is the identity (`identity-key`, learned positions), keys and values are both functions of the same
    hidden state, so the cache holds that state once instead of a key and a value: half the memory.
    """

    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = ends_branch(nn.Linear(width, width, bias=False))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if past_key_values is not None and rotation is None and self._key_is_state():
            return self._attend_to_states(hidden, mask, past_key_values, **kwargs)
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        out, weights = self._attend(query, key, value, mask, self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_attention)
        dropout = self.config.dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, weights

    def _key_is_state(self) -> bool:
        """Return True when every head's key is its own slice of the hidden state, up to a factor."""
        return isinstance(self.k_proj, IdentityProjection) and self.k_proj.rows == self.config.hidden_size

    def _attend_to_states(
        self, hidden: Tensor, mask: Tensor | None, past_key_values: Cache, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with a cache of hidden states.

        The states are the keys; the key's factor goes into the scaling, and values are computed from the states.
        """
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        scaling = self.scaling * self.k_proj.factor
        query = self.q_proj(hidden).view(shape).transpose(1, 2)
        key = hidden.view(shape).transpose(1, 2)
        key, _ = past_key_values.update(key, key[..., :0], self.layer_idx)
        # Mixing first needs values that are a plain matrix times a state (no adapter) and a mask that fits scores.
        mask_for_scores = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)
        if hidden.shape[1] > 1 or type(self.v_proj) is not nn.Linear or not mask_for_scores:
            states = key.transpose(1, 2).flatten(-2)
            value = self.v_proj(states).view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)
            out, weights = self._attend(query, key, value, mask, scaling, **kwargs)
        else:
            # One new token: mixing the states before projecting them avoids recomputing the value of every old token.
            if self.config._attn_implementation != "eager" and can_fuse(query, key):
                mixed, weights = mix_states_fused(query, key, mask, scaling), None
            else:
                mixed, weights = mix_states(query, key, mask, scaling)
            per_head = self.v_proj.weight.view(-1, self.head_dim, hidden.shape[-1])
            out = (mixed.transpose(0, 1) @ per_head.mT).transpose(0, 1)[:, None]
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights


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


def ends_branch(linear: Any) -> nn.Linear:
    """Mark a Linear as the last of its residual branch, which gives it a smaller initial value."""
    linear.ends_branch = True
    return cast(nn.Linear, linear)


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step and return its weights too. The signature is transformers' attention interface."""
    scores = add_mask(query @ key.mT * scaling, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
