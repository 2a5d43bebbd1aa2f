"""Data: text corpora as token files and batches, labelled tasks for fine-tuning, and synthetic data of both kinds."""

from __future__ import annotations

from ..errors import DataError
from .corpus.batches import Windows
from .corpus.prepare import prepare
from .corpus.progress import Progress
from .corpus.tokens import Split, TokenDataset, in_memory
from .labelled.examples import Examples, LabelledData
from .labelled.load import builtin_labelled, open_labelled
from .synthetic.judgements import judgement_tokenizer
from .synthetic.stories import annotated_stories, stories
from .synthetic.story_corpus import builtin
from .synthetic.translation import translation_tokenizer
from .tokenizer import load_model_tokenizer

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
    "translation_tokenizer",
]
