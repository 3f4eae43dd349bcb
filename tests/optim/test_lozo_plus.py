"""LOZO+: what c says of the gradient, what a period keeps, and that nothing but the weights' values is ever different."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from acclimate.compress.gptq import Grid, round_to_nearest
from acclimate.compress.quant_linear import QuantLinear
from acclimate.errors import InputError
from acclimate.optim import LOZOPlus, LOZOPlusFactory, ZerothOrderTrainer, doubled, replay
from acclimate.optim.forward_only import LOG, save_log, state_bytes
from acclimate.optim.lozo_plus import carried_over, promoted, survivors
from acclimate.optim.perturbation import Matrix, stochastic_rounding, sum_of
from acclimate.optim.perturbed_parameters import in_blocks
from acclimate.pipeline import tune
from acclimate.recipe import Recipe
from acclimate.runs import read_json
from optim import lozo_worker
from optim.matrix import copies


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(random(*shape, seed=seed, dtype=dtype))


def direction(optimizer: LOZOPlus) -> list[Tensor]:
    """Z of each matrix at the next step; drawing it changes nothing, since it depends on the step's number alone."""
    optimizer._choose()
    return [matrix.product(matrix.place, matrix.draw).double() for matrix in optimizer.matrices]


class Net(nn.Module):
    def __init__(self, seed: int = 0, conv1d: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Conv1D(8, 6) if conv1d else nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


X, Y = random(16, 6, dtype=torch.float32), torch.arange(16) % 3


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X.to(next(model.parameters()).dtype)).float(), Y)


def optimizer_of(model: nn.Module, **options: Any) -> LOZOPlus:
    return LOZOPlus(model.parameters(), **{"lr": 1e-2, "model": model, "rank": 2, "period": 8, "probes": 2, **options})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- c and the gradient ---


