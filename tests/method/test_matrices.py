"""The matrices: orthonormal over every shape, dtype and seed, reproducible to the bit, and refused where impossible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oelm import MethodError
from oelm.method import matrices as init

examples = settings(max_examples=100, deadline=None)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HADAMARD_WIDTHS = [1, 2, 8, 64, 12, 24, 96, 20, 40, 160]

dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(-(2**70), 2**70)
# blocks x rows per block x width: square, wide, few key heads, and tall as a feed-forward matrix.
shapes = st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(1, 40))


def weight(rows: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    return init.gaussian(rows, width, 0.3, init.generator(seed, "weight"), dtype)


def blocks_of(matrix: Tensor, blocks: int) -> Tensor:
    return matrix.view(blocks, -1, matrix.shape[1])


def product(coefficient: Tensor, basis: Tensor, blocks: int) -> Tensor:
    parts = blocks_of(basis, blocks)
    tall = parts.shape[1] > parts.shape[2]
    return (parts @ coefficient if tall else coefficient @ parts).reshape(basis.shape)


@examples
@given(shapes, dtypes, seeds)
def test_orthogonal_blocks_are_orthonormal_whatever_their_shape(shape, dtype, seed):
    blocks, per_block, width = shape
    made = init.orthogonal(blocks * per_block, width, blocks, init.generator(seed, "q"), dtype)
    assert made.shape == (blocks * per_block, width)
    assert made.dtype == dtype
    assert init.orthogonality_error(made, blocks) < TOLERANCE[dtype]


@examples
@given(st.sampled_from(HADAMARD_WIDTHS), st.integers(1, 4), dtypes, seeds, st.data())
def test_hadamard_blocks_are_orthonormal_with_entries_of_one_size(width, blocks, dtype, seed, data):
    per_block = data.draw(st.integers(1, width))
    made = init.hadamard(blocks * per_block, width, blocks, init.generator(seed, "q"), dtype)
    assert init.orthogonality_error(made, blocks) < TOLERANCE[dtype]
    torch.testing.assert_close(made.abs(), torch.full_like(made, 1 / math.sqrt(width)))


@examples
@given(st.integers(1, 40), st.data(), dtypes)
def test_identity_reads_one_coordinate_per_row(width, data, dtype):
    rows = data.draw(st.integers(1, width))
    made = init.identity(rows, width, dtype)
    hidden = torch.arange(width, dtype=dtype)
    assert torch.equal(made @ hidden, hidden[:rows])
    assert init.orthogonality_error(made, 1) == 0


@examples
@given(shapes, dtypes, seeds, st.sampled_from([init.factor_qr, init.factor_polar]))
def test_factors_are_orthonormal_and_reproduce_the_weight(shape, dtype, seed, factor):
    blocks, per_block, width = shape
    old = weight(blocks * per_block, width, seed, dtype)
    coefficient, basis = factor(old, blocks)
    smaller = min(per_block, width)
    assert coefficient.shape == (blocks, smaller, smaller)
    assert coefficient.dtype == basis.dtype == dtype
    assert init.orthogonality_error(basis, blocks) < TOLERANCE[dtype]
    torch.testing.assert_close(product(coefficient, basis, blocks), old, atol=TOLERANCE[dtype], rtol=0)


@examples
@given(shapes, dtypes, seeds)
def test_qr_gives_a_triangle_with_a_positive_diagonal(shape, dtype, seed):
    """The signs are what makes the QR of a Gaussian uniform over the orthogonal matrices, and QR unique."""
    blocks, per_block, width = shape
    coefficient, basis = init.factor_qr(weight(blocks * per_block, width, seed, dtype), blocks)
    triangle = coefficient.triu() if per_block > width else coefficient.tril()
    assert torch.equal(coefficient, triangle)
    assert (torch.diagonal(coefficient, dim1=-2, dim2=-1) > 0).all()
    again_coefficient, again = init.factor_qr(basis, blocks)
    torch.testing.assert_close(again, basis, atol=10 * TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(
        again_coefficient, torch.eye(min(per_block, width), dtype=dtype).expand_as(again_coefficient), atol=1e-4, rtol=0
    )


@examples
@given(shapes, seeds, st.integers(0, 2**31))
def test_polar_is_the_nearest_orthonormal_matrix(shape, seed, other_seed):
    blocks, per_block, width = shape
    old = weight(blocks * per_block, width, seed, torch.float64)
    stretch, nearest = init.factor_polar(old, blocks)
    torch.testing.assert_close(stretch, stretch.mT, atol=1e-12, rtol=0)
    assert (torch.linalg.eigvalsh(stretch) > -1e-12).all()
    rivals = [
        init.factor_qr(old, blocks)[1],
        init.orthogonal(*old.shape, blocks, init.generator(other_seed, "rival"), torch.float64),
        init.factor_qr(nearest + 0.05 * weight(*old.shape, other_seed, torch.float64), blocks)[1],
        -nearest,
    ]
    assert all((old - nearest).norm() <= (old - rival).norm() + 1e-12 for rival in rivals)


@examples
@given(shapes, seeds, st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_cast_at_the_end_keeps_orthonormality_to_the_dtypes_rounding(shape, seed, narrow):
    blocks, per_block, width = shape
    made = init.orthogonal(blocks * per_block, width, blocks, init.generator(seed, "q")).to(narrow)
    assert init.orthogonality_error(made, blocks) < TOLERANCE[narrow]


@pytest.mark.parametrize("factor", [init.factor_qr, init.factor_polar])
@pytest.mark.parametrize("old", [torch.zeros(6, 8), torch.ones(6, 8), torch.eye(6, 8) * 1e-20], ids=str)
def test_weights_of_low_rank_still_give_orthonormal_blocks(factor, old):
    coefficient, basis = factor(old, 2)
    assert init.orthogonality_error(basis, 2) < 1e-5
    torch.testing.assert_close(product(coefficient, basis, 2), old, atol=1e-5, rtol=0)


MAKERS = {
    "orthogonal": lambda rng: init.orthogonal(12, 24, 3, rng),
    "gaussian": lambda rng: init.gaussian(12, 24, 0.02, rng),
    "hadamard": lambda rng: init.hadamard(12, 24, 3, rng),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@examples
@given(seed=seeds, name=st.text(max_size=20))
def test_the_seed_and_the_name_alone_decide_the_bits(make, seed, name):
    first = make(init.generator(seed, name))
    torch.rand(7)  # what else was drawn does not matter
    assert torch.equal(first, make(init.generator(seed, name)))
    assert not torch.equal(first, make(init.generator(seed + 1, name)))
    assert not torch.equal(first, make(init.generator(seed, name + ".")))


def test_streams_are_the_same_on_every_machine_and_version():
    rng = init.generator(0, "bert.encoder.layer.0.attention.self.query.weight")
    assert rng.initial_seed() == 5_558_524_419_034_707_796
    assert torch.randint(0, 10**6, (3,), generator=rng).tolist() == [567_055, 213_864, 646_420]


def test_orthogonal_is_uniform_over_rotations_and_reflections():
    """Without R's signs the corner of Q would always be negative; uniform, it has mean 0 and mean square 1/width."""
    rng = init.generator(0, "haar")
    corners = torch.stack([init.orthogonal(4, 4, 1, rng, torch.float64) for _ in range(600)])
    assert (corners.mean(0).abs() < 4 * math.sqrt(1 / 4 / 600)).all()
    assert (corners.square().mean(0) - 1 / 4).abs().max() < 0.05


