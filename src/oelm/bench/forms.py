"""Named forms of attention: what an arm of a benchmark changes in the project's GPT, and the preset it goes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

# Dimensions of the rotary channel, where a form has one.
_CHANNEL = 32
_ORTHOGONAL_KEY = {"k": {"init": "orthogonal", "scope": "global", "frozen": True}}


@dataclass(frozen=True)
class GptShape:
    """What a form needs to know of the GPT: its width, its heads and how it encodes positions."""

    width: int
    heads: int
    positions: str


@dataclass(frozen=True)
class Form:
    """A form of attention.

    about               one line about it
    fields              the fields of the GPT's config that it sets, given the GPT's shape
    method              the preset, or the fields of the method, that is applied to the model
    float8_cache        keys and values are stored in 8 bits, which only generation can use
    decodes_rotated     whether generation with rotary positions differs from multi-head attention's
    """

    about: str
    fields: Callable[[GptShape], dict[str, Any]]
    method: str | dict[str, Any] = "baseline"
    float8_cache: bool = False
    decodes_rotated: bool = True


def _nothing(shape: GptShape) -> dict[str, Any]:
    return {}


def _grouped(group: int) -> Callable[[GptShape], dict[str, Any]]:
    def fields(shape: GptShape) -> dict[str, Any]:
        if shape.heads % group:
            raise ConfigError(f"groups of {group} heads do not divide the model's {shape.heads} heads")
        return {"num_key_value_heads": shape.heads // group}

    return fields


def _thin_keys(shape: GptShape) -> dict[str, Any]:
    return {"key_dim": shape.width // shape.heads // 4}


def _states(shape: GptShape) -> dict[str, Any]:
    return {"cache": "states"} | ({} if shape.positions == "learned" else _with_channel(shape))


def _offset(shape: GptShape) -> dict[str, Any]:
    return {"key_offset": 0.5}


def _convolution(shape: GptShape) -> dict[str, Any]:
    return {"convolution": 4}


def _linear(shape: GptShape) -> dict[str, Any]:
    return {"scores": "linear"}


def _latent(divisor: int) -> Callable[[GptShape], dict[str, Any]]:
    return lambda shape: {"latent": shape.width // divisor, **_with_channel(shape)}


def _with_channel(shape: GptShape) -> dict[str, Any]:
    """Return the fields of a rotary channel, which carries the positions where the content was rotated before."""
    return {"channel": _CHANNEL} | ({"positions": "none"} if shape.positions == "rotary" else {})


FORMS: Mapping[str, Form] = {
    "multi-head": Form("the model as it is named", _nothing),
    "grouped-2": Form("two heads share a key and a value", _grouped(2)),
    "grouped-4": Form("four heads share a key and a value", _grouped(4)),
    "multi-query": Form("all heads share one key and one value", lambda shape: {"num_key_value_heads": 1}),
    "shared-kv": Form("K = V: one matrix, and one cache", lambda shape: {"shared_kv": True}),
    "thin-keys": Form("queries and keys of a quarter of the value's dimensions", _thin_keys),
    "states": Form("the cache holds hidden states; with a rotary channel on a modern GPT", _states),
    "identity-key": Form("each head's key is its slice of the hidden state", _nothing, "identity-key", False, False),
    "identity-channel": Form("identity-key with a rotary channel beside the state", _latent(1), "identity-channel"),
    "latent": Form("a trained latent of half the width: multi-head latent attention", _latent(2), "latent-trained"),
    "latent-frozen": Form("a latent of half the width, frozen and orthonormal", _latent(2), "latent-frozen"),
    "latent-frozen-quarter": Form("the same with a quarter of the width", _latent(4), "latent-frozen"),
    "orthogonal-key": Form(
        "a frozen orthogonal key; values follow from cached keys", lambda shape: {"cache": "keys"}, _ORTHOGONAL_KEY
    ),
    "offset": Form("half of each head's key is the token's before it", _offset),
    "convolution": Form("a convolution of width 4 on queries and keys", _convolution),
    "linear": Form("elu + 1, no softmax: what it learns is linear attention's, not its speed", _linear),
    "frozen-offset": Form("Q and K frozen, with a key offset", _offset, "oelm-freeze"),
    "frozen-convolution": Form("Q and K frozen, with a convolution", _convolution, "oelm-freeze"),
    "frozen-channel": Form("Q and K frozen, with a trained rotary channel", _with_channel, "oelm-freeze"),
    "multi-head-fp8": Form("multi-head with an 8-bit cache; only with --decode", _nothing, float8_cache=True),
}

# What `oelm bench --decode` compares on the project's GPT unless arms are named: they fit every size.
DEFAULT_FORMS = ("multi-head", "grouped-2", "multi-query", "shared-kv", "identity-channel", "latent", "latent-frozen")


def form_fields(name: str, shape: GptShape, decode: bool) -> dict[str, Any]:
    """Return the fields of the GPT's config that a form sets; raise where the form does not fit."""
    form = FORMS[name]
    if form.float8_cache and not decode:
        raise ConfigError(f"arm {name!r}: an 8-bit cache has no part in training steps; time it with --decode")
    if decode and not form.decodes_rotated and shape.positions == "rotary":
        raise ConfigError(
            f"arm {name!r}: a rotated key does not follow from a state, so with positions 'rotary' it generates as "
            "multi-head does: use identity-channel, or a GPT with learned positions such as gpt:medium-512"
        )
    try:
        return form.fields(shape)
    except ConfigError as error:
        raise ConfigError(f"arm {name!r}: {error}") from None
