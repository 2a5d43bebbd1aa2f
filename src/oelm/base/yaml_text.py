"""Read YAML text: the safe subset, without what surprises people or fills the memory."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

# YAML tags of keys that name no field: `<<` merges another mapping and may occur twice.
_NOT_KEYS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
# Values that aliases may make of a text, far more than any config has.
_MOST_VALUES = 100_000
# Numbers that YAML 1.1 reads in base 8 or 60, and people do not: 010 is 8 there, and 1:30 is 90.
_ANOTHER_BASE = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


def parse_yaml(text: str) -> Any:
    """Return the content of YAML or JSON text; raise a one-line ValueError if it is neither, or repeats a key."""
    import yaml

    try:
        loader = _yaml_loader()(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _count_values(root, {}, set())  # before any value is made: a merge copies what it merges
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:  # an impossible date, such as 2026-13-45, is a ValueError
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


@cache
def _yaml_loader() -> Any:
    """Return yaml's safe loader, changed to refuse a repeated key; the original silently keeps the last value."""
    import yaml

    class OneValuePerKey(yaml.SafeLoader):
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._seen: set[yaml.MappingNode] = set()

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            # yaml calls this before it builds a mapping, to add the keys that `<<` merges. Merged keys may repeat the
            # mapping's own, so the check comes before they are added, and only the first time.
            if node not in self._seen:
                self._seen.add(node)
                self._require_distinct(node)
            super().flatten_mapping(node)

        def _require_distinct(self, node: yaml.MappingNode) -> None:
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode) or key_node.tag in _NOT_KEYS:
                    continue
                key, line = self.construct_object(key_node), key_node.start_mark.line + 1
                if key in lines:
                    raise ValueError(f"line {line}: the key {key!r} is on line {lines[key]} already; keep one")
                lines[key] = line

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            self._require_base_ten(node)
            return int(super().construct_yaml_int(node))

        def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
            self._require_base_ten(node)
            return float(super().construct_yaml_float(node))

        def _require_base_ten(self, node: yaml.ScalarNode) -> None:
            if _ANOTHER_BASE.fullmatch(node.value):
                plain = node.value.lstrip("+-0_") if ":" not in node.value else ""
                instead = f"the number {plain or 0}, or " if ":" not in node.value else ""
                raise ValueError(
                    f"line {node.start_mark.line + 1}: {node.value} is a number in another base to YAML; write "
                    f'{instead}the text "{node.value}" in quotes'
                )

    OneValuePerKey.add_constructor("tag:yaml.org,2002:int", OneValuePerKey.construct_yaml_int)
    OneValuePerKey.add_constructor("tag:yaml.org,2002:float", OneValuePerKey.construct_yaml_float)
    return OneValuePerKey


def _count_values(node: Any, counts: dict[int, int], above: set[int]) -> int:
    """Return how many values a document has once its aliases are written out; raise where there is no end to them."""
    if not isinstance(node.value, list):
        return 1
    if id(node) in above:
        raise ValueError("an alias stands within what it names, which has no end")
    if id(node) not in counts:
        # A sequence has nodes, a mapping has pairs of them.
        entries = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        counts[id(node)] = 1 + sum(_count_values(entry, counts, {*above, id(node)}) for entry in entries)
    if counts[id(node)] > _MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    return counts[id(node)]
