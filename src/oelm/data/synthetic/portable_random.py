"""Random choices that are the same under every Python: they draw from `random()` alone, whose stream is fixed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Draws:
    """One stream of random choices, fixed by its name."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(name).random

    def one(self, choices: Sequence[_T]) -> _T:
        return choices[int(self.random() * len(choices))]

    def some(self, choices: Sequence[_T], count: int) -> list[_T]:
        """`count` different ones, in random order."""
        random, size = self.random, len(choices)
        places: list[int] = []
        while len(places) < count:
            place = int(random() * size)
            if place not in places:
                places.append(place)
        return [choices[place] for place in places]

    def two(self, choices: Sequence[_T]) -> tuple[_T, _T]:
        """What `some` gives for a count of 2, without its lists: the built-in stories draw 270,000 pairs."""
        random, size = self.random, len(choices)
        first = second = int(random() * size)
        while second == first:
            second = int(random() * size)
        return choices[first], choices[second]

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))
