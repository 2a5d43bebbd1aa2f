"""Data: text corpora as token files and batches, labelled tasks for fine-tuning, and synthetic data of both kinds."""

from __future__ import annotations

from .batches import Windows
from .errors import DataError
from .judgements import judgement_tokenizer
from .labelled import Examples, LabelledData, builtin_labelled, open_labelled
from .prepare import prepare
from .progress import Progress
from .stories import annotated_stories, builtin, stories
from .tokenizer import load_model_tokenizer
from .tokens import Split, TokenDataset, in_memory

__all__ = [
    "DataError",
    "Examples",
    "LabelledData",
    "Progress",
    "Split",
    "TokenDataset",
    "Windows",
    "annotated_stories",
    "builtin",
    "builtin_labelled",
    "in_memory",
    "judgement_tokenizer",
    "load_model_tokenizer",
    "open_labelled",
    "prepare",
    "stories",
]
