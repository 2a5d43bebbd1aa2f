"""Attention masks that do not depend on what is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    return nullcontext() if torch.compiler.is_compiling() else _sdpa_masks_by(_padding_mask)


@contextmanager
def one_text_per_row() -> Iterator[None]:
    """Let transformers' decoders take every row without a mask for one text, and attend to it without a mask.

    Left to themselves they look whether the positions, which they made themselves, start again within a row, and leave
    the mask to a kernel that knows causal attention. While a CUDA graph is recorded they cannot look and, up to 5.17,
    never leave it out: then they make a mask, and a slower kernel attends and draws another dropout.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_packed_texts
    try:
        with _sdpa_masks_by(_causal_mask):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _no_packed_texts(position_ids: Any) -> None:
    """Return what transformers does for rows that hold one text each."""


@contextmanager
def _sdpa_masks_by(make: Callable[..., Any]) -> Iterator[None]:
    """Let `make` take the place of the function with which transformers makes masks for SDPA."""
    registry: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    outer = registry["sdpa"]
    registry["sdpa"] = make
    try:
        yield
    finally:
        del registry["sdpa"]
        if registry["sdpa"] is not outer:  # another such context is around this one
            registry["sdpa"] = outer


def _padding_mask(*arguments: Any, **options: Any) -> Any:
    """Return the mask that transformers makes where it must not leave it out."""
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*arguments, **options)


def _causal_mask(**options: Any) -> Any:
    """Return no mask for causal attention to whole rows without padding, else the one that transformers makes."""
    whole = options["attention_mask"] is None and options["q_length"] == options["kv_length"]
    if whole and options.get("allow_is_causal_skip", False) and options.get("local_size") is None:
        return None
    return masking_utils.sdpa_mask(**options)
