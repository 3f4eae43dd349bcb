"""FrameFT against its formula, on its own and inside PEFT. What every adapter must do is in `test_matrix.py`."""

from __future__ import annotations

import copy
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acclimate import load_run, tune
from acclimate.adapters import frame, sparse_update
from acclimate.adapters.frame import FrameFTConfig, FrameFTLinear, suggest_lr
from acclimate.adapters.frame_to_lora import to_lora
from acclimate.adapters.sparse_update import CHUNK, SparseUpdate, pick_transform
from acclimate.adapters.tight_frames import Basis, draw_positions
from acclimate.recipe import Recipe
from acclimate.runs import Interrupted
from adapters.matrix import ARCHITECTURES, disturb, inputs, logits, loss
from conftest import signal_at
from fresh_process import WITHOUT_ACCLIMATE, FreshProcessError, logits_in_a_fresh_process

CPU = torch.device("cpu")


def make(
    bases: tuple[Basis, Basis],
    count: int,
    support: Any = "random",
    dtype: torch.dtype = torch.float64,
    transform: Any = "auto",
) -> tuple[SparseUpdate, np.ndarray]:
    positions = draw_positions(support, (bases[0].count, bases[1].count), count, seed=1)
    return SparseUpdate(positions, bases, dtype, CPU, transform), positions


def by_definition(bases: tuple[Basis, Basis], positions: np.ndarray, s: Tensor) -> Tensor:
    """F_out^T S F_in from whole dense matrices."""
    out, into = (torch.tensor(basis.rows(np.arange(basis.count)).toarray()) for basis in bases)
    grid = torch.zeros(bases[0].count, bases[1].count, dtype=torch.float64)
    grid[tuple(torch.tensor(positions).long())] = s.double()
    return out.T @ grid @ into


def pair(name: Any, out: int = 24, into: int = 36, redundancy: float = 1.0) -> tuple[Basis, Basis]:
    return Basis.of(name, out, "auto", redundancy, 0), Basis.of(name, into, "auto", redundancy, 0)


REDUNDANT = (Basis.of("frame", 40, 6, 1.8, 0), Basis.of("frame", 44, 10, 2.0, 0))
# every way to apply a frame: FFT, Fourier blocks, sparse rows, dense rows, and none
WAYS = {
    "fft": (pair("frame"), 200, "fft"),
    "gemm": (pair("frame"), 200, "gemm"),
    "timed": (pair("frame"), 200, "timed"),
    "few rows": (pair("frame"), 3, "auto"),
    "redundant": (REDUNDANT, 300, "auto"),
    "dense Fourier": ((Basis.of("frame", 24, 2, 1.0, 0), Basis.of("frame", 36, 2, 1.0, 0)), 200, "fft"),
    "random": (pair("random"), 200, "auto"),
    "identity": (pair("identity"), 200, "auto"),
}


