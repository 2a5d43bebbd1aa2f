"""Labelled tasks as text: the prompt that a text-to-text model gets instead of a row of a classification task."""

from __future__ import annotations

from ..synthetic.judgements import KINDS
from .tasks import BUILTIN, TASKS

PROMPTS = {name: task.prompt for name, task in TASKS.items()}
PROMPTS |= {f"{BUILTIN}{name}": kind.prompt for name, kind in KINDS.items()}


def to_prompt(task: str, text: str, pair: str | None) -> str:
    """Return a row of a classification task as the prompt for a text-to-text model; users' own texts stay as is."""
    prompt = PROMPTS.get(task)
    return text if prompt is None else prompt.format(text=text, pair=pair or "")
