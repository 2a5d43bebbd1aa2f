"""Training tasks on random tokens: steps take as long on them as on real text of the same length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config import RunConfig
from ..data.corpus.batches import Windows
from ..data.corpus.tokens import in_memory
from ..data.labelled.encoded import Encoded, LengthGrouped
from ..data.labelled.examples import Examples, LabelledData
from ..errors import ConfigError
from ..models.hf_config import max_text_length
from ..training.tasks.base import Task
from ..training.tasks.classification import Classification
from ..training.tasks.labelled import uses_few_widths
from ..training.tasks.language import LanguageModelling
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.slices import PairFrequencies

_CLASSES = ("one", "two", "three")
# Batches in an epoch, after which the data repeats.
_BATCHES = 64


def random_task(config: RunConfig, hf_config: Any, seed: int) -> Task:
    """Return the run's task with random tokens in place of its data, all sequences of the full length."""
    if config.task.kind == "classification":
        return _classification(config, hf_config, seed)
    length, vocab_size = config.data.sequence_length, int(hf_config.vocab_size)
    count = _BATCHES * config.train.batch_size * length + 1
    ids = np.random.default_rng(seed).integers(0, vocab_size, count)
    data = in_memory(ids, vocab_size=vocab_size, description="random tokens")
    windows = Windows(data.train.tokens, length)
    return LanguageModelling(data, windows, windows, length, PairFrequencies(windows.tokens, vocab_size))


def _classification(config: RunConfig, hf_config: Any, seed: int) -> Task:
    """Return a task of random sequences with random classes. No sequence contains the padding token."""
    length, count = config.data.sequence_length, _BATCHES * config.train.batch_size
    if getattr(hf_config, "pad_token_id", None) is None:
        hf_config.pad_token_id = 0
    longest = max_text_length(hf_config, length)
    if longest < length:
        raise ConfigError(f"data.sequence_length {length} is more than the model's {longest} tokens")
    generator = np.random.default_rng(seed)
    # Leave out the padding token: draw from one id fewer, and shift the ids from the padding token's on up by one.
    ids = generator.integers(0, hf_config.vocab_size - 1, count * length)
    ids = (ids + (ids >= hf_config.pad_token_id)).astype(np.int32)
    types = np.zeros(len(ids), np.int8) if getattr(hf_config, "type_vocab_size", 0) > 1 else None
    encoded = Encoded(ids, np.arange(count + 1) * length, types, truncated=0)
    examples = Examples([""] * count, None, generator.integers(0, len(_CLASSES), count))
    data = LabelledData(
        name="random",
        description="random tokens",
        synthetic=True,
        labels=_CLASSES,
        splits={"train": examples, "validation": examples},
        sources={},
        sha256="",
    )
    # No text is encoded: of the tokenizer only the padding token is needed.
    tokenizer = SimpleNamespace(pad_token_id=hf_config.pad_token_id)
    order = LengthGrouped(encoded.lengths, config.train.batch_size, seed)
    return Classification(
        data=data,
        model_tokenizer=ModelTokenizer(tokenizer, hf_config, length),
        train=encoded,
        order=order,
        widths=order.widths(encoded.lengths, length, most=1) if uses_few_widths(config) else (),
        split="validation",
        held_out=encoded,
        validation_order=np.arange(count),
        choose="accuracy",
    )