def linear(into: int = 36, out: int = 24, **options: Any) -> tuple[nn.Module, FrameFTLinear]:
    """One linear layer, and the same with FrameFT of random coefficients beside it."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(into, out))
    config = FrameFTConfig(target_modules=["0"], init_std=1.0, **{"n_coefficients": 100, **options})
    return base, get_peft_model(copy.deepcopy(base), config).base_model.model[0]


# --- the formula ---


@pytest.mark.parametrize("way", WAYS)
def test_update_equals_its_definition(way: str) -> None:
    bases, count, transform = WAYS[way]
    update, positions = make(bases, count, transform=transform)
    s, x = torch.randn(count, dtype=torch.float64), torch.randn(5, bases[1].n, dtype=torch.float64)
    expected = by_definition(bases, positions, s)
    torch.testing.assert_close(update.dense(s), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(update(x, s), x @ expected.T, rtol=0, atol=1e-12)
    b, a = update.factors(s)
    assert b.shape[1] == a.shape[0] == min(len({*positions[0]}), len({*positions[1]}))
    torch.testing.assert_close(b @ a, expected, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_update_equals_its_definition_for_any_frame(data: st.DataObject) -> None:
    def basis(label: str) -> Basis:
        n = 2 * data.draw(st.integers(2, 20), label=f"n/2 {label}")
        ell = 2 * data.draw(st.integers(1, n // 4), label=f"l/2 {label}")
        k = -(-n // ell) + data.draw(st.integers(2, 4), label=f"spare {label}")
        return Basis("frame", n, n // ell if n % ell == 0 and data.draw(st.booleans()) else k, ell)

    bases = basis("out"), basis("in")
    count = data.draw(st.integers(1, bases[0].count * bases[1].count))
    update, positions = make(bases, count)
    s, x = torch.randn(count, dtype=torch.float64), torch.randn(3, bases[1].n, dtype=torch.float64)
    torch.testing.assert_close(update(x, s), x @ by_definition(bases, positions, s).T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("transform", ["fft", "gemm"])
@pytest.mark.parametrize("n", [576, 192, 1536])
def test_fast_path_equals_the_dense_frame_in_float32(n: int, transform: str) -> None:
    basis = Basis.of("frame", n, "auto", 1.0, 0)
    positions = np.stack([np.arange(basis.count)] * 2).astype(np.int32)
    update = SparseUpdate(positions, (basis, basis), torch.float32, CPU, transform)  # type: ignore[arg-type]
    dense = torch.tensor(basis.rows(np.arange(n)).toarray())
    x = torch.randn(4, n)
    for found, expected in (
        (update.into.apply(x).T, x.double() @ dense.T),
        (update.into.adjoint(x.T), x.double() @ dense),
    ):
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_l_2_is_the_orthonormal_inverse_fft() -> None:
    basis = Basis.of("frame", 32, 2, 1.0, 0)
    x = np.random.default_rng(0).standard_normal(32)
    expected = np.fft.ifft(x.view(complex), norm="ortho").view(float)
    np.testing.assert_allclose(basis.rows(np.arange(32)) @ x, expected, atol=1e-12)


@pytest.mark.parametrize(
    "positions", [[[0, 24], [0, 0]], [[0, 0], [0, 36]], [[-1, 0], [0, 0]], [[1, 0], [0, 0]], [[0, 0], [5, 5]]]
)
def test_positions_outside_the_layer_are_refused(positions: list[list[int]]) -> None:
    """They come from a file."""
    with pytest.raises(ValueError, match="distinct, sorted by row, and inside a grid of 24 x 36"):
        SparseUpdate(np.array(positions, dtype=np.int32), pair("frame"), torch.float32, CPU)


@pytest.mark.parametrize("name", ["frame", "random", "identity"])
def test_norm_and_singular_values_are_those_of_the_coefficients(name: str) -> None:
    _, layer = linear(basis=name, scale=7.0)
    s, factor = layer.frameft_coefficients["default"].detach(), 7.0 / math.sqrt(24 * 36)
    change = layer.get_delta_weight("default")
    assert change.norm().item() == pytest.approx(factor * s.norm().item(), rel=1e-6)
    grid = torch.zeros(24, 36)
    grid[tuple(layer.frameft_positions["default"].long())] = factor * s
    torch.testing.assert_close(torch.linalg.svdvals(change), torch.linalg.svdvals(grid), rtol=1e-5, atol=1e-5)


def test_norm_is_bounded_with_redundancy() -> None:
    for seed in range(5):
        update, _ = make(REDUNDANT, 500)
        s = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert update.dense(s).norm() < s.norm()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "timed"])
def test_gradients(way: str, recompute: bool) -> None:
    bases, count, transform = WAYS[way]
    update, _ = make(bases, min(count, 40), transform=transform)
    s = torch.randn(min(count, 40), dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 2, bases[1].n, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, s: update(x, s, recompute), (x, s))


@pytest.mark.parametrize("recompute", [False, True])
def test_many_vectors_are_taken_in_chunks(recompute: bool) -> None:
    bases, count, transform = WAYS["fft"]
    update, _ = make(bases, count, transform=transform)
    s = torch.randn(count, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2 * CHUNK + 3, bases[1].n, dtype=torch.float64, requires_grad=True)
    g = torch.randn(len(x), bases[0].n, dtype=torch.float64)
    y = update(x, s, recompute)
    found = torch.autograd.grad(y, (x, s), g)
    whole = x @ update.dense(s).T
    torch.testing.assert_close(y, whole)
    units = torch.eye(count, dtype=torch.float64)
    by_hand = torch.stack([(g * (x @ update.dense(unit).T)).sum() for unit in units])
    torch.testing.assert_close(found, (g @ update.dense(s), by_hand))
    only_s = torch.autograd.grad(update(x.detach(), s, recompute), s, g)
    torch.testing.assert_close(only_s[0], found[1])


@pytest.mark.parametrize("way", ["fft", "redundant"])
def test_devices_without_sparse_kernels_compute_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bases, count, transform = WAYS[way]
    update, _ = make(bases, count, transform=transform)
    s = torch.randn(count, dtype=torch.float64, requires_grad=True)
    x = torch.randn(7, bases[1].n, dtype=torch.float64, requires_grad=True)

    def both() -> list[Tensor]:
        y = update(x, s)
        return [y, *torch.autograd.grad(y.square().sum(), (x, s))]

    expected = both()
    monkeypatch.setattr(sparse_update, "SPARSE_DEVICES", ())
    for found, wanted in zip(both(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_all_coefficients_span_every_matrix() -> None:
    bases = pair("frame", 8, 12)
    update, _ = make(bases, 96)
    columns = torch.stack([update.dense(unit).flatten() for unit in torch.eye(96, dtype=torch.float64)], dim=1)
    wanted = torch.randn(96, 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(columns, wanted).solution
    torch.testing.assert_close(columns @ solution, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bases", [pair("frame", 12, 20), REDUNDANT], ids=["square", "redundant"])
def test_gradient_descent_obeys_its_bound(bases: tuple[Basis, Basis]) -> None:
    """Logistic regression with step 1/(c^2 lambda): f falls by at least |grad|^2 / (2 c^2 lambda) each step."""
    torch.manual_seed(0)
    out, into = bases[0].n, bases[1].n
    update, _ = make(bases, 60)
    c, rows = 3.0, 50
    x, w = torch.randn(rows, into, dtype=torch.float64), torch.randn(out, into, dtype=torch.float64)
    sign = torch.randn(rows, out, dtype=torch.float64).sign()
    smoothness = torch.linalg.eigvalsh(x.T @ x).max().item() / (4 * rows)
    s = torch.zeros(60, dtype=torch.float64, requires_grad=True)

    def f() -> Tensor:
        return nn.functional.softplus(-sign * (x @ w.T + update(x, c * s))).sum() / rows

    start, curvature, squares, steps = f().item(), c**2 * smoothness, [], 40
    for _ in range(steps):
        before = f()
        (gradient,) = torch.autograd.grad(before, s)
        squares.append(gradient.square().sum().item())
        with torch.no_grad():
            s -= gradient / curvature
        assert f().item() <= before.item() - squares[-1] / (2 * curvature) + 1e-12
    assert min(squares) <= 2 * curvature * start / steps  # f is at least 0


def test_gradient_is_that_of_the_weight_at_the_support() -> None:
    bases = pair("frame")
    update, positions = make(bases, 50)
    w = torch.zeros(24, 36, dtype=torch.float64, requires_grad=True)
    s = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(9, 36, dtype=torch.float64), torch.randn(9, 24, dtype=torch.float64)
    (of_w,) = torch.autograd.grad(((x @ w.T - y) ** 2).sum(), w)
    (of_s,) = torch.autograd.grad(((update(x, 2.5 * s) - y) ** 2).sum(), s)
    out, into = (torch.tensor(basis.rows(np.arange(basis.n)).toarray()) for basis in bases)
    expected = 2.5 * (out @ of_w @ into.T)[tuple(torch.tensor(positions).long())]
    torch.testing.assert_close(of_s, expected, rtol=0, atol=1e-10)


# --- a layer ---


@pytest.mark.parametrize("support", ["random", "block", "compact"])
@pytest.mark.parametrize("basis", ["frame", "random", "identity"])
def test_layer_is_the_base_with_another_weight(basis: str, support: str) -> None:
    base, layer = linear(basis=basis, support=support)
    x = torch.randn(2, 5, 36)
    weight = base[0].weight + layer.get_delta_weight("default")
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, base[0].bias), rtol=1e-5, atol=1e-5)


def test_unmerging_restores_the_weight() -> None:
    base, layer = linear(scale=1.0)
    layer.merge()
    assert layer.merged
    assert (layer.weight - base[0].weight).abs().max() > 1e-3
    layer.unmerge()
    difference = (layer.weight - base[0].weight).abs()
    assert (difference <= 2 * torch.finfo(torch.float32).eps * base[0].weight.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("where", sorted(ARCHITECTURES))
def test_zero_coefficients_leave_the_logits_as_they_are(where: str) -> None:
    architecture = ARCHITECTURES[where]
    config = FrameFTConfig(n_coefficients=100, target_modules=list(architecture.targets))
    assert torch.equal(
        logits(get_peft_model(architecture.model(), config).eval(), where), logits(architecture.model(), where)
    )


def test_only_needed_columns_are_kept_for_the_backward_pass() -> None:
    def kept(recompute: bool) -> int:
        _, layer = linear(into=64, out=36, n_coefficients=16, support="compact", recompute=recompute)
        layer.base_layer.requires_grad_(False)
        sizes = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        x = torch.randn(10, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return max(sizes)

    assert kept(recompute=False) == 10 * 4  # 4 of 64 columns
    assert kept(recompute=True) == 10 * 64  # x itself


def test_computation_is_in_float32_at_least() -> None:
    _, layer = linear()
    x = torch.randn(3, 36)
    expected = layer(x)
    layer.base_layer.to(torch.bfloat16)
    torch.testing.assert_close(layer.change(x.bfloat16(), "default"), layer.change(x.bfloat16().float(), "default"))
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.frameft_coefficients["default"].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.change(x, "default")
        found.sum().backward()
    assert found.dtype == torch.float32
    layer.to(torch.float64)  # after it was used in float32
    torch.testing.assert_close(layer.change(x.double(), "default").float(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected, layer(x.double()).float(), rtol=0.05, atol=0.05)


def test_whole_layer_compiles_without_a_break() -> None:
    _, layer = linear()
    x = torch.randn(4, 36, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.compiler.reset()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_rule_for_the_transform_is_fixed() -> None:
    assert [pick_transform(k, CPU) for k in (8, 16, 24, 29, 86, 288, 1009)] == [
        "gemm", "fft", "fft", "gemm", "gemm", "fft", "fft",
    ]  # fmt: skip
    assert [pick_transform(k, torch.device("cuda")) for k in (8, 64, 288)] == ["gemm", "gemm", "fft"]


def test_layers_of_one_shape_share_what_is_generated() -> None:
    model = get_peft_model(ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=100)).eval()
    logits(model, "llama")
    layers = [m for m in model.modules() if isinstance(m, FrameFTLinear)]
    assert len({id(layer.frameft_updates["default"]) for layer in layers}) == 2  # q and v differ in shape
    assert copy.deepcopy(layers[0]).frameft_updates["default"] is layers[0].frameft_updates["default"]


class Quantized(nn.Linear):
    """8-bit weights and a scale per row, as quantisation libraries have them: the weight is no floating tensor."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.register_buffer("steps", base.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.bias = base.bias
        self.weight = nn.Parameter((base.weight.detach() / self.steps).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.steps, self.bias)


