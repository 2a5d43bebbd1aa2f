"""The visible range of a mask is what a look at every token of it gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.models.attention.visible import ranges_for_kernels, visible_ranges


def expected_range(row: list[bool]) -> list[int]:
    """Return a text's range, found token by token."""
    seen = [position for position, is_seen in enumerate(row) if is_seen]
    if not seen:
        return [0, len(row), len(row)]
    first, end = seen[0], seen[-1] + 1
    return [first, end, 0 if all(row[first:end]) else end]


@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)))
def test_the_range_of_every_text(rows):
    ranges = visible_ranges(torch.tensor(rows)[:, None, None])
    assert ranges.tolist() == [expected_range(row) for row in rows]
    assert ranges.dtype == torch.int32


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.zeros(2, 1, 1, 5), "a mask"])
def test_ranges_are_for_kernels_alone(mask):
    assert ranges_for_kernels(mask) is None, "on the CPU, and of masks that are not boolean, none is computed"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 4, 1, 5), (2, 1, 3, 5), (2, 5)])
def test_ranges_on_a_gpu(shape):
    ranges = ranges_for_kernels(torch.ones(shape, dtype=torch.bool, device="cuda"))
    assert ranges is None if shape != (2, 1, 1, 5) else ranges.tolist() == [[0, 5, 0]] * 2
