"""IO-Adam against its formulas, and against torch's AdamW and Adafactor where they must agree."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from acclimate.errors import InputError
from acclimate.optim.gradient_factors import LayerFactors, convolution_input_sums, owners, power_sums
from acclimate.optim.io_adam import IOAdamCallback, IOAdamFactory, IOAdamW, add_sums, from_second_moment, second_moment
from acclimate.optim.memory import memory_account
from adapters.matrix import leave

TOKENS, N, M = 12, 5, 4


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(N, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, M)).to(dtype)


def batch(seed: int = 0, count: int = TOKENS) -> Tensor:
    return torch.randn(count, N, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float()[..., :M] - x[..., :M]).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, micro: int = 1, scale: float = 1.0
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for part in batch(step).chunk(micro):
            (loss_of(model, part) * scale / micro).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 0.1)


def layer_of(optimizer: IOAdamW, name: str) -> LayerFactors:
    return optimizer.layers[name]


def adam_total(group: dict[str, Any], gradients: list[Tensor]) -> float:
    """Sum of AdamW's bias-corrected second moment after these gradients."""
    beta2, total = group["betas"][1], 0.0
    for gradient in gradients:
        total = beta2 * total + (1 - beta2) * float(gradient.square().sum())
    return total / (1 - beta2 ** len(gradients))


# --- the sums ---


