"""The attention weights that transformers' classes return, and how a model is made to return them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..method.spec import Kind

# The outputs that hold weights, with the kind of their attention; None is that of the model's own sites.
_OUTPUTS: Mapping[str, Kind | None] = MappingProxyType(
    {
        "attentions": None,
        "encoder_attentions": "encoder",
        "decoder_attentions": "decoder",
        "cross_attentions": "cross",
    }
)
# What a config has while weights are read. Only the function that computes attention step by step returns them.
_SETTINGS = MappingProxyType({"_attn_implementation": "eager", "output_attentions": True, "use_cache": False})


@contextmanager
def returning_weights(model: Any) -> Iterator[None]:
    """Let the model return its attention weights, without a cache, and be as before afterwards.

    The configs are changed directly: Falcon refuses to be set, and would then leave out its causal mask.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = [
        (config, {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)})
        for config in configs.values()
    ]
    try:
        for config, own_settings in before:
            for name in own_settings:
                setattr(config, name, _SETTINGS[name])
        yield
    finally:
        for config, own_settings in before:
            for name, value in own_settings.items():
                setattr(config, name, value)


def weights_in(out: Any, own_kind: Kind) -> dict[Kind, tuple[Tensor, ...]]:
    """Return the weights (rows, heads, queries, keys) of every layer in a model's output, by the kind of attention.

    `own_kind` is the kind of a model with one stack. Kinds that the class returns no weights of are left out.
    """
    weights: dict[Kind, tuple[Tensor, ...]] = {}
    for name, kind in _OUTPUTS.items():
        layers = out.get(name)
        if layers and all(isinstance(layer, Tensor) for layer in layers):
            weights[kind or own_kind] = tuple(layers)
    return weights
