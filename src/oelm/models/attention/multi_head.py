"""The GPT's attention: multi-head, grouped or thin keys, K = V, keys and values of a latent, a rotary channel, linear.

Which of these it is follows from the config; a method may replace or freeze its projections afterwards. The cache holds
keys and values or, where both follow from one tensor, that tensor alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.cache_utils import Cache

from ...method.projections import IdentityProjection
from ..gpt_config import OelmGPTConfig
from .channel import RotaryChannel
from .interface import attend, ends_branch, split_heads, update_cache
from .keys_alone import attend_to_keys
from .latent import attend_to_latents
from .linear import attend_linearly
from .lookback import look_back, make_lookback
from .rotary import TokenPlaces, rotate

# As in transformers' latent attention, so that an export is exact.
_LATENT_EPS = 1e-6


class OelmGPTAttention(nn.Module):
    """Causal self-attention.

    q_proj                  the hidden state to every head's query
    down_proj, latent_norm  the hidden state to the latent (where there is one)
    k_proj, v_proj          the latent, or without one the hidden state, to keys and values
    channel                 the rotary channel of queries and keys (where there is one)
    """

    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.key_dim is not None
        assert config.num_key_value_heads is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.key_dim = config.head_dim, config.key_dim
        self.scaling = (config.key_dim + config.channel) ** -0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = True
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        source = config.latent or width
        self.q_proj = nn.Linear(width, heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(source, kv_heads * self.key_dim, bias=False)
        self.v_proj = None if config.shared_kv else nn.Linear(source, kv_heads * self.head_dim, bias=False)
        self.o_proj = ends_branch(nn.Linear(width, width, bias=False))
        self.down_proj = nn.Linear(width, config.latent, bias=False) if config.latent else None
        self.latent_norm = nn.RMSNorm(config.latent, eps=_LATENT_EPS) if config.latent else None
        self.channel = RotaryChannel(config) if config.channel else None
        self.lookback = make_lookback(config)
        eps = config.layer_norm_eps
        self.q_norm = nn.RMSNorm(self.key_dim, eps=eps) if config.qk_norm != "none" else None
        self.k_norm = nn.RMSNorm(self.key_dim, eps=eps) if config.qk_norm == "both" else None
        if config.orthogonal_key:
            self.k_proj = _keep_orthogonal(self.k_proj)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        places: TokenPlaces,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query = split_heads(self.q_proj(hidden), self.key_dim)
        latent = hidden
        if self.down_proj is not None and self.latent_norm is not None:
            latent = self.latent_norm(self.down_proj(hidden))
        channel_query = channel_key = None
        if self.channel is not None:
            assert places.rotation is not None
            channel_query, channel_key = self.channel(hidden, places.rotation)
        if past_key_values is not None and self.caches_latents():
            query = query if self.q_norm is None else self.q_norm(query)
            parts = (query, channel_query), (latent, channel_key)
            out, weights = attend_to_latents(self, *parts, mask, places, past_key_values, **kwargs)
            return self.o_proj(out.flatten(2)), weights
        key = split_heads(self.k_proj(latent), self.key_dim)
        value = key if self.v_proj is None else split_heads(self.v_proj(latent), self.head_dim)
        query, key = self._look_back_and_normalise(query, key, places, past_key_values)
        if self.config.scores == "linear":
            out = attend_linearly(self, query, key, value, mask, places, past_key_values)
            return self.o_proj(out.flatten(2)), None
        if past_key_values is not None and self.caches_keys():
            own = query, key, value
            out, weights = attend_to_keys(self, own, mask, places, past_key_values, **kwargs)
            return self.o_proj(out.flatten(2)), weights
        if channel_query is not None and channel_key is not None:
            query = torch.cat([query, channel_query], dim=-1)
            key = torch.cat([key, channel_key.expand(-1, key.shape[1], -1, -1)], dim=-1)
        elif places.rotation is not None:
            query, key = rotate(query, places.rotation), rotate(key, places.rotation)
        if past_key_values is not None:
            key, value = update_cache(past_key_values, key, value, self.layer_idx)
        out, weights = attend(self, query, key, value, mask, **kwargs)
        return self.o_proj(out.flatten(2)), weights

    def caches_latents(self) -> bool:
        """Return True when keys and values follow from one tensor: a latent, or states with an identity key.

        A key that is the identity up to a factor costs nothing to move to the query's side, so it is cached like this
        unless something is done to it; an ordinary key only where the config asks for it.
        """
        config = self.config
        if config.scores == "linear":
            return False
        if config.latent or config.cache == "states":
            return True
        plain = config.positions != "rotary" and config.qk_norm != "both" and not config.looks_back
        is_state = isinstance(self.k_proj, IdentityProjection) and self.k_proj.rows == config.hidden_size
        return plain and is_state and not config.shared_kv

    def caches_keys(self) -> bool:
        """Return True when the values follow from the keys, which are cached alone."""
        config = self.config
        plain = config.scores == "softmax" and not (config.channel or config.looks_back)
        automatic = config.shared_kv and plain
        return config.cache == "keys" or (config.cache == "auto" and automatic)

    def _look_back_and_normalise(
        self, query: Tensor, key: Tensor, places: TokenPlaces, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        if self.lookback is not None:
            assert places.predecessors is not None
            query, key = look_back(self.lookback, query, key, places.predecessors, cache, self.layer_idx)
        if self.q_norm is not None:
            query = self.q_norm(query)
        return query, key if self.k_norm is None else self.k_norm(key)


def _keep_orthogonal(linear: nn.Linear) -> nn.Linear:
    """Let torch keep the Linear's weight orthogonal while it trains, and return the Linear.

    torch looks at the first value, which a model that is built on the meta device to be loaded does not have: its
    parametrisation is made on the CPU, of an identity.
    """
    device = linear.weight.device
    if device.type != "meta":
        parametrizations.orthogonal(linear)
        return linear
    with torch.device("cpu"):
        linear = linear.to_empty(device="cpu")
        nn.init.eye_(linear.weight)
        parametrizations.orthogonal(linear)
    return linear.to(device)