def test_c_is_the_slope_and_its_mean_square_the_energy_of_the_direction() -> None:
    shapes = [(5, 4), (3, 6)]
    G = [random(*shape, seed=i + 1) for i, shape in enumerate(shapes)]
    W = [parameter(*shape, seed=i + 5) for i, shape in enumerate(shapes)]
    optimizer = LOZOPlus(W, lr=0.0, rank=1, period=4001, probes=0, noise_floor=0.0)
    draws, mean = 4000, [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for step in range(draws):
        if step < 50:
            Z = direction(optimizer)
            expected = sum(float((g * z).sum()) for g, z in zip(G, Z, strict=True))
        optimizer.step(lambda: sum((g * w).sum() for g, w in zip(G, W, strict=True)))
        c = optimizer.records[-2]
        if step < 50:
            assert c == pytest.approx(expected, rel=1e-9, abs=1e-9)
            mean = [m + c * z / 50 for m, z in zip(mean, Z, strict=True)]
    c = torch.tensor(optimizer.records[::2], dtype=torch.float64)
    b = [matrix.basis[:, 0].double() for matrix in optimizer.matrices]
    energy = sum(float((g @ v).square().sum()) for g, v in zip(G, b, strict=True))
    error = float(c.square().std()) / draws**0.5
    assert float(c.square().mean()) == pytest.approx(energy, abs=3 * error)
    # E[c u] = G b, and so E[c Z] = G b b^T
    for matrix, g, v in zip(optimizer.matrices, G, b, strict=True):
        assert v.norm() == pytest.approx(len(v) ** 0.5, rel=1e-6)
        means = matrix.sums[:, 0].double() / draws
        torch.testing.assert_close(means, g @ v, rtol=0, atol=4 * (energy / draws) ** 0.5 * 1.8)


def test_c_is_exact_in_float32() -> None:
    G, W = random(6, 5, dtype=torch.float32), parameter(6, 5, dtype=torch.float32)
    optimizer = LOZOPlus([W], lr=0.0, rank=2, period=50, eps=1.0, noise_floor=0.0)
    for _ in range(10):
        (Z,) = direction(optimizer)
        optimizer.step(lambda: (G * W).sum())
        assert optimizer.records[-2] == pytest.approx(float((G.double() * Z).sum()), rel=1e-4, abs=1e-4)


def test_a_promoted_column_holds_as_much_as_predicted() -> None:
    """One matrix, gradient of rank 1: m (K + 2) / (K + m + 1) times the energy of a random direction."""
    m, K, ratios = 48, 50, []
    for seed in range(50):
        u, v = random(m, seed=seed), random(m, seed=seed + 100)
        G, W = torch.outer(u / u.norm(), v / v.norm()), nn.Parameter(torch.zeros(m, m, dtype=torch.float64))
        optimizer = LOZOPlus([W], lr=0.0, rank=1, period=K, probes=0, seed=seed, noise_floor=0.0)
        for _ in range(K):
            optimizer.step(lambda G=G, W=W: (G * W).sum())
        kept = optimizer.matrices[0].kept[:, 0].double()
        assert kept.norm() == pytest.approx(m**0.5, rel=1e-5)
        ratios.append(float((G.T @ kept).square().sum()))
    assert sum(ratios) / 50 == pytest.approx(m * (K + 2) / (K + m + 1), rel=0.2)


@pytest.mark.parametrize("algo", ["lozo", "mezo", "lozo+"])
def test_a_step_is_what_it_says(algo: str) -> None:
    W, S = parameter(5, 4, dtype=torch.float32), random(5, 4, seed=2, dtype=torch.float32)
    optimizer = LOZOPlus([W], lr=1e-2, rank=2, period=10, algo=algo, weight_decay=0.1, noise_floor=0.0)
    for _ in range(12):
        if algo == "mezo":
            ((_, Z),) = optimizer._noise()
        else:
            (Z,) = direction(optimizer)
        before = W.detach().double()
        optimizer.step(lambda: (W - S).square().sum())
        c = optimizer.records[-2]
        torch.testing.assert_close(
            W.detach().double(), before * (1 - 1e-3) - 1e-2 * c * Z.double(), rtol=1e-5, atol=1e-6
        )
    if algo == "lozo":
        basis = optimizer.matrices[0].basis
        optimizer._choose()
        assert torch.equal(optimizer.matrices[0].basis, basis), "fixed within a period"


def test_on_a_convex_quadratic_no_step_goes_up() -> None:
    W, S = parameter(6, 6), random(6, 6, seed=3)
    optimizer = LOZOPlus([W], lr=1.0, rank=2, period=20, eps=1e-4)

    def f() -> Tensor:
        return 0.5 * (W - S).square().sum()

    for _ in range(60):
        (Z,) = direction(optimizer)
        lr = optimizer.param_groups[0]["lr"] = 1 / float(Z.square().sum())
        before = float(f().detach())
        optimizer.step(f)
        c = optimizer.records[-2]
        gain = before - float(f().detach())
        assert math.isnan(c) or gain >= lr * c * c / 2 - 1e-6


# --- what a period keeps ---


def test_survivors_are_the_new_and_the_good_best_first() -> None:
    energies, selected = [1.0, 5.0, 3.0, math.nan], [True, True, False, False]
    assert survivors(energies, selected, 4.0, 0.5) == [1, 2]
    assert survivors(energies, selected, 4.0, 0.0) == [1, 2, 0]
    assert survivors(energies, selected, 4.0, math.inf) == [2]


def test_promoted_columns_are_orthogonal_of_length_root_m_and_span_the_sums() -> None:
    sums = random(12, 4)
    Q = promoted(sums, [2, 0])
    torch.testing.assert_close(Q.T @ Q, 12 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(Q @ (Q.T @ sums[:, [0, 2]]) / 12, sums[:, [0, 2]])


def test_momentum_moves_by_projection() -> None:
    N, B, new = random(7, 2), random(5, 2, seed=1), random(7, 3, seed=2)
    M = N @ B.T  # what it stands for, (7, 5)
    torch.testing.assert_close(new @ carried_over(N, B, new, flipped=True).T, new @ new.T @ M / 7)
    other = random(5, 3, seed=3)
    torch.testing.assert_close(carried_over(N, B, other, flipped=False) @ other.T, M @ other @ other.T / 5)


@pytest.mark.parametrize(("threshold", "least", "most"), [(0.0, 2, 2), (0.5, 0, 2), (math.inf, 0, 2)])
def test_the_kept_rank_adapts(threshold: float, least: int, most: int) -> None:
    model = Net()
    optimizer = optimizer_of(model, threshold=threshold, period=12, noise_floor=0.0)
    kept = []
    for _ in range(6):
        for _ in range(12):
            optimizer.step(lambda: loss_of(model))
        kept.append(int(optimizer.history[-1][3]))
    assert all(least <= k <= most for k in kept)
    if threshold == math.inf:  # promoted after a period as a random column, gone after the next
        assert kept == [2, 0] * 3
    assert optimizer.alignment["kept_rank"] == kept[-1]
    assert optimizer.alignment["accepted"] == 72


def quadratic(L: int, **options: Any) -> float:
    """Loss left, as a share, after 1,500 steps on F = 1/2 ||W - S||^2, S of rank 2 and a little noise, 48 x 48, L matrices."""
    generator = torch.Generator().manual_seed(100)
    targets = []
    for _ in range(L):
        low = torch.randn(48, 2, generator=generator) @ torch.randn(2, 48, generator=generator) / 48**0.5
        target = low + 0.02 * torch.randn(48, 48, generator=generator)
        targets.append(target / target.norm())
    W = [nn.Parameter(torch.zeros(48, 48)) for _ in targets]

    def f() -> Tensor:
        return 0.5 * sum((w - s).square().sum() for w, s in zip(W, targets, strict=True))

    start = float(f().detach())
    # LOZO's Z is the sum of `rank` columns
    size = L * 48 * 48 * (options["rank"] if options.get("algo") == "lozo" else 1)
    optimizer = LOZOPlus(W, lr=1 / size, noise_floor=0.0, **{"rank": 4, "period": 200, **options})
    for _ in range(1500):
        optimizer.step(f)
    return float(f().detach()) / start


@pytest.mark.parametrize(
    ("L", "options", "most"),
    [(1, {}, 0.20), (1, {"rank": 2, "threshold": 0.0, "probes": 0}, 0.12), (3, {}, 0.60), (3, {"rank": 2, "threshold": 0.0, "probes": 0}, 0.45)],
    ids=["one matrix", "one matrix, no gate", "three matrices", "three matrices, no gate"],
)  # fmt: skip
def test_learned_directions_need_fewer_steps(L: int, options: dict[str, Any], most: float) -> None:
    assert quadratic(L, **options) <= most


def test_random_directions_need_more() -> None:
    assert 0.5 < quadratic(1, algo="lozo", rank=2, period=100) < 0.75


# --- the two ways to perturb ---


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.5, "weight_decay": 0.1}, {"algo": "lozo"}], ids=["plain", "momentum", "lozo"]
)
def test_hooks_do_what_changing_the_weights_does(conv1d: bool, options: dict[str, Any]) -> None:
    found = []
    for mode in ("hook", "inplace"):
        model = Net(conv1d=conv1d)
        optimizer = optimizer_of(model, mode=mode, eps=1e-2, noise_floor=0.0, **options)
        for _ in range(8):
            optimizer.step(lambda model=model: loss_of(model))
        found.append(weights(model))
    for name in ("first.weight", "second.weight"):
        assert not torch.equal(found[0][name], weights(Net(conv1d=conv1d))[name])
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_within_a_period_weights_stay_and_the_model_acts_as_if_they_had_moved() -> None:
    model = Net().eval()
    before = weights(model)
    optimizer = optimizer_of(model, period=50, weight_decay=0.1)
    for _ in range(20):
        optimizer.step(lambda: loss_of(model))
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    acting = model(X)
    assert not torch.allclose(acting, Net().eval()(X))
    optimizer.fold()
    torch.testing.assert_close(model(X), acting, rtol=1e-5, atol=1e-6)
    assert not torch.equal(model.second.weight, before["second.weight"])
    optimizer.detach()
    torch.testing.assert_close(model(X), acting, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["hook", "inplace"])
