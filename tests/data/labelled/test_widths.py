"""The few widths that batches are padded to: enough for every text, at most as many as asked, with least padding."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.labelled.encoded import LengthGrouped
from oelm.data.labelled.widths import padded_width, plan_widths

LONGEST = st.lists(st.integers(1, 80), min_size=1, max_size=60).map(lambda values: np.array(values, dtype=np.int64))


def padded_tokens(longest: np.ndarray, widths: tuple[int, ...]) -> int:
    return sum(padded_width(int(length), widths) for length in longest)


@given(longest=LONGEST, spare=st.integers(0, 20), most=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_no_choice_of_as_many_widths_has_much_less_padding(longest, spare, most):
    limit = int(longest.max()) + spare
    widths = plan_widths(longest, limit, most)
    assert widths == tuple(sorted(set(widths)))
    assert 1 <= len(widths) <= most
    assert all(width % 8 == 0 for width in widths)
    assert limit <= widths[-1] < limit + 8, "the largest width is that of the longest text"
    smaller = range(8, widths[-1], 8)
    best = min(
        padded_tokens(longest, (*chosen, widths[-1]))
        for count in range(min(most, len(smaller) + 1))
        for chosen in combinations(smaller, count)
    )
    assert padded_tokens(longest, widths) <= 1.01 * best


def test_widths_that_save_nothing_are_left_out():
    assert plan_widths(np.full(50, 30), 32, 6) == (32,)
    assert plan_widths(np.array([8, 16] * 50), 16, 6) == (8, 16)
    assert plan_widths(np.array([8] * 1 + [64] * 500), 64, 6) == (64,), "one short batch is not worth a width"


def test_a_text_longer_than_all_widths_is_padded_to_the_next_multiple():
    assert [padded_width(length, (16, 40)) for length in (1, 16, 17, 40, 41)] == [16, 16, 40, 40, 48]
    assert padded_width(9, ()) == 16


def test_widths_depend_on_the_order_alone_and_hold_every_batch():
    lengths = np.random.default_rng(0).gamma(2.0, 20.0, 3000).astype(np.int64) + 3
    order = LengthGrouped(lengths, 16, seed=0)
    widths = order.widths(lengths, int(lengths.max()), 6)
    assert len(widths) == 6
    assert widths == LengthGrouped(lengths, 16, seed=0).widths(lengths, int(lengths.max()), 6)
    batches = lengths[order.chosen(0, order.slots // 16 * 16).reshape(-1, 16)].max(1)
    own, few = padded_tokens(batches, ()), padded_tokens(batches, widths)
    assert few < 1.15 * own, "six widths cost little padding; one, 4 times as much"


def test_a_part_of_a_batch_finds_the_whole_batch():
    lengths = np.arange(1, 22)
    order = LengthGrouped(lengths, 8, seed=0)
    whole = order.chosen(8, 8).tolist()
    assert order.whole_batches(10, 2).tolist() == order.whole_batches(8, 8).tolist() == whole
    assert order.whole_batches(16, 8).tolist() == order.chosen(16, 5).tolist(), "without empty slots"
    assert order.whole_batches(23, 2).tolist() == order.chosen(16, 5).tolist() + order.chosen(24, 8).tolist()
