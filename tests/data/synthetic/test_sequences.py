"""Generated sequences: an oracle that knows the rule of each gives every answer from the tokens before it."""

from collections.abc import Callable

import numpy as np
import pytest

from oelm.data.synthetic.sequences import (
    ABILITIES,
    BLANK,
    GO,
    KEYS,
    NUMBERS,
    PAIRS,
    SYMBOLS,
    VALUES,
    VOCABULARY,
    sequences,
)
from oelm.errors import DataError

LENGTHS = (32, 65, 200)


def after_first(before: list[int]) -> int:
    return before[before.index(before[-1]) + 1]


def from_pair(before: list[int]) -> int:
    values = {(pair - PAIRS[0]) // len(VALUES): (pair - PAIRS[0]) % len(VALUES) for pair in before if pair in PAIRS}
    return VALUES[values[KEYS.index(before[-1])]]


def copied(before: list[int]) -> int:
    return before[len(before) - before.index(GO) - 1]


def copied_without_blanks(before: list[int]) -> int:
    said = before.index(GO)
    return [token for token in before[:said] if token != BLANK][len(before) - said - 1]


def counted(before: list[int]) -> int:
    return NUMBERS[min(before[: before.index(GO)].count(before[-1]), len(NUMBERS) - 1)]


def next_in_order(before: list[int]) -> int:
    said = before.index(GO)
    return sorted(before[:said])[len(before) - said - 1]


# What the answer to each is, given the tokens before it; `induction` is tested by itself.
RULES: dict[str, Callable[[list[int]], int]] = {
    "recall": after_first,
    "stacked-recall": from_pair,
    "copying": copied,
    "needle": after_first,
    "selective-copying": copied_without_blanks,
    "counting": counted,
    "sorting": next_in_order,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", RULES)
def test_every_answer_follows_from_the_tokens_before_it(name, length):
    ids, distances = sequences(name, "train 0", 0, 20, length)
    assert ids.shape == distances.shape == (20, length)
    assert 0 <= ids.min() <= ids.max() < VOCABULARY
    for row, back in zip(ids.tolist(), distances.tolist(), strict=True):
        places = [place for place in range(length) if back[place] >= 0]
        assert len(places) >= 4
        assert [row[place] for place in places] == [RULES[name](row[:place]) for place in places]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeated_block_follows_its_first_copy_at_one_distance(length):
    ids, distances = sequences("induction", "train 0", 0, 20, length)
    for row, back in zip(ids, distances, strict=True):
        places = np.flatnonzero(back >= 0)
        assert len(set(back[places])) == 1
        assert np.array_equal(row[places], row[places - back[places]])
        assert row[places[0] - 1] == row[places[0] - 1 - back[places[0]]], "the block's first symbol comes before"


@pytest.mark.parametrize("name", [name for name in ABILITIES if name not in ("stacked-recall", "counting")])
def test_the_distance_leads_to_the_same_token(name):
    ids, distances = sequences(name, "validation", 3, 10, 64)
    rows, places = np.nonzero(distances > 0)
    assert np.array_equal(ids[rows, places], ids[rows, places - distances[rows, places]])


@pytest.mark.parametrize("name", ABILITIES)
def test_a_row_depends_on_its_number_alone(name):
    together = sequences(name, "train 0", 5, 6, 48)
    for alone in (sequences(name, "train 0", 8, 1, 48), sequences(name, "train 0", 8, 3, 48)):
        assert all(np.array_equal(part[3], own[0]) for part, own in zip(together, alone, strict=True))
    others = (sequences(name, "train 1", 5, 6, 48), sequences(name, "validation", 5, 6, 48))
    assert not any(np.array_equal(together[0], other[0]) for other in others)


def test_a_fixed_sequence():
    """Records name their data by a hash, so the sequences of a seed must never change."""
    ids, _ = sequences("needle", "train 0", 0, 1, 32)
    assert ids[0, :16].tolist() == [47, 70, 82, 35, 40, 83, 45, 85, 89, 77, 5, 51, 70, 90, 3, 46]


def test_recall_has_its_keys_before_its_questions():
    ids, distances = sequences("recall", "train 0", 0, 50, 64)
    pairs = set()
    for row, back in zip(ids, distances, strict=True):
        told = int(np.argmax(back >= 0)) - 1  # the first question's key stands before its answer
        assert np.isin(row[:told:2], KEYS).all()
        assert np.isin(row[1:told:2], VALUES).all()
        assert len(set(row[:told].tolist())) == told, "no key and no value comes twice"
        pairs.add(told // 2)
    assert pairs == set(range(2, 9))
    assert set(KEYS) | set(VALUES) <= set(SYMBOLS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recal", "train 0", 0, 1, 64), "no generated task 'recal'. Did you mean 'recall'"),
        (("recall", "train 0", 0, 1, 31), "at least 32 tokens, not 31"),
    ],
)
def test_what_cannot_be_generated_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        sequences(*arguments)