def test_an_exception_in_the_closure_leaves_the_weights(mode: str) -> None:
    model = Net()
    optimizer = optimizer_of(model, mode=mode, train_1d=True)
    before, calls = weights(model), []

    def closure() -> float:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the data ended")
        return 1.0

    with pytest.raises(KeyError):
        optimizer.step(closure)
    for name, value in weights(model).items():
        if mode == "hook":
            assert torch.equal(value, before[name])
        torch.testing.assert_close(value, before[name], rtol=1e-6, atol=1e-6)
    assert model.training


def test_dropout_is_off_while_losses_are_compared() -> None:
    model = Net().train()
    optimizer = optimizer_of(model, lr=0.0)
    modes = []

    def closure() -> Tensor:
        modes.append(model.training)
        return loss_of(model)

    optimizer.step(closure)
    assert modes == [False, False]
    assert model.training


def test_16_bit_weights_keep_what_is_smaller_than_their_steps() -> None:
    value = torch.full((20_000,), 1 + 2**-10)  # a quarter of the way to bfloat16's next number
    draw = torch.rand(value.shape, generator=torch.Generator().manual_seed(0))
    rounded = stochastic_rounding(value, draw, torch.bfloat16)
    assert set(rounded.float().tolist()) == {1.0, 1 + 2**-7}
    share = 2**-10 / 2**-7
    assert float(rounded.float().mean()) == pytest.approx(
        1 + 2**-10, abs=4 * 2**-7 * (share * (1 - share) / 20_000) ** 0.5
    )
    model = Net().bfloat16()
    optimizer = optimizer_of(model, period=100)
    for _ in range(30):
        optimizer.step(lambda: loss_of(model))
    changes = [matrix.free.abs().max() for matrix in optimizer.matrices]
    assert all(change.dtype == torch.float32 and change > 0 for change in changes)
    optimizer.fold()
    assert model.second.weight.dtype == torch.bfloat16


