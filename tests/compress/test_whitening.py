"""Shift-aware whitening is the best that its rank allows, and the interface refuses what it cannot do."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from acclimate.compress import ShiftAwareCompressor, compress_low_rank, whitening
from acclimate.compress.blocks import Group
from acclimate.compress.low_rank_linear import LowRankLinear
from acclimate.compress.text import calibration_batches, perplexity, token_loss, windows
from acclimate.compress.whitening import (
    dead_inputs,
    energy_ranks,
    factors,
    misalignment,
    uniform_rank,
    whiten,
)
from acclimate.errors import InputError
from compress.small import ids, inputs_of, llama, random

OPTIONS: dict[str, Any] = {"progress": False}


@pytest.fixture
def no_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whitening, "RIDGE", 0.0)


def group(current: Tensor, original: Tensor | None = None, root: bool = False) -> Group:
    """Moments of rows x^ (T, n), and of x."""
    count = len(current)
    return Group(
        ["a"],
        count,
        None if root else current.T @ current / count,
        torch.linalg.qr(current, mode="r").R if root else None,
        None if original is None else original.T @ current / count,
    )


def low_rank(W: Tensor, found: Group, rank: int, beta: float = 0.0, solver: Any = "eigh") -> Tensor:
    w = whiten(found, beta, solver)
    B, A, _ = factors(W @ w.K, w.S_inv, rank)
    return B @ A


def rows(n: int = 10, count: int = 60, seed: int = 0) -> Tensor:
    """Correlated inputs (count, n) of unequal sizes."""
    return random(count, n, seed=seed) @ random(n, n, seed=seed + 100) * torch.logspace(-1, 1, n, dtype=torch.float64)


# --- the mathematics ---


@pytest.mark.usefixtures("no_ridge")
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), m=st.sampled_from([6, 10, 15]), rank=st.integers(1, 5))
def test_the_dropped_energy_is_the_error_and_nothing_is_better(seed: int, m: int, rank: int) -> None:
    X, W = rows(seed=seed), random(m, 10, seed=seed + 1)
    found = group(X)
    w = whiten(found)
    B, A, sigma = factors(W @ w.K, w.S_inv, rank)

    def error(low: Tensor) -> float:
        return float(((W - low) @ X.T).square().sum() / len(X))

    least = error(B @ A)
    assert least == pytest.approx(float(sigma[rank:].square().sum()), rel=1e-8)
    for number in range(200):
        assert error(random(m, rank, seed=number) @ random(rank, 10, seed=number + 500)) > least
        assert (
            error((B + 1e-3 * random(m, rank, seed=number)) @ (A + 1e-3 * random(rank, 10, seed=number + 500))) > least
        )
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    assert error(U[:, :rank] * s[:rank] @ Vt[:rank]) > least
    scale = X.abs().mean(0).sqrt()  # ASVD
    U, s, Vt = torch.linalg.svd(W * scale, full_matrices=False)
    assert error(U[:, :rank] * s[:rank] @ Vt[:rank] / scale) > least
    assert error(low_rank(W, group(rows(seed=seed + 7)), rank)) > least  # whitened with other inputs
    assert misalignment(W, B @ A, w.S, rank) == pytest.approx(1, rel=1e-6)
    assert misalignment(W, low_rank(W, group(rows(seed=seed + 7)), rank), w.S, rank) > 1


@pytest.mark.parametrize("shape", [(6, 10), (10, 10), (14, 10)])
def test_full_rank_gives_the_layer_back(shape: tuple[int, int]) -> None:
    W = random(*shape)
    torch.testing.assert_close(low_rank(W, group(rows()), min(shape)), W, rtol=1e-10, atol=1e-10)
    # also where the inputs span half of the space, which they cannot tell apart from the rest
    flat = rows()[:, :5] @ random(5, 10)
    torch.testing.assert_close(low_rank(W, group(flat), min(shape)) @ flat.T, W @ flat.T, rtol=1e-8, atol=1e-8)


def test_white_inputs_give_the_plain_svd_and_uncorrelated_ones_that_of_scaled_columns() -> None:
    W, scale = random(8, 10), torch.logspace(-1, 1, 10, dtype=torch.float64)

    def cut(matrix: Tensor) -> Tensor:
        U, s, Vt = torch.linalg.svd(matrix, full_matrices=False)
        return U[:, :3] * s[:3] @ Vt[:3]

    white = Group(["a"], 100, torch.eye(10, dtype=torch.float64), None, None)
    torch.testing.assert_close(low_rank(W, white, 3), cut(W))
    loose = Group(["a"], 100, torch.diag(scale.square()), None, None)
    ridged = (scale.square() + 1e-6 * scale.square().mean()).sqrt()
    torch.testing.assert_close(low_rank(W, loose, 3), cut(W * ridged) / ridged)


@pytest.mark.parametrize("solver", ["eigh", "cholesky"])
def test_whitened_inputs_are_white_and_solvers_agree(solver: Any) -> None:
    X, original, W = rows(), rows(seed=3), random(8, 10)
    found = group(X, original)
    w = whiten(found, solver=solver)
    assert found.gram is not None
    ridge = 1e-6 * found.gram.trace() / 10 * torch.eye(10, dtype=torch.float64)
    eye = torch.eye(10, dtype=torch.float64)
    torch.testing.assert_close(w.S_inv @ (found.gram + ridge) @ w.S_inv.T, eye, rtol=1e-8, atol=1e-8)
    for beta in (0.0, 0.7):
        by_qr = low_rank(W, group(X, original, root=True), 4, beta)
        torch.testing.assert_close(low_rank(W, found, 4, beta, solver), by_qr, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("no_ridge")
def test_beta_is_least_squares_towards_the_original_outputs() -> None:
    """The best rank-r map from x^ to t: least squares, then an SVD of the fitted outputs."""
    X, Xhat, W = rows(), rows() + 0.5 * rows(seed=5), random(8, 10)
    for beta in (0.25, 1.0):
        T = (1 - beta) * Xhat @ W.T + beta * X @ W.T
        least = torch.linalg.lstsq(Xhat, T).solution  # (n, m)
        _, _, Vt = torch.linalg.svd(Xhat @ least, full_matrices=False)
        expected = (least @ Vt[:3].T @ Vt[:3]).T
        torch.testing.assert_close(low_rank(W, group(Xhat, X), 3, beta), expected, rtol=1e-7, atol=1e-9)


def test_beta_has_no_effect_where_the_streams_agree() -> None:
    X, W = rows(), random(8, 10)
    for beta in (0.0, 0.5, 1.0):
        torch.testing.assert_close(low_rank(W, group(X, X), 3, beta), low_rank(W, group(X), 3), rtol=1e-8, atol=1e-10)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_rotating_the_inputs_rotates_the_result(seed: int) -> None:
    X, original, W = rows(seed=seed), rows(seed=seed + 1), random(8, 10)
    Q = torch.linalg.qr(random(10, 10, seed=seed)).Q
    plain = low_rank(W, group(X, original), 4, 0.5)
    torch.testing.assert_close(
        low_rank(W @ Q.T, group(X @ Q.T, original @ Q.T), 4, 0.5), plain @ Q.T, rtol=1e-7, atol=1e-8
    )


@settings(deadline=None)
@given(seed=st.integers(0, 1000), ratio=st.floats(0.1, 0.8))
def test_energy_ranks_spend_the_budget_and_lose_no_more_than_uniform(seed: int, ratio: float) -> None:
    random_numbers = np.random.default_rng(seed)
    shapes = {f"l{i}": tuple(random_numbers.integers(8, 40, 2).tolist()) for i in range(5)}
    spectra = {
        name: torch.tensor(np.sort(random_numbers.exponential(size=min(shape)) ** 3)[::-1].copy())
        for name, shape in shapes.items()
    }
    ranks, loss, uniform = energy_ranks(spectra, shapes, ratio)
    assert loss <= uniform
    budget = sum(uniform_rank(*shapes[name], ratio) * sum(shapes[name]) for name in shapes)
    spent = sum(ranks[name] * sum(shapes[name]) for name in shapes)
    assert budget - spent >= 0
    capped = all((ranks[n] + 1) * sum(shapes[n]) >= shapes[n][0] * shapes[n][1] for n in shapes)
    assert budget - spent < max(sum(shape) for shape in shapes.values()) or capped
    share = sum(float(spectra[n][ranks[n] :].sum() / spectra[n].sum()) for n in shapes)
    assert loss == pytest.approx(share)


def test_dead_inputs() -> None:
    X = rows()
    X[:, [2, 7]] = 0
    for root in (False, True):
        assert dead_inputs(group(X, root=root)).nonzero()[:, 0].tolist() == [2, 7]
    with pytest.raises(torch.linalg.LinAlgError):
        whiten(group(torch.zeros(20, 4, dtype=torch.float64)))


# --- a whole model ---


def weights(model: Any) -> dict[str, Tensor]:
    return {name: part.weight for name, part in model.named_modules() if isinstance(part, LowRankLinear)}


def test_the_first_group_is_the_same_however_statistics_are_refreshed() -> None:
    made = {}
    for refresh in ("group", "block", "none"):
        made[refresh] = llama(dtype=torch.float64)
        compress_low_rank(made[refresh], ids(), 0.4, beta=0, refresh=refresh, **OPTIONS)  # type: ignore[arg-type]
    found = {refresh: weights(model) for refresh, model in made.items()}
    for kind in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{kind}_proj"
        torch.testing.assert_close(found["none"][name], found["group"][name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found["block"][name], found["group"][name], rtol=1e-9, atol=1e-12)
    for name in found["group"].keys() - {f"model.layers.0.self_attn.{kind}_proj" for kind in ("q", "k", "v")}:
        assert not torch.allclose(found["none"][name], found["group"][name], rtol=1e-3)


def test_each_layer_is_the_best_of_its_rank_under_the_inputs_it_has_in_the_end() -> None:
    model = llama(dtype=torch.float64)
    originals = {name: copy.deepcopy(part) for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    report = compress_low_rank(model, ids(), 0.4, beta=0, **OPTIONS)
    seen = inputs_of(model, [row["name"] for row in report.layers], [{"input_ids": ids()}])
    for row in report.layers:
        W, X = originals[row["name"]].weight.detach(), seen[row["name"]]
        # the few inputs of the small model that hardly vary are told apart by the ridge
        ridge = (1e-6 * X.square().sum() / X.shape[1]).sqrt() * torch.eye(X.shape[1], dtype=torch.float64)
        ridged = torch.cat([X, ridge])
        outputs = torch.linalg.svdvals(W @ ridged.T).square()
        left = ((W - weights(model)[row["name"]].detach()) @ ridged.T).square().sum()
        assert float(left / outputs[row["rank"] :].sum()) == pytest.approx(1, rel=1e-8)
        assert row["local"] == pytest.approx(float((outputs[row["rank"] :].sum() / outputs.sum()).sqrt()), rel=1e-8)
        assert row["misalignment"] == pytest.approx(1, rel=1e-6)
        m, n = W.shape
        assert row["rank"] == int(0.6 * m * n / (m + n))


def test_targets_ranks_allocation_and_beta() -> None:
    model = llama()
    report = compress_low_rank(model, ids(), 0.3, targets=["down_proj", "model.layers.1.self_attn.q_proj"], **OPTIONS)
    assert [row["name"] for row in report.layers] == [
        "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    given = {"model.layers.0.mlp.down_proj": 5}
    model = llama()
    report = compress_low_rank(model, ids(), ranks=given, **OPTIONS)
    assert {row["name"]: row["rank"] for row in report.layers} == given
    assert (report.layer_parameters_before, report.layer_parameters_after, report.kept) == (32 * 48, 5 * 80, {})
    assert report.parameters_before - report.parameters_after == 32 * 48 - 5 * 80
    model = llama()
    energy = compress_low_rank(model, ids(), 0.3, allocation="energy", **OPTIONS)
    assert energy.layer_parameters_after <= 0.7 * energy.layer_parameters_before
    assert len({row["rank"] for row in energy.layers if row["shape"] == [48, 32]}) > 1
    model = llama()
    auto = compress_low_rank(model, ids(20), 0.3, beta="auto", **OPTIONS)
    losses = auto.settings["losses"]
    assert auto.settings["beta"] == float(min(losses, key=losses.get))
    assert len(losses) == 5


def test_beta_auto_scores_what_it_held_out() -> None:
    model = llama()
    held = ids(20)[18:]
    auto = compress_low_rank(model, ids(20), 0.3, beta="auto", **OPTIONS)
    for beta, loss in auto.settings["losses"].items():
        alone = llama()
        compress_low_rank(alone, ids(20)[:18], 0.3, beta=float(beta), **OPTIONS)
        assert token_loss(alone, [{"input_ids": held}]) == pytest.approx(loss, rel=1e-5)


def test_few_tokens_are_whitened_by_qr_with_a_warning() -> None:
    model = llama()
    with pytest.warns(
        UserWarning, match=r"fewer calibration tokens than inputs for 2 layers, e.g. 'model.layers.0.mlp.down_proj'"
    ):
        report = compress_low_rank(model, ids(2, 20), 0.3, **OPTIONS)  # 40 tokens: more than 32, fewer than 48
    assert all(row["rank"] and np.isfinite(row["error"]) for row in report.layers)


def test_dead_inputs_are_counted_and_their_weights_are_zero() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[[3, 11]] = 0  # silu(0) = 0
    with pytest.warns(UserWarning, match="2 inputs of layers were zero for every calibration token"):
        report = compress_low_rank(model, ids(), 0.3, refresh="block", **OPTIONS)
    row = {row["name"]: row for row in report.layers}["model.layers.0.mlp.down_proj"]
    assert row["dead_inputs"] == 2
    assert model.model.layers[0].mlp.down_proj.first.weight[:, [3, 11]].abs().max() == 0


def test_the_report_can_be_read_and_kept() -> None:
    model = llama()
    report = compress_low_rank(model, ids(), 0.3, refresh="none", beta=0, **OPTIONS)
    again = json.loads(report.to_json())
    assert again["layers"] == report.layers
    assert again["parameters_after"] == sum(p.numel() for p in model.parameters())
    lines = report.table().split("\n")
    assert len(lines) == 1 + len(report.layers)
    assert lines[1].split()[:2] == ["model.layers.0.self_attn.q_proj", str(report.layers[0]["rank"])]


def test_fit_leaves_the_model_and_transform_changes_a_copy() -> None:
    model = llama()
    plain = model(ids()).logits
    fitted = ShiftAwareCompressor(0.4, progress=False).fit(model, ids())
    assert torch.equal(model(ids()).logits, plain)
    assert not weights(model)
    direct = llama()
    compress_low_rank(direct, ids(), 0.4, **OPTIONS)
    changed = fitted.transform(copy.deepcopy(model))
    assert torch.equal(changed(ids()).logits, direct(ids()).logits)
    with torch.no_grad():  # nothing is shared with what was fitted
        changed.model.layers[0].mlp.up_proj.first.weight.zero_()
    assert torch.equal(fitted.transform(model)(ids()).logits, direct(ids()).logits)
    with pytest.raises(ValueError, match=r"has no layer 'model.layers.0.self_attn.q_proj'"):
        fitted.transform(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "between 0 and 1, not 0"),
        ({"ratio": 1.0}, "between 0 and 1, not 1"),
        ({"beta": 2.0}, "beta is a number from 0 to 1"),
        ({"refresh": "layer"}, "refresh is one of group, block, none, not 'layer'"),
        ({"allocation": "x"}, "allocation is one of"),
        ({"solver": "x"}, "solver is one of"),
        ({"clip_norm": 1.5}, "clip_norm is a quantile"),
        ({"targets": ["nothing"]}, "leave no layer. Linear layers in the blocks: down_proj, gate_proj, k_proj"),
        ({"ranks": {"a": 1}}, "names 'a', which is no layer"),
        ({"ranks": {"model.layers.0.mlp.up_proj": 99}}, "is 1 to 32, not 99"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    model = llama()
    with pytest.raises(ValueError, match=message):
        compress_low_rank(model, ids(), **{**options, **OPTIONS})
    assert not weights(model)


def test_a_compressed_model_is_not_compressed_again() -> None:
    model = llama()
    compress_low_rank(model, ids(), **OPTIONS)
    with pytest.raises(ValueError, match="has low-rank layers already"):
        compress_low_rank(model, ids(), **OPTIONS)


def test_calibration_as_ids_texts_and_batches(tiny_lm: Any) -> None:
    from transformers import AutoTokenizer

    model = llama()
    assert [tuple(b["input_ids"].shape) for b in calibration_batches(ids(5, 1000), model)] == [
        (2, 1000),
        (2, 1000),
        (1, 1000),
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    texts = ["the sky is blue", "a leaf", "", "the rose " * 60]
    batches = calibration_batches((tokenizer, texts), model)
    assert sum(int(b["attention_mask"].sum()) for b in batches) == sum(
        min(64, len(tokenizer(t)["input_ids"])) for t in texts
    )
    given = [{"input_ids": ids(2)}]
    assert torch.equal(calibration_batches(iter(given), model)[0]["input_ids"], ids(2))
    for wrong, message in (
        (torch.zeros(3), "must be integers"),
        ((tokenizer, [""]), "the calibration text is empty"),
        ([], "got list with nothing in it"),
        (["text"], "got list"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration_batches(wrong, model)


# --- text ---


def test_windows_and_perplexity(tiny_lm: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    text = "the sky is blue and the rose is red " * 20
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = windows(tokenizer, text, 100, 16)
    assert rows.flatten().tolist() == whole[: len(whole) // 16 * 16]
    drawn = windows(tokenizer, text, 7, 16, seed=1)
    assert drawn.shape == (7, 16)
    assert torch.equal(drawn, windows(tokenizer, text, 7, 16, seed=1))
    assert all(row.tolist() in [whole[i : i + 16] for i in range(len(whole))] for row in drawn)
    with pytest.raises(InputError, match="less than one window of 1000"):
        windows(tokenizer, text, 1, 1000)
    model, batch = llama(), ids(5, 12)
    losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in batch]
    assert perplexity(model, batch) == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-5)
    mask = torch.ones_like(batch)
    mask[1:, 6:] = 0
    first = float(model(input_ids=batch[:1], labels=batch[:1]).loss) * 11
    rest = sum(float(model(input_ids=row[None, :6], labels=row[None, :6]).loss) * 5 for row in batch[1:])
    assert token_loss(model, [{"input_ids": batch, "attention_mask": mask}]) == pytest.approx(
        (first + rest) / 31, rel=1e-5
    )
