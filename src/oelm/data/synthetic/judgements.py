"""Generate labelled sentences for fine-tuning runs that need no download: opinions, and small inferences.

Single words do not determine the label of either. In an opinion, a negation, a contrast or somebody else's view may
reverse what is said. In an inference, the label depends on which of two sentences says more, and on whether either
denies it. Results on this data compare methods; they say nothing about real text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING

from ...errors import DataError
from .random_choices import RandomChoices
from .word_level import word_level_backend, word_level_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TRAIN_SIZE = 2_000
VALIDATION_SIZE = 400
# Well below the number of different rows that exist, so that drawing a new one takes few attempts.
LARGEST = 20_000


@dataclass(frozen=True, slots=True)
class Judgement:
    """One row: a text, the second text of an inference, and the label."""

    text: str
    pair: str | None
    label: str


GOOD = ("good", "great", "lovely", "clever", "funny", "moving", "bright", "strong", "sweet", "brilliant")
BAD = ("bad", "awful", "boring", "silly", "weak", "ugly", "dull", "poor", "slow", "terrible")
PARTS = ("film", "story", "acting", "music", "ending", "cast", "plot", "script")
OTHERS = ("my brother", "my friend", "the critic", "everybody", "my aunt", "the paper")
# How strongly an opinion is stated does not change its label.
DEGREES = ("", "", "really ", "very ", "quite ")
# {x} is the word that decides and {y} one of the opposite sentiment, {p} and {q} are what they describe, {o} is another
# person, {d} and {e} are degrees. True means that the form reverses {x}.
PLAIN = (
    ("the {p} was {d}{x} .", False),
    ("i found the {p} {d}{x} .", False),
    ("what a {d}{x} {p} .", False),
)
NEGATED = (
    ("the {p} was not {d}{x} .", True),
    ("i never found the {p} {d}{x} .", True),
    ("nobody could call the {p} {d}{x} .", True),
)
CONTRASTED = (
    ("the {q} was {e}{y} , but the {p} was {d}{x} .", False),
    ("although the {q} was {e}{y} , the {p} was {d}{x} .", False),
    ("the {p} was {d}{x} , although the {q} was {e}{y} .", False),
    ("the {q} was {e}{y} , but in the end the {p} was {d}{x} .", False),
)
VIEWS = (
    ("{o} called the {p} {d}{x} , and i agree .", False),
    ("{o} called the {p} {d}{x} , but i disagree .", True),
    ("{o} found it {e}{y} , but i found it {d}{x} .", False),
    ("i found it {d}{x} , but {o} found it {e}{y} .", False),
)
OPINIONS = (PLAIN, PLAIN, NEGATED, CONTRASTED, VIEWS)

PEOPLE = ("anna", "ben", "clara", "david", "emma", "felix")
THINGS = ("hats", "cups", "books", "balls", "boxes", "lamps")
# What a sentence may add to the fact that there are some things, or none: how many, of which colour, where.
DETAILS = {
    "number": ("two", "three", "five", "ten"),
    "colour": ("red", "blue", "black", "white"),
    "room": ("kitchen", "cellar", "attic", "garden"),
}
# Probabilities of each detail, of a denied premise, of a denied hypothesis, and of a hypothesis about another person.
_DETAIL, _PREMISE_DENIED, _HYPOTHESIS_DENIED, _SOMEBODY_ELSE = 0.5, 0.3, 0.5, 0.04


def _sentiment(choices: RandomChoices, label: str) -> Judgement:
    form, reversed_ = choices.one(choices.one(OPINIONS))
    good = (label == "positive") is not reversed_
    same, opposite = (GOOD, BAD) if good else (BAD, GOOD)
    p, q = choices.sample(PARTS, 2)
    fields = {"x": choices.one(same), "y": choices.one(opposite), "d": choices.one(DEGREES), "e": choices.one(DEGREES)}
    return Judgement(form.format(p=p, q=q, o=choices.one(OTHERS), **fields), None, label)


@dataclass(frozen=True, slots=True)
class _Claim:
    """The claim that a person has things with certain details, or has none of them."""

    person: str
    thing: str
    denied: bool
    details: dict[str, str]

    def __str__(self) -> str:
        number = "no" if self.denied else self.details.get("number", "some")
        colour = f" {self.details['colour']}" if "colour" in self.details else ""
        room = f" in the {self.details['room']}" if "room" in self.details else ""
        return f"{self.person} has {number}{colour} {self.thing}{room} ."


def _follows(premise: _Claim, hypothesis: _Claim) -> str:
    """Return the label of a pair: having red hats implies having hats, and having no hats implies no red ones."""
    wider, narrower = (premise, hypothesis) if premise.denied else (hypothesis, premise)
    if premise.person != hypothesis.person or not wider.details.items() <= narrower.details.items():
        return "neutral"
    return "entailment" if premise.denied == hypothesis.denied else "contradiction"


def _inference(choices: RandomChoices, label: str) -> Judgement:
    while True:
        person, somebody_else = choices.sample(PEOPLE, 2)
        thing = choices.one(THINGS)
        world = {name: choices.one(words) for name, words in DETAILS.items()}
        premise = _claim(choices, person, thing, world, _PREMISE_DENIED)
        subject = somebody_else if choices.random() < _SOMEBODY_ELSE else person
        hypothesis = _claim(choices, subject, thing, world, _HYPOTHESIS_DENIED)
        if _follows(premise, hypothesis) == label:
            return Judgement(str(premise), str(hypothesis), label)


def _claim(choices: RandomChoices, person: str, thing: str, world: dict[str, str], share_denied: float) -> _Claim:
    denied = choices.random() < share_denied
    stated = {name: value for name, value in world.items() if choices.random() < _DETAIL}
    if denied:
        stated.pop("number", None)  # "no" is written instead
    return _Claim(person, thing, denied, stated)


@dataclass(frozen=True)
class _Kind:
    """One kind of data: its labels, the prompt for text-to-text models, and the function that makes a row."""

    labels: tuple[str, ...]
    prompt: str
    make: Callable[[RandomChoices, str], Judgement]


KINDS = {
    "sentiment": _Kind(("negative", "positive"), "sentiment sentence: {text}", _sentiment),
    "inference": _Kind(
        ("entailment", "neutral", "contradiction"), "inference hypothesis: {pair} premise: {text}", _inference
    ),
}


def judgements(kind: str, seed: int, count: int) -> list[Judgement]:
    """Return `count` different rows whose labels alternate; a smaller count gives the beginning of a larger one."""
    if kind not in KINDS:
        raise DataError(f"no built-in judgements called {kind!r}: there are {', '.join(KINDS)}")
    if seed < 0 or not 0 < count <= LARGEST:
        raise DataError(f"seed {seed}, {count:,} rows: the seed must be at least 0, the rows from 1 to {LARGEST:,}")
    choices = RandomChoices(f"oelm {kind} {seed}")
    rows: dict[tuple[str, str | None], Judgement] = {}
    for label in cycle(KINDS[kind].labels):
        if len(rows) >= count:
            break
        row = KINDS[kind].make(choices, label)
        while (row.text, row.pair) in rows:
            row = KINDS[kind].make(choices, label)
        rows[row.text, row.pair] = row
    return list(rows.values())


def judgement_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose vocabulary is every word of the judgements, their prompts and answers."""
    return word_level_tokenizer(_backend())


@lru_cache(maxsize=1)
def _backend() -> Tokenizer:
    forms = [form for group in OPINIONS for form, _ in group]
    claims = [word for words in DETAILS.values() for word in words] + ["no some has in the ."]
    kinds = [text for kind in KINDS.values() for text in (*kind.labels, kind.prompt)]
    texts = [*GOOD, *BAD, *PARTS, *OTHERS, *DEGREES, *forms, *PEOPLE, *THINGS, *claims, *kinds]
    return word_level_backend(
        word for text in texts for word in re.findall(r"\w+|[^\w\s]", re.sub(r"\{.*?\}", " ", text))
    )
