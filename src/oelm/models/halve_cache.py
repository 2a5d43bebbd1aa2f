"""Halve the generation cache of a pretrained GPT-2 or OPT: it holds hidden states instead of keys and values.

Keys and values are both functions of the hidden state x that enters an attention: k_h = K_h x + a_h, v_h = V_h x + b_h.
So x is enough to keep, and it is as wide as all keys together. For a new token the key matrix moves to the query's
side, q_h . K_h x = (K_h^T q_h) . x; the key's bias adds the same number to every score of a row, which the softmax
ignores. The mixture of states goes through V_h once, and b_h is added once, since the weights sum to 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.opt.modeling_opt import OPTAttention
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError
from ..method.projections import SplitProjection
from ..method.sites import weight_matrix
from .attention.latent_decode import LatentCache, LatentQuery, read_latents

Model = TypeVar("Model", bound=PreTrainedModel)
Rows = tuple[Tensor, Tensor | None]


def halve_cache(model: Model) -> Model:
    """Make a GPT-2 or OPT cache hidden states instead of keys and values, in place: half the memory, the same outputs.

    Parameters keep their names, so `save_pretrained` writes the same checkpoint; after loading it, call this again.
    Works with transformers' DynamicCache and StaticCache. Without a cache, and in training mode, attention is computed
    as before. Raises a ModelError, and changes nothing, for a model whose keys are no plain matrix times the state.
    Returns the model; one that is halved already stays as it is.
    """
    attentions = _checked_attentions(model)
    for attention in attentions:
        attention.__class__ = _HALVED[type(attention)]
    return model


def restore_cache(model: Model) -> Model:
    """Undo `halve_cache` in place: the model caches keys and values again. Returns the model."""
    originals = {halved: original for original, halved in _HALVED.items()}
    for module in model.modules():
        if type(module) in originals:
            module.__class__ = originals[type(module)]
    return model


class HalvedAttention(nn.Module):
    """The part of a halved attention that GPT-2 and OPT share; the original class follows it among the bases.

    Everything but a single new token goes through the original forward pass, which so keeps its attention
    implementation, its masks and its dropout.
    """

    config: Any
    layer_idx: int
    embed_dim: int
    num_heads: int
    scaling: float

    def forward(
        self, hidden_states: Tensor, past_key_values: Cache | None = None, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if past_key_values is None:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)  # type: ignore[no-any-return]
        _require_cache_of_states(past_key_values, self.layer_idx, self.embed_dim)
        # A static cache in use gives its length as a tensor, which is not read here: that would wait for the GPU.
        length = past_key_values.get_seq_length(self.layer_idx)
        is_first_call = isinstance(length, int) and length == 0
        _require_mask(attention_mask, past_key_values, self.layer_idx, is_first_call or hidden_states.shape[1] > 1)
        new = _in_autocast_dtype(hidden_states)[:, None]
        states = past_key_values.update(new, new[..., :0], self.layer_idx)[0][:, 0]
        if is_first_call:
            return self._attend_to_own(hidden_states, states.shape[1], attention_mask, **kwargs)
        if hidden_states.shape[1] == 1 and not self.training and self._scores_take(attention_mask):
            return self._attend_with_moved_query(hidden_states, states, attention_mask)
        expanded = _KeysAndValues(self._by_head(states, "k"), self._by_head(states, "v"))
        return super().forward(  # type: ignore[no-any-return]
            hidden_states, past_key_values=expanded, attention_mask=attention_mask, **kwargs
        )

    @abstractmethod
    def rows(self, role: str) -> Rows:
        """Return the matrix (rows out, width in) and the bias of `k` or `v`. Raise where they are not plain."""

    @abstractmethod
    def query(self, hidden: Tensor) -> Tensor:
        """Return the queries of all heads side by side, not yet scaled."""

    @abstractmethod
    def project(self, mixed: Tensor) -> Tensor:
        """Return the attention's output from its mixed values."""

    def _attend_to_own(
        self, hidden: Tensor, cached: int, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the call's own states only. A static cache is longer than they are, and so are its masks."""
        tokens = hidden.shape[1]
        own_mask = mask[..., :tokens] if isinstance(mask, Tensor) else mask
        out, weights = super().forward(hidden, attention_mask=own_mask, **kwargs)
        return out, weights if weights is None else F.pad(weights, (0, cached - tokens))

    def _scores_take(self, mask: Any) -> bool:
        """Return True when one token's scores can be computed here, with one mask for all heads.

        Flex attention and implementations that a user registered compute something of their own from keys and values.
        """
        implementation = str(self.config._attn_implementation)
        if implementation == "eager" and getattr(self, "reorder_and_upcast_attn", False):
            return False  # GPT-2 then computes scores in float32, whatever the model's dtype
        is_standard = implementation in ("eager", "sdpa") or implementation.startswith("flash_attention")
        return is_standard and (mask is None or mask.ndim == 2 or tuple(mask.shape[1:3]) == (1, 1))

    def _attend_with_moved_query(
        self, hidden: Tensor, states: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with one new token to states (batch, tokens, width) without computing any state's key or value."""
        if mask is not None and mask.ndim == 2:  # flash attention's, which may be shorter than a static cache
            states, mask = states[:, : mask.shape[1]], mask[:, None, None].bool()
        (key_matrix, _), (value_matrix, value_bias) = self.rows("k"), self.rows("v")
        by_head = (self.num_heads, -1, self.embed_dim)
        query = self.query(hidden).reshape(len(hidden), self.num_heads, -1).transpose(0, 1)
        moved = (query @ key_matrix.view(by_head)).transpose(0, 1)
        is_eager = self.config._attn_implementation == "eager"
        values = value_matrix.view(by_head)
        mixed, weights = read_latents(
            LatentQuery(moved), LatentCache(states), values, mask, self.scaling, fused=not is_eager
        )
        out = mixed.flatten(1)[:, None]
        out = self.project(out if value_bias is None else out + value_bias)
        return out, weights if is_eager else None

    def _by_head(self, states: Tensor, role: str) -> Tensor:
        """Return the keys or values of states as (batch, heads, tokens, d_head)."""
        return F.linear(states, *self.rows(role)).view(*states.shape[:2], self.num_heads, -1).transpose(1, 2)


class HalvedGPT2Attention(HalvedAttention, GPT2Attention):  # type: ignore[misc]
    """GPT-2's attention with a cache of hidden states."""

    c_attn: nn.Module
    c_proj: nn.Module
    resid_dropout: nn.Module

    def rows(self, role: str) -> Rows:
        if isinstance(self.c_attn, SplitProjection):
            return _plain_rows(self.c_attn.get_submodule(role), f"layer {self.layer_idx}: c_attn.{role}")
        matrix, bias = _plain_rows(self.c_attn, f"layer {self.layer_idx}: c_attn")
        start = "qkv".index(role) * self.embed_dim
        own = slice(start, start + self.embed_dim)
        return matrix[own], None if bias is None else bias[own]

    def query(self, hidden: Tensor) -> Tensor:
        if isinstance(self.c_attn, SplitProjection):
            return self.c_attn.get_submodule("q")(hidden)  # type: ignore[no-any-return]
        return F.linear(hidden, *self.rows("q"))

    def project(self, mixed: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(mixed))  # type: ignore[no-any-return]


class HalvedOPTAttention(HalvedAttention, OPTAttention):  # type: ignore[misc]
    """OPT's attention with a cache of hidden states."""

    q_proj: nn.Module
    out_proj: nn.Module

    def rows(self, role: str) -> Rows:
        return _plain_rows(self.get_submodule(f"{role}_proj"), f"layer {self.layer_idx}: {role}_proj")

    def query(self, hidden: Tensor) -> Tensor:
        return self.q_proj(hidden)  # type: ignore[no-any-return]

    def project(self, mixed: Tensor) -> Tensor:
        return self.out_proj(mixed)  # type: ignore[no-any-return]


_HALVED: dict[type[nn.Module], type[HalvedAttention]] = {
    GPT2Attention: HalvedGPT2Attention,
    OPTAttention: HalvedOPTAttention,
}
_MODEL_TYPES = {"gpt2": GPT2Attention, "opt": OPTAttention}


class _KeysAndValues:
    """Stands in for the cache in the original forward pass, which then attends to these keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, *new: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values, those of the new tokens included."""
        return self.keys, self.values


def _in_autocast_dtype(hidden: Tensor) -> Tensor:
    """Return the states as a projection under autocast reads them, which is also how keys would have been cached."""
    device = hidden.device.type
    if hidden.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return hidden.to(torch.get_autocast_dtype(device))
    return hidden


def _checked_attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attentions that are to be halved. Raise where one cannot be, or where the model has none."""
    supported = "oelm.halve_cache works on transformers' GPT-2 and OPT models"
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no transformers model: {supported}, before they are wrapped")
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        raise ModelError(f"model_type {config.model_type!r} cannot have its cache halved: {supported}")
    # Each of these makes attention look at something else than the cached past of the same text.
    for field, required in (("is_encoder_decoder", False), ("add_cross_attention", False), ("is_causal", True)):
        value = getattr(config, field, required)
        if value != required:
            raise ModelError(
                f"config.{field} is {value}, but halving the cache needs a decoder with {field}={required}"
            )
    original = _MODEL_TYPES[config.model_type]
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, original)}
    if not attentions:
        raise ModelError(f"{type(model).__name__} has no {original.__name__}: {supported}")
    to_halve = {name: module for name, module in attentions.items() if not isinstance(module, HalvedAttention)}
    for name, attention in to_halve.items():
        _require_halvable(name, attention, original)
    return list(to_halve.values())


def _require_halvable(name: str, attention: Any, original: type[nn.Module]) -> None:
    """Raise unless an attention is the original class and the matrices of its keys and values can be read."""
    if type(attention) is not original:
        raise ModelError(
            f"{name} is a {type(attention).__name__}, not a plain {original.__name__}: wrapped or sharded?"
        )
    for path, module in attention.named_modules():
        # accelerate replaces forward on the module itself, and may have moved the weights away between two calls.
        if "forward" in vars(module):
            raise ModelError(
                f"{name}{path and '.' + path} has its forward replaced, as device_map does to offload weights: "
                "load the model onto its device, or halve the cache before dispatching it"
            )
    for role in ("k", "v"):
        matrix, _ = cast(Any, _HALVED[original]).rows(attention, role)
        if type(matrix) not in (Tensor, nn.Parameter) or not matrix.is_floating_point():
            raise ModelError(f"{name}: the weight of {role} is a {type(matrix).__name__} ({matrix.dtype}): quantised?")


def _plain_rows(projection: nn.Module, name: str) -> Rows:
    """Return a projection's matrix and bias. Raise unless it is a plain matrix product: adapters come later, too."""
    # The exact type counts: quantised and adapter layers subclass Linear.
    if type(projection) not in (nn.Linear, Conv1D):
        kind = f"{type(projection).__module__}.{type(projection).__qualname__}"
        raise ModelError(
            f"{name} is a {kind}, not a plain Linear or Conv1D, so a halved cache would ignore a part of it: merge "
            "adapters or use oelm.export, load the plain model and halve that; do not quantise it"
        )
    return weight_matrix(projection), projection.bias  # type: ignore[return-value]


def _require_cache_of_states(cache: Any, layer_idx: int, width: int) -> None:
    """Raise unless a layer of the cache is new or holds hidden states."""
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ModelError(
            f"past_key_values is a {type(cache).__name__}: a halved cache is a DynamicCache or StaticCache"
        )
    if layer_idx >= len(cache.layers):
        return  # the cache adds the layer by itself
    layer = cache.layers[layer_idx]
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ModelError(
            f"layer {layer_idx} of the {type(cache).__name__} is a {type(layer).__name__}: a halved cache needs plain "
            "layers of a DynamicCache or StaticCache, neither sliding nor quantised"
        )
    if not layer.is_initialized or layer.keys.ndim == 1:
        return
    (_, heads, _, d_head), d_value = layer.keys.shape, layer.values.shape[-1]
    if (heads, d_head, d_value) != (1, width, 0):
        raise ModelError(
            f"layer {layer_idx} of the cache is set up for {heads} heads with keys of {d_head} and values of {d_value} "
            f"numbers, not for hidden states of {width}: it was filled before oelm.halve_cache, or prepared for a "
            "compiled prefill (prefill_chunk_size with a static cache). Start with a new cache"
        )


def _require_mask(mask: Any, cache: Cache, layer_idx: int, is_causal: bool) -> None:
    """Raise for a mask that does not say which places of a static cache are filled."""
    if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], StaticLayer):
        return
    if mask is None and not is_causal:
        raise ModelError("attention_mask is None: with a static cache it must say which of its places are filled")
    if mask is not None and not isinstance(mask, Tensor):
        # A BlockMask reads the cache's length when it is used, after the first layer has increased it.
        raise ModelError(
            f"attention_mask is a {type(mask).__name__}, as flex_attention makes it, and with a static cache it hides "
            "the wrong tokens: use a DynamicCache, or model.set_attn_implementation('sdpa')"
        )
