"""What a training step must multiply: the one set of rules for counting it, from a model or from a record.

A weight costs 2 FLOPs per token forward, 2 for its own gradient where it trains, and 2 for its input's gradient where
anything below it trains. Embeddings, norms and biases are not counted, nor what a checkpointed step does again.
"""

from __future__ import annotations


def weight_flops(weights: float, trained: bool, reached: bool) -> float:
    """FLOPs of a matrix for one token. `reached`: its input needs a gradient."""
    return (2.0 + 2.0 * trained + 2.0 * reached) * weights


def attention_flops(width: int, length: int, causal: bool, reached: bool) -> float:
    """FLOPs of one token's scores and of their use: two products forward, four backward; a causal mask halves them."""
    return (6.0 if reached else 2.0) * (1.0 if causal else 2.0) * width * length
