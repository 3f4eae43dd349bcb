"""Shared linear algebra against closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate.linalg import (
    complete_basis,
    effective_rank,
    eigh_descending,
    from_triangle,
    gram_triangle,
    leading_eigh,
    nystrom_eigh,
    overlap,
    participation_ratio,
    polar_factor,
    symmetric_power,
    truncated_svd,
    whitening_pair,
    whitening_pair_of_root,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    basis = torch.linalg.qr(random(len(values), len(values), seed=seed)).Q
    return (basis * values) @ basis.T


@settings(deadline=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 100))
def test_eigh_descending_reconstructs_with_fixed_signs(size: int, seed: int) -> None:
    half = random(size, size, seed=seed)
    matrix = half @ half.T
    values, vectors = eigh_descending(matrix)
    assert (values.diff() <= 0).all()
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix, rtol=1e-10, atol=1e-10)
    assert (vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(eigh_descending(matrix.clone())[1], vectors, rtol=0, atol=0)


def test_symmetric_power() -> None:
    matrix = with_spectrum(torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64))
    root = symmetric_power(matrix, 0.5)
    torch.testing.assert_close(root @ root, matrix, rtol=1e-12, atol=1e-12)
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(symmetric_power(matrix, -1) @ matrix, identity, rtol=1e-12, atol=1e-12)
    # the floor stands in for directions that were never seen: 1e-6 of the mean eigenvalue (2 + 0) / 2
    flat = symmetric_power(torch.diag(torch.tensor([2.0, 0.0])), -0.5)
    torch.testing.assert_close(flat.diagonal(), torch.tensor([2**-0.5, 1e3], dtype=torch.float64))


@pytest.mark.parametrize(
    ("size", "k", "decay"),
    [(40, 40, 0.9), (300, 4, 0.9), (300, 100, 0.9), (300, 4, 0.999)],
    ids=["small", "Lanczos", "many", "flat"],
)
def test_leading_eigh_is_the_top_of_the_full_one(size: int, k: int, decay: float) -> None:
    matrix = with_spectrum(decay ** torch.arange(size, dtype=torch.float64))
    values, vectors = leading_eigh(matrix, k)
    exact_values, exact_vectors = eigh_descending(matrix)
    torch.testing.assert_close(values, exact_values[:k], rtol=1e-8, atol=1e-12)
    assert overlap(vectors[:, :4], exact_vectors[:, :4]) == pytest.approx(1, abs=1e-9)
    assert torch.equal(leading_eigh(matrix.clone(), k)[1], vectors)


@settings(deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), transposed=st.booleans(), double=st.booleans())
def test_gram_triangle_is_half_of_the_product(rows: int, columns: int, transposed: bool, double: bool) -> None:
    z = random(columns, rows).T if transposed else random(rows, columns)
    z = z if double else z.float()
    torch.testing.assert_close(from_triangle(gram_triangle(z)), z.T @ z)


@pytest.mark.parametrize(("values", "ratio"), [([1, 1, 1, 1], 4), ([5, 0, 0], 1), ([3, 1], 16 / 10)])
def test_participation_ratio_in_closed_form(values: list[float], ratio: float) -> None:
    assert participation_ratio(with_spectrum(torch.tensor(values).double())) == pytest.approx(ratio, rel=1e-12)


def test_overlap() -> None:
    axes = torch.eye(5)
    assert overlap(axes[:, :2], axes[:, [1, 0]]) == 1
    assert overlap(axes[:, :2], axes[:, 1:3]) == 0.5
    assert overlap(axes[:, :2], axes[:, 3:]) == 0


def test_complete_basis_keeps_what_is_there() -> None:
    begin = torch.linalg.qr(random(7, 2)).Q
    full = complete_basis(begin, 5, torch.Generator().manual_seed(0))
    assert torch.equal(full[:, :2], begin)
    torch.testing.assert_close(full.T @ full, torch.eye(5, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.equal(complete_basis(begin, 1, torch.Generator()), begin[:, :1])


def test_nystrom_is_exact_on_low_rank_and_close_on_decay() -> None:
    low = with_spectrum(torch.cat([torch.tensor([8.0, 4.0, 2.0, 1.0]), torch.zeros(26)]).double())
    test = random(30, 6, seed=3)
    values, vectors = nystrom_eigh(low @ test, test)
    exact_values, exact_vectors = eigh_descending(low)
    torch.testing.assert_close(values[:4], exact_values[:4], rtol=1e-9, atol=1e-9)
    assert values[4:].abs().max() < 1e-9
    assert overlap(vectors[:, :4], exact_vectors[:, :4]) == pytest.approx(1, abs=1e-9)
    decay = with_spectrum(0.5 ** torch.arange(30, dtype=torch.float64))
    test = random(30, 16, seed=4)
    found, exact = nystrom_eigh(decay @ test, test)[1][:, :4], eigh_descending(decay)[1][:, :4]
    assert overlap(found, exact) > 0.9999


def test_eigenvectors_and_signs_of_a_batch_are_those_of_each_matrix() -> None:
    square = torch.randn(3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    square = square @ square.mT
    values, vectors = eigh_descending(square)
    for index, matrix in enumerate(square):
        one_values, one_vectors = eigh_descending(matrix)
        assert torch.allclose(values[index], one_values, rtol=1e-12)
        assert torch.allclose(vectors[index], one_vectors, atol=1e-10)


def test_effective_rank_of_flat_decaying_and_zero_spectra() -> None:
    sigma = torch.tensor([[3.0, 3.0, 3.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.125, 0.125]])
    # the entropy of (1/2, 1/4, 1/8, 1/8) is 7/4 bits
    assert torch.allclose(effective_rank(sigma), torch.tensor([3.0, 1.0, 0.0, 2**1.75]))


def test_the_polar_factor_is_the_nearest_isometry_and_unique_when_rank_is_missing() -> None:
    generator = torch.Generator().manual_seed(2)
    tall = torch.randn(2, 8, 3, dtype=torch.float64, generator=generator)
    factor = polar_factor(tall)
    assert torch.allclose(factor.mT @ factor, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-12)
    positive = factor.mT @ tall  # the other factor of the polar decomposition: symmetric and positive
    assert torch.allclose(positive, positive.mT, atol=1e-12)
    assert torch.allclose(torch.linalg.eigvalsh(positive), torch.linalg.svdvals(tall).flip(-1))
    twice = torch.cat([tall[0, :, :1], tall[0, :, :1]], dim=1)
    assert torch.allclose(polar_factor(twice), twice / twice.norm(), atol=1e-12)
    assert not polar_factor(torch.zeros(4, 2, dtype=torch.float64)).any()


@pytest.mark.parametrize("solver", ["eigh", "cholesky"])
def test_a_whitening_pair_whitens(solver: str) -> None:
    rows = random(30, 5) @ torch.diag(torch.tensor([1.0, 1e-3, 10.0, 1.0, 0.0]).double())
    gram, eye = rows.T @ rows, torch.eye(5, dtype=torch.float64)
    S, S_inv = whitening_pair(gram, 1e-4, solver)  # type: ignore[arg-type]
    torch.testing.assert_close(S @ S.T, gram + 1e-4 * eye, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(S_inv @ S, eye, rtol=1e-8, atol=1e-8)
    root = torch.linalg.qr(rows, mode="r").R
    R, R_inv = whitening_pair_of_root(root, 1e-4)
    torch.testing.assert_close(R @ R.T, S @ S.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(R_inv @ R, eye, rtol=1e-8, atol=1e-8)


def test_whitening_goes_on_where_cholesky_fails_and_stops_at_nothing() -> None:
    """A Gram matrix of rank 1 whose other eigenvalues rounding has made negative."""
    indefinite = torch.diag(torch.tensor([1.0, -1e-12, 0.0]).double())
    S, S_inv = whitening_pair(indefinite, 1e-13, "cholesky")
    torch.testing.assert_close(S @ S.T, torch.diag(torch.tensor([1.0, 0.0, 0.0]).double()), rtol=1e-9, atol=1e-11)
    assert S_inv.isfinite().all()
    with pytest.raises(torch.linalg.LinAlgError, match="is zero"):
        whitening_pair(torch.zeros(3, 3), 0.0)
    with pytest.raises(torch.linalg.LinAlgError, match="is singular"):
        whitening_pair_of_root(torch.zeros(2, 3), 0.0)


def test_the_truncated_svd_is_the_best_of_its_rank() -> None:
    matrix = random(7, 5)
    U, sigma, Vt = truncated_svd(matrix, 2)
    assert (U.shape, sigma.shape, Vt.shape) == ((7, 2), (5,), (2, 5))
    left = torch.linalg.norm(matrix - U * sigma[:2] @ Vt).square()
    torch.testing.assert_close(left, torch.linalg.svdvals(matrix)[2:].square().sum())