def test_a_metric_without_a_gradient_will_do() -> None:
    model = Net().eval()
    optimizer = optimizer_of(model, eps=0.3, lr=0.3, rank=2, period=20, noise_floor=0.0)

    def errors() -> float:
        return float((model(X).argmax(-1) != Y).float().mean())

    start = errors()
    for _ in range(200):
        optimizer.step(errors)
    assert errors() < start


def test_suggested_rate_is_half_over_the_median_curvature() -> None:
    W = parameter(6, 6)
    optimizer = LOZOPlus([W], lr=1.0, rank=2, period=50, eps=1e-2)
    before = W.detach().clone()
    found = optimizer.suggest_lr(lambda: 2.0 * W.square().sum(), n=8)
    torch.testing.assert_close(W.detach(), before)
    sizes = []
    for step in range(8):  # curvature along Z is 4 ||Z||^2
        optimizer.counts["step"] = step
        sizes.append(4 * float(direction(optimizer)[0].square().sum()))
    middle = sorted(sizes)[3:5]
    assert found == pytest.approx(0.5 / (sum(middle) / 2), rel=1e-4)
    with pytest.raises(ValueError, match="bends down"):
        optimizer.suggest_lr(lambda: -W.square().sum())


def test_blocks_take_turns() -> None:
    model = Net()
    optimizer = optimizer_of(model, blocks=2, period=6, noise_floor=0.0)
    assert [len(block) for block in optimizer._blocks] == [1, 1]
    for period in range(4):
        optimizer.fold()
        before = weights(model)
        for _ in range(6):
            optimizer.step(lambda: loss_of(model))
        moved = [name for name, value in weights(model).items() if not torch.equal(value, before[name])]
        assert moved == [["first.weight", "second.weight"][period % 2]]


@pytest.mark.parametrize(
    ("rows", "blocks", "expected"),
    [
        ([384, 384, 384, 384, 1536, 384] * 6, "auto", [10_368, 10_368]),  # MiniLM: not 20,000 and what is left
        ([576, 192, 192, 576, 1536, 1536, 576] * 30, "auto", [17_280] * 9),  # SmolLM2
        ([30_000, 100, 100], "auto", [30_000, 200]), ([5, 5], "auto", [10]), ([1, 1, 1, 9], 3, [3, 9]), ([], "auto", [0]),
    ],
    ids=["minilm", "smollm2", "large", "small", "uneven", "none"],
)  # fmt: skip
def test_blocks_have_about_as_many_rows(rows: list[int], blocks: Any, expected: list[int]) -> None:
    matrices = [Matrix(str(i), nn.Parameter(torch.empty(m, 1)), {}, None, 1, 0) for i, m in enumerate(rows)]
    found = in_blocks(matrices, blocks)
    assert [matrix for block in found for matrix in block] == matrices
    sums = [sum(matrix.shape[0] for matrix in block) for block in found]
    assert len(sums) == len(expected)
    assert all(abs(got - wanted) <= 1536 for got, wanted in zip(sums, expected, strict=True))
    assert blocks != "auto" or all(total <= 20_000 or len(block) == 1 for total, block in zip(sums, found, strict=True))


