"""Predict with a run's fine-tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..data.labelled.prompts import to_prompt
from ..errors import CheckpointError, ConfigError
from ..runs.schema import Environment, read
from ..training.tasks.classification import classify
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.text2text import answer
from .load import config_of, load_run


def predict_one(run: Path, text: str, pair: str | None = None) -> dict[str, Any]:
    """Return a fine-tuned model's prediction for one text or pair, encoded exactly as in training.

    A classifier's holds the class and the probability of each class, a text-to-text model's the answer it generates.
    """
    config = config_of(run)
    if config.task.kind == "language":
        raise ConfigError(f"{run}: a language model; use `oelm generate` to continue a prompt")
    if not text.strip():
        raise ConfigError("the text is empty: give at least one word")
    _require_inputs_as_in_training(run, pair)
    model, model_tokenizer = load_run(run), ModelTokenizer.of(config)
    if config.task.kind == "classification":
        return classify(model, model_tokenizer, text, pair)
    source = model_tokenizer.encode([to_prompt(config.task.name, text, pair)])
    first = np.zeros(1, np.int64)
    return {"answer": answer(model, model_tokenizer, source, first, model_tokenizer.max_length)[0]}


def _require_inputs_as_in_training(run: Path, pair: str | None) -> None:
    """Raise when the run was trained on pairs and one text is given, or the other way round."""
    environment = run / "environment.json"
    if not environment.is_file():
        raise CheckpointError(f"{run}: has no model yet: the run has not started, or ended before its first step")
    trained_on_pairs = read(environment, Environment).data.pairs
    if trained_on_pairs is not None and trained_on_pairs != (pair is not None):
        expected = "pairs of texts: give two" if trained_on_pairs else "single texts: give one"
        raise ConfigError(f"{run}: its model was trained on {expected}")
