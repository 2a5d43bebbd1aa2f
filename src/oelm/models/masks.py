"""Attention masks that do not depend on what is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import masking_utils


def unread_masks() -> AbstractContextManager[None]:
    """Return a context in which transformers makes every mask that it is given padding for, without reading it.

    Left to itself it waits for the device, looks whether there is any padding, and makes no mask where there is none:
    another kernel then attends, and draws another dropout. It does not look while code is compiled or a CUDA graph is
    recorded, so a recorded step would not repeat a step that was launched kernel by kernel.
    """
    return nullcontext() if torch.compiler.is_compiling() else _unread_masks()


@contextmanager
def _unread_masks() -> Iterator[None]:
    registry: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    registry["sdpa"] = _sdpa_mask
    try:
        yield
    finally:
        del registry["sdpa"]


@contextmanager
def one_text_per_row() -> Iterator[None]:
    """Let transformers' decoders take every row without a mask for one text, without reading positions to find out.

    They make the positions themselves. Left to themselves they look whether any start again within a row, except while
    a CUDA graph is recorded: then they make a mask for texts packed into a row, and a slower kernel attends.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_packed_texts
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _no_packed_texts(position_ids: Any) -> None:
    """Return what transformers does for rows that hold one text each."""


def _sdpa_mask(*arguments: Any, **options: Any) -> Any:
    """Return the mask that transformers makes for SDPA where it must not leave it out."""
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*arguments, **options)
