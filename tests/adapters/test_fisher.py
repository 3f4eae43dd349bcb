"""Fisher initialisation against its definition on small models, stock PEFT, and the measured change of a real model's predictions."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import EvaConfig, LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from safetensors.torch import load_file, save_file
from scipy.linalg import subspace_angles
from torch import Tensor, nn

from acclimate.adapters import residual
from acclimate.adapters.fisher import (
    KAPPA,
    allocate,
    base_weight,
    directions,
    fisher_init,
    fisher_state_dict,
    initialize_lora_fisher_weights,
    place,
)
from acclimate.adapters.fisher_moments import (
    Gram,
    Moments,
    collect_moments,
    direction_energy,
    model_loss,
    rows_of,
    sampled_loss,
)
from acclimate.linalg import eigh_descending, overlap
from adapters.matrix import ARCHITECTURES, disturb, inputs, labels, logits
from fresh_process import logits_in_a_fresh_process

ROOT = Path(__file__).parents[2]
N, M, CLASSES = 6, 4, 3


class Net(nn.Module):
    """x -> W x -> tanh -> classes, in float64."""

    def __init__(self, hidden: int = M) -> None:
        super().__init__()
        self.first = nn.Linear(N, hidden, dtype=torch.float64)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(hidden, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def data(rows: int = 40, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, N, dtype=torch.float64, generator=generator) * torch.linspace(2, 0.3, N, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, CLASSES, (rows,), generator=generator)}


def batches(whole: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    count = rows_of(whole)
    return [{key: value[i : i + size] for key, value in whole.items()} for i in range(0, count, size)]


def pairs(model: Net, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(x_t, g_t) of the first layer by hand, one position at a time."""
    found = []
    for x, y in zip(batch["x"], batch["y"], strict=True):
        hidden = model.first(x).detach().requires_grad_()
        loss = nn.functional.cross_entropy(model.last(torch.tanh(hidden))[None], y[None])
        found.append(torch.autograd.grad(loss, hidden)[0])
    return batch["x"], torch.stack(found)


def moments_of(
    model: nn.Module, layer: nn.Module, batch_list: list[Any], loss_fn: Any = summed, **options: Any
) -> Moments:
    return collect_moments(model, {"first": layer}, batch_list, loss_fn, n_examples=10_000, **options)["first"]


# --- the Fisher block, formed explicitly ---


