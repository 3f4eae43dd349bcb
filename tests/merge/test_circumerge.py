"""CircuMerge against closed forms, dense linear algebra, PEFT, and reference versions of KnOTS and Core Space merging."""

from __future__ import annotations

import json
import math
import signal
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate.errors import InputError, MissingError
from acclimate.merge import MergeSettings, add_weighted_adapter, compare_bases, merge_adapters, plan_merge
from acclimate.merge import rules as rule_functions
from acclimate.merge.circumerge import circulant_transform, merge_core, orthonormal_side, sketch_size
from acclimate.merge.rules import RuleName
from acclimate.runs import PARTIAL
from merge import worker
from merge.synthetic import PREFIX, SHAPES, adapter, deltas, deltas_of, distance, pair, write

RULES = get_args(RuleName)
WEIGHTS = "adapter_model.safetensors"


def merged(paths: list[Path], **settings: Any) -> dict[str, Tensor]:
    """Delta of every module of the merged adapter."""
    config, state = merge_adapters(paths, **settings)
    return deltas_of(config, state)


def weighted_sum(paths: list[Path], weights: list[float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for path, weight in zip(paths, weights, strict=True):
        for name, delta in deltas(path).items():
            total[name] = total.get(name, torch.zeros_like(delta)) + weight * delta
    return total


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of one rank, float32."""
    where = tmp_path_factory.mktemp("three")
    return [adapter(where / f"a{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def three64(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("three64")
    return [adapter(where / f"a{seed}", seed, dtype=torch.float64) for seed in range(3)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, list[Path]]:
    """Unequal ranks, rank-stabilised scale, patterns, a missing module, and one adapter twice."""
    result = {}
    for dtype in (torch.float32, torch.float64):
        where = tmp_path_factory.mktemp("mixed")
        few = {name: SHAPES[name] for name in ("layers.0.q_proj", "layers.0.up_proj")}
        patterns = {"rank_pattern": {"layers.0.up_proj": 5}, "alpha_pattern": {"layers.0.up_proj": 20}}
        first = adapter(where / "plain", 1, dtype=dtype)
        result[dtype] = [
            first,
            adapter(where / "rs", 2, r=2, dtype=dtype, use_rslora=True),
            adapter(where / "patterns", 3, r=3, dtype=dtype, ranks={"layers.0.up_proj": 5}, shapes=few, **patterns),
            first,
        ]
    return result


# --- the transform ---


@pytest.mark.parametrize("d", [1, 2, 7, 64, 97, 576, 1001])
def test_the_whole_transform_is_an_isometry(d: int) -> None:
    x = torch.randn(3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    y = circulant_transform(d, 10**6, seed=3, dtype=torch.float64)(x)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-12)
    assert torch.allclose(y @ y.T, x @ x.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vector", ["random", "first unit vector"])
def test_the_sampled_transform_is_an_isometry_on_average(vector: str) -> None:
    d, s = 97, 24
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if vector != "random":
        x = torch.eye(d, dtype=torch.float64)[0]
    ratios = torch.stack(
        [circulant_transform(d, s, seed, torch.float64)(x).square().sum() / x.square().sum() for seed in range(1000)]
    )
    assert abs(ratios.mean() - 1) < 3 * ratios.std() / math.sqrt(len(ratios))
    assert ratios.std() > 0.05  # it is a sample


def test_the_transform_is_circulant_and_shared() -> None:
    transform = circulant_transform(16, 16, seed=5, dtype=torch.float64)
    matrix = transform(torch.eye(16, dtype=torch.float64)).T * transform.signs  # without the signs
    for shift in range(1, 16):
        assert torch.allclose(matrix[:, shift], matrix[:, 0].roll(shift), atol=1e-12)
    assert circulant_transform(16, 16, seed=5, dtype=torch.float64) is transform
    assert circulant_transform(16, 8, seed=5) is not circulant_transform(16, 8, seed=6)


def test_the_sketch_has_all_rows_where_it_would_have_half_of_them() -> None:
    assert sketch_size(4096, 128, 4) == 512
    assert sketch_size(576, 128, 4) == 576
    assert sketch_size(97, 10, 1.05) == 11
    assert sketch_size(97, 20, 4) == 100  # the next length with a fast transform


# --- bases ---


@pytest.mark.parametrize("basis", ["circulant", "gram", "svd"])
def test_bases_are_orthonormal_and_exact_when_columns_are_nearly_dependent(basis: str) -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(400, 24, generator=generator, dtype=torch.float64)).Q
    turn = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64)).Q
    b = ((left * torch.logspace(0, -4, 24, dtype=torch.float64)) @ turn).float()
    settings = MergeSettings(basis=basis)  # type: ignore[arg-type]
    side = orthonormal_side(b.T[None].contiguous(), basis, settings, refine=0 if basis != "circulant" else 1)
    q = side.expand(torch.eye(side.K.shape[1], dtype=torch.float64)[None])[0].T
    assert (q.T @ q - torch.eye(24)).abs().max() < 1e-5
    assert (q @ side.K[0] - b).norm() / b.norm() < 1e-6


@pytest.mark.parametrize("sketch", [1.0, 2.0, 4.0])
def test_without_refinement_the_basis_is_near_and_the_factors_exact(sketch: float) -> None:
    rows = torch.randn(2, 16, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    side = orthonormal_side(rows, "circulant", MergeSettings(sketch=sketch, basis="circulant"), refine=0)
    q = side.expand(torch.eye(16, dtype=torch.float64).expand(2, 16, 16)).mT
    assert (q @ side.K - rows.mT).norm() / rows.norm() < 1e-12
    if sketch == 4:
        spread = torch.linalg.svdvals(q)
        assert 0.6 < spread.min() < spread.max() < 2.2


# --- losslessness ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("basis", ["circulant", "gram", "svd"])
@pytest.mark.parametrize("sketch", [1.0, 2.0, 4.0, 1e6])
def test_a_sum_at_full_rank_loses_nothing(
    mixed: dict[torch.dtype, list[Path]], dtype: torch.dtype, basis: str, sketch: float
) -> None:
    weights = [1.0, -0.5, 2.0, 0.25]
    result = merged(mixed[dtype], rule="sum", rank=17, weights=weights, basis=basis, sketch=sketch)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    assert distance(result, weighted_sum(mixed[dtype], weights)) < bound


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 60),
    n=st.integers(1, 60),
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    basis=st.sampled_from(["circulant", "gram", "svd"]),
    refine=st.sampled_from([0, 1]),
)
def test_any_shapes_sum_exactly(m: int, n: int, ranks: list[int], seed: int, basis: Any, refine: int) -> None:
    pairs = [pair(m, n, r, seed + index) for index, r in enumerate(ranks)]
    settings = MergeSettings(rule="sum", basis=basis, refine=refine)
    core = merge_core(
        torch.cat([b.T for _, b in pairs])[None].contiguous(),
        torch.cat([a for a, _ in pairs])[None],
        ranks,
        [torch.ones(1, dtype=torch.float64)] * len(ranks),
        [1.0] * len(ranks),
        settings,
        ["layer"],
    )
    a, b = core.factors(sum(ranks))
    wanted = torch.stack([b @ a for a, b in pairs]).sum(0)
    # directions below a millionth of the largest count as zero
    assert (b[0] @ a[0] - wanted).norm() < 2e-6 * sum(float(b.norm() * a.norm()) for a, b in pairs)


# --- equality of the bases, and what the result may not depend on ---


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sketch", [1.0, 4.0])
def test_refined_bases_equal_core_space(
    three: list[Path], three64: list[Path], rule: str, sketch: float, tmp_path: Path
) -> None:
    wide = {"w": (400, 300)}  # wide enough for a sketch to leave rows out
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        paths = [adapter(tmp_path / f"{dtype}{seed}", seed, shapes=wide, dtype=dtype) for seed in range(3)]
        common = {"rule": rule, "weights": [1.0, 0.5, 2.0], "seed": 3}
        wanted = merged(paths, basis="svd", **common)
        assert distance(merged(paths, basis="circulant", refine=1, sketch=sketch, **common), wanted) < bound
        assert distance(merged(paths, basis="circulant", refine=0, sketch=1e6, **common), wanted) < bound
        assert distance(merged(paths, basis="gram", **common), wanted) < bound
    for paths, bound in ((three, 1e-4), (three64, 1e-10)):
        wanted = merged(paths, basis="svd", **common)
        assert distance(merged(paths, basis="circulant", sketch=sketch, refine=1, **common), wanted) < bound


@pytest.mark.parametrize("rule", [rule for rule in RULES if "dare" not in rule])
@pytest.mark.parametrize("basis", ["circulant", "gram", "svd"])
def test_the_order_of_the_adapters_does_not_matter(three64: list[Path], rule: str, basis: str) -> None:
    weights, order = [1.0, 0.5, 2.0], [2, 0, 1]
    wanted = merged(three64, rule=rule, weights=weights, basis=basis, refine=1)
    turned = merged([three64[i] for i in order], rule=rule, weights=[weights[i] for i in order], basis=basis, refine=1)
    assert distance(turned, wanted) < 1e-6


def test_a_function_as_rule(three64: list[Path]) -> None:
    def total(tasks: list[Tensor], weights: list[float]) -> Tensor:
        return torch.stack([weight * task for weight, task in zip(weights, tasks, strict=True)]).sum(0)

    weights = [1.0, 0.5, 2.0]
    result = merged(three64, rule=total, weights=weights, rank=12, scale=0.5)
    assert distance(result, {k: 0.5 * v for k, v in weighted_sum(three64, weights).items()}) < 1e-12
    with pytest.raises(
        ValueError, match=r"the rule <lambda> must return a finite tensor of shape \(12, 12\) for 'layers"
    ):
        merge_adapters(three64, rule=lambda tasks, weights: tasks[0][0])


def test_the_sketch_as_space_is_exact_for_a_sum_and_near_for_tsv(three64: list[Path], tmp_path: Path) -> None:
    paths = [adapter(tmp_path / str(seed), seed, shapes={"w": (400, 300)}, dtype=torch.float64) for seed in range(3)]
    wanted = weighted_sum(paths, [1.0] * 3)
    assert distance(merged(paths, rule="sum", space="sketch", rank=12), wanted) < 1e-10
    near = distance(merged(paths, space="sketch", rank=12), merged(paths, rank=12))
    assert 1e-6 < near < 0.5


# --- truncation ---


@pytest.mark.parametrize("sketch", [1.0, 4.0])
@pytest.mark.parametrize("basis", ["circulant", "gram"])
def test_truncation_is_the_best_one(three: list[Path], basis: str, sketch: float) -> None:
    exact = weighted_sum(three, [1.0] * 3)
    config, state = merge_adapters(three, rule="sum", rank=5, basis=basis, sketch=sketch, refine=1)
    assert config["r"] == config["lora_alpha"] == 5
    for name, delta in deltas_of(config, state).items():
        tail = torch.linalg.svdvals(exact[name])[5:].norm()
        assert abs((delta - exact[name]).norm() / tail - 1) < 1e-5
        a, b = (state[f"{PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
        assert torch.allclose(a.norm(dim=1), b.norm(dim=0), rtol=1e-4)  # the scale is shared between the two


def test_truncation_without_refinement_is_nearly_the_best_one(tmp_path: Path) -> None:
    paths = [adapter(tmp_path / str(seed), seed, shapes={"w": (400, 300)}) for seed in range(4)]
    exact = weighted_sum(paths, [1.0] * 4)["w"]
    result = merged(paths, rule="sum", rank=5, basis="circulant")["w"]
    assert 1.001 < (result - exact).norm() / torch.linalg.svdvals(exact)[5:].norm() < 1.3


def test_energy_and_the_rank_that_keeps_enough_of_it(three: list[Path], tmp_path: Path) -> None:
    exact = weighted_sum(three, [1.0] * 3)
    spectra = torch.stack([torch.linalg.svdvals(delta)[:12].square() for delta in exact.values()])
    kept = spectra.sum(0).cumsum(0) / spectra.sum()
    with pytest.warns(UserWarning, match="of the merged change's squared norm") as caught:
        report = merge_adapters(three, tmp_path / "out", rule="sum", rank=2)
    assert report.totals["energy"] == pytest.approx(float(kept[1]), rel=1e-4)
    enough = int((kept < 0.9).sum()) + 1
    assert f"--rank {enough} would keep 90%" in str(caught[0].message)
    assert report.warnings == [str(caught[0].message)]
    with pytest.warns(UserWarning, match=f"--rank {enough} would keep 90%"):
        merge_adapters(three, rule="sum", rank=2)
    for row, spectrum in zip(report.modules, spectra, strict=True):
        assert row["energy"] == pytest.approx(float(spectrum[:2].sum() / spectrum.sum()), rel=1e-4)
        shares = spectrum.sqrt() / spectrum.sqrt().sum()
        assert row["erank_merged"] == pytest.approx(float((-shares * shares.log()).sum().exp()), rel=1e-4)
    for share in (0.5, 0.9, 0.95, 1.0):
        config, _ = merge_adapters(three, rule="sum", rank=f"auto:{share}")
        assert config["r"] == int((kept < share - 1e-9).sum()) + 1


def test_effective_rank_of_the_inputs_is_that_of_the_stacked_changes(three: list[Path], tmp_path: Path) -> None:
    weights = [1.0, 0.5, 2.0]
    report = merge_adapters(three, tmp_path / "out", weights=weights, rank=12)
    for row in report.modules:
        stack = torch.cat([w * deltas(path)[row["name"]] for w, path in zip(weights, three, strict=True)], dim=1)
        sigma = torch.linalg.svdvals(stack)
        shares = (sigma / sigma.sum()).clamp_min(1e-30)
        assert row["erank_in"] == pytest.approx(float((-shares * shares.log()).sum().exp()), rel=1e-4)
        assert (row["R"], row["p"], row["q"]) == (12, 12, 12)


# --- rules ---


@pytest.mark.parametrize("rule", ["sum", "mean", "tsv"])
def test_one_adapter_is_kept(three: list[Path], rule: str) -> None:
    assert distance(merged(three[:1], rule=rule), deltas(three[0])) < 1e-6


@pytest.mark.parametrize("settings", [{"rule": "mean"}, {"rule": "ties", "density": 1.0}])
def test_copies_of_one_adapter_give_that_adapter(three: list[Path], settings: dict) -> None:
    assert distance(merged([three[0]] * 4, **settings), deltas(three[0])) < 1e-6


def test_tasks_in_orthogonal_spaces_are_added_by_tsv(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(d, 8, generator=generator)).Q for d in (40, 30))
    paths = []
    for task in range(2):
        part = slice(4 * task, 4 * task + 4)
        state = {
            f"{PREFIX}q_proj.lora_A.weight": (torch.randn(4, 4, generator=generator) @ right[:, part].T).contiguous(),
            f"{PREFIX}q_proj.lora_B.weight": left[:, part].contiguous(),
        }
        paths.append(write(tmp_path / str(task), state))
    assert distance(merged(paths, rule="tsv", rank=8), merged(paths, rule="sum", rank=8)) < 1e-5


def test_mean_counts_a_missing_module_as_zero(mixed: dict[torch.dtype, list[Path]]) -> None:
    weights = [1.0, 1.0, 2.0, 0.5]
    wanted = {name: value / 4.5 for name, value in weighted_sum(mixed[torch.float64], weights).items()}
    assert distance(merged(mixed[torch.float64], rule="mean", weights=weights, rank=17), wanted) < 1e-12


def test_ties_equals_a_reference(three64: list[Path]) -> None:
    """Trim, elect, average (Yadav et al., 2023), written out in the principal axes of B and A^T."""
    weights, density = [1.0, 0.5, 2.0], 0.3
    result = merged(three64, rule="ties", density=density, weights=weights, basis="svd", rank=12)
    for name, (m, n) in SHAPES.items():
        number = list(SHAPES).index(name)
        pairs = [pair(m, n, 4, 1000 * seed + number) for seed in range(3)]
        u = torch.linalg.svd(torch.cat([b for _, b in pairs], 1), full_matrices=False).U
        v = torch.linalg.svd(torch.cat([a for a, _ in pairs], 0), full_matrices=False).Vh.T
        tasks = [2 * w * u.T @ b @ a @ v for w, (a, b) in zip(weights, pairs, strict=True)]  # alpha / r = 2
        for task in tasks:
            order = task.abs().flatten().argsort(descending=True)
            task.view(-1)[order[round(density * task.numel()) :]] = 0
        wanted = torch.zeros_like(tasks[0])
        for i in range(wanted.shape[0]):
            for j in range(wanted.shape[1]):
                values = [float(task[i, j]) for task in tasks]
                agreeing = [value for value in values if value * sum(values) > 0]
                wanted[i, j] = sum(agreeing) / len(agreeing) if agreeing else 0
        assert (result[name] - u @ wanted @ v.T).norm() / wanted.norm() < 1e-10


def test_election_by_frequency_and_of_ties() -> None:
    tasks = torch.tensor([[[5.0, 1.0, -1.0]], [[-1.0, -1.0, -2.0]], [[-1.0, 0.0, -3.0]]])
    assert torch.equal(rule_functions.elect(tasks, "total"), torch.tensor([[5.0, 1.0, -2.0]]))
    # the second entry is undecided, and takes the sign of the majority of the entries: minus
    assert torch.equal(rule_functions.elect(tasks, "frequency"), torch.tensor([[-1.0, -1.0, -2.0]]))


def test_dare_keeps_the_mean_and_drops_what_it_should() -> None:
    task = torch.ones(1, 200, 200, dtype=torch.float64)
    dropped = rule_functions.drop_randomly(task, 0.3, "0:0", ["layer"])
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.7}
    assert dropped.mean() == pytest.approx(1, abs=0.01)
    both = rule_functions.drop_randomly(task.expand(2, 200, 200), 0.3, "0:0", ["other", "layer"])
    assert torch.equal(both[1], dropped[0])  # the mask belongs to the layer, not to its place
    assert not torch.equal(both[0], dropped[0])
    assert not torch.equal(rule_functions.drop_randomly(task, 0.3, "0:1", ["layer"]), dropped)  # of another task


def test_dare_is_a_sum_of_masked_tasks(three64: list[Path]) -> None:
    """The mean over seeds is the sum, and each task has a mask of its own."""
    exact = weighted_sum(three64, [1.0] * 3)["layers.0.q_proj"]
    results = [merged(three64, rule="dare", drop=0.5, seed=seed, rank=12)["layers.0.q_proj"] for seed in range(200)]
    error = (torch.stack(results).mean(0) - exact).norm() / exact.norm()
    spread = (results[0] - exact).norm() / exact.norm()
    assert spread > 0.3
    assert error < 3 * spread / math.sqrt(200)


def test_iso_makes_the_spectrum_flat(three64: list[Path]) -> None:
    exact = weighted_sum(three64, [1.0] * 3)
    for rule in ("iso", "tsv_iso"):
        for name, delta in merged(three64, rule=rule, rank=12).items():
            sigma = torch.linalg.svdvals(delta)[:12]
            assert torch.allclose(sigma, sigma.mean().expand(12), rtol=1e-9)
            if rule == "iso":
                assert sigma.mean() == pytest.approx(float(torch.linalg.svdvals(exact[name])[:12].mean()), rel=1e-9)


def test_iso_cut_to_a_rank_keeps_the_directions_that_matter(three64: list[Path]) -> None:
    exact = weighted_sum(three64, [1.0] * 3)
    for name, delta in merged(three64, rule="iso", rank=5).items():
        u, sigma, vt = torch.linalg.svd(exact[name])
        wanted = sigma[:12].mean() * u[:, :5] @ vt[:5]
        assert (delta - wanted).norm() / wanted.norm() < 1e-9


# --- peers ---


def core_space_tsv(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Core Space merging (Panariello et al., 2025) with TSV-M, dense where it is simpler."""
    u = torch.linalg.svd(torch.cat([b for _, b in pairs], 1), full_matrices=False).U
    v = torch.linalg.svd(torch.cat([a for a, _ in pairs], 0), full_matrices=False).Vh.T
    return u @ tsv_m([u.T @ b @ a @ v for a, b in pairs]) @ v.T


def tsv_m(tasks: list[Tensor]) -> Tensor:
    """TSV-M (Gargiulo et al., 2025): as in its published code, with a rank of min(p, q) / T for each task."""
    kept = min(tasks[0].shape) // len(tasks)
    triples = [torch.linalg.svd(task, full_matrices=False) for task in tasks]
    u = torch.cat([u[:, :kept] for u, _, _ in triples], 1)
    v = torch.cat([v[:kept] for _, _, v in triples], 0)
    sigma = torch.cat([s[:kept] for _, s, _ in triples])
    (uu, _, uv), (vu, _, vv) = (torch.linalg.svd(x, full_matrices=False) for x in (u, v))
    return uu @ uv @ torch.diag(sigma) @ vu @ vv


def pairs_of(name: str, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    number = list(SHAPES).index(name)
    pairs = [pair(*SHAPES[name], 4, 1000 * seed + number) for seed in range(count)]
    return [(a, 2 * b) for a, b in pairs]  # alpha / r = 2


@pytest.mark.parametrize("basis", ["circulant", "gram", "svd"])
def test_equals_core_space_merging(three64: list[Path], basis: str) -> None:
    wanted = {name: core_space_tsv(pairs_of(name)) for name in SHAPES}
    assert distance(merged(three64, basis=basis, rank=12), wanted) < 1e-10


def test_spans_the_space_of_knots(three64: list[Path]) -> None:
    """KnOTS (Stoica et al., 2025): the SVD of [Delta_1 .. Delta_T] gives the shared left space; ours is the same one."""
    for name, delta in merged(three64, rule="sum", rank=12).items():
        stack = torch.cat([b @ a for a, b in pairs_of(name)], 1)
        u, sigma, _ = torch.linalg.svd(stack, full_matrices=False)
        u = u[:, sigma > 1e-5]
        rows = torch.cat([b.T for _, b in pairs_of(name)])[None].contiguous()
        side = orthonormal_side(rows, "circulant", MergeSettings(basis="circulant"), refine=1)
        q = side.expand(torch.eye(12, dtype=torch.float64)[None])[0].T
        assert u.shape[1] == 12
        assert torch.linalg.svdvals(u.T @ q).min() > 1 - 1e-10
        assert (delta - u @ (u.T @ delta)).norm() < 1e-10 * delta.norm()


class Net(nn.Module):
    """One of every kind of layer that LoRA adapts."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.linear = nn.Linear(16, 24)
        self.transposed = Conv1D(16, 24)  # GPT-2's, with weights (in, out)
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.conv1 = nn.Conv1d(6, 5, 2)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.transposed(torch.tanh(self.linear(self.embed(ids))))
        image = self.conv(hidden.mT.unflatten(1, (4, 4)))
        return self.head(self.conv1(image.flatten(2)).mean(-1))


TARGETS = ["embed", "linear", "transposed", "conv", "conv1"]
IDS = torch.arange(12).reshape(2, 6)


def net_adapters(
    where: Path, count: int = 2, names: tuple[str, ...] = (), **config: Any
) -> tuple[nn.Module, list[Path]]:
    """A model with random LoRAs of different ranks on all kinds of layers, and their directories."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = None
    for index in range(count):
        usual = {"r": 3 + index, "lora_alpha": 6, "target_modules": TARGETS, "init_lora_weights": False}
        chosen = LoraConfig(**{**usual, **config})
        name = f"a{index}"
        if model is None:
            base = Net()
            model = get_peft_model(base, chosen, adapter_name=name)
        else:
            model.add_adapter(name, chosen)
    model.save_pretrained(str(where))
    return model, [where / f"a{index}" for index in range(count)]


def test_every_kind_of_layer_and_the_answer_of_the_loaded_model(tmp_path: Path) -> None:
    """PEFT loads the merged adapter, and the logits are those of a base whose weights were patched by hand."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model, paths = net_adapters(tmp_path / "in")
    merge_adapters(paths, tmp_path / "out", rule="sum", rank=7, weights=[0.75, 2.0])
    torch.manual_seed(0)
    patched = Net()
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weight = patched.get_submodule(name.removeprefix(PREFIX)).weight
            assert isinstance(weight, Tensor)
            weight.data += 0.75 * layer.get_delta_weight("a0") + 2.0 * layer.get_delta_weight("a1")
    torch.manual_seed(0)
    base = Net()
    before = base(IDS)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert torch.allclose(loaded(IDS), patched(IDS), atol=1e-4)
    assert (patched(IDS) - before).abs().max() > 0.1
    with safe_open(tmp_path / "out" / WEIGHTS, framework="pt") as file:
        assert sorted(file.keys()) == sorted(load_file(tmp_path / "out" / WEIGHTS))
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor(f"{PREFIX}conv.lora_A.weight").shape == (7, 4, 3, 3)
        assert file.get_tensor(f"{PREFIX}conv.lora_B.weight").shape == (6, 7, 1, 1)


@pytest.mark.parametrize("combination", ["cat", "svd"])
def test_equals_add_weighted_adapter_of_peft(tmp_path: Path, combination: str) -> None:
    from peft import PeftModel

    model, paths = net_adapters(tmp_path / "in", target_modules=["linear", "transposed"])
    rank = {"cat": 7, "svd": 4}[combination]
    model.add_weighted_adapter(["a0", "a1"], [0.75, 2.0], "theirs", combination_type=combination)
    merge_adapters(paths, tmp_path / "out", rule="sum", rank=rank, weights=[0.75, 2.0])
    assert isinstance(model, PeftModel)
    model.load_adapter(str(tmp_path / "out"), "ours")
    for name in ("linear", "transposed"):
        layer: Any = model.get_submodule(f"{PREFIX}{name}")
        theirs, ours = (layer.get_delta_weight(adapter) for adapter in ("theirs", "ours"))
        assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_in_a_model(tmp_path: Path) -> None:
    model, paths = net_adapters(tmp_path / "in")
    merge_adapters(paths, tmp_path / "out", rule="ties", density=0.5, weights=[1, 0.5], rank=3)
    add_weighted_adapter(model, ["a0", "a1"], [1, 0.5], "both", "circu_ties", 3, density=0.5)
    model.load_adapter(str(tmp_path / "out"), "file")  # type: ignore[operator]
    assert model.active_adapters == ["a0"]
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".both." in name)
    answers = []
    for name in ("both", "file"):
        model.set_adapter(name)  # type: ignore[operator]
        answers.append(model(IDS))
    assert torch.allclose(*answers, atol=1e-5)
    add_weighted_adapter(model, ["a0", "a1"], [1, 0.5], "dare", "circu_dare", density=0.9)
    with pytest.raises(ValueError, match="no adapter 'a7', but a0, a1"):
        add_weighted_adapter(model, ["a7"], [1.0], "x")
    with pytest.raises(ValueError, match="has an adapter 'a1' already"):
        add_weighted_adapter(model, ["a0"], [1.0], "a1")
    with pytest.raises(ValueError, match="svd_clamp is for PEFT"):
        add_weighted_adapter(model, ["a0"], [1.0], "x", svd_clamp=0.9)
    with pytest.raises(ValueError, match="at least one adapter"):
        add_weighted_adapter(model, [], [], "x")


def test_in_a_model_with_the_types_of_peft(tmp_path: Path) -> None:
    model, _ = net_adapters(tmp_path / "in", target_modules=["linear"])
    add_weighted_adapter(model, ["a0", "a1"], [0.75, 2.0], "passed", "svd", 4)
    model.add_weighted_adapter(["a0", "a1"], [0.75, 2.0], "direct", "svd", 4)  # type: ignore[operator]
    layer: Any = model.get_submodule(f"{PREFIX}linear")
    assert torch.equal(layer.get_delta_weight("passed"), layer.get_delta_weight("direct"))
    with pytest.raises(ValueError, match="seed: only for combination types that begin with 'circu_'"):
        add_weighted_adapter(model, ["a0", "a1"], [1, 1], "x", "svd", seed=1)


# --- other tensors ---


def test_biases_beside_b(tmp_path: Path) -> None:
    """A sum keeps the answer exactly, biases included; other rules average them."""
    from peft import PeftModel

    model, paths = net_adapters(tmp_path / "in", target_modules=["linear"], lora_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_B.a0.bias", "lora_B.a1.bias")):
            parameter.data.normal_()
    model.save_pretrained(str(tmp_path / "in"))  # type: ignore[operator]
    key = f"{PREFIX}linear.lora_B.bias"
    first, second = (load_file(path / WEIGHTS)[key] for path in paths)
    config, state = merge_adapters(paths, rule="sum", rank=7, weights=[0.5, 2.0])
    assert config["lora_bias"] is True
    assert torch.allclose(state[key], 0.5 * 6 / 3 * first + 2.0 * 6 / 4 * second)
    _, state = merge_adapters(paths, rule="tsv", weights=[0.5, 2.0])
    assert torch.allclose(state[key], (0.5 * 6 / 3 * first + 2.0 * 6 / 4 * second) / 2.5)
    merge_adapters(paths, tmp_path / "out", rule="sum", rank=7)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Net(), str(tmp_path / "out"))
    layer: Any = loaded.get_submodule(f"{PREFIX}linear")
    assert torch.allclose(layer.lora_B["default"].bias, 2 * first + 1.5 * second, atol=1e-6)


def test_biases_of_the_base(tmp_path: Path) -> None:
    key = f"{PREFIX}layers.0.q_proj.base_layer.bias"
    biases = [torch.full((48,), value) for value in (1.0, 5.0)]
    paths = [adapter(tmp_path / str(i), i, extra={key: bias}, bias="lora_only") for i, bias in enumerate(biases)]
    config, state = merge_adapters(paths, weights=[3.0, 1.0], modules_to_save="drop")
    assert torch.allclose(state[key], torch.full((48,), 2.0))
    assert config["bias"] == "lora_only"


def test_policies_for_saved_modules(tmp_path: Path) -> None:
    keys = [f"{PREFIX}head.weight", f"{PREFIX}head.bias"]
    paths = [
        adapter(
            tmp_path / str(i),
            i,
            extra={key: torch.full((3,), float(i), dtype=torch.float16) for key in keys},
            modules_to_save=["head"],
            bias="all" if i else "none",
        )
        for i in range(2)
    ]
    with pytest.warns(UserWarning, match=r"2 tensors that the adapters hold whole were averaged, e.g. 'head.bias'"):
        merge_adapters(paths, tmp_path / "out", weights=[1.0, 3.0], rank=8)
    state = load_file(tmp_path / "out" / WEIGHTS)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["head"]
    for key in keys:
        assert state[key].dtype == torch.float16
        assert torch.equal(state[key], torch.full((3,), 0.75, dtype=torch.float16))
    config, state = merge_adapters(paths, modules_to_save="first")
    assert torch.equal(state[keys[0]], torch.zeros(3, dtype=torch.float16))
    config, state = merge_adapters(paths, modules_to_save="drop")
    assert config["modules_to_save"] is None
    assert not set(keys) & set(state)
    with pytest.raises(InputError, match=r"'base_model.model.head.bias' is in more than one adapter: '.*0', '.*1'"):
        merge_adapters(paths, modules_to_save="error")
    merge_adapters(paths[:1], modules_to_save="error")  # nothing to decide
    with pytest.raises(ValueError, match=r"weights of the adapters that have '.*head.bias' add up to 0"):
        merge_adapters(paths, weights=[1.0, -1.0])
    other = adapter(tmp_path / "other", 5, extra={keys[0]: torch.zeros(4)}, modules_to_save=["head"])
    with pytest.raises(InputError, match=r"'.*head.weight' has different shapes in .*\[\(3,\), \(4,\)\]"):
        merge_adapters([paths[0], other])
    counts = [
        adapter(tmp_path / f"int{i}", i, extra={keys[0]: torch.tensor([i])}, modules_to_save=["head"]) for i in range(2)
    ]
    with pytest.raises(InputError, match="holds different integers"):
        merge_adapters(counts)
    assert torch.equal(merge_adapters([counts[1], counts[1]])[1][keys[0]], torch.tensor([1]))


def test_zeros(tmp_path: Path) -> None:
    """Untrained adapters (B = 0), alone and beside a trained one."""
    names = [f"{PREFIX}q_proj.lora_{letter}.weight" for letter in "AB"]
    empty = write(tmp_path / "empty", dict(zip(names, (torch.randn(4, 30), torch.zeros(40, 4)), strict=True)))
    nothing = write(tmp_path / "nothing", dict(zip(names, (torch.zeros(4, 30), torch.zeros(40, 4)), strict=True)))
    full = adapter(tmp_path / "full", 1, shapes={"q_proj": (40, 30)})
    for rule in RULES:
        for basis in ("circulant", "gram", "svd"):
            for paths in ([empty, empty], [nothing], [nothing, empty]):
                _, state = merge_adapters(paths, rule=rule, basis=basis)
                assert not any(value.any() for value in state.values())
    assert distance(merged([empty, full], rule="sum"), deltas(full)) < 1e-6
    report = merge_adapters([empty, empty], tmp_path / "out")
    assert report.totals["energy"] == 1.0
    assert report.totals["erank_in"] == 0.0
    assert merge_adapters([nothing], rank="auto:0.9")[0]["r"] == 1


# --- files ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(tmp_path: Path, dtype: torch.dtype) -> None:
    paths = [adapter(tmp_path / str(seed), seed, dtype=dtype) for seed in range(3)]
    exact = weighted_sum(paths, [1.0] * 3)
    _, state = merge_adapters(paths, rule="sum", rank=12)
    assert {value.dtype for value in state.values()} == {dtype}
    assert distance(merged(paths, rule="sum", rank=12, dtype="float32"), exact) < 1e-5
    assert distance(merged(paths, rule="sum", rank=12), exact) < 2 * torch.finfo(dtype).eps
    single = adapter(tmp_path / "single", 9)
    assert merge_adapters([paths[0], single])[1][f"{PREFIX}layers.0.q_proj.lora_A.weight"].dtype == torch.float32


def test_the_configuration_of_the_result(tmp_path: Path, mixed: dict[torch.dtype, list[Path]]) -> None:
    config, _ = merge_adapters(mixed[torch.float32])
    assert config["r"] == config["lora_alpha"] == 5
    assert (config["use_rslora"], config["rank_pattern"], config["alpha_pattern"]) == (False, {}, {})
    assert config["target_modules"] == ["q_proj", "up_proj"]
    assert config["inference_mode"] is True
    shapes = [{"layers.0.q_proj": (48, 32)}, {"layers.1.up_proj": (40, 48)}]
    lists = [adapter(tmp_path / f"l{i}", i, shapes=s, target_modules=[t]) for i, (s, t) in
             enumerate(zip(shapes, ("q_proj", "up_proj"), strict=True))]  # fmt: skip
    assert merge_adapters(lists)[0]["target_modules"] == ["q_proj", "up_proj"]
    regular = [adapter(tmp_path / f"r{i}", i, shapes=s, target_modules=f".*{i}.*") for i, s in enumerate(shapes)]
    assert merge_adapters(regular)[0]["target_modules"] == ["layers.0.q_proj", "layers.1.up_proj"]
    one = [adapter(tmp_path / f"o{i}", i, shapes=shapes[0], layers_to_transform=[0]) for i in range(2)]
    assert merge_adapters(one)[0]["layers_to_transform"] == [0]


def test_pickled_weights_are_read_without_running_them(tmp_path: Path, three: list[Path]) -> None:
    where = tmp_path / "pickled"
    where.mkdir()
    torch.save(load_file(three[0] / WEIGHTS), where / "adapter_model.bin")
    (where / "adapter_config.json").write_text((three[0] / "adapter_config.json").read_text())
    report = merge_adapters([where], tmp_path / "out", rule="sum")
    assert report.totals["modules"] == 3
    assert distance(deltas(tmp_path / "out"), deltas(three[0])) < 1e-6

    torch.save({"x": threading.Thread}, where / "adapter_model.bin")
    with pytest.raises(InputError, match="without running code from it"):
        merge_adapters([where])


def test_runs_and_cached_hub_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(tmp_path / "run" / "adapter", 1)
    assert distance(merged([tmp_path / "run"], rule="sum"), deltas(tmp_path / "run" / "adapter")) < 1e-6
    snapshot = adapter(tmp_path / "hub" / "models--me--mine" / "snapshots" / "abc", 2)
    (tmp_path / "hub" / "models--me--mine" / "refs").mkdir()
    (tmp_path / "hub" / "models--me--mine" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert distance(merged(["me/mine"], rule="sum"), deltas(snapshot)) < 1e-6  # type: ignore[list-item]
    with pytest.raises(InputError, match="no directory 'me/other', and no adapter of this name"):
        merge_adapters(["me/other"])


def test_the_same_seed_gives_the_same_bytes(three: list[Path], tmp_path: Path) -> None:
    runs: dict[str, dict] = {"a": {}, "b": {}, "threads": {"jobs": 3}, "seed": {"seed": 1}}
    for name, options in runs.items():
        merge_adapters(three, tmp_path / name, rule="dare", basis="circulant", sketch=1, rank=12, **options)
    files = {name: (tmp_path / name / WEIGHTS).read_bytes() for name in ("a", "b", "threads", "seed")}
    assert files["a"] == files["b"] == files["threads"]
    assert files["a"] != files["seed"]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        merge_adapters(three, tmp_path / "two", rule="dare", basis="circulant", sketch=1, rank=12)
    finally:
        torch.set_num_threads(before)
    assert distance(deltas(tmp_path / "two"), deltas(tmp_path / "a")) < 1e-6


def test_what_is_written(three: list[Path], tmp_path: Path) -> None:
    import hashlib

    out = tmp_path / "new" / "out"
    report = merge_adapters(three, out, rule="sum", rank=12, seed=7)
    names = {file.name for file in out.iterdir()}
    assert names == {"adapter_config.json", WEIGHTS, "merge_report.json", "README.md"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    written = json.loads((out / "merge_report.json").read_text())
    assert {**written, "made_with": None} == {**json.loads(report.to_json()), "made_with": None}
    readme = (out / "README.md").read_text()
    for path in three:
        digest = hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
        assert f"| {path.parent.name}/{path.name} | 1 | {digest} |" in readme
    assert "seed=7" in readme
    assert "rule=sum" in readme
    assert 'base_model: "base"' in readme


def test_compare_bases_and_plan(three: list[Path]) -> None:
    plan = plan_merge(three)
    rows = {row["basis"]: row for row in compare_bases(plan)}
    assert list(rows) == ["svd", "gram", "circulant"]
    assert rows["svd"]["distance"] < 1e-12
    assert 0 < rows["circulant"]["distance"] < 1e-4
    assert all(row["seconds"] > 0 for row in rows.values())
    content = plan.to_dict()
    assert content["modules"][0] == {"name": "layers.0.q_proj", "shape": [48, 32], "ranks": [4, 4, 4]}
    assert (content["rank"], content["dtype"], content["other_tensors"]) == (4, "float32", [])
    assert content["predicted_seconds"] > 0
    assert content["predicted_bytes"] >= 12 * (48 + 40) * 4
    assert plan_merge(three, rank="auto:0.9").to_dict()["rank"] == "auto:0.9"


def test_distance_of_an_unrefined_basis_shows(tmp_path: Path) -> None:
    paths = [adapter(tmp_path / str(seed), seed, shapes={"w": (400, 300)}) for seed in range(3)]
    rows = {row["basis"]: row for row in compare_bases(plan_merge(paths, refine=0))}
    assert rows["circulant"]["distance"] > 1e-3
    assert rows["gram"]["distance"] < 1e-5


def test_auto_takes_the_cheaper_basis(three: list[Path], tmp_path: Path) -> None:
    """The Gram matrix, but for float64 factors of large layers, where it needs a second step as the sketch does."""
    from acclimate.merge.circumerge import choose_basis, refinement

    def chosen(columns: int, d: int, dtype: torch.dtype) -> str:
        rows = torch.empty(1, columns, d, dtype=dtype)
        return choose_basis(MergeSettings(), rows, rows)

    assert chosen(128, 576, torch.float32) == "gram"
    assert chosen(128, 4096, torch.float32) == "gram"
    assert chosen(128, 4096, torch.float64) == "circulant"
    report = merge_adapters(three, tmp_path / "out", rank=12)
    assert report.totals["basis"] == ["gram"]
    single, double = torch.float32, torch.float64
    assert [refinement(MergeSettings(), "gram", dtype) for dtype in (single, double)] == [0, 1]
    named = MergeSettings(rule="sum", basis="circulant")
    assert [refinement(chosen, "circulant", single) for chosen in (named, MergeSettings(rule="sum"))] == [0, 1]


# --- errors ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "tsvv"}, "rule is sum, mean, .*; not 'tsvv'. Did you mean 'tsv'"),
        ({"basis": "qr"}, "basis is auto, circulant, gram, svd; not 'qr'"),
        ({"space": "moon"}, "space is core, sketch; not 'moon'"),
        ({"sign": "plus"}, "sign is total, frequency; not 'plus'"),
        ({"refine": 2}, "refine is 0 or 1, not 2"),
        ({"density": 0.0}, "density must be above 0 and at most 1, not 0.0"),
        ({"density": 1.5}, "density must be above 0"),
        ({"drop": 0.0}, "drop must be above 0 and below 1, not 0.0"),
        ({"drop": 1.0}, "drop must be above 0 and below 1"),
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"rank": "auto:2"}, "rank is a number or auto:E"),
        ({"rank": "most"}, "rank is a number or auto:E"),
        ({"sketch": 0.5}, "sketch must be at least 1 row per column"),
        ({"scale": math.nan}, "scale must be a finite number"),
        ({"space": "sketch", "basis": "gram"}, "space='sketch' needs the circulant basis"),
        ({"weights": [1.0]}, "there are 3 adapters and 1 weights"),
        ({"weights": [1.0, math.inf, 1.0]}, "weights must be finite numbers"),
        ({"weights": [1.0, 1.0, -2.0], "rule": "mean"}, "the weights add up to 0"),
        ({"modules_to_save": "keep"}, "modules_to_save is mean, first, error, drop; not 'keep'"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"device": "abacus"}, "device is cpu or cuda, not 'abacus'"),
        ({"dtype": "int8"}, "dtype is float64, float32, float16, bfloat16; not 'int8'"),
    ],
)
def test_arguments_out_of_range(three: list[Path], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_adapters(three, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here(three: list[Path]) -> None:
    with pytest.raises(MissingError, match=r"device 'cuda' is not here. Available: cpu"):
        merge_adapters(three, device="cuda")


def test_no_adapters() -> None:
    with pytest.raises(ValueError, match="at least one adapter"):
        merge_adapters([])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "is of type LOHA; only LoRA adapters"),
        ({"use_dora": True}, "not a plain low-rank pair: its adapter_config.json has use_dora=True"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]"),
        ({"some_new_option": "on"}, "some_new_option='on'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed the base model's weights"),
        ({"r": 8}, r"'layers.0.q_proj' has factors A \(4, 32\) and B \(48, 4\), and adapter_config.json says rank 8"),
    ],
)
def test_adapters_that_are_not_plain_pairs(tmp_path: Path, three: list[Path], config: dict, message: str) -> None:
    odd = adapter(tmp_path / "odd", 1)
    content = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps({**content, **config}))
    with pytest.raises(InputError, match=message) as caught:
        merge_adapters([three[0], odd])
    assert f"{tmp_path.name}/odd" in str(caught.value)


def test_options_at_their_defaults_are_no_error(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=4, target_modules=["q_proj", "up_proj"]).save_pretrained(str(tmp_path / "full"))
    whole = json.loads((tmp_path / "full" / "adapter_config.json").read_text())
    merge_adapters([adapter(tmp_path / "a", 1, **whole, some_new_option=None)])


def test_tensors_that_are_not_pairs(tmp_path: Path) -> None:
    key = f"{PREFIX}layers.0.q_proj.lora_magnitude_vector"
    with pytest.raises(InputError, match=r"not a plain low-rank pair: it has a tensor '.*lora_magnitude_vector'"):
        merge_adapters([adapter(tmp_path / "dora", 1, extra={key: torch.ones(3)})])
    half = write(tmp_path / "half", {f"{PREFIX}q_proj.lora_A.weight": torch.ones(4, 3)})
    with pytest.raises(InputError, match=r"has 'base_model.model.q_proj.lora_A.weight' but no '.*lora_B.weight'"):
        merge_adapters([half])
    with pytest.raises(InputError, match="has no LoRA tensors"):
        merge_adapters([write(tmp_path / "none", {"x": torch.ones(1)})])
    with pytest.raises(InputError, match="has type F8_E4M3, which cannot be merged"):
        merge_adapters([write(tmp_path / "f8", {"x": torch.ones(1).to(torch.float8_e4m3fn)})])


def test_different_bases_and_shapes(tmp_path: Path, three: list[Path]) -> None:
    other = adapter(tmp_path / "other", 1, base_model_name_or_path="llama")
    with pytest.raises(
        InputError, match=r"different base models: '.*a0' of 'base', '.*other' of 'llama'.*--allow-different-base"
    ):
        merge_adapters([three[0], other])
    merge_adapters([three[0], other], allow_different_base=True)
    merge_adapters([three[0], adapter(tmp_path / "unnamed", 1, base_model_name_or_path=None)])
    wide = adapter(tmp_path / "wide", 1, shapes={"layers.0.q_proj": (48, 64)})
    with pytest.raises(
        InputError,
        match=r"'layers.0.q_proj' differs in shape: A \(rank, 32\) and B \(48, rank\) in '.*a0', A \(rank, 64\) .* in '.*wide'",
    ):
        merge_adapters([three[0], wide])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("letter", "AB")
def test_values_that_are_not_finite(tmp_path: Path, three: list[Path], value: float, letter: str) -> None:
    bad = adapter(tmp_path / "bad", 1)
    state = load_file(bad / WEIGHTS)
    key = f"{PREFIX}layers.1.q_proj.lora_{letter}.weight"
    state[key][1, 2] = value
    write(bad, state)
    with pytest.raises(InputError, match=rf"'{key}' of adapter '.*bad' has values that are not finite"):
        merge_adapters([three[0], bad], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]  # nothing is left


def test_a_result_that_does_not_fit_its_type(tmp_path: Path) -> None:
    big = adapter(tmp_path / "big", 1, lora_alpha=10**13)
    with pytest.raises(ValueError, match=r"does not fit into torch.float16.*wider --dtype"):
        merge_adapters([big], tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_damaged_and_missing_files(tmp_path: Path, three: list[Path]) -> None:
    cut = adapter(tmp_path / "cut", 1)
    data = (cut / WEIGHTS).read_bytes()
    (cut / WEIGHTS).write_bytes(data[: len(data) - 100])
    out = tmp_path / "out"
    merge_adapters(three, out, rank=12)
    before = (out / WEIGHTS).read_bytes()
    with pytest.raises(InputError, match=r"adapter_model.safetensors' is damaged or incomplete"):
        merge_adapters([three[0], cut], out, overwrite=True)
    assert (out / WEIGHTS).read_bytes() == before
    with pytest.raises(InputError, match=r"out' exists. Choose another place with -o, or replace it with --overwrite"):
        merge_adapters(three, out, rank=12)
    merge_adapters(three[:2], out, rank=12, overwrite=True)
    assert (out / WEIGHTS).read_bytes() != before
    (cut / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"has no adapter_model.safetensors"):
        merge_adapters([cut])
    (cut / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"is not a JSON object"):
        merge_adapters([cut])
    with pytest.raises(InputError, match=r"no adapter_config.json in"):
        merge_adapters([tmp_path])


# --- a process of its own: kills and memory ---


def test_a_killed_merge_goes_on(processes: Any, mixed: dict[torch.dtype, list[Path]], tmp_path: Path) -> None:
    """Killed in the first, a middle and the last batch, with half a tensor written, it ends with the bytes of one that was not."""
    paths = [str(path) for path in mixed[torch.float32]]
    settings = {"rank": "auto:0.99", "rule": "dare_ties"}
    out, log = tmp_path / "out", tmp_path / "log"
    assert processes(worker.killed_at, worker.merge, 0, paths, str(tmp_path / "reference"), str(log), settings) == 0
    assert log.read_text() == "6\n"  # A and B of three layers, a batch each
    for kill, left in ((1, 0), (4, 1), (3, 2)):  # the second time one batch is done, the third time two
        assert processes(worker.killed_at, worker.merge, kill, paths, str(out), str(log), settings) == -signal.SIGKILL
        assert not out.exists()
        journal = (tmp_path / f"{PARTIAL}out" / "journal.jsonl").read_text().splitlines()
        assert sum("batch" in json.loads(line) for line in journal) == left, log.read_text()
    assert processes(worker.killed_at, worker.merge, 0, paths, str(out), str(log), settings) == 0
    assert log.read_text() == "2\n"  # only the last layer was merged again
    for name in (WEIGHTS, "adapter_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "reference" / name).read_bytes()
    reports = [json.loads((where / "merge_report.json").read_text()) for where in (out, tmp_path / "reference")]
    for report in reports:
        for row in [*report["modules"], report["totals"]]:
            row.pop("seconds")
        report.pop("directory")
    assert reports[0] == reports[1]
    assert not list(tmp_path.glob(f"{PARTIAL}*"))


def test_a_killed_merge_of_something_else_is_not_taken_up(processes: Any, three: list[Path], tmp_path: Path) -> None:
    paths, out, log = [str(path) for path in three], tmp_path / "out", tmp_path / "log"
    assert processes(worker.killed_at, worker.merge, 5, paths, str(out), str(log), {"seed": 1}) == -signal.SIGKILL
    assert processes(worker.killed_at, worker.merge, 5, paths, str(out), str(log), {"seed": 2}) == -signal.SIGKILL
    adapter(tmp_path / "changed", 77)
    assert (
        processes(
            worker.killed_at, worker.merge, 0, [*paths[:2], str(tmp_path / "changed")], str(out), str(log), {"seed": 2}
        )
        == 0
    )
    assert log.read_text().splitlines()[-1] == "6"
    merge_adapters([*three[:2], tmp_path / "changed"], tmp_path / "reference", seed=2)
    assert distance(deltas(out), deltas(tmp_path / "reference")) < 1e-6


def test_two_processes_do_not_write_one_result(three: list[Path], tmp_path: Path) -> None:
    from acclimate.unfinished import Unfinished

    other = Unfinished(tmp_path / "out", {"by": "another"})
    with pytest.raises(InputError, match="is in use by process"):
        merge_adapters(three, tmp_path / "out")
    other.release()
    merge_adapters(three, tmp_path / "out", rank=12)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_memory_is_that_of_the_largest_layer(processes: Any, tmp_path: Path) -> None:
    """32 adapters with 36 layers: over 100 MB of files, of which a merge may hold three times the largest layer and 200 MB."""
    generator = torch.Generator().manual_seed(0)
    m, n, r, layers = 2048, 1024, 8, 36
    values = torch.randn(m * r, generator=generator)
    paths = []
    for task in range(32):
        state = {}
        for layer in range(layers):
            shift = values.roll(1009 * task + layer)
            state[f"{PREFIX}{layer}.q_proj.lora_A.weight"] = shift[: r * n].reshape(r, n).clone()
            state[f"{PREFIX}{layer}.q_proj.lora_B.weight"] = shift.reshape(m, r).clone()
        paths.append(str(write(tmp_path / f"a{task}", state, r=r)))
    largest = 32 * r * (m + n) * 4
    assert layers * largest > 100e6
    assert processes(worker.peak, worker.merge, paths, str(tmp_path / "out"), str(tmp_path / "log")) == 0
    assert int((tmp_path / "log").read_text()) < 3 * largest + 200e6
    assert int((tmp_path / "log").read_text()) < layers * largest
