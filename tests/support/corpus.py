"""Helpers of the data tests: a small GPT-2-like tokenizer, corpora, and the content of a folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from oelm.data import stories
from oelm.data.tokenizer import train_bpe

SEPARATOR = "<|endoftext|>"


@cache
def _vocab_and_merges() -> tuple[dict[str, int], list[list[str]]]:
    content = json.loads(train_bpe(stories(7, 200), 600).backend.to_str())
    return content["model"]["vocab"], content["model"]["merges"]


def gpt2_folder(folder: Path) -> Path:
    """Write vocab.json and merges.txt in GPT-2's format, with 600 entries; return the folder."""
    folder.mkdir(parents=True)
    vocab, merges = _vocab_and_merges()
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def documents(count: int, seed: int = 0) -> list[str]:
    return list(stories(seed, count))


def write_corpus(path: Path, texts: list[str]) -> Path:
    """Write texts in the format of TinyStories: a separator on a line of its own after each; return the path."""
    path.write_text("".join(f"{text}\n{SEPARATOR}\n" for text in texts), encoding="utf-8")
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
