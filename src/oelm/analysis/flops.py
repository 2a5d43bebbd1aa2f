"""The share of training's multiplications that a method removes, from a run's audit: the bound on any saved time.

A trained matrix costs 2 multiply-adds' FLOPs per weight and token forward, 2 for the input's gradient and 2 for its
own. Frozen, it keeps the first 4; an identity costs nothing. The same count as `oelm bench`, from records alone.
"""

from __future__ import annotations

import math
from typing import Any

from .run import Run


def flops_per_token(run: Run) -> float | None:
    """FLOPs that one token's training step must do; none where the records do not hold what that needs."""
    rows = run.audit.get("rows")
    length = (run.config.get("data") or {}).get("sequence_length")
    if not rows or not length:
        return None
    flops, width, attentions = 0.0, 0, {}
    for row in rows:
        shape = row.get("shape") or []
        if len(shape) == 2:
            flops += _matrix(row, math.prod(shape))
        if row.get("role") in ("v", "o") and len(shape) == 2:
            width = max(width, shape[1] if row["role"] == "v" else shape[0])
            attentions[row.get("kind"), row.get("layer")] = shape[0] if row["role"] == "v" else shape[1]
    if not width or not attentions:
        return None
    # Scores and their use: 2 products forward, 4 backward, 2 FLOPs each; a causal mask halves them.
    for (kind, _), size in attentions.items():
        flops += (6 if kind == "decoder" else 12) * size * length
    return flops + _head(run, width)


def flop_ratio(run: Run, reference: Run) -> float | None:
    """FLOPs of a run's step over those of another's."""
    mine, theirs = flops_per_token(run), flops_per_token(reference)
    return mine / theirs if mine and theirs else None


def _matrix(row: dict[str, Any], weights: int) -> float:
    frozen = min(int(row.get("frozen") or 0), weights)
    cost = 4.0 * frozen + 6.0 * (weights - frozen)
    beside = int(row.get("trainable") or 0) - (weights - frozen)
    # What trains beside a matrix and is longer than a bias is a core, and is multiplied with.
    return cost + (6.0 * beside if beside > max(row["shape"]) else 0.0)


def _head(run: Run, width: int) -> float:
    """The output layer of a language model: every token, the whole vocabulary. A classifier's is negligible."""
    if run.task.kind == "classification":
        return 0.0
    fields = (run.config.get("model") or {}).get("fields") or {}
    vocabulary = (run.environment.get("data") or {}).get("vocab_size") or fields.get("vocab_size") or 0
    return 6.0 * width * float(vocabulary)
