"""GPTQ, its grid, and packed layers, against brute force and closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from acclimate.compress.gptq import BITS, Grid, gptq, inverse_root, round_to_nearest
from acclimate.compress.packing import pack, unpack, words
from acclimate.compress.quant_linear import QuantLinear


def weights(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def second_moment(n: int, tokens: int = 400, seed: int = 1) -> Tensor:
    """Of correlated inputs, some much larger than others."""
    mixed = weights(tokens, n, seed) @ weights(n, n, seed + 1) * 0.95 ** torch.arange(n)
    return (mixed.T @ mixed).double() / tokens


def loss(W: Tensor, Q: Tensor, H: Tensor) -> float:
    gap = (W - Q).double()
    return float(((gap @ H) * gap).sum())


def one_column_after_the_other(W: Tensor, H: Tensor, grid: Grid) -> Tensor:
    """GPTQ without blocks."""
    U, w, Q = inverse_root(H).float(), W.clone(), torch.zeros_like(W)
    for j in range(W.shape[1]):
        if j % grid.group_size == 0:
            scale, zero = grid.ranges(w[:, j : j + grid.group_size])
        Q[:, j] = grid.round(w[:, j], scale, zero)
        w[:, j + 1 :] -= ((w[:, j] - Q[:, j]) / U[j, j])[:, None] * U[j, j + 1 :]
    return Q


@pytest.mark.parametrize("size", [32, 96, 192])
def test_blocks_change_nothing(size: int) -> None:
    """Also where a group begins in one block of 128 columns and ends in the next."""
    W, H, grid = weights(24, 192), second_moment(192), Grid(3, size)
    same = (gptq(W, H, grid).dequantize() - one_column_after_the_other(W, H, grid)).abs() < 1e-5
    assert same.double().mean() > 0.98  # a number close to the middle of two codes may go either way


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [False, True])
def test_without_correlations_it_is_rounding_to_nearest(bits: int, sym: bool) -> None:
    W, grid = weights(5, 64), Grid(bits, 16, sym=sym)
    nearest = round_to_nearest(W, grid)
    assert torch.equal(gptq(W, torch.eye(64), grid).codes, nearest.codes)
    gap = (W - nearest.dequantize()).abs()
    step = nearest.scales[:, nearest.group_of.long()]
    inside = (nearest.codes > 0) & (nearest.codes < grid.top)
    assert (gap[inside] <= 0.5001 * step[inside]).all()
    assert (gap <= 1.01 * step).all()


def test_it_beats_rounding_to_nearest_for_correlated_inputs() -> None:
    better = 0
    for seed in range(20):
        W, H = weights(12, 64, seed), second_moment(64, seed=seed + 30)
        better += loss(W, gptq(W, H, Grid(3, 32)).dequantize(), H) <= loss(
            W, round_to_nearest(W, Grid(3, 32)).dequantize(), H
        )
    assert better >= 19


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), bits=st.sampled_from(BITS), sym=st.booleans(), positive=st.booleans())
def test_the_grid_covers_what_it_was_made_for(seed: int, bits: int, sym: bool, positive: bool) -> None:
    """Zero is on the grid, and no number is further than a step from it; zero points fit the file."""
    grid = Grid(bits, 8, sym=sym)
    w = weights(4, 8, seed) * 10.0 ** (seed % 7 - 3)
    w = w.abs() if positive else w
    scale, zero = grid.ranges(w)
    assert ((zero >= 1) & (zero <= grid.top)).all()
    assert torch.equal(grid.round(torch.zeros(4, 1), scale[:, None], zero[:, None]), torch.zeros(4, 1))
    coarse = grid.top * 2.0**-25  # scales below 6e-5 are coarse in float16
    assert ((grid.round(w, scale[:, None], zero[:, None]) - w).abs() <= 1.01 * scale[:, None] + coarse).all()
    assert torch.equal(scale, scale.half().float())


def test_clipped_ranges_have_the_smaller_squared_error() -> None:
    W = weights(50, 64) ** 3
    clipped, whole = (round_to_nearest(W, Grid(3, 32, mse_clip=clip)).dequantize() for clip in (True, False))
    assert ((W - clipped).square().sum(1) <= (W - whole).square().sum(1) + 1e-6).all()
    assert (W - clipped).square().sum() < 0.95 * (W - whole).square().sum()


def test_order_by_activations_keeps_columns_in_their_groups() -> None:
    W, H = weights(6, 64), second_moment(64).flip(0, 1)
    found = gptq(W, H, Grid(4, 16, desc_act=True))
    assert found.group_of.tolist() == [j // 16 for j in range(64)]
    by_hand = Grid(4, 16).ranges(W[:, 16:32])
    assert torch.equal(found.scales[:, 1], by_hand[0])
    assert torch.equal(found.zeros[:, 1].float(), by_hand[1])
    assert loss(W, found.dequantize(), H) < loss(W, round_to_nearest(W, Grid(4, 16)).dequantize(), H)


def test_dead_inputs_get_weight_zero() -> None:
    H = second_moment(32)
    H[3], H[:, 3] = 0, 0
    found = gptq(weights(4, 32), H, Grid(3, 16)).dequantize()
    assert (found[:, 3] == 0).all()
    assert found.isfinite().all()


def test_inverse_root() -> None:
    H = second_moment(40)
    U = inverse_root(H)
    assert torch.equal(U, U.triu())
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(40)
    torch.testing.assert_close(U.T @ U @ damped, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-6)


def test_matrices_that_are_not_positive_definite_do_not_stop_it() -> None:
    H = second_moment(16)
    for bad in (H - 2 * torch.eye(16) * H.diagonal().mean(), H - 1e5 * torch.eye(16) * H.diagonal().mean()):
        U = inverse_root(bad)
        assert U.isfinite().all()
        assert torch.equal(U, U.triu())
        assert (U.diagonal() > 0).all()


def test_wrong_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is one of 2, 3, 4, 8, not 5"):
        Grid(5)
    with pytest.raises(ValueError, match=r"group_size 48 does not divide the 64 inputs of .mlp\.up_proj."):
        Grid(3, 48).columns(64, "mlp.up_proj")
    with pytest.raises(ValueError, match="-1 for all"):
        Grid(3, 0)
    assert Grid(3, -1).columns(64) == 64


@settings(deadline=None, max_examples=30)
@given(bits=st.sampled_from(BITS), count=st.integers(1, 70), width=st.integers(1, 5), seed=st.integers(0, 100))
def test_packing_loses_nothing(bits: int, count: int, width: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (count, width), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (words(count, bits), width)
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_lie_in_words_from_the_lowest_bit_on(bits: int) -> None:
    codes = (torch.arange(32 // bits) % 2**bits).to(torch.uint8)[:, None]
    assert int(pack(codes, bits)[0, 0]) & 0xFFFFFFFF == sum(int(c) << bits * i for i, c in enumerate(codes[:, 0]))


def test_three_bits_fill_three_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.uint8)
    codes[10] = 0b101  # bits 30, 31 and 32: across two words
    assert [int(word) & 0xFFFFFFFF for word in pack(codes, 3)[:, 0]] == [1 << 30, 1, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_was_rounded(bits: int, bias: bool) -> None:
    linear = nn.Linear(64, 7, bias=bias)
    found = gptq(linear.weight, second_moment(64), Grid(bits, 16))
    layer = QuantLinear.from_quantized(found, linear)
    assert torch.equal(layer.dequantize(), found.dequantize())
    x = weights(3, 64)
    wanted = nn.functional.linear(x, found.dequantize(), linear.bias)
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-6)
    layer.cache = False
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.to_dense()(x), wanted, rtol=0, atol=1e-6)


def test_a_cast_changes_what_is_computed_in_and_not_what_is_stored() -> None:
    linear = nn.Linear(32, 4)
    layer = QuantLinear.from_quantized(round_to_nearest(linear.weight, Grid(4, 16)), linear)
    scales = layer.scales.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.scales, scales)
    assert layer.float().weight.dtype == torch.float32
    assert torch.equal(layer.weight, layer.dequantize())


def test_gradients_reach_the_inputs_only() -> None:
    linear = nn.Linear(32, 4, bias=False)
    layer = QuantLinear.from_quantized(round_to_nearest(linear.weight, Grid(4, 16)), linear)
    x = weights(3, 32).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(3, -1))
    assert not list(layer.parameters())