def test_what_is_trained() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    model = LlamaForCausalLM(config)
    names = {matrix.name for matrix in LOZOPlusFactory()(model, rank=2, period=10).matrices}
    assert names == {f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
    with pytest.warns(UserWarning, match=r"1 matrices are perturbed in place, e.g. 'model.embed_tokens.weight'"):
        everything = LOZOPlusFactory()(LlamaForCausalLM(config), rank=2, period=10, exclude=(), train_1d=True)
    assert len(everything.matrices) == 8
    assert {noisy.p.ndim for noisy in everything.noisy} == {1}
    # bases and free factors: 4 bytes, rank + probes columns, and the sums of c u
    optimizer = LOZOPlusFactory()(LlamaForCausalLM(config), rank=2, period=10, probes=1)
    sides = [matrix.p.shape for matrix in optimizer.matrices]
    assert state_bytes(optimizer) == 4 * sum(3 * (m + n) + 2 * m for m, n in sides)


# --- state, log, adapter ---


def test_resuming_needs_the_same_optimiser() -> None:
    state = optimizer_of(Net()).state_dict()
    with pytest.raises(ValueError, match="rank=2, not 1"):
        optimizer_of(Net(), rank=1).load_state_dict(state)
    with pytest.raises(ValueError, match="mode='hook', not 'inplace'"):
        optimizer_of(Net(), mode="inplace").load_state_dict(state)
    with pytest.raises(ValueError, match="other parameters"):
        optimizer_of(Net(), exclude=("first",)).load_state_dict(state)
    optimizer = optimizer_of(Net())
    optimizer.accumulate(lambda: 1.0)
    with pytest.raises(RuntimeError, match="call step"):
        optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_log_alone_makes_the_weights_again(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Net().to(dtype)
    optimizer = LOZOPlusFactory()(
        model, lr=1e-2, rank=2, period=8, probes=2, beta=0.5, train_1d=True, weight_decay=0.01, blocks=2
    )
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step(lambda: loss_of(model))
    optimizer.fold()
    save_log(optimizer, tmp_path / "log.safetensors")
    assert len(optimizer.records) == 20 * 3
    again = Net().to(dtype)
    replay(again, tmp_path / "log.safetensors")
    expected = weights(model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
    with pytest.raises(ValueError, match="other parameters"):
        replay(nn.Sequential(nn.Linear(6, 8)), tmp_path / "log.safetensors")


@pytest.mark.parametrize("conv1d", [False, True])
def test_the_sum_of_changes_is_a_lora(conv1d: bool, tmp_path: Path) -> None:
    model = Net(conv1d=conv1d).eval()
    optimizer = optimizer_of(model, adapter_rank=8, exclude=("second",) if conv1d else ())
    for _ in range(30):
        optimizer.step(lambda: loss_of(model))
    optimizer.export_adapter(tmp_path)
    adapted = PeftModel.from_pretrained(Net(conv1d=conv1d).eval(), str(tmp_path))
    torch.testing.assert_close(adapted(X), model(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="adapter_rank=64"):
        optimizer_of(Net()).export_adapter(tmp_path)
    with pytest.raises(RuntimeError, match="linear layers alone"):
        optimizer_of(Net(), adapter_rank=2, train_1d=True).export_adapter(tmp_path)


# --- errors ---


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"eps": 0.0}, "eps must be above 0"), ({"threshold": -1.0}, "threshold is at least 0"), ({"period": 4}, "period 4 must be longer"),
        ({"lr": -1.0}, "lr and weight_decay"), ({"beta": 1.0}, "beta is in"), ({"rank": 0}, "rank is at least 1"), ({"algo": "adam"}, "algo is one of"),
        ({"mode": "fast"}, "mode is one of"), ({"candidates": 0}, "candidates is at least 1"), ({"blocks": 0}, "blocks is"), ({"exclude": ("weight",)}, "no matrix to train"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_arguments_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        optimizer_of(Net(), **options)


def test_half_precision_in_place_is_refused() -> None:
    model = Net().bfloat16()
    with pytest.raises(RuntimeError, match=r"'first.weight' is torch\.bfloat16"):
        optimizer_of(model, mode="inplace")
    optimizer_of(model, mode="inplace", allow_drift=True).step(lambda: loss_of(model))


def test_a_step_needs_losses_and_nothing_else() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match="ZerothOrderTrainerMixin"):
        optimizer.step()
    with pytest.raises(ValueError, match="calls backward"):
        optimizer.step(lambda: loss_of(model).backward())

    def with_gradient() -> Tensor:
        with torch.enable_grad():
            return loss_of(model)

    with pytest.raises(ValueError, match="do not enable gradients"):
        optimizer.step(with_gradient)
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(loss_of(model))
    loss.backward()
    with pytest.raises(RuntimeError, match="leave the GradScaler out"):
        scaler.step(optimizer)


def test_parameters_must_stay_the_same() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    optimizer.step(lambda: loss_of(model))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(RuntimeError, match="other parameters than at first"):
        optimizer.step(lambda: loss_of(model))


def test_losses_that_are_not_finite_are_left_out_and_end_the_run_when_there_are_no_others() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    before = weights(model)
    for _ in range(19):
        optimizer.step(lambda: math.nan)
    with pytest.raises(FloatingPointError, match="20 times in a row"):
        optimizer.step(lambda: math.inf)
    assert optimizer.counts["not_finite"] == 20
    optimizer.fold()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_losses_that_never_differ_are_said() -> None:
    optimizer = optimizer_of(Net())
    for _ in range(19):
        optimizer.step(lambda: 1.0)
    with pytest.warns(UserWarning, match="raise eps|Raise eps"):
        optimizer.step(lambda: 1.0)
    assert optimizer.alignment["below_noise"] == 20


def test_c_is_clipped_to_its_running_size() -> None:
    optimizer = optimizer_of(Net(), clip_c=2.0, noise_floor=0.0)
    values = iter([1.0, 0.998, 1.0, 0.0])
    optimizer.step(lambda: next(values))
    optimizer.step(lambda: next(values))
    first, second = optimizer.records[0], optimizer.records[2]
    assert first == pytest.approx(1.0)
    rms = (0.99 * first**2 + 0.01 * 500.0**2) ** 0.5
    assert second == pytest.approx(2 * rms)


# --- both points at once, several directions, quantised layers, shards ---


def paired_loss(model: nn.Module) -> Tensor:
    logits, labels = model(doubled({"x": X})["x"]), Y
    return torch.stack([nn.functional.cross_entropy(half, labels) for half in logits.chunk(2)])


@pytest.mark.parametrize("conv1d", [False, True])
def test_both_points_in_one_batch_are_two_passes(conv1d: bool) -> None:
    found = []
    for paired in (False, True):
        model = Net(conv1d=conv1d)
        optimizer = optimizer_of(model, paired=paired, eps=1e-2, noise_floor=0.0, weight_decay=0.1)
        for _ in range(12):
            optimizer.step(lambda model=model, paired=paired: paired_loss(model) if paired else loss_of(model))
        optimizer.fold()
        found.append((torch.tensor(optimizer.records), model))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)  # a difference of losses over 2e-2
    for name, value in weights(found[0][1]).items():
        torch.testing.assert_close(value, weights(found[1][1])[name], rtol=1e-6, atol=1e-6)


def test_paired_needs_two_losses_of_two_halves() -> None:
    model = Net()
    optimizer = optimizer_of(model, paired=True)
    with pytest.raises(ValueError, match="returns two losses"):
        optimizer.step(lambda: loss_of(model))
    with pytest.raises(ValueError, match="15 rows, which are no two halves"):
        optimizer.step(lambda: model(X[:15]).sum(0)[:2])
    with pytest.raises(ValueError, match="outputs of linear layers alone"):
        optimizer_of(Net(), paired=True, train_1d=True)
    assert doubled([{"a": X, "b": 3}])[0]["a"].shape == (32, 6)


def test_paired_trains_a_language_model_alike(tiny_lm: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"colour {i % 3}", "completion": ["red", "green and blue", "no"][i % 3]} for i in range(24)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for paired in (False, True):
        recipe = Recipe(
            model=str(tiny_lm), data=str(data), task="sft", optimizer="lozo-plus",
            optimizer_args={"rank": 2, "period": 8, "probes": 2, "eps": 1e-2, "paired": paired},
            train={"max_steps": 4, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-2, "lr_schedule": "constant", "warmup": 0},
        )  # fmt: skip
        found.append(
            load_file(tune(recipe, directory=tmp_path / str(paired)) / "adapter" / "adapter_model.safetensors")
        )
    assert any(value.any() for name, value in found[0].items() if "lora_B" in name)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-5)
    choice = recipe.replace(task="choice", data="clinc150")
    with pytest.raises(InputError, match="Leave paired out"):
        tune(choice, directory=tmp_path / "choice")


