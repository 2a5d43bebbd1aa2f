"""Which cached tokens one new token sees, for kernels: a range for each text, and the mask only where it is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Visible(NamedTuple):
    """What a kernel reads of a mask.

    mask    None, or (batch or 1, 1, 1, tokens or more): boolean (True where to attend) or additive
    ranges  None, or (batch or 1, 3): see `visible_ranges`. Without a mask, all tokens of a range are visible
    """

    mask: Tensor | None = None
    ranges: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None) -> Visible:
        """Return what a kernel needs of any mask."""
        return cls(mask, visible_ranges(mask) if mask is not None and mask.dtype == torch.bool else None)

    @property
    def kind(self) -> str:
        """Return which of the two a kernel reads: none, a range, a range with its boolean mask, an additive mask."""
        if self.mask is None:
            return "none" if self.ranges is None else "range"
        return "boolean" if self.mask.dtype == torch.bool else "additive"


def visible_ranges(mask: Tensor) -> Tensor:
    """Return (batch or 1, 3) of a boolean mask (batch or 1, 1, 1, tokens), True where to attend.

    The numbers are each text's first visible token, the end of its visible tokens, and up to where the mask must still
    be read: 0 where no token in between is hidden. A text with every token hidden has its whole range, with its mask,
    so that all of its tokens weigh the same.
    """
    seen = mask[:, 0, 0]
    tokens = seen.shape[-1]
    position = torch.arange(tokens, dtype=torch.int32, device=mask.device)
    first = torch.where(seen, position, tokens).amin(-1)
    end = torch.where(seen, position + 1, 0).amax(-1)
    count = seen.sum(-1)
    first, end = torch.where(count == 0, 0, first), torch.where(count == 0, tokens, end)
    return _ranges(first, end, torch.where(count < end - first, end, 0))


def _ranges(first: Tensor, end: Tensor, mask_end: Tensor) -> Tensor:
    """Return the three as the columns of one tensor: as running sums, whose result the compiler stores.

    Stacked they would be copied once more in front of each layer's kernel, since the compiler stores no result that it
    could compute again as fast.
    """
    return torch.stack([first, end - first, mask_end - end], -1).cumsum(-1, dtype=torch.int32)


def visible_to_token(mask: Any, cached: int | Tensor, is_padded: bool) -> Visible | None:
    """Return what all layers' kernels read for one new token, computed once; None where each is to see for itself.

    `cached` counts the tokens before, as a tensor where the cache is preallocated. If no text is padded (or packed with
    others), its new token sees all of these and itself, and no kernel needs the mask.
    """
    if isinstance(cached, Tensor) and cached.is_cuda and not is_padded:
        end = cached.view(1) + 1
        return Visible(None, _ranges(torch.zeros_like(end), end, torch.zeros_like(end)))
    is_mask = isinstance(mask, Tensor) and mask.is_cuda and mask.dtype == torch.bool
    return Visible.of(mask) if is_mask and mask.ndim == 4 and mask.shape[1:3] == (1, 1) else None
