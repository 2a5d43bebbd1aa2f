"""Encode labelled examples once, and batch them with others of similar length, padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..corpus.batches import Order, permutation
from .widths import Widths, padded_width, plan_widths

Rows = dict[str, npt.NDArray[np.int64]]

# How many batches' examples are sorted by length together. Fewer mean more padding, more mean less random batches.
_BATCHES_SORTED_TOGETHER = 50
_TEXTS_PER_CALL = 4096


@dataclass(frozen=True, eq=False)
class Encoded:
    """Texts as token ids, concatenated; text i is ids[offsets[i]:offsets[i + 1]].

    `types` are the token type ids, where the model needs them. `truncated` counts the texts that were too long.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    types: npt.NDArray[np.int8] | None
    truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each text."""
        return np.diff(self.offsets)

    def width(self, chosen: Order, widths: Widths = ()) -> int:
        """Return the width that holds the chosen texts: one of `widths`, where there are some."""
        return padded_width(int(self.lengths[chosen].max()), widths)

    def pad(self, chosen: Order, pad_id: int, width: int | None = None) -> Rows:
        """Return the chosen texts as rows of model inputs, padded on the right to `width` or the longest of them."""
        lengths = self.lengths[chosen]
        width = self.width(chosen) if width is None else width
        mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
        positions = np.where(mask, self.offsets[chosen][:, None] + np.arange(width), 0)
        rows = {"input_ids": np.where(mask, self.ids[positions], pad_id).astype(np.int64), "attention_mask": mask}
        if self.types is not None:
            rows["token_type_ids"] = np.where(mask, self.types[positions], 0).astype(np.int64)
        return rows


def encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, longest: int, types: bool = False
) -> Encoded:
    """Encode texts, or pairs of texts, with the tokenizer's special tokens, truncated to `longest` tokens.

    With `types`, token type ids are kept too.
    """
    ids: list[npt.NDArray[np.int32]] = []
    type_ids: list[npt.NDArray[np.int8]] = []
    truncated = 0
    for start in range(0, len(texts), _TEXTS_PER_CALL):
        second = None if pairs is None else list(pairs[start : start + _TEXTS_PER_CALL])
        encoded = tokenizer(list(texts[start : start + _TEXTS_PER_CALL]), second, truncation=True, max_length=longest)
        for encoding in encoded.encodings:
            ids.append(np.array(encoding.ids, dtype=np.int32))
            truncated += bool(encoding.overflowing)
            if types:
                type_ids.append(np.array(encoding.type_ids, dtype=np.int8))
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return Encoded(np.concatenate(ids), offsets, np.concatenate(type_ids) if types else None, truncated)


class LengthGrouped:
    """The order of examples in every epoch, fixed by `seed`: each example once, in batches of similar length.

    An epoch is a whole number of batches, so that it ends where a step ends. When the last batch is short, its
    remaining slots are -1. The order does not depend on how many processes share a batch.
    """

    def __init__(self, lengths: npt.NDArray[np.int64], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed = lengths, batch, seed
        self.slots = -(-len(lengths) // batch) * batch
        self._order = lru_cache(maxsize=1)(self._make_order)

    def chosen(self, first: int, count: int) -> Order:
        """Return the examples in slots first to first + count - 1, counted from the start of the run."""
        slots = np.arange(first, first + count)
        examples = np.empty(count, dtype=np.int64)
        for epoch in np.unique(slots // self.slots):
            in_epoch = slots // self.slots == epoch
            examples[in_epoch] = self._order(int(epoch))[slots[in_epoch] % self.slots]
        return examples

    def whole_batches(self, first: int, count: int) -> Order:
        """Return the examples of all batches that the slots first to first + count - 1 are a part of."""
        start = first // self.batch * self.batch
        chosen = self.chosen(start, -(-(first + count - start) // self.batch) * self.batch)
        return chosen[chosen >= 0]

    def widths(self, lengths: npt.NDArray[np.int64], limit: int, most: int) -> Widths:
        """Return at most `most` widths for this order's batches, when texts have these lengths and at most `limit`.

        The first epoch decides, so that the widths depend on the data, the seed and the size of batches alone.
        """
        chosen = self.chosen(0, self.slots).reshape(-1, self.batch)
        return plan_widths(np.where(chosen < 0, 0, lengths[chosen]).max(1), limit, most)

    def _make_order(self, epoch: int) -> Order:
        shuffled = permutation(self.seed, epoch, len(self.lengths))
        chunk = self.batch * _BATCHES_SORTED_TOGETHER
        parts = np.split(shuffled, range(chunk, len(shuffled), chunk))
        by_length = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in parts])
        full_batches = len(by_length) // self.batch
        batches = by_length[: full_batches * self.batch].reshape(full_batches, self.batch)
        # The batches are shuffled with another random stream than the examples, or the two orders would be related.
        batches = batches[permutation(self.seed, epoch + 2**32, full_batches)]
        order = np.full(self.slots, -1, dtype=np.int64)
        order[: batches.size] = batches.ravel()
        order[batches.size : len(by_length)] = by_length[batches.size :]
        return order
