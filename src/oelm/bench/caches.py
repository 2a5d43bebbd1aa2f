"""Caches for whole batches, filled from a context that was read for a few rows, in memory that all arms share.

A benchmark of generation needs a full cache, but not one that was computed row by row: a few rows are read, and copied
into all others. All arms take turns in the same memory, because their caches together may be larger than a GPU's; each
copies its own context in before its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(FLOAT8).max


class Float8Layer(StaticLayer):  # type: ignore[misc]
    """A layer of a static cache with keys and values as 8-bit floats, and one scale per head for each of them.

    The floats are stored as bytes: torch can write bytes to some places of a tensor, but not 8-bit floats.
    """

    def __init__(self, filled: StaticLayer) -> None:
        """Take over the keys and values of a layer; the scales are such that the largest of a head just fits."""
        super().__init__(max_cache_len=filled.max_cache_len)
        self.lazy_initialization(filled.keys[:0], filled.values[:0])
        self.cumulative_length = filled.cumulative_length
        largest = [states.float().abs().amax((0, 2, 3)) for states in (filled.keys, filled.values)]
        self.scales = torch.stack(largest).clamp(min=1e-6) / _FLOAT8_MAX
        self.keys, self.values = self._store(filled.keys, 0), self._store(filled.values, 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the states of new tokens in 8 bits, and return all that is stored."""
        places = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[-2])
        self.keys.index_copy_(2, places, self._store(key_states, 0))
        self.values.index_copy_(2, places, self._store(value_states, 1))
        return self.keys, self.values

    def _store(self, states: Tensor, which: int) -> Tensor:
        scaled = states.float() / self.scales[which][:, None, None]
        return scaled.clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(FLOAT8).view(torch.uint8)


def to_float8(cache: StaticCache) -> StaticCache:
    """Return a filled cache with its keys and values in 8 bits."""
    return _with_layers(cache, [Float8Layer(layer) for layer in cache.layers])


def pairs_of(cache: StaticCache) -> list[Tensor]:
    """Return the keys and the values of every layer, which hold all that grows with the context."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def bytes_per_token(cache: StaticCache) -> float:
    """Return the bytes of one token of one text in the cache."""
    return sum(tensor[0].numel() * tensor.element_size() / tensor.shape[-2] for tensor in pairs_of(cache))


def shared_memory(caches: Sequence[StaticCache], batch: int) -> list[Tensor]:
    """Allocate memory for the keys and values of each layer that is large enough for every one of the caches.

    The caches hold a few rows, the memory is for `batch` rows. Each tensor has memory of its own rather than a slice of
    one allocation: the compiler would take slices for views of one tensor.
    """
    sizes: list[int] = []
    for cache in caches:
        tensors = pairs_of(cache)
        sizes += [0] * (len(tensors) - len(sizes))
        for index, tensor in enumerate(tensors):
            sizes[index] = max(sizes[index], tensor[0].nbytes * batch)
    device = pairs_of(caches[0])[0].device
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def enlarge(rows: StaticCache, batch: int, memory: list[Tensor]) -> StaticCache:
    """Return a cache for `batch` rows in the shared memory; `refill` copies the context into it."""
    layers = []
    slots = iter(memory)
    for layer in rows.layers:
        large = copy(layer)
        for name in ("keys", "values"):
            tensor = getattr(layer, name)
            size = tensor[0].nbytes * batch
            setattr(large, name, next(slots)[:size].view(tensor.dtype).view(batch, *tensor.shape[1:]))
        large.cumulative_length = layer.cumulative_length.clone()
        if hasattr(layer, "conv_states"):  # the last tokens, where queries and keys depend on them
            large.conv_states = {index: _repeated(states, batch) for index, states in layer.conv_states.items()}
        layers.append(large)
    return _with_layers(rows, layers)


def refill(large: StaticCache, rows: StaticCache) -> None:
    """Copy the context of a few rows into all rows of the enlarged cache, in place, so that it is as long again."""
    for target, source in zip(large.layers, rows.layers, strict=True):
        for name, value in vars(source).items():
            if name in ("keys", "values"):
                into = getattr(target, name)
                shape = (len(into) // len(value), *value.shape)
                into.view(shape).copy_(value.expand(shape))
            elif name == "cumulative_length":
                target.cumulative_length.copy_(value)
            elif name == "conv_states":
                for index, states in value.items():
                    target.conv_states[index].copy_(_repeated(states, len(target.conv_states[index])))
            elif isinstance(value, int):
                setattr(target, name, value)  # a sliding window also counts its tokens in Python


def _repeated(states: Tensor, batch: int) -> Tensor:
    return states.repeat(batch // len(states), *(1 for _ in states.shape[1:]))


def _with_layers(cache: StaticCache, layers: list[Any]) -> StaticCache:
    """Return a cache like another with other layers."""
    other = copy(cache)
    other.layers = layers
    return other
