"""What the GPT's attentions share: the call of transformers' attention functions, and heads as a dimension."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .latent_decode import add_mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention's output (batch, tokens, heads, d_value), and the weights where the function gives them.

    `module` has the config, the scaling and the number of query heads for each key head. Queries, keys and values are
    (batch, heads, tokens, dimensions). `kwargs` go to the attention function; `scaling` replaces the module's.
    """
    config = module.config
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, _eager_attention)
    dropout = config.dropout if module.training else 0.0
    scaling = kwargs.pop("scaling", module.scaling)
    d_value = value.shape[-1]
    narrower = config._attn_implementation == "sdpa" and query.is_cuda and query.shape[-1] > d_value
    pad = narrower and not _takes_narrow_values(query.device.index)
    if pad:  # flash attention takes keys and values of one width
        value = F.pad(value, (0, query.shape[-1] - d_value))
    out, weights = function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    return (out[..., :d_value] if pad else out), weights


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_narrow_values(index: int) -> bool:
    """Return True for GPUs on which torch prefers cuDNN's attention, which takes values narrower than the keys."""
    return torch.cuda.get_device_capability(index) in ((9, 0), (10, 0))


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return (batch, tokens, heads * head_dim) as (batch, heads, tokens, head_dim)."""
    return projected.view(*projected.shape[:-1], -1, head_dim).transpose(1, 2)


def update_cache(cache: Cache, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Add a call's tensors (batch, heads, tokens, dim) to a layer of the cache, and return all that it holds then.

    Raise when the layer was filled by an attention of another form.
    """
    held = cache.layers[layer] if layer < len(cache.layers) else None
    if held is not None and held.is_initialized:
        has, adds = (_sizes_per_token(pair) for pair in ((held.keys, held.values), (keys, values)))
        if has != adds:
            raise ValueError(
                f"layer {layer} of the cache holds (heads, dimensions) {has[0]} and {has[1]} per token, but this "
                f"attention adds {adds[0]} and {adds[1]}: give each model a cache of its own"
            )
    updated: tuple[Tensor, Tensor] = cache.update(keys, values, layer)
    return updated


def _sizes_per_token(pair: tuple[Tensor, Tensor]) -> list[tuple[int, int]]:
    """Return the heads and dimensions of two tensors (batch, heads, tokens, dim)."""
    return [(one.shape[1], one.shape[3]) for one in pair]


def ends_branch(linear: Any) -> nn.Linear:
    """Mark a Linear as the last of its residual branch, which gives it a smaller initial value."""
    linear.ends_branch = True
    return cast(nn.Linear, linear)


def _eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step and return its weights too. The signature is transformers' attention interface."""
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = add_mask(query @ key.mT * scaling, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