def test_factors_are_the_partial_traces_of_the_fisher_block() -> None:
    model, batch = net(), data()
    x, g = pairs(model, batch)
    z = torch.einsum("tn,tm->tnm", x, g).flatten(1)
    F = (z.T @ z / len(x)).reshape(N, M, N, M)
    A, G = moments_of(model, model.first, batches(batch, 7)).factor_pair("marginal")
    torch.testing.assert_close(A * g.square().sum(1).mean(), torch.einsum("amcm->ac", F), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(G * x.square().sum(1).mean(), torch.einsum("nanc->ac", F), rtol=1e-10, atol=1e-12)
    A, G = moments_of(model, model.first, batches(batch, 7), factors="kfac").factor_pair("kfac")
    torch.testing.assert_close(A, x.T @ x / len(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(G, g.T @ g / len(g), rtol=1e-10, atol=1e-12)


def test_energy_is_the_quadratic_form_of_the_fisher_block() -> None:
    model, batch = net(), data()
    x, g = pairs(model, batch)
    z = torch.einsum("tn,tm->tmn", x, g).flatten(1)
    F = z.T @ z / len(x)
    generator = torch.Generator().manual_seed(2)
    U, V = (torch.randn(size, 5, dtype=torch.float64, generator=generator) for size in (M, N))
    expected = torch.stack(
        [(torch.outer(u, v).flatten() @ F @ torch.outer(u, v).flatten()) for u, v in zip(U.T, V.T, strict=True)]
    )
    found = direction_energy(model, model.first, batches(batch, 6), summed, U, V)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def kfac_energy(A: Tensor, G: Tensor, U: Tensor, V: Tensor) -> float:
    return float((((G @ U) * U).sum(0) * ((A @ V) * V).sum(0)).sum())


def test_no_orthonormal_pairs_hold_more_energy() -> None:
    model, rank = net(), 3
    m = moments_of(model, model.first, batches(data(), 40), factors="kfac")
    A, G = m.factor_pair("kfac")
    U, V = m.outputs.leading(rank)[1], m.inputs.leading(rank)[1]
    best = kfac_energy(A, G, U, V)
    spectra = eigh_descending(G)[0][:rank] * eigh_descending(A)[0][:rank]
    assert best == pytest.approx(float(spectra.sum()), rel=1e-10)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2000):
        P, Q = (torch.linalg.qr(torch.randn(s, rank, dtype=torch.float64, generator=generator)).Q for s in (M, N))
        assert kfac_energy(A, G, P, Q) <= best * (1 + 1e-12)
    # ascent on the Stiefel manifolds, from three random starts, ends at the same value
    for _ in range(3):
        free = [torch.randn(s, rank, dtype=torch.float64, generator=generator).requires_grad_() for s in (M, N)]
        optimiser = torch.optim.LBFGS(
            free, max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=1e-14
        )

        def step(free: list[Tensor] = free, optimiser: Any = optimiser) -> Tensor:
            optimiser.zero_grad()
            P, Q = (torch.linalg.qr(f).Q for f in free)
            loss = -(((G @ P) * P).sum(0) * ((A @ Q) * Q).sum(0)).sum() / best
            loss.backward()
            return loss

        optimiser.step(step)
        reached = -float(step().detach())
        assert reached <= 1 + 1e-9
    assert reached > 0.9


def test_svd_criterion_ranks_by_the_cost_of_deleting_a_triple() -> None:
    model = net()
    A, G = moments_of(model, model.first, batches(data(), 40), factors="kfac").factor_pair("kfac")
    W = model.first.weight.detach()
    U, V = directions(A, G, 2, "svd", W)
    left, sigma, right = torch.linalg.svd(W, full_matrices=False)
    costs = [float(s**2 * (u @ G @ u) * (v @ A @ v)) for u, s, v in zip(left.T, sigma, right, strict=True)]
    chosen = sorted(range(M), key=lambda i: -costs[i])[:2]
    assert torch.equal(U, left[:, chosen])
    assert torch.equal(V, right[chosen].T)


def test_whitened_criterion_keeps_what_carries_the_predictions() -> None:
    """Of all rank-r matrices, the whitened truncation is nearest to W in the norm ||G^(1/2) (W - Z) A^(1/2)||."""
    model, rank = net(), 2
    A, G = moments_of(model, model.first, batches(data(), 40), factors="kfac").factor_pair("kfac")
    W = model.first.weight.detach()
    U, V = directions(A, G, rank, "whitened", W)
    half_a, half_g = torch.linalg.cholesky(A).T, torch.linalg.cholesky(G).T
    weighted = half_g @ W @ half_a.T

    def error(U: Tensor, V: Tensor) -> float:
        """The least weighted error of any matrix with column space U and row space V."""
        P, Q = torch.linalg.qr(half_g @ U).Q, torch.linalg.qr(half_a @ V).Q
        return float((weighted - P @ P.T @ weighted @ Q @ Q.T).square().sum())

    optimum = float(torch.linalg.svdvals(weighted)[rank:].square().sum())
    assert error(U, V) == pytest.approx(optimum, rel=1e-8)
    left, _, right = torch.linalg.svd(W, full_matrices=False)
    assert error(left[:, :rank], right[:rank].T) > optimum
    torch.testing.assert_close(U.norm(dim=0), torch.ones(rank, dtype=torch.float64))


def test_gradient_criterion_in_closed_form() -> None:
    """With A and G multiples of the identity it is the SVD of the mean gradient."""
    cross = torch.randn(M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    U, V = directions(3 * torch.eye(N), 2 * torch.eye(M), 2, "gradient", cross=cross)
    left, sigma, right = torch.linalg.svd(cross, full_matrices=False)
    torch.testing.assert_close((U * sigma[:2]) @ V.T, (left[:, :2] * sigma[:2]) @ right[:2], rtol=1e-9, atol=1e-9)


# --- invariances ---


def constant_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that is linear in the layer's output: g is the same vector everywhere."""
    return (model(batch["x"]) * torch.arange(1.0, M + 1, dtype=torch.float64)).sum()


def test_equal_gradients_give_the_subspace_of_eva() -> None:
    batch = data(64)
    batch["x"] = torch.cat([batch["x"], -batch["x"]])  # EVA centres its inputs
    batch["y"] = batch["y"].repeat(2)
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(N, M, dtype=torch.float64))
    ours = get_peft_model(copy.deepcopy(base), LoraConfig(r=3, target_modules=["0"]))
    A, _ = moments_of(base, base[0], [batch], constant_gradient).factor_pair("marginal")
    torch.testing.assert_close(A, batch["x"].T @ batch["x"] / 128, rtol=1e-10, atol=1e-12)
    fisher_init(ours, [batch], loss_fn=constant_gradient, mode="input", n_examples=128)
    mine = ours.base_model.model[0].lora_A["default"].weight.detach().double()
    exact = torch.linalg.svd(batch["x"], full_matrices=False).Vh[:3]
    assert subspace_angles(mine.T.numpy(), exact.T.numpy()).max() < 1e-6
    theirs = get_peft_model(
        base.float(), LoraConfig(r=3, target_modules=["0"], init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
    )
    initialize_lora_eva_weights(
        theirs,
        [batch["x"].float()],
        forward_fn=lambda model, x: model(x),
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=lambda x, *_: x[0] if isinstance(x, tuple) else x,
        show_progress_bar=False,
    )
    eva = theirs.base_model.model[0].lora_A["default"].weight.detach().double()
    assert subspace_angles(mine.T.numpy(), eva.T.numpy()).max() < 1e-3  # theirs is a randomised SVD in fp32


def test_a_constant_input_gives_one_direction() -> None:
    batch = data()
    batch["x"] = batch["x"][:1].expand(40, N).contiguous()
    model = net()
    A, _ = moments_of(model, model.first, [batch]).factor_pair("marginal")
    values, vectors = eigh_descending(A)
    assert values[1] < 1e-12 * values[0]
    assert overlap(vectors[:, :1], nn.functional.normalize(batch["x"][0], dim=0)[:, None]) == pytest.approx(
        1, abs=1e-12
    )


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000))
def test_directions_turn_with_the_inputs(seed: int) -> None:
    model, batch = net(), data()
    Q = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).Q
    turned = copy.deepcopy(model)
    with torch.no_grad():
        turned.first.weight.copy_(model.first.weight @ Q.T)
    plain = moments_of(model, model.first, [batch]).inputs.leading(2)[1]
    other = moments_of(turned, turned.first, [{"x": batch["x"] @ Q.T, "y": batch["y"]}]).inputs.leading(2)[1]
    assert overlap(other, Q @ plain) == pytest.approx(1, abs=1e-9)


