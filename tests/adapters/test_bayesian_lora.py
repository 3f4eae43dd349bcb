"""Bayesian-LoRA: what its mathematics says, what LoRA it is in the limit, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal
from torch.distributions import kl_divergence as exact_kl
from transformers import Trainer, TrainingArguments

from acclimate.adapters import BayesianLoraConfig
from acclimate.adapters.bayesian_lora import inducing, set_sampling, tuner_of
from acclimate.adapters.bayesian_lora.export import export_mean, export_samples, from_lora
from acclimate.adapters.bayesian_lora.posterior import FactorStack
from acclimate.adapters.bayesian_lora.predict import (
    PosteriorPredictor,
    choice_token_ids,
    predict_proba,
    sampled_probs,
)
from acclimate.adapters.bayesian_lora.training import BayesianTrainerMixin, KLCallback, kl_divergence, kl_loss
from acclimate.metrics import uncertainty_parts
from adapters.matrix import ARCHITECTURES, BATCH, VOCABULARY, disturb, inputs, leave, logits, loss
from fresh_process import logits_in_a_fresh_process

FAMILIES = sorted(inducing.FAMILIES)
PUBLISHED = {"parameterization": "published", "max_lambda": 0.03, "max_sd": 0.1}
LLAMA = ARCHITECTURES["llama"]


def make(where: str = "llama", *, trained: bool = False, model: nn.Module | None = None, **options: Any) -> PeftModel:
    architecture = ARCHITECTURES[where]
    options.setdefault("target_modules", list(architecture.targets))
    base = model if model is not None else architecture.model()
    torch.manual_seed(5)
    found = get_peft_model(base, BayesianLoraConfig(**{"r": 4, "lora_alpha": 8, "n_train": 64, **options})).eval()
    if trained:
        disturb(found, seed=1)
    return found


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_lora(trained: bool = True, **options: Any) -> PeftModel:
    base = LLAMA.model()
    torch.manual_seed(5)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(LLAMA.targets), **options})
    found = get_peft_model(base, config).eval()
    if trained:
        disturb(found, seed=1)
    return found


def stack_of(model: PeftModel, shape: tuple[int, int] | None = None) -> FactorStack:
    found = list(tuner_of(model).stacks("default"))
    return next(s for s in found if shape is None or (s.r, s.n) == shape)


# --- the limit of no variance is LoRA ---


def test_without_variance_the_forward_pass_is_loras() -> None:
    lora = plain_lora()
    ours = make(max_sd=0.0, max_lambda=0.0)
    means = {name.replace("lora_", "blora_"): p for name, p in lora.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, value in means.items():
            ours.get_parameter(name).copy_(value)
    set_sampling(ours, "batch")
    torch.testing.assert_close(logits(ours, "llama"), logits(lora, "llama"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["tied", "published"])
def test_as_the_variance_vanishes_draws_become_the_mean_and_agree(options: dict[str, Any]) -> None:
    model = make(trained=True, **{**options, "max_sd": 1e-7, "max_lambda": 1e-7})
    set_sampling(model, "batch")
    drawn = logits(model, "llama")
    set_sampling(model, "off")
    torch.testing.assert_close(drawn, logits(model, "llama"), rtol=0, atol=1e-6)
    probs = sampled_probs(model, inputs("llama"), 4, generator=generator())
    assert uncertainty_parts(probs)["epistemic"].max() < 1e-6


def test_the_start_and_the_training_without_variance_are_loras_to_the_bit() -> None:
    def trajectory(model: PeftModel) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(3)
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            value = loss(model, "llama")
            if isinstance(model.peft_config["default"], BayesianLoraConfig):
                value = value + kl_loss(model, step / 6)
            value.backward()
            optimizer.step()
            seen.append(value.item())
        return seen, [p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n]

    first, weights = trajectory(plain_lora(trained=False))
    second, ours = trajectory(make(max_sd=0.0, max_lambda=0.0, kl_weight=0.0))
    assert first == second
    assert len(weights) == len(ours) == 8
    assert all(torch.equal(a, b) for a, b in zip(weights, ours, strict=True))


def test_the_seed_gives_loras_start_with_any_noise() -> None:
    lora, ours = plain_lora(trained=False), make()
    for name, value in lora.named_parameters():
        if "lora_" in name:
            assert torch.equal(value, ours.get_parameter(name.replace("lora_", "blora_"))), name


@pytest.mark.embedded
def test_training_with_noise_learns_as_loras_does() -> None:
    """64 steps on 64 sentences with the defaults: the mean fits at most 1.5 times worse than LoRA, plus 0.05."""
    from acclimate import data, models
    from acclimate.prefix import FrozenPrefixCache, suffix_model

    whole, tokenizer = models.load_model("smollm2")
    rows = data.read_table("sentiment3", split="train").rows
    ids = [tokenizer(f"Review: {row['text']}\nSentiment:")["input_ids"] for row in rows]
    kept = [index for index in range(len(rows)) if len(ids[index]) <= 20][:64]
    answers = torch.tensor([int(rows[index]["label"] == "positive") for index in kept])
    batch = FrozenPrefixCache(whole, 2, [ids[index] for index in kept]).batch(range(64))
    last = batch["attention_mask"].sum(1) - 1
    words = choice_token_ids(tokenizer, [" negative", " positive"])

    def fit(config: Any) -> float:
        model = suffix_model(whole, 2)
        head = nn.Linear(model.config.hidden_size, 2, bias=False)  # the two answers are all that is looked at
        head.weight.data = model.lm_head.weight.data[words].clone()
        model.lm_head = head
        torch.manual_seed(0)
        model = get_peft_model(model, config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def cross_entropy(rows: slice) -> Tensor:
            found = model(**{key: value[rows] for key, value in batch.items()}).logits
            return nn.functional.cross_entropy(found[torch.arange(len(found)), last[rows]], answers[rows])

        for step in range(64):
            model.train()
            value = cross_entropy(slice(step % 4 * 16, step % 4 * 16 + 16))
            if isinstance(config, BayesianLoraConfig):
                value = value + kl_loss(model, step / 64)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return cross_entropy(slice(None)).item()

    common: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    lora = fit(LoraConfig(**common))
    assert lora < 0.1
    assert fit(BayesianLoraConfig(**common, n_train=64)) <= 1.5 * lora + 0.05


# --- draws ---


def toy(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[inducing.Basis, inducing.Basis]:
    """Bases of a 4 x 6 factor with 3 x 3 inducing values."""
    g = generator(seed)
    rank = inducing.basis(torch.randn(1, 3, 4, generator=g, dtype=dtype), torch.full((1, 3), 0.3, dtype=dtype))
    wide = inducing.basis(torch.randn(1, 3, 6, generator=g, dtype=dtype), torch.full((1, 3), 0.2, dtype=dtype))
    return rank, wide


def draws_of(
    spread: Tensor | None, lam: float, count: int, scale: float
) -> tuple[Tensor, inducing.Basis, inducing.Basis]:
    """(count, 24) flattened draws; `spread` None draws V ~ N(0, I)."""
    rank, wide = toy()
    noise = inducing.draw_noise((1, count, 4, 6, 3, 3), rank.projection, generator(7))
    values = noise.inducing[3] if spread is None else spread.expand(1, count, 3, 3)
    found = inducing.matheron(rank, wide, values, torch.full((1,), lam, dtype=torch.float64), scale, noise)
    return found[0].flatten(1), rank, wide


def assert_moments(found: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Sample mean and covariance within 4.5 standard errors, which all 324 numbers together exceed with probability 0.002."""
    count = len(found)
    variance = covariance.diagonal()
    assert ((found.mean(0) - mean).abs() <= 4.5 * (variance / count).sqrt() + 1e-12).all()
    standard_error = ((covariance.square() + variance[:, None] * variance) / count).sqrt()
    assert ((torch.cov(found.T) - covariance).abs() <= 4.5 * standard_error + 1e-12).all()


