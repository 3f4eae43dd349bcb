"""SURGE: binary outputs that nothing of training changes, the compensated gradient in closed form, and one bit a weight on disk."""

from __future__ import annotations

import math
import os
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
from acclimate.compress.binary_networks import surge_resnet18, surge_resnet20, surge_vgg_small
from acclimate.compress.surge import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryLinear,
    SurgeCallback,
    SurgeConfig,
    binarize,
    binary_layers,
    clip_latent_,
    compensation,
    mask,
    parameter_groups,
    rectified,
    set_progress,
    sign,
    strip_aux,
)

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda **k: BinaryLinear(6, 5, **k), (3, 4, 6)),
    "conv1d": (lambda **k: BinaryConv1d(4, 6, 3, padding=2, dilation=2, **k), (2, 4, 9)),
    "conv2d": (lambda **k: BinaryConv2d(4, 6, 3, stride=2, padding=1, groups=2, **k), (2, 4, 8, 8)),
    "same": (lambda **k: BinaryConv2d(3, 4, (2, 3), padding="same", bias=False, **k), (2, 3, 5, 5)),
}


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


def literal(layer: Any, x: Tensor, lam: Tensor, estimator: str = "ste") -> Tensor:
    """f_b - stop(lambda f_a) + lambda f_a by autograd, the sign's derivative a mask."""

    def binary(v: Tensor) -> Tensor:
        m = mask(v.detach(), estimator)
        return sign(v).detach() + m * (v - v.detach())

    scale = layer.weight.detach().abs().flatten(1).mean(1).view(-1, *[1] * (layer.weight.ndim - 1))
    f_b = ordinary(layer, binary(x), scale * binary(layer.weight), layer.bias)
    f_a = ordinary(layer, x, layer.aux_weight, None)
    return f_b - (lam * f_a).detach() + lam * f_a


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


def test_the_best_lambda_is_never_worse_than_none() -> None:
    """y = sign(w x + noise): STE's bias against the smoothed loss's gradient, with lambda* from samples."""
    draw = torch.Generator().manual_seed(0)
    for sigma in (0.3, 0.7, 1.5):
        for mean in (-1.5, 0.0, 0.8):
            x = mean + sigma * torch.randn(4000, generator=draw, dtype=torch.float64)
            true = 2 * math.exp(-((mean / sigma) ** 2) / 2) / math.sqrt(2 * math.pi) / sigma
            g_b, g_a = mask(x, "ste"), 1 + 0.5 * torch.randn(4000, generator=draw, dtype=torch.float64)
            bias = true - g_b.mean()
            best = bias * g_a.mean() / (g_a.mean() ** 2 + g_a.var())
            errors = [float((g_b + lam * g_a - true).square().mean()) for lam in (0.0, float(best))]
            cross = float(((g_b - g_b.mean()) * g_a).mean())
            assert errors[1] <= errors[0] + 2 * abs(float(best) * cross) + 1e-12


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_autocast_and_compiling_change_nothing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x, d = made("conv2d", torch.float32)
    expected = gradients(layer, x, d)
    layer.zero_grad()
    x.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).backward(d)
    assert torch.equal(x.grad, expected["x"])
    assert torch.equal(layer.aux_weight.grad, expected["aux_weight"])
    layer.zero_grad()
    x.grad = None
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).backward(d)
    torch.testing.assert_close(x.grad, expected["x"])
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    low.backward(d.bfloat16())
    torch.testing.assert_close(x.grad, expected["x"], rtol=0.1, atol=0.1)


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
    [(surge_resnet20, 18), (surge_vgg_small, 5), (lambda: surge_resnet18(10, small=True), 16)],
    ids=["resnet20", "vgg", "resnet18"],
)
def test_reference_networks_run(build: Any, layers: int) -> None:
    model = build().to("meta")
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert len(list(binary_layers(model))) == layers


def test_arguments_out_of_range() -> None:
    for options, match in (
        ({"eta": -0.1}, "eta"), ({"estimator": "x"}, "estimator"), ({"ags": "x"}, "ags"), ({"aux": "x"}, "aux"), ({"aux": "lowrank:0"}, "aux"),
        ({"alpha": "x"}, "alpha"), ({"rectify": 0.4}, "rectify"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            SurgeConfig(**options)
    with pytest.raises(ValueError, match="lowrank:7 is more than the 5"):
        BinaryLinear(6, 5, config=SurgeConfig(aux="lowrank:7"))


# --- training ---


def test_transformers_trainer_tells_progress_clips_and_logs(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": IMAGES[i], "labels": torch.tensor(i % 3)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(estimator="ede")

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=3, learning_rate=0.5, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no")  # fmt: skip
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=Images(), callbacks=[SurgeCallback(log_every=2)])
    trainer.train()
    layers = [layer for _, layer in binary_layers(model)]
    assert {layer.progress for layer in layers} == {0.75}
    assert max(float(layer.weight.detach().abs().max()) for layer in layers) <= 1.5
    logged = [row for row in trainer.state.log_history if "surge/lambda" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert all(row["surge/lambda"] > 0 and -1 <= row["surge/cosine"] <= 1 for row in logged)


def half(rank: int, world: int, output: str, sync: bool) -> None:
    import torch.distributed as dist

    from adapters.matrix import leave

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(
        binarize(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).apply(fixed), SurgeConfig(ags_sync=sync))
    )
    x = rows()
    model(x[rank::world]).square().sum().backward()
    if rank == 0:
        save_file({name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}, output)
    leave()


def fixed(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).view_as(layer.weight))
            layer.bias.zero_()


def rows() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def test_two_processes_with_common_norms_are_one(tmp_path: Path) -> None:
    output = tmp_path / "gradients.safetensors"
    torch.multiprocessing.spawn(half, args=(2, str(output), True), nprocs=2)
    assert os.path.getsize(output)
    model = binarize(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).apply(fixed), SurgeConfig())
    model(rows()).square().sum().backward()
    found = load_file(output)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(2 * found[name], p.grad, rtol=1e-5, atol=1e-6)
