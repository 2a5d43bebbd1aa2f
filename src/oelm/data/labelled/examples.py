"""Examples as token ids: encoded once, batched by number with others of their length, padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..corpus.batches import Order, permutation

Rows = dict[str, npt.NDArray[np.int64]]

# Padded lengths are a multiple of this: GPU kernels like it, and there are fewer shapes.
_MULTIPLE = 8
# Batches that are sorted by length together. Fewer leave more padding, more leave less chance in a batch.
_SORTED_TOGETHER = 50
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Encoded:
    """Texts as token ids one after the other, with where each begins. `cut` of them were longer than allowed."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    types: npt.NDArray[np.int8] | None
    cut: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def pad(self, chosen: Order, pad_id: int) -> Rows:
        """The chosen texts as rows, padded on the right to the longest of them."""
        lengths = self.lengths[chosen]
        width = -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE
        mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
        places = np.where(mask, self.offsets[chosen][:, None] + np.arange(width), 0)
        rows = {"input_ids": np.where(mask, self.ids[places], pad_id).astype(np.int64), "attention_mask": mask}
        if self.types is not None:
            rows["token_type_ids"] = np.where(mask, self.types[places], 0).astype(np.int64)
        return rows


def encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, longest: int, types: bool = False
) -> Encoded:
    """Encode texts, or pairs of them, with the tokens that the tokenizer puts around them, cut at `longest`."""
    ids: list[npt.NDArray[np.int32]] = []
    kinds: list[npt.NDArray[np.int8]] = []
    cut = 0
    for start in range(0, len(texts), _CHUNK):
        second = None if pairs is None else list(pairs[start : start + _CHUNK])
        encoded = tokenizer(list(texts[start : start + _CHUNK]), second, truncation=True, max_length=longest)
        for encoding in encoded.encodings:
            ids.append(np.array(encoding.ids, dtype=np.int32))
            cut += bool(encoding.overflowing)
            if types:
                kinds.append(np.array(encoding.type_ids, dtype=np.int8))
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return Encoded(np.concatenate(ids), offsets, np.concatenate(kinds) if types else None, cut)


class Grouped:
    """An order of examples for every epoch, fixed by `seed`: each once, in batches of about the same length.

    An epoch is a whole number of batches. Where the last is short its remaining places are empty, which is -1 here, so
    that an epoch's end is a step's end, whatever the number of examples. The order does not depend on how many
    processes share a batch.
    """

    def __init__(self, lengths: npt.NDArray[np.int64], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed = lengths, batch, seed
        self.places = -(-len(lengths) // batch) * batch
        self._known: tuple[int, Order] | None = None

    def chosen(self, first: int, count: int) -> Order:
        """The examples at places first to first + count - 1 of the run."""
        places = np.arange(first, first + count)
        found = np.empty(count, dtype=np.int64)
        for epoch in np.unique(places // self.places):
            mine = places // self.places == epoch
            found[mine] = self._order(int(epoch))[places[mine] % self.places]
        return found

    def _order(self, epoch: int) -> Order:
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self._make(epoch))
        return self._known[1]

    def _make(self, epoch: int) -> Order:
        shuffled = permutation(self.seed, epoch, len(self.lengths))
        together = self.batch * _SORTED_TOGETHER
        by_length = np.concatenate(
            [
                part[np.argsort(-self.lengths[part], kind="stable")]
                for part in np.split(shuffled, range(together, len(shuffled), together))
            ]
        )
        whole = len(by_length) // self.batch
        batches = by_length[: whole * self.batch].reshape(whole, self.batch)
        # Another stream than the examples' own, or the two shuffles would be alike.
        batches = batches[permutation(self.seed, epoch + 2**32, whole)]
        order = np.full(self.places, -1, dtype=np.int64)
        order[: batches.size] = batches.ravel()
        order[batches.size : len(by_length)] = by_length[batches.size :]
        return order
