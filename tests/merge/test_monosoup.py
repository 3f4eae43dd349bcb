"""MonoSoup: the edit against closed forms, its symmetries, LoRA, files, and the baselines."""

from __future__ import annotations

import json
import math
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate.errors import InputError
from acclimate.merge import monosoup_, monosoup_adapter, monosoup_checkpoint
from acclimate.merge.adapter_files import WEIGHTS
from acclimate.merge.baselines import greedy_soup, lines, low_rank_truncate, model_stock, uniform_soup, wise_ft
from acclimate.merge.checkpoints import open_checkpoint
from acclimate.merge.monosoup import (
    SoupSettings,
    monosoup,
    plan_soup,
    soup_delta,
    soup_lora,
    soup_tensor,
    weights_of,
)
from acclimate.runs import PARTIAL
from merge import worker
from merge.synthetic import adapter, deltas, write

SVD, GRAM = SoupSettings(solver="svd"), SoupSettings(solver="gram")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthonormal(m: int, n: int, seed: int) -> Tensor:
    return torch.linalg.qr(seeded(m, n, seed=seed)).Q


def with_spectrum(m: int, n: int, sigma: list[float], seed: int = 0) -> Tensor:
    r = len(sigma)
    values = torch.tensor(sigma, dtype=torch.float64)
    return (orthonormal(m, r, seed) * values) @ orthonormal(n, r, seed + 1).T


def distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


# --- closed forms ---


@pytest.mark.parametrize("solver", ["svd", "gram"])
@pytest.mark.parametrize("sigma", [[2.5], [3.0] * 5, [1.0] * 20])
def test_no_edit_for_rank_one_and_flat_spectra(solver: Any, sigma: list[float]) -> None:
    base, delta = seeded(30, 20, seed=7), with_spectrum(30, 20, sigma)
    value, row = soup_tensor(base, base + delta, SoupSettings(solver=solver))
    assert distance(value, base + delta) < 1e-6
    assert (row["k"], row["q"]) == (len(sigma), len(sigma))
    assert row["lambda_high"] == pytest.approx(1, abs=1e-6)
    assert row["effective_rank"] == pytest.approx(len(sigma), abs=1e-4)


def test_no_change_is_skipped() -> None:
    base = seeded(5, 4)
    value, row = soup_tensor(base, base.clone())
    assert torch.equal(value, base)
    assert row == {"skipped": "unchanged"}
    small = base + 0.9e-6 * base.norm() * with_spectrum(5, 4, [1.0])
    value, row = soup_tensor(base, small)
    assert value is small
    assert row == {"skipped": "unchanged"}
    _, row = soup_tensor(base, base + 1.1e-6 * base.norm() * with_spectrum(5, 4, [1.0]))
    assert "skipped" not in row


def test_a_base_of_zeros_is_edited() -> None:
    tuned = with_spectrum(12, 10, [10, 1, 0.1])
    value, row = soup_tensor(torch.zeros(12, 10, dtype=torch.float64), tuned)
    assert row["relative_norm"] is None
    assert distance(value, tuned) > 1e-3


def test_hand_case_of_four_values() -> None:
    edit = weights_of(torch.tensor([3.0, 1.0, 1.0, 1.0]))
    assert math.log(edit.effective_rank) == pytest.approx(math.log(2) / 2 + math.log(6) / 2)
    assert edit.effective_rank == pytest.approx(math.sqrt(12))
    assert (edit.k, edit.q, edit.rho, edit.energy, edit.lambda_low, edit.lambda_high) == (4, 4, 0, 1, 0, 1)
    base, delta = seeded(9, 7), with_spectrum(9, 7, [3, 1, 1, 1])
    value, _ = soup_tensor(base, base + delta)
    assert torch.equal(value, base + delta)


@pytest.mark.parametrize("solver", ["svd", "gram"])
def test_hand_case_of_three_values(solver: Any) -> None:
    shares = [10 / 11.1, 1 / 11.1, 0.1 / 11.1]
    e = math.exp(-sum(p * math.log(p) for p in shares))
    rho = 1e-4
    low = rho + (1 - rho) * math.sqrt(0.01 / 101.01)
    u, v, base = orthonormal(20, 3, 3), orthonormal(15, 3, 4), seeded(20, 15)
    delta = (u * torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64)) @ v.T
    value, row = soup_tensor(base, base + delta, SoupSettings(solver=solver))
    assert 1 < e < 2
    assert row["effective_rank"] == pytest.approx(e, rel=1e-6)
    assert (row["k"], row["q"]) == (2, 3)
    assert row["energy"] == pytest.approx(101 / 101.01)
    assert row["rho"] == pytest.approx(rho, rel=1e-6)
    assert row["lambda_low"] == pytest.approx(low, rel=1e-6) == pytest.approx(0.01005, abs=1e-5)
    weights = torch.tensor([10 * (1 - low), 1 - low, 0.1 * low], dtype=torch.float64)
    assert distance(value - base, (u * weights) @ v.T) < 1e-9
    assert row["relative_norm"] == pytest.approx(math.sqrt(101.01) / float(base.norm()))


