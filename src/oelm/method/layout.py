"""The layout of a model family: where its blocks and projections live, and how they are fused. Types only.

`families.py` holds the table of known layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import FamilyError
from .spec import Kind

Config = Any  # a transformers config: every family has its own class
# A value of the config: its attribute's name, or a function of the config.
FromConfig = str | Callable[[Config], Any]


@dataclass(frozen=True)
class Fused:
    """One Linear or Conv1D that holds several projections.

    `layout` is the order of its output rows: "blocks" for all of Q, all of K, all of V; "groups" for the queries of
    one key-value head, its key, its value, then the next (with as many key-value heads as heads: per head q, k, v).
    """

    path: str
    roles: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
    layout: Literal["blocks", "groups"] | Callable[[Config], Literal["blocks", "groups"]] = "blocks"


@dataclass(frozen=True)
class Stack:
    """A sequence of blocks that each hold one attention of one kind. All paths but `block` are below the block.

    Where a block holds a second attention (cross-attention), its feed-forward layer is named in one of the two stacks.
    """

    kind: Kind
    block: str
    layers: FromConfig = "num_hidden_layers"
    q: str = ""
    k: str = ""
    v: str = ""
    o: str = ""
    fused: Fused | None = None
    ffn_in: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    ffn_out: str = ""
    heads: FromConfig = "num_attention_heads"
    kv_heads: FromConfig | None = None
    present: Callable[[Config], bool] = lambda config: True


@dataclass(frozen=True)
class Family:
    """A layout shared by one or more model types.

    meets        what acts on Q and K besides each other (rotary positions, a norm, relative positions), if anything:
                 a core then goes on each side instead of between them
    qk_norm      Q and K are normalised after their projections, which cancels any scale
    scales       the attention divides its scores by sqrt(d_head) itself; where it does not, Q's matrix carries that
    shared       one block serves all layers, so there are no layers to choose from
    """

    stacks: tuple[Stack, ...]
    meets: Callable[[Config], str | None] = lambda config: None
    qk_norm: bool = False
    scales: Callable[[Config], bool] = lambda config: True
    shared: bool = False


def read(config: Config, source: FromConfig) -> Any:
    """Return a value of the config, by attribute name or function. Raise, naming the field, where there is none."""
    if not isinstance(source, str):
        return source(config)
    value = getattr(config, source, None)
    if value is None:
        raise FamilyError(f"the config of model_type {config.model_type!r} has no field {source!r}")
    return value
