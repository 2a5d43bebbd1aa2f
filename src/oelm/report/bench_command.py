"""What a benchmark was asked for, read from the command in its record."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..config import parse_override, set_field
from ..runs.schema import BenchRow, StepBench

# The options of `oelm bench` that a value follows.
_WITH_VALUE = (
    "--model",
    "--task",
    "--batch-size",
    "--sequence-length",
    "--vocab-size",
    "--rounds",
    "--steps",
    "--peer",
)
_DEFAULT_MODEL = "gpt:tiny"


@dataclass(frozen=True)
class Asked:
    """The model and the settings of a benchmark; `compiled` is None where the command leaves it to the default."""

    model: str
    vocabulary: int | None
    compiled: bool | None
    recorded: bool
    fields: dict[str, Any]

    def count(self, field: str) -> int | None:
        """Return a whole number among the model's fields that the command gives."""
        value = self.fields.get(field)
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class Size:
    """What the time of a step is compared over; None is a model's own."""

    batch: int
    length: int
    width: int | None
    layers: int | None


def asked_for(row: BenchRow) -> Asked:
    """Return what the command that made a row asked for."""
    assert row.origin is not None, "records without a command are left out"
    return _parse(row.origin.command)


def size_of(row: StepBench) -> Size:
    """Return the sizes of a row's step."""
    asked = asked_for(row)
    # Of batch and length only the batch is in a row, but their product follows from its times.
    length = round(row.tokens_per_second * row.step_ms / 1000 / row.batch_size)
    return Size(row.batch_size, length, asked.count("hidden_size"), asked.count("num_hidden_layers"))


@cache
def _parse(command: str) -> Asked:
    options: dict[str, str] = {}
    settings: dict[str, Any] = {}
    words = iter(shlex.split(command))
    for word in words:
        name, sign, value = word.partition("=")
        if name in _WITH_VALUE:
            options[name] = value if sign else next(words, "")
        elif name.startswith("--"):
            options[name] = ""
        elif sign:
            settings = set_field(settings, *parse_override(word))
    train, model = settings.get("train", {}), settings.get("model", {})
    compiled = train.get("compile")
    if "--compile" in options or "--no-compile" in options:
        compiled = compiled if isinstance(compiled, bool) else "--compile" in options
    return Asked(
        model=options.get("--model", _DEFAULT_MODEL),
        vocabulary=int(options["--vocab-size"]) if "--vocab-size" in options else None,
        compiled=compiled if isinstance(compiled, bool) else None,
        recorded=train.get("graphs") is True,
        fields=model.get("fields", {}),
    )
