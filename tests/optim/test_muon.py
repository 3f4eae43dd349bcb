"""Muon against its equations, against torch's Muon and AdamW, and against itself in parts, in batches and on two processes."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from acclimate.linalg import polar_factor
from acclimate.optim import Muon, MuonFactory, build_muon, muon_param_groups, snapshot, update_report
from acclimate.optim.msign import largest_singular_value, msign, polar_express_triples, triples, update_scale
from acclimate.optim.muon_routing import route
from acclimate.optim.update_strength import BEFORE, MismatchCallback, group_of, of_product, of_weight, summary
from optim import muon_worker

F64 = torch.float64
GOLDEN = (
    (8.237312490495558, -23.157747414558195, 16.680568411445908),
    (4.082441999064832, -2.8930477353325834, 0.5252849256975642),
    (3.9263479922546574, -2.854746803476531, 0.5318022422894991),
    (3.298218713308514, -2.424541981026708, 0.4863200835884411),
    (2.2970369434552578, -1.6366255812590313, 0.4002628455953631),
    (1.8763805351440415, -1.2347896577722273, 0.3589188750166863),
    (1.8564423485636876, -1.2132449880972453, 0.35680034878439176),
    (1.8564356595636744, -1.2132377162617844, 0.35679964821196686),
    (1.8564311662360165, -1.2132289067161592, 0.3567953302487541),
    (1.8749954775653883, -1.2499909551525923, 0.37499547758720414),
)


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: Tensor, m: int, n: int) -> Tensor:
    k = len(values)
    left, right = torch.linalg.qr(matrix(m, k, seed=1)).Q, torch.linalg.qr(matrix(n, k, seed=2)).Q
    return left * values @ right.T


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(matrix(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = matrix(*p.shape, seed=100 * step + i).to(p.dtype)


# --- msign ---


def test_polar_express_triples_are_the_golden_ones() -> None:
    np.testing.assert_allclose(polar_express_triples(), GOLDEN, rtol=1e-9)
    assert triples("polar_express", 12)[9:] == [polar_express_triples()[9]] * 3


def test_each_quintic_is_the_best_on_its_interval() -> None:
    # the first step, before the guards: no other odd quintic is nearer to 1 on [0.02, 1]; its error is reached with alternating signs
    a, b, c = polar_express_triples()[0]
    x = torch.linspace(0.02, 1, 20_001, dtype=F64)
    values = a * 1.01 * x + b * 1.01**3 * x**3 + c * 1.01**5 * x**5
    values = values * 2 / (values.min() + values.max())  # the guard moved the centre
    error = float((values - 1).abs().max())
    extremes = [float(values[0] - 1), *(float(v - 1) for v in local_extremes(values)), float(values[-1] - 1)]
    np.testing.assert_allclose(extremes, [-error, error, -error, error], rtol=1e-3)


def local_extremes(values: Tensor) -> list[Tensor]:
    slopes = values.diff().sign()
    return [values[i + 1] for i in range(len(slopes) - 1) if slopes[i] != slopes[i + 1]]


@pytest.mark.parametrize(
    ("method", "steps", "smallest", "low", "high"),
    [
        ("polar_express", 5, 1e-3, 0.804, 1.132),
        ("polar_express", 6, 1e-3, 0.987, 1.002),
        ("polar_express", 8, 1e-3, 1 - 1e-5, 1 + 1e-5),
        ("ns5", 5, 1e-2, 0.681, 1.135),
        ("ns5", 5, 1e-3, 0.47, 1.21),
    ],
)
@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (24, 200)])  # the last goes through the Gram matrix
def test_singular_values_end_near_one(
    method: Any, steps: int, smallest: float, low: float, high: float, shape: tuple[int, int]
) -> None:
    small = torch.logspace(math.log10(smallest), math.log10(0.3), 23, dtype=F64)
    values = torch.cat([small, (1 - small.square().sum()).sqrt()[None]])  # norm 1, so these are the shares of the norm
    found = torch.linalg.svdvals(msign(with_singular_values(values, *shape), method, steps, F64))
    assert found.min() >= low - 1e-9
    assert found.max() <= high + 1e-9
    assert found.max() <= largest_singular_value(method, steps) + 1e-9


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (6, 40)])
def test_svd_is_exact(shape: tuple[int, int]) -> None:
    d = matrix(*shape)
    u, _, vh = torch.linalg.svd(d, full_matrices=False)
    found = msign(d, "svd")
    torch.testing.assert_close(found, u @ vh, rtol=0, atol=1e-10)
    gram = found.T @ found if shape[0] >= shape[1] else found @ found.T
    torch.testing.assert_close(gram, torch.eye(6, dtype=F64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["polar_express", "ns5", "svd"])
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    stretch=st.sampled_from([1, 6]),
    power=st.floats(-6, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_msign_is_equivariant(method: Any, m: int, n: int, stretch: int, power: float, seed: int) -> None:
    d = matrix(m, n * stretch, seed=seed)
    o = msign(d, method)
    q, p = (torch.linalg.qr(matrix(size, size, seed=seed + 1)).Q for size in d.shape)
    for found, expected in (
        (msign(10**power * d, method), o),
        (msign(d.T, method), o.T),
        (msign(q @ d @ p, method), q @ o @ p),
        (msign(torch.stack([d, d]), method)[1], o),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (3, 30), (30, 3)])
@pytest.mark.parametrize("method", ["polar_express", "ns5", "svd"])
def test_zero_stays_zero(method: Any, shape: tuple[int, int]) -> None:
    both = torch.stack([torch.zeros(shape), torch.ones(shape)])
    found = msign(both, method)
    assert torch.equal(found[0], torch.zeros(shape))
    assert torch.isfinite(found).all()


def test_gram_steps_equal_the_plain_ones() -> None:
    d = matrix(8, 64)
    x = d / (1.1 * d.norm())
    for a, b, c in polar_express_triples()[:5]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    torch.testing.assert_close(msign(d), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(msign(d.float()), x.float(), rtol=0, atol=1e-4)


# --- against torch ---


def test_ns5_follows_torchs_muon() -> None:
    shapes = ((64, 32), (32, 64), (48, 48), (64, 32), (8, 64))
    ours, theirs = parameters(*shapes), parameters(*shapes)
    mine = Muon(ours, lr=5e-4, weight_decay=0.1, method="ns5", ns_dtype=torch.bfloat16)
    peer = torch.optim.Muon(theirs, lr=5e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        peer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) <= 1e-6


def test_adamw_groups_equal_torchs_bit_for_bit() -> None:
    shapes = ((5, 4), (7,), (2, 3, 2))
    ours, theirs = parameters(*shapes), parameters(*shapes)
    mine = Muon([{"params": ours, "algo": "adamw"}], adamw_lr=1e-2, adamw_weight_decay=0.1, foreach=False)
    peer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        peer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_state_dicts_of_torchs_optimisers_are_taken_on() -> None:
    for algo, peer_of, options in (
        ("muon", lambda p: torch.optim.Muon(p, lr=2e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), {"ns_dtype": torch.bfloat16}),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=2e-3, betas=(0.8, 0.9), weight_decay=0.1, foreach=False), {"foreach": False}),
    ):  # fmt: skip
        theirs = parameters((64, 32), (32, 32))
        peer = peer_of(theirs)
        for step in range(3):
            give_gradients(theirs, step)
            peer.step()
        ours = copy.deepcopy(theirs)
        mine = Muon([{"params": ours, "algo": algo}], **options)
        mine.load_state_dict(copy.deepcopy(peer.state_dict()))
        assert mine.param_groups[0]["lr"] == 2e-3
        for step in range(3, 8):
            give_gradients(theirs, step)
            give_gradients(ours, step)
            peer.step()
            mine.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), algo
    with pytest.raises(ValueError, match="amsgrad"):
        mine.load_state_dict(torch.optim.AdamW(ours, amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="ns_coefficients"):
        Muon(ours).load_state_dict(torch.optim.Muon(ours, ns_coefficients=(2.0, -1.5, 0.5)).state_dict())
    with pytest.raises(ValueError, match=r"routed 2 parameters differently: '0\.0' \(adamw, now muon\)"):
        Muon(ours).load_state_dict(torch.optim.AdamW(ours).state_dict())


# --- one step ---


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_steps_are_the_equations(nesterov: bool, maximize: bool) -> None:
    (p,) = parameters((6, 9), dtype=F64)
    optimizer = Muon(
        [p], lr=0.01, weight_decay=0.3, momentum=0.9, nesterov=nesterov, maximize=maximize, scale="spectral"
    )
    w, b = p.detach().clone(), torch.zeros(6, 9, dtype=F64)
    for step in range(4):
        give_gradients([p], step)
        optimizer.param_groups[0]["lr"] = lr = 0.01 / (step + 1)  # hyper-parameters may change
        optimizer.step()
        assert p.grad is not None
        g = -p.grad if maximize else p.grad
        b = 0.9 * b + g
        w = w * (1 - lr * 0.3) - lr * msign(g + 0.9 * b if nesterov else b)
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.1 * b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (5, 5)])
def test_updates_are_as_large_as_adamws(shape: tuple[int, int]) -> None:
    (p,) = parameters(shape, dtype=F64)
    before = p.detach().clone()
    give_gradients([p], 0)
    Muon([p], lr=1e-3, method="svd").step()
    root_mean_square = float(((p - before) / 1e-3).square().mean().sqrt())
    assert root_mean_square == pytest.approx(0.2, rel=1e-9)
    assert update_scale("spectral", 12, 3) == 2
    assert update_scale("spectral", 3, 12) == update_scale("none", 3, 12) == 1


def test_implicit_bias_of_muon_and_of_sign_descent() -> None:
    x, y = matrix(6, seed=3), matrix(4, seed=4)

    def descend(direction: Any, steps: int = 4000) -> Tensor:
        w = nn.Parameter(torch.zeros(4, 6, dtype=F64))
        optimizer = Muon([w], momentum=0.0, nesterov=False, method="svd", scale="none")
        for step in range(steps):
            lr = 0.3 / (1 + step) ** 0.9
            w.grad = torch.outer(w.detach() @ x - y, x)
            if direction == "muon":
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
            else:
                w.data -= lr * w.grad.sign()
        return w.detach()

    spectral, signs = descend("muon"), descend("sign")
    least_spectral = torch.outer(y, x) / x.square().sum()
    least_entry = torch.outer(y, x.sign()) / x.abs().sum()
    assert float((spectral - least_spectral).norm() / least_spectral.norm()) < 1e-2
    assert float((signs - least_entry).norm() / least_entry.norm()) < 1e-2
    assert torch.linalg.matrix_norm(spectral, 2) < torch.linalg.matrix_norm(signs, 2)
    assert spectral.abs().max() > signs.abs().max()


def test_many_shapes_equal_one_by_one() -> None:
    shapes = ((8, 4), (4, 8), (8, 4), (3, 60), (3, 60), (8, 4))
    together, alone = parameters(*shapes, dtype=F64), parameters(*shapes, dtype=F64)
    one = Muon(together, lr=0.1)
    many = [Muon([p], lr=0.1) for p in alone]
    for step in range(3):
        give_gradients(together, step)
        give_gradients(alone, step)
        one.step()
        for optimizer in many:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_stacked_fused_and_convolutions_equal_separate_matrices() -> None:
    experts, fused, conv = parameters((3, 6, 4), (6 + 2 + 2, 6), (4, 3, 2, 2), dtype=F64)
    separate = [nn.Parameter(part.detach().clone()) for part in (*experts, *fused.split([6, 2, 2]), conv.flatten(1))]
    optimizer = Muon(
        [
            {"params": [experts], "algo": "muon", "stacked": True},
            {"params": [fused], "algo": "muon", "split": (6, 2, 2)},
            {"params": [conv], "algo": "muon"},
        ],
        lr=0.1,
    )
    peer = Muon(separate, lr=0.1)
    for step in range(3):
        give_gradients([experts, fused, conv], step)
        assert experts.grad is not None
        assert fused.grad is not None
        assert conv.grad is not None
        parts = (*experts.grad, *fused.grad.split([6, 2, 2]), conv.grad.flatten(1))
        for p, grad in zip(separate, parts, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        peer.step()
    moved = (*experts, *fused.split([6, 2, 2]), conv.flatten(1))
    for a, b in zip(moved, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_parameters_without_gradient_and_a_closure() -> None:
    still, moving = parameters((3, 3), (3, 3))
    optimizer = Muon([still, moving])
    before = still.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = moving.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == pytest.approx(float(matrix(3, 3, seed=1).float().square().sum()))
    assert torch.equal(still, before)
    assert not optimizer.state[still]


def test_half_precision_weights_may_have_float32_momentum() -> None:
    (p,) = parameters((8, 6), dtype=torch.bfloat16)
    optimizer = Muon([p], lr=0.1, momentum_dtype="float32")
    give_gradients([p], 0)
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    restored = Muon([p], momentum_dtype="float32")
    restored.load_state_dict(optimizer.state_dict())
    assert torch.equal(restored.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_gradient_scaler_skips_overflow_and_changes_nothing_else() -> None:
    scaled, plain = parameters((4, 4)), parameters((4, 4))
    one, two, scaler = Muon(scaled), Muon(plain), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        scaler.scale((scaled[0] ** 2).sum()).backward()
        if step == 1:
            scaled[0].grad = torch.full((4, 4), math.inf)
        else:
            (plain[0] ** 2).sum().backward()
            two.step()
        scaler.step(one)
        scaler.update()
        one.zero_grad()
        two.zero_grad()
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-6, atol=1e-6)
    assert not one.skipped


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_skipped_and_counted(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = Muon(muon_param_groups(model))
    bad, good = (p for p in model.parameters())
    give_gradients([bad, good], 0)
    optimizer.step()
    before, momentum = bad.detach().clone(), optimizer.state[bad]["momentum_buffer"].clone()
    moved = good.detach().clone()
    assert bad.grad is not None
    bad.grad[0, 0] = value
    with pytest.warns(UserWarning, match=r"'0\.weight' is not finite"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        optimizer.step()
    assert optimizer.skipped == {"0.weight": 2}
    assert torch.equal(bad, before)
    assert torch.equal(optimizer.state[bad]["momentum_buffer"], momentum)
    assert not torch.equal(good, moved)
    good.grad = torch.full((3, 3), 1e30)  # finite, though its square is not
    optimizer.step()
    assert "1.weight" not in optimizer.skipped


# --- what keeps updates small ---


def test_update_cap_bounds_the_spectral_norm_of_a_step() -> None:
    p, zero = parameters((12, 7), (5, 5), dtype=F64)
    zero.data.zero_()
    optimizer = Muon([p, zero], lr=1.0, update_cap=0.01)
    for step in range(5):
        give_gradients([p, zero], step)
        before, size = p.detach().clone(), float(torch.linalg.matrix_norm(p.detach(), 2))
        optimizer.step()
        moved = float(torch.linalg.matrix_norm(p.detach() - before, 2))
        assert moved <= 0.01 * size * (1 + 1e-6)
    assert moved > 0.006 * size  # the bound is not far from tight, once the power method has warmed up
    assert float(zero.abs().max()) > 0  # a weight that is zero may leave it
    free, capped = parameters((6, 6)), parameters((6, 6))
    for params, cap in ((free, None), (capped, 1e6)):
        give_gradients(params, 0)
        Muon(params, update_cap=cap).step()
    torch.testing.assert_close(free[0], capped[0])


def test_anchor_of_one_over_lr_restores_the_start(tmp_path: Path) -> None:
    for options in (
        {"anchor_dtype": torch.float32},
        {"anchor_dtype": "float32", "anchor_file": tmp_path / "w0.safetensors"},
    ):
        params = parameters((5, 4), (4, 4))
        before = [p.detach().clone() for p in params]
        optimizer = Muon(params, lr=0.05, anchor=0.0, **options)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        assert not torch.equal(params[0], before[0])
        optimizer.param_groups[0]["anchor"] = 1 / 0.05
        optimizer.step()
        for p, start in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), start, rtol=1e-6, atol=1e-6)
        assert all(("anchor" in optimizer.state[p]) == ("anchor_file" not in options) for p in params)
    # a resumed run reads the file that is there, and not the weights it now has
    again = Muon(params, anchor=20.0, anchor_file=tmp_path / "w0.safetensors", lr=0.05)
    params[0].data += 1
    give_gradients(params, 9)
    again.step()
    torch.testing.assert_close(params[0].detach(), before[0], rtol=1e-6, atol=1e-6)


# --- routing ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.qkv_proj = nn.Linear(4, 8)
        self.conv = nn.Conv1d(4, 6, 3)
        self.experts = nn.Parameter(torch.zeros(2, 5, 4))
        self.norm = nn.LayerNorm(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(8, 4, bias=False)
        self.out = nn.Linear(4, 10, bias=False)
        self.score = nn.Linear(4, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def test_every_parameter_goes_where_the_rules_say() -> None:
    model = Model()
    found = {r.name: (r.algo, r.reason) for r in route(model, split={"qkv": [4, 2, 2]}, stacked=["experts"])}
    assert found == {
        "experts": ("muon", "stacked matrices"),
        "embedding.weight": ("adamw", "embedding"),
        "qkv_proj.weight": ("muon", "fused matrices"),
        "qkv_proj.bias": ("adamw", "vector"),
        "conv.weight": ("muon", "convolution"),
        "conv.bias": ("adamw", "vector"),
        "norm.weight": ("adamw", "vector"),
        "norm.bias": ("adamw", "vector"),
        "one.weight": ("adamw", "shared by several modules"),
        "one.bias": ("adamw", "vector"),
        "down.weight": ("muon", "matrix"),
        "out.weight": ("adamw", "output head"),
        "score.weight": ("adamw", "output head"),
        "score.bias": ("adamw", "output head"),
    }
    mine = {r.name: r.algo for r in route(model, adamw=["down"], muon=[r"one\.weight", "embedding"])}
    assert (mine["down.weight"], mine["one.weight"], mine["embedding.weight"]) == ("adamw", "muon", "muon")


def test_groups_have_names_decay_and_rates() -> None:
    model = Model()
    groups = muon_param_groups(
        model, 1e-2, 0.1, adamw_lr=0.0, adamw_weight_decay=0.2, split={"qkv": [4, 2, 2]}, stacked=["experts"]
    )
    found = {g["name"]: (g["lr"], g["weight_decay"], len(g["params"])) for g in groups}
    assert found == {
        "muon, stacked": (1e-2, 0.1, 1),
        "muon, fused": (1e-2, 0.1, 1),
        "muon": (1e-2, 0.1, 2),
        "adamw": (0.0, 0.2, 4),  # an lr of 0 is an lr of 0
        "adamw, no decay": (0.0, 0.0, 6),
    }
    optimizer = Muon(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"experts", "qkv_proj.weight", "conv.weight", "down.weight"}


def test_lora_factors_go_to_muon_and_saved_modules_to_adamw(tiny_encoder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(tiny_encoder)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "word_embeddings"]))
    optimizer = build_muon(model)
    assert {r.algo for r in optimizer.routes if "lora_" in r.name} == {"muon"}
    assert {r.algo for r in optimizer.routes if "classifier" in r.name} == {"adamw"}
    assert len(optimizer.routes) == 8  # two layers' A and B, the embedding's, the classifier's weight and bias
    assert optimizer.param_groups[0]["lr"] == 5e-4
    assert "query.lora_A" in optimizer.table()
    give_gradients([p for p in model.parameters() if p.requires_grad], 0)
    before = snapshot(model)
    optimizer.step()
    assert all(not torch.equal(before[name], weight) for name, weight in snapshot(model).items())


def test_warnings_name_the_mismatch(tiny_lm: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def warned(model: nn.Module, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            build_muon(model, **options)
        return [str(w.message) for w in found if w.category is UserWarning]

    def lora(**options: Any) -> nn.Module:
        base = AutoModelForCausalLM.from_pretrained(tiny_lm)
        return get_peft_model(base, LoraConfig(target_modules=["q_proj"], **options))

    assert [m[:16] for m in warned(Model())] == ["full fine-tuning"]
    assert warned(Model(), warn_mismatch=False) == []
    assert warned(lora(r=8)) == []
    wide = nn.Sequential(nn.Linear(200, 200))
    wide_lora = get_peft_model(wide, LoraConfig(r=128, target_modules=["0"]))
    assert ["rank 128" in m for m in warned(wide_lora)] == [True]
    assert ["use_rslora" in m for m in warned(lora(r=4, use_rslora=True))] == [True]
    assert build_muon(Model(), warn_mismatch=False).param_groups[0]["lr"] == 5e-5
    assert MuonFactory()(lora(r=4), lr=1e-3, weight_decay=0.1).param_groups[0]["lr"] == 1e-3


# --- errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
        ({"momentum": -0.1}, "momentum"),
        ({"ns_steps": 0}, "ns_steps must be 1 to 99, got 0"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"method": "polar"}, "method is one of polar_express, ns5, svd; got 'polar'"),
        ({"scale": "rms"}, "scale is one of .* got 'rms'"),
        ({"update_cap": -1.0}, "update_cap"),
        ({"ns_dtype": "float99"}, "'float99' is not a torch data type"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters((3, 3)), **options)
    assert Muon(parameters((3, 3)), weight_decay=0.0, lr=0.0).param_groups[0]["lr"] == 0.0


def test_groups_that_cannot_be() -> None:
    vector, weight = parameters((3,), (3, 3))
    with pytest.raises(ValueError, match=r"'bias' has shape \(3,\).*muon_param_groups\(model\)"):
        Muon([{"params": [("bias", vector)], "algo": "muon"}])
    with pytest.raises(ValueError, match=r"matrices only; it has \(3,\)"):
        Muon([vector, weight])
    with pytest.raises(ValueError, match="algo is 'muon' or 'adamw', not 'sgd'"):
        Muon([{"params": [weight], "algo": "sgd"}])
    with pytest.raises(ValueError, match="betas"):
        Muon([{"params": [vector], "algo": "adamw", "betas": (1.0, 0.9)}])
    with pytest.raises(ValueError, match="mode is auto, lora or full; got 'peft'"):
        build_muon(Model(), mode="peft")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter"):
        build_muon(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"does not add up to the 8 rows of 'qkv_proj\.weight'"):
        route(Model(), split={"qkv": [4, 2]})
    with pytest.raises(ValueError, match=r"\(experts, m, n\); 'down.weight' is \(4, 8\)"):
        route(Model(), stacked=["down"])
    with pytest.raises(TypeError, match="unexpected keyword"):
        build_muon(Model(), warn_mismatch=False, learning_rate=1.0)


def test_gradients_that_cannot_be() -> None:
    (p,) = parameters((3, 3))
    p.grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse gradients; '0\.0'"):
        Muon([p]).step()
    z = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(RuntimeError, match="complex gradients"):
        Muon([z]).step()


def test_flattened_and_quantised_parameters_are_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = Muon(muon_param_groups(model))
    optimizer.param_groups[0]["params"][0] = flat = nn.Parameter(torch.zeros(16))  # as DeepSpeed does
    flat.grad = torch.ones(16)
    with pytest.raises(RuntimeError, match=r"one-dimensional: .*use DDP or FSDP2"):
        optimizer.step()
    for attribute in ("_is_flat_param", "ds_id"):
        model = nn.Linear(4, 4)
        setattr(model.weight, attribute, 1)
        with pytest.raises(RuntimeError, match=r"'weight' has been flattened\. FSDP1 and DeepSpeed"):
            route(model)
        with pytest.raises(RuntimeError, match="use DDP or FSDP2"):
            Muon([model.weight])

    class Params4bit(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.weight = Params4bit(torch.zeros(4, 4))
    with pytest.raises(TypeError, match="'weight' is quantised"):
        route(model)
    model.weight.requires_grad_(False)
    assert [row.name for row in route(model)] == ["bias"]


def test_resume_with_another_routing_names_the_parameters() -> None:
    saved = Muon(muon_param_groups(Model())).state_dict()
    with pytest.raises(ValueError, match=r"routed 1 parameters differently: 'down.weight' \(muon, now adamw\)"):
        Muon(muon_param_groups(Model(), adamw=["down"])).load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"routed 15 parameters differently: 'conv\.bias' \(adamw, now absent\), .* \.\.\.$"
    ):
        Muon([{"params": [("other", parameters((4, 4))[0])], "algo": "muon"}]).load_state_dict(saved)
    with pytest.raises(ValueError, match="the saved optimiser has 3 parameter groups, this one has 1"):
        Muon(parameters((4, 4))).load_state_dict(saved)


# --- state ---


def test_a_state_dict_goes_on_bit_for_bit() -> None:
    def make() -> tuple[Model, Muon]:
        torch.manual_seed(0)
        model = Model()
        return model, Muon(
            muon_param_groups(model, weight_decay=0.1, stacked=["experts"]), lr=1e-2, update_cap=0.1, anchor=0.1
        )

    def train(model: Model, optimizer: Muon, steps: range) -> None:
        for step in steps:
            give_gradients([p for p in model.parameters() if p.requires_grad], step)
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    again, resumed = make()
    again.load_state_dict(content["model"])
    resumed.load_state_dict(content["optimizer"])
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(model, optimizer, range(4, 9))
    train(again, resumed, range(4, 9))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_state_is_one_number_a_weight_for_matrices_and_two_for_the_rest() -> None:
    model = Model()
    optimizer = Muon(muon_param_groups(model))
    give_gradients([p for p in model.parameters() if p.requires_grad], 0)
    optimizer.step()
    kept = sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())
    sizes = {"muon": 0, "adamw": 0}
    for group in optimizer.param_groups:
        sizes[group["algo"]] += sum(p.numel() for p in group["params"])
    vectors = sum(len(g["params"]) for g in optimizer.param_groups if g["algo"] == "adamw")
    assert (
        kept == 4 * sizes["muon"] + 8 * sizes["adamw"] + 4 * vectors
    )  # AdamW counts its steps, in four bytes a parameter


def test_state_of_smollm2_is_six_tenths_of_adamws() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    sizes = {"muon": 0, "adamw": 0}
    for row in route(model):
        sizes[row.algo] += math.prod(row.shape)
    assert (4 * sizes["muon"] + 8 * sizes["adamw"]) / 1e6 == pytest.approx(651.5, abs=0.2)
    assert 8 * sum(sizes.values()) / 1e6 == pytest.approx(1076.1, abs=0.1)


def test_schedulers_change_both_algorithms() -> None:
    optimizer = Muon(muon_param_groups(Model(), 1e-2, adamw_lr=1e-3))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert {(g["algo"], g["lr"]) for g in optimizer.param_groups} == {("muon", 5e-3), ("adamw", 5e-4)}


# --- update strength ---


def test_strength_of_a_weight_is_the_definition() -> None:
    old, new = matrix(9, 5, seed=1), matrix(9, 5, seed=1) + 0.3 * matrix(9, 5, seed=2)
    found = of_weight(new, old)
    change = new - old
    s, d = torch.linalg.svdvals(new), torch.linalg.svdvals(change)
    p, q = s.square() / s.square().sum(), d.square() / d.square().sum()
    expected = {
        "cosine_distance": 1 - float((new * old).sum() / new.norm() / old.norm()),
        "relative_change": float(change.norm() / old.norm()),
        "relative_change_spectral": float(d[0] / torch.linalg.matrix_norm(old, 2)),
        "stable_rank": float(new.norm() ** 2 / s[0] ** 2),
        "svd_entropy": float(-(p * p.log()).sum() / math.log(5)),
        "change_stable_rank": float(change.norm() ** 2 / d[0] ** 2),
        "change_svd_entropy": float(-(q * q.log()).sum() / math.log(5)),
    }
    assert found == pytest.approx(expected, rel=1e-9)
    tiny = of_weight(old + 1e-9 * matrix(9, 5, seed=2), old)["cosine_distance"]
    assert tiny == pytest.approx(found_with_more_digits(old, 1e-9), rel=1e-5)
    assert of_weight(old, torch.zeros_like(old))["cosine_distance"] is None
    assert of_weight(-old, old)["cosine_distance"] == pytest.approx(2)


def found_with_more_digits(old: Tensor, size: float) -> float:
    """1 - cos for a small change: half the square of its part orthogonal to W0, over |W0|^2."""
    change = size * matrix(9, 5, seed=2)
    across = change - old * (change * old).sum() / old.square().sum()
    return float(across.square().sum() / old.square().sum() / 2)


@given(m=st.integers(2, 9), n=st.integers(2, 9), r=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_strength_of_a_product_equals_the_materialised_one(m: int, n: int, r: int, seed: int) -> None:
    a, b, base = matrix(r, n, seed=seed), matrix(m, r, seed=seed + 1), matrix(m, n, seed=seed + 2)
    product, whole = of_product(a, b, 1.7, base), of_weight(base + 1.7 * b @ a, base)
    for key in ("cosine_distance", "relative_change", "relative_change_spectral", "change_stable_rank"):
        assert product[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-12), key
    assert of_product(a, b, 1.7, None)["cosine_distance"] is None


def test_report_of_lora_and_of_full_weights(tiny_lm: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_lm)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    before = snapshot(model)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    rows = update_report(model, before, to_json=tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == rows
    assert [row["kind"] for row in rows].count("product") == 4
    assert [row["cosine_distance"] for row in rows if row["kind"] == "lora_A"] == [0.0] * 4
    assert [row["cosine_distance"] for row in rows if row["kind"] == "lora_B"] == [None] * 4  # B was zero
    means = summary(rows)
    assert sorted(means) == ["attention k/v", "attention q/o"]
    wanted = {}
    layers: list[Any] = [module for name, module in model.named_modules() if name.endswith("q_proj")]
    for layer in layers:
        old = layer.get_base_layer().weight.detach()
        wanted.update({id(layer): of_weight(old + layer.get_delta_weight("default").detach(), old)["cosine_distance"]})
    assert means["attention q/o"]["cosine_distance"] == pytest.approx(sum(wanted.values()) / 2, rel=1e-4)

    full = AutoModelForCausalLM.from_pretrained(tiny_lm)
    found = update_report(full, tiny_lm)  # a directory of safetensors
    assert {row["group"] for row in found} == {"attention k/v", "attention q/o", "dense", "embedding and head"}
    assert all(row["cosine_distance"] == row["relative_change"] == 0 for row in found)
    with pytest.raises(ValueError, match=r"the reference has no 'model\.embed_tokens\.weight'"):
        update_report(full, before)
    with pytest.raises(ValueError, match="no safetensors"):
        update_report(full, tmp_path)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "attention q/o"),
        ("bert.encoder.layer.0.attention.self.value.weight", "attention k/v"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention q/o"),
        ("bert.encoder.layer.0.output.dense.weight", "dense"),
        ("transformer.h.0.attn.c_attn.weight", "attention qkv"),
        ("model.layers.0.mlp.down_proj.weight", "dense"),
        ("model.embed_tokens.weight", "embedding and head"),
        ("bert.embeddings.word_embeddings.weight", "embedding and head"),
    ],
)
def test_groups_of_weights(name: str, group: str) -> None:
    assert group_of(name) == group


def test_trainer_takes_the_factory_and_logs_the_mismatch(tiny_lm: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def trainer(steps: int) -> Any:
        torch.manual_seed(0)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tiny_lm), LoraConfig(r=2, target_modules=["q_proj"])
        )
        ids = [{"input_ids": [3 + i, 7, 9 + i], "labels": [3 + i, 7, 9 + i]} for i in range(8)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
            save_steps=4, eval_strategy="steps", eval_steps=4, report_to=[], logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        return Trainer(
            model, arguments, train_dataset=ids, eval_dataset=ids, callbacks=[MismatchCallback(directory=tmp_path)],
            optimizer_cls_and_kwargs=(MuonFactory, {"lr": 1e-2}),  # type: ignore[arg-type]
        )  # fmt: skip

    whole = trainer(8)
    whole.train()
    logged = [row for row in whole.state.log_history if "mismatch/attention q/o/cosine_distance" in row]
    assert [row["step"] for row in logged] == list(range(1, 9))
    distances = [row["mismatch/attention q/o/cosine_distance"] for row in logged]
    content = json.loads((tmp_path / "optimizer.json").read_text())
    series = content["plots"][0]["series"]["attention q/o"]
    assert series == [[step, distance] for step, distance in zip(range(1, 9), distances, strict=True)]
    assert 0 < distances[0] < distances[-1]
    assert content["tables"][0]["rows"] == [
        ["Muon", "LoRA factor", "q_proj.lora_A", "2 x 48", 2],
        ["Muon", "LoRA factor", "q_proj.lora_B", "48 x 2", 2],
    ]
    assert len(content["routing"]) == 4
    assert not (tmp_path / BEFORE).exists()

    again = trainer(8)  # as if killed after the checkpoint of step 4
    from safetensors.torch import save_file

    save_file(snapshot(again.model), tmp_path / BEFORE)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    resumed = json.loads((tmp_path / "optimizer.json").read_text())
    assert resumed["plots"] == content["plots"]
    with pytest.raises(ValueError, match="every must be at least 1"):
        MismatchCallback(every=0)


# --- two processes ---


@pytest.mark.timeout(120)
def test_two_processes_equal_one(tmp_path: Path) -> None:
    output = tmp_path / "found.pt"
    mp.spawn(muon_worker.worker, args=(str(output),), nprocs=2, join=True)
    found = torch.load(output, weights_only=True)
    model = muon_worker.network()
    muon_worker.train(model, muon_worker.optimizer(model), slice(None))
    for way in ("ddp", "fsdp2"):
        for ours, theirs in zip(model.parameters(), found[way], strict=True):
            torch.testing.assert_close(theirs, ours.detach(), rtol=1e-5, atol=1e-5)
    assert [x.shape for x in found["local"]] == [(17, 12), (5, 6)]  # of 33 rows, and of 12 columns
    assert int(found["skipped"][0]) == 1  # rank 0 skips what is broken on rank 1
    assert not found["skipped"][1].any()
    assert bool(found["fsdp1"][0])


def test_orthogonalisation_may_be_compiled() -> None:
    """A batch, a single matrix, and ones large enough to be taken one by one."""
    torch._dynamo.reset()
    for shape in ((2, 12, 7), (5, 9), (2, 256, 300)):
        d = matrix(*shape)
        torch.testing.assert_close(msign(d, compile="aot_eager"), msign(d), rtol=1e-9, atol=1e-9)


def test_polar_factor_is_what_svd_uses() -> None:
    d = matrix(7, 4)
    torch.testing.assert_close(msign(d, "svd"), polar_factor(d))
