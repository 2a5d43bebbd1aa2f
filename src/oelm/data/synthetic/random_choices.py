"""Random choices that are the same in every version of Python.

They use only `random.Random.random()`, whose stream Python keeps fixed; `choice` and `sample` may change.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class RandomChoices:
    """A stream of random choices, determined by its name."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(name).random

    def one(self, choices: Sequence[_T]) -> _T:
        """Return one of the choices."""
        return choices[int(self.random() * len(choices))]

    def sample(self, choices: Sequence[_T], count: int) -> list[_T]:
        """Return `count` different choices in random order."""
        random, size = self.random, len(choices)
        positions: list[int] = []
        while len(positions) < count:
            position = int(random() * size)
            if position not in positions:
                positions.append(position)
        return [choices[position] for position in positions]

    def pair(self, choices: Sequence[_T]) -> tuple[_T, _T]:
        """Return what `sample` returns for a count of 2, but faster: the built-in stories draw 270,000 pairs."""
        random, size = self.random, len(choices)
        first = second = int(random() * size)
        while second == first:
            second = int(random() * size)
        return choices[first], choices[second]

    def between(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self.random() * (high - low + 1))
