"""Which cached tokens one new token sees, as a range for each text: a kernel reads three numbers, not a whole mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    return torch.stack([first, end, torch.where(count < end - first, end, 0)], -1).to(torch.int32)


def ranges_for_kernels(mask: Any) -> Tensor | None:
    """Return a token's ranges where a kernel may need them: they are then computed once for all layers."""
    is_mask = isinstance(mask, Tensor) and mask.is_cuda and mask.dtype == torch.bool
    return visible_ranges(mask) if is_mask and mask.ndim == 4 and mask.shape[1:3] == (1, 1) else None