def test_draws_given_the_inducing_values_have_the_conditional_moments() -> None:
    scale, lam = 0.7, 0.4
    value = torch.randn(3, 3, generator=generator(2), dtype=torch.float64)
    found, rank, wide = draws_of(value, lam, 20_000, scale)
    p_r, p_c = rank.projection[0], wide.projection[0]
    mean = scale * (p_r.T @ value @ p_c).flatten()
    covariance = scale**2 * lam**2 * (torch.eye(24, dtype=torch.float64) - torch.kron(p_r.T @ p_r, p_c.T @ p_c))
    assert_moments(found, mean, covariance)


def test_with_the_prior_of_v_and_all_of_the_noise_draws_follow_the_prior() -> None:
    found, *_ = draws_of(None, 1.0, 20_000, 0.7)
    assert_moments(found / 0.7, torch.zeros(24, dtype=torch.float64), torch.eye(24, dtype=torch.float64))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_draws_its_own_covariance(name: str) -> None:
    raw, sd = family_raw(name, 2, 3), inducing.bounded(0.8)
    g = generator(3)
    xi = torch.randn(1, 20_000, 2, 3, generator=g, dtype=torch.float64)
    member = torch.rand(1, 20_000, generator=g, dtype=torch.float64)
    found = inducing.FAMILIES[name].spread(raw, sd, xi, member)[0].flatten(1)
    centre, covariance = family_moments(name, raw, sd)
    components = torch.stack([covariance + torch.outer(c, c) for c in centre])
    if name == "ensemble":  # a mixture has heavier fourth moments than assert_moments takes for granted
        assert (found.mean(0)).abs().max() < 0.03
        assert (torch.cov(found.T) - components.mean(0)).abs().max() < 0.05
    else:
        assert_moments(found, centre[0], covariance)


def test_gradients_of_a_draw_are_exact() -> None:
    noise = inducing.draw_noise((1, 2, 3, 4, 2, 2), torch.zeros((), dtype=torch.float64), generator())

    def draw(z_r: Tensor, z_c: Tensor, d_r: Tensor, d_c: Tensor, raw: Tensor, lam: Tensor) -> Tensor:
        rank = inducing.basis(z_r, inducing.positive(d_r))
        wide = inducing.basis(z_c, inducing.positive(d_c))
        spread = inducing.FAMILIES["diagonal"].spread(
            {"sd": raw}, inducing.bounded(0.3), noise.inducing[3], noise.member
        )
        return inducing.matheron(rank, wide, spread, inducing.bounded(0.1)(lam), 0.5, noise)

    g = generator(1)
    shapes = [(1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 2, 2), (1,)]
    arguments = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(draw, arguments)


def test_the_tied_bases_and_scale_are_as_written() -> None:
    model = make(trained=True)
    stack = stack_of(model, (4, 32))
    layer = tuner_of(model).layers()[0]
    posterior: Any = layer.blora_posterior_A["default"]
    z_c = torch.cat([layer.blora_A["default"].weight, posterior.extra_wide])
    z_r = torch.cat([torch.eye(4), posterior.extra_rank])
    psi = z_c @ z_c.T + torch.diag(nn.functional.softplus(posterior.wide_noise) ** 2)
    torch.testing.assert_close(stack.wide.factor[0] @ stack.wide.factor[0].T, psi, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stack.rank.gram[0], z_r @ z_r.T)
    assert stack.scale == pytest.approx(math.sqrt(4 / 3) / 5)
    assert posterior.scale == stack.scale


def test_noise_starts_at_half_of_its_maximum() -> None:
    stack = stack_of(make())
    torch.testing.assert_close(stack.strength, torch.full_like(stack.strength, 0.05))
    torch.testing.assert_close(stack.sd(stack.raw["sd"]), torch.full_like(stack.raw["sd"], 0.15))
    published = stack_of(make(**PUBLISHED))
    torch.testing.assert_close(published.strength, torch.full_like(published.strength, 1e-3), rtol=1e-4, atol=0)


