"""Evaluate a run's model again, on all of its validation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..training.best import model_step
from ..training.parallel import World, device_for
from ..training.tasks.base import Task
from ..training.tasks.open import open_task
from ..training.validation import answer_metrics, validate
from .load import config_of, load_model_folder, model_folder


def evaluate_run(run: Path, batch_size: int = 16, last: bool = False) -> dict[str, Any]:
    """Return the metrics of a run's model on all of its validation data and any other labelled split, in float32."""
    config = config_of(run)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"sequences": None})})
    task = open_task(config)
    world = World(0, 1, device_for("auto"))
    folder = model_folder(run, last)
    model: Any = load_model_folder(folder, config).to(world.device)
    data = task.describe()

    def measure(split: Task) -> dict[str, Any]:
        metrics = validate(split.loss(model), split, world, batch_size)
        return metrics | answer_metrics(model, split, world, batch_size, split.held_out_count)

    metrics = measure(task)
    other_splits = {name: measure(split) for name, split in task.other_splits().items()}
    evaluation = {
        "run": str(run),
        "model": str(folder.relative_to(run)),
        "step": model_step(folder),
        "val_loss": metrics.pop("loss"),
        **metrics,
        "examples": task.held_out_count,
        "data": data["description"],
        "synthetic": data["synthetic"],
    }
    return {**evaluation, "evaluations": other_splits} if other_splits else evaluation
