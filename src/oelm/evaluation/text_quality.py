"""What can be counted in texts that a model wrote: how varied they are, and how much they repeat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from ..data.packages import import_optional

# Words, and punctuation marks one by one.
_WORD = re.compile(r"\w+|[^\w\s]")
# A repetition is a run of so many words that the same text had before.
_REPEATED = 4

Words = tuple[str, ...]


def split_words(text: str) -> Words:
    """Return the words and punctuation marks of a text, in small letters."""
    return tuple(_WORD.findall(text.lower()))


def distinct(texts: Sequence[Words], n: int) -> float | None:
    """Return the share of different runs of n words among all such runs of the texts; None where they have none."""
    runs = [run for words in texts for run in _runs(words, n)]
    return len(set(runs)) / len(runs) if runs else None


def repetition(texts: Sequence[Words]) -> float | None:
    """Return the share of runs of 4 words that the same text had before; None where the texts have none."""
    runs = [_runs(words, _REPEATED) for words in texts]
    total = sum(map(len, runs))
    return 1 - sum(len(set(own)) for own in runs) / total if total else None


def self_bleu(groups: Sequence[Sequence[str]]) -> float | None:
    """Return the mean BLEU (0 to 100) of each text against the others of its group; None where all are alone.

    The lower, the more the texts of a group differ.
    """
    sacrebleu = import_optional("sacrebleu", "self-BLEU")
    scores = [
        sacrebleu.sentence_bleu(text, [*group[:place], *group[place + 1 :]]).score
        for group in groups
        if len(group) > 1
        for place, text in enumerate(group)
    ]
    return fmean(scores) if scores else None


def _runs(words: Words, n: int) -> list[Words]:
    return [words[start : start + n] for start in range(len(words) - n + 1)]
