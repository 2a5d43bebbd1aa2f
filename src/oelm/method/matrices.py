"""Orthonormal and other matrices for projections: pure functions, seeded by name, float32 or higher inside.

A projection's weight is (rows, width), rows = heads * d_head. Functions that make or measure orthonormal matrices take
the number of `blocks` that the rows are split into: one per head for head-wise matrices, 1 for a matrix that is
orthonormal over all heads at once. A block with no more rows than columns has orthonormal rows; a taller one (a
feed-forward layer) has orthonormal columns.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from ..errors import MethodError

# Orders of the seed matrices that Sylvester doubling starts from: 1, and Paley's construction for the primes 11 and 19.
_HADAMARD_SEEDS = {1: None, 12: 11, 20: 19}


def generator(seed: int, name: str) -> torch.Generator:
    """Return the random stream of one tensor: a function of the seed and the tensor's full name, of nothing else.

    So two models that share a tensor's name share its matrix, whatever else differs between them or was drawn before.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def orthogonal(rows: int, width: int, blocks: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return Haar-distributed orthonormal blocks: Q of a Gaussian's QR, with R's diagonal made positive."""
    return factor_qr(gaussian(rows, width, 1.0, rng, dtype), blocks)[1]


def gaussian(rows: int, width: int, std: float, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return independent N(0, std²) entries."""
    return torch.randn(rows, width, generator=rng, dtype=dtype) * std


def identity(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the first `rows` rows of the identity: row i reads coordinate i of the hidden state."""
    if rows > width:
        raise MethodError(f"identity: {rows} rows cannot each read another one of {width} coordinates")
    return torch.eye(rows, width, dtype=dtype)


def hadamard(rows: int, width: int, blocks: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return randomised Hadamard blocks: random rows of the transform in random order, with random signs on columns."""
    per_block = _rows_per_block(rows, blocks)
    if per_block > width:
        raise MethodError(f"{per_block} rows of width {width} cannot be orthonormal")
    transform = hadamard_matrix(width, dtype)
    parts = []
    for _ in range(blocks):
        signs = torch.randint(0, 2, (width,), generator=rng).to(dtype) * 2 - 1
        chosen = torch.randperm(width, generator=rng)[:per_block]
        parts.append(transform[chosen] * signs)
    return torch.cat(parts)


def hadamard_matrix(order: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an orthonormal (order, order) matrix with entries ±1/√order, for orders 2ᵐ, 12·2ᵐ and 20·2ᵐ."""
    prime = _HADAMARD_SEEDS[hadamard_seed(order)]
    matrix = torch.ones(1, 1, dtype=dtype) if prime is None else _paley(prime, dtype)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(order)


def hadamard_seed(order: int) -> int:
    """Return the order of the seed matrix that doubles up to this one: 1, 12 or 20. Raise where there is none."""
    for seed_order in _HADAMARD_SEEDS:
        doublings, rest = divmod(order, seed_order)
        if rest == 0 and doublings > 0 and doublings & (doublings - 1) == 0:
            return seed_order
    raise MethodError(
        f"hadamard: no transform of width {order} is built in; the width must be 2^m, 12*2^m or 20*2^m. "
        "Use init 'orthogonal' for this model."
    )


def factor_qr(weight: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return (C, B) with each block W = C @ B (B @ C where it is tall), by QR.

    B is orthonormal, C is triangular with a positive diagonal.
    """
    parts, tall = _split(weight, blocks)
    basis, upper = torch.linalg.qr(parts if tall else parts.mT)
    signs = torch.where(torch.diagonal(upper, dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper.dtype)
    # A positive diagonal makes QR unique, and the Q of a Gaussian uniform over the orthogonal matrices.
    basis *= signs[..., None, :]
    upper *= signs[..., :, None]
    return (upper, basis.reshape(weight.shape)) if tall else (upper.mT, basis.mT.reshape(weight.shape))


def factor_polar(weight: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return (C, B) with each block W = C @ B (B @ C where it is tall), by polar decomposition.

    B is the orthonormal block nearest to W, C is symmetric.
    """
    parts, tall = _split(weight, blocks)
    left, spread, right = torch.linalg.svd(parts, full_matrices=False)
    outer = right.mT if tall else left
    stretch = (outer * spread[..., None, :]) @ outer.mT
    return stretch, (left @ right).reshape(weight.shape)


def orthogonality_error(weight: Tensor, heads: int) -> float:
    """Return the largest entry of |W Wᵀ - I| over the heads' blocks (of |Wᵀ W - I| for blocks taller than wide)."""
    parts, tall = _split(weight.detach().to("cpu", torch.float64), heads)
    gram = parts.mT @ parts if tall else parts @ parts.mT
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max())


def _split(weight: Tensor, blocks: int) -> tuple[Tensor, bool]:
    """Return (blocks, rows per block, width) and whether a block is taller than wide."""
    rows, width = weight.shape
    per_block = _rows_per_block(rows, blocks)
    return weight.reshape(blocks, per_block, width), per_block > width


def _rows_per_block(rows: int, blocks: int) -> int:
    per_block, rest = divmod(rows, blocks)
    if rest:
        raise MethodError(f"{rows} rows cannot be cut into {blocks} heads of equal size")
    return per_block


def _paley(prime: int, dtype: torch.dtype) -> Tensor:
    """Return, by Paley's first construction, a Hadamard matrix of order prime + 1, for a prime that is 3 modulo 4."""
    squares = {i * i % prime for i in range(1, prime)}
    character = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, prime)], dtype=dtype)
    index = torch.arange(prime)
    matrix = torch.ones(prime + 1, prime + 1, dtype=dtype)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = character[(index[None, :] - index[:, None]) % prime] + torch.eye(prime, dtype=dtype)
    return matrix