class Recorder:
    """x and dL/dy of every use of a module, as saved by ordinary hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        module.register_forward_hook(self._seen)

    def _seen(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            x = args[0].detach().clone()
            output.register_hook(lambda d: self.pairs.append((x, d.clone())))

    def sums(self, p: float = 2.0) -> Tensor:
        q = p / (p - 1)
        s = sum(x.abs().pow(p).flatten(0, -2).sum(0) for x, _ in self.pairs)
        r = sum(d.abs().pow(q).flatten(0, -2).sum(0) for _, d in self.pairs)
        return torch.cat([s, r, torch.tensor([float(len(self.pairs))])])  # type: ignore[list-item]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("p", [2.0, 1.5, 1.8, 3.0])
def test_sums_are_those_of_the_saved_tensors(p: float, fused: bool) -> None:
    model = network()
    recorder = Recorder(model[0])
    optimizer = IOAdamW(model, p=p, fused=fused)
    x = batch().view(3, 4, N)
    loss_of(model, x).backward()
    with torch.no_grad():
        model(x)  # evaluation in between does not count
    loss_of(model, 2 * x).backward()
    close(layer_of(optimizer, "0.weight").sums, recorder.sums(p))


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 6), p=st.sampled_from([2.0, 1.5, 1.8, 3.0]), seed=st.integers(0, 99))
def test_one_batch_bounds_the_squared_gradient(tokens: int, p: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, d = (torch.randn(tokens, size, generator=generator, dtype=torch.float64) for size in (N, M))
    q = p / (p - 1)
    c, r = torch.zeros(1, N, dtype=torch.float64), torch.zeros(1, M, dtype=torch.float64)
    sums = torch.cat([x.abs().pow(p).sum(0), d.abs().pow(q).sum(0)])
    add_sums(c, r, sums, (float(sums[:N].sum()), float(sums[N:].sum()), 1.0), 0.0, 0, "paper")
    outputs, inputs = second_moment(c, r, 1, 0.0, p, "paper")
    bound, squared = outputs.T @ inputs, (d.T @ x).square()
    assert (bound >= squared * (1 - 1e-12)).all()
    if tokens == 1:
        close(bound, squared, 1e-10)


@pytest.mark.parametrize("buffer", [1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_weighted_bound_always_holds(buffer: int, tokens: int) -> None:
    """V_t >= (1-beta2)^2 sum_s beta2^(2(t-s)) G_s^2; with one token a step and a row a step they are equal."""
    beta2, steps = 0.7, 6
    generator = torch.Generator().manual_seed(1)
    c, r, bound = torch.zeros(buffer, N), torch.zeros(buffer, M), torch.zeros(M, N)
    for t in range(1, steps + 1):
        x, d = (torch.randn(tokens, size, generator=generator) for size in (N, M))
        sums = torch.cat([x.square().sum(0), d.square().sum(0)])
        add_sums(c, r, sums, (float(sums[:N].sum()), float(sums[N:].sum()), 1.0), beta2, t % buffer, "paper")
        bound = beta2**2 * bound + (1 - beta2) ** 2 * (d.T @ x).square()
        assert (r.T @ c >= bound * (1 - 1e-5)).all()
    if tokens == 1 and buffer >= steps:
        close(r.T @ c, bound)


def test_one_token_a_step_and_a_row_a_step_is_exact_for_the_energy_scale_too() -> None:
    beta2, steps = 0.7, 5
    generator = torch.Generator().manual_seed(2)
    c, r, expected = torch.zeros(steps, N), torch.zeros(steps, M), torch.zeros(M, N)
    for t in range(1, steps + 1):
        x, d = torch.randn(N, generator=generator), torch.randn(M, generator=generator)
        gradient = torch.outer(d, x)
        sums = torch.cat([x.square(), d.square()])
        totals = float(sums[:N].sum()), float(sums[N:].sum()), float(gradient.square().sum())
        add_sums(c, r, sums, totals, beta2, t % steps, "energy")
        expected = beta2**2 * expected + (1 - beta2) ** 2 * gradient.square()
    close(r.T @ c, expected)


def test_the_average_can_be_below_adams() -> None:
    """(x, D) = (0, 0), then (1, 1): the bound of one batch does not survive separate averages."""
    beta2 = 0.99
    c, r = torch.zeros(1, 1), torch.zeros(1, 1)
    for value in (0.0, 1.0):
        add_sums(c, r, torch.tensor([value, value]), (value, value, value), beta2, 0, "paper")
    outputs, inputs = second_moment(c, r, 2, beta2, scale="paper")
    found, adam = float(outputs * inputs), (1 - beta2) / (1 - beta2**2)
    assert found == pytest.approx(1 / (1 + beta2) ** 2, rel=1e-5)
    assert found < adam == pytest.approx(1 / (1 + beta2))


def test_a_single_token_without_memory_is_adam_and_adafactor() -> None:
    models = {name: nn.Linear(N, M, bias=False) for name in ("io", "adam", "adafactor")}
    for model in models.values():
        model.load_state_dict(models["io"].state_dict())
    x, gradient = torch.randn(1, N), None
    ours = IOAdamW(models["io"], betas=(0.0, 0.0), weight_decay=0.0)
    adam = torch.optim.AdamW(models["adam"].parameters(), betas=(0.0, 0.0), weight_decay=0.0)
    # lr relative to nothing, no clipping of the step: what is left of Adafactor is its factored second moment
    factored = torch.optim.Adafactor(
        models["adafactor"].parameters(), lr=1e-3, d=1e9, eps=(1e-30, 0.0), weight_decay=0.0
    )
    before = models["io"].weight.detach().clone()
    for model, optimizer in zip(models.values(), (ours, adam, factored), strict=True):
        model(x).sin().sum().backward()
        gradient = model.weight.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
    assert gradient is not None
    close(models["io"].weight - before, -1e-3 * gradient.sign(), 1e-4)  # a step of lr for all
    close(models["io"].weight, models["adam"].weight, 1e-6)
    state = factored.state[models["adafactor"].weight]
    own = ours.state[models["io"].weight]
    close(
        torch.outer(own["out_sq"][0], own["in_sq"][0]),
        torch.outer(state["row_var"].flatten(), state["col_var"].flatten()) / state["row_var"].mean(), 1e-4,
    )  # fmt: skip


# --- the energy scale ---


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("buffer", "p"), [(1, 2.0), (4, 2.0), (4, 1.8)])
def test_energy_sums_to_adams_second_moment(buffer: int, p: float, micro: int) -> None:
    model = network()
    optimizer = IOAdamW(model, buffer=buffer, p=p)
    weight, seen = model[3].weight, []
    for step in range(1, 6):
        optimizer.zero_grad()
        for part in batch(step).chunk(micro):
            (loss_of(model, part) / micro).backward()
        seen.append(weight.grad.clone())
        optimizer.step()
        state, group = optimizer.state[weight], optimizer.param_groups[0]
        outputs, inputs = second_moment(state["in_sq"], state["out_sq"], step, group["betas"][1], p)
        assert float((outputs.T @ inputs).sum()) == pytest.approx(adam_total(group, seen), rel=1e-5)


@pytest.mark.parametrize("buffer", [1, 3])
def test_energy_does_not_depend_on_how_the_batch_came(buffer: int) -> None:
    def run(**options: Any) -> Tensor:
        model = network()
        train(model, IOAdamW(model, lr=1e-2, buffer=buffer, eps=1e-12), **options)
        return weights(model)

    close(run(scale=1000.0), run())
    close(run(micro=3), run())
    plain = network()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert (run() - weights(plain)).abs().max() > 1e-4  # another method than AdamW


def test_a_gradient_scaler_changes_nothing() -> None:
    model, scaled = network(), network()
    train(model, IOAdamW(model, lr=1e-2))
    optimizer, scaler = IOAdamW(scaled, lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        scaler.scale(loss_of(scaled, batch(step))).backward()
        if step == 2:  # a step that overflowed, and its sums, are thrown away
            scaled[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scaled.zero_grad()
            scaler.scale(loss_of(scaled, batch(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    close(weights(scaled), weights(model))
    assert optimizer.skipped == {}


def test_the_paper_scale_divides_by_the_gradient_scale() -> None:
    def run(scale: float) -> Tensor:
        model = network()
        optimizer = IOAdamW(model, lr=1e-2, scale="paper", eps=1e-12)
        optimizer.grad_scale = scale
        for step in range(3):
            (loss_of(model, batch(step)) * scale).backward()
            for p in model.parameters():
                p.grad /= scale  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    close(run(64.0), run(1.0))


def test_paper_scale_follows_the_formula() -> None:
    model = nn.Linear(N, M, bias=False)
    start, x, beta1, beta2 = model.weight.detach().clone(), batch(), 0.9, 0.99
    optimizer = IOAdamW(model, lr=0.1, scale="paper", weight_decay=0.02, rms_clip=None)
    c, r, m, w = torch.zeros(N), torch.zeros(M), torch.zeros(M, N), start
    for t in (1, 2, 3):
        optimizer.zero_grad()
        y = x @ w.T
        d = 2 * y / y.numel()
        model(x).square().mean().backward()
        optimizer.step()
        c, r = beta2 * c + (1 - beta2) * x.square().sum(0), beta2 * r + (1 - beta2) * d.square().sum(0)
        m = beta1 * m + (1 - beta1) * d.T @ x
        v = torch.outer(r, c) / (1 - beta2**t) ** 2
        w = w * (1 - 0.1 * 0.02) - 0.1 * (m / (1 - beta1**t)) / (v.sqrt() + 1e-8)
        close(model.weight.detach(), w)


# --- the same as AdamW where it is AdamW ---


def test_without_factors_it_is_torchs_adamw_bit_for_bit() -> None:
    ours, theirs = network(), network()
    optimizer = IOAdamW(ours, exclude=("*.weight",), foreach=False, betas=(0.9, 0.999))
    assert optimizer.tracked() == {}
    train(ours, optimizer)
    train(theirs, torch.optim.AdamW(theirs.parameters(), foreach=False))
    assert torch.equal(weights(ours), weights(theirs))


class Shapes(nn.Module):
    """One of everything that a parameter can belong to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.tied = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.tied.weight
        self.linear = nn.Linear(6, 6)
        self.transposed = Conv1D(6, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.grouped = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.free = nn.Parameter(torch.randn(6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.transposed(self.linear(self.embedding(ids) + self.tied(ids))) @ self.free
        return self.head(self.grouped(self.convolution(h.transpose(1, 2))).transpose(1, 2))


def test_which_parameters_have_factors() -> None:
    model = Shapes()
    ids = torch.tensor([[1, 2, 2, 0], [3, 0, 6, 5]])
    optimizer = IOAdamW(model, embeddings="io")
    kinds = {"embedding.weight": "embedding", "linear.weight": "linear", "transposed.weight": "transposed", "convolution.weight": "convolution"}  # fmt: skip
    assert optimizer.tracked() == kinds
    reasons = {name: owner.reason for name, owner in owners(model, True, ("linear.weight",)).items()}
    assert reasons["tied.weight"] == "tied"
    assert reasons["linear.weight"] == "excluded"
    assert reasons["free"] == reasons["grouped.weight"] == "other layer"
    assert reasons["linear.bias"] == "vector"
    recorder = Recorder(model.embedding)
    model(ids).square().mean().backward()
    ((_, d),) = recorder.pairs
    sums = layer_of(optimizer, "embedding.weight").sums
    assert sums is not None
    assert sums[:7].tolist() == [0, 1, 2, 1, 0, 1, 1]  # padding has no gradient and is not counted
    close(sums[7:13], (d.square() * (ids != 0)[..., None]).sum((0, 1)))
    optimizer.step()
    for name in kinds:
        p = model.get_parameter(name)
        state = optimizer.state[p]
        outputs, inputs = second_moment(state["in_sq"], state["out_sq"], 1, 0.99)
        assert float((outputs.T @ inputs).sum()) == pytest.approx(float(p.grad.square().sum()), rel=1e-5)  # type: ignore[union-attr]
        assert set(state) == {"step", "exp_avg", "in_sq", "out_sq"}
    assert set(optimizer.state[model.free]) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(IOAdamW(Shapes()).tracked()) == 3  # embeddings are AdamW's by default


def test_stored_the_other_way_round_is_the_same() -> None:
    linear, transposed = nn.Linear(N, M), Conv1D(M, N)
    transposed.load_state_dict({"weight": linear.weight.T.clone(), "bias": linear.bias.clone()})
    for fused in (False, True):
        pair = copy.deepcopy((linear, transposed))
        for model in pair:
            train(model, IOAdamW(model, lr=1e-2, fused=fused, buffer=2))
        close(pair[1].weight.T, pair[0].weight)


CONVOLUTIONS: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (nn.Conv1d, (2, 3, 9), {"stride": 2, "padding": 1, "dilation": 2}),
    (nn.Conv2d, (2, 3, 7, 6), {"stride": (2, 1), "padding": (1, 0)}),
    (nn.Conv2d, (2, 3, 7, 6), {"padding": "same", "padding_mode": "circular"}),
    (nn.Conv2d, (2, 3, 7, 6), {"padding": "same", "dilation": 2}),
    (nn.Conv2d, (3, 7, 6), {"padding": 1, "padding_mode": "reflect"}),
    (nn.Conv3d, (2, 3, 5, 4, 5), {"padding": 1, "stride": 2}),
]


@pytest.mark.parametrize("index", range(len(CONVOLUTIONS)))
def test_convolutions_see_what_unfolding_sees(index: int) -> None:
    kind, shape, options = CONVOLUTIONS[index]
    torch.manual_seed(0)
    module = kind(3, 4, 3, **options)
    x = torch.randn(shape)
    found = convolution_input_sums(module, x, 2.0)
    # one output channel of ones on x^2 has, as its weight's gradient, the sum of x^2 over all patches
    twin: Any = kind(3, 1, 3, bias=False, **options)
    twin(x.square()).sum().backward()
    close(found, twin.weight.grad.flatten())
    if kind is nn.Conv2d and options.get("padding_mode") is None and len(shape) == 4 and "same" not in options.values():
        patches = nn.functional.unfold(x, 3, padding=options["padding"], stride=options["stride"])
        close(found, patches.square().sum((0, 2)))
    optimizer = IOAdamW(module)
    module(x).sin().sum().backward()
    weight: Any = module.weight
    sums = optimizer.layers["weight"].sums
    assert sums is not None
    s, r, uses = sums.split([27 if kind is nn.Conv2d else 9 if kind is nn.Conv1d else 81, 4, 1])
    assert uses == 1
    assert (torch.outer(r, s) >= weight.grad.flatten(1).square() * (1 - 1e-5)).all()


# --- when the sums count ---


class Reused(nn.Module):
    """A layer called twice, and a way to run a part under checkpointing."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.how = nn.Sequential(nn.Linear(N, N), nn.ReLU(inplace=True), nn.Linear(N, N)), how

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (
                self.inner(x)
                if self.how == "plain"
                else checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
            )
        return x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_counts_once(how: str, fused: bool) -> None:
    found = []
    for kind in ("plain", how):
        model = Reused(kind)
        recorders = [Recorder(model.inner[0]), Recorder(model.inner[2])]
        optimizer = IOAdamW(model, fused=fused, lr=1e-2)
        for part in (batch(), batch(1)):
            loss_of(model, part.requires_grad_()).backward()
        sums = [layer.sums for layer in optimizer.layers.values()]
        assert [float(s[-1]) for s in sums if s is not None] == [4, 4]  # 2 uses, 2 micro-batches
        if kind == "plain":
            close(sums, [recorder.sums() for recorder in recorders])
        optimizer.step()
        found.append((sums, weights(model)))
    close(found[0], found[1])


def test_what_is_thrown_away_is_not_counted() -> None:
    model = network()
    optimizer = IOAdamW(model)
    layer = layer_of(optimizer, "0.weight")
    loss_of(model, batch()).backward()
    once = layer.sums
    model.zero_grad()
    loss_of(model, batch()).backward()
    close(layer.sums, once)  # not twice: the first gradient was dropped
    loss_of(model, batch()).backward()
    close(layer.sums, 2 * once)  # accumulated
    optimizer.zero_grad(set_to_none=False)
    assert layer.sums is None
    loss_of(model, batch()).backward()
    close(layer.sums, once)
    with torch.no_grad():
        model(batch())
    model[0].requires_grad_(False)
    loss_of(model, batch()).backward()  # frozen: nothing
    close(layer.sums, once)


def test_a_closure_is_the_only_evaluation_that_counts() -> None:
    model, plain = network(), network()
    optimizer, reference = IOAdamW(model, lr=1e-2), IOAdamW(plain, lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(1))
        loss.backward()
        return loss

    loss_of(model, batch(0)).backward()
    loss = optimizer.step(closure)
    expected = loss_of(plain, batch(1))
    expected.backward()
    reference.step()
    close(loss, expected)
    close(weights(model), weights(plain))


# --- fused ---


@pytest.mark.parametrize("options", [{}, {"buffer": 3, "scale": "paper"}, {"maximize": True}, {"workspace_mb": 1e-4}])
def test_fused_is_the_same_without_gradients(options: dict[str, Any]) -> None:
    plain, fused = network(), network()
    train(plain, IOAdamW(plain, lr=1e-2, **options))
    optimizer = IOAdamW(fused, lr=1e-2, fused=True, **options)
    train(fused, optimizer)
    close(weights(fused), weights(plain))
    assert fused[0].weight.grad is None
    assert fused[0].bias.grad is not None
    assert optimizer.tracked() == {"0.weight": "fused", "3.weight": "fused"}
    # 4 m n bytes less for each linear weight, to the byte
    reports = [IOAdamW(network(), fused=fused_mode) for fused_mode in (False, True)]
    grads = []
    for one in reports:
        model: Any = one.model
        train(model, one, steps=1)
        grads.append(one.memory_report()["measured"]["grads"])
    assert grads[0] - grads[1] == 4 * (N * 8 + 8 * M)


def test_fused_accumulates_without_a_buffer() -> None:
    """M is exact for any number of micro-batches; the energy is the sum of the micro-batches' own."""
    plain, fused = network(), network()
    options = {"lr": 1e-2, "scale": "paper"}  # which does not use the energy
    train(plain, IOAdamW(plain, **options), micro=3)  # type: ignore[arg-type]
    train(fused, IOAdamW(fused, fused=True, **options), micro=3)  # type: ignore[arg-type]
    close(weights(fused), weights(plain))


def test_fused_refuses_what_cannot_work() -> None:
    model = network()
    optimizer = IOAdamW(model, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch())).backward()
    with pytest.raises(RuntimeError, match="between a backward pass and its step"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.warns(UserWarning, match="in the first moment"):
        optimizer.zero_grad()


def test_a_gradient_from_outside_the_layer_counts_in_fused_mode_too() -> None:
    found = []
    for fused in (False, True):
        model = network()
        optimizer = IOAdamW(model, lr=1e-2, scale="paper", fused=fused)
        (loss_of(model, batch()) + model[0].weight.square().sum()).backward()
        optimizer.step()
        found.append(weights(model))
    close(found[1], found[0])


def test_bf16_autocast_and_weights() -> None:
    x = batch()
    for fused in (False, True):
        model = network()
        optimizer = IOAdamW(model, lr=1e-2, fused=fused)
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, x).backward()
        sums = layer_of(optimizer, "0.weight").sums
        assert sums is not None
        assert sums.dtype == torch.float32
        close(sums[:N], x.bfloat16().float().square().sum(0) if fused else x.square().sum(0), 1e-6)
        optimizer.step()
    model = network(dtype=torch.bfloat16)
    optimizer = IOAdamW(model, lr=1e-2)
    loss_of(model, x.bfloat16()).backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["in_sq"].dtype == torch.float32
    reference = network()
    train(reference, IOAdamW(reference, lr=1e-2), steps=1)
    assert (weights(model) - weights(reference)).abs().max() < 0.02


def test_half_of_the_first_moment() -> None:
    model, reference = network(), network()
    optimizer = IOAdamW(model, lr=1e-2, momentum_dtype="bf16")
    train(model, optimizer)
    train(reference, IOAdamW(reference, lr=1e-2))
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    assert (weights(model) - weights(reference)).abs().max() < 5e-3
    report = optimizer.memory_report()
    assert report["measured"] == report["formula"]


# --- settings ---


def test_groups_have_their_own_settings() -> None:
    model = network()
    groups = [
        {"params": [model[0].weight], "lr": 1e-2, "buffer": 2, "scale": "paper", "p": 1.8},
        {"params": [p for name, p in model.named_parameters() if name != "0.weight"], "weight_decay": 0.0},
    ]
    optimizer = IOAdamW(groups, model=model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(model, optimizer, steps=2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-4]
    assert optimizer.state[model[0].weight]["in_sq"].shape == (2, N)
    assert optimizer.state[model[3].weight]["in_sq"].shape == (1, 8)
    before = weights(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, steps=1)
    assert torch.equal(weights(model), before)
    optimizer.param_groups[0]["buffer"] = 3
    with pytest.raises(ValueError, match=r"'0\.weight': buffer is 3 now, but it was 2"):
        train(model, optimizer, steps=1)


def test_rms_clip_bounds_the_step() -> None:
    for workspace in (16, 1e-4):
        model = nn.Linear(N, M, bias=False)
        optimizer = IOAdamW(model, lr=0.1, weight_decay=0.0, rms_clip=0.25, workspace_mb=workspace)
        before = model.weight.detach().clone()
        loss_of(model, batch()).backward()
        optimizer.step()
        assert float((model.weight - before).square().mean().sqrt()) == pytest.approx(0.025, rel=1e-4)


def test_clipped_gradients_have_the_clipped_energy() -> None:
    model = network()
    optimizer = IOAdamW(model)
    loss_of(model, batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert float(state["out_sq"].sum()) == pytest.approx(0.01 * float(model[0].weight.grad.square().sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("buffer", 0), ("p", 1.0), ("betas", (0.9, 1.0)), ("lr", -1e-3), ("eps", -1.0), ("weight_decay", -1.0), ("scale", "adam"), ("rms_clip", 0.0), ("embeddings", "no"), ("on_untracked", "no"), ("workspace_mb", 0), ("momentum_dtype", "int8")],
)  # fmt: skip
def test_settings_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        IOAdamW(network(), **{name: value})


# --- errors ---


def test_it_needs_the_model() -> None:
    model = network()
    optimizer = IOAdamW(model.parameters())
    loss_of(model, batch()).backward()
    with pytest.raises(RuntimeError, match="IOAdamW needs the model: pass model= or call attach"):
        optimizer.step()
    optimizer.attach(model)
    train(model, optimizer, steps=1)


class Functional(nn.Module):
    """Uses a layer's weight without calling the layer, when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call = nn.Linear(N, M), False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.call else nn.functional.linear(x, self.layer.weight, self.layer.bias)


def test_a_layer_that_is_not_called_falls_back_to_adamw() -> None:
    model, twin = Functional(), Functional()
    optimizer = IOAdamW(model, foreach=False, betas=(0.9, 0.999))
    with pytest.warns(UserWarning, match=r"AdamW's second moment is kept for: layer\.weight"):
        train(model, optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=3)  # and says so once
    assert optimizer.tracked() == {}
    reference = torch.optim.AdamW(twin.parameters(), foreach=False)
    train(twin, reference, steps=1)
    train(twin, reference, steps=3)
    assert torch.equal(weights(model), weights(twin))
    saved = optimizer.state_dict()
    again = IOAdamW(model)
    again.load_state_dict(saved)  # remembers
    assert again.tracked() == {}
    with pytest.raises(RuntimeError, match=r"layer\.weight"):
        train(Functional(), strict := IOAdamW(model, on_untracked="error"), steps=1) or train(model, strict, steps=1)


def test_a_layer_that_stops_being_called_is_an_error() -> None:
    model = Functional()
    model.call = True
    optimizer = IOAdamW(model)
    train(model, optimizer, steps=2)
    model.call = False
    with pytest.raises(RuntimeError, match=r"'layer\.weight' has a gradient, but its layer was not called"):
        train(model, optimizer, steps=1)


def test_sparse_and_complex_gradients() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, M, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    model = Lookup()
    optimizer = IOAdamW(model, embeddings="io")
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"table\.weight.*neither sparse nor complex"):
        optimizer.step()
    linear = nn.Linear(N, M, dtype=torch.complex64)
    optimizer = IOAdamW(linear)
    linear(torch.randn(2, N, dtype=torch.complex64)).abs().sum().backward()
    with pytest.raises(RuntimeError, match="complex"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_not_finite_is_left_out_and_counted(fused: bool) -> None:
    model, reference = network(), network()
    optimizer, other = IOAdamW(model, lr=1e-2, fused=fused), IOAdamW(reference, lr=1e-2)
    train(model, optimizer, steps=2)
    train(reference, other, steps=2)
    model.zero_grad()
    x = batch()
    x[3, 2] = float("nan")
    loss_of(model, x).backward()
    optimizer.step()
    assert optimizer.skipped == dict.fromkeys(dict(model.named_parameters()), 1)
    assert torch.equal(weights(model), weights(model).nan_to_num())
    close(weights(model), weights(reference))
    model.zero_grad()
    (model[0](torch.full((TOKENS, N), 1e12)) * 1e12).sum().backward()  # s and r are finite, the squared norm is not
    model[0].bias.grad = None
    optimizer.step()
    assert optimizer.skipped["0.weight"] == 2
    optimizer.zero_grad()
    train(model, optimizer, steps=2)
    train(reference, other, steps=2)
    close(weights(model), weights(reference))  # nothing of it stayed


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", ["energy", "paper"])
def test_a_dead_layer_stays_finite(scale: Any, fused: bool) -> None:
    model = network()
    optimizer = IOAdamW(model, scale=scale, fused=fused, weight_decay=0.0)
    before = weights(model)
    for _ in range(2):
        (model(torch.zeros(3, N)) * 0.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weights(model), before)
    assert float(optimizer.state[model[0].weight]["out_sq"].sum()) == 0
    train(model, optimizer)
    assert torch.isfinite(weights(model)).all()


def test_parameters_without_a_gradient_and_zero_gradients() -> None:
    model, extra = network(), nn.Linear(N, M)
    both = nn.ModuleList([model, extra])
    optimizer = IOAdamW(both)
    loss_of(model, batch()).backward()
    optimizer.step()
    assert extra.weight not in optimizer.state
    optimizer.zero_grad()
    extra.weight.grad = torch.zeros_like(extra.weight)  # a layer that is not used, under set_to_none=False
    before = extra.weight.detach().clone()
    optimizer.step()
    close(extra.weight, before * (1 - 1e-3 * 0.01))


def test_parameters_added_later() -> None:
    model, later = network(), nn.Linear(N, M)
    both = nn.ModuleList([model, later])
    optimizer = IOAdamW(model.parameters(), model=both)
    optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.1})
    assert "1.weight" in optimizer.tracked()
    with pytest.warns(UserWarning, match="not the attached model's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


# --- copies, saving, loading ---


@pytest.mark.parametrize("fused", [False, True])
def test_the_model_is_as_it_was(fused: bool) -> None:
    model = network()
    before, names = model.state_dict(), [name for name, _ in model.named_modules()]
    optimizer = IOAdamW(model, fused=fused)
    assert type(model[0]) is nn.Linear
    assert list(model.state_dict()) == list(before)
    assert [name for name, _ in model.named_modules()] == names
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.load(file)):
        loss_of(twin, batch()).backward()
        assert twin[0].weight.grad is not None
        assert all(layer.sums is None for layer in optimizer.layers.values())
        with torch.no_grad():
            twin[0].weight.zero_()
        assert model[0].weight.abs().sum() > 0
        close(twin[0](batch()), twin[0].bias.expand(TOKENS, 8))
    optimizer.detach()
    assert not model[0]._forward_hooks
    assert "forward" not in model[0].__dict__
    assert not model[0].weight._backward_hooks
    optimizer.attach(model)
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"buffer": 3}, {"dtype": torch.bfloat16}], ids=str)
def test_resuming_is_exact(options: dict[str, Any], tmp_path: Path) -> None:
    dtype = options.pop("dtype", torch.float32)

    def step(model: nn.Module, optimizer: IOAdamW, number: int) -> None:
        loss_of(model, batch(number).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = network(dtype=dtype)
    optimizer = IOAdamW(model, lr=1e-2, **options)
    for number in range(3):
        step(model, optimizer, number)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = network(seed=9, dtype=dtype)
    again.load_state_dict(saved["model"])
    other = IOAdamW(again, lr=0.5, **options)
    other.load_state_dict(saved["optimizer"])
    for number in range(3, 6):
        step(model, optimizer, number)
        step(again, other, number)
    assert torch.equal(weights(again), weights(model))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert other.state[q][key].dtype == value.dtype
            assert torch.equal(other.state[q][key], value)


def test_resuming_with_other_factors_is_an_error() -> None:
    model = network()
    optimizer = IOAdamW(model)
    train(model, optimizer, steps=1)
    with pytest.raises(ValueError, match=r"differ in: 3\.weight"):
        IOAdamW(model, exclude=("3.*",)).load_state_dict(optimizer.state_dict())
    other = IOAdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    other.exclude = ("3.*",)
    with pytest.raises(ValueError, match=r"differ in: 3\.weight"):
        other.attach(model)


@pytest.mark.parametrize("p", [2.0, 1.8])
def test_going_on_from_adamw(p: float) -> None:
    model = network()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.95))
    train(model, adam)
    optimizer = IOAdamW(model, lr=1.0, p=p, buffer=2)
    optimizer.load_state_dict(adam.state_dict(), from_adamw=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["buffer"]) == (3e-3, (0.8, 0.95), 2)
    for weight in (model[0].weight, model[3].weight):
        state, theirs = optimizer.state[weight], adam.state[weight]
        assert torch.equal(state["exp_avg"], theirs["exp_avg"])
        outputs, inputs = second_moment(state["in_sq"], state["out_sq"], 5, 0.95, p)
        found, expected = outputs.T @ inputs, theirs["exp_avg_sq"] / (1 - 0.95**5)
        close(found.sum(0), expected.sum(0))
        close(found.sum(1), expected.sum(1))
        if p == 2:
            close((state["out_sq"].T @ state["in_sq"]).sum(1), theirs["exp_avg_sq"].sum(1))
    assert torch.equal(optimizer.state[model[0].bias]["exp_avg_sq"], adam.state[model[0].bias]["exp_avg_sq"])
    train(model, optimizer, steps=1)
    assert float(from_second_moment(torch.zeros(3, 2))[0].sum()) == 0


def test_a_copy_of_the_optimiser_needs_its_model() -> None:
    model = network()
    optimizer = IOAdamW(model, buffer=2, workspace_mb=3)
    train(model, optimizer, steps=1)
    pair = copy.deepcopy({"model": model, "optimizer": optimizer})
    twin = pair["optimizer"]
    assert twin.workspace_mb == 3
    with pytest.raises(RuntimeError, match="needs the model"):
        twin.step()
    twin.attach(pair["model"])
    train(pair["model"], twin, steps=2)
    train(model, optimizer, steps=2)
    assert torch.equal(weights(pair["model"]), weights(model))


# --- memory ---


@pytest.mark.parametrize("options", [{}, {"fused": True, "buffer": 3}, {"embeddings": "io"}])
def test_the_memory_account_is_exact(options: dict[str, Any]) -> None:
    model = Shapes()
    optimizer = IOAdamW(model, **options)
    model(torch.randint(7, (2, 4))).square().mean().backward()
    optimizer.step()
    report = optimizer.memory_report()
    assert report["measured"] == report["formula"]
    known = {key: value for key, value in options.items() if key in ("fused", "buffer", "embeddings")}
    with torch.device("meta"):
        assert memory_account(Shapes(), **known) == report["formula"]
        assert memory_account(Shapes(), "adamw") == report["adamw"]
    # by hand: W, and for each weight with factors 4 b (m + n) in place of 4 m n
    count = sum(p.numel() for p in model.parameters())
    assert report["adamw"] == {"weights": 4 * count, "grads": 4 * count, "states": 8 * count + 4 * 11, "buffers": 0, "total": 16 * count + 44}  # fmt: skip
    if not options:
        assert report["adamw"]["states"] - report["formula"]["states"] == 4 * (36 + 36 + 108)
        assert report["formula"]["buffers"] == 4 * (12 + 12 + 24)


def test_the_account_in_bf16() -> None:
    """Published: 8, 6 and 4 bytes a parameter for AdamW, IO and fused."""
    model = nn.Linear(1000, 1000, bias=False)
    totals = [memory_account(model, kind, dtype=torch.bfloat16, fused=fused)["total"] for kind, fused in (("adamw", False), ("io-adam", False), ("io-adam", True))]  # type: ignore[arg-type]  # fmt: skip
    assert [total - extra for total, extra in zip(totals, (4, 8004, 8004), strict=True)] == [8e6, 6e6, 4e6]
    with pytest.raises(ValueError, match="io-adam"):
        memory_account(model, "sgd")  # type: ignore[arg-type]


# --- compiled ---


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_models_give_the_same_sums_without_a_graph_break(fresh_dynamo: None) -> None:
    found: list[list[Tensor]] = []
    compilers: list[Callable[[nn.Module], Any]] = [
        lambda model: model,
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),  # a graph break would be an error
    ]
    for compiler in compilers:
        model = network()
        optimizer = IOAdamW(model, lr=1e-2, buffer=2)
        compiled = compiler(model)
        sums = []
        for step in range(3):
            loss_of(compiled, batch(step)).backward()
            sums += [layer.sums.clone() for layer in optimizer.layers.values() if layer.sums is not None]
            optimizer.step()
            optimizer.zero_grad()
        found.append([*sums, weights(model)])
    assert len(found[0]) == 7
    close(found[1], found[0])


def test_power_sums_of_a_vector() -> None:
    """An input without a token axis is one token."""
    x = torch.tensor([1.0, -2.0, 3.0])
    assert power_sums(x, 2.0, -1).tolist() == [1, 4, 9]
    assert power_sums(x[None, None], 3.0, -1).tolist() == [1, 8, 27]


# --- several processes ---

DISTRIBUTED: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 3e-2, "scale": "paper", "buffer": 2, "p": 1.8},
    {"lr": 1e-2, "rms_clip": 0.5},
]


class Wide(nn.Module):
    """Rows that two processes cannot share evenly, and a layer stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(N, 7), Conv1D(6, 7), nn.Linear(6, M, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()))


def some_steps(kind: str, options: dict[str, Any], rank: int, world: int) -> Tensor:
    """The weights after four steps on this rank's share of the rows, in one of which a gradient is broken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = Wide()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
    optimizer = IOAdamW(model, **options)
    called = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    for step in range(4):
        loss_of(called, batch(step).chunk(world)[rank]).backward()
        gradient = model.first.weight.grad
        if step == 2 and (kind != "fsdp2" or rank == 0):  # of a sharded one, one rank's part
            (gradient.to_local() if kind == "fsdp2" else gradient)[0, 0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped == {"first.weight": 1}
    report = optimizer.memory_report()
    assert report["measured"] == report["formula"]
    if world > 1:
        with pytest.raises(RuntimeError, match="fused mode keeps no gradients"):
            IOAdamW(model, fused=True)
    whole = [p.full_tensor() if kind == "fsdp2" else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def both_kinds(rank: int, world: int, output: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=world)
    found = {kind: [some_steps(kind, options, rank, world) for options in DISTRIBUTED] for kind in ("ddp", "fsdp2")}
    torch.save(found, f"{output}.{rank}")
    leave()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    output = str(tmp_path / "weights")
    # a server that has imported the optimiser once, for both
    multiprocessing.get_context("forkserver").set_forkserver_preload(["acclimate.optim.io_adam", "adapters.matrix"])
    torch.multiprocessing.start_processes(both_kinds, (2, output), nprocs=2, start_method="forkserver")
    ranks = [torch.load(f"{output}.{rank}", weights_only=True) for rank in (0, 1)]
    expected = [some_steps("plain", options, 0, 1) for options in DISTRIBUTED]
    for kind in ("ddp", "fsdp2"):
        for one, other, wanted in zip(ranks[0][kind], ranks[1][kind], expected, strict=True):
            assert torch.equal(one, other)
            close(one, wanted)


def test_other_kinds_of_sharding_are_refused() -> None:
    model = network()
    model[0].weight._is_flat_param = True
    with pytest.raises(RuntimeError, match="FSDP1 and DeepSpeed ZeRO flatten matrices"):
        IOAdamW(model)
    model = network()
    optimizer = IOAdamW(model)
    loss_of(model, batch()).backward()
    model[0].weight.ds_id = 0  # partitioned after the optimiser was made
    with pytest.raises(RuntimeError, match="DeepSpeed ZeRO flatten matrices"):
        optimizer.step()


# --- Trainer, PEFT and acclimate tune ---


def trainer(model: Any, where: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(400, (8, 12), generator=torch.Generator().manual_seed(0))]  # fmt: skip
    arguments = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.1, "max_grad_norm": 1.0}  # fmt: skip
    settings = {"lr": 1e-3, "weight_decay": 0.1, **options.pop("optimizer", {})}
    return Trainer(
        model,
        TrainingArguments(str(where), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **{**arguments, **options}),
        train_dataset=rows, optimizer_cls_and_kwargs=(IOAdamFactory, settings), callbacks=[IOAdamCallback(where)],
    )  # fmt: skip


def test_trainer_trains_lora_and_writes_the_account(tiny_lm: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_lm), LoraConfig(r=4, target_modules="all-linear"))
    run = trainer(model, tmp_path)
    run.train()
    optimizer = run.optimizer.optimizer
    # every lora_A and lora_B of the 7 layers of 2 blocks, called by PEFT
    assert sorted(set(optimizer.tracked().values())) == ["linear"]
    assert len(optimizer.tracked()) == 2 * 7 * 2
    assert all({"step", "exp_avg", "in_sq", "out_sq"} == set(state) for state in optimizer.state.values())
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    found = json.loads((tmp_path / "optimizer.json").read_text())
    report = optimizer.memory_report()
    assert report["measured"] == report["formula"]
    assert found["notes"][0].startswith("Weights with factors in place of a second moment: 28 linear.")
    total = next(row for row in found["tables"][0]["rows"] if row[0] == "total")
    assert total == ["total", *(f"{report[column]['total'] / 1e6:,.2f}" for column in ("measured", "formula", "adamw"))]


def test_trainer_trains_all_weights_and_refuses_what_cannot_work(tiny_lm: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_lm)
    fused = {"optimizer": {"fused": True, "exclude": ("*.o_proj.weight",)}}
    with pytest.raises(InputError, match=r"no gradients to clip: set train\.max_grad_norm to 0"):
        trainer(model, tmp_path, **fused).train()
    run = trainer(model, tmp_path, max_grad_norm=0.0, gradient_checkpointing=True, **fused)
    run.train()
    optimizer = run.optimizer.optimizer
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(optimizer.tracked()) == {f"{name}.weight" for name in linear if "o_proj" not in name}
    assert set(optimizer.tracked().values()) == {"fused"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    undecayed = sum(p.numel() for p in optimizer.param_groups[1]["params"])
    assert undecayed == 5 * 48  # the norms
    assert isinstance(run.optimizer.optimizer.run_callbacks(tmp_path)[0], IOAdamCallback)
    arguments = copy.copy(run.args)
    arguments.deepspeed = {}
    arguments.deepspeed = {"stage": 2}
    with pytest.raises(InputError, match="DeepSpeed"):
        IOAdamCallback().on_train_begin(arguments, None, None)


def test_tune_resumes_exactly(tiny_lm: Path, colour_files: tuple[Path, Path], tmp_path: Path) -> None:
    from acclimate import tune
    from acclimate.runs import Interrupted
    from conftest import signal_at

    settings: dict[str, Any] = {
        "model": str(tiny_lm), "data": str(colour_files[0]), "task": "choice", "adapter": "full", "optimizer": "io-adam",
        "optimizer_args": {"buffer": 2},
        "max_eval_samples": 6,
        "train": {"max_steps": 3, "batch_size": 4, "lr": 1e-3, "save_every": 1},
    }  # fmt: skip
    whole = tune(directory=tmp_path / "whole", **settings)
    with signal_at(2), pytest.raises(Interrupted):
        tune(directory=tmp_path / "parts", **settings)
    parts = tune(directory=tmp_path / "parts", resume=True)
    paths = [next(run.path.glob("**/checkpoint-3/model.safetensors")) for run in (whole, parts)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert json.loads((whole.path / "optimizer.json").read_text())["title"].startswith("IO-Adam")


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_optimiser_takes_the_layers_over(fused: bool) -> None:
    model, reference = network(), network()
    old = IOAdamW(model, fused=fused)
    optimizer = IOAdamW(model, fused=fused, lr=1e-2)
    assert len(model[0]._forward_hooks) == (not fused)
    train(model, optimizer)
    train(reference, IOAdamW(reference, lr=1e-2))
    close(weights(model), weights(reference))
    assert old.layers["0.weight"].sums is None
