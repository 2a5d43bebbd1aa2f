"""The GPT's language-model head: the product of hidden states with the vocabulary's matrix."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

# A GPU's matrix units read rows of whole blocks. For a vocabulary of another size its libraries choose slower kernels.
_BLOCK = 64
# With fewer hidden states, as in generation, writing the filled matrix takes longer than the faster product saves.
_FEWEST_ROWS = 1024


class OelmGPTHead(nn.Linear):
    """A linear layer without a bias, which fills the vocabulary up to whole blocks within a large product on a GPU.

    Only the product knows of it: the parameter, its gradient and the logits have the vocabulary's own size.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        worthwhile = hidden.is_cuda and hidden.shape[:-1].numel() >= _FEWEST_ROWS
        return filled_product(hidden, self.weight) if worthwhile else F.linear(hidden, self.weight)


def filled_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the same logits as a linear layer, from a weight with rows of zeros up to a multiple of 64."""
    rows = weight.shape[0]
    missing = -rows % _BLOCK
    if not missing:
        return F.linear(hidden, weight)
    return F.linear(hidden, F.pad(weight, (0, 0, 0, missing)))[..., :rows]
