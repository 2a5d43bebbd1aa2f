"""Folders of small random models with a tokenizer, for looks inside them."""

from __future__ import annotations

from pathlib import Path

from oelm.data import stories
from oelm.data.tokenizer import train_bpe

from .models import lively_model

VOCABULARY = 300
TEXT = "Once upon a time there was a dog. The dog had a ball."


def text_model(folder: Path, name: str, **changes: object) -> Path:
    """Save a lively small model of a family into `folder`, with a tokenizer, and return the folder."""
    model = lively_model(name, vocab_size=VOCABULARY, **changes)
    model.save_pretrained(folder)
    train_bpe(iter(stories(0, 100)), VOCABULARY).save(folder)
    return folder