@settings(deadline=None, max_examples=15)
@given(factor=st.floats(1e-3, 1e3), size=st.integers(1, 40), seed=st.integers(0, 100))
def test_loss_scale_batch_size_and_order_change_nothing(factor: float, size: int, seed: int) -> None:
    model, batch = net(), data()
    plain = moments_of(model, model.first, [batch])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    mixed = {key: value[order] for key, value in batch.items()}
    other = moments_of(model, model.first, batches(mixed, size), lambda m, b: factor * summed(m, b))
    for mine, theirs, invariant in zip(
        plain.factor_pair("marginal"), other.factor_pair("marginal"), (1, factor**2), strict=True
    ):
        assert float((mine - theirs / invariant).norm() / mine.norm()) < 1e-6


def test_padding_and_the_mean_reduction_do_not_count() -> None:
    """Rows alone, and the same rows padded into one batch, give the same factors through the model's own mean loss."""
    architecture = ARCHITECTURES["llama"]
    model = architecture.model().double()
    rows = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15, 16, 17]]
    layer = model.model.layers[1].self_attn.q_proj

    def batch_of(chosen: list[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in chosen])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in chosen])
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}

    together = moments_of(model, layer, [batch_of(rows)], model_loss)
    apart = moments_of(model, layer, [batch_of([row]) for row in rows], model_loss)
    # the last position of a row predicts nothing, but no position before it is lost
    assert together.positions == apart.positions == sum(len(row) - 1 for row in rows)
    for mine, theirs in zip(together.factor_pair("marginal"), apart.factor_pair("marginal"), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-9


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 50))
def test_sketch_finds_the_same_space(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64, generator=generator)).Q
    z = (
        torch.randn(500, 60, dtype=torch.float64, generator=generator)
        * 0.7 ** torch.arange(60, dtype=torch.float64)
        @ basis.T
    )
    weight = torch.rand(500, dtype=torch.float64, generator=generator)
    whole, part = Gram(60), Gram(60, sketch=16)
    for start in range(0, 500, 90):
        for gram in (whole, part):
            gram.add(z[start : start + 90], weight[start : start + 90])
    assert part.sum.shape == (60, 16)
    assert overlap(whole.leading(4)[1], part.leading(4)[1]) >= 0.999
    assert part.trace == pytest.approx(float((z.square().sum(1) * weight).sum()), rel=1e-12)


