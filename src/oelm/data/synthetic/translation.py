"""Generate sentences and their translations into an invented language: data for encoder-decoders without a download.

The source is simple English, the target has a grammar of its own, and there is one right translation. What it asks of
each attention:

- order: the verb goes to the end, adjectives follow their noun, times and places come first, and a passive becomes
  active, so that a word's translation may stand anywhere (cross attention);
- agreement: articles, adjectives, verbs and pronouns have the class and the number of a noun that may be far away in
  the source, behind a relative clause or at its end, and an object's case depends on the verb (encoder);
- the sentence ends with a word that says with what its translation began (decoder).

Results on this data compare methods; they say nothing about real languages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...errors import DataError
from .random_choices import RandomChoices
from .word_level import word_level_backend, word_level_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TRAIN_SIZE = 20_000
VALIDATION_SIZE = 500
# Well below the number of different sentences that exist, so that drawing a new one takes few attempts.
LARGEST = 200_000


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "cat dog bird horse cow goat duck frog bear lion king queen teacher farmer baker sailor doctor singer girl boy "
    "friend brother sister guard"
)
ADJECTIVES = _words("big small tall young red white quiet clever strong brave kind poor")
# Regular verbs, so that one word is both the past tense and the participle of the passive.
VERBS = _words("followed called helped watched greeted thanked carried invited pushed warned chased painted")
VERBS_ALONE = _words("danced laughed waited rested jumped worked")
PLACES = _words("garden market river forest bridge castle")
PREPOSITIONS = ("in", "near", "behind")
TIMES = ("yesterday", "today", "once", "later")
_PARTICLES = ("that", "never", "was", "were", "by", "and", "it", "they", "the", "a", "two", "three")

# Determiners in the singular and in the plural.
_DETERMINERS = (("the", "a"), ("the", "two", "three"))
# Endings of what agrees with a noun: by the noun's class, in the singular and in the plural.
AGREEMENT = (("ka", "ki"), ("lo", "le"), ("mu", "mi"))
PLURAL = "ri"
# Endings of an object, by the verb's class.
CASES = ("n", "s")
_ARTICLE, _PRONOUN = "e", "o"
_NUMBERS = {"two": "du", "three": "tri"}
_THAT, _NEVER, _AND = "je", "nai", "u"
# The last word of a sentence, by what stands first in it.
LAST = {"time": "pek", "place": "gon", "agent": "tash"}
# Probabilities: of a plural; of a relative clause, a place and a time; of a denial, a passive and a second clause.
_PLURAL, _RELATIVE, _PLACE, _TIME, _DENIED, _PASSIVE, _SECOND = 0.5, 0.3, 0.4, 0.4, 0.2, 0.35, 0.3
_ADJECTIVE_COUNTS = (0, 0, 1, 1, 2)


@dataclass(frozen=True, slots=True)
class Translation:
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class _Phrase:
    """A noun with what belongs to it, and the clause "that VERB OBJECT" after it."""

    noun: str
    plural: bool
    determiner: str
    adjectives: tuple[str, ...]
    relative: tuple[str, _Phrase] | None = None

    def english(self) -> list[str]:
        noun = f"{self.noun}s" if self.plural else self.noun
        words = [self.determiner, *self.adjectives, noun]
        if self.relative is not None:
            verb, patient = self.relative
            words += ["that", verb, *patient.english()]
        return words

    def translated(self, case: str = "") -> list[str]:
        noun = stem(self.noun) + (PLURAL if self.plural else "") + case
        words = [_ARTICLE + self.ending, noun] if self.determiner == "the" else [noun]
        words += [_NUMBERS[self.determiner]] if self.determiner in _NUMBERS else []
        words += [stem(adjective) + self.ending for adjective in reversed(self.adjectives)]
        if self.relative is not None:
            verb, patient = self.relative
            words += [_THAT, *patient.translated(case_of(verb)), stem(verb) + self.ending]
        return words

    @property
    def ending(self) -> str:
        return AGREEMENT[class_of(self.noun)][self.plural]


def translations(seed: int, count: int) -> list[Translation]:
    """Return `count` different sentences with their translations; fewer are the beginning of more."""
    if seed < 0 or not 0 < count <= LARGEST:
        raise DataError(f"seed {seed}, {count:,} rows: the seed must be at least 0, the rows from 1 to {LARGEST:,}")
    choices = RandomChoices(f"oelm translation {seed}")
    rows: dict[str, Translation] = {}
    while len(rows) < count:
        row = _sentence(choices)
        rows.setdefault(row.source, row)
    return list(rows.values())


def _sentence(choices: RandomChoices) -> Translation:
    agent, patient = _phrase(choices, relative=choices.random() < _RELATIVE), _phrase(choices)
    verb, denied, passive = choices.one(VERBS), choices.random() < _DENIED, choices.random() < _PASSIVE
    time = choices.one(TIMES) if choices.random() < _TIME else None
    place = (choices.one(PREPOSITIONS), choices.one(PLACES)) if choices.random() < _PLACE else None
    second = choices.one(VERBS_ALONE) if choices.random() < _SECOND else None

    never = ["never"] if denied else []
    if passive:
        said = [*patient.english(), "were" if patient.plural else "was", *never, verb, "by", *agent.english()]
    else:
        said = [*agent.english(), *never, verb, *patient.english()]
    for words in ([time] if time else [], [place[0], "the", place[1]] if place else []):
        said = [*words, *said] if choices.random() < 0.5 else [*said, *words]
    said += ["and", "they" if agent.plural else "it", second] if second else []

    written = [stem(time)] if time else []
    written += [stem(place[1]), stem(place[0])] if place else []
    written += [*agent.translated(), *patient.translated(case_of(verb)), stem(verb) + agent.ending]
    written += [_NEVER] if denied else []
    written += [_AND, _PRONOUN + agent.ending, stem(second) + agent.ending] if second else []
    written.append(LAST["time" if time else "place" if place else "agent"])
    return Translation(" ".join(said), " ".join(written))


def _phrase(choices: RandomChoices, relative: bool = False) -> _Phrase:
    plural = choices.random() < _PLURAL
    return _Phrase(
        noun=choices.one(NOUNS),
        plural=plural,
        determiner=choices.one(_DETERMINERS[plural]),
        adjectives=tuple(choices.sample(ADJECTIVES, choices.one(_ADJECTIVE_COUNTS))),
        relative=(choices.one(VERBS), _phrase(choices)) if relative else None,
    )


def class_of(noun: str) -> int:
    """Return the class of a noun, which is known only from the noun itself."""
    return NOUNS.index(noun) % len(AGREEMENT)


def case_of(verb: str) -> str:
    """Return the ending of a verb's object."""
    return CASES[VERBS.index(verb) % len(CASES)]