# --- KL ---


def family_raw(name: str, a: int, b: int, groups: int = 1, seed: int = 4) -> dict[str, Tensor]:
    g = generator(seed)
    start = inducing.FAMILIES[name].start(a, b, 3)
    return {k: 0.3 * torch.randn(groups, *v.shape, generator=g, dtype=torch.float64) for k, v in start.items()}


def family_moments(name: str, raw: dict[str, Tensor], sd: inducing.Scale) -> tuple[Tensor, Tensor]:
    """Means of the components (K, ab) around mu and their covariance (ab, ab), written out densely."""
    size = raw["sd"].shape[1:].numel() if name in ("diagonal", "ensemble") else 0
    if name == "matrix":
        roots = [m.tril(-1) + torch.diag(sd(m.diagonal()).sqrt()) for m in (raw["sd_rank"][0], raw["sd_wide"][0])]
        covariance = torch.kron(roots[0] @ roots[0].T, roots[1] @ roots[1].T)
    elif name == "full":
        root = raw["sd"][0].tril(-1) + torch.diag(sd(raw["sd"][0].diagonal()))
        covariance = root @ root.T
    else:
        covariance = torch.diag(sd(raw["sd"][0]).flatten().square())
    size = len(covariance)
    offsets = raw["offsets"][0] if name == "ensemble" else torch.zeros(1, size, dtype=torch.float64)
    offsets = offsets.reshape(len(offsets), size)
    return offsets - offsets.mean(0), covariance


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(FAMILIES), seed=st.integers(0, 1000), maximum=st.floats(0.1, 3))
def test_kl_of_each_family_is_that_of_torch(name: str, seed: int, maximum: float) -> None:
    raw, sd = family_raw(name, 2, 3, seed=seed), inducing.bounded(maximum)
    mu = torch.randn(1, 2, 3, generator=generator(seed), dtype=torch.float64)
    found = inducing.FAMILIES[name].kl(raw, sd, mu)
    offsets, covariance = family_moments(name, raw, sd)
    prior = MultivariateNormal(torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))
    each = [exact_kl(MultivariateNormal(mu.flatten() + o, covariance), prior) for o in offsets]
    assert found.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-8)
    assert found.item() > 0


