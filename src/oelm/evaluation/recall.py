"""Measure how often a model trained on the built-in stories remembers a fact that the text stated earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.synthetic.story_corpus import recall_examples
from ..errors import ConfigError
from ..runs.environment import config_of
from ..runs.folder import RECALL, changing_record
from ..runs.schema import StoryRecall
from ..training.best import model_step
from ..training.parallel import device_for
from .load import load_model_folder, model_folder


def record_recall(run: Path) -> StoryRecall:
    """Measure the recall of a run's model, add it to the run's records, and return it."""
    folder, config = model_folder(run, last=False), config_of(run)
    model: Any = load_model_folder(folder, config).to(device_for("auto")).eval()
    measured = story_recall(model, config.data.sequence_length)
    if not measured:
        raise ConfigError(
            f"{run}: data.sequence_length {config.data.sequence_length} is too short for any word of the stories that "
            "follows from an earlier sentence; train with a larger one"
        )
    record = StoryRecall(
        recall=measured["recall"],
        words=int(measured["recalled_words"]),
        model=str(folder.relative_to(run)),
        step=model_step(folder),
    )
    with changing_record(run, RECALL) as path:
        record.write(path)
    return record


@torch.inference_mode()
def story_recall(model: Any, length: int, batch_size: int = 16) -> dict[str, float | int]:
    """Return the share of the words to be remembered that the model finds most likely, and the number of these words.

    The stories are those of the validation split, read from their start, up to `length` tokens. Return an empty dict
    where that is too short for any of these words.
    """
    examples = [
        (ids[:length], [position for position in positions if position < length])
        for ids, positions in recall_examples()
    ]
    correct = total = 0
    for first in range(0, len(examples), batch_size):
        batch = examples[first : first + batch_size]
        ids = _padded([ids for ids, _ in batch]).to(model.device)
        # Padding is on the right, where a causal model does not look.
        predicted = model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu()
        for row, (story, positions) in enumerate(batch):
            correct += sum(int(predicted[row, position - 1]) == story[position] for position in positions)
            total += len(positions)
    return {"recall": correct / total, "recalled_words": total} if total else {}


def _padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