# --- placement ---


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("mode", ["input", "split"])
def test_placement_starts_at_zero_with_unit_rows(rank: int, mode: str) -> None:
    U, V = (torch.linalg.qr(torch.randn(s, rank, dtype=torch.float64)).Q for s in (8, 9))
    A, B = place(U, V, rank, mode)  # type: ignore[arg-type]
    assert not (B @ A).any()
    inputs_used = rank if mode == "input" else (rank + 1) // 2
    torch.testing.assert_close(A[:inputs_used], KAPPA * V[:, :inputs_used].T)
    torch.testing.assert_close(B[:, inputs_used:], KAPPA * U[:, : rank - inputs_used])
    # the row norm of PEFT's own start: uniform in +-1/sqrt(n), so E||a||^2 = n * (1/n) / 3
    wide = nn.Linear(4000, 4, bias=False)
    nn.init.kaiming_uniform_(wide.weight, a=5**0.5)
    assert float(wide.weight.detach().norm(dim=1).mean()) == pytest.approx(KAPPA, rel=0.02)


def test_ranks_go_where_the_gain_is() -> None:
    gains = {
        "rich": torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2]),
        "poor": torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]),
    }
    assert allocate(gains, 4) == {"rich": 7, "poor": 1}
    assert allocate({"a": gains["rich"], "b": gains["rich"]}, 4) == {"a": 4, "b": 4}
    assert sum(allocate({f"{i}": gains["rich"] / (i + 1) for i in range(5)}, 3).values()) == 15


# --- on real architectures ---


def lm_batches(name: str) -> list[dict[str, Tensor]]:
    batch = inputs(name) | {"labels": labels(name)}
    return [{key: value[i : i + 2] for key, value in batch.items()} for i in (0, 2)]


def hashed(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if "lora_" not in name:
            digest.update(name.replace("base_layer.", "").encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("where", sorted(ARCHITECTURES))
@pytest.mark.parametrize("mode", ["input", "split", "residual"])
def test_the_start_is_the_base_model(where: str, mode: str) -> None:
    architecture = ARCHITECTURES[where]
    model = get_peft_model(architecture.model(), LoraConfig(r=4, target_modules=list(architecture.targets))).eval()
    before, expected = hashed(model.base_model.model), logits(architecture.model(), where)
    report = fisher_init(model, lm_batches(where), mode=mode)  # type: ignore[arg-type]
    assert len(report.layers) >= 4
    assert report.skipped == []
    found = logits(model, where)
    if mode == "residual":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    with model.disable_adapter():
        assert torch.equal(logits(model, where), expected)
    assert hashed(model.base_model.model) == before
    # every factor moves away from the start after one step of training
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model_loss(model, lm_batches(where)[0]).backward()
    optimiser.step()
    assert not torch.allclose(logits(model, where), expected)


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"use_dora": True}, {"lora_dropout": 0.5}, {}])
def test_kinds_of_lora(options: dict[str, Any]) -> None:
    architecture = ARCHITECTURES["llama"]
    config = LoraConfig(r=4, target_modules=list(architecture.targets), **options)
    model = get_peft_model(architecture.model(), config).eval()
    fisher_init(model, lm_batches("llama"))
    torch.testing.assert_close(logits(model, "llama"), logits(architecture.model(), "llama"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("mode", ["split", "residual"])
def test_saved_adapter_is_plain_lora_in_stock_peft(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    base = ARCHITECTURES["llama"].model()
    base.save_pretrained(tmp_path / "base")
    ids = [5, 6, 7, 8, 9]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)).eval()
    fisher_init(model, lm_batches("llama"), mode=mode)  # type: ignore[arg-type]
    disturb(model, seed=1)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits
    (found,) = logits_in_a_fresh_process([(tmp_path / "base", tmp_path / "adapter")], [ids], tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    stock = set(LoraConfig(target_modules=["q_proj"]).to_dict())
    assert config.keys() <= stock
    assert config["r"] == (8 if mode == "residual" else 4)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["peft_type"] == "LORA"
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


@pytest.mark.parametrize("where", ["llama", "bert"])
def test_residual_pair_survives_saving_and_loading(tmp_path: Path, where: str) -> None:
    architecture = ARCHITECTURES[where]
    options = {"task_type": "SEQ_CLS"} if where == "bert" else {}

    def fresh() -> Any:
        torch.manual_seed(5)
        return get_peft_model(
            architecture.model(), LoraConfig(r=4, target_modules=list(architecture.targets), **options)
        ).eval()

    model = fresh()
    fisher_init(model, lm_batches(where), mode="residual")
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if f".{residual.START}." in n}
    assert frozen
    disturb(model, seed=1)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen), (
        "the start must not train"
    )
    model.save_pretrained(tmp_path)
    again = fresh()
    residual.add_start(again)
    residual.load(again, tmp_path)
    torch.testing.assert_close(logits(again, where), logits(model, where), rtol=0, atol=0)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    plain = PeftModel.from_pretrained(architecture.model(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(plain, where), logits(model, where), rtol=1e-5, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, where), logits(plain, where), rtol=1e-4, atol=1e-5)


