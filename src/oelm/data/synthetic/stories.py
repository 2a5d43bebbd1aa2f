"""The built-in synthetic corpus: small stories in which early facts must be remembered, for runs that need no download.

Each story introduces people, their things and colours, pets and foods, hides and hands over some of the things, and
asks for all that later. The answers cannot be guessed from the words around them: only from the one sentence, among
several like it, that stated the fact last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ...errors import DataError
from ..corpus.readers import SEPARATOR
from ..corpus.tokens import TokenDataset, in_memory
from ..tokenizer import token_id, vocabulary_sha256
from . import words
from .portable_random import Draws

Kind = Literal["colour", "owner", "spot", "pet", "food"]

UNKNOWN = "<unk>"
DOCUMENTS = 6_000
VAL_DOCUMENTS = 500
_WORD = re.compile(r"[A-Za-z]+")
# A word with the space before it is one token, and so is a punctuation mark: decoding is joining.
_TOKEN = r" ?[A-Za-z]+| ?[^\sA-Za-z]"


@dataclass(frozen=True, slots=True)
class Recall:
    """A word of a story that earlier text determines: its place in characters, and what kind of fact it is."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Story:
    """A story and the words in it that must be remembered."""

    text: str
    recalls: tuple[Recall, ...]


@dataclass(slots=True)
class _World:
    """What is true at some point of a story."""

    people: list[str]
    town: str
    weather: str
    time: str
    owner: dict[str, str] = field(default_factory=dict)
    colour: dict[str, str] = field(default_factory=dict)
    spot: dict[str, str] = field(default_factory=dict)
    pet: dict[str, tuple[str, str]] = field(default_factory=dict)
    food: dict[str, str] = field(default_factory=dict)


def stories(seed: int, count: int) -> Iterator[str]:
    """`count` stories, the same for the same seed; a smaller count gives the beginning of a larger one."""
    return (story.text for story in annotated_stories(seed, count))


def annotated_stories(seed: int, count: int) -> Iterator[Story]:
    """The same stories with the places of the words to be remembered."""
    writer = _Writer(seed)
    return (writer.story() for _ in range(count))


def builtin(
    name: str = "stories", *, seed: int = 0, documents: int = DOCUMENTS, val_documents: int = VAL_DOCUMENTS
) -> TokenDataset:
    """The built-in corpus in memory, tokenized by words. Train and validation share no story."""
    if name != "stories":
        raise DataError(f"no built-in data called {name!r}: there is 'stories'")
    if seed < 0 or documents < 1 or val_documents < 1:
        raise DataError(f"seed {seed}, documents {documents}, val_documents {val_documents}: 0, 1 and 1 at least")
    train = list(stories(2 * seed, documents))
    seen = set(train)
    # A story can repeat by chance, however rarely: then the next one is taken.
    fresh = (text for text in stories(2 * seed + 1, 2 * val_documents + 100) if text not in seen)
    val = [text for text, _ in zip(fresh, range(val_documents), strict=False)]
    backend = story_tokenizer()
    eos = token_id(backend, SEPARATOR)
    return in_memory(
        _encode(backend, train, eos),
        _encode(backend, val, eos),
        vocab_size=backend.get_vocab_size(),
        eos_id=eos,
        documents=(len(train), len(val)),
        text_bytes=(sum(map(len, train)), sum(map(len, val))),
        tokenizer_json=backend.to_str(),
        tokenizer_hash=vocabulary_sha256(backend),
        eos_token=SEPARATOR,
        synthetic=True,
        description=f"built-in synthetic stories, seed {seed}, {documents:,} documents",
    )


@lru_cache(maxsize=1)
def story_tokenizer() -> Tokenizer:
    """A word-level tokenizer whose vocabulary is every word that a story can hold."""
    texts = [text for value in vars(words).values() if isinstance(value, tuple) for text in value]
    known = {word for text in texts for word in _WORD.findall(re.sub(r"\{.*?\}", " ", text))}
    marks = {mark for text in texts for mark in re.findall(r"[^\sA-Za-z]", re.sub(r"\{.*?\}", "", text))}
    entries = {f" {word}" for word in known} | {word for word in known if word[0].isupper()}
    entries |= marks | {f" {mark}" for mark in marks}
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate((SEPARATOR, UNKNOWN, *sorted(entries)))}, UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
    return backend


