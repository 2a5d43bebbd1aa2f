"""Values and places for the attacks on JSON documents."""

import copy
import random
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


def mutated_record(record: dict[str, Any], randomness: random.Random) -> tuple[dict[str, Any], str]:
    """Return a sealed record with one value removed or exchanged, or with a hash cut or changed, and where."""
    record = copy.deepcopy(record)
    kind = randomness.random()
    if kind < 0.4 and record["frozen"]:
        name = randomness.choice(list(record["frozen"]))
        hashes = record["frozen"][name]
        cut = hashes[: randomness.randrange(len(hashes))]
        digit = randomness.choice("0123456789abcdef")
        record["frozen"][name] = randomness.choice([cut, "", f"{hashes.partition(':')[0]}:{digit * 32}"])
        return record, f"frozen.{name}"
    *above, last = randomness.choice([place for place in places_in(record) if place[0] not in ("version", "frozen")])
    node: Any = record
    for key in above:
        node = node[key]
    if kind < 0.7:
        del node[last]
    else:
        node[last] = randomness.choice([value for value in VALUES if value != node[last]])
    return record, ".".join(map(str, (*above, last)))
