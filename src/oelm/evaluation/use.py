"""Use a run's model: evaluate it again, or predict with a fine-tuned one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig
from ..data.labelled.tasks import BUILTIN, to_prompt
from ..errors import CheckpointError, ConfigError
from ..runs.environment import config_of
from ..runs.schema import Environment, read
from ..training.best import model_step
from ..training.parallel import World, device_for
from ..training.tasks.base import Task
from ..training.tasks.classification import classify
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.open import open_task
from ..training.tasks.text2text import answer
from ..training.validation import answer_metrics, validate
from .load import FILLS_MASKS, load_model_folder, load_run, model_folder
from .recall import story_recall

# Lists with an entry for each document, which a run's own result has.
_BY_DOCUMENT = ("document_losses", "document_tokens")


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
        metrics = {name: value for name, value in metrics.items() if name not in _BY_DOCUMENT}
        return metrics | answer_metrics(model, split, world, batch_size, split.held_out_count)

    metrics = measure(task)
    if (config.data.path or "").startswith(BUILTIN) and config.task.kind == "language":
        metrics |= story_recall(model, config.data.sequence_length, batch_size)
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


def predict_one(run: Path, text: str, pair: str | None = None) -> dict[str, Any]:
    """Return a fine-tuned model's prediction for one text or pair, encoded exactly as in training.

    For a classifier: the class and the probability of each class. For a text-to-text model: the answer it generates.
    """
    config = config_to_predict_with(run)
    if not text.strip():
        raise ConfigError("the text is empty: give at least one word")
    trained_on_pairs = trained_with_pairs(run)
    if trained_on_pairs is not None and trained_on_pairs != (pair is not None):
        expected = "pairs of texts: give two" if trained_on_pairs else "single texts: give one"
        raise ConfigError(f"{run}: its model was trained on {expected}")
    model, model_tokenizer = load_run(run), ModelTokenizer.of(config)
    if config.task.kind == "classification":
        return classify(model, model_tokenizer, text, pair)
    source = model_tokenizer.encode([to_prompt(config.task.name, text, pair)])
    first = np.zeros(1, np.int64)
    return {"answer": answer(model, model_tokenizer, source, first, model_tokenizer.max_length)[0]}


def config_to_predict_with(run: Path) -> RunConfig:
    """Return the config of a fine-tuned run; raise for a language model, which has nothing to predict."""
    config = config_of(run)
    if config.task.kind == "masked-language":
        raise ConfigError(f"{run}: {FILLS_MASKS}")
    if config.task.kind == "language":
        raise ConfigError(f"{run}: a language model; use `oelm generate` to continue a prompt")
    return config


def trained_with_pairs(run: Path) -> bool | None:
    """Return whether a run was trained on pairs of texts, as it recorded it."""
    environment = run / "environment.json"
    if not environment.is_file():
        raise CheckpointError(f"{run}: has no model yet: the run has not started, or ended before its first step")
    return read(environment, Environment).data.pairs
