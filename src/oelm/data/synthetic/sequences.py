"""Generate sequences of which some tokens follow from earlier ones: what attention is for, one ability at a time.

Each ability has a function that writes one sequence from random choices. Tokens are numbers without a text: marks,
numbers, symbols (some serve as keys and some as values), and pairs of a key and a value in one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...errors import DataError, nearest
from .random_choices import RandomChoices

Tokens = npt.NDArray[np.int64]

BLANK, GO = 0, 1
NEEDLES = range(2, 6)
NUMBERS = range(8, 32)
SYMBOLS = range(32, 96)
KEYS, VALUES = SYMBOLS[:16], SYMBOLS[16:32]
PAIRS = range(96, 96 + len(KEYS) * len(VALUES))
VOCABULARY = 384
# Shorter sequences have no room for a question about several facts.
SHORTEST = 32
# How many different symbols `counting` counts: fewer give larger numbers.
_COUNTED = 8
# Where an answer does not follow from one token alone.
NO_EVIDENCE = -1


@dataclass
class GeneratedSequence:
    """One sequence while it is written.

    `evidence` has an entry for each token that follows from the ones before it: the position of the token that says
    so, or NO_EVIDENCE where it takes several.
    """

    tokens: list[int] = field(default_factory=list)
    evidence: dict[int, int] = field(default_factory=dict)

    def answer(self, token: int, evidence: int = NO_EVIDENCE) -> None:
        """Add a token that follows from the ones before it."""
        self.evidence[len(self.tokens)] = evidence
        self.tokens.append(token)


@dataclass(frozen=True)
class Ability:
    """A kind of sequence: what it asks for in a few words, and the function that writes one of a given length."""

    about: str
    write: Callable[[RandomChoices, int], GeneratedSequence]


def _recall(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write pairs of a key and a value, two tokens each, then keys again, each followed by its value."""
    keys, values = _keys_and_values(choices, length)
    sequence, place = GeneratedSequence(), {}
    for key, value in zip(keys, values, strict=True):
        sequence.tokens += [KEYS[key], VALUES[value]]
        place[key] = len(sequence.tokens) - 1
    while len(sequence.tokens) + 2 <= length:
        key = choices.one(keys)
        sequence.tokens.append(KEYS[key])
        sequence.answer(sequence.tokens[place[key]], place[key])
    return sequence


