"""The visible range of a mask is what a look at every token of it gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.models.attention.visible import Visible, visible_ranges, visible_to_token


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
@pytest.mark.parametrize("cached", [4, torch.tensor(4)])
def test_ranges_are_for_kernels_alone(mask, cached):
    assert visible_to_token(mask, cached, False) is None, "on the CPU none is computed"


@pytest.mark.parametrize(
    ("mask", "kind"),
    [(None, "none"), (torch.ones(2, 1, 1, 5, dtype=torch.bool), "boolean"), (torch.zeros(2, 1, 1, 5), "additive")],
)
def test_what_a_kernel_reads_of_a_mask(mask, kind):
    visible = Visible.of(mask)
    assert (visible.mask is mask, visible.kind) == (True, kind)
    assert (visible.ranges is not None) == (kind == "boolean")
    assert Visible(None, torch.tensor([[0, 5, 0]])).kind == "range"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 4, 1, 5), (2, 1, 3, 5), (2, 5)])
def test_ranges_on_a_gpu(shape):
    visible = visible_to_token(torch.ones(shape, dtype=torch.bool, device="cuda"), 4, True)
    assert visible is None if shape != (2, 1, 1, 5) else visible.ranges.tolist() == [[0, 5, 0]] * 2


@pytest.mark.gpu
def test_a_preallocated_cache_without_padding_needs_no_mask_on_a_gpu():
    mask, cached = torch.ones(2, 1, 1, 9, dtype=torch.bool, device="cuda"), torch.tensor(4, device="cuda")
    visible = visible_to_token(mask, cached, False)
    assert (visible.kind, visible.ranges.tolist()) == ("range", [[0, 5, 0]])
    assert visible_to_token(mask, cached, True).kind == "boolean"