def stem(word: str) -> str:
    """Return the translation of an English word without its endings."""
    return _lexicon()[word]


@lru_cache(maxsize=1)
def _lexicon() -> dict[str, str]:
    """Return an invented stem of two syllables for each word; all are different, and no seed changes them."""
    choices = RandomChoices("oelm translation lexicon")
    syllables = [consonant + vowel for consonant in "bdfghklmnprstvz" for vowel in "aeiou"]
    words = (*NOUNS, *ADJECTIVES, *VERBS, *VERBS_ALONE, *PLACES, *PREPOSITIONS, *TIMES)
    stems: list[str] = []
    while len(stems) < len(words):
        new = choices.one(syllables) + choices.one(syllables)
        if new not in stems:
            stems.append(new)
    return dict(zip(words, stems, strict=True))


def translation_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose vocabulary is every word of both languages, in all of its forms."""
    return word_level_tokenizer(_backend())


@lru_cache(maxsize=1)
def _backend() -> Tokenizer:
    endings = [ending for pair in AGREEMENT for ending in pair]
    english = [*NOUNS, *(f"{noun}s" for noun in NOUNS), *ADJECTIVES, *VERBS, *VERBS_ALONE, *PLACES, *PREPOSITIONS]
    nouns = [stem(noun) + number + case for noun in NOUNS for number in ("", PLURAL) for case in ("", *CASES)]
    agreeing = (*map(stem, (*ADJECTIVES, *VERBS, *VERBS_ALONE)), _ARTICLE, _PRONOUN)
    others = [*map(stem, (*PLACES, *PREPOSITIONS, *TIMES)), *_NUMBERS.values(), _THAT, _NEVER, _AND, *LAST.values()]
    inflected = [beginning + ending for beginning in agreeing for ending in endings]
    return word_level_backend([*english, *TIMES, *_PARTICLES, *nouns, *inflected, *others])