def test_candidates_are_averaged() -> None:
    W, S = parameter(5, 4), random(5, 4, seed=2)
    optimizer = LOZOPlus([W], lr=1e-2, rank=2, period=10, candidates=3, weight_decay=0.1, noise_floor=0.0, eps=1e-5)
    for step in range(25):
        before, Z = W.detach().clone(), []
        for candidate in range(3):
            probe, column = optimizer._choose(candidate)
            assert probe or column == (3 * (step % 10 - sum(p < step % 10 for p in (1, 3, 6, 8))) + candidate) % 2
            Z.append(optimizer.matrices[0].product(optimizer.matrices[0].place, optimizer.matrices[0].draw).double())
        optimizer.step(lambda: (W - S).square().sum())
        c = optimizer.records[-4:-1]
        for slope, z in zip(c, Z, strict=True):
            assert slope == pytest.approx(float(2 * ((before - S) * z).sum()), rel=1e-4, abs=1e-4)
        mean = sum(slope * z for slope, z in zip(c, Z, strict=True)) / 3
        torch.testing.assert_close(W.detach(), before * (1 - 1e-3) - 1e-2 * mean, rtol=1e-6, atol=1e-7)
    assert optimizer.alignment["accepted"] == 75


def test_candidates_are_in_the_log(tmp_path: Path) -> None:
    model = Net()
    optimizer = LOZOPlusFactory()(model, lr=1e-2, rank=2, period=8, probes=2, candidates=2)
    for _ in range(12):
        optimizer.step(lambda: loss_of(model))
    optimizer.fold()
    save_log(optimizer, tmp_path / "log.safetensors")
    again = Net()
    replay(again, tmp_path / "log.safetensors")
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(again).items())