def test_kl_of_an_ensemble_is_an_upper_bound_of_the_mixtures() -> None:
    raw, sd = family_raw("ensemble", 2, 3), inducing.bounded(0.5)
    raw["offsets"] = raw["offsets"] * 4
    bound = inducing.FAMILIES["ensemble"].kl(raw, sd, torch.zeros(1, 2, 3, dtype=torch.float64)).item()
    offsets, covariance = family_moments("ensemble", raw, sd)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(3, dtype=torch.float64)),
        MultivariateNormal(offsets, covariance.expand(3, -1, -1)),
    )
    torch.manual_seed(0)
    points = mixture.sample((50_000,))
    prior = Independent(Normal(torch.zeros(6, dtype=torch.float64), 1.0), 1)
    ratios = mixture.log_prob(points) - prior.log_prob(points)
    assert ratios.mean() + 3 * ratios.std() / math.sqrt(50_000) < bound
    raw["offsets"] = torch.zeros_like(raw["offsets"])
    same = inducing.FAMILIES["diagonal"].kl({"sd": raw["sd"]}, sd, torch.zeros(1, 2, 3, dtype=torch.float64))
    exact = inducing.FAMILIES["ensemble"].kl(raw, sd, torch.zeros(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(exact, same)


@pytest.mark.parametrize("name", ["diagonal", "matrix", "full"])
def test_kl_is_zero_only_at_the_prior(name: str) -> None:
    raw = {k: torch.zeros_like(v) for k, v in family_raw(name, 2, 3).items()}
    family, mu = inducing.FAMILIES[name], torch.zeros(1, 2, 3, dtype=torch.float64)
    assert family.kl(raw, inducing.bounded(2.0), mu).item() == pytest.approx(0, abs=1e-12)  # half of 2 is 1
    assert family.kl(raw, inducing.bounded(2.2), mu).item() > 1e-3
    assert family.kl(raw, inducing.bounded(2.0), mu + 0.1).item() > 1e-3


def test_conditional_kl_is_the_monte_carlo_mean() -> None:
    rank, wide = toy()
    scale, lam = 0.7, 0.4
    p_r, p_c = rank.projection[0], wide.projection[0]
    covariance = scale**2 * (torch.eye(24, dtype=torch.float64) - torch.kron(p_r.T @ p_r, p_c.T @ p_c))
    zero = torch.zeros(24, dtype=torch.float64)
    found, *_ = draws_of(torch.zeros(3, 3, dtype=torch.float64), lam, 20_000, scale)
    ratios = MultivariateNormal(zero, lam**2 * covariance).log_prob(found) - MultivariateNormal(
        zero, covariance
    ).log_prob(found)
    exact = inducing.conditional_kl(torch.tensor(lam, dtype=torch.float64), 24).item()
    assert abs(ratios.mean().item() - exact) < 3 * ratios.std().item() / math.sqrt(20_000)
    assert inducing.conditional_kl(torch.tensor(1.0), 24).item() == 0
    assert inducing.conditional_kl(torch.tensor([0.5, 1.5]), 24).min() > 0


def test_kl_of_the_model_is_the_sum_over_its_factors() -> None:
    model = make(trained=True)
    own = conditional = 0.0
    for layer in tuner_of(model).layers():
        for which in ("A", "B"):
            posterior: Any = getattr(layer, f"blora_posterior_{which}")["default"]
            w = getattr(layer, f"blora_{which}")["default"].weight.detach().double()
            w = w if which == "A" else w.T
            z_c = torch.cat([w, posterior.extra_wide.detach().double()])
            z_r = torch.cat([torch.eye(4).double(), posterior.extra_rank.detach().double()])
            p_r, p_c = (
                torch.linalg.inv(
                    torch.linalg.cholesky(z @ z.T + torch.diag(nn.functional.softplus(d.detach().double()) ** 2))
                )
                @ z
                for z, d in ((z_r, posterior.rank_noise), (z_c, posterior.wide_noise))
            )
            mu = p_r @ w @ p_c.T / posterior.scale
            sd = 0.3 * torch.sigmoid(10 * posterior.sd.detach().double())
            own += exact_kl(Normal(mu, sd), Normal(torch.zeros_like(mu), 1.0)).sum().item()
            own += 0.5 * (w - posterior.scale * p_r.T @ mu @ p_c).square().sum().item() / posterior.scale**2
            lam = 0.1 * torch.sigmoid(10 * posterior.strength.detach().double())
            conditional += w.numel() * (0.5 * lam**2 - 0.5 - lam.log()).item()
    found = kl_divergence(model)
    assert found.u.item() == pytest.approx(own, rel=1e-4)
    assert found.conditional.item() == pytest.approx(conditional, rel=1e-4)
    assert found.total.item() == pytest.approx(own + conditional, rel=1e-4)


def test_the_mean_lies_in_the_span_of_its_own_bases() -> None:
    stack = stack_of(make(trained=True))
    assert stack.weight is not None
    mu = stack.rank.projection @ stack.weight @ stack.wide.projection.mT
    inside = stack.rank.projection.mT @ mu @ stack.wide.projection
    assert (inside - stack.weight).norm() < 0.2 * stack.weight.norm()  # exact but for D, which `trained` has disturbed


def flow_raw(width: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        k: v.double()[None] + 0.3 * torch.randn(1, *v.shape, dtype=torch.float64)
        for k, v in inducing.flow_start(width).items()
    }


def test_a_flow_that_is_the_identity_gives_the_diagonal_kl() -> None:
    raw = {k: v.double()[None] for k, v in inducing.flow_start(3).items()}
    sd = torch.rand(1, 2, 3, generator=generator(), dtype=torch.float64) * 0.5 + 0.1
    mu = torch.randn(1, 2, 3, generator=generator(1), dtype=torch.float64)
    xi = torch.randn(1, 40_000, 2, 3, generator=generator(2), dtype=torch.float64)
    rows, log_det = inducing.flow(raw, mu[:, None] + sd[:, None] * xi)
    torch.testing.assert_close(rows, mu[:, None] + sd[:, None] * xi)
    assert (log_det == 0).all()
    exact = exact_kl(Normal(mu, sd), Normal(torch.zeros_like(mu), 1.0)).sum().item()
    assert inducing.flow_kl(raw, sd, mu, xi).item() == pytest.approx(exact, abs=0.05)


def test_the_flow_is_autoregressive_and_reports_its_determinant() -> None:
    raw, row = flow_raw(5), torch.randn(5, generator=generator(), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: inducing.flow(raw, x[None, None, None])[0][0, 0, 0], row)
    assert (jacobian.triu(1) == 0).all()
    assert (jacobian[torch.ones(5, 5).tril(-1) > 0] != 0).all()
    expected = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(inducing.flow(raw, row[None, None, None])[1][0, 0], expected)


# --- numbers ---


@pytest.mark.parametrize("m", [4, 5, 7])
def test_number_of_parameters(m: int) -> None:
    model = make(inducing=m)
    r, total = 4, 0
    for layer in tuner_of(model).layers():
        base: Any = layer.base_layer
        for p, q in ((r, base.in_features), (base.out_features, r)):
            total += p * q + (m - r) * (p + q) + 2 * m + m * m + 1
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == total


def test_number_of_parameters_of_smollm2() -> None:
    """r = 8, q and v of 30 layers: 15 % more than LoRA's 460,800."""
    per_layer = 0
    for p, q in ((8, 576), (576, 8), (8, 576), (192, 8)):
        per_layer += p * q + (p + q) + 18 + 81 + 1
    assert 30 * per_layer == 531_360

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = nn.Linear(576, 576, bias=False), nn.Linear(576, 192, bias=False)

    model = get_peft_model(Block(), BayesianLoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == per_layer


# --- when it draws ---


def test_training_draws_and_evaluation_does_not() -> None:
    model = make(trained=True)
    assert torch.equal(logits(model, "llama"), logits(model, "llama"))

    def with_gradients() -> Tensor:
        return model(**inputs("llama")).logits

    assert torch.equal(with_gradients(), with_gradients())  # eval mode
    model.train()
    assert not torch.equal(with_gradients(), with_gradients())
    assert torch.equal(logits(model, "llama"), logits(model, "llama"))  # no gradients: a reference model, or a check


@pytest.mark.parametrize("training", [False, True])
def test_sampling_counts_in_both_modes(training: bool) -> None:
    model = make(trained=True).train(training)
    mean = logits(model, "llama")
    same = {key: value[:1].repeat(BATCH, 1) for key, value in inputs("llama").items()}
    with torch.no_grad():
        set_sampling(model, "batch")
        shared, again = model(**same).logits, model(**same).logits
        assert torch.equal(shared[0], shared[1])
        assert not torch.equal(shared, again)
        set_sampling(model, "per_example")
        each = model(**same).logits
        assert (each[0] - each[1]).abs().max() > 1e-4
    set_sampling(model, "off")
    assert torch.equal(logits(model, "llama"), mean)
    assert torch.equal(model(**inputs("llama")).logits, mean)


def test_training_of_the_mean_alone_is_deterministic() -> None:
    model = make(trained=True, train="mean").train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".blora_A." in name or ".blora_B." in name for name in trained)
    assert torch.equal(model(**inputs("llama")).logits, model(**inputs("llama")).logits)


def test_training_of_the_posterior_leaves_the_mean() -> None:
    model = make(trained=True, train="posterior").train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("blora_posterior_" in name for name in trained)
    loss(model, "llama").backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("options", [{}, PUBLISHED, *({"posterior": f} for f in FAMILIES)], ids=str)
def test_every_parameter_learns_from_a_draw(options: dict[str, Any]) -> None:
    model = make(trained=True, **options).train()
    loss(model, "llama").backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_what_is_switched_off_is_not_trained() -> None:
    """Else DDP would wait for gradients that never come."""
    for options in ({"max_sd": 0.0}, {"max_lambda": 0.0}, {"max_sd": 0.0, "max_lambda": 0.0}):
        model = make(trained=True, **options).train()
        loss(model, "llama").backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad), options
        assert math.isfinite(kl_divergence(model).total.item())


@pytest.mark.parametrize("where", sorted(ARCHITECTURES))
def test_gradients_of_a_draw_survive_activation_checkpointing(where: str) -> None:
    model = make(where, trained=True).train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(11)
        loss(model, where).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    found = gradients()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_draw_can_be_compiled() -> None:
    model = make(trained=True).train()

    def step(forward: nn.Module) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        torch.manual_seed(11)
        value = loss(forward, "llama")
        value.backward()
        gradient = next(p.grad for n, p in model.named_parameters() if n.endswith("extra_wide"))
        assert gradient is not None
        return value.detach(), gradient.clone()

    expected = step(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        for found, value in zip(step(compiled), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


def test_bf16_base_keeps_factors_in_fp32() -> None:
    model = make(model=LLAMA.model().to(torch.bfloat16)).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    found = model(**inputs("llama")).logits
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_autocast_draws_in_full_precision() -> None:
    model = make(trained=True).train()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**inputs("llama"))
        drawn = tuner_of(model).layers()[0].draws["default"]["A"]
    torch.manual_seed(2)
    model(**inputs("llama"))
    assert torch.equal(drawn, tuner_of(model).layers()[0].draws["default"]["A"])


def test_a_copy_of_a_model_in_training_has_no_draws() -> None:
    model = make(trained=True).train()
    loss(model, "llama")
    twin = copy.deepcopy(model)
    assert not tuner_of(twin).layers()[0].draws
    torch.manual_seed(4)
    expected = model(**inputs("llama")).logits
    torch.manual_seed(4)
    assert torch.equal(twin(**inputs("llama")).logits, expected)


def test_generation_is_from_the_mean() -> None:
    model = make(trained=True)
    ids = inputs("llama")["input_ids"][:1]
    merged = copy.deepcopy(model).merge_and_unload()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(input_ids=ids, **options), merged.generate(input_ids=ids, **options))


# --- predictions ---


@pytest.mark.parametrize("where", sorted(ARCHITECTURES))
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "last"])
@pytest.mark.parametrize("rows", [1, BATCH])
def test_folded_draws_are_the_draws_one_by_one(where: str, layers: list[int] | None, rows: int) -> None:
    """Whether blocks below the first adapted one are shared or not."""
    extra = {} if layers is None else {"layers_to_transform": layers, "layers_pattern": ARCHITECTURES[where].pattern}
    model = make(where, trained=True, **extra)
    tuner = tuner_of(model)
    batch = {key: value[:rows] for key, value in inputs(where, BATCH).items()}
    with torch.no_grad(), tuner.posterior_samples(3, generator()):
        together = model(**batch).logits.unflatten(0, (3, -1))
        drawn = {layer: dict(layer.draws["default"]) for layer in tuner.layers()}
    singles = []
    set_sampling(model, "batch")
    tuner._held = True
    for k in range(3):
        for layer, factors in drawn.items():
            layer.draws["default"] = {which: value[k : k + 1] for which, value in factors.items()}
        with torch.no_grad():
            singles.append(model(**batch).logits)
    torch.testing.assert_close(together, torch.stack(singles), rtol=1e-4, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-4


def test_blocks_below_the_first_adapted_one_run_on_one_copy() -> None:
    model = make(layers_to_transform=[1], layers_pattern="layers", trained=True)
    seen: list[int] = []
    for block in model.get_base_model().model.layers:
        block.mlp.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    predict_proba(model, inputs("llama"), 5)
    assert seen == [BATCH, 5 * BATCH]


def test_the_same_generator_gives_the_same_predictions() -> None:
    model = make(trained=True)
    first = predict_proba(model, inputs("llama"), 4, generator=generator(1))
    assert torch.equal(first, predict_proba(model, inputs("llama"), 4, generator=generator(1)))
    assert not torch.equal(first, predict_proba(model, inputs("llama"), 4, generator=generator(2)))
    torch.testing.assert_close(first.sum(-1), torch.ones(BATCH))


def test_predictions_do_not_depend_on_the_batch_size() -> None:
    model = make(trained=True)
    whole = predict_proba(model, inputs("llama"), 4, generator=generator(1))
    rows = [
        predict_proba(model, {"input_ids": row[None]}, 4, generator=generator(1))
        for row in inputs("llama")["input_ids"]
    ]
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_real_token_answers(side: str) -> None:
    model = make(trained=True)
    short, long = torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10, 11, 12])
    pad = torch.zeros(2, dtype=torch.long)
    padded = torch.cat([pad, short] if side == "left" else [short, pad])
    mask = torch.cat([pad, torch.ones_like(short)] if side == "left" else [torch.ones_like(short), pad])
    batch = {"input_ids": torch.stack([padded, long]), "attention_mask": torch.stack([mask, torch.ones_like(long)])}
    choices = torch.tensor([3, 4, 9])
    found = predict_proba(model, batch, None, choices)
    for row, ids in zip(found, (short, long), strict=True):
        with torch.no_grad():
            alone = torch.softmax(model(input_ids=ids[None]).logits[0, -1, choices], -1)
        # left padding shifts positions of a model that is not told of them; rotary embeddings are relative
        torch.testing.assert_close(row, alone, rtol=1e-3, atol=1e-5)