def test_quantised_base() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(Quantized(nn.Linear(36, 24)))
    model = get_peft_model(copy.deepcopy(base), FrameFTConfig(n_coefficients=100, target_modules=["0"], init_std=1.0))
    x = torch.randn(5, 36, requires_grad=True)
    layer = model.base_model.model[0]
    weight = base[0].weight * base[0].steps + layer.get_delta_weight("default")
    torch.testing.assert_close(model(x), nn.functional.linear(x, weight, base[0].bias), rtol=1e-5, atol=1e-5)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, -1), rtol=1e-5, atol=1e-4)
    assert layer.frameft_coefficients["default"].grad.abs().sum() > 0
    for safe in (False, True):
        with pytest.raises(NotImplementedError, match="cannot be merged into Quantized, whose weight is quantised"):
            model.merge_adapter(safe_merge=safe)
    assert torch.equal(layer.base_layer.weight, base[0].weight)


def test_dynamically_quantised_base() -> None:
    torch.manual_seed(0)
    base = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(36, 24)), {nn.Linear})
    model = get_peft_model(copy.deepcopy(base), FrameFTConfig(n_coefficients=100, target_modules=["0"], init_std=1.0))
    x = torch.randn(5, 36)
    change = model.base_model.model[0].get_delta_weight("default")
    torch.testing.assert_close(model(x), base(x) + x @ change.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="quantised"):
        model.merge_adapter()


