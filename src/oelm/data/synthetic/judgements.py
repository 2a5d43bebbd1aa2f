"""Built-in synthetic judgements, for fine-tuning runs that need no download: opinions, and small questions of fact.

Both are made so that the words by themselves do not give the label. In an opinion a negation, a contrast or somebody
else's view turns round what is said. In an inference it depends on which of two sentences says more, and on whether
either denies it. Results on them compare methods; they say nothing about real text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from ...errors import DataError
from .portable_random import Draws

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAIN_SIZE = 2_000
VALIDATION_SIZE = 400
# Well below the number of different rows that there are, so that a new one is soon found.
LARGEST = 20_000


@dataclass(frozen=True, slots=True)
class Judgement:
    """One row: a text, a second one where the question needs it, and its class."""

    text: str
    pair: str | None
    label: str


GOOD = ("good", "great", "lovely", "clever", "funny", "moving", "bright", "strong", "sweet", "brilliant")
BAD = ("bad", "awful", "boring", "silly", "weak", "ugly", "dull", "poor", "slow", "terrible")
PARTS = ("film", "story", "acting", "music", "ending", "cast", "plot", "script")
OTHERS = ("my brother", "my friend", "the critic", "everybody", "my aunt", "the paper")
# How strongly a thing is said does not change what is said.
DEGREES = ("", "", "really ", "very ", "quite ")
# {x} is the word that decides and {y} one of the opposite side, {p} and {q} are what they are said of, {o} is somebody
# else, {d} and {e} are degrees. True: the form turns {x} round.
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
# What a sentence may say of the things besides that there are some, or none: how many, of which colour, where.
DETAILS = {
    "number": ("two", "three", "five", "ten"),
    "colour": ("red", "blue", "black", "white"),
    "room": ("kitchen", "cellar", "attic", "garden"),
}
_DETAIL, _DENIED, _DENIED_THEN, _SOMEBODY_ELSE = 0.5, 0.3, 0.5, 0.04


def _sentiment(draws: Draws, label: str) -> Judgement:
    form, turned = draws.one(draws.one(OPINIONS))
    good = (label == "positive") is not turned
    same, opposite = (GOOD, BAD) if good else (BAD, GOOD)
    p, q = draws.some(PARTS, 2)
    fields = {"x": draws.one(same), "y": draws.one(opposite), "d": draws.one(DEGREES), "e": draws.one(DEGREES)}
    return Judgement(form.format(p=p, q=q, o=draws.one(OTHERS), **fields), None, label)


@dataclass(frozen=True, slots=True)
class _Claim:
    """That somebody has things with certain details, or has none of them."""

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
    """What a premise makes of a hypothesis. Who has red hats has hats; who has no hats has no red ones."""
    wider, narrower = (premise, hypothesis) if premise.denied else (hypothesis, premise)
    if premise.person != hypothesis.person or not wider.details.items() <= narrower.details.items():
        return "neutral"
    return "entailment" if premise.denied == hypothesis.denied else "contradiction"


def _inference(draws: Draws, label: str) -> Judgement:
    while True:
        person, somebody_else = draws.some(PEOPLE, 2)
        thing = draws.one(THINGS)
        world = {name: draws.one(words) for name, words in DETAILS.items()}
        premise = _claim(draws, person, thing, world, _DENIED)
        about = somebody_else if draws.random() < _SOMEBODY_ELSE else person
        hypothesis = _claim(draws, about, thing, world, _DENIED_THEN)
        if _follows(premise, hypothesis) == label:
            return Judgement(str(premise), str(hypothesis), label)


def _claim(draws: Draws, person: str, thing: str, world: dict[str, str], share_denied: float) -> _Claim:
    denied = draws.random() < share_denied
    told = {name: value for name, value in world.items() if draws.random() < _DETAIL}
    if denied:
        told.pop("number", None)  # "no" stands in its place
    return _Claim(person, thing, denied, told)


@dataclass(frozen=True)
class _Kind:
    labels: tuple[str, ...]
    prompt: str
    make: Callable[[Draws, str], Judgement]


KINDS = {
    "sentiment": _Kind(("negative", "positive"), "sentiment sentence: {text}", _sentiment),
    "inference": _Kind(
        ("entailment", "neutral", "contradiction"), "inference hypothesis: {pair} premise: {text}", _inference
    ),
}


def judgements(kind: str, seed: int, count: int) -> list[Judgement]:
    """`count` different rows, their classes in turn; a smaller count gives the beginning of a larger one."""
    if kind not in KINDS:
        raise DataError(f"no built-in judgements called {kind!r}: there are {', '.join(KINDS)}")
    if seed < 0 or not 0 < count <= LARGEST:
        raise DataError(f"seed {seed}, {count:,} rows: the seed must not be negative, the rows 1 to {LARGEST:,} in all")
    draws = Draws(f"oelm {kind} {seed}")
    rows: dict[tuple[str, str | None], Judgement] = {}
    for label in cycle(KINDS[kind].labels):
        if len(rows) >= count:
            break
        row = KINDS[kind].make(draws, label)
        while (row.text, row.pair) in rows:
            row = KINDS[kind].make(draws, label)
        rows[row.text, row.pair] = row
    return list(rows.values())


def judgement_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words whose vocabulary is every word that a judgement, its prompt or its answer can hold.

    It frames a text as BERT does, `[CLS] text [SEP] pair [SEP]` with token types; `[CLS]` and `[SEP]` are also the
    beginning and the end for a model that writes.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@lru_cache(maxsize=1)
def _backend() -> Tokenizer:
    forms = [form for group in OPINIONS for form, _ in group]
    claims = [word for words in DETAILS.values() for word in words] + ["no some has in the ."]
    kinds = [text for kind in KINDS.values() for text in (*kind.labels, kind.prompt)]
    texts = [*GOOD, *BAD, *PARTS, *OTHERS, *DEGREES, *forms, *PEOPLE, *THINGS, *claims, *kinds]
    words = {word for text in texts for word in re.findall(r"\w+|[^\w\s]", re.sub(r"\{.*?\}", " ", text))}
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = {word: place for place, word in enumerate((*special, *sorted(words)))}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return backend
