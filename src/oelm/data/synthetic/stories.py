"""Generate small stories in which early facts must be remembered, for runs that need no download.

Each story introduces people, their things and colours, pets and foods, hides and hands over some of the things, and
asks for these facts later. An answer cannot be guessed from the words around it, but only from the one sentence, among
several similar ones, that stated the fact last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from . import words
from .random_choices import RandomChoices

Kind = Literal["colour", "owner", "spot", "pet", "food"]


@dataclass(frozen=True, slots=True)
class Recall:
    """A word of a story that earlier text determines: where it starts and ends, in characters, and the kind of fact."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Story:
    """A story and the words in it that must be remembered."""

    text: str
    recalls: tuple[Recall, ...]


@dataclass(slots=True, kw_only=True)
class _World:
    """The facts that are true at some point of a story."""

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
    """Yield `count` stories, the same for the same seed; a smaller count gives the beginning of a larger one."""
    return (story.text for story in annotated_stories(seed, count))


def annotated_stories(seed: int, count: int) -> Iterator[Story]:
    """Yield the same stories with the positions of the words to be remembered."""
    choices = RandomChoices(f"oelm stories {seed}")
    return (_StoryWriter(choices).story() for _ in range(count))


class _StoryWriter:
    """Writes one story with the next random choices of a stream."""

    def __init__(self, choices: RandomChoices) -> None:
        self._choices = choices
        self._sentences: list[str] = []
        self._length = 0
        self._recalls: list[Recall] = []

    def story(self) -> Story:
        """Write the story: facts, events, and questions with events between them."""
        world = self._begin()
        for _ in range(self._choices.between(3, 8)):
            self._happen(world)
        for kind, key in self._questions(world):
            if self._choices.random() < 0.6:
                self._happen(world)
            self._ask(world, kind, key)
        self._say(words.ENDINGS, world)
        return Story(" ".join(self._sentences), tuple(self._recalls))

    def _begin(self) -> _World:
        """Write the opening and the first facts, in random order."""
        people = self._choices.sample(words.PEOPLE, self._choices.between(2, 4))
        world = _World(
            people=people,
            town=self._choices.one(words.TOWN),
            weather=self._choices.one(words.WEATHER),
            time=self._choices.one(words.TIMES),
        )
        self._say(words.OPENINGS, world, people=f"{', '.join(people[:-1])} and {people[-1]}")
        facts: list[tuple[Sequence[str], dict[str, str]]] = []
        owners = [*people, self._choices.one(people)] if self._choices.random() < 0.3 else people
        colours = self._choices.sample(words.COLOURS, len(owners))
        for a, x, c in zip(owners, self._choices.sample(words.THINGS, len(owners)), colours, strict=True):
            world.owner[x], world.colour[x] = a, c
            facts.append((words.HAS, {"a": a, "x": x, "c": c}))
        if self._choices.random() < 0.5:
            names = self._choices.sample(words.PETS, len(people))
            for a, k, n in zip(people, self._choices.sample(words.KINDS, len(people)), names, strict=True):
                world.pet[a] = (k, n)
                facts.append((words.PET, {"a": a, "k": k, "n": n}))
        if self._choices.random() < 0.5:
            for a, f in zip(people, self._choices.sample(words.FOODS, len(people)), strict=True):
                world.food[a] = f
                facts.append((words.FOOD, {"a": a, "f": f}))
        for forms, names_of in self._choices.sample(facts, len(facts)):
            self._say(forms, world, **names_of)
        return world

    def _happen(self, world: _World) -> None:
        """Write one event: a thing is put somewhere, a thing changes hands, or something that changes no fact."""
        draw = self._choices.random()
        x = self._choices.one(tuple(world.owner))
        a = world.owner[x]
        if draw < 0.3:
            taken = set(world.spot.values())
            p = self._choices.one([spot for spot in words.SPOTS if spot not in taken])
            world.spot[x] = p
            self._say(words.PUT, world, a=a, x=x, p=p)
        elif draw < 0.55:
            b = self._choices.one([person for person in world.people if person != a])
            world.owner[x] = b
            world.spot.pop(x, None)
            self._say(words.GIVE, world, a=a, b=b, x=x)
        else:
            self._say(words.FILLER, world)

    def _questions(self, world: _World) -> list[tuple[Kind, str]]:
        """Choose the facts to ask for, and their order."""
        things = tuple(world.owner)
        asked: list[tuple[Kind, str]] = [("colour", x) for x in self._choices.sample(things, 2)]
        asked += [("owner", x) for x in self._choices.sample(things, 2)]
        asked += [("spot", x) for x in world.spot]
        asked += [("pet", a) for a in world.pet]
        asked += [("food", a) for a in world.food]
        return self._choices.sample(asked, min(len(asked), self._choices.between(4, 8)))

    def _ask(self, world: _World, kind: Kind, key: str) -> None:
        """Write a question about a fact as it is now.

        The spot of a hidden thing is asked for only while another one is hidden too, or the answer would be obvious.
        """
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
        self, forms: Sequence[str], world: _World, kind: Kind | None = None, answer: str = "", /, **values: str
    ) -> None:
        """Add a sentence in one of its forms; with an answer, record the position of the answer's last word."""
        a, b = self._choices.pair(world.people)
        if values.get("a") == b:
            a, b = b, a
        d, d2 = self._choices.pair(words.DOINGS)
        fields = {"a": a, "b": b, "d": d, "d2": d2, "t": world.town, "w": world.weather, "m": world.time, **values}
        before, mark, after = self._choices.one(forms).partition("{?}")
        text = before.format_map(fields)
        if kind and mark:
            end = self._length + len(text) + len(answer)
            self._recalls.append(Recall(end - len(answer.rpartition(" ")[2]), end, kind))
            text += answer + after.format_map(fields)
        self._sentences.append(text)
        self._length += len(text) + 1
