"""Splits by content: independent of the order of rows, class by class; a smaller sample is part of a larger one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.labelled.examples import Examples, by_content, digest, first_share, split_off


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=120),
    st.floats(0.01, 0.5),
    st.floats(0.01, 1.0),
    st.randoms(use_true_random=False),
)
def test_splits_depend_on_content_and_class_alone(rows, share, fraction, random):
    def columns_of(items):
        digests = [digest(f"text {number}") for number, _ in items]
        classes = np.array([name for _, name in items])
        return digests, classes

    digests, classes = columns_of(rows)
    held_out = split_off(digests, classes, share)
    held_out_digests = {value for value, is_held_out in zip(digests, held_out, strict=True) if is_held_out}
    assert all((value in held_out_digests) == is_held_out for value, is_held_out in zip(digests, held_out, strict=True))
    assert not held_out.all()
    in_sample = first_share(digests, classes, fraction)
    for name in np.unique(classes):
        count = int((classes == name).sum())
        assert in_sample[classes == name].sum() == int(np.ceil(round(count * fraction, 6)))
    in_smaller_sample = first_share(digests, classes, fraction * share)
    assert not (in_smaller_sample & ~in_sample).any(), "a smaller share has rows that a larger one lacks"
    distinct = list({number: (number, name) for number, name in rows}.values())
    shuffled = random.sample(distinct, len(distinct))
    for function in (split_off, first_share):
        chosen, chosen_of_shuffled = (
            {items[row] for row in np.flatnonzero(function(*columns_of(items), share))}
            for items in (distinct, shuffled)
        )
        assert chosen == chosen_of_shuffled, "the order of the rows changed the choice"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a b", "A b", "a  b", "c", "d e"]), st.integers(0, 1)), min_size=1, max_size=40
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_order_by_content_does_not_depend_on_the_file(rows, text_answers, random):
    def ordered(items):
        labels = np.array([label for _, label in items], dtype=np.int64)
        answers = [f"answer {label}" for label in labels] if text_answers else None
        examples = Examples([text for text, _ in items], None, labels[:0] if text_answers else labels, answers)
        return [items[row] for row in by_content(examples)]

    assert ordered(rows) == ordered(random.sample(rows, len(rows)))
    assert sorted(ordered(rows)) == sorted(rows)
