"""Open the task that a config names."""

from __future__ import annotations

from ...config import RunConfig
from .base import Task
from .classification import Classification
from .generated import GeneratedSequences
from .language import LanguageModelling
from .masked import MaskedLanguageModelling
from .text2text import TextToText


def open_task(config: RunConfig) -> Task:
    """Return the task of a run with its data loaded."""
    if config.task.kind == "language":
        return LanguageModelling.open(config)
    if config.task.kind == "masked-language":
        return MaskedLanguageModelling.open(config)
    if config.task.kind == "classification":
        return Classification.open(config)
    if config.task.kind == "generated":
        return GeneratedSequences.open(config)
    return TextToText.open(config)