def test_probabilities_are_averaged_and_not_logits() -> None:
    model = make(trained=True)
    samples = sampled_probs(model, inputs("llama"), 6, generator=generator())
    assert samples.shape == (6, BATCH, VOCABULARY)
    torch.testing.assert_close(predict_proba(model, inputs("llama"), 6, generator=generator()), samples.mean(0))
    parts = uncertainty_parts(samples)
    entropy = -(samples.mean(0).double() * samples.mean(0).double().log()).sum(-1)
    np.testing.assert_allclose(parts["total"], entropy, rtol=1e-5)
    assert (parts["epistemic"] > 0).all()


class Words:
    """A tokenizer: a word is a token; an unknown word is spelt by letters."""

    vocabulary: ClassVar = {f" w{i}": i for i in range(2, VOCABULARY)}

    def __call__(self, text: Any, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        if isinstance(text, str):
            words = [" " + word for word in text.split()]
            ids = [
                i
                for w in words
                for i in ([self.vocabulary[w]] if w in self.vocabulary else [2 + ord(c) % 50 for c in w])
            ]
            return {"input_ids": ids}
        rows = [self(one)["input_ids"] for one in text]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def decode(self, ids: list[int]) -> str:
        return chr(96 + ids[0] % 26)


def test_predictor_speaks_sklearn() -> None:
    model = make(trained=True)
    texts = ["w5 w6 w7", "w8 w9", "w10 w11 w12 w13", "w3 w2", "w20"]
    predictor = PosteriorPredictor(model, Words(), choices=[" w3", " w4", " w9"], n_samples=4, batch_size=2, seed=3)
    probs = predictor.predict_proba(texts)
    assert probs.shape == (5, 3)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        probs, PosteriorPredictor(model, Words(), [" w3", " w4", " w9"], 4, 5, 3).predict_proba(texts), atol=1e-5
    )
    found = predictor.predict(texts)
    assert found == [["w3", "w4", "w9"][i] for i in probs.argmax(1)]
    assert predictor.score(texts, found) == 1.0
    assert predictor.score(texts, ["w3"] * 5) == pytest.approx(np.mean([name == "w3" for name in found]))
    parts = predictor.uncertainty(texts)
    np.testing.assert_allclose(parts["total"], parts["aleatoric"] + parts["epistemic"], rtol=1e-6)
    assert predictor.choices == [" w3", " w4", " w9"]


