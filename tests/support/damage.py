"""Values and places for the attacks on JSON documents."""

from collections.abc import Iterator
from typing import Any

VALUES = (
    *(None, True, -1, 0, 10**40, 1e308, -1e308, 1e-320, float("nan"), float("inf")),
    *("", "x", "010", "nan", "\x1b[31mred", "é\u202e"),
    *([], {}, [1], {"a": 1}),
)


def places_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places_in(value, (*path, key))