def test_conv1d_base() -> None:
    """GPT-2's projections store the weight as (in, out)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 1}
    base = GPT2LMHeadModel(GPT2Config(**size)).eval()
    model = get_peft_model(copy.deepcopy(base), FrameFTConfig(n_coefficients=50, init_std=1.0)).eval()
    ids = torch.randint(2, 40, (2, 6))
    expected = model(input_ids=ids).logits.detach()
    assert (expected - base(input_ids=ids).logits).abs().max() > 1e-3
    merged = model.merge_and_unload()
    assert merged.transformer.h[0].attn.c_attn.weight.shape == (16, 48)
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


# --- the configuration ---


def test_default_size_on_smollm2() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3,
            )
        )  # fmt: skip
        model = get_peft_model(base, FrameFTConfig())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.device.type for p in trained.values()} == {"meta"}
    assert len(trained) == 60  # query and value projections of 30 layers
    assert sum(p.numel() for p in trained.values()) == 60_000
    assert suggest_lr(FrameFTConfig()) == pytest.approx(0.08)
    assert suggest_lr(FrameFTConfig(scale=200.0)) == pytest.approx(0.02)


def test_patterns() -> None:
    config = FrameFTConfig(
        n_coefficients=100,
        n_coefficients_pattern={"v_proj": 30, r"layers\.1\.self_attn\.q_proj": 50},
        scale_pattern={"v_proj": 5.0},
        init_std=1.0,
    )
    model = get_peft_model(ARCHITECTURES["llama"].model(), config)
    layers = [part.self_attn for part in model.base_model.model.model.layers]
    sizes = [[len(p.frameft_coefficients["default"]) for p in (part.q_proj, part.v_proj)] for part in layers]
    assert sizes == [[100, 30], [50, 30]]
    value = layers[0].v_proj
    expected = 5.0 / math.sqrt(16 * 32) * value.frameft_coefficients["default"].norm()
    torch.testing.assert_close(value.get_delta_weight("default").norm(), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"support": "dense"}, "support is one of random, block, compact; got 'dense'"),
        ({"basis": "wavelet"}, "basis is one of frame, random, identity"),
        ({"transform": "dct"}, "transform is one of auto, fft, gemm, timed"),
        ({"n_coefficients": 0}, "must be at least 1, got 0"),
        ({"n_coefficients_pattern": {"q_proj": 0}}, "q_proj: the number of coefficients must be at least 1"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"redundancy": 0.5}, "redundancy is 1 or more"),
        ({"redundancy": 2.0, "basis": "random"}, "and 1 for basis='random'"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"scale_pattern": {"q_proj": -1.0}}, "scale must be positive"),
        ({"seed": -1}, "seed must not be negative"),
        ({"frame_l": 3}, "frame_l is 'auto' or an even number"),
        ({"layers_pattern": "layers"}, "layers_to_transform must be given"),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "need target_modules as a list"),
    ],
)
def test_bad_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FrameFTConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_coefficients": 865},
            "module '0' (24 x 36): n_coefficients=865 does not fit in a layer of 24 x 36: at most 864",
        ),
        (
            {"support": "block", "num_blocks": 5},
            "num_blocks=5 does not divide a layer of 24 x 36 positions; these do: 1, 2, 3",
        ),
        ({"frame_l": 14}, "frame_l must be even and from 2 to 12 for dimension 24, got 14"),
        ({"frame_l": 10}, "Nearest that exist: k=5 with l=10"),
    ],
)
def test_layer_that_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        linear(**options)


def test_odd_width_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"module '0' \(24 x 35\): a frame needs an even dimension of at least 4, got 35"
    ):
        linear(into=35)


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.Conv2d(4, 4, 3), "Conv2d"), (nn.Embedding(8, 4), "Embedding"), (nn.LayerNorm(4), "LayerNorm")],
)
def test_other_modules_are_refused_by_name(module: nn.Module, name: str) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(module)})
    with pytest.raises(TypeError, match=rf"module 'body\.0' is a {name}"):
        get_peft_model(model, FrameFTConfig(target_modules=["0"]))


def test_unknown_architecture_needs_target_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHITECTURES["llama"].model()
    monkeypatch.setattr(type(model.config), "model_type", "novel")
    with pytest.raises(ValueError, match="value projections of the architecture 'novel': set target_modules"):
        get_peft_model(model, FrameFTConfig())


def test_an_adapter_per_row_refuses_what_it_cannot_do() -> None:
    model = get_peft_model(ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=100)).eval()
    names = ["default"] * 4
    with pytest.raises(ValueError, match="should be the same as the number of inputs, but got 1 and 4"):
        logits(model, "llama", adapter_names=["default"])
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): other"):
        logits(model, "llama", adapter_names=[*names[:3], "other"])
    model.merge_adapter()
    with pytest.raises(ValueError, match="when there are merged adapters"):
        logits(model, "llama", adapter_names=names)
    model.unmerge_adapter()
    with pytest.raises(ValueError, match="in training mode"):
        logits(model.train(), "llama", adapter_names=names)


@pytest.mark.parametrize("where", ["llama", "t5"])
def test_an_adapter_per_row_in_beam_search(where: str) -> None:
    architecture = ARCHITECTURES[where]
    options: dict[str, Any] = {"n_coefficients": 200, "target_modules": list(architecture.targets), "init_std": 2.0}
    torch.manual_seed(0)
    model = get_peft_model(architecture.model(), FrameFTConfig(**options)).eval()
    model.add_adapter("other", FrameFTConfig(**options))
    prompts = {"input_ids": inputs(where)["input_ids"]}
    search = {"num_beams": 3, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = model.generate(**prompts, **search)
    assert not torch.equal(alone["default"], alone["other"])
    mixed = model.generate(**prompts, **search, adapter_names=["default", "other", "default", "other"])
    for row, name in enumerate(["default", "other", "default", "other"]):
        assert torch.equal(mixed[row], alone[name][row])


# --- files ---


def saved(where: Path, **options: Any) -> PeftModel:
    """A disturbed adapter on the tiny Llama, and both on disk."""
    base = ARCHITECTURES["llama"].model()
    base.save_pretrained(where / "base")
    model = get_peft_model(base, FrameFTConfig(**{"n_coefficients": 100, **options})).eval()
    disturb(model, seed=1)
    model.save_pretrained(where / "adapter")
    return model


def in_a_fresh_process(where: Path, adapter: str, prepare: str) -> Tensor | str:
    """Logits of the saved base with the saved adapter, or what the process said when it failed."""
    try:
        pair = where / "base", where / adapter
        (found,) = logits_in_a_fresh_process([pair], inputs("llama")["input_ids"].tolist(), where, prepare)
    except FreshProcessError as error:
        return str(error)
    return found


@pytest.mark.parametrize("support", ["random", "block"])
def test_saved_adapter_is_the_same_in_a_fresh_process(tmp_path: Path, support: str) -> None:
    model = saved(tmp_path, support=support, num_blocks=4 if support == "block" else None)
    found = in_a_fresh_process(tmp_path, "adapter", "import acclimate.adapters")
    assert isinstance(found, Tensor), found
    assert torch.equal(found, logits(model, "llama"))


def test_without_the_import_peft_says_it_does_not_know_the_type(tmp_path: Path) -> None:
    saved(tmp_path)
    assert "FRAMEFT" in str(in_a_fresh_process(tmp_path, "adapter", WITHOUT_ACCLIMATE))


@pytest.mark.parametrize("shared", [True, False])
def test_files_hold_coefficients_and_positions_and_no_frame(tmp_path: Path, shared: bool) -> None:
    model = saved(tmp_path, share_support=shared)
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    positions = {key: value for key, value in state.items() if "frameft_positions/" in key}
    coefficients = {key: value for key, value in state.items() if key.endswith("frameft_coefficients")}
    assert len(positions) == (2 if shared else 4)  # shapes, or layers
    assert {value.dtype for value in positions.values()} == {torch.int32}
    assert {tuple(value.shape) for value in positions.values()} == {(2, 100)}
    assert len(coefficients) == 4
    assert {value.dtype for value in coefficients.values()} == {torch.float32}
    assert len(state) == len(positions) + len(coefficients)
    config = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert isinstance(config, FrameFTConfig)
    assert config.share_support == shared
    assert re.fullmatch("[0-9a-f]{64}", config.positions_sha256 or "")
    assert config.positions_sha256 == model.peft_config["default"].positions_sha256


@pytest.mark.parametrize("shared", [True, False])
def test_saved_positions_win_over_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """A later generator may draw others; an adapter trained before must not change."""
    model = saved(tmp_path, share_support=shared)
    original = draw_positions
    monkeypatch.setattr(frame, "draw_positions", lambda a, b, n, seed, *rest: original(a, b, n, seed + 1, *rest))
    loaded = PeftModel.from_pretrained(ARCHITECTURES["llama"].model(), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))
    # also into a model that has computed with its own positions before
    other = get_peft_model(
        ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=100, share_support=shared)
    ).eval()
    logits(other, "llama")
    set_peft_model_state_dict(other, get_peft_model_state_dict(model))
    assert torch.equal(logits(other, "llama"), logits(model, "llama"))


def tampered(where: Path) -> None:
    path = where / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    next(value for key, value in sorted(state.items()) if "frameft_positions/" in key)[0, 0] += 1
    save_file(state, path, metadata={"format": "pt"})


def test_positions_that_do_not_match_their_checksum(tmp_path: Path) -> None:
    saved(tmp_path, init_std=1.0)
    tampered(tmp_path)
    base = ARCHITECTURES["llama"].model()
    expected = logits(base, "llama")
    with pytest.raises(RuntimeError, match=r"do not match the checksum in adapter_config\.json.*Nothing was loaded"):
        PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(logits(base, "llama"), expected)
    assert not any(isinstance(module, FrameFTLinear) for module in base.modules())


def test_other_adapters_survive_a_failed_load(tmp_path: Path) -> None:
    model = saved(tmp_path)
    expected = logits(model, "llama")
    tampered(tmp_path)
    with pytest.raises(RuntimeError, match="Nothing was loaded"):
        model.load_adapter(str(tmp_path / "adapter"), "second")
    assert list(model.peft_config) == ["default"]
    assert not any("second" in name for name in model.state_dict())
    assert torch.equal(logits(model, "llama"), expected)


def test_missing_positions_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "16x32" not in k}, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"no positions for 16x32x100"):
        PeftModel.from_pretrained(ARCHITECTURES["llama"].model(), str(tmp_path / "adapter"))


def test_one_configuration_serves_two_models(tmp_path: Path) -> None:
    config = FrameFTConfig(n_coefficients=100, target_modules=["q_proj", "query"])
    for where in ("llama", "bert"):
        model = get_peft_model(ARCHITECTURES[where].model(), config).eval()
        disturb(model, seed=1)
        model.save_pretrained(tmp_path / where)
        loaded = PeftModel.from_pretrained(ARCHITECTURES[where].model(), str(tmp_path / where)).eval()
        assert torch.equal(logits(loaded, where), logits(model, where))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_memory_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    """Coefficients made on the meta device get the file's values, in float32 beside a bfloat16 base."""
    model = saved(tmp_path)
    base = ARCHITECTURES["llama"].model().to(dtype)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), low_cpu_mem_usage=True)
    found, expected = get_peft_model_state_dict(loaded), get_peft_model_state_dict(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_base_on_the_meta_device() -> None:
    """The shape of a model is enough to know what will be trained, and where the coefficients are."""
    with torch.device("meta"):
        shell = ARCHITECTURES["llama"].model()
    model = get_peft_model(shell, FrameFTConfig(n_coefficients=100))
    real = get_peft_model(ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=100))
    found, expected = (
        {name: value for name, value in m.named_buffers() if "frameft_positions" in name} for m in (model, real)
    )
    assert len(expected) == 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_injected_without_a_peft_model() -> None:
    model, other = (
        inject_adapter_in_model(FrameFTConfig(n_coefficients=100), ARCHITECTURES["llama"].model()) for _ in "12"
    )
    disturb(model, seed=1, only="frameft_")
    set_peft_model_state_dict(other, get_peft_model_state_dict(model))
    assert torch.equal(logits(other, "llama"), logits(model, "llama"))