def test_predictor_of_a_classifier_has_its_classes() -> None:
    model = make("bert", trained=True)
    predictor = PosteriorPredictor(model, Words(), n_samples=2)
    assert predictor.classes_ == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert predictor.predict_proba(["w5 w6", "w7"]).shape == (2, 3)


# --- plain LoRA in and out ---


@pytest.mark.parametrize("options", [{}, {"inducing": 4}, {**PUBLISHED}], ids=["tied", "m=r", "published"])
@pytest.mark.parametrize(
    "lora", [{}, {"use_rslora": True}, {"layers_to_transform": [1]}], ids=["lora", "rslora", "last"]
)
def test_from_lora_reproduces_it(options: dict[str, Any], lora: dict[str, Any], tmp_path: Path) -> None:
    trained = plain_lora(**lora)
    trained.save_pretrained(tmp_path)
    ours = from_lora(LLAMA.model(), tmp_path, **options).eval()
    torch.testing.assert_close(logits(ours, "llama"), logits(trained, "llama"), rtol=0, atol=1e-4)
    assert (logits(ours, "llama") - logits(LLAMA.model(), "llama")).abs().max() > 1e-2


def test_from_lora_takes_a_trained_head_along(tmp_path: Path) -> None:
    bert = ARCHITECTURES["bert"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["query"], modules_to_save=["classifier"])
    trained = get_peft_model(bert.model(), config).eval()
    disturb(trained, seed=1)
    trained.save_pretrained(tmp_path)
    ours = from_lora(bert.model(), tmp_path).eval()
    torch.testing.assert_close(logits(ours, "bert"), logits(trained, "bert"), rtol=0, atol=1e-4)


def stock_peft(folders: list[Path], tmp_path: Path) -> Tensor:
    """Logits of the folders on the base model in an interpreter that has peft and not acclimate."""
    LLAMA.model().save_pretrained(tmp_path / "base")
    pairs = [(tmp_path / "base", folder) for folder in folders]
    return torch.stack(logits_in_a_fresh_process(pairs, inputs("llama")["input_ids"].tolist(), tmp_path))


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["tied", "published"])
def test_exported_mean_and_draws_load_in_stock_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = make(trained=True, **options)
    mean = export_mean(model, tmp_path / "mean")
    samples = export_samples(model, tmp_path / "samples", 3, generator=generator(9))
    assert [p.name for p in samples] == ["sample-0", "sample-1", "sample-2"]
    found = stock_peft([mean, *samples], tmp_path)
    torch.testing.assert_close(found[0], logits(model, "llama"), rtol=0, atol=1e-5)
    ensemble = torch.softmax(found[1:, :, -1], -1).mean(0)
    torch.testing.assert_close(
        ensemble, predict_proba(model, inputs("llama"), 3, generator=generator(9)), rtol=1e-4, atol=1e-6
    )
    for folder in (mean, *samples):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
        assert not config["rank_pattern"]
        assert not config["alpha_pattern"]
        assert config["bias"] == "none"
        assert not config["use_dora"]
        assert config["modules_to_save"] is None
        weights = load_file(folder / "adapter_model.safetensors")
        assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in weights)
        assert {4} == {w.shape[0] if "lora_A" in k else w.shape[1] for k, w in weights.items()}


def test_exported_draws_without_variance_are_the_mean(tmp_path: Path) -> None:
    model = make(trained=True, max_sd=0.0, max_lambda=0.0)
    mean = load_file(export_mean(model, tmp_path / "mean") / "adapter_model.safetensors")
    (sample,) = export_samples(model, tmp_path / "samples", 1)
    assert all(torch.equal(value, mean[key]) for key, value in load_file(sample / "adapter_model.safetensors").items())


