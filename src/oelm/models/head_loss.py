"""The head's summed cross-entropy on a GPU, which computes its gradients in the same pass.

The logits are the largest tensor of a training step. Here they are overwritten by their gradient as soon as the loss is
known, and both products with that gradient follow at once. So there is one such tensor where there would be three, it
is read and written as seldom as possible, and only for some rows at a time if need be.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Rows that are taken at a time have logits of at most this many bytes. On an H200, parts of half this size took as long
# as all rows at once, and parts of an eighth of it about 15 % longer.
_MOST_BYTES = 2**30


def summed_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Return the cross-entropy, summed over the rows of hidden states whose target is not ignored, in float32.

    The product is computed in autocast's type. The weight may be of another type, and so is its gradient.
    """
    autocast = torch.is_autocast_enabled("cuda")
    hidden = hidden.to(torch.get_autocast_dtype("cuda") if autocast else weight.dtype)
    return cast(Tensor, _HeadLoss.apply(hidden, weight, targets, ignored))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        ctx.weight_trains = ctx.needs_input_grad[1]
        loss: Tensor
        loss, of_hidden, of_weight = loss_and_gradients(hidden, weight, targets, ignored, ctx.weight_trains)
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (of_hidden, of_weight), upstream = ctx.saved_tensors, gradients[0]
        return of_hidden * upstream, of_weight * upstream if ctx.weight_trains else None, None, None


@torch.library.custom_op("oelm::head_loss", mutates_args=())
def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, weight_trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients to the hidden states (rows, width) and to the weight (classes, width).

    The weight's is empty if it does not train. All three products have classes of zeros up to a multiple of 64: a GPU's
    matrix units read rows of whole blocks, and for another number of classes its libraries choose slower kernels.
    """
    from .head_kernel import replace_by_gradient

    classes, rows = weight.shape[0], hidden.shape[0]
    filled = _filled(weight, hidden.dtype)
    of_hidden = torch.empty_like(hidden)
    of_weight = torch.empty_like(filled if weight_trains else filled[:0], dtype=weight.dtype)
    chunk = max(1, min(rows, _MOST_BYTES // (filled.shape[0] * filled.element_size())))
    losses = []
    for first in range(0, rows, chunk):
        part = hidden[first : first + chunk]
        logits = part @ filled.T
        losses.append(replace_by_gradient(logits, targets[first : first + chunk], classes, ignored))
        torch.mm(logits, filled, out=of_hidden[first : first + chunk])
        if weight_trains:
            _add_product(of_weight, logits.T, part, new=first == 0)
    return torch.cat(losses).double().sum().float(), of_hidden, of_weight[:classes]


@loss_and_gradients.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, weight_trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight = torch.empty_like(weight if weight_trains else weight[:0])
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden), of_weight


def _filled(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in another type, with rows of zeros up to a multiple of 64."""
    rows = weight.shape[0]
    filled = weight.new_empty(rows + -rows % 64, weight.shape[1], dtype=dtype)
    filled[:rows].copy_(weight)
    filled[rows:].zero_()
    return filled


def _add_product(total: Tensor, left: Tensor, right: Tensor, new: bool) -> None:
    """Add a product to a total in the total's type; a new total is overwritten."""
    if new:
        torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