def test_variance_mode_keeps_the_share_that_was_asked_for() -> None:
    sigma = torch.tensor([3.0, 2.0, 2.0, 1.0])  # squares 9, 4, 4, 1 of 18
    shares = {0.4: 1, 0.5: 1, 0.6: 2, 13 / 18: 2, 0.8: 3, 17 / 18: 3, 0.95: 4, 1.0: 4}
    for energy, k in shares.items():
        assert weights_of(sigma, "variance", energy).k == k
    edit = weights_of(sigma, "variance", 0.8)
    assert edit.energy == pytest.approx(17 / 18)
    assert edit.rho == pytest.approx(1 / 9)
    assert edit.lambda_low == pytest.approx(1 / 9 + 8 / 9 * math.sqrt(1 / 18))


# --- properties ---


spectra = st.lists(st.floats(1e-3, 10), min_size=2, max_size=12)


@settings(max_examples=50, deadline=None)
@given(spectra, st.sampled_from(["effective-rank", "variance"]), st.floats(0.05, 1))
def test_the_two_weights(sigma: list[float], mode: Any, energy: float) -> None:
    edit = weights_of(torch.tensor(sorted(sigma, reverse=True)), mode, energy)
    assert edit.lambda_low + edit.lambda_high == pytest.approx(1, abs=1e-15)
    assert 0 <= edit.lambda_low <= 1
    assert 0 <= edit.lambda_high <= 1
    assert 1 <= edit.k <= edit.q <= len(sigma)
    assert 0 < edit.energy <= 1


@settings(max_examples=25, deadline=None)
@given(spectra, st.integers(0, 100), st.sampled_from(["svd", "gram"]))
def test_the_edit_shrinks_and_stays_in_the_span(sigma: list[float], seed: int, solver: Any) -> None:
    delta = with_spectrum(16, 14, sorted(sigma, reverse=True), seed)
    new, _ = soup_delta(delta, SoupSettings(solver=solver))
    assert new.norm() <= delta.norm() * (1 + 1e-12)
    u, _, vt = torch.linalg.svd(delta, full_matrices=False)
    core = u[:, : len(sigma)].T @ new @ vt[: len(sigma)].T
    assert float(core.norm()) == pytest.approx(float(new.norm()))
    assert distance(core, torch.diag(core.diagonal())) < 1e-6 or len(set(sigma)) < len(sigma)


@pytest.mark.parametrize("solver", [SVD, GRAM])
def test_symmetries(solver: SoupSettings) -> None:
    delta = with_spectrum(24, 16, [2.0**-i for i in range(12)])
    new, edit = soup_delta(delta, solver)
    assert edit.k < edit.q
    for factor in (1e-5, 300.0):
        scaled, other = soup_delta(factor * delta, solver)
        assert distance(scaled, factor * new) < 1e-6
        assert (other.k, other.q) == (edit.k, edit.q)
        for name in ("energy", "rho", "lambda_low", "lambda_high"):
            assert getattr(other, name) == pytest.approx(getattr(edit, name), abs=1e-6)
    left, right = orthonormal(24, 24, 5), orthonormal(16, 16, 6)
    assert distance(soup_delta(left @ delta @ right.T, solver)[0], left @ new @ right.T) < 1e-6
    assert distance(soup_delta(delta.T, solver)[0], new.T) < 1e-6


def _cases() -> dict[str, Tensor]:
    decay = [0.97**i for i in range(150)]
    return {
        "random": seeded(200, 120),
        "decaying": with_spectrum(200, 160, decay),
        "deficient": with_spectrum(150, 200, [1.0 / (1 + i) for i in range(40)]),
        "tall": seeded(2000, 300),
        "wide": seeded(300, 2000),
        "tall decaying": with_spectrum(2000, 300, decay),
    }


@pytest.mark.parametrize("case", list(_cases()))
def test_gram_equals_svd(case: str) -> None:
    delta = _cases()[case]
    (by_svd, first), (by_gram, second) = soup_delta(delta, SVD), soup_delta(delta, GRAM)
    assert distance(by_gram, by_svd) < 1e-5
    assert (first.k, first.q) == (second.k, second.q)
    assert first.k < first.q  # there is something to compare
    assert distance(by_svd, delta) > 1e-3


def test_auto_takes_gram_for_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        "acclimate.merge.monosoup._by_gram", lambda delta, s: called.append(delta.shape) or (delta, None)
    )
    soup_delta(seeded(512, 511))
    soup_delta(seeded(512, 512))
    soup_delta(seeded(4, 3), GRAM)
    assert called == [(512, 512), (4, 3)]


def test_convolutions_are_seen_as_matrices() -> None:
    base = seeded(6, 5, 3, 2).float()
    tuned = base + 0.1 * seeded(6, 5, 3, 2, seed=1).float()
    value, row = soup_tensor(base, tuned)
    flat, _ = soup_tensor(base.reshape(6, 30), tuned.reshape(6, 30))
    assert torch.equal(value.reshape(6, 30), flat)
    assert value.dtype == torch.float32
    assert row["q"] == 6
    almost = base + 1e-8 * tuned  # is skipped, and keeps its bits
    for kept in (almost, base.clone()):
        value, row = soup_tensor(base, kept)
        assert torch.equal(value, kept)
        assert "skipped" in row


# --- state dicts ---


