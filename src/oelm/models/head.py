"""The GPT's language-model head: the product of hidden states with the vocabulary's matrix, and its loss."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The target of a position that has no loss, as in torch.
_IGNORED = -100
# A GPU's matrix units read rows of whole blocks. For a vocabulary of another size its libraries choose slower kernels.
_BLOCK = 64
# With fewer hidden states, as in generation, writing the filled matrix takes longer than the faster product saves.
_FEWEST_ROWS = 1024
_HAS_TRITON = find_spec("triton") is not None


class OelmGPTHead(nn.Linear):
    """A linear layer without a bias, which fills the vocabulary up to whole blocks within a large product on a GPU.

    Only the product knows of it: the parameter, its gradient and the logits have the vocabulary's own size.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits or, with targets, their cross-entropy alone: summed over all that are not -100."""
        if targets is not None:
            return self._loss(hidden.flatten(0, -2), targets.flatten())
        worthwhile = hidden.is_cuda and hidden.shape[:-1].numel() >= _FEWEST_ROWS
        return filled_product(hidden, self.weight) if worthwhile else F.linear(hidden, self.weight)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if hidden.is_cuda and _HAS_TRITON and self.weight.dtype != torch.float64:
            from .head_loss import summed_head_loss

            return summed_head_loss(hidden, self.weight, targets, _IGNORED)
        logits = F.linear(hidden, self.weight).float()
        return F.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="sum")


def filled_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the same logits as a linear layer, from a weight with rows of zeros up to a multiple of 64."""
    rows = weight.shape[0]
    missing = -rows % _BLOCK
    if not missing:
        return F.linear(hidden, weight)
    return F.linear(hidden, F.pad(weight, (0, 0, 0, missing)))[..., :rows]
