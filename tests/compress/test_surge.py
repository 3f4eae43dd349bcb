"""SURGE: binary outputs that nothing of training changes, the compensated gradient in closed form, and one bit a weight on disk."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from acclimate.compress.binary_files import export, load_packed, report
from acclimate.compress.binary_gradients import Inputs, compensation, rectified, sign, through
from acclimate.compress.binary_networks import hardtanh, surge_resnet18, surge_resnet20, surge_vgg_small
from acclimate.compress.surge import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryLinear,
    SurgeCallback,
    SurgeConfig,
    bert_config,
    binarize,
    binary_layers,
    clip_latent_,
    parameter_groups,
    set_progress,
    strip_aux,
)
from acclimate.errors import MissingError

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda **k: BinaryLinear(6, 5, **k), (3, 4, 6)),
    "conv1d": (lambda **k: BinaryConv1d(4, 6, 3, padding=2, dilation=2, **k), (2, 4, 9)),
    "conv2d": (lambda **k: BinaryConv2d(4, 6, 3, stride=2, padding=1, groups=2, **k), (2, 4, 8, 8)),
    "same": (lambda **k: BinaryConv2d(3, 4, (2, 3), padding="same", bias=False, **k), (2, 3, 5, 5)),
}


def mask(x: Tensor, estimator: Any, progress: float = 0.0) -> Tensor:
    """What stands for the sign's derivative."""
    return through(torch.ones_like(x), x, estimator, progress)


def made(kind: str, dtype: torch.dtype = torch.float64, **config: Any) -> tuple[Any, Tensor, Tensor]:
    """(layer, inputs of which some lie outside of [-1, 1], upstream gradient)."""
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    layer = build(config=SurgeConfig(**config), dtype=dtype)
    with torch.no_grad():
        layer.weight.mul_(4)
        if layer.aux_weight is not None:
            layer.aux_weight.copy_(torch.randn_like(layer.weight))
    x = (1.2 * torch.randn(shape, dtype=dtype)).requires_grad_()
    with torch.no_grad():
        d = torch.randn_like(layer(x))
    return layer, x, d


def ordinary(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """op, by the torch layer itself."""
    shell = type(layer).__mro__[2 if isinstance(layer, BinaryLinear) else 3]
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    assert issubclass(shell, nn.modules.conv._ConvNd)
    return layer._conv_forward(x, weight, bias)


def seen(v: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """value, whose derivative by v is slope."""
    return value.detach() + slope.detach() * (v - v.detach())


def literal(layer: Any, x: Tensor, lam: Tensor, estimator: str = "ste") -> Tensor:
    """f_b - stop(lambda f_a) + lambda f_a by autograd, the sign's derivative a mask, what beta multiplies with a constant."""
    scale = layer.weight.detach().abs().flatten(1).mean(1).view(-1, *[1] * (layer.weight.ndim - 1))
    if layer.alpha is not None:
        scale = layer.alpha
    config, s = layer.config, torch.ones(())
    outside = torch.ones(())
    if config.beta and isinstance(layer, nn.Linear):
        s = x.detach().abs().mean(-1, keepdim=True)
    elif config.beta:
        outside = window_mean(layer, x.detach())
    if config.activation == "sign":
        inputs = s * seen(x, sign(x), mask(x.detach(), estimator))
    else:
        a, low = layer.input_scale, -1.0 if config.activation == "elastic" else 0.0
        u = (x - layer.threshold) / (a * s)
        rounded = sign(u) if low else (u >= 0.5).to(u.dtype)
        inputs = s * a * (u.clamp(low, 1) + (rounded - u.clamp(low, 1)).detach())
    f_b = ordinary(
        layer, inputs, scale * seen(layer.weight, sign(layer.weight), mask(layer.weight.detach(), estimator)), None
    )
    f_b = f_b * outside
    if layer.bias is not None:
        f_b = f_b + layer.bias.view(-1, *[1] * (layer.weight.ndim - 2))
    aux = layer.auxiliary()
    if aux is None:
        return f_b
    f_a = ordinary(layer, x, aux, None)
    return f_b - (lam * f_a).detach() + lam * f_a


def window_mean(layer: Any, x: Tensor) -> Tensor:
    """XNOR-Net's K, patch by patch: mean |x| of the window's entries in each output's group."""
    size, outputs = layer.kernel_size, layer.out_channels
    group = x.shape[1] // layer.groups
    parts = []
    for o in range(outputs):
        first = (o // (outputs // layer.groups)) * group
        patches = F.unfold(x[:, first : first + group].abs(), size, layer.dilation, layer.padding, layer.stride)
        parts.append(patches.mean(1))
    side = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], layer.padding, size, layer.stride, strict=True)]
    return torch.stack(parts, 1).unflatten(2, side)