# --- a run ---


def test_interrupted_run_ends_with_the_same_weights(
    tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = Recipe(
        model=str(tiny_lm),
        data=str(colour_files[0]),
        eval_data=str(colour_files[1]),
        task="choice",
        template="{text}",
        adapter="frameft",
        adapter_args={"n_coefficients": 300},
        train={"lr": 0.2, "max_steps": 9, "save_every": 4},
        device="cpu",
    )
    whole = tune(recipe, directory=tmp_path / "whole")
    assert whole.info["parameters"]["trainable"] == 4 * 300
    with signal_at(6, signal.SIGINT), pytest.raises(Interrupted):
        tune(recipe, directory=tmp_path / "run")
    resumed = tune(directory=tmp_path / "run", resume=True)
    first, second = (load_file(run.path / "adapter" / "adapter_model.safetensors") for run in (whole, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(value.abs().max() > 0.1 for key, value in first.items() if "coefficients" in key)
    model, *_ = load_run(whole.path)
    state = get_peft_model_state_dict(model)
    assert all(torch.equal(state[key], first[key]) for key in first)


# --- leaving for LoRA ---


def test_compact_support_is_exactly_a_lora_for_stock_peft(tmp_path: Path) -> None:
    model = saved(tmp_path, support="compact")
    errors = to_lora(model, tmp_path / "lora")
    assert set(errors.values()) == {0.0}
    found = in_a_fresh_process(tmp_path, "lora", WITHOUT_ACCLIMATE)
    assert isinstance(found, Tensor), found
    torch.testing.assert_close(found, logits(model, "llama"), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 10, 10)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    # what vLLM does not load, or silently ignores
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    assert not config["modules_to_save"]
    assert (config["use_dora"], config["use_rslora"], config["bias"]) == (False, False, "none")
    assert not any(name in config for name in ("n_coefficients", "positions_sha256", "frame_l"))


@pytest.mark.parametrize("layers", [None, [1]])
def test_random_support_needs_a_high_rank(tmp_path: Path, layers: list[int] | None) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    if layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": "layers"}
    model = saved(tmp_path, **options)
    to_lora(model, tmp_path / "exact")
    exact = PeftModel.from_pretrained(ARCHITECTURES["llama"].model(), str(tmp_path / "exact")).eval()
    torch.testing.assert_close(logits(exact, "llama"), logits(model, "llama"), rtol=0, atol=1e-5)
    errors = to_lora(model, tmp_path / "cut", rank=3)
    assert json.loads((tmp_path / "cut" / "conversion.json").read_text()) == {
        "converted_from": "frameft", "rank": 3, "relative_error": errors,
    }  # fmt: skip
    state = load_file(tmp_path / "cut" / "adapter_model.safetensors")
    assert len(errors) == (4 if layers is None else 2)
    for name, error in errors.items():
        change = model.base_model.model.get_submodule(name).get_delta_weight("default")
        a, b = (state[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        sigma = torch.linalg.svdvals(change)
        assert error == pytest.approx((sigma[3:].norm() / sigma.norm()).item(), rel=1e-4)
        assert ((change - b @ a).norm() / change.norm()).item() == pytest.approx(error, rel=1e-4)


def test_conversion_keeps_a_trained_head(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["bert"]
    config = FrameFTConfig(
        n_coefficients=64, support="compact", target_modules=["query"], modules_to_save=["classifier"]
    )
    model = get_peft_model(architecture.model(), config).eval()
    disturb(model, seed=1)
    to_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(architecture.model(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded, "bert"), logits(model, "bert"), rtol=0, atol=1e-5)


def test_conversion_of_an_untrained_adapter(tmp_path: Path) -> None:
    model = get_peft_model(ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=100)).eval()
    assert set(to_lora(model, tmp_path, rank=2).values()) == {0.0}


def test_conversion_errors(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with pytest.raises(ValueError, match="no FrameFT adapter 'other'"):
        to_lora(model, tmp_path / "lora", adapter_name="other")
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        to_lora(model, tmp_path / "lora", rank=0)


def test_training_moves_the_loss() -> None:
    model = get_peft_model(ARCHITECTURES["llama"].model(), FrameFTConfig(n_coefficients=200)).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=suggest_lr(FrameFTConfig()))
    start = loss(model, "llama").item()
    for _ in range(20):
        optimizer.zero_grad()
        loss(model, "llama").backward()
        optimizer.step()
    assert loss(model, "llama").item() < start - 0.1
