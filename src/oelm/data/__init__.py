"""Text corpora for language modelling: preparation, token files, batches, and a built-in synthetic corpus."""

from __future__ import annotations

from .batches import Windows
from .errors import DataError
from .prepare import prepare
from .progress import Progress
from .stories import annotated_stories, builtin, stories
from .tokens import Split, TokenDataset, in_memory

__all__ = [
    "DataError",
    "Progress",
    "Split",
    "TokenDataset",
    "Windows",
    "annotated_stories",
    "builtin",
    "in_memory",
    "prepare",
    "stories",
]
