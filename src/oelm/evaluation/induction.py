"""Measure how well a language model repeats random tokens that it has seen once: what induction heads do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ModelError
from .attention_maps import batch_weights
from .head_figures import induction

# Blocks are repeated at these lengths, as far as the model has positions for two of them.
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
# Weights of attention that are held at once, for each head: all of a long row's fill much memory.
_MOST_WEIGHTS = 2**20
# Rows that are read at a time: a model without an end of its positions reads 1,024 tokens in each.
_ROWS = 4


@dataclass(frozen=True)
class PrefixMatching:
    """How much the heads attend from a token of the repetition to the token after its earlier copy.

    heads           the mean weight of each head of each layer; 1 means nothing else is attended to
    best, mean      the largest of them and their mean
    layer, head     where the largest one is, counted from 0
    """

    best: float
    layer: int
    head: int
    mean: float
    heads: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Repetition:
    """What a model makes of random blocks of one length that are repeated at once.

    first_loss, second_loss     nats per token in the block and in its repetition
    accuracy                    the share of the repetition's tokens that it finds most likely
    prefix_matching             what its heads attend to in the repetition; None where `not_measured` says why
    """

    length: int
    first_loss: float
    second_loss: float
    accuracy: float
    prefix_matching: PrefixMatching | None = None
    not_measured: str | None = None


@torch.inference_mode()
def measure_repetition(model: Any, blocks: int = 32, seed: int = 0) -> list[Repetition]:
    """Return how well a model that writes text repeats blocks of random tokens, for several lengths.

    Tokens are drawn from the whole vocabulary, so nothing but the first copy helps with the second one. An
    encoder-decoder reads them in its decoder; its encoder reads its end-of-text token alone.
    """
    if not model.can_generate():
        raise ModelError(
            f"a {type(model).__name__} writes no text, so there is nothing that it could repeat; `oelm look` shows "
            "what its heads attend to"
        )
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
    length = blocks.shape[1]
    ids = torch.cat([blocks, blocks], dim=1).to(model.device)
    parts = [_scores(model, rows) for rows in torch.split(ids, _ROWS)]
    losses, hits = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    # The repetition's own first token is not known beforehand: nothing says that the block ends there.
    second = slice(length, None)
    matching = _prefix_matching(model, ids)
    return Repetition(
        length=length,
        first_loss=float(losses[:, : length - 1].mean()),
        second_loss=float(losses[:, second].mean()),
        accuracy=float(hits[:, second].float().mean()),
        prefix_matching=None if isinstance(matching, str) else matching,
        not_measured=matching if isinstance(matching, str) else None,
    )


def _prefix_matching(model: Any, ids: Tensor) -> PrefixMatching | str:
    """Return how well the heads find what came after an earlier copy, or why that cannot be measured."""
    sums: Any = 0
    for rows in torch.split(ids, max(1, _MOST_WEIGHTS // ids.shape[1] ** 2)):
        texts = (_source(model, rows), rows) if model.config.is_encoder_decoder else (rows,)
        try:
            weights = batch_weights(model, "decoder", *texts)
        except ModelError as error:
            return str(error)
        layers = [own for (kind, _), own in weights.items() if kind == "decoder"]
        if len({own.shape[1] for own in layers}) != 1:
            return f"the layers of {type(model).__name__} have different numbers of heads, or give no weights"
        sums = sums + len(rows) * np.array([induction(own.numpy()) for own in layers])
    scores = sums / len(ids)
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    heads = tuple(tuple(row) for row in scores.tolist())
    return PrefixMatching(heads[layer][head], layer, head, float(scores.mean()), heads)


def _scores(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every token but the first, and whether the model finds it most likely: (rows, tokens - 1)."""
    logits = _next_token_logits(model, ids).float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1), logits.argmax(-1) == ids[:, 1:]


def _next_token_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits for every token but the first, each from the tokens before it."""
    if not model.config.is_encoder_decoder:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[:, :-1]
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels=ids)
    written: Tensor = model(input_ids=_source(model, ids), decoder_input_ids=decoder_ids, use_cache=False).logits
    return written[:, 1:]


def _source(model: Any, ids: Tensor) -> Tensor:
    """Return what the encoder of an encoder-decoder reads: the end of a text alone."""
    end = model.config.eos_token_id
    return torch.full((len(ids), 1), end[0] if isinstance(end, list) else end, device=ids.device)