def _encode(backend: Tokenizer, texts: Sequence[str], eos: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The ids that the tokenizer gives: looked up here, in a quarter of its time, since every word is in it."""
    split, id_of = re.compile(_TOKEN).findall, backend.get_vocab().__getitem__
    ids: list[int] = []
    for text in texts:
        ids += map(id_of, split(text))
        ids.append(eos)
    return np.array(ids, dtype=np.uint16)


class _Writer:
    """Tells one story after the other from one stream of random choices."""

    def __init__(self, seed: int) -> None:
        self._draws = Draws(f"oelm stories {seed}")
        self._sentences: list[str] = []
        self._length = 0
        self._recalls: list[Recall] = []

    def story(self) -> Story:
        self._sentences, self._length, self._recalls = [], 0, []
        world = self._begin()
        for _ in range(self._draws.between(3, 8)):
            self._happen(world)
        for kind, key in self._questions(world):
            if self._draws.random() < 0.6:
                self._happen(world)
            self._ask(world, kind, key)
        self._say(words.ENDINGS, world)
        return Story(" ".join(self._sentences), tuple(self._recalls))

    def _begin(self) -> _World:
        """Who is there, and the facts about them, in any order."""
        people = self._draws.some(words.PEOPLE, self._draws.between(2, 4))
        world = _World(
            people, self._draws.one(words.TOWN), self._draws.one(words.WEATHER), self._draws.one(words.TIMES)
        )
        self._say(words.OPENINGS, world, people=f"{', '.join(people[:-1])} and {people[-1]}")
        facts: list[tuple[Sequence[str], dict[str, str]]] = []
        owners = [*people, self._draws.one(people)] if self._draws.random() < 0.3 else people
        colours = self._draws.some(words.COLOURS, len(owners))
        for a, x, c in zip(owners, self._draws.some(words.THINGS, len(owners)), colours, strict=True):
            world.owner[x], world.colour[x] = a, c
            facts.append((words.HAS, {"a": a, "x": x, "c": c}))
        if self._draws.random() < 0.5:
            names = self._draws.some(words.PETS, len(people))
            for a, k, n in zip(people, self._draws.some(words.KINDS, len(people)), names, strict=True):
                world.pet[a] = (k, n)
                facts.append((words.PET, {"a": a, "k": k, "n": n}))
        if self._draws.random() < 0.5:
            for a, f in zip(people, self._draws.some(words.FOODS, len(people)), strict=True):
                world.food[a] = f
                facts.append((words.FOOD, {"a": a, "f": f}))
        for forms, names_of in self._draws.some(facts, len(facts)):
            self._say(forms, world, **names_of)
        return world

    def _happen(self, world: _World) -> None:
        """One event: a thing is put somewhere, a thing changes hands, or something that changes nothing."""
        draw = self._draws.random()
        x = self._draws.one(tuple(world.owner))
        a = world.owner[x]
        if draw < 0.3:
            taken = set(world.spot.values())
            p = self._draws.one([spot for spot in words.SPOTS if spot not in taken])
            world.spot[x] = p
            self._say(words.PUT, world, a=a, x=x, p=p)
        elif draw < 0.55:
            b = self._draws.one([person for person in world.people if person != a])
            world.owner[x] = b
            world.spot.pop(x, None)
            self._say(words.GIVE, world, a=a, b=b, x=x)
        else:
            self._say(words.FILLER, world)

    def _questions(self, world: _World) -> list[tuple[Kind, str]]:
        """Which facts to ask for, and in which order."""
        things = tuple(world.owner)
        asked: list[tuple[Kind, str]] = [("colour", x) for x in self._draws.some(things, 2)]
        asked += [("owner", x) for x in self._draws.some(things, 2)]
        asked += [("spot", x) for x in world.spot]
        asked += [("pet", a) for a in world.pet]
        asked += [("food", a) for a in world.food]
        return self._draws.some(asked, min(len(asked), self._draws.between(4, 8)))

    def _ask(self, world: _World, kind: Kind, key: str) -> None:
        """A recall of what is true now. A hidden thing is asked for only while another one is hidden too."""
        if kind == "colour":
            self._say(words.ASK_COLOUR, world, kind, world.colour[key], x=key)
        elif kind == "owner":
            self._say(words.ASK_OWNER, world, kind, world.owner[key], x=key)
        elif kind == "pet":
            self._say(words.ASK_PET, world, kind, world.pet[key][1], a=key, k=world.pet[key][0])
        elif kind == "food":
            self._say(words.ASK_FOOD, world, kind, world.food[key], a=key)
        elif key in world.spot and len(world.spot) > 1:
            self._say(words.ASK_SPOT, world, kind, world.spot[key], x=key)

    def _say(
        self, forms: Sequence[str], world: _World, kind: Kind | None = None, answer: str = "", /, **given: str
    ) -> None:
        """Add a sentence in one of its forms; with an answer, note where the last word of it stands."""
        a, b = self._draws.two(world.people)
        if given.get("a") == b:
            a, b = b, a
        d, d2 = self._draws.two(words.DOINGS)
        fields = {"a": a, "b": b, "d": d, "d2": d2, "t": world.town, "w": world.weather, "m": world.time, **given}
        before, mark, after = self._draws.one(forms).partition("{?}")
        text = before.format_map(fields)
        if kind and mark:
            end = self._length + len(text) + len(answer)
            self._recalls.append(Recall(end - len(answer.rpartition(" ")[2]), end, kind))
            text += answer + after.format_map(fields)
        self._sentences.append(text)
        self._length += len(text) + 1
