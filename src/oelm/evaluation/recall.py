"""How often a language model trained on the built-in stories remembers a fact that its text stated earlier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.synthetic.story_corpus import recall_examples


@torch.inference_mode()
def story_recall(model: Any, length: int, batch_size: int = 16) -> dict[str, float | int]:
    """Return the share of remembered words that the model finds most likely, and their number; nothing without any.

    The stories are those of the validation split, read from their start, up to `length` tokens.
    """
    examples = [(ids[:length], [place for place in places if place < length]) for ids, places in recall_examples()]
    correct = asked = 0
    for first in range(0, len(examples), batch_size):
        batch = examples[first : first + batch_size]
        ids = _padded([ids for ids, _ in batch]).to(model.device)
        # Padding is on the right, where a causal model does not look.
        predicted = model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu()
        for row, (story, places) in enumerate(batch):
            correct += sum(int(predicted[row, place - 1]) == story[place] for place in places)
            asked += len(places)
    return {"recall": correct / asked, "recalled_words": asked} if asked else {}


def _padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