def test_rank_budget_moves_rank_and_keeps_the_sum(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    model = get_peft_model(architecture.model(), LoraConfig(r=4, target_modules="all-linear")).eval()
    with pytest.warns(UserWarning, match="ranks differ by layer .*vLLM does not"):
        report = fisher_init(model, lm_batches("llama"), rank_budget="fisher")
    ranks = {layer.name: layer.rank for layer in report.layers}
    assert sum(ranks.values()) == 4 * len(ranks)
    assert len(set(ranks.values())) > 1
    assert all(1 <= rank <= 8 for rank in ranks.values())
    scalings = {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}
    assert scalings == {model.peft_config["default"].lora_alpha / 4}
    disturb(model, seed=1)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(architecture.model(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded, "llama"), logits(model, "llama"), rtol=0, atol=0)


def test_cached_state_serves_several_ranks(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    targets = list(architecture.targets)
    model = architecture.model().train()
    wants = {n: p.requires_grad for n, p in model.named_parameters()}
    torch.manual_seed(7)
    expected_draw = torch.rand(1)
    torch.manual_seed(7)
    state = fisher_state_dict(model, LoraConfig(r=2, target_modules=targets), lm_batches("llama"))
    assert torch.rand(1) == expected_draw, "the global generator must not move"
    assert model.training
    assert {n: p.requires_grad for n, p in model.named_parameters()} == wants
    save_file(state, tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    for rank in (2, 4):
        cached = get_peft_model(architecture.model(), LoraConfig(r=rank, target_modules=targets))
        report = initialize_lora_fisher_weights(cached, state)
        direct = get_peft_model(architecture.model(), LoraConfig(r=rank, target_modules=targets))
        fisher_init(direct, lm_batches("llama"))
        for (name, mine), (_, theirs) in zip(cached.named_parameters(), direct.named_parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)
        assert {layer.rank for layer in report.layers} == {rank}


def test_report_says_what_was_chosen() -> None:
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"])).eval()
    report = fisher_init(model, batches(data(), 8), loss_fn=summed)
    (layer,) = report.layers
    plain = net()
    A, G = moments_of(plain, plain.first, batches(data(), 8)).factor_pair("marginal")
    values = eigh_descending(A)[0]
    assert layer.name == "first"
    assert layer.positions == 40
    assert layer.share_inputs == pytest.approx(float(values[:2].sum() / values.sum()), rel=1e-6)
    assert layer.inputs == pytest.approx(values[:2].tolist(), rel=1e-6)
    assert layer.outputs == pytest.approx(eigh_descending(G)[0][:2].tolist(), rel=1e-6)
    assert layer.effective_rank_inputs == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-6)
    leading = eigh_descending(A)[1][:, :2]
    pissa = torch.linalg.svd(base_weight(model.base_model.model.first)).Vh[:2].T
    eva = torch.linalg.svd(data()["x"]).Vh[:2].T
    assert layer.overlap_pissa == pytest.approx(overlap(leading, pissa), abs=1e-4)
    assert layer.overlap_eva == pytest.approx(overlap(leading, eva), abs=1e-4)
    assert json.loads(report.to_json())["layers"][0]["rank"] == 2
    assert report.table().splitlines()[1].split()[:2] == ["first", "2"]
    assert report.seconds > 0
    assert report.settings["n_examples"] == 256


def test_progress_counts_rows_and_more_are_taken_until_settled() -> None:
    seen: list[int] = []
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"]))
    fisher_init(model, batches(data(400), 10), loss_fn=summed, n_examples=40, advance=seen.append)
    assert seen[0] == 10
    assert sum(seen) in (40, 80, 160)
    # the second half of the first 40 rows lies in another plane: 40 cannot have settled
    batch = data(400)
    batch["x"][:20, 2:] = 0
    batch["x"][20:, :2] *= 0.01
    seen.clear()
    fisher_init(model, batches(batch, 10), loss_fn=summed, n_examples=40, advance=seen.append)
    assert sum(seen) > 40


# --- what can go wrong ---


def test_without_lora_layers() -> None:
    with pytest.raises(ValueError, match="no LoRA layer with an adapter 'other': call this after get_peft_model"):
        fisher_init(
            get_peft_model(net(), LoraConfig(r=2, target_modules=["first"])),
            [data()],
            loss_fn=summed,
            adapter_name="other",
        )


def test_unknown_arguments_are_named() -> None:
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"]))
    for options, message in [
        ({"mode": "outputs"}, "mode is one of input, split, residual, not 'outputs'"),
        ({"factors": "full"}, "factors is one of marginal, kfac"),
        ({"criterion": "eva"}, "criterion is one of fisher, svd, whitened, gradient"),
        ({"fisher": "false"}, "fisher is one of empirical, true"),
        ({"rank_budget": "free"}, "rank_budget is one of uniform, fisher"),
        ({"n_examples": 0}, "n_examples must be at least 1"),
        ({"sketch": 1}, "sketch must be at least the rank 2"),
        ({"sketch": 8, "criterion": "svd"}, "criterion 'svd' needs the whole factors"),
        ({"fisher": "true"}, "leave loss_fn away"),
    ]:
        with pytest.raises(ValueError, match=message):
            fisher_init(model, [data()], loss_fn=summed, **options)


def test_no_data_and_no_labels() -> None:
    architecture = ARCHITECTURES["llama"]
    model = get_peft_model(architecture.model(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="there is no batch"):
        fisher_init(model, [])
    masked = lm_batches("llama")[:1]
    masked[0]["labels"] = torch.full_like(masked[0]["labels"], -100)
    for fisher in ("empirical", "true"):
        with pytest.raises(ValueError, match="all labels of a batch are -100"):
            fisher_init(model, masked, fisher=fisher)  # type: ignore[arg-type]


def test_layers_that_the_loss_does_not_reach_keep_their_start() -> None:
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first", "last"]))
    before = model.base_model.model.last.lora_A["default"].weight.clone()

    def inner(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model.base_model.model.first(batch["x"]).square().sum()

    report = fisher_init(model, [data()], loss_fn=inner)
    assert report.skipped == ["last"]
    assert [layer.name for layer in report.layers] == ["first"]
    assert torch.equal(model.base_model.model.last.lora_A["default"].weight, before)


def test_a_loss_that_reaches_nothing() -> None:
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"]))
    with pytest.raises(ValueError, match="depends on none of the target layers"):
        fisher_init(model, [data()], loss_fn=lambda model, batch: batch["x"].sum())


def test_losses_that_are_not_finite() -> None:
    def spoiled(every: int) -> Any:
        calls = iter(range(1000))

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return summed(model, batch) * (float("nan") if next(calls) % every == 0 else 1)

        return loss

    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"]))
    with pytest.raises(ValueError, match=r"not finite in 10 of 20 batches, more than a tenth"):
        fisher_init(model, batches(data(), 2), loss_fn=spoiled(2))
    with pytest.warns(UserWarning, match="1 of 20 batches were left out"):
        report = fisher_init(model, batches(data(), 2), loss_fn=spoiled(100))
    assert report.layers[0].positions == 38


def test_too_few_positions_are_filled_up_at_random() -> None:
    model = get_peft_model(net(), LoraConfig(r=4, target_modules=["first"]))
    with pytest.warns(UserWarning, match="fewer directions than the rank in first: the rest are random"):
        fisher_init(model, [data(1)], loss_fn=summed, mode="input")
    A = model.base_model.model.first.lora_A["default"].weight.detach().double()
    torch.testing.assert_close(A @ A.T, KAPPA**2 * torch.eye(4, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    x = data(1)["x"][0]
    assert abs(float(A[0] @ x) / (KAPPA * float(x.norm()))) == pytest.approx(1, abs=1e-5)


class Int8Linear(nn.Linear):
    """A quantised layer as PEFT meets them: an int8 weight with a scale, and its own forward."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features)
        scale = source.weight.detach().abs().max() / 127
        self.scale = scale
        self.bias = source.bias
        self.weight = nn.Parameter((source.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x) * self.scale, self.bias)


def test_quantised_base() -> None:
    model = net()
    exact = moments_of(model, model.first, [data()]).inputs.leading(2)[1]
    model.first = Int8Linear(model.first)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["first"]))
    fisher_init(wrapped, [data()], loss_fn=summed, mode="input")
    found = wrapped.base_model.model.first.lora_A["default"].weight.detach().T / KAPPA
    assert overlap(found, exact) > 0.999


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1, stride=2)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


def test_wide_sides_are_sketched_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate.adapters.fisher.WIDE", 40)
    found = {}
    for sketch in (None, 0, 40):
        model = get_peft_model(wide_net(), LoraConfig(r=2, target_modules=["first"]))
        report = fisher_init(model, [wide_data()], loss_fn=summed, sketch=sketch, mode="input")
        found[sketch] = model.base_model.model.first.lora_A["default"].weight.detach().T / KAPPA
        sketched = report.layers[0].effective_rank_inputs is None
        assert sketched == (sketch != 0)
        assert report.layers[0].effective_rank_outputs is not None
    assert overlap(found[0], found[None]) > 0.999
    assert overlap(found[0], found[40]) > 0.999


def wide_net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.first = nn.Linear(200, M, dtype=torch.float64)
    return model.eval()


def wide_data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 200, dtype=torch.float64, generator=generator) * 0.8 ** torch.arange(200, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, CLASSES, (300,), generator=generator)}


@pytest.mark.parametrize("mode", ["split", "residual"])
def test_convolution_is_linear_on_patches(mode: str) -> None:
    torch.manual_seed(0)
    base = ConvNet()
    x = torch.randn(6, 2, 7, 7)
    batch = {"x": x, "y": torch.arange(6) % CLASSES}
    hidden = base.conv(x).detach().requires_grad_()
    loss = nn.functional.cross_entropy(base.head(torch.tanh(hidden).mean((2, 3))), batch["y"], reduction="sum")
    g = torch.autograd.grad(loss, hidden)[0].flatten(2).transpose(1, 2).reshape(-1, 5)
    patches = nn.functional.unfold(x, 3, padding=1, stride=2).transpose(1, 2).reshape(-1, 18)
    A = (g.square().sum(1)[:, None] * patches).T @ patches
    expected = base(x)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["conv"])).eval()
    fisher_init(model, [batch], loss_fn=summed, mode=mode)  # type: ignore[arg-type]
    found = nn.functional.normalize(model.base_model.model.conv.lora_A["default"].weight.detach().flatten(1)[0], dim=0)
    assert abs(float(found.double() @ eigh_descending(A)[1][:, 0])) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_are_left_alone_with_a_notice() -> None:
    architecture = ARCHITECTURES["llama"]
    model = get_peft_model(architecture.model(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    with pytest.warns(UserWarning, match="default start.*model.embed_tokens"):
        report = fisher_init(model, lm_batches("llama"))
    assert all("q_proj" in layer.name for layer in report.layers)
    only = get_peft_model(architecture.model(), LoraConfig(r=2, target_modules=["embed_tokens"]))
    with pytest.warns(UserWarning, match="default start"), pytest.raises(ValueError, match="no LoRA layer"):
        fisher_init(only, lm_batches("llama"))


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_gradients_are_restored(fails: bool) -> None:
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["first"], lora_dropout=0.5)).train()
    parameter = model.base_model.model.first.lora_A["default"].weight
    parameter.grad = torch.ones_like(parameter)
    wants = {n: p.requires_grad for n, p in model.named_parameters()}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert not model.training
        first = summed(model, batch)
        assert torch.equal(first, summed(model, batch)), "dropout must be off"
        if fails:
            raise RuntimeError("broken on purpose")
        return first

    if fails:
        with pytest.raises(RuntimeError, match="broken on purpose"):
            fisher_init(model, [data()], loss_fn=loss)
    else:
        fisher_init(model, [data()], loss_fn=loss)
    assert all(module.training for module in model.modules())
    assert {n: p.requires_grad for n, p in model.named_parameters()} == wants
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert all(p.grad is None for p in model.parameters() if p is not parameter)
    assert not any(module._forward_hooks for module in model.modules())


def test_activation_checkpointing_changes_nothing() -> None:
    architecture = ARCHITECTURES["llama"]
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(architecture.model(), LoraConfig(r=2, target_modules=["q_proj"])).train()
        if checkpointing:
            model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        fisher_init(model, lm_batches("llama"))
        found.append([p.detach().clone() for n, p in model.named_parameters() if "lora_" in n])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_same_seed_same_start_and_the_true_fisher_draws_labels() -> None:
    def start(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = get_peft_model(ARCHITECTURES["llama"].model(), LoraConfig(r=2, target_modules=["q_proj"]))
        fisher_init(model, lm_batches("llama"), **options)
        return [p.detach().clone() for n, p in model.named_parameters() if "lora_" in n]

    empirical, once, twice, other = start(), start(fisher="true"), start(fisher="true"), start(fisher="true", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(once, other, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(once, empirical, strict=True))


# --- the real model ---


@pytest.mark.embedded
def test_energy_predicts_the_change_of_the_real_models_predictions() -> None:
    """True Fisher, down projection of the last block, where a position's output reaches no other position.

    The mean over drawn labels of (g^T u)^2 is then the variance, under the predictions, of the logits' derivative along u.
    """
    from scipy.stats import spearmanr

    from acclimate.data import read_table
    from acclimate.models import load_model
    from acclimate.prefix import FrozenPrefixCache, suffix_model

    model, tokenizer = load_model("smollm2")
    model.eval()
    rows = tokenizer([row["text"] for row in read_table("sentiment3").rows[:5]])["input_ids"]
    cache = FrozenPrefixCache(model, 1, rows)
    suffix = suffix_model(model, 1).eval()
    layer = suffix.model.layers[0].mlp.down_proj
    texts = [cache.batch([index]) for index in range(len(rows))]
    loss = sampled_loss(torch.Generator().manual_seed(0))
    labelled = [text | {"labels": torch.zeros_like(text["attention_mask"])} for text in texts]
    moments = collect_moments(suffix, {"down": layer}, labelled, loss, n_examples=len(rows))["down"]
    assert moments.positions > 60
    V, U = moments.inputs.leading(60)[1].float(), moments.outputs.leading(60)[1].float()

    x, y, summed = [], [], []
    layer.register_forward_hook(lambda module, inputs, output: (x.append(inputs[0][0]), y.append(output[0]), None)[-1])
    suffix.model.norm.register_forward_pre_hook(lambda module, inputs: summed.append(inputs[0][0]))
    with torch.no_grad():
        for text in texts:
            suffix(**text)
    inputs, outputs = torch.cat(x), torch.cat(y)
    residual = torch.cat(summed) - outputs

    def predictions(change: Tensor) -> Tensor:
        return suffix.lm_head(suffix.model.norm(residual + outputs + change)).log_softmax(-1)

    energy, measured = [], []
    with torch.no_grad():
        before = predictions(torch.zeros_like(outputs))
        p = before.exp()
        for index in [*range(20), *range(25, 40), *range(45, 60)]:
            along = (inputs @ V[:, index])[:, None] * U[:, index]
            _, slope = torch.func.jvp(predictions, (torch.zeros_like(outputs),), (along,))
            energy.append(float((p * slope.square()).sum(-1).mean()))  # the mean of the slope of log p is 0
            step = (2e-3 / energy[-1]) ** 0.5  # KL about 1e-3 a position
            measured.append(float((p * (before - predictions(step * along))).sum(-1).mean()) * 2 / step**2)
    ratios = torch.tensor(measured) / torch.tensor(energy)
    for top_middle_bottom in (0, 25, 49):
        assert 0.9 <= float(ratios[top_middle_bottom]) <= 1.1, ratios
    assert spearmanr(measured, energy).statistic >= 0.9


def test_sampled_loss_is_a_cross_entropy_on_drawn_labels() -> None:
    """A model that is sure draws what it predicts: the loss is then that of its own prediction, close to zero."""
    model = ARCHITECTURES["llama"].model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    batch = lm_batches("llama")[0]
    assert sampled_loss(torch.Generator().manual_seed(0))(model, batch).item() < 1e-3
    assert model_loss(model, batch).item() > 1


def test_drawn_labels_have_the_moments_of_the_true_fisher() -> None:
    """Over many draws: E[g g^T] = sum_y p(y) g_y g_y^T, position by position."""
    model, batch = net(), data(6)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.net(x))

    whole = Wrapped().eval()
    hidden = model.first(batch["x"]).detach().requires_grad_()
    logits = model.last(torch.tanh(hidden))
    p = logits.detach().softmax(-1)
    expected = torch.zeros(M, M, dtype=torch.float64)
    for y in range(CLASSES):
        loss = nn.functional.cross_entropy(logits, torch.full((6,), y), reduction="sum")
        g = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        expected += (p[:, y, None] * g).T @ g / 6
    many = [{"x": batch["x"], "labels": batch["y"]}] * 3000
    loss_fn = sampled_loss(torch.Generator().manual_seed(0))
    m = collect_moments(whole, {"first": model.first}, many, loss_fn, factors="kfac", n_examples=18_000)["first"]
    G = m.factor_pair("kfac")[1]
    assert float((G - expected).norm() / expected.norm()) < 0.03  # 18,000 draws
