"""The matrices are orthonormal for every shape, dtype and seed, reproducible to the bit, and refused if impossible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oelm import MethodError
from oelm.method import matrices

examples = settings(max_examples=100, deadline=None)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HADAMARD_WIDTHS = [1, 2, 8, 64, 12, 24, 96, 20, 40, 160]

dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(-(2**70), 2**70)
# (blocks, rows per block, width): square matrices, wide ones, and tall ones like a feed-forward matrix.
shapes = st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(1, 40))


def weight(rows: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    return matrices.gaussian(rows, width, 0.3, matrices.generator(seed, "weight"), dtype)


def blocks_of(matrix: Tensor, blocks: int) -> Tensor:
    return matrix.view(blocks, -1, matrix.shape[1])


def product(coefficient: Tensor, basis: Tensor, blocks: int) -> Tensor:
    parts = blocks_of(basis, blocks)
    tall = parts.shape[1] > parts.shape[2]
    return (parts @ coefficient if tall else coefficient @ parts).reshape(basis.shape)


@examples
@given(shapes, dtypes, seeds)
def test_orthogonal_blocks_are_orthonormal_for_every_shape(shape, dtype, seed):
    blocks, per_block, width = shape
    matrix = matrices.orthogonal(blocks * per_block, width, blocks, matrices.generator(seed, "q"), dtype)
    assert matrix.shape == (blocks * per_block, width)
    assert matrix.dtype == dtype
    assert matrices.orthogonality_error(matrix, blocks) < TOLERANCE[dtype]


@examples
@given(st.sampled_from(HADAMARD_WIDTHS), st.integers(1, 4), dtypes, seeds, st.data())
def test_hadamard_blocks_are_orthonormal_and_all_entries_have_one_magnitude(width, blocks, dtype, seed, data):
    per_block = data.draw(st.integers(1, width))
    matrix = matrices.hadamard(blocks * per_block, width, blocks, matrices.generator(seed, "q"), dtype)
    assert matrices.orthogonality_error(matrix, blocks) < TOLERANCE[dtype]
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, 1 / math.sqrt(width)))


@examples
@given(st.integers(1, 40), st.data(), dtypes)
def test_identity_reads_one_coordinate_per_row(width, data, dtype):
    rows = data.draw(st.integers(1, width))
    matrix = matrices.identity(rows, width, dtype)
    hidden = torch.arange(width, dtype=dtype)
    assert torch.equal(matrix @ hidden, hidden[:rows])
    assert matrices.orthogonality_error(matrix, 1) == 0


@examples
@given(shapes, dtypes, seeds, st.sampled_from([matrices.factor_qr, matrices.factor_polar]))
def test_factors_are_orthonormal_and_reproduce_the_weight(shape, dtype, seed, factor):
    blocks, per_block, width = shape
    original = weight(blocks * per_block, width, seed, dtype)
    coefficient, basis = factor(original, blocks)
    smaller = min(per_block, width)
    assert coefficient.shape == (blocks, smaller, smaller)
    assert coefficient.dtype == basis.dtype == dtype
    assert matrices.orthogonality_error(basis, blocks) < TOLERANCE[dtype]
    torch.testing.assert_close(product(coefficient, basis, blocks), original, atol=TOLERANCE[dtype], rtol=0)


@examples
@given(shapes, dtypes, seeds)
def test_qr_gives_a_triangular_coefficient_with_a_positive_diagonal(shape, dtype, seed):
    """The signs make QR unique, and the QR of a Gaussian uniform over the orthogonal matrices."""
    blocks, per_block, width = shape
    coefficient, basis = matrices.factor_qr(weight(blocks * per_block, width, seed, dtype), blocks)
    triangle = coefficient.triu() if per_block > width else coefficient.tril()
    assert torch.equal(coefficient, triangle)
    assert (torch.diagonal(coefficient, dim1=-2, dim2=-1) > 0).all()
    second_coefficient, second_basis = matrices.factor_qr(basis, blocks)
    torch.testing.assert_close(second_basis, basis, atol=10 * TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(
        second_coefficient,
        torch.eye(min(per_block, width), dtype=dtype).expand_as(second_coefficient),
        atol=1e-4,
        rtol=0,
    )


@examples
@given(shapes, dtypes, seeds)
def test_qr_differs_from_lapacks_by_signs_alone_and_leaves_the_weight_as_it_was(shape, dtype, seed):
    blocks, per_block, width = shape
    old = weight(blocks * per_block, width, seed, dtype)
    coefficient, basis = matrices.factor_qr(old, blocks)
    assert torch.equal(old, weight(blocks * per_block, width, seed, dtype))
    tall, parts, made = per_block > width, blocks_of(old, blocks), blocks_of(basis, blocks)
    columns, triangle = torch.linalg.qr(parts if tall else parts.mT)
    signs = torch.where(torch.diagonal(triangle, dim1=-2, dim2=-1) < 0, -1, 1)
    assert torch.equal(made if tall else made.mT, columns * signs[:, None, :])
    assert torch.equal(coefficient if tall else coefficient.mT, triangle * signs[:, :, None])


@examples
@given(shapes, seeds, st.integers(0, 2**31))
def test_polar_is_the_nearest_orthonormal_matrix(shape, seed, other_seed):
    blocks, per_block, width = shape
    original = weight(blocks * per_block, width, seed, torch.float64)
    stretch, nearest = matrices.factor_polar(original, blocks)
    torch.testing.assert_close(stretch, stretch.mT, atol=1e-12, rtol=0)
    assert (torch.linalg.eigvalsh(stretch) > -1e-12).all()
    rivals = [
        matrices.factor_qr(original, blocks)[1],
        matrices.orthogonal(*original.shape, blocks, matrices.generator(other_seed, "rival"), torch.float64),
        matrices.factor_qr(nearest + 0.05 * weight(*original.shape, other_seed, torch.float64), blocks)[1],
        -nearest,
    ]
    assert all((original - nearest).norm() <= (original - rival).norm() + 1e-12 for rival in rivals)


@examples
@given(shapes, seeds, st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_cast_matrix_is_orthonormal_up_to_the_rounding_of_its_dtype(shape, seed, narrow):
    blocks, per_block, width = shape
    matrix = matrices.orthogonal(blocks * per_block, width, blocks, matrices.generator(seed, "q")).to(narrow)
    assert matrices.orthogonality_error(matrix, blocks) < TOLERANCE[narrow]


@pytest.mark.parametrize("factor", [matrices.factor_qr, matrices.factor_polar])
@pytest.mark.parametrize("original", [torch.zeros(6, 8), torch.ones(6, 8), torch.eye(6, 8) * 1e-20], ids=str)
def test_weights_of_low_rank_still_give_orthonormal_blocks(factor, original):
    coefficient, basis = factor(original, 2)
    assert matrices.orthogonality_error(basis, 2) < 1e-5
    torch.testing.assert_close(product(coefficient, basis, 2), original, atol=1e-5, rtol=0)


MAKERS = {
    "orthogonal": lambda rng: matrices.orthogonal(12, 24, 3, rng),
    "gaussian": lambda rng: matrices.gaussian(12, 24, 0.02, rng),
    "hadamard": lambda rng: matrices.hadamard(12, 24, 3, rng),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@examples
@given(seed=seeds, name=st.text(max_size=20))
def test_a_matrix_depends_on_the_seed_and_the_name_alone(make, seed, name):
    first = make(matrices.generator(seed, name))
    torch.rand(7)  # other draws must make no difference
    assert torch.equal(first, make(matrices.generator(seed, name)))
    assert not torch.equal(first, make(matrices.generator(seed + 1, name)))
    assert not torch.equal(first, make(matrices.generator(seed, name + ".")))


def test_streams_are_the_same_on_every_machine_and_version():
    rng = matrices.generator(0, "bert.encoder.layer.0.attention.self.query.weight")
    assert rng.initial_seed() == 5_558_524_419_034_707_796
    assert torch.randint(0, 10**6, (3,), generator=rng).tolist() == [567_055, 213_864, 646_420]


def test_orthogonal_is_uniform_over_rotations_and_reflections():
    """Uniform matrices have entries of mean 0 and mean square 1/width, which holds only with the signs of R fixed."""
    rng = matrices.generator(0, "haar")
    samples = torch.stack([matrices.orthogonal(4, 4, 1, rng, torch.float64) for _ in range(600)])
    assert (samples.mean(0).abs() < 4 * math.sqrt(1 / 4 / 600)).all()
    assert (samples.square().mean(0) - 1 / 4).abs().max() < 0.05


@pytest.mark.parametrize("width", [64, 768, 2048])
def test_matched_gaussian_rows_are_as_long_as_orthonormal_ones(width):
    matrix = matrices.gaussian(512, width, width**-0.5, matrices.generator(0, "q"))
    assert matrix.norm(dim=1).mean().item() == pytest.approx(1, abs=0.01)
    assert matrix.mean().abs() < 5 / width


def test_a_gaussian_matrix_has_the_requested_std():
    matrix = matrices.gaussian(400, 500, 0.02, matrices.generator(0, "q"))
    assert matrix.std().item() == pytest.approx(0.02, rel=0.01)


def test_a_global_matrix_is_orthonormal_within_each_head_too():
    matrix = matrices.orthogonal(48, 64, 1, matrices.generator(0, "q"))
    assert matrices.orthogonality_error(matrix, 1) < 1e-5
    assert matrices.orthogonality_error(matrix, 4) < 1e-5


def test_a_head_wise_matrix_is_not_orthonormal_over_all_heads():
    matrix = matrices.orthogonal(48, 64, 4, matrices.generator(0, "q"))
    assert matrices.orthogonality_error(matrix, 4) < 1e-5
    assert matrices.orthogonality_error(matrix, 1) > 0.1


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
def test_orthogonality_error_is_the_largest_difference_from_the_identity(matrix, error):
    assert matrices.orthogonality_error(matrix, 1) == pytest.approx(error)


def test_orthogonality_error_detects_one_bad_head_and_is_nan_for_a_nan():
    matrix = matrices.orthogonal(16, 32, 4, matrices.generator(0, "q"))
    matrix[13] *= 1.01
    assert matrices.orthogonality_error(matrix, 4) == pytest.approx(0.0201, rel=1e-3)
    matrix[13, 0] = math.nan
    assert math.isnan(matrices.orthogonality_error(matrix, 4))


@pytest.mark.parametrize("order", HADAMARD_WIDTHS)
def test_hadamard_matrices_of_every_supported_kind_of_order_are_orthonormal(order):
    assert matrices.orthogonality_error(matrices.hadamard_matrix(order, torch.float64), 1) < 1e-13


@pytest.mark.parametrize("order", [0, 7, 28, 36, 60, 100])
def test_a_width_without_a_hadamard_matrix_is_refused(order):
    with pytest.raises(MethodError, match=rf"width {order} .*2\^m, 12\*2\^m or 20\*2\^m.*'orthogonal'"):
        matrices.hadamard_matrix(order)


@pytest.mark.parametrize(
    "make",
    [
        lambda: matrices.orthogonal(10, 16, 3, matrices.generator(0, "q")),
        lambda: matrices.hadamard(10, 16, 3, matrices.generator(0, "q")),
        lambda: matrices.factor_qr(torch.ones(10, 16), 3),
        lambda: matrices.factor_polar(torch.ones(10, 16), 3),
        lambda: matrices.orthogonality_error(torch.ones(10, 16), 3),
    ],
)
def test_rows_that_cannot_be_split_into_heads_are_refused(make):
    with pytest.raises(MethodError, match=r"10 rows .* 3 heads"):
        make()


def test_more_orthonormal_rows_than_coordinates_are_refused():
    with pytest.raises(MethodError, match=r"identity: 9 rows .* 8 coordinates"):
        matrices.identity(9, 8)
    with pytest.raises(MethodError, match="9 rows of width 8"):
        matrices.hadamard(9, 8, 1, matrices.generator(0, "q"))
