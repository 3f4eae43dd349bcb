"""Frames are tight where the rule says they exist; positions are distinct, inside their support, and a function of the seed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate.adapters.tight_frames import (
    Basis,
    auto_l,
    check_frame,
    draw_positions,
    frame_exists,
    frame_rows,
    haar,
    spectral_tetris,
)

SQUARE = [(288, 2, 576), (24, 24, 576), (16, 12, 192), (48, 32, 1536)]
OTHER = [(12, 6, 40), (9, 10, 44), (30, 24, 576)]


@pytest.mark.parametrize(("k", "ell", "n"), SQUARE + OTHER)
def test_frame_is_tight(k: int, ell: int, n: int) -> None:
    frame = frame_rows(k, ell, n)
    assert frame.shape == (k * ell, n)
    np.testing.assert_allclose((frame.T @ frame).toarray(), np.eye(n), atol=1e-12)
    dense = frame.toarray()
    for q in range(k):  # each group of l rows is an orthogonal basis with rows of one norm
        group = dense[q * ell : (q + 1) * ell]
        np.testing.assert_allclose(group @ group.T, np.eye(ell) * n / (k * ell), atol=1e-12)


@pytest.mark.parametrize(("k", "ell", "n"), SQUARE)
def test_density_is_two_over_l_where_l_divides(k: int, ell: int, n: int) -> None:
    assert (np.diff(frame_rows(k, ell, n).indptr) == 2 * n / ell).all()


@pytest.mark.parametrize(("k", "ell", "n"), OTHER)
def test_rows_are_sparse_in_general(k: int, ell: int, n: int) -> None:
    # a row of the seed is shared with the one above and the one below on two columns each: under n/l + 3 entries
    assert (np.diff(frame_rows(k, ell, n).indptr) < 2 * n / ell + 6).all()


def test_chosen_rows_are_those_of_the_whole_frame() -> None:
    rows = np.array([5, 0, 71, 40])
    np.testing.assert_array_equal(frame_rows(12, 6, 40, rows).toarray(), frame_rows(12, 6, 40).toarray()[rows])


def test_the_rule_agrees_with_building_every_small_frame() -> None:
    borderline = 0
    for n in range(4, 33, 2):
        for ell in range(2, n // 2 + 1, 2):
            for k in range(1, n + 3):
                frame = frame_rows(k, ell, n).toarray()
                tight = np.abs(frame.T @ frame - np.eye(n)).max() < 1e-9
                assert tight == frame_exists(k, ell, n), (k, ell, n)
                borderline += tight and n % ell != 0 and k == math.ceil(n / ell) + 1
    assert borderline > 0


@given(st.integers(1, 20), st.data())
def test_spectral_tetris(rows: int, data: st.DataObject) -> None:
    columns = data.draw(st.integers(2 * rows, 5 * rows))
    seed = spectral_tetris(rows, columns).toarray()
    np.testing.assert_allclose(seed @ seed.T, np.eye(rows) * columns / rows, atol=1e-9)
    np.testing.assert_allclose((seed**2).sum(0), 1, atol=1e-9)


@pytest.mark.parametrize(("n", "ell"), [(576, 24), (192, 12), (1536, 32), (384, 16), (4, 2), (22, 2), (36, 6)])
def test_auto_l(n: int, ell: int) -> None:
    assert auto_l(n) == ell


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ((4, 2, 7), "even dimension of at least 4, got 7"),
        ((1, 2, 2), "even dimension of at least 4, got 2"),
        ((10, 5, 40), "frame_l must be even and from 2 to 20 for dimension 40, got 5"),
        ((4, 22, 40), "frame_l must be even and from 2 to 20 for dimension 40, got 22"),
        ((3, 24, 576), "k=24 with l=24 (redundancy 1), or l=192 with k=3"),
        ((7, 6, 40), "k=9 with l=6 (redundancy 1.35), or l=8 with k=7"),
    ],
)
def test_errors_name_valid_values(frame: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_frame(*frame)


def test_values_that_an_error_names_are_valid() -> None:
    check_frame(192 // 64, 192, 576)
    check_frame(9, 6, 40)
    check_frame(7, 8, 40)


def test_redundancy_sets_the_number_of_subspaces() -> None:
    basis = Basis.of("frame", 40, 6, 1.8, 0)
    assert (basis.k, basis.count, basis.is_fourier) == (12, 72, False)
    assert Basis.of("frame", 576, "auto", 1.0, 0).is_fourier
    with pytest.raises(ValueError, match=r"redundancy 1\.35"):
        Basis.of("frame", 40, 6, 1.0, 0)


def test_haar_is_orthogonal_and_seeded() -> None:
    q = haar(30, 5)
    np.testing.assert_allclose(q @ q.T, np.eye(30), atol=1e-12)
    haar.cache_clear()
    np.testing.assert_array_equal(haar(30, 5), q)
    assert np.abs(haar(30, 6) - q).max() > 0.1
    # without the sign fix the diagonal of Q is mostly negative with LAPACK's reflections
    signs = np.mean([np.sign(haar(4, seed)[0, 0]) for seed in range(200)])
    assert abs(signs) < 0.3


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 2**40), st.data())
def test_random_positions(out: int, into: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, out * into))
    row, column = draw_positions("random", (out, into), count, seed)
    assert row.dtype == np.int32
    flat = row.astype(int) * into + column
    assert len(flat) == count
    assert (np.diff(flat) > 0).all()  # distinct, sorted by row and then column
    assert 0 <= row.min() <= row.max() < out
    assert 0 <= column.min() <= column.max() < into


def test_positions_are_uniform() -> None:
    found = np.zeros((6, 8))
    for seed in range(600):
        row, column = draw_positions("random", (6, 8), 12, seed)
        found[row, column] += 1
    # each cell is hit 150 times on average; 5 standard deviations
    assert np.abs(found - 150).max() < 5 * math.sqrt(600 * 0.25 * 0.75)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99), st.data())
def test_block_positions(blocks: int, height: int, width: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, blocks * height * width))
    row, column = draw_positions("block", (blocks * height, blocks * width), count, seed, blocks)
    np.testing.assert_array_equal(row // height, column // width)
    assert len({*zip(row.tolist(), column.tolist(), strict=True)}) == count


def test_automatic_blocks_hold_the_coefficients() -> None:
    row, column = draw_positions("block", (4096, 4096), 5000, 0)
    np.testing.assert_array_equal(row // 32, column // 32)  # the published 128 blocks
    row, column = draw_positions("block", (576, 192), 10_000, 0)
    assert len(row) == 10_000


@given(st.integers(1, 60), st.integers(0, 99))
def test_compact_positions(count: int, seed: int) -> None:
    p = math.isqrt(count)
    row, column = draw_positions("compact", (9, 8), count, seed)
    assert len(row) == p * p
    assert len(set(row)) == len(set(column)) == p
    assert len({*zip(row.tolist(), column.tolist(), strict=True)}) == p * p


def test_positions_depend_on_seed_shape_and_name_only() -> None:
    first = draw_positions("random", (192, 576), 1000, 3)
    np.testing.assert_array_equal(draw_positions("random", (192, 576), 1000, 3), first)
    for other in (
        draw_positions("random", (192, 576), 1000, 4),
        draw_positions("random", (192, 576), 1000, 3, salt=" layers.0.q"),
        draw_positions("random", (576, 192), 1000, 3),
    ):
        assert not np.array_equal(other, first)


@pytest.mark.parametrize(
    ("support", "count", "blocks", "message"),
    [
        ("random", 97, None, "n_coefficients=97 does not fit in a layer of 8 x 12: at most 96"),
        ("block", 25, 4, "does not fit in 4 blocks of 2 x 3: at most 24"),
        ("block", 4, 3, "num_blocks=3 does not divide a layer of 8 x 12 positions; these do: 1, 2, 4"),
        ("compact", 81, None, "needs a 9 x 9 grid, but the layer has 8 x 12 positions; at most 64"),
    ],
)
def test_too_many_positions(support: str, count: int, blocks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_positions(support, (8, 12), count, 0, blocks)  # type: ignore[arg-type]
