"""The invented language: reproducible, one right translation, and its grammar, worked out here a second time."""

import subprocess
import sys

import pytest

from oelm.data import DataError, builtin_labelled, open_labelled, translation_tokenizer
from oelm.data.synthetic.translation import (
    ADJECTIVES,
    AGREEMENT,
    LAST,
    NOUNS,
    PLACES,
    PREPOSITIONS,
    TIMES,
    VERBS,
    VERBS_ALONE,
    case_of,
    class_of,
    stem,
    translations,
)

ROWS = translations(0, 1500)


def ending(noun: str, plural: bool) -> str:
    return AGREEMENT[class_of(noun)][plural]


def translate(source: str) -> str:
    """Translate a sentence from its words, from the outside in, without the generator's own phrases."""
    words, second, place, time = source.split(), "", "", ""
    if "and" in words:
        *words, _, _, second = words
    for name in TIMES:
        if name in words:
            time = name
            words.remove(name)
    for place_at, word in enumerate(words):
        if word in PREPOSITIONS:
            place = f"{stem(words[place_at + 2])} {stem(word)}"
            del words[place_at : place_at + 3]
            break
    denied = "never" in words
    words = [word for word in words if word != "never"]
    if "by" in words:
        at = words.index("by")
        agent, patient, verb = words[at + 1 :], words[: at - 2], words[at - 1]
    else:
        verbs = [at for at, word in enumerate(words) if word in VERBS]
        at = verbs[-1]
        agent, patient, verb = words[:at], words[at + 1 :], words[at]
    agreement = ending(*head(agent))
    parts = [stem(time) if time else "", place, phrase(agent, ""), phrase(patient, case_of(verb))]
    parts += [stem(verb) + agreement, "nai" if denied else ""]
    parts += [f"u o{agreement} {stem(second)}{agreement}" if second else ""]
    parts += [LAST["time" if time else "place" if place else "agent"]]
    return " ".join(part for part in parts if part)


def head(words: list[str]) -> tuple[str, bool]:
    """Return the noun of a phrase, which is its first one, and whether it is plural."""
    noun = next(word for word in words if word.removesuffix("s") in NOUNS)
    return noun.removesuffix("s"), noun.endswith("s")


def phrase(words: list[str], case: str) -> str:
    noun, plural = head(words)
    written = [f"e{ending(noun, plural)}"] if words[0] == "the" else []
    written.append(stem(noun) + ("ri" if plural else "") + case)
    written += {"two": ["du"], "three": ["tri"]}.get(words[0], [])
    own = words[: words.index("that")] if "that" in words else words
    written += [stem(word) + ending(noun, plural) for word in reversed(own) if word in ADJECTIVES]
    if "that" in words:
        _, verb, *patient = words[words.index("that") :]
        written += ["je", phrase(patient, case_of(verb)), stem(verb) + ending(noun, plural)]
    return " ".join(written)


def test_every_sentence_has_the_translation_that_the_grammar_gives():
    assert [row for row in ROWS if translate(row.source) != row.target] == []


def test_a_known_sentence_stays_the_same():
    """Records of runs were made with these rows."""
    first = translations(0, 1)[0]
    assert first.source == "today a cat helped three dogs"
    assert first.target == "gaze pusi togerin tri vugaka pek"


def test_the_same_seed_gives_the_same_rows_and_fewer_are_the_first_of_them():
    assert translations(0, 60) == ROWS[:60]
    assert translations(1, 60) != ROWS[:60]
    assert len({row.source for row in ROWS}) == len(ROWS)


def test_rows_do_not_depend_on_the_process():
    code = "from oelm.data import builtin_labelled as b; print(b('translation', train=50, validation=9).sha256)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert result.stdout.strip() == builtin_labelled("translation", train=50, validation=9).sha256


def test_words_of_the_lexicon_are_all_different():
    words = (*NOUNS, *ADJECTIVES, *VERBS, *VERBS_ALONE, *PLACES, *PREPOSITIONS, *TIMES)
    assert len(set(words)) == len({stem(word) for word in words}) == len(words)


def test_agreement_crosses_other_nouns_and_a_reader_must_look_back_for_it():
    """A model that takes the class of the nearest noun would be wrong for many verbs."""
    far = 0
    for row in ROWS:
        words = row.source.split()
        agent = head(words[words.index("by") :] if "by" in words else words)
        nearest = [word for word in words if word.removesuffix("s") in NOUNS][-1]
        far += ending(*agent) != ending(nearest.removesuffix("s"), nearest.endswith("s"))
    assert far > 0.4 * len(ROWS)


@pytest.mark.full
def test_the_default_data_is_disjoint_and_marked_as_synthetic():
    data = open_labelled("builtin:translation", form="text")
    assert data.synthetic
    assert data.labels == ()
    assert "synthetic" in data.description
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 20_000, "validation": 500}
    assert not set(data.splits["train"].texts) & set(data.splits["validation"].texts)


def test_the_tokenizer_knows_every_word_and_writes_the_translation_as_it_is():
    tokenizer = translation_tokenizer()
    for row in ROWS:
        for text in (row.source, row.target):
            ids = tokenizer(text).input_ids
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token) == (0, "[SEP]")


def test_classes_and_impossible_sizes_are_refused():
    with pytest.raises(DataError, match=r"builtin:translation: its answers are texts.*task\.form to 'text'"):
        open_labelled("builtin:translation")
    with pytest.raises(DataError, match=r"1,000,500 rows.*200,000"):
        builtin_labelled("translation", train=10**6)
    with pytest.raises(DataError, match="seed -1"):
        builtin_labelled("translation", seed=-1)