@pytest.mark.parametrize(
    "options", [PUBLISHED, {**PUBLISHED, "flow": "maf"}, {"posterior": "full"}, {"posterior": "ensemble"}], ids=str
)
def test_other_forms_save_load_and_merge(options: dict[str, Any], tmp_path: Path) -> None:
    model = make(trained=True, **options)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(LLAMA.model(), str(tmp_path)).eval()
    expected = logits(model, "llama")
    assert torch.equal(logits(loaded, "llama"), expected)
    again = [predict_proba(m, inputs("llama"), 3, generator=generator()) for m in (model, loaded)]
    assert torch.equal(*again)
    torch.testing.assert_close(logits(model.merge_and_unload(), "llama"), expected, rtol=1e-4, atol=1e-5)


def test_the_published_form_starts_at_the_base_model() -> None:
    torch.testing.assert_close(logits(make(**PUBLISHED), "llama"), logits(LLAMA.model(), "llama"), rtol=0, atol=1e-6)


# --- training ---


class Ours(BayesianTrainerMixin, Trainer):
    pass


def trainer_rows(count: int = 8) -> list[dict[str, Tensor]]:
    ids = torch.randint(2, VOCABULARY, (count, 6), generator=generator(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(tmp_path: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 0.0,
    }
    return TrainingArguments(str(tmp_path), **{**defaults, **options})


def test_trainer_logs_the_loss_and_the_kl_apart(tmp_path: Path) -> None:
    model = make(kl_weight=0.2)
    trainer = Ours(model, arguments(tmp_path), train_dataset=trainer_rows())
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["beta"] for row in rows] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.2])
    first = kl_divergence(make(kl_weight=0.2))
    assert rows[0]["kl_cond"] == pytest.approx(first.conditional.item(), rel=0.01)
    assert rows[0]["loss"] < 10 < rows[0]["kl_cond"]  # the loss has no KL in it


def test_the_kl_is_added_once_a_step(tmp_path: Path) -> None:
    """One SGD step of two micro-batches: minus lr times (gradient of the loss + beta KL / N), each once."""
    options = {"max_sd": 0.0, "max_lambda": 0.0, "kl_schedule": (0.0, 0.0), "kl_weight": 5.0, "n_train": 10}
    model = make(**options)
    disturb(model, seed=1)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    rows = trainer_rows(4)
    ids = torch.stack([row["input_ids"] for row in rows])
    value = model(input_ids=ids, labels=ids).loss + kl_loss(model, 0.0)
    value.backward()
    expected = {name: start[name] - 0.5 * model.get_parameter(name).grad for name in start}
    model.zero_grad()
    trainer = Ours(
        model,
        arguments(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        train_dataset=rows,
        optimizers=(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), None),
    )
    trainer.train()
    for name, wanted in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted, rtol=1e-4, atol=1e-6)


def test_weight_decay_spares_the_noise(tmp_path: Path) -> None:
    trainer = Ours(make(), arguments(tmp_path, weight_decay=0.1), train_dataset=trainer_rows())
    decayed = trainer.get_decay_parameter_names(trainer.model)
    assert any("blora_A" in name for name in decayed)
    assert not any("blora_posterior_" in name for name in decayed)


def test_the_weight_of_the_kl_rises_between_its_two_shares() -> None:
    config = BayesianLoraConfig(kl_weight=0.4, kl_schedule=(0.25, 0.75))
    assert [config.beta(x) for x in (0, 0.2, 0.25, 0.5, 0.75, 1)] == pytest.approx([0, 0, 0, 0.2, 0.4, 0.4])
    model = make(kl_weight=0.4, kl_schedule=(0.0, 0.0), n_train=50)
    assert kl_loss(model, 0.0).item() == pytest.approx(0.4 * kl_divergence(model).total.item() / 50)


