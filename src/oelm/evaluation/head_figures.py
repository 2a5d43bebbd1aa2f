"""What a head's map says about it, in single figures, and how far two maps are from each other.

Figures are means over queries from the second token on: in a decoder the first token sees itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import entr

from ..runs.looks import Kind, LayerMap

Weights = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


def text_figures(layer_map: LayerMap, ids: Sequence[int], visible: Counts) -> list[dict[str, float | None]]:
    """Return for each head of a layer its figures on one text, by the names in MEASURES.

    `ids` are the tokens that the keys belong to; `visible` says how many keys each query sees.
    """
    weights = layer_map.weights.astype(np.float64)
    entropies = entropy_share(weights, visible)
    figures: list[dict[str, float | None]] = []
    within_one_text = layer_map.kind != "cross"
    matches = _after_earlier_copies(ids) if within_one_text else None
    for head, own in enumerate(weights):
        found: dict[str, float | None] = {"previous": None, "itself": None, "prefix_matching": None}
        if within_one_text:
            found["previous"] = float(own.diagonal(-1).mean())
            found["itself"] = float(own.diagonal()[1:].mean())
        if matches is not None and matches.any():
            rows = matches.any(-1)
            found["prefix_matching"] = float((own * matches).sum(-1)[rows].mean())
        found["first"] = float(own[1:, 0].mean())
        found["entropy"] = entropies[head]
        figures.append(found)
    return figures


def entropy_share(weights: npt.NDArray[np.float64], visible: Counts) -> list[float | None]:
    """Return each head's mean entropy as a share of its maximum, over the queries that see two keys or more."""
    rows = visible > 1
    if not rows.any():
        return [None] * len(weights)
    shares = entr(weights).sum(-1)[:, rows] / np.log(visible[rows])
    return [float(share) for share in shares.mean(-1)]


def induction(weights: Weights) -> list[float]:
    """Return for each head the share of attention on the token after the earlier copy of a query's token.

    `weights` are (rows, heads, 2 L, 2 L), on rows of L different tokens that are repeated once.
    """
    length = weights.shape[-1] // 2
    queries = np.arange(length, 2 * length)
    return [float(share) for share in weights[:, :, queries, queries - length + 1].mean((0, 2), dtype=np.float64)]


def distance(left: Weights, right: Weights) -> list[float]:
    """Return for each head the mean total-variation distance between two maps: 0 alike, 1 nothing in common.

    The first token's is left out, as of all figures.
    """
    halves = np.abs(left.astype(np.float64) - right).sum(-1) / 2
    return [float(mean) for mean in halves[:, 1:].mean(-1)]


def visible_keys(config: Any, kind: Kind, layer: int, queries: int, keys: int) -> Counts:
    """Return how many keys each query of a layer sees: all, those up to itself, or those in its window."""
    everything = np.full(queries, keys, np.int64)
    if kind == "cross":
        return everything
    window = _window(config, layer)
    position = np.arange(queries)
    if kind == "decoder":
        return position + 1 if window is None else np.minimum(position + 1, window)
    if window is None:
        return everything
    return np.minimum(position + window, keys - 1) - np.maximum(position - window, 0) + 1


def _window(config: Any, layer: int) -> int | None:
    """Return how many tokens a layer sees that has only a window of them, or None for one that sees all."""
    local = getattr(config, "attention_layers", None)  # GPT-Neo's
    if local is not None:
        return int(config.window_size) if local[layer] == "local" else None
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (types is not None and types[layer] != "sliding_attention"):
        return None
    return int(window)


def _after_earlier_copies(ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return (queries, keys): True for a key that followed an earlier occurrence of the query's token."""
    tokens = np.asarray(ids)
    follows = np.zeros((len(tokens), len(tokens)), bool)
    follows[:, 1:] = tokens[:, None] == tokens[None, :-1]
    return np.tril(follows, -1)
