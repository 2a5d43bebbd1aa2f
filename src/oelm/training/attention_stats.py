"""Measure how attention spreads in every layer: entropy of its weights and spread of its logits, on real examples.

The statistics come from the queries, keys and masks that the attention function gets, after rotary positions, norms and
fused projections. Most transformers models look that function up by name, so a function that measures and then calls
torch's is registered under a name of its own. Falcon calls torch's function directly, so torch's function is replaced
for one forward pass. DeBERTa, MPNet, GPT-J, GPT-Neo and Gemma 2 use neither: theirs come from the weights that they
return, whose logarithms are the logits up to a constant in each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..method.sites import find_sites
from ..models.returned_weights import returning_weights, weights_in
from .tasks.base import Batch

_MEASURING = "oelm-measuring"

Statistics = dict[str, float]


@torch.no_grad()
def attention_statistics(model: nn.Module, module: nn.Module, batch: Batch) -> list[dict[str, Any]]:
    """Return for each layer: mean attention entropy in nats, its share of the maximum, and the mean logit spread.

    `module` is the model with its loss. Queries that see fewer than two keys have no spread and are left out. The list
    is empty when the number of measured calls is not the number of attention layers.
    """
    device = next(model.parameters()).device
    training = module.training
    measured: list[Statistics] = []
    module.eval()
    try:
        with _measuring(model)(model, measured):
            module(**{name: rows.to(device) for name, rows in batch.items()})
    finally:
        module.train(training)
    labels = _labels(model)
    if len(measured) != len(labels):
        return []
    return [{"label": label, **statistics} for label, statistics in zip(labels, measured, strict=True)]


def _measuring(model: Any) -> Callable[[Any, list[Statistics]], AbstractContextManager[None]]:
    """Return how to measure a model: in its registered function, in torch's own, or by the weights that it returns."""
    if model.config._attn_implementation == "eager":
        return _returned_weights
    # Use the registry if the model looks its attention function up there and uses torch's; else replace torch's itself.
    registered = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
    return _registered_attention if registered else _patched_attention


def _labels(model: nn.Module) -> list[str]:
    """Return the names of all layers' attentions in the order of the forward pass.

    The encoder comes first, then each decoder block's self- and cross-attention in turn. A block that serves several
    layers is named for each of them.
    """
    _, sites = find_sites(model)
    if sites[0].shared:
        config: Any = model.config
        return [f"{sites[0].kind} {layer}" for layer in range(config.num_hidden_layers)]
    ordered = sorted(sites, key=lambda site: (site.kind != "encoder", site.layer, site.kind == "cross"))
    return [f"{site.kind} {site.label}" for site in ordered]


@contextmanager
def _returned_weights(model: Any, measured: list[Statistics]) -> Iterator[None]:
    """Measure the weights that the model returns, which it computes step by step."""
    own_kind = find_sites(model)[1][0].kind

    def measure(base: nn.Module, inputs: Any, out: Any) -> None:
        weights = weights_in(out, own_kind)
        decoder, cross = weights.get("decoder", ()), weights.get("cross", ())
        pairs = zip(decoder, cross, strict=True) if cross else ((own,) for own in decoder)
        for layer in (*weights.get("encoder", ()), *(own for pair in pairs for own in pair)):
            measured.append(_statistics(layer.float().log()))

    hook = model.base_model.register_forward_hook(measure)
    try:
        with returning_weights(model):
            yield
    finally:
        hook.remove()


@contextmanager
def _registered_attention(model: Any, measured: list[Statistics]) -> Iterator[None]:
    """Let the model attend through a registered function that appends to `measured` and then attends as before."""

    def attend(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        causal = options.get("is_causal")
        if causal is None:
            causal = getattr(layer, "is_causal", True)
        causal = causal and mask is None and query.shape[-2] > 1  # a mask, where there is one, hides later keys itself
        scores = _scores(query, key, options.get("scaling"), causal)
        measured.append(_statistics(_masked(_masked(scores, options.get("position_bias")), mask)))
        attended: tuple[Tensor, None] = sdpa_attention_forward(layer, query, key, value, mask, **options)
        return attended

    AttentionInterface.register(_MEASURING, attend)
    AttentionMaskInterface.register(_MEASURING, sdpa_mask)
    model.set_attn_implementation(_MEASURING)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def _patched_attention(model: nn.Module, measured: list[Statistics]) -> Iterator[None]:
    """Replace torch's attention function, for a model that calls it directly, by one that also measures."""
    original = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        scores = _scores(query, key, options.get("scale"), options.get("is_causal", False))
        measured.append(_statistics(_masked(scores, attn_mask)))
        return original(query, key, value, attn_mask=attn_mask, **options)

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _scores(query: Tensor, key: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Return the attention logits in float32, with the key heads repeated for the query heads that share them.

    With `causal`, every key that comes after its query is hidden.
    """
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query.float() @ key.float().transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask as torch's function does: a boolean one is True where to attend, any other is added."""
    if mask is None:
        return scores
    return scores + (mask.float() if mask.dtype != torch.bool else torch.where(mask, 0.0, -math.inf))


def _statistics(scores: Tensor) -> Statistics:
    """Return the mean entropy, entropy share and spread of masked logits, over the rows that see two keys or more."""
    # Masks hide a key by minus infinity, or by the least number of some dtype; bfloat16's is the largest of those.
    visible = scores > torch.finfo(torch.bfloat16).min / 2
    count = visible.sum(-1)
    rows = count > 1
    weights = torch.softmax(scores, -1)
    entropy = -torch.where(visible & (weights > 0), weights * weights.clamp_min(1e-38).log(), 0.0).sum(-1)
    mean = torch.where(visible, scores, 0.0).sum(-1) / count.clamp_min(1)
    variance = torch.where(visible, (scores - mean[..., None]) ** 2, 0.0).sum(-1) / count.clamp_min(1)
    share = entropy / count.clamp_min(2).float().log()
    return {
        "entropy": float(entropy[rows].mean()),
        "entropy_share": float(share[rows].mean()),
        "logit_std": float(variance[rows].sqrt().mean()),
    }
