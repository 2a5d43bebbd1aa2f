"""Masks: a pure function of seed and number, exactly so many in a row, and never of a special token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.corpus.masking import NO_TARGET, Masking

VOCABULARY, MASK = 40, 40
# Of the 40 tokens these are special, as is the mask token after them.
SPECIAL = (0, 7, 39)


def masking(count: int = 6, token_share: float = 0.8, random_share: float = 0.1) -> Masking:
    ordinary = np.ones(VOCABULARY + 1, dtype=np.bool_)
    ordinary[[*SPECIAL, MASK]] = False
    return Masking(count, MASK, ordinary, token_share, random_share)


def rows(count: int, length: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 10**12), st.integers(1, 9), st.integers(0, 8))
def test_masks_follow_from_the_seed_and_the_number_alone(seed, first, count, start):
    text, masks = rows(9), masking()
    together = masks.mask(text, first, seed)
    start = min(start, 9 - count)
    alone = masking().mask(text[start : start + count], first + start, seed)
    for whole, part in zip(together, alone, strict=True):
        assert np.array_equal(whole[start : start + count], part)


def test_other_seeds_and_numbers_give_other_masks():
    text = rows(50)
    positions = [masking().mask(text, first, seed).positions for first, seed in ((0, 0), (0, 1), (50, 0), (0, 2**64))]
    for number, one in enumerate(positions):
        for other in positions[:number]:
            assert (one != other).any(axis=1).mean() > 0.9


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(0, 2**32),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.integers(0, 39), min_size=24),
)
def test_only_ordinary_tokens_are_chosen_and_only_chosen_ones_replaced(count, seed, token_share, rest, tokens):
    masks = masking(count, token_share, rest * (1 - token_share))
    text = np.array([tokens[:24], tokens[-24:], [0] * 24])
    inputs, positions, targets = masks.mask(text, 5, seed)
    assert positions.shape == targets.shape == (3, count)
    for row in range(3):
        assert len(set(positions[row])) == count
        chosen = positions[row][targets[row] != NO_TARGET]
        assert len(chosen) == min(count, int(masks.ordinary[text[row]].sum()))
        assert np.array_equal(targets[row][targets[row] != NO_TARGET], text[row][chosen])
        assert not set(text[row][chosen]) & {*SPECIAL, MASK}
        others = np.setdiff1d(np.arange(24), chosen)
        assert np.array_equal(inputs[row][others], text[row][others])
        assert set(inputs[row][chosen]) <= set(np.flatnonzero(masks.ordinary)) | {MASK}
    assert masks.targets_in(text) == int((targets != NO_TARGET).sum())


@pytest.mark.parametrize(("token_share", "random_share"), [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.3, 0.5)])
def test_the_shares_are_those_asked_for(token_share, random_share):
    text = rows(8000)
    inputs, positions, targets = masking(6, token_share, random_share).mask(text, 0, 3)
    now = np.take_along_axis(inputs, positions, axis=1)
    assert (targets != NO_TARGET).mean() > 0.999, "rows have enough ordinary tokens"
    of_mask, kept = (now == MASK).mean(), (now == targets).mean()
    by_chance = random_share / (VOCABULARY - len(SPECIAL))  # a random token may be the one that stood there
    assert of_mask == pytest.approx(token_share, abs=0.01)
    assert kept == pytest.approx(1 - token_share - random_share + by_chance, abs=0.01)
    replacements = now[(now != MASK) & (now != targets)]
    if random_share:
        shares = np.bincount(replacements, minlength=VOCABULARY + 1) / len(replacements)
        assert set(np.flatnonzero(shares)) == set(np.flatnonzero(masking().ordinary))
        assert shares.max() < 2 * shares[shares > 0].min(), "every ordinary token about as often"


def test_every_position_is_chosen_as_often():
    text = rows(8000)
    inputs, positions, _ = masking().mask(np.where(np.isin(text, SPECIAL), 1, text), 0, 0)
    shares = np.bincount(positions.ravel(), minlength=24) / len(inputs)
    assert shares == pytest.approx(np.full(24, 6 / 24), abs=0.025)
    assert inputs.dtype == positions.dtype == np.int64