def gradients(layer: Any, x: Tensor, d: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x.grad = None
    layer(x).backward(d)
    return {"x": x.grad.clone(), **{name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}}


# --- forward ---


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options", [{}, {"eta": 5.0}, {"aux": "shared"}, {"aux": "lowrank:2"}, {"ags": "sample"}], ids=str
)
def test_outputs_are_those_of_the_estimator_alone(kind: str, options: dict[str, Any]) -> None:
    layer, x, _ = made(kind, torch.float32, **options)
    plain, _, _ = made(kind, torch.float32, aux=None)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "aux" not in k})
    expected = ordinary(layer, sign(x), layer.weight.abs().flatten(1).mean(1).view(-1, *[1] * (layer.weight.ndim - 1)) * sign(layer.weight), layer.bias)  # fmt: skip
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), layer.train()(x))
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    if layer.aux_weight is not None:
        torch.testing.assert_close(layer(x), literal(layer, x, torch.tensor(0.7)), rtol=1e-5, atol=1e-5)


def test_sign_is_one_at_zero_and_the_masks_are_what_they_say() -> None:
    x = torch.tensor([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])
    assert sign(x).tolist() == [-1, -1, -1, 1, 1, 1, 1]
    assert mask(x, "ste").tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert mask(x, "bireal").tolist() == [0, 0, 1, 2, 1, 0, 0]
    for progress, t, k in ((0.0, 0.1, 10.0), (0.5, 1.0, 1.0), (1.0, 10.0, 1.0)):
        torch.testing.assert_close(mask(x, "ede", progress), k * t * (1 - torch.tanh(t * x) ** 2))


# --- backward ---


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("estimator", ["ste", "bireal", "ede"])
def test_gradients_are_those_of_the_formula(kind: str, estimator: str) -> None:
    layer, x, d = made(kind, estimator=estimator, eta=0.4)
    found = gradients(layer, x, d)
    zero, _, _ = made(kind, estimator=estimator, eta=0.0)
    base = gradients(zero, x, d)
    none, _, _ = made(kind, estimator=estimator, aux=None)
    assert all(torch.equal(value, base[name]) for name, value in gradients(none, x, d).items())
    assert torch.equal(found["weight"], base["weight"])
    # g_a by autograd, and lambda from the norms
    inputs = x.detach().clone().requires_grad_()
    (g_a,) = torch.autograd.grad(ordinary(layer, inputs, layer.aux_weight, None), inputs, d)
    lam = 0.4 * base["x"].norm() / (g_a.norm() + 1e-8)
    torch.testing.assert_close(found["x"], base["x"] + lam * g_a, rtol=1e-5, atol=1e-8)  # norms are taken in float32
    assert float((found["x"] - base["x"]).norm() / base["x"].norm()) == pytest.approx(0.4, rel=1e-6)
    inputs = x.detach().clone().requires_grad_()
    layer.zero_grad()
    literal(layer, inputs, lam, estimator).backward(d)
    torch.testing.assert_close(found["x"], inputs.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["aux_weight"], layer.aux_weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["weight"], layer.weight.grad, rtol=1e-5, atol=1e-8)
    if layer.bias is not None:
        torch.testing.assert_close(found["bias"], layer.bias.grad)