def pair(dtype: torch.dtype = torch.float32, change: float = 0.05) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A base and its fine-tune: an embedding, a convolution, two linear layers, a norm, a bias, and a counter."""
    shapes = {
        "embed.weight": (40, 12),
        "layers.0.conv.weight": (8, 6, 3),
        "layers.0.linear.weight": (16, 12),
        "layers.0.linear.bias": (16,),
        "layers.1.linear.weight": (12, 16),
        "norm.weight": (12,),
    }
    base, tuned = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        value = seeded(*shape, seed=number)
        base[name] = value.to(dtype)
        decay = 0.5 ** torch.arange(shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
        delta = seeded(*shape, seed=100 + number) * (decay if len(shape) > 1 else 1)
        tuned[name] = (value + change * delta * value.norm() / delta.norm()).to(dtype)
    for state in (base, tuned):
        state["position"] = torch.arange(4)
    tuned["position"] += 1
    return base, tuned


MATRICES = ["embed.weight", "layers.0.conv.weight", "layers.0.linear.weight", "layers.1.linear.weight"]


def test_vectors_and_integers_stay_as_fine_tuned() -> None:
    base, tuned = pair()
    soup, report = monosoup(base, tuned)
    assert list(soup) == list(tuned)
    for name, value in tuned.items():
        assert torch.equal(soup[name], value) == (name not in MATRICES)
        assert soup[name].dtype == value.dtype
    assert [row["name"] for row in report.tensors if "skipped" not in row] == MATRICES
    assert report.totals["reasons"] == {"not a matrix": 3}
    assert {
        "shape",
        "q",
        "effective_rank",
        "k",
        "energy",
        "rho",
        "lambda_low",
        "lambda_high",
        "relative_norm",
        "seconds",
    } <= set(report.tensors[0])
    for name in MATRICES:
        delta = (tuned[name].double() - base[name].double()).flatten(1)
        assert distance(soup[name].double().flatten(1), base[name].double().flatten(1) + soup_delta(delta)[0]) < 1e-7
    json.loads(report.to_json())


def test_integers_of_two_dimensions_are_kept() -> None:
    base, tuned = pair()
    base["table"], tuned["table"] = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)
    soup, report = monosoup(base, tuned)
    assert torch.equal(soup["table"], tuned["table"])
    assert report.totals["reasons"]["not floating point"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept_and_computed_in_double(dtype: torch.dtype) -> None:
    base, tuned = pair(dtype)
    soup, _ = monosoup(base, tuned)
    name = "layers.0.linear.weight"
    exact = base[name].double() + soup_delta(tuned[name].double() - base[name].double())[0]
    assert torch.equal(soup[name], exact.to(dtype))


def test_include_and_exclude() -> None:
    base, tuned = pair()
    _, report = monosoup(base, tuned, include="linear", exclude=r"layers\.1")
    assert [row["name"] for row in report.tensors if "skipped" not in row] == ["layers.0.linear.weight"]
    with pytest.raises(InputError, match="leave none of the 4 matrices"):
        monosoup(base, tuned, include="nothing")


def test_prefixes_are_stripped_where_needed() -> None:
    base, tuned = pair()
    plain, _ = monosoup(base, tuned)
    for before, after in (("", "module."), ("_orig_mod.", ""), ("base_model.model.", "module._orig_mod.")):
        soup, _ = monosoup(
            {before + name: value for name, value in base.items()},
            {after + name: value for name, value in tuned.items()},
        )
        assert list(soup) == [after + name for name in tuned]
        assert all(torch.equal(soup[after + name], plain[name]) for name in plain)


def test_tied_weights_are_done_once_and_stay_tied(tmp_path: Path) -> None:
    base, tuned = pair()
    tuned["head.weight"] = tuned["embed.weight"]  # the base has only one of the two names
    soup, report = monosoup(base, tuned)
    assert soup["head.weight"].data_ptr() == soup["embed.weight"].data_ptr()
    assert not torch.equal(soup["embed.weight"], tuned["embed.weight"])
    assert report.tensors[0]["tied"] == ["head.weight"]
    assert "head.weight" not in [row["name"] for row in report.tensors]
    assert not report.warnings
    torch.save(tuned, tmp_path / "tuned.pt")
    torch.save(base, tmp_path / "base.pt")
    monosoup_checkpoint(tmp_path / "base.pt", tmp_path / "tuned.pt", tmp_path / "out")
    written = load_file(tmp_path / "out" / "tuned.safetensors")
    assert torch.equal(written["head.weight"], written["embed.weight"])
    assert torch.equal(written["head.weight"], soup["embed.weight"])


def test_a_model_is_edited_in_place() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20), torch.nn.LayerNorm(20))
    model[1].weight = model[0].weight
    base = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tuned = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model[0].weight
    report = monosoup_(model, base)
    assert model[0].weight is kept is model[1].weight
    wanted, _ = soup_tensor(base["0.weight"], tuned["0.weight"])
    assert torch.equal(model[0].weight, wanted)
    assert torch.equal(model[2].weight, tuned["2.weight"])
    assert report.totals["edited"] == 1


# --- errors and warnings ---


def test_what_the_base_lacks_is_kept_or_refused() -> None:
    base, tuned = pair()
    del base["layers.1.linear.weight"]
    soup, report = monosoup(base, tuned)
    assert torch.equal(soup["layers.1.linear.weight"], tuned["layers.1.linear.weight"])
    assert {"name": "layers.1.linear.weight", "shape": [12, 16], "skipped": "not in the base"} in report.tensors
    assert report.warnings == ["'base' lacks 1 tensors, e.g. 'layers.1.linear.weight': they are kept as fine-tuned"]
    with pytest.raises(InputError, match=r"'base' lacks 1 tensors of 'tuned', e.g. 'layers.1.linear.weight'"):
        monosoup(base, tuned, strict=True)


def test_another_shape_is_kept_with_a_warning() -> None:
    base, tuned = pair()
    base["embed.weight"] = base["embed.weight"][:38]
    soup, report = monosoup(base, tuned)
    assert torch.equal(soup["embed.weight"], tuned["embed.weight"])
    assert report.warnings == [
        "'embed.weight' has shape 40 x 12 in 'tuned' and 38 x 12 in 'base' (2 rows differ): it is kept as fine-tuned"
    ]
    with pytest.warns(UserWarning, match="2 rows differ"):
        monosoup(base, tuned)


def test_nothing_in_common() -> None:
    base, tuned = pair()
    with pytest.raises(InputError, match=r"have nothing in common. Are the prefixes right\? One has 'x.embed.weight'"):
        monosoup({f"x.{name}": value for name, value in base.items()}, tuned)


def test_equal_checkpoints() -> None:
    _, tuned = pair()
    soup, report = monosoup(tuned, {name: value.clone() for name, value in tuned.items()})
    assert all(torch.equal(soup[name], tuned[name]) for name in tuned)
    assert report.warnings == ["fine-tuning changed none of these weights: the result equals the input"]
    assert report.totals["lambda_low"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["base", "tuned"])
def test_values_that_are_not_finite(tmp_path: Path, value: float, where: str) -> None:
    states = dict(zip(("base", "tuned"), pair(), strict=True))
    states[where]["layers.0.linear.weight"][3, 4] = value
    for name, state in states.items():
        save_file(state, tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in states]
    with pytest.raises(InputError) as error:
        monosoup_checkpoint(*files, tmp_path / "out")
    assert str(error.value) == (
        f"'layers.0.linear.weight' in '{tmp_path / where}.safetensors' has 1 values that are not finite numbers"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors", "tuned.safetensors"]


def test_infinity_is_allowed_in_what_is_only_kept() -> None:
    base, tuned = pair()
    tuned["mask"] = torch.tensor([0.0, -math.inf])
    assert torch.equal(monosoup(base, tuned)[0]["mask"], tuned["mask"])
    tuned["mask"][0] = math.nan
    with pytest.raises(InputError, match="'mask' in 'tuned' has 1 values"):
        monosoup(base, tuned)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.linear.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("layers.0.linear.SCB", torch.zeros(2)),
        ("layers.2.linear.weight", torch.zeros(2, 2, dtype=torch.int8)),
        ("layers.2.linear.weight", torch.zeros(2, 2, dtype=torch.uint8)),
        ("layers.2.linear.weight", torch.zeros(2, 2).to(torch.float8_e4m3fn)),
    ],
)
def test_quantised_weights_are_refused(tmp_path: Path, name: str, value: Tensor) -> None:
    base, tuned = pair()
    with pytest.raises(InputError, match=r"is quantised: .*Dequantise it first"):
        monosoup(base, {**tuned, name: value})
    save_file({**tuned, name: value}, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match="Dequantise"):
        monosoup(base, tmp_path / "t.safetensors")


def test_quantised_models_are_refused(tmp_path: Path) -> None:
    base, tuned = pair()
    save_file(tuned, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(InputError, match=r"is quantised \(awq\): its weights cannot be edited. Dequantise it first"):
        monosoup(base, tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="is a GGUF file"):
        monosoup(base, tmp_path / "m.gguf")


@pytest.mark.parametrize(("change", "warned"), [(2.0**-8, True), (2.0**-5, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_changes_of_half_precision_are_warned_of(dtype: torch.dtype, change: float, warned: bool) -> None:
    _, report = monosoup(*pair(dtype, change))
    expected = warned and dtype != torch.float32
    assert any("use float32 checkpoints, or the LoRA adapter" in text for text in report.warnings) == expected


def test_out_of_memory_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate.merge import monosoup as module

    whole = module._soup_tensor

    def full(base: Tensor, tuned: Tensor, chosen: SoupSettings, device: str) -> Any:
        if device == "cuda" and tuned.shape[0] == 40:
            raise torch.OutOfMemoryError("full")
        return whole(base, tuned, chosen, "cpu")

    monkeypatch.setattr(module, "_soup_tensor", full)
    soup, report = monosoup(*pair(), device="cuda")
    assert all(torch.equal(value, soup[name]) for name, value in monosoup(*pair())[0].items())
    assert report.warnings == ["out of memory on cuda: 'embed.weight' done on the CPU"]
    monkeypatch.setattr(module, "_soup_tensor", lambda *rest: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        monosoup(*pair())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"energy": 0.0}, "energy must be above 0 and at most 1, not 0.0"),
        ({"energy": 1.1}, "energy must be above 0 and at most 1, not 1.1"),
        ({"energy": math.nan}, "energy must be above 0"),
        ({"mode": "varience"}, "mode is effective-rank, variance; not 'varience'. Did you mean 'variance'"),
        ({"solver": "qr"}, "solver is auto, svd, gram; not 'qr'"),
        ({"include": "("}, "include is not a regular expression"),
        ({"exclude": "["}, "exclude is not a regular expression"),
    ],
)
def test_arguments_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        SoupSettings(**settings)
    assert message in str(error.value)


# --- LoRA ---


@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_lora_equals_the_full_edit(rank: int, scale: float) -> None:
    decay = torch.tensor([0.8**i for i in range(rank)], dtype=torch.float64)
    a, b = seeded(rank, 50), seeded(70, rank, seed=1) * decay
    new_a, new_b, edit = soup_lora(a, b, scale)
    wanted, other = soup_delta(scale * b @ a)
    assert new_a.shape == a.shape
    assert new_b.shape == b.shape
    assert distance(new_b @ new_a, wanted) < 1e-5
    assert edit is not None
    assert (edit.k, edit.q) == (other.k, other.q)
    assert edit.lambda_low == pytest.approx(other.lambda_low, abs=1e-9)


def test_lora_of_zeros() -> None:
    a, b = seeded(4, 6), torch.zeros(5, 4, dtype=torch.float64)
    new_a, new_b, edit = soup_lora(a, b, 2.0)
    assert edit is None
    assert torch.equal(new_a, a)
    assert torch.equal(new_b, b)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 8, "lora_alpha": 16},
        {"r": 8, "lora_alpha": 3, "use_rslora": True},
        {
            "r": 8,
            "ranks": {"layers.1.q_proj": 3},
            "rank_pattern": {"layers.1.q_proj": 3},
            "alpha_pattern": {"layers.0.up_proj": 5},
        },
        {"r": 64},  # above m and n of some layers
    ],
)
def test_adapters_equal_the_full_edit(tmp_path: Path, config: dict[str, Any]) -> None:
    adapter(tmp_path / "in", 3, **config)
    state = load_file(tmp_path / "in" / WEIGHTS)
    for name, value in state.items():
        if "lora_B" in name:
            value *= 0.5 ** torch.arange(value.shape[1])
    save_file(state, tmp_path / "in" / WEIGHTS)
    report = monosoup_adapter(tmp_path / "in", tmp_path / "out")
    before, after = deltas(tmp_path / "in"), deltas(tmp_path / "out")
    rows = {row["name"]: row for row in report.tensors}
    for name, delta in before.items():
        assert distance(after[name], soup_delta(delta)[0]) < 1e-5
        assert (distance(after[name], delta) > 1e-3) == (rows[name]["k"] < rows[name]["q"])
    assert any(row["k"] < row["q"] for row in rows.values())
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (config["r"], config["r"], False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", WEIGHTS, "soup_report.json"}
    assert report.totals["edited"] == 3
    saved = json.loads((tmp_path / "out" / "soup_report.json").read_text())
    assert saved["made_with"]["settings"]["mode"] == "effective-rank"
    assert [row["name"] for row in saved["tensors"]] == list(before)


def test_a_peft_model_loads_it_and_answers_as_it_should(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def fresh() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(30, 12), "conv": torch.nn.Conv1d(12, 10, 3), "linear": torch.nn.Linear(10, 9)}
        )

    chosen = LoraConfig(
        r=4, lora_alpha=7, use_rslora=True, target_modules=["embed", "conv", "linear"], init_lora_weights=False
    )
    get_peft_model(fresh(), chosen).save_pretrained(str(tmp_path / "in"))
    monosoup_adapter(tmp_path / "in", tmp_path / "out")
    tuned = PeftModel.from_pretrained(fresh(), str(tmp_path / "in")).merge_and_unload().state_dict()
    soup = PeftModel.from_pretrained(fresh(), str(tmp_path / "out")).merge_and_unload().state_dict()
    base = fresh().state_dict()
    for name in ("embed.weight", "conv.weight", "linear.weight"):
        # the noise of float32 in the merged weights adds singular values, so the edit of the exact change is what is compared
        low_rank = low_rank_truncate(base, tuned, 4)[name].double() - base[name].double()
        assert (
            distance((soup[name] - base[name]).double(), soup_delta(low_rank.flatten(1))[0].reshape(base[name].shape))
            < 1e-4
        )


def test_biases_heads_and_layers_left_out(tmp_path: Path) -> None:
    prefix = "base_model.model."
    state = {
        f"{prefix}q_proj.lora_A.weight": seeded(4, 10).float(),
        f"{prefix}q_proj.lora_B.weight": seeded(12, 4, seed=1).float(),
        f"{prefix}q_proj.lora_B.bias": seeded(12, seed=2).float(),
        f"{prefix}up_proj.lora_A.weight": seeded(4, 10, seed=3).float(),
        f"{prefix}up_proj.lora_B.weight": seeded(12, 4, seed=4).float(),
        f"{prefix}score.weight": seeded(3, 12, seed=5).float(),
    }
    write(tmp_path / "in", state, lora_bias=True, modules_to_save=["score"])
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    report = monosoup_adapter(tmp_path / "in", tmp_path / "out", exclude="up_proj", dtype="float64")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(after[f"{prefix}score.weight"], state[f"{prefix}score.weight"])
    assert torch.allclose(after[f"{prefix}q_proj.lora_B.bias"], 2 * state[f"{prefix}q_proj.lora_B.bias"].double())
    assert distance(deltas(tmp_path / "out")["up_proj"], deltas(tmp_path / "in")["up_proj"]) < 1e-12
    assert report.totals["reasons"] == {"left out by name": 1, "not a low-rank pair": 1}
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with pytest.raises(InputError, match="leave none of the 2 layers"):
        monosoup_adapter(tmp_path / "in", tmp_path / "x", include="nothing")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "LOHA"}, "is of type LOHA"),
        ({"peft_type": "IA3"}, "is of type IA3"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    adapter(tmp_path / "in", 1, **config)
    with pytest.raises(InputError, match=message):
        monosoup_adapter(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_result_that_does_not_fit_its_type(tmp_path: Path) -> None:
    adapter(tmp_path / "in", 1, lora_alpha=1e12)
    with pytest.raises(ValueError, match=r"does not fit into torch.float16"):
        monosoup_adapter(tmp_path / "in", tmp_path / "out", dtype="float16")
    base, tuned = pair()
    tuned["embed.weight"][0, 0] = 1e6
    save_file(base, tmp_path / "b.safetensors")
    save_file(tuned, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=r"'embed.weight' does not fit into torch.float16"):
        monosoup_checkpoint(tmp_path / "b.safetensors", tmp_path / "t.safetensors", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(f"{PARTIAL}*"))


# --- files ---


def sharded(where: Path, state: Mapping[str, Tensor], shards: int, pickled: bool = False) -> Path:
    where.mkdir(parents=True)
    ending, stem = ("bin", "pytorch_model") if pickled else ("safetensors", "model")
    names = list(state)
    places = {}
    for number in range(shards):
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.{ending}"
        part = {name: state[name] for name in names[number::shards]}
        places.update(dict.fromkeys(part, file))
        (torch.save if pickled else save_file)(part, where / file)
    index = f"{stem}.{ending}.index.json"
    (where / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (where / "config.json").write_text('{"hidden_size": 12}')
    return where


def read_back(where: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(where.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("kind", ["shards", "pickled shards", "single", "bin", "old bin", "nested", "file"])
def test_streaming_equals_memory(tmp_path: Path, kind: str, jobs: int) -> None:
    base, tuned = pair()
    wanted, report = monosoup(base, tuned)
    source, where = tmp_path / "base.pt", tmp_path / "tuned"
    torch.save(base, source)
    files = {"model.safetensors"}
    if "shards" in kind:
        sharded(where, tuned, 3, pickled=kind.startswith("pickled"))
        files = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)} | {"model.safetensors.index.json"}
    else:
        where.mkdir()
        if kind in ("single", "file"):
            save_file(tuned, where / "model.safetensors")
        else:
            content = {"state_dict": tuned, "epoch": 3} if kind == "nested" else tuned
            torch.save(content, where / "pytorch_model.bin", _use_new_zipfile_serialization=kind != "old bin")
    (where / "tokenizer").mkdir()
    (where / "tokenizer" / "vocab.txt").write_text("a")
    (where / "checkpoint-10").mkdir()
    (where / "training_args.bin").write_bytes(b"x")
    given = where / "model.safetensors" if kind == "file" else where
    streamed = monosoup_checkpoint(source, given, tmp_path / "out", jobs=jobs)
    assert same(read_back(tmp_path / "out"), wanted)
    others = set() if kind == "file" else {"tokenizer"} | ({"config.json"} if "shards" in kind else set())
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | others | {"soup_report.json"}
    assert streamed.directory == str(tmp_path / "out")
    without = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.tensors] for r in (streamed, report)]
    assert sorted(without[0], key=str) == sorted(without[1], key=str)
    if "shards" in kind:
        places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
        index = next(where.glob("*.index.json"))
        before = json.loads(index.read_text())["weight_map"]
        assert places == {
            name: file.replace("pytorch_model", "model").replace(".bin", ".safetensors")
            for name, file in before.items()
        }
        assert same(dict(open_checkpoint(tmp_path / "out")), wanted)


def test_transformers_loads_the_result(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=8,
    )
    torch.manual_seed(0)
    model = BertModel(config)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "tuned", max_shard_size="10KB")
    monosoup_checkpoint(tmp_path / "base", tmp_path / "tuned", tmp_path / "out")
    wanted, _ = monosoup(tmp_path / "base", tmp_path / "tuned")
    assert same(BertModel.from_pretrained(tmp_path / "out").state_dict(), wanted)


def test_dtype_of_the_result(tmp_path: Path) -> None:
    base, tuned = pair()
    save_file(base, tmp_path / "b.safetensors")
    save_file(tuned, tmp_path / "t.safetensors")
    monosoup_checkpoint(tmp_path / "b.safetensors", tmp_path / "t.safetensors", tmp_path / "out", dtype="bfloat16")
    written, wanted = read_back(tmp_path / "out"), monosoup(base, tuned)[0]
    assert written["position"].dtype == torch.int64
    assert all(
        torch.equal(value, wanted[name].to(torch.bfloat16)) for name, value in written.items() if name != "position"
    )


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    base, tuned = pair()
    where = sharded(tmp_path / "tuned", tuned, 2)
    shard = where / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-9])
    with pytest.raises(InputError, match="is damaged or incomplete"):
        monosoup(base, where)
    shard.unlink()
    with pytest.raises(InputError, match=r"names 'model-00002-of-00002.safetensors', which is not there"):
        monosoup(base, where)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no weights"):
        monosoup(base, tmp_path / "empty")
    with pytest.raises(InputError, match="no file or directory"):
        monosoup(base, tmp_path / "none")
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="its entry 'epoch' is int, not a tensor"):
        monosoup(base, tmp_path / "x.pt")
    torch.save([1], tmp_path / "x.pt")
    with pytest.raises(InputError, match="holds list, not a state_dict"):
        monosoup(base, tmp_path / "x.pt")
    torch.save({"a": Path("x")}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="without running code from it"):
        monosoup(base, tmp_path / "x.pt")
    (tmp_path / "twice").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(base, tmp_path / "twice" / name)
    with pytest.raises(InputError, match=r"is in two files: .*a.safetensors' and .*b.safetensors'"):
        monosoup(base, tmp_path / "twice")
    for name in ("a.pt", "b.pt"):
        torch.save(base, tmp_path / "empty" / name)
    with pytest.raises(InputError, match=r"has 2 weight files: a.pt, b.pt. Name one of them"):
        monosoup(base, tmp_path / "empty")


def test_scalars_masks_and_empty_tensors(tmp_path: Path) -> None:
    base, tuned = pair()
    others = {
        "logit_scale": torch.tensor(4.6),
        "attn.bias": torch.ones(1, 1, 3, 3, dtype=torch.uint8).tril(),
        "mask": torch.tensor([True, False]),
        "none.weight": torch.empty(0, 4),
    }
    torch.save({"state_dict": {**base, **others}}, tmp_path / "base.pt")
    torch.save({"state_dict": {**tuned, **others}}, tmp_path / "tuned.pt")
    report = monosoup_checkpoint(tmp_path / "base.pt", tmp_path / "tuned.pt", tmp_path / "out")
    assert same(read_back(tmp_path / "out"), {**monosoup(base, tuned)[0], **others})
    assert report.totals["reasons"] == {"not a matrix": 6, "not floating point": 1}


def test_names_of_embedded_models_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = pair()
    monkeypatch.setattr("acclimate.models.resolve", {"smollm2": str(sharded(tmp_path / "base", base, 1))}.__getitem__)
    sharded(tmp_path / "run" / "model", tuned, 1)
    (tmp_path / "run" / "run.json").write_text("{}")
    monosoup_checkpoint("smollm2", tmp_path / "run", tmp_path / "out")
    assert same(read_back(tmp_path / "out"), monosoup(base, tuned)[0])
    assert (tmp_path / "out" / "config.json").exists()


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    base, tuned = pair()
    one, two = sharded(tmp_path / "base", base, 1), sharded(tmp_path / "all" / "tuned", tuned, 1)
    for out in (two, tmp_path / "all", one):
        with pytest.raises(InputError, match="is, or holds, the input"):
            monosoup_checkpoint(one, two, out, overwrite=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"exists. Choose another place"):
        monosoup_checkpoint(one, two, tmp_path / "out")
    monosoup_checkpoint(one, two, tmp_path / "out", overwrite=True)
    assert same(read_back(tmp_path / "out"), monosoup(base, tuned)[0])


# --- a process of its own: kills and memory ---


def test_a_killed_soup_goes_on(processes: Any, tmp_path: Path) -> None:
    """Killed in the first, a middle and a later tensor, with half of it written, it ends with the bytes of one that was not."""
    base, tuned = pair()
    paths = [str(sharded(tmp_path / "base", base, 1)), str(sharded(tmp_path / "tuned", tuned, 3))]
    out, log, reference = tmp_path / "out", tmp_path / "log", tmp_path / "reference"
    assert processes(worker.killed_at, worker.soup, 0, paths, str(reference), str(log), {}) == 0
    assert log.read_text() == "7\n"
    for kill, left in ((1, 0), (4, 3), (3, 5)):
        assert processes(worker.killed_at, worker.soup, kill, paths, str(out), str(log), {}) == -signal.SIGKILL
        assert not out.exists()
        journal = (tmp_path / f"{PARTIAL}out" / "journal.jsonl").read_text().splitlines()
        assert sum("batch" in json.loads(line) for line in journal) == left, log.read_text()
    (tmp_path / f"{PARTIAL}out" / "config.json").write_text("{")  # the kill may come while files are copied
    assert processes(worker.killed_at, worker.soup, 0, paths, str(out), str(log), {}) == 0
    assert log.read_text() == "2\n"
    assert {path.name for path in out.iterdir()} == {path.name for path in reference.iterdir()}
    for file in reference.iterdir():
        if file.name != "soup_report.json":
            assert (out / file.name).read_bytes() == file.read_bytes()
    assert not list(tmp_path.glob(f"{PARTIAL}*"))


def test_a_killed_soup_of_something_else_is_not_taken_up(processes: Any, tmp_path: Path) -> None:
    base, tuned = pair()
    paths = [str(sharded(tmp_path / "base", base, 1)), str(sharded(tmp_path / "tuned", tuned, 2))]
    out, log = tmp_path / "out", tmp_path / "log"
    assert (
        processes(worker.killed_at, worker.soup, 5, paths, str(out), str(log), {"mode": "variance"}) == -signal.SIGKILL
    )
    (tmp_path / f"{PARTIAL}out" / "tokenizer").mkdir()  # the kill may come while directories are copied
    assert processes(worker.killed_at, worker.soup, 0, paths, str(out), str(log), {}) == 0
    assert log.read_text() == "7\n"
    assert same(read_back(out), monosoup(base, tuned)[0])
    assert not (out / "tokenizer").exists()


def test_a_killed_soup_of_an_adapter_goes_on(processes: Any, tmp_path: Path) -> None:
    adapter(tmp_path / "in", 1)
    out, log = tmp_path / "out", tmp_path / "log"
    assert (
        processes(worker.killed_at, worker.soup, 4, [str(tmp_path / "in")], str(out), str(log), {}) == -signal.SIGKILL
    )
    assert not out.exists()
    assert processes(worker.killed_at, worker.soup, 0, [str(tmp_path / "in")], str(out), str(log), {}) == 0
    assert log.read_text().splitlines()[-1] == "4"  # one of three layers was done
    monosoup_adapter(tmp_path / "in", tmp_path / "reference")
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "reference" / WEIGHTS).read_bytes()


def test_memory_is_that_of_the_largest_tensor(processes: Any, tmp_path: Path) -> None:
    """Two checkpoints of 128 MB each, of 16 shards: a soup may hold six times the largest tensor in float64 and 30 MB."""
    base = {f"layers.{i}.weight": seeded(256, 1024, seed=i).float() for i in range(128)}
    paths = [str(sharded(tmp_path / "base", base, 1))]
    for value in base.values():
        value += 0.01 * value.roll(1, 0)
    paths.append(str(sharded(tmp_path / "tuned", base, 16)))
    largest, total = 256 * 1024 * 8, 128 * 256 * 1024 * 4
    assert processes(worker.peak, worker.soup, paths, str(tmp_path / "out"), str(tmp_path / "log")) == 0
    grown = int((tmp_path / "log").read_text())
    assert grown < 6 * largest + 30e6 < total / 2


# --- baselines ---


def test_wise_ft() -> None:
    base, tuned = pair(torch.float64)
    assert same(wise_ft(base, tuned, 1.0), tuned)
    back = wise_ft(base, tuned, 0.0)
    assert all(torch.equal(back[name], base[name]) for name in base if name != "position")
    middle = wise_ft(base, tuned, 0.3)["embed.weight"]
    assert torch.allclose(middle, 0.7 * base["embed.weight"] + 0.3 * tuned["embed.weight"])


def test_soups(tmp_path: Path) -> None:
    states = [{"w": torch.full((2, 2), float(value))} for value in (1, 2, 6)]
    save_file(states[2], tmp_path / "last.safetensors")
    assert torch.equal(uniform_soup([*states[:2], tmp_path / "last.safetensors"])["w"], torch.full((2, 2), 3.0))
    # scores of the single ones: -2.2, -1.2, -2.8; the mean of 2 and 1 is worse than 2, that of 2 and 6 is better
    assert torch.equal(greedy_soup(states, lambda s: -abs(float(s["w"][0, 0]) - 3.2))["w"], torch.full((2, 2), 4.0))
    with pytest.raises(InputError, match="'w' of 'tuned 1' is not in 'tuned 2' in the same shape"):
        uniform_soup([states[0], {"v": torch.zeros(2, 2)}])
    for empty in (lambda: uniform_soup([]), lambda: greedy_soup([], len)):
        with pytest.raises(ValueError, match="no fine-tuned"):
            empty()


def test_model_stock() -> None:
    base, tuned = pair(torch.float64)
    equal = model_stock(base, [tuned, tuned])
    assert all(torch.allclose(equal[name], tuned[name], atol=1e-12) for name in tuned)
    zero = {"w": torch.zeros(2, 2, dtype=torch.float64)}
    x, y = torch.tensor([[1.0, 0], [0, 0]]).double(), torch.tensor([[0, 1.0], [0, 0]]).double()
    assert torch.equal(model_stock(zero, [{"w": x}, {"w": y}])["w"], zero["w"])
    tilted = torch.tensor([[0.6, 0.8], [0, 0]]).double()
    t = 2 * 0.6 / (1 + 0.6)
    assert torch.allclose(model_stock(zero, [{"w": x}, {"w": tilted}])["w"], t * (x + tilted) / 2)
    with pytest.raises(ValueError, match="needs at least two fine-tunes of one base, not 1"):
        model_stock(zero, [zero])


def test_lines_scale_with_depth() -> None:
    names = ["embed.weight", "layers.0.w", "layers.1.w", "layers.2.w", "head.weight"]
    base, tuned = {name: torch.zeros(2, 2) for name in names}, {name: torch.ones(2, 2) for name in names}
    scaled = lines(base, tuned, 0.2, 0.6)
    assert [round(float(scaled[name][0, 0]), 6) for name in names] == [0.2, 0.2, 0.5, 0.8, 0.8]
    with pytest.raises(InputError, match="no numbered blocks"):
        lines({"w": base["head.weight"]}, {"w": base["head.weight"]})


def test_low_rank_truncation() -> None:
    base, delta = seeded(12, 10), with_spectrum(12, 10, [10, 1, 0.1])
    exact = with_spectrum(12, 10, [10, 1, 0])
    for k in (2, None):
        assert distance(low_rank_truncate({"w": base}, {"w": base + delta}, k)["w"] - base, exact) < 1e-9
    assert torch.equal(low_rank_truncate({"w": base}, {"w": base.clone()})["w"], base)
    with pytest.raises(ValueError, match="k must be at least 1"):
        low_rank_truncate({"w": base}, {"w": base}, 0)


def test_a_plan_reads_no_tensor(tmp_path: Path) -> None:
    base, tuned = pair()
    save_file(tuned, tmp_path / "t.safetensors")
    checkpoint = open_checkpoint(tmp_path / "t.safetensors")
    checkpoint.read = lambda name: pytest.fail("a tensor was read")
    plan = plan_soup(base, checkpoint)
    assert [names[0] for names, _, reason in plan.items if reason is None] == sorted(
        MATRICES, key=list(checkpoint).index
    )
