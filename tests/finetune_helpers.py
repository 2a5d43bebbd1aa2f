"""What the tests of fine-tuning share: a small run on built-in data that takes a second or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.config import RunConfig
from oelm.schema import merge
from oelm.training.engine import train

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def fields(output: Path, **changes: Any) -> dict[str, Any]:
    """A small random BERT on built-in opinions, which are synthetic."""
    base: dict[str, Any] = {
        "experiment": "judge",
        "task": {"name": "builtin:sentiment"},
        "model": {"name": "random:bert", "fields": SMALL},
        "optimizer": {"learning_rate": 3e-3},
        "train": {"max_steps": 30, "batch_size": 16, "device": "cpu"},
        "eval": {"every": 15, "sequences": 100, "batch_size": 50},
        "checkpoint": {"every": 1000},
        "log": {"every": 5},
        "output": str(output),
    }
    return merge(base, changes)


def config(output: Path, **changes: Any) -> RunConfig:
    return RunConfig.load(fields(output, **changes))


def run_here(output: Path, **changes: Any) -> dict[str, Any]:
    return train(config(output, **changes), quiet=True)
