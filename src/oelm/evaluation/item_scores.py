"""The standard error of a task's metric over its items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

# More items than this are left out in as many groups, so that a metric of many items is not computed as many times.
_GROUPS = 200


def mean_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of some values, None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def jackknife_error(items: Sequence[Any], metric: Callable[[list[Any]], float]) -> float | None:
    """Return the standard error of any metric of items, by leaving out each in turn, or each of 200 groups of them.

    It needs no random numbers, and for a mean without groups it is `mean_error`. None for fewer than two items.
    """
    groups = min(len(items), _GROUPS)
    if groups < 2:
        return None
    # Item i is in group i mod groups: neighbours in a file, which are often alike, are in different groups.
    without = [metric([item for place, item in enumerate(items) if place % groups != group]) for group in range(groups)]
    centre = fmean(without)
    return math.sqrt((groups - 1) / groups * sum((value - centre) ** 2 for value in without))


def as_numbers(items: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the values of items and, where each is a pair, their weights; empty lists where they are no numbers.

    A pair is a log-likelihood and the number of words or bytes that it is of. Values have the precision of float32.
    """
    if all(_is_number(item) for item in items):
        return [_short(item) for item in items], []
    if all(isinstance(item, tuple | list) and len(item) == 2 and all(map(_is_number, item)) for item in items):
        return [_short(item[0]) for item in items], [_short(item[1]) for item in items]
    return [], []


def _is_number(value: Any) -> bool:
    """Return True for a number or a truth value, of Python or of numpy."""
    return hasattr(value, "__float__") and not isinstance(value, str)


def _short(value: Any) -> float:
    return float(f"{float(value):.7g}")