class Quantised(nn.Module):
    """Two linear layers of 4 bits in groups of 8, between others that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 16, bias=False), nn.Linear(16, 3)
        self.requires_grad_(False)
        for name in ("first", "second"):
            layer = getattr(self, name)
            found = round_to_nearest(layer.weight.detach(), Grid(4, 8))
            setattr(self, name, QuantLinear.from_quantized(found, layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_an_adapter_grows_on_quantised_layers(tmp_path: Path) -> None:
    x = random(16, 16, seed=3, dtype=torch.float32)
    model = Quantised().eval()
    packed = {name: value.clone() for name, value in model.state_dict().items()}

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), Y)

    start = float(loss())
    optimizer = LOZOPlus(
        model.parameters(), 3e-2, model=model, rank=2, period=10, probes=1, grow=True, adapter_rank=16, exclude=()
    )
    assert [matrix.name for matrix in optimizer.matrices] == ["first.weight", "second.weight"]
    state = None
    for step in range(105):
        if step == 55:
            state = copies(optimizer.state_dict())
        optimizer.step(loss)
    acting = model(x)
    assert float(loss()) < 0.9 * start
    assert all(torch.equal(value, packed[name]) for name, value in model.state_dict().items())
    optimizer.export_adapter(tmp_path)
    assert {matrix.grown[0].shape[1] for matrix in optimizer.matrices} == {16}
    torch.testing.assert_close(model(x), acting, rtol=1e-5, atol=1e-5)
    adapted = PeftModel.from_pretrained(Quantised().eval(), str(tmp_path))
    torch.testing.assert_close(adapted(x), model(x), rtol=1e-5, atol=1e-5)

    # resumed in the middle of a period, with an adapter on it already
    expected, model = model(x), Quantised().eval()
    again = LOZOPlus(
        model.parameters(), 3e-2, model=model, rank=2, period=10, probes=1, grow=True, adapter_rank=16, exclude=()
    )
    again.load_state_dict(state)
    for _ in range(50):
        again.step(loss)
    again.fold()
    assert torch.equal(model(x), expected)


def test_a_sum_of_changes_is_cut_to_its_best_part() -> None:
    changes = [(random(9, 2, seed=i), random(7, 2, seed=i + 10)) for i in range(3)]
    whole, known = torch.zeros(9, 7, dtype=torch.float64), None
    for left, right in changes:
        known = sum_of(known, (left, right), 4)
        whole = whole + left @ right.T
        U, sigma, Vt = torch.linalg.svd(whole)
        whole = (U[:, :4] * sigma[:4]) @ Vt[:4]
        torch.testing.assert_close(known[0] @ known[1].T, whole)


def test_growing_needs_quantised_layers_that_stay() -> None:
    with pytest.raises(ValueError, match="grow=True trains an adapter"):
        LOZOPlus(Quantised().parameters(), model=Quantised())
    for options in ({"mode": "inplace"}, {"algo": "mezo"}):
        with pytest.raises(ValueError, match="it needs model="):
            LOZOPlus(Quantised().parameters(), model=Quantised(), grow=True, **options)
    with pytest.raises(ValueError, match="set it to 0"):
        LOZOPlus(Quantised().parameters(), model=Quantised(), grow=True, weight_decay=0.1)


def test_noise_in_place_is_taken_back_to_rounding() -> None:
    model = Net()
    before = weights(model)
    optimizer = optimizer_of(model, algo="mezo", lr=0.0)
    assert state_bytes(optimizer) == 0  # no copy of the weights
    for _ in range(50):
        optimizer.step(lambda: loss_of(model))
    for name, value in weights(model).items():
        error = (value - before[name]).norm() / before[name].norm()
        assert float(error) <= 50 * 1e-6
    with pytest.raises(RuntimeError, match="rounding makes it drift"):
        optimizer_of(Net().bfloat16(), algo="mezo")


@pytest.mark.timeout(120)
def test_two_processes_with_shards_equal_one(tmp_path: Path) -> None:
    output = tmp_path / "found.pt"
    mp.spawn(lozo_worker.worker, args=(str(output),), nprocs=2, join=True)
    found = torch.load(output, weights_only=True)
    for name, options in lozo_worker.OPTIONS.items():
        model = lozo_worker.network()
        optimizer = lozo_worker.train(model, slice(None), **options)
        for way in [f"fsdp2, {name}", *(["shared out"] if name == "candidates" else [])]:
            for ours, theirs in zip(model.parameters(), found[way], strict=True):
                torch.testing.assert_close(theirs, ours.detach(), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model[0].weight, lozo_worker.network()[0].weight, atol=1e-3)
        exact = [noisy.exact for noisy in optimizer.noisy if noisy.exact is not None]
        for ours, theirs in zip(exact, found[f"exact, {name}"], strict=True):  # of a part's state: in full
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    model = lozo_worker.network()
    lozo_worker.train(model, slice(None), weight_decay=0.1)
    for ours, theirs in zip(model.parameters(), found["tensor parallel"], strict=True):
        torch.testing.assert_close(theirs, ours.detach(), rtol=1e-5, atol=1e-5)
    rounded = lozo_worker.rounded(lozo_worker.network().bfloat16())
    for ours, theirs in zip(rounded.parameters(), found["rounded"], strict=True):
        assert torch.equal(ours, theirs)
    assert bool(found["no model"][0])


def test_one_compiled_graph_serves_both_signs_and_all_periods() -> None:
    import torch._dynamo.testing

    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Net().eval()
        optimizer = optimizer_of(model, eps=1e-2, noise_floor=0.0)
        counter = torch._dynamo.testing.CompileCounter()
        forward = torch.compile(model, backend=counter) if compiled else model
        counts = []
        for _ in range(20):
            optimizer.step(lambda forward=forward: nn.functional.cross_entropy(forward(X), Y))
            counts.append(counter.frame_count)
        if compiled:
            assert counts[-1] == counts[1] > 0
        optimizer.fold()
        found.append(weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)


# --- in trainers ---


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "labels": Y[i]}


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_transformers_trainer(tmp_path: Path) -> None:
    found = []
    for accumulation in (1, 2):
        model = Wrapped()
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=16 // accumulation, gradient_accumulation_steps=accumulation,
            report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=5e-2, save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = ZerothOrderTrainer(
            model,
            arguments,
            train_dataset=Rows(),
            optimizer_cls_and_kwargs=(LOZOPlusFactory, {"lr": 5e-2, "rank": 2, "period": 7}),
        )
        result = trainer.train()
        assert result.training_loss > 0
        found.append(weights(model))
        assert not torch.equal(found[-1]["net.second.weight"], Wrapped().net.second.weight)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-4)
    plain = Trainer(
        Wrapped(), arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=(LOZOPlusFactory, {"rank": 2, "period": 7})
    )
    with pytest.raises(RuntimeError, match="ZerothOrderTrainerMixin"):
        plain.train()


def test_tune_folds_reports_and_resumes(tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"colour {i % 3}", "completion": ["red", "green", "blue"][i % 3]} for i in range(24)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(
        model=str(tiny_lm), data=str(data), task="sft", optimizer="lozo-plus", optimizer_args={"rank": 2, "period": 8, "probes": 2},
        train={"max_steps": 12, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-3, "save_every": 5, "lr_schedule": "constant", "warmup": 0},
    )  # fmt: skip
    whole = tune(recipe, directory=tmp_path / "whole")
    told = read_json(whole / "optimizer.json")
    assert ["steps, two forward passes each", "12"] in told["tables"][0]["rows"]
    assert "LOZO+: forward passes only" in (whole / "report.html").read_text()
    assert (whole / LOG).exists()
    expected = (whole / "adapter" / "adapter_model.safetensors").read_bytes()
    assert any(
        value.any()
        for name, value in load_file(whole / "adapter" / "adapter_model.safetensors").items()
        if "lora_B" in name
    )

    class KilledError(BaseException):
        pass

    fold = LOZOPlus.fold

    def killed_at_the_end(self: LOZOPlus) -> None:
        if self.counts["step"] == 12:
            raise KilledError
        fold(self)

    def killed(self: LOZOPlus) -> None:
        raise KilledError

    # in the middle of a period, and after the last step: there the checkpoint's weights lack what had not been folded
    for name, method in {"_end_period": killed, "fold": killed_at_the_end}.items():
        directory = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(LOZOPlus, name, method)
            with pytest.raises(KilledError):
                tune(recipe, directory=directory)
        tune(directory=directory, resume=True)
        assert (directory / "adapter" / "adapter_model.safetensors").read_bytes() == expected
