"""The share of training's multiplications that a method removes, from a run's audit: the bound on any saved time.

The rules are those of `oelm bench`, which counts on the model itself, and a plain model's counts are the same. An audit
tells less than a model, though:

- a classifier's head (under 1 %), a projection of the embedding (ELECTRA) and those of relative positions (DeBERTa,
  whose ratio for frozen Q and K is 0.92 here and 0.94 there) are left out;
- what trains below a matrix is the embedding or an audited matrix before it: norms are not seen, nor that the FFN may
  stand beside attention, nor that q, k and v may come out of one tensor (GPT-2's do), which matters only where the body
  is frozen;
- a block that many layers share (ALBERT) is counted once, in both runs of a ratio;
- texts are taken to be as long as the longest that is read, and a pass to hold as many as the config says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..errors import OelmError
from ..method.flop_rules import attention_flops, lora_flops, rotation_flops, weight_flops
from ..method.spec import Adapter, Method
from .run import Run

# What reads the same input, in the order in which a block computes.
_STAGES = (("q", "k", "v"), ("o",), ("ffn_in",), ("ffn_out",))


def flops_per_token(run: Run) -> float | None:
    """FLOPs that one token's training step must do; none where the records do not hold what that needs."""
    rows = run.audit.get("rows")
    length = (run.config.get("data") or {}).get("sequence_length")
    adapter = _adapter(run)
    if not rows or not length or adapter is None:
        return None
    tokens = _sequences(run) * length
    blocks: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rows:
        blocks.setdefault((row.get("kind"), row.get("layer")), []).append(row)
    flops, width = 0.0, 0
    outside = _trained_outside(run.audit)
    reached = outside > 0
    for (kind, _), block in blocks.items():
        for stage in _STAGES:
            together = [row for row in block if _roles(row)[0] in stage]
            flops += sum(_matrix(row, reached, adapter, tokens) for row in together)
            if "q" in stage:
                leads = {role: 1.0 for row in together if reached or row.get("trainable") for role in _roles(row)}
                flops += attention_flops(_attention_width(block), length, kind == "decoder", leads)
            reached = reached or any(row.get("trainable") for row in together)
        width = max([width, *(row["shape"][0] for row in _matrices(block, "o"))])
        width = max([width, *(row["shape"][1] for row in _matrices(block, "v"))])
    return flops + _head(run, width, outside, reached) if width else None


def flop_ratio(run: Run, reference: Run) -> float | None:
    """FLOPs of a run's step over those of another's."""
    mine, theirs = flops_per_token(run), flops_per_token(reference)
    return mine / theirs if mine and theirs else None


def _matrices(block: Iterable[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [row for row in block if row.get("role") == role and len(row.get("shape") or []) == 2]


def _attention_width(block: list[dict[str, Any]]) -> int:
    """All heads' outputs side by side: what O reads, or V writes; V alone may have fewer heads than Q."""
    sizes = [row["shape"][1] for row in _matrices(block, "o")] + [row["shape"][0] for row in _matrices(block, "v")]
    return int(sizes[0]) if sizes else 0


def _roles(row: dict[str, Any]) -> list[str]:
    """The roles of a matrix: its own, or those of a fused one."""
    return str(row.get("role")).split("+")


def _matrix(row: dict[str, Any], reached: bool, adapter: Adapter, tokens: int) -> float:
    frozen, trainable = int(row.get("frozen") or 0), int(row.get("trainable") or 0)
    shape = row.get("shape") or []
    if len(shape) != 2:  # an identity, whose only parameters are its core's
        return weight_flops(trainable, True, reached)
    weights = math.prod(shape)
    still = min(frozen, weights)
    beside = trainable - (weights - still)
    added = _adapter_flops(shape, beside, reached, adapter, tokens) if row.get("role") in adapter.targets else 0.0
    if not added and beside > max(shape):  # more than a bias: a core, which is multiplied with
        added = weight_flops(beside, True, reached)
    reached = reached or (adapter.kind == "oft" and added > 0)  # its matrix reads what was rotated
    return added + weight_flops(still, False, reached) + weight_flops(weights - still, True, reached)


def _adapter_flops(shape: list[int], beside: int, reached: bool, adapter: Adapter, tokens: int) -> float:
    """FLOPs of the adapter beside a matrix; 0 where too few parameters train beside it for one."""
    if adapter.kind == "none":
        return 0.0
    rows, width = shape
    size = adapter.size(width)
    if adapter.kind == "lora" and beside >= size * (rows + width):
        return lora_flops(rows, width, size, reached)
    if adapter.kind == "oft" and beside >= width * (size - 1) // 2:
        return rotation_flops(width, size, tokens, reached)
    return 0.0


def _adapter(run: Run) -> Adapter | None:
    """The adapter that the audit tells of, as the config describes it; none where that cannot be read."""
    if not run.audit.get("adapter"):
        return Adapter()
    try:
        return Method.load(run.config["method"]).adapter
    except (KeyError, OelmError):
        return None


def _sequences(run: Run) -> int:
    """How many sequences pass through a process's model at once; one where the records do not say."""
    train = run.config.get("train") or {}
    share = int(train.get("batch_size") or 1) // int(run.environment.get("world_size") or 1)
    return max(1, min(share, int(train.get("micro_batch_size") or share)))


def _trained_outside(audit: dict[str, Any]) -> float:
    """How many parameters train outside blocks and head, the embedding first of all; older audits do not say: all."""
    counts = [audit.get(key) for key in ("trainable", "blocks", "frozen_in_blocks", "head_trainable")]
    if any(count is None for count in counts):
        return math.inf
    trainable, blocks, frozen, head = (int(count or 0) for count in counts)
    return trainable - (blocks - frozen) - head


def _head(run: Run, width: int, outside: float, reached: bool) -> float:
    """The output layer of a language model: every token, the whole vocabulary. A classifier reads a text once."""
    if run.task.kind == "classification":
        return 0.0
    fields = (run.config.get("model") or {}).get("fields") or {}
    vocabulary = (run.environment.get("data") or {}).get("vocab_size") or fields.get("vocab_size") or 0
    weights = width * float(vocabulary)
    own = run.audit.get("head")  # none where it is the embedding
    trained = bool(run.audit.get("head_trainable")) if own else outside >= weights
    return weight_flops(weights, trained, reached)
