"""What a training step must multiply: the one set of rules for counting it, from a model or from a record.

Counted, as two FLOPs for each multiplication with its addition, and per token:

- a matrix, a core, each of LoRA's two factors: the product forward, the one for its own gradient where it trains, and
  the one for its input's gradient where anything below it trains;
- attention: the two products forward, and of the four backward those that lead to something that trains;
- OFT: the rotation of a matrix's input in blocks, which makes that input one that needs a gradient, and the products
  that make the blocks of their parameters, once in a pass and so shared by its tokens.

Not counted: embeddings, norms, biases, the softmax and whatever else works element by element; the optimiser's update;
what a step does again or for nothing: layers that are checkpointed, scores that a fused attention computes once more
for its backward pass, its gradients for what does not train. A causal mask halves attention here, as it does in a fused
one; plain products compute the masked half too. Otherwise these are the FLOPs that torch counts in plain products.

`reached` says whether something needs a gradient: 0 or 1, or the share of its uses where one block serves many layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from .spec import OFT_TERMS


def weight_flops(weights: float, trained: bool, reached: float) -> float:
    """FLOPs of a matrix for one token. `reached` is its input."""
    return (2.0 + 2.0 * trained + 2.0 * reached) * weights


def attention_flops(width: int, length: int, causal: bool, reached: Mapping[str, float]) -> float:
    """FLOPs of one token's scores and of their use. `reached` are its q, k and v; what is not named is not.

    Backward, the scores' own gradient comes before those of q and k, which are two products, as v's is one.
    """
    query, key, value = (reached.get(role, 0.0) for role in ("q", "k", "v"))
    products = 2.0 + max(query, key) + query + key + value
    return products * (1.0 if causal else 2.0) * width * length


def lora_flops(rows: int, width: int, rank: int, reached: float) -> float:
    """FLOPs of LoRA's factors for one token: the first reads what the matrix reads, the second what the first gives."""
    return weight_flops(rank * width, True, reached) + weight_flops(rows * rank, True, 1.0)


def rotation_flops(width: int, block: int, tokens: int, reached: float) -> float:
    """FLOPs of OFT's rotation for one token, of a pass over so many.

    A block is a sum of powers of a skew matrix: the first two need no product, each of the others one forward, the
    power before it with the matrix, and two backward.
    """
    blocks = width * block
    powers = 3 * (OFT_TERMS - 2) * 2.0 * blocks * block
    return weight_flops(blocks, True, reached) + powers / tokens