def _stacked_recall(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write the same with key and value in one token, so that no token must look at the one before it."""
    keys, values = _keys_and_values(choices, length)
    sequence = GeneratedSequence([PAIRS[key * len(VALUES) + value] for key, value in zip(keys, values, strict=True)])
    while len(sequence.tokens) + 2 <= length:
        place = choices.one(range(len(keys)))
        sequence.tokens.append(KEYS[keys[place]])
        sequence.answer(VALUES[values[place]], place)
    return sequence


def _keys_and_values(choices: RandomChoices, length: int) -> tuple[list[int], list[int]]:
    """Return the numbers of different keys, and of as many different values.

    Few pairs in some sequences reward a model that is only beginning to tell them apart.
    """
    count = choices.between(2, min(length // 8, len(KEYS)))
    return choices.sample(range(len(KEYS)), count), choices.sample(range(len(VALUES)), count)


def _copying(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write random symbols, a mark, and the symbols again."""
    count = choices.between(length // 4, (length - 1) // 2)
    sequence = GeneratedSequence([*_random_symbols(choices, count), GO])
    for place in range(count):
        sequence.answer(sequence.tokens[place], place)
    return sequence


def _induction(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write random symbols with a part at a random place that is repeated at once; its first symbol is no answer."""
    before = choices.between(0, length // 4)
    count = choices.between(length // 8, (length - before) // 2)
    sequence = GeneratedSequence(_random_symbols(choices, before + count))
    sequence.tokens.append(sequence.tokens[before])
    for place in range(before + 1, before + count):
        sequence.answer(sequence.tokens[place], place)
    return sequence


def _needle(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write random symbols with marks at random places; ask at the end for the symbol that came after each mark."""
    text = _random_symbols(choices, length - 2 * len(NEEDLES))
    slots = choices.sample(range(len(text) // 2), len(NEEDLES))
    for mark, slot in zip(NEEDLES, slots, strict=True):
        text[2 * slot] = mark
    sequence = GeneratedSequence(text)
    for number in choices.sample(range(len(NEEDLES)), len(NEEDLES)):
        place = 2 * slots[number] + 1
        sequence.tokens.append(NEEDLES[number])
        sequence.answer(text[place], place)
    return sequence


def _selective_copying(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write symbols at random places among blanks, a mark, and the symbols without the blanks."""
    count = length // 4
    sequence = GeneratedSequence([BLANK] * (length - 1 - count))
    places = sorted(choices.sample(range(len(sequence.tokens)), count))
    for place in places:
        sequence.tokens[place] = choices.one(SYMBOLS)
    sequence.tokens.append(GO)
    for place in places:
        sequence.answer(sequence.tokens[place], place)
    return sequence


def _counting(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write a few symbols many times, a mark, and each of them with its number; the last number means that or more."""
    symbols = choices.sample(SYMBOLS, _COUNTED)
    sequence = GeneratedSequence([choices.one(symbols) for _ in range(length - 1 - 2 * _COUNTED)])
    counts = [sequence.tokens.count(symbol) for symbol in symbols]
    sequence.tokens.append(GO)
    for symbol, count in zip(symbols, counts, strict=True):
        sequence.tokens.append(symbol)
        sequence.answer(NUMBERS[min(count, len(NUMBERS) - 1)])
    return sequence


def _sorting(choices: RandomChoices, length: int) -> GeneratedSequence:
    """Write different symbols in random order, a mark, and the symbols in their order."""
    symbols = choices.sample(SYMBOLS, min((length - 1) // 2, len(SYMBOLS)))
    sequence = GeneratedSequence([*symbols, GO])
    for symbol in sorted(symbols):
        sequence.answer(symbol, symbols.index(symbol))
    return sequence


def _random_symbols(choices: RandomChoices, count: int) -> list[int]:
    return [choices.one(SYMBOLS) for _ in range(count)]


ABILITIES: Mapping[str, Ability] = MappingProxyType(
    {
        "recall": Ability("the value that followed a key, among several pairs", _recall),
        "stacked-recall": Ability("the same with key and value in one token", _stacked_recall),
        "copying": Ability("a part repeated after a mark", _copying),
        "induction": Ability("a part repeated anywhere, without a mark", _induction),
        "needle": Ability("the symbol after a mark, somewhere in random text", _needle),
        "selective-copying": Ability("symbols repeated without the blanks between them", _selective_copying),
        "counting": Ability("how often a symbol occurred", _counting),
        "sorting": Ability("symbols repeated in their order", _sorting),
    }
)


def ability(name: str) -> Ability:
    """Return the ability with a name."""
    if name not in ABILITIES:
        raise DataError(f"no generated task {name!r}.{nearest(name, ABILITIES)} There are: {', '.join(ABILITIES)}")
    return ABILITIES[name]


def sequences(name: str, stream: str, first: int, count: int, length: int) -> tuple[Tokens, Tokens]:
    """Return sequences `first` to `first + count - 1` of a stream as rows of ids, and for each token its distance.

    The distance is the number of tokens back to what an answer follows from, 0 where that is no single token, and -1
    for a token that is no answer. Rows are filled up with blanks. Each row depends on its number alone.
    """
    if length < SHORTEST:
        raise DataError(f"a generated sequence needs at least {SHORTEST} tokens, not {length}")
    write = ability(name).write
    ids, distances = np.full((count, length), BLANK), np.full((count, length), -1)
    for row in range(count):
        sequence = write(RandomChoices(f"oelm {name} {stream} {first + row}"), length)
        ids[row, : len(sequence.tokens)] = sequence.tokens
        for place, evidence in sequence.evidence.items():
            distances[row, place] = 0 if evidence == NO_EVIDENCE else place - evidence
    return ids, distances
