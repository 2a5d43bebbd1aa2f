"""Measure how well a language model repeats random tokens that it has seen once: what induction heads do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ModelError

# Blocks are repeated at these lengths, as far as the model has positions for two of them.
LENGTHS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Repetition:
    """What a model makes of random blocks of one length that are repeated at once.

    first_loss, second_loss     nats per token in the block and in its repetition
    accuracy                    the share of the repetition's tokens that it finds most likely
    """

    length: int
    first_loss: float
    second_loss: float
    accuracy: float


@torch.inference_mode()
def measure_repetition(model: Any, blocks: int = 32, seed: int = 0) -> list[Repetition]:
    """Return how well a causal language model repeats blocks of random tokens, for several lengths.

    Tokens are drawn from the whole vocabulary, so nothing but the first copy helps with the second one.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    positions = getattr(model.config, "max_position_embeddings", None)
    lengths = [length for length in LENGTHS if positions is None or 2 * length <= positions]
    if not lengths:
        raise ModelError(f"the model has {positions} positions, and the shortest repetition needs {2 * LENGTHS[0]}")
    return [_repetition(model, _blocks(vocabulary, blocks, length, seed)) for length in lengths]


def _blocks(vocabulary: int, count: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, length), generator=generator)


def _repetition(model: Any, blocks: Tensor) -> Repetition:
    count, length = blocks.shape
    ids = torch.cat([blocks, blocks], dim=1).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(count, -1)
    hits = logits.argmax(-1) == ids[:, 1:]
    # The repetition's own first token is not known beforehand: nothing says that the block ends there.
    second = slice(length, None)
    return Repetition(
        length=length,
        first_loss=float(losses[:, : length - 1].mean()),
        second_loss=float(losses[:, second].mean()),
        accuracy=float(hits[:, second].float().mean()),
    )
