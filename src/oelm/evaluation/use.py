"""Use a run's model: evaluate it again, predict with a fine-tuned one, generate text with a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.labelled.tasks import BUILTIN, to_prompt
from ..errors import CheckpointError, ConfigError
from ..runs.schema import Environment, read
from ..training.best import model_step
from ..training.parallel import World, device_for
from ..training.tasks.base import Task
from ..training.tasks.classification import classify
from ..training.tasks.language import LanguageModelling
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.open import open_task
from ..training.tasks.text2text import answer
from ..training.validation import answer_metrics, validate
from .load import config_of, load_model_folder, load_run, model_folder
from .recall import story_recall

# New tokens when the caller gives no number.
_DEFAULT_TOKENS = 100
# Logits divided by a lower temperature overflow.
_MIN_TEMPERATURE = 1e-30


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


def generate_text(run: Path, prompt: str, tokens: int | None, temperature: float, top_k: int, seed: int) -> str:
    """Return the prompt and its continuation by a run's model; a prompt too long for the model loses its start.

    `tokens` None means 100 new tokens, or fewer if the model has fewer positions left: at least half of its positions
    after a long prompt. A temperature of 0 always takes the most likely token; a `top_k` of 0 samples from all.
    """
    config = config_of(run)
    if config.task.kind != "language":
        raise ConfigError(f"{run}: trained on {config.task.name}, not to continue a prompt; use `oelm predict`")
    if 0 < temperature < _MIN_TEMPERATURE:
        raise ConfigError(f"--temperature {temperature}: too low to sample with; 0 always takes the most likely token")
    model: Any = load_run(run)
    tokenizer = LanguageModelling.open(config).data.load_tokenizer()
    device = device_for("auto")
    model.to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        raise ConfigError("the prompt is empty: give at least one word")
    positions = getattr(model.config, "max_position_embeddings", None)
    tokens = _new_tokens(tokens, ids.shape[1], positions)
    if positions is not None and ids.shape[1] + tokens > positions:
        ids = ids[:, -(positions - tokens) :]
    torch.manual_seed(seed)
    sampling = {"temperature": temperature, "top_k": top_k or None} if temperature > 0 else {}
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
        do_sample=temperature > 0,
        **sampling,
    )
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))


def _require_inputs_as_in_training(run: Path, pair: str | None) -> None:
    """Raise when the run was trained on pairs and one text is given, or the other way round."""
    environment = run / "environment.json"
    if not environment.is_file():
        raise CheckpointError(f"{run}: has no model yet: the run has not started, or ended before its first step")
    trained_on_pairs = read(environment, Environment).data.pairs
    if trained_on_pairs is not None and trained_on_pairs != (pair is not None):
        expected = "pairs of texts: give two" if trained_on_pairs else "single texts: give one"
        raise ConfigError(f"{run}: its model was trained on {expected}")


def _new_tokens(requested: int | None, prompt_length: int, positions: int | None) -> int:
    """Return how many tokens to generate; raise when the request leaves no position for the prompt."""
    if positions is None:
        return _DEFAULT_TOKENS if requested is None else requested
    if requested is None:
        return min(_DEFAULT_TOKENS, max(positions - prompt_length, positions // 2))
    if requested >= positions:
        raise ConfigError(f"--tokens {requested}: the model has {positions} positions; ask for {positions - 1} at most")
    return requested
