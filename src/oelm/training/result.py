"""The result of a finished run: its figures, what they cost, and what must be known to read them."""

from __future__ import annotations

import math
from typing import Any

from ..base.files import read_record
from ..config import RunConfig
from ..errors import FileError
from ..runs.folder import RunFolder, ending
from .checkpoint import TrainState, list_checkpoints
from .length import RunLength
from .tasks.base import MetricDict, Task
from .trackers import flat


def result_of(
    config: RunConfig,
    task: Task,
    length: RunLength,
    state: TrainState,
    audit: dict[str, Any],
    timing: dict[str, Any],
    evaluations: dict[str, MetricDict],
    peak_memory: int | None,
    processes: int,
) -> dict[str, Any]:
    """The content of result.json."""
    about = task.describe()
    found = task.result_fields(state.last, state.best)
    return {
        "status": "finished",
        "id": config.id,
        "task": {"kind": config.task.kind, "name": config.task.name},
        **found,
        "last": state.last,
        "best": state.best,
        "evaluations": evaluations,
        "steps": state.step,
        "tokens": state.tokens,
        "epochs": length.epoch(state.step),
        "parameters": {key: audit[key] for key in ("total", "trainable", "frozen", "frozen_share", "buffers")},
        "step_seconds": timing.get("step_seconds"),
        "tokens_per_second": timing.get("tokens_per_second"),
        "peak_memory": peak_memory,
        "seconds": state.seconds,
        "gpu_hours": state.seconds / 3600 * processes if peak_memory is not None else None,
        "reached": state.reached,
        "skipped_steps": state.skipped,
        "warnings": task.warnings() + length.warnings() + found.get("warnings", []) + _troubles(state),
        "notes": state.notes + ([config.log.note] if config.log.note else []),
        "data": {"description": about["description"], "synthetic": about["synthetic"]},
    }


def exit_code(result: dict[str, Any]) -> int:
    """What a command that trained exits with: 1 for a run that diverged. Only the first process has a result."""
    return 1 if result and ending(result["val_loss"]) == "diverged" else 0


def _troubles(state: TrainState) -> list[str]:
    """What a reader of the last figures must know about the steps that led to them."""
    found = []
    if ending(state.last["loss"]) == "diverged":
        found.append("the last validation loss is not a number: the run diverged; lower the learning rate")
    if state.skipped:
        found.append(f"{state.skipped} of {state.step} steps were skipped for a gradient that is not finite")
    return found


def result_there(folder: RunFolder) -> dict[str, Any]:
    """The result of a run that is done; one that is damaged says how to get it again."""
    try:
        return read_record(folder / "result.json")
    except FileError as error:
        again = "writes it again" if list_checkpoints(folder.checkpoints) else "trains it again: it has no checkpoint"
        raise FileError(f"{error}. Delete the file, and the same command {again}") from None


def final_numbers(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result, for trackers. Those of the last and the best validation have names of their own too."""
    whole = flat({name: value for name, value in result.items() if name not in ("last", "best")})
    return {f"final/{name}": value for name, value in whole.items() if type(value) in (int, float)}


def with_gaps(figures: MetricDict) -> MetricDict:
    """MetricDict whose missing numbers, null in a record, are not-a-number again."""
    return {name: math.nan if value is None else value for name, value in figures.items()}