def drawn_step(rank: int, world: int, output: str) -> None:
    """One SGD step of this rank's rows, with a draw and the KL; rank 0 saves the weights."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=world)
    model = make(trained=True, kl_schedule=(0.0, 0.0)).train()
    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    share = BATCH // world
    torch.manual_seed(6)  # as a trainer sets it on every rank: the ranks share the draw
    for _ in range(2):  # the second forward pass is where DDP would miss a parameter without gradient
        model.zero_grad()
        loss(parallel, "llama", slice(rank * share, (rank + 1) * share)).backward()
    state = type("State", (), {"global_step": 0, "max_steps": 1})
    KLCallback().on_pre_optimizer_step(None, state, None, model=model)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    if rank == 0:
        save_file({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}, output)
    leave()


def test_two_processes_with_one_draw_equal_one(tmp_path: Path) -> None:
    found = {}
    for world in (1, 2):
        output = tmp_path / f"{world}.safetensors"
        torch.multiprocessing.spawn(drawn_step, (world, str(output)), nprocs=world)
        found[world] = load_file(output)
    for key, value in found[1].items():
        torch.testing.assert_close(found[2][key], value, rtol=1e-4, atol=1e-5)


# --- what it refuses, and what it repairs ---


def test_the_kl_needs_the_number_of_examples(tmp_path: Path) -> None:
    model = make(n_train=None)
    with pytest.raises(ValueError, match="n_train"):
        kl_loss(model, 1.0)
    with pytest.raises(ValueError, match="n_train"):
        Ours(model, arguments(tmp_path), train_dataset=trainer_rows()).train()
    assert kl_loss(make(n_train=None, kl_weight=0.0), 1.0) == 0


@pytest.mark.parametrize("inducing_values", [3, (3, 6), (6, 3)])
@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["tied", "published"])
def test_fewer_inducing_values_than_the_rank_warn_and_still_work(inducing_values: Any, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="cannot represent every LoRA factor"):
        model = make(inducing=inducing_values, trained=True, **options)
    loss(model.train(), "llama").backward()
    assert math.isfinite(kl_divergence(model).total.item())


def test_from_lora_refuses_what_it_cannot_represent(tmp_path: Path) -> None:
    plain_lora().save_pretrained(tmp_path / "plain")
    with (
        pytest.warns(UserWarning, match="cannot represent"),
        pytest.raises(ValueError, match="less than the LoRA's rank 4"),
    ):
        from_lora(LLAMA.model(), tmp_path / "plain", inducing=3)
    plain_lora(use_dora=True).save_pretrained(tmp_path / "dora")
    with pytest.raises(ValueError, match="use_dora"):
        from_lora(LLAMA.model(), tmp_path / "dora")
    plain_lora(rank_pattern={"q_proj": 2}).save_pretrained(tmp_path / "pattern")
    with pytest.raises(ValueError, match="rank_pattern"):
        from_lora(LLAMA.model(), tmp_path / "pattern")
    make().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="plain LoRA"):
        from_lora(LLAMA.model(), tmp_path / "ours")


def test_a_singular_matrix_gets_as_little_jitter_as_it_needs() -> None:
    rows = torch.randn(2, 3, generator=generator(), dtype=torch.float64)
    singular = torch.cat([rows, rows]) @ torch.cat([rows, rows]).T
    factor = inducing.cholesky(torch.stack([singular, torch.eye(4, dtype=torch.float64)]))
    size = singular.diagonal().mean()
    torch.testing.assert_close(factor[0] @ factor[0].T, singular + 1e-6 * size * torch.eye(4, dtype=torch.float64))
    assert torch.equal(factor[1], torch.eye(4, dtype=torch.float64))


def test_an_indefinite_matrix_gets_its_eigenvalues_raised() -> None:
    indefinite = torch.diag(torch.tensor([4.0, 2.0, -3.0], dtype=torch.float64))
    factor = inducing.cholesky(torch.stack([indefinite, 2 * torch.eye(3, dtype=torch.float64)]))
    expected = torch.diag(torch.tensor([4.0, 2.0, 0.01], dtype=torch.float64))
    torch.testing.assert_close(factor[0] @ factor[0].T, expected)
    assert (factor[0].diagonal() > 0).all()
    assert (factor[0].triu(1).abs() < 1e-12).all()
    torch.testing.assert_close(factor[1], math.sqrt(2) * torch.eye(3, dtype=torch.float64))


def test_numbers_that_are_not_finite_name_their_layer() -> None:
    model = make(trained=True).train()
    with torch.no_grad():
        tuner_of(model).layers()[3].blora_A["default"].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj"):
        model(**inputs("llama"))


def test_a_choice_of_several_tokens_lists_its_pieces() -> None:
    assert choice_token_ids(Words(), [" w3", " w12"]).tolist() == [3, 12]
    with pytest.raises(ValueError, match=r"' zebra' is 6 tokens \('"):
        choice_token_ids(Words(), [" w3", " zebra"])
    with pytest.raises(ValueError, match="must be one"):
        PosteriorPredictor(make(), Words(), choices=["w3 w4", "w5"])


@pytest.mark.parametrize("n", [0, -1])
def test_fewer_than_one_sample_is_refused(n: int, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(ValueError, match="at least 1"):
        predict_proba(model, inputs("llama"), n)
    with pytest.raises(ValueError, match="at least 1"):
        export_samples(model, tmp_path, n)
    with pytest.raises(ValueError, match="at least 1"):
        PosteriorPredictor(model, Words(), n_samples=n)


def test_a_merge_with_sampling_on_merges_the_mean_and_warns_once() -> None:
    model = make(trained=True)
    mean = logits(model, "llama")
    set_sampling(model, "batch")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.merge_adapter()
    assert len([w for w in seen if "the posterior mean is merged" in str(w.message)]) == 1
    torch.testing.assert_close(logits(model, "llama"), mean, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    plain = copy.deepcopy(model)
    set_sampling(plain, None)
    base = plain.merge_and_unload()
    torch.testing.assert_close(logits(base, "llama"), mean, rtol=1e-4, atol=1e-5)
    assert not base._forward_pre_hooks


def test_weights_of_another_number_of_inducing_values_are_refused(tmp_path: Path) -> None:
    make(inducing=6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "inducing": 5}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(LLAMA.model(), str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flow": "maf"}, "free mean"),
        ({"flow": "maf", "parameterization": "published", "posterior": "full"}, "diagonal"),
        ({"flow": "glow"}, "flow is one of"),
        ({"posterior": "laplace"}, "posterior is one of"),
        ({"parameterization": "free"}, "parameterization is one of"),
        ({"train": "nothing"}, "train is one of"),
        ({"r": 0}, "at least 1"),
        ({"max_lambda": -0.1}, "max_lambda"),
        ({"max_sd": math.inf}, "max_sd"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"kl_schedule": (0.7, 0.3)}, "kl_schedule"),
        ({"n_train": 0}, "n_train"),
        ({"inducing": 0}, "inducing"),
        ({"prior_sd": 0.0}, "prior_sd"),
        ({"members": 0}, "members"),
        ({"layers_to_transform": [0], "target_modules": ".*q_proj"}, "list of names"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BayesianLoraConfig(**options)


def test_only_linear_layers_can_be_adapted() -> None:
    with pytest.raises(TypeError, match=r"'model\.embed_tokens' is Embedding"):
        make(target_modules=["embed_tokens"])


def test_other_models_and_modes_are_refused() -> None:
    with pytest.raises(TypeError, match="has no Bayesian-LoRA"):
        kl_divergence(plain_lora())
    with pytest.raises(ValueError, match="per_example"):
        set_sampling(make(), "always")  # type: ignore[arg-type]


def test_a_layer_asked_without_its_model_says_so() -> None:
    model = make(trained=True)
    set_sampling(model, "batch")
    with pytest.raises(RuntimeError, match="call the PEFT model"):
        tuner_of(model).layers()[0](torch.zeros(1, 2, 32))


def test_draws_must_divide_the_batch() -> None:
    model = make(trained=True)
    layer = tuner_of(model).layers()[0]
    with (
        torch.no_grad(),
        tuner_of(model).posterior_samples(3),
        pytest.raises(ValueError, match="do not divide a batch of 4"),
    ):
        layer(torch.zeros(4, 2, 32))