@settings(max_examples=15, deadline=None)
@given(s=st.floats(1e-2, 1e4), seed=st.integers(0, 99))
def test_lambda_does_not_see_the_scale_of_the_loss(s: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    g_b, g_a = (torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    lam = compensation(g_b, g_a, 0.3, "batch", None, False)
    assert float(compensation(s * g_b, s * g_a, 0.3, "batch", None, False)) == pytest.approx(float(lam), rel=1e-5)
    assert float((lam * g_a).norm()) == pytest.approx(0.3 * float(g_b.norm()), rel=1e-5)
    rows = compensation(g_b, g_a, 0.3, "sample", None, False)
    torch.testing.assert_close((rows * g_a).norm(dim=1), 0.3 * g_b.norm(dim=1), rtol=1e-5, atol=0)
    assert float(compensation(g_b, g_a, 0.3, "fixed", None, False)) == pytest.approx(0.3)
    ratio = torch.zeros(())
    for factor in (1.0, 3.0):
        moving = compensation(factor * g_b, g_a, 0.3, "ema", ratio, False)
    assert float(moving) == pytest.approx(float(lam) * (0.9 + 0.1 * 3), rel=1e-5)


def test_each_sample_has_its_own_lambda() -> None:
    layer, x, d = made("conv2d", ags="sample")
    found = gradients(layer, x, d)
    alone = [gradients(layer, x[i : i + 1].detach().requires_grad_(), d[i : i + 1]) for i in range(len(x))]
    torch.testing.assert_close(found["x"], torch.cat([one["x"] for one in alone]))
    torch.testing.assert_close(found["aux_weight"], sum(one["aux_weight"] for one in alone))


def test_the_auxiliary_path_is_a_gradient() -> None:
    """With fixed lambda 1 and no binary gradient (all inputs outside of [-1, 1]), dx is that of op(x, W_a)."""
    layer, x, _ = made("conv2d", eta=1.0, ags="fixed")
    far = (x.detach().sign() * (2 + x.detach().abs())).requires_grad_()

    def help_alone(v: Tensor, aux: Tensor) -> Tensor:
        return ordinary(layer, v, aux, None)

    assert torch.autograd.gradcheck(help_alone, (far, layer.aux_weight), eps=1e-6)
    d = torch.randn_like(layer(far))
    expected = torch.autograd.grad(help_alone(far, layer.aux_weight), (far, layer.aux_weight), d)
    found = gradients(layer, far, d)
    torch.testing.assert_close(found["x"], expected[0])
    torch.testing.assert_close(found["aux_weight"], expected[1])


def test_outside_of_the_mask() -> None:
    layer = BinaryLinear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5, -0.5]]))
        layer.aux_weight.copy_(torch.tensor([[3.0, -2.0]]))
    d = torch.tensor([[-1.0]], dtype=torch.float64)
    far = torch.tensor([[2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    assert gradients(layer, far, d)["x"].tolist() == [[0.0, 0.0]], "no binary gradient, so lambda is 0"
    near = torch.tensor([[2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    g = gradients(layer, near, d)["x"][0]
    lam = 0.3 * 0.5 / math.hypot(3, 2)  # g_b = (0, 0.5)
    torch.testing.assert_close(g, torch.tensor([-3 * lam, 0.5 + 2 * lam], dtype=torch.float64), rtol=1e-6, atol=0)


def test_gradients_of_a_learned_scale_and_of_rectified_weights() -> None:
    layer, x, d = made("linear", alpha="learned", aux=None)
    found = gradients(layer, x, d)
    expected = torch.einsum("...o,...i->oi", d, sign(x)) * sign(layer.weight)
    torch.testing.assert_close(found["alpha"], expected.sum(1, keepdim=True))
    layer, x, d = made("conv2d", rectify=(0.85, 0.99))
    latent = layer.latent().flatten(1)
    assert float(latent.std(1).max()) < 1
    plain = layer.weight.flatten(1)
    standard = (plain - plain.mean(1, keepdim=True)) / plain.std(1, keepdim=True)
    torch.testing.assert_close(rectified(layer.weight, 1.0).flatten(1), standard, rtol=1e-5, atol=1e-6)
    assert gradients(layer, x, d)["weight"].abs().sum() > 0
    set_progress(layer, 1.0)
    assert layer.latent().flatten(1).abs().max() >= latent.abs().max()


BETA_AND_ELASTIC: dict[str, tuple[str, dict[str, Any]]] = {
    "beta": ("linear", {"beta": "mean"}),
    "beta, groups": ("conv2d", {"beta": "mean"}),
    "elastic": ("linear", {"activation": "elastic"}),
    "elastic, conv": ("conv2d", {"activation": "elastic"}),
    "elastic, beta": ("linear", {"activation": "elastic", "beta": "mean"}),
    "elastic01": ("linear", {"activation": "elastic01"}),
    "elastic01, beta": ("linear", {"activation": "elastic01", "beta": "mean", "alpha": "learned"}),
}


@pytest.mark.parametrize("case", BETA_AND_ELASTIC)
@pytest.mark.parametrize("aux", ["copy", None], ids=str)
def test_input_scales_and_elastic_activations_are_their_formulas(case: str, aux: str | None) -> None:
    kind, options = BETA_AND_ELASTIC[case]
    layer, x, d = made(kind, aux=aux, ags="fixed", eta=0.4, **options)
    if layer.input_scale is not None:
        with torch.no_grad():
            layer.input_scale.fill_(1.3)
            layer.threshold.fill_(-0.2)
    found = gradients(layer, x, d)
    lam = torch.tensor(0.4)
    torch.testing.assert_close(layer(x), literal(layer, x, lam), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert torch.equal(layer(x), layer.eval()(x))
    inputs = x.detach().clone().requires_grad_()
    layer.zero_grad()
    literal(layer, inputs, lam).backward(d)
    expected = {"x": inputs.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(max_examples=20, deadline=None)
@given(a=st.floats(0.1, 3), t=st.floats(-1, 1), seed=st.integers(0, 99), kind=st.sampled_from(["elastic", "elastic01"]))
def test_elastic_gradients_in_closed_form(a: float, t: float, seed: int, kind: Any) -> None:
    """By intervals: below, inside and above of what the estimator sees."""
    draw = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(40, generator=draw, dtype=torch.float64) for _ in range(2))
    scale, threshold = (torch.tensor([v], dtype=torch.float64) for v in (a, t))
    quantiser = Inputs(kind, scale, threshold)
    of_x, of_a, of_t = quantiser.backward(g, x, "ste", 0.0)
    low, values = (-1.0, (-1.0, 1.0)) if kind == "elastic" else (0.0, (0.0, 1.0))
    total_a = total_t = 0.0
    for i in range(40):
        u = (float(x[i]) - t) / a
        b = values[u >= (low + 1) / 2]
        assert float(quantiser(x)[i]) == b
        inside = low <= u <= 1
        assert float(of_x[i]) == pytest.approx(float(g[i]) if inside else 0.0)
        total_t -= float(g[i]) if inside else 0.0
        total_a += float(g[i]) * (b - u if inside else b)
    assert (float(of_a), float(of_t)) == (pytest.approx(total_a, abs=1e-9), pytest.approx(total_t, abs=1e-9))


@pytest.mark.parametrize("aux", ["shared", "lowrank:2"])
def test_other_helps_are_the_formula_with_their_weight(aux: str) -> None:
    layer, x, d = made("conv2d", aux=aux, ags="fixed", eta=0.4)
    found = gradients(layer, x, d)
    inputs = x.detach().clone().requires_grad_()
    layer.zero_grad()
    literal(layer, inputs, torch.tensor(0.4)).backward(d)
    expected = {"x": inputs.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert (
        found.keys()
        == expected.keys()
        == {"x", "weight", "bias"} | ({"aux_left", "aux_right"} if aux != "shared" else set())
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


def test_one_sample_needs_no_axis_for_the_batch() -> None:
    for kind in LAYERS:
        layer, x, _ = made(kind, torch.float32)
        one = x[0, 0] if kind == "linear" else x[0]
        assert torch.equal(layer(one), layer(one[None])[0])
        assert layer(one).shape == ordinary(layer, one, layer.weight, layer.bias).shape


def test_products_of_signs_are_whole() -> None:
    """So a sum that is 0 is 0, and the sign after it does not hang on the order of summation."""
    layer, x, _ = made("conv2d", torch.float32, aux=None)
    with torch.no_grad():
        layer.bias.zero_()
        whole = layer(x) / layer.scale(layer.weight).view(-1, 1, 1)
    torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-5)
    assert (layer(x) == 0).any()
    assert torch.equal(layer(x) == 0, whole.round() == 0)


def test_numbers_that_are_not_finite_and_dead_layers() -> None:
    layer, x, d = made("linear", torch.float32)
    layer.tally.watch = True
    found = gradients(layer, x, torch.full_like(d, math.nan))
    assert found["x"].isnan().any(), "GradScaler sees it"
    assert float(layer.tally.values["lambda"]) == 0
    assert layer.tally.dead == 1
    gradients(layer, (x.detach() + 5).requires_grad_(), d)
    assert (layer.tally.passes, layer.tally.dead) == (2, 2)
    with torch.no_grad():
        layer.aux_weight.zero_()
    gradients(layer, x, d)
    assert layer.tally.dead == 2
    with pytest.raises(TypeError, match="floating point"):
        layer(torch.ones(2, 6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "options", "reentrant"),
    [
        ("conv2d", {}, True), ("conv2d", {}, False), ("conv2d", {"beta": "mean", "aux": "shared"}, False),
        ("linear", {"beta": "mean", "activation": "elastic01"}, False),
    ],
    ids=["reentrant", "plain", "beta", "elastic"],
)  # fmt: skip
def test_checkpointing_autocast_and_compiling_change_nothing(
    kind: str, options: dict[str, Any], reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x, d = made(kind, torch.float32, **options)
    expected = gradients(layer, x, d)
    layer.zero_grad()
    x.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).backward(d)
    assert torch.equal(x.grad, expected["x"])
    assert all(torch.equal(p.grad, expected[name]) for name, p in layer.named_parameters())
    layer.zero_grad()
    x.grad = None
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).backward(d)
    torch.testing.assert_close(x.grad, expected["x"])
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    low.backward(d.bfloat16())
    close = (x.grad - expected["x"]).abs() <= 0.1 + 0.1 * expected["x"].abs()
    assert close.float().mean() > 0.98, "all but what rounding moved over the edge of a mask"


def test_training_keeps_one_copy_of_inputs_and_16_bytes_a_helping_weight() -> None:
    sizes = {}
    for aux in ("copy", None):
        layer, x, d = made("conv2d", torch.float32, aux=aux)
        kept: dict[int, Tensor] = {}

        def keep(saved: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[saved.data_ptr()] = saved
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            y = layer(x)
        for p in [x, *layer.parameters()]:
            kept.pop(p.data_ptr(), None)
        assert [tuple(saved.shape) for saved in kept.values()] == [(6, 1, 1, 1)], "alpha, and nothing of the size of x"
        y.backward(d)
        optimizer = torch.optim.Adam(layer.parameters())
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        sizes[aux] = sum(value.nbytes for value in [*layer.parameters(), *gradients, *states])
    assert sizes["copy"] - sizes[None] == 16 * layer.weight.numel()


# --- models ---


def network(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Flatten(),
        nn.Linear(8 * 36, 12), nn.Linear(12, 3),
    )  # fmt: skip
    return binarize(model, SurgeConfig(**config))


IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_what_is_made_binary() -> None:
    assert [name for name, _ in binary_layers(network())] == ["2", "6"]
    assert [name for name, _ in binary_layers(network(skip_ends=False))] == ["0", "2", "4", "6", "7"]
    assert [name for name, _ in binary_layers(network(skip=("^6$",)))] == ["2"]
    model = network()
    with pytest.warns(UserWarning, match="binary layers already"):
        assert binarize(model) is model
    with pytest.raises(ValueError, match="no layer to make binary"):
        binarize(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"'1' is a ConvTranspose2d, which cannot be made binary"):
        binarize(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 3), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="pad with zeros"):
        BinaryConv2d(1, 1, 3, padding_mode="reflect")


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.two.weight = self.one.weight
            self.again = self.one

    model: Any = binarize(Tied())
    assert model.two.weight is model.one.weight
    assert model.two.aux_weight is model.one.aux_weight
    assert model.again is model.one
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(
    "options", [{}, {"alpha": "learned"}, {"aux": "lowrank:2"}, {"rectify": 0.9}, {"alpha": None}], ids=str
)
def test_nothing_that_trains_is_in_what_is_shipped(options: dict[str, Any], tmp_path: Path) -> None:
    model = network(**options)
    optimizer = torch.optim.Adam(parameter_groups(model, 0.0), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES), torch.arange(6) % 3).backward()
        optimizer.step()
        clip_latent_(model)
    assert all(layer.weight.abs().max() <= 1.5 for _, layer in binary_layers(model))
    with pytest.raises(ValueError, match="training mode"):
        export(model, tmp_path / "x.safetensors")
    model.eval()
    with torch.no_grad():
        before = model(IMAGES)
        export(model, tmp_path / "packed.safetensors")
        assert torch.equal(strip_aux(model)(IMAGES), before)
        assert not any("aux" in name for name in model.state_dict())
        fresh = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Flatten(),
            nn.Linear(8 * 36, 12), nn.Linear(12, 3),
        )  # fmt: skip
        loaded = load_packed(tmp_path / "packed.safetensors", fresh)
        assert torch.equal(loaded(IMAGES), before)
        assert torch.equal(load_packed(tmp_path / "packed.safetensors", network(**options))(IMAGES), before)
    assert set(loaded[2].weight.unique().tolist()) == {-1.0, 1.0}
    # stripped models go on loading their own state
    network(**{**options, "aux": None}).load_state_dict(model.state_dict())


def test_a_checkpoint_of_the_float_model_fills_weight_and_help() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model: Any = binarize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), SurgeConfig(alpha="learned"))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight, plain[0].weight)
    assert torch.equal(model[0].aux_weight, plain[0].weight)
    torch.testing.assert_close(model[0].alpha, plain[0].weight.abs().mean(1, keepdim=True))


def test_files_are_one_bit_a_weight(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Conv2d(512, 512, 3, bias=False), nn.Flatten(), nn.Linear(2, 2))
    model = binarize(layer, SurgeConfig(skip=("2",), skip_ends=False, aux=None)).eval()
    export(model, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        bits, alpha = file.get_tensor("0.weight_bits"), file.get_tensor("0.weight_alpha")
    assert bits.numel() == 294_912 == 512 * 512 * 9 * 4 // 32
    assert alpha.numel() * 4 == 2048
    assert (tmp_path / "x.safetensors").stat().st_size < 294_912 + 2048 + 1024
    weight: Any = model[0].weight  # type: ignore[index]
    for row, column in ((0, 0), (3, 17), (511, 4607)):
        assert (int(bits[row, column // 8]) >> column % 8) & 1 == int(weight.flatten(1)[row, column] >= 0)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    model = network().eval()
    file = tmp_path / "x.safetensors"
    export(model, file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors["2.weight_bits"][0, 0] ^= 1
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match="the bits of '2' are damaged"):
        load_packed(file, network())
    save_file(tensors, file)
    with pytest.raises(ValueError, match="was not written by"):
        load_packed(file, network())
    export(model, file)
    with pytest.raises(ValueError, match=r"'2' of .* is not in the model, or has another shape"):
        load_packed(file, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="no binary layer"):
        export(nn.Linear(2, 2).eval(), file)
    with torch.no_grad():
        dict(binary_layers(model))["6"].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="weights of '6' are not finite"):
        export(model, file)


def chain() -> nn.Sequential:
    """Layers whose sums of signs meet a sign at once, so that a 0 that is none turns outputs over."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=2, bias=False), nn.Conv2d(8, 6, (2, 3), padding="same", bias=False),
        nn.Flatten(), nn.Linear(54, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": "mean", "alpha": None, "rectify": 0.9}, {"activation": "elastic", "nonnegative": ("^2$",)}],
    ids=["sign", "beta", "elastic"],
)
@pytest.mark.filterwarnings("ignore")
def test_onnx_computes_what_torch_does(options: dict[str, Any], tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    model = binarize(chain(), SurgeConfig(**options)).eval()
    x = torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    x[:4] = 0
    export(model, tmp_path / "x.onnx", "onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    strip_aux(model)
    met: list[Tensor] = []
    model[3].register_forward_pre_hook(lambda layer, args: met.append(args[0]))  # type: ignore[index]
    for batch in (x, x[4:5], torch.zeros(3, 2, 8, 8)):
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), model(batch), rtol=1e-5, atol=1e-5)
    assert "beta" in options or (met[0] == 0).any(), "a 0 came before a sign"
    graph = onnx.load(tmp_path / "x.onnx").graph
    signs = [onnx.numpy_helper.to_array(value) for value in graph.initializer if value.name.endswith("signs")]
    assert [value.shape for value in signs] == [(8, 2, 3, 3), (6, 8, 2, 3), (12, 54)]
    assert all(set(value.flatten().tolist()) == {-1.0, 1.0} for value in signs)
    assert [node.op_type for node in graph.node].count("Sign") == 6


def test_onnx_asks_for_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().eval()
    with pytest.raises(ValueError, match="give example_inputs"):
        export(model, tmp_path / "x.onnx", "onnx")
    with pytest.raises(ValueError, match="fmt is 'safetensors' or 'onnx', not 'tflite'"):
        export(model, tmp_path / "x", "tflite")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingError, match=r"needs the package 'onnxscript'.*pip install 'acclimate\[onnx\]'"):
        export(model, tmp_path / "x.onnx", "onnx", example_inputs=IMAGES)
    assert list(tmp_path.iterdir()) == []


# --- encoders ---


def encoder(**options: Any) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    small = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=20)  # fmt: skip
    return binarize(BertModel(small), bert_config(**options))


def test_bert_recipe_trains_strips_and_is_shipped_exactly(tmp_path: Path) -> None:
    model = encoder()
    kinds = {name: layer.config.activation for name, layer in binary_layers(model)}
    expected = {f"encoder.layer.{i}.{part}": "elastic" for i in range(2) for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense", "intermediate.dense")}  # fmt: skip
    assert kinds == {**expected, **{f"encoder.layer.{i}.output.dense": "elastic01" for i in range(2)}}
    assert {layer.config.activation for _, layer in binary_layers(encoder(activation="sign", skip=("query",)))} == {
        "sign"
    }
    assert len(list(binary_layers(encoder(skip=("query",))))) == 10
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(parameter_groups(model, 0.0), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).last_hidden_state[:, 0].square().mean().backward()
        optimizer.step()
        clip_latent_(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    for name in kinds:
        assert {f"{name}.{part}" for part in ("weight", "aux_weight", "bias", "input_scale", "threshold")} <= moved
    model.eval()
    with torch.no_grad():
        outputs = model(ids).last_hidden_state
        export(model, tmp_path / "packed.safetensors")
        assert torch.equal(strip_aux(model)(ids).last_hidden_state, outputs)
        fresh = load_packed(tmp_path / "packed.safetensors", type(model)(model.config))
        assert torch.equal(fresh(ids).last_hidden_state, outputs)
        assert torch.equal(load_packed(tmp_path / "packed.safetensors", encoder())(ids).last_hidden_state, outputs)
    again = encoder(aux=None)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(ids).last_hidden_state, outputs)
    rows = report(model, {"input_ids": ids[:1]}).layers
    assert sum(row["weight_bits"] == row["activation_bits"] == 1 for row in rows) == 12


def test_a_float_encoder_fills_a_binary_one() -> None:
    model = encoder()
    plain = type(model)(model.config)
    model.load_state_dict(plain.state_dict())
    layer = model.encoder.layer[0].output.dense
    assert torch.equal(layer.aux_weight, plain.encoder.layer[0].output.dense.weight)
    assert (float(layer.input_scale), float(layer.threshold)) == (2.0, 0.0)


def test_elastic_scales_start_from_inputs() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = 5 * torch.randn(30, 4)
    hidden = plain[:2](x).detach()
    model: Any = binarize(
        plain, SurgeConfig(activation="elastic", nonnegative=("^2$",), skip_ends=False), example_inputs=x
    )
    torch.testing.assert_close(model[0].input_scale.data, x.abs().mean().view(1))
    torch.testing.assert_close(model[2].input_scale.data, 2 * hidden.mean().view(1))
    with torch.no_grad():
        model[0].input_scale.fill_(-1.0)
    clip_latent_(model)
    assert float(model[0].input_scale) == pytest.approx(1e-3)


# --- networks ---


def test_operations_of_resnet_18_are_those_published() -> None:
    model = surge_resnet18(config=SurgeConfig(aux=None)).to("meta")
    found = report(model, torch.empty(1, 3, 224, 224, device="meta"))
    assert found.operations == pytest.approx(1.63e8, rel=0.02)
    assert sum(row["weight_bits"] == 1 for row in found.layers) == 16
    assert {row["activation_bits"] for row in found.layers if row["weight_bits"] == 1} == {1}
    assert found.warnings == []
    assert report(nn.Linear(3, 2), torch.ones(1, 3)).warnings == ["no layer is binary"]
    small = report(binarize(nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 2))), torch.ones(1, 9)).to_dict()
    assert (small["bops"], small["flops"]) == (36, 8)
    assert small["layers"][0]["bytes"] == 4 * 2 + 4 * 4


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (surge_resnet20, 18),
        (surge_vgg_small, 5),
        (lambda: surge_resnet18(10, small=True), 16),
        (lambda: surge_resnet20(activation=hardtanh), 18),
    ],
    ids=["resnet20", "vgg", "resnet18", "hardtanh"],
)
def test_reference_networks_run(build: Any, layers: int) -> None:
    model = build().to("meta")
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert len(list(binary_layers(model))) == layers


def test_arguments_out_of_range() -> None:
    for options, match in (
        ({"eta": -0.1}, "eta"), ({"estimator": "x"}, "estimator"), ({"ags": "x"}, "ags"), ({"aux": "x"}, "aux"), ({"aux": "lowrank:0"}, "aux"),
        ({"alpha": "x"}, "alpha"), ({"rectify": 0.4}, "rectify"), ({"beta": "x"}, "beta"), ({"activation": "x"}, "activation"),
        ({"nonnegative": ("x",)}, "nonnegative"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            SurgeConfig(**options)
    with pytest.raises(ValueError, match="lowrank:7 is more than the 5"):
        BinaryLinear(6, 5, config=SurgeConfig(aux="lowrank:7"))
    with pytest.raises(ValueError, match="for linear layers"):
        BinaryConv1d(2, 2, 3, config=SurgeConfig(activation="elastic", beta="mean"))


# --- training ---


def test_transformers_trainer_tells_progress_clips_and_logs(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": IMAGES[i], "labels": torch.tensor(i % 3)}

    class Model(nn.Module):
        def __init__(self, estimator: str) -> None:
            super().__init__()
            self.net = network(estimator=estimator)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=3, learning_rate=0.5, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no")  # fmt: skip
    model = Model("ede")
    callback = SurgeCallback(log_every=2)
    trainer = Trainer(model, arguments, train_dataset=Images(), callbacks=[callback])
    trainer.train()
    layers = [layer for _, layer in binary_layers(model)]
    assert {layer.progress for layer in layers} == {0.75}
    assert max(float(layer.weight.detach().abs().max()) for layer in layers) <= 1.5
    logged = [row for row in trainer.state.log_history if "surge/lambda" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert all(row["surge/lambda"] > 0 and -1 <= row["surge/cosine"] <= 1 for row in logged)
    assert [(row["step"], row["layer"]) for row in callback.layers] == [(s, f"net.{i}") for s in (2, 4) for i in (2, 6)]
    for row in callback.layers:
        assert row["lambda"] == pytest.approx(0.3 * row["norm_b"] / row["norm_a"], rel=1e-4)
    model = Model("ste")
    with torch.no_grad():  # nothing arrives within [-1, 1]
        model.net[1].bias.fill_(50.0)
        model.net[3].bias.fill_(50.0)
    with pytest.warns(UserWarning, match="2 binary layers got no gradient in most steps"):
        Trainer(model, arguments, train_dataset=Images(), callbacks=[SurgeCallback(log_every=2)]).train()


def half(rank: int, world: int, output: str) -> None:
    """Gradients of one of two processes, by DDP and by FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from adapters.matrix import leave

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=world)
    x, found = rows()[rank::world], {}
    replicated = nn.parallel.DistributedDataParallel(small(ags_sync=True))
    sharded = fully_shard(small(ags_sync=True), mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    for kind, model in (("ddp", replicated), ("fsdp", sharded)):
        model(x).square().sum().backward()
        clip_latent_(model)
        for name, p in model.named_parameters():
            if p.grad is not None:
                full = p.grad.full_tensor() if kind == "fsdp" else p.grad  # type: ignore[attr-defined]
                found[f"{kind}.{name.removeprefix('module.')}"] = full
    if rank == 0:
        save_file(found, output)
    leave()


def small(**config: Any) -> nn.Module:
    return binarize(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).apply(fixed), SurgeConfig(**config))


def fixed(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).view_as(layer.weight))
            layer.bias.zero_()


def rows() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def test_two_processes_with_common_norms_are_one(tmp_path: Path) -> None:
    output = tmp_path / "gradients.safetensors"
    torch.multiprocessing.spawn(half, args=(2, str(output)), nprocs=2)
    model = small()
    model(rows()).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = load_file(output)
    assert found.keys() == {f"{kind}.{name}" for kind in ("ddp", "fsdp") for name in expected}
    for name, gradient in found.items():
        torch.testing.assert_close(2 * gradient, expected[name.partition(".")[2]], rtol=1e-5, atol=1e-6)
