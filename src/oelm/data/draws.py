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
        places: list[int] = []
        while len(places) < count:
            place = int(self.random() * len(choices))
            if place not in places:
                places.append(place)
        return [choices[place] for place in places]

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))