@pytest.mark.parametrize("width", [64, 768, 2048])
def test_matched_gaussian_rows_are_as_long_as_orthonormal_ones(width):
    made = init.gaussian(512, width, width**-0.5, init.generator(0, "q"))
    assert made.norm(dim=1).mean().item() == pytest.approx(1, abs=0.01)
    assert made.mean().abs() < 5 / width


def test_gaussian_has_the_std_it_was_asked_for():
    made = init.gaussian(400, 500, 0.02, init.generator(0, "q"))
    assert made.std().item() == pytest.approx(0.02, rel=0.01)


def test_a_global_matrix_is_orthonormal_within_each_head_too():
    made = init.orthogonal(48, 64, 1, init.generator(0, "q"))
    assert init.orthogonality_error(made, 1) < 1e-5
    assert init.orthogonality_error(made, 4) < 1e-5


def test_a_head_wise_matrix_is_not_orthonormal_over_all_heads():
    made = init.orthogonal(48, 64, 4, init.generator(0, "q"))
    assert init.orthogonality_error(made, 4) < 1e-5
    assert init.orthogonality_error(made, 1) > 0.1


@pytest.mark.parametrize(
    ("matrix", "error"),
    [
        (torch.zeros(4, 8), 1.0),
        (2 * torch.eye(4, 8), 3.0),
        (torch.eye(1, 8).repeat(4, 1), 1.0),
        (torch.eye(8, 4), 0.0),
        (torch.eye(8, 4) * 1.5, 1.25),
    ],
)
def test_orthogonality_error_is_the_largest_entry_off_the_identity(matrix, error):
    assert init.orthogonality_error(matrix, 1) == pytest.approx(error)


def test_orthogonality_error_finds_one_bad_head_and_hides_nothing_that_is_not_a_number():
    made = init.orthogonal(16, 32, 4, init.generator(0, "q"))
    made[13] *= 1.01
    assert init.orthogonality_error(made, 4) == pytest.approx(0.0201, rel=1e-3)
    made[13, 0] = math.nan
    assert math.isnan(init.orthogonality_error(made, 4))


@pytest.mark.parametrize("order", HADAMARD_WIDTHS)
def test_hadamard_matrices_of_every_kind_of_order(order):
    assert init.orthogonality_error(init.hadamard_matrix(order, torch.float64), 1) < 1e-13


@pytest.mark.parametrize("order", [0, 7, 28, 36, 60, 100])
def test_a_width_without_a_hadamard_matrix_is_refused(order):
    with pytest.raises(MethodError, match=rf"width {order} .*2\^m, 12\*2\^m or 20\*2\^m.*'orthogonal'"):
        init.hadamard_matrix(order)


@pytest.mark.parametrize(
    "make",
    [
        lambda: init.orthogonal(10, 16, 3, init.generator(0, "q")),
        lambda: init.hadamard(10, 16, 3, init.generator(0, "q")),
        lambda: init.factor_qr(torch.ones(10, 16), 3),
        lambda: init.factor_polar(torch.ones(10, 16), 3),
        lambda: init.orthogonality_error(torch.ones(10, 16), 3),
    ],
)
def test_rows_that_heads_do_not_divide_are_refused(make):
    with pytest.raises(MethodError, match="10 rows cannot be cut into 3 heads"):
        make()


def test_more_rows_than_coordinates_are_refused_where_rows_must_be_orthonormal():
    with pytest.raises(MethodError, match=r"identity: 9 rows .* 8 coordinates"):
        init.identity(9, 8)
    with pytest.raises(MethodError, match="9 rows of width 8 cannot be orthonormal"):
        init.hadamard(9, 8, 1, init.generator(0, "q"))
