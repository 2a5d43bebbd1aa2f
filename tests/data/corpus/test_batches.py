"""Batches: a pure function of seed and position, with every window once per epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import DataError, Windows
from oelm.data.corpus.batches import permutation


def windows(tokens: int = 101, length: int = 10, **options) -> Windows:
    return Windows(np.arange(tokens, dtype=np.uint16), length, **options)


def test_a_window_holds_inputs_and_shifted_targets():
    data = windows(31, 10)
    assert len(data) == 3
    rows = data.sequential(0, 3)
    assert rows.dtype == np.int64
    assert rows.tolist() == [list(range(11)), list(range(10, 21)), list(range(20, 31))]


@pytest.mark.parametrize(("tokens", "count"), [(11, 1), (20, 1), (21, 2), (30, 2), (31, 3)])
def test_a_window_is_counted_only_if_all_its_targets_exist(tokens, count):
    assert len(windows(tokens, 10)) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 5))
def test_every_window_occurs_once_per_epoch(tokens, length, seed, epoch):
    if tokens <= length:
        return
    data = windows(tokens, length, seed=seed)
    rows = data.batch(epoch * len(data), len(data))
    targets = np.sort(rows[:, 1:].ravel())
    assert targets.tolist() == list(range(1, len(data) * length + 1))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.integers(1, 30))
def test_a_batch_does_not_depend_on_what_was_read_before(firsts, count):
    used = windows(151, 10, seed=5)
    for first in firsts:
        assert np.array_equal(used.batch(first, count), windows(151, 10, seed=5).batch(first, count))


def test_a_batch_may_straddle_epochs():
    data = windows(51, 10, seed=1)  # five windows
    single = [data.batch(sample, 1)[0].tolist() for sample in range(17)]
    assert data.batch(0, 17).tolist() == single
    assert data.batch(3, 9).tolist() == single[3:12]
    assert sorted(single[:5]) == sorted(single[5:10])
    assert single[:5] != single[5:10]


def test_only_the_orders_of_two_epochs_are_cached():
    data = windows()
    data.batch(0, 95)
    cache = data._order.cache_info()
    assert (cache.currsize, cache.misses) == (2, 10)
    data.batch(85, 10)  # from the last two epochs
    assert data._order.cache_info().misses == 10


def test_orders_differ_between_seeds_and_never_change():
    assert permutation(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(1, 0, 8).tolist() != permutation(0, 0, 8).tolist() != permutation(0, 1, 8).tolist()


def test_a_fraction_keeps_the_beginning():
    whole, part = windows(1001, 10), windows(1001, 10, fraction=0.25)
    assert (len(whole), len(part)) == (100, 24)
    assert part.batch(0, len(part)).max() <= 250


def test_the_last_sequential_rows_may_be_fewer():
    data = windows(101, 10)
    assert data.sequential(8, 4).tolist() == data.sequential(8, 2).tolist()
    assert data.sequential(10, 4).shape == (0, 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 10, "length": 10}, r"11 tokens, the corpus .*10.*data\.sequence_length"),
        ({"tokens": 10, "length": 10, "text": "the validation text"}, "11 tokens, the validation text .*10"),
        ({"tokens": 100, "length": 60, "fraction": 0.5}, "the first 0.5 of 100"),
        ({"length": 0}, "length 0"),
        ({"fraction": 0.0}, "fraction 0.0"),
        ({"fraction": 1.5}, "fraction 1.5"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_windows_that_cannot_be_made_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        windows(**arguments)


def test_invalid_positions_are_refused():
    data = windows()
    for first, count in ((-1, 2), (0, 0)):
        with pytest.raises(DataError):
            data.batch(first, count)
