"""Shared by the tests of fine-tuning: a small run on built-in data that takes a second or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.base.strict import merge
from oelm.config import RunConfig
from oelm.training.engine import train

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def fields(output: Path, **changes: Any) -> dict[str, Any]:
    """Return the fields of a run of a small random BERT on the synthetic built-in opinions."""
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


def labelled_folder(folder: Path, columns: tuple[str, str], order: Any = sorted) -> Path:
    """Write good and bad films as CSV files whose rows have a given order: by default sorted by answer."""
    folder.mkdir()
    for split, size in (("train", 60), ("validation", 100)):
        rows = [(word, f"the {split} film number {i} was {word}") for i in range(size // 2) for word in ("good", "bad")]
        lines = "".join(f"{text},{answer}\n" for answer, text in order(rows))
        (folder / f"{split}.csv").write_text(f"{','.join(columns)}\n{lines}")
    return folder


def run_here(output: Path, **changes: Any) -> dict[str, Any]:
    return train(config(output, **changes), quiet=True)
