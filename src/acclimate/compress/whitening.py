"""Compress a model's linear layers to low rank, for the inputs that each layer will really see. No fine-tuning, text only.

For a layer W (m x n) with inputs x in the original model and x^ in the model as far as it has been compressed, C = E[x^ x^^T] and
M = E[x x^^T], the matrix of rank r that minimises

    E ||t - W^ x^||^2 + lambda ||W - W^||^2        t = (1 - beta) W x^ + beta W x        lambda = 1e-6 tr(C) / n

is found in whitened coordinates. With C + lambda I = S S^T,

    Y = W [(1 - beta) S + beta (M + lambda I) S^-T] = U diag(sigma) V^T
    W^ = B A,   B = U_r diag(sigma_r)^(1/2)  (m x r),   A = diag(sigma_r)^(1/2) V_r^T S^-1  (r x n)

so that the dropped singular values are the error: for beta = 0, E ||(W - W^) x^||^2 = sum_{i > r} sigma_i^2. Whitening with x in place
of x^ (SVD-LLM; here refresh="none") is no longer optimal once the layers below have changed, and its errors grow with depth. beta > 0
also pulls a layer back to what the original model would have computed from its own inputs.

Scale: `blocks.py` streams block by block: memory is the hidden states of the calibration text and the model, or one block of a model whose
weights lie on disk (`device_map={"": "disk"}`, given a `checkpoint_dir`). The solves are one eigendecomposition a group of layers with
one input and one SVD a layer.

Source: "Mitigating Error Propagation in Low-Rank Approximation of Large Models via Distribution-Aware Whitening", OpenReview 89Cafo48YM
(the evolving distribution); SVD-LLM, arXiv 2403.07378 (truncation-aware whitening, ranks from a ratio); COALA, arXiv 2507.07580 (QR in
place of the Gram matrix); SAES-SVD, arXiv 2602.03051 (targets from the original stream). beta, lambda and the energy allocation are ours.
"""

from __future__ import annotations

import heapq
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acclimate.compress.blocks import (
    Group,
    Refresh,
    Streamed,
    choose_layers,
    progress_bar,
    restore,
    stream_blocks,
)
from acclimate.compress.low_rank_linear import LowRankLinear, low_rank_layers, mark
from acclimate.compress.offload import weights_once
from acclimate.compress.quantizer import unmark
from acclimate.compress.streams import Batch
from acclimate.compress.text import calibration_batches, hold_out, token_loss
from acclimate.linalg import gram_triangle, truncated_svd, whitening_pair, whitening_pair_of_root
from acclimate.show import Silent

Solver = Literal["eigh", "qr", "cholesky"]
Allocation = Literal["uniform", "energy"]

RIDGE = 1e-6  # of the mean eigenvalue of C
RIDGE_FEW = 1e-3  # where there are fewer tokens than inputs
BETAS = (0.0, 0.25, 0.5, 0.75, 1.0)  # what beta="auto" tries


# --- the mathematics ---


def uniform_rank(out_features: int, in_features: int, ratio: float) -> int:
    """The largest rank whose factors have at most (1 - ratio) m n numbers; at least 1."""
    return max(1, int((1 - ratio) * out_features * in_features / (out_features + in_features)))


def saves(shape: Sequence[int], rank: int) -> bool:
    """Whether factors of this rank are smaller than the matrix (m, n)."""
    return rank * (shape[0] + shape[1]) < shape[0] * shape[1]


@dataclass(frozen=True)
class Whitened:
    """S and S^-1 (n, n), and K (n, n) with Y = W K."""

    S: Tensor
    S_inv: Tensor
    K: Tensor


def whiten(group: Group, beta: float = 0.0, solver: Solver = "eigh") -> Whitened:
    """Coordinates in which the inputs of a group have the covariance I, and the target in them."""
    size = (group.gram if group.gram is not None else group.root).shape[1]  # type: ignore[union-attr]
    share = RIDGE if group.tokens >= size else RIDGE_FEW
    if group.gram is None:
        assert group.root is not None
        root = group.root / group.tokens**0.5
        ridge = share * float(root.square().sum()) / size
        S, S_inv = whitening_pair_of_root(root, ridge)
    else:
        ridge = share * float(group.gram.trace()) / size
        S, S_inv = whitening_pair(group.gram, ridge, "cholesky" if solver == "cholesky" else "eigh")
    if beta == 0 or group.cross is None:
        return Whitened(S, S_inv, S)
    pulled = group.cross + ridge * torch.eye(size, dtype=torch.float64)
    return Whitened(S, S_inv, (1 - beta) * S + beta * pulled @ S_inv.T)


def factors(Y: Tensor, S_inv: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B (m, r), A (r, n), all singular values) of a target Y (m, n) in whitened coordinates."""
    U, sigma, Vt = truncated_svd(Y, rank)
    root = sigma[:rank].sqrt()
    return U * root, (root[:, None] * Vt) @ S_inv, sigma


def dead_inputs(group: Group) -> Tensor:
    """(n,) booleans: inputs that were zero for every token."""
    if group.gram is not None:
        return group.gram.diagonal() == 0
    assert group.root is not None
    return group.root.square().sum(0) == 0


def energy_ranks(
    spectra: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], ratio: float
) -> tuple[dict[str, int], float, float]:
    """(ranks, predicted loss, that of uniform ranks): ranks that minimise sum_l sum_{i > r_l} sigma^2_{l,i} / sum_i sigma^2_{l,i} with no
    more parameters than uniform ranks have. `spectra` holds sigma^2, largest first; `shapes` (m, n)."""
    uniform = {name: uniform_rank(shapes[name][0], shapes[name][1], ratio) for name in spectra}
    cost = {name: sum(shapes[name]) for name in spectra}
    left = sum(uniform[name] * cost[name] for name in spectra)
    shares = {name: values / values.sum().clamp_min(1e-300) for name, values in spectra.items()}
    ranks = dict.fromkeys(spectra, 0)
    queue = [(-float(shares[name][0]) / cost[name], name) for name in spectra]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        if cost[name] > left or not saves(shapes[name], ranks[name] + 1):
            continue
        left -= cost[name]
        ranks[name] += 1
        if ranks[name] < len(shares[name]):
            heapq.heappush(queue, (-float(shares[name][ranks[name]]) / cost[name], name))

    def loss(chosen: Mapping[str, int]) -> float:
        return sum(float(shares[name][chosen[name] :].sum()) for name in chosen)

    if min(ranks.values()) == 0 or loss(uniform) < loss(ranks):  # the last steps of a budget may not fit
        ranks = uniform
    return ranks, loss(ranks), loss(uniform)


# --- what is done to each layer ---


class _Compress:
    """`BlockMethod`: replace a layer by its factors."""

    def __init__(self, ranks: Mapping[str, int], beta: float, solver: Solver, refresh: Refresh, dtype: Any) -> None:
        self.ranks, self.beta, self.solver, self.refresh, self.dtype = ranks, beta, solver, refresh, dtype
        self.few: list[str] = []

    def prepare(self, group: Group) -> Whitened:
        found = whiten(group, self.beta, self.solver)
        if group.tokens < len(found.S):
            self.few += group.names
        return found

    def replace(
        self, name: str, linear: nn.Linear, group: Group, prepared: Whitened
    ) -> tuple[nn.Module | None, dict[str, Any]]:
        W = linear.weight.detach().double().cpu()
        rank = self.ranks[name]
        B, A, sigma = factors(W @ prepared.K, prepared.S_inv, rank)
        if not (B.isfinite().all() and A.isfinite().all()):
            raise FloatingPointError("the factors are not finite numbers")
        dead = dead_inputs(group)
        A[:, dead] = 0
        energy = sigma.square()
        facts: dict[str, Any] = {
            "rank": rank,
            "local": float((energy[rank:].sum() / energy.sum().clamp_min(1e-300)).sqrt()),
            "misalignment": None if self.refresh == "none" else misalignment(W, B @ A, prepared.S, rank),
            "dead_inputs": int(dead.sum()),
        }
        dtype = self.dtype or linear.weight.dtype
        return LowRankLinear.from_factors(B.to(dtype), A.to(dtype), linear.bias), facts

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        return LowRankLinear.from_factors(state["second.weight"], state["first.weight"], state.get("second.bias"))


def misalignment(W: Tensor, W_low: Tensor, S: Tensor, rank: int) -> float:
    """||(W - W^) S||_F over the least that any matrix of this rank leaves, (sum_{i > r} sigma_i(W S)^2)^(1/2)."""
    WS = W @ S
    energies = torch.linalg.eigvalsh(gram_triangle(WS.T if WS.shape[0] <= WS.shape[1] else WS)).clamp_min(0)
    least = energies[: len(energies) - rank].sum()
    return float(((WS - W_low @ S).square().sum() / least.clamp_min(1e-300)).sqrt()) if least > 0 else 1.0


class _Spectra:
    """`BlockMethod`: leave the layers, and note the energies of each in whitened coordinates."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.found: dict[str, Tensor] = {}

    def prepare(self, group: Group) -> Whitened:
        return whiten(group, 0.0, self.solver)

    def replace(self, name: str, linear: nn.Linear, group: Group, prepared: Whitened) -> tuple[None, dict[str, Any]]:
        self.found[name] = torch.linalg.svdvals(linear.weight.detach().double().cpu() @ prepared.S).square()
        return None, {}

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        raise AssertionError("nothing is replaced")


# --- the interface ---


@dataclass
class CompressionReport:
    """What was compressed, and what it cost.

    A row of `layers` has the rank; `local`, the share of ||Y|| that was dropped (root of the energy); `misalignment`, the error under the
    evolving inputs over the least possible for this rank; `inherited` = ||W(x - x^)|| / ||W x|| and `error` = ||W x - W^ x^|| / ||W x||,
    both on the first 1,024 tokens; `dead_inputs`. A row of `blocks` has the error of its output, mean of ||h - h^|| / ||h|| over tokens
    (and the raw Frobenius ratio). `kept`: layers that stayed as they were, with the reason.
    """

    layers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    kept: dict[str, str]
    settings: dict[str, Any]
    parameters_before: int
    parameters_after: int
    layer_parameters_before: int
    layer_parameters_after: int
    seconds: float
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"method": "shift-aware-whitening", **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def table(self) -> str:
        """Plain text, a line for each layer."""
        width = max([5, *(len(row["name"]) for row in self.layers)])

        def cell(value: float | None) -> str:
            return f"{'-' if value is None else format(value, '.4f'):>9}"

        head = f"{'layer':{width}} {'rank':>5} {'local':>9} {'inherited':>9} {'error':>9} {'misalign.':>9}"
        lines = [
            f"{row['name']:{width}} {row['rank']:5d} {cell(row['local'])} {cell(row['inherited'])} {cell(row['error'])} "
            f"{cell(row['misalignment'])}"
            for row in self.layers
        ]
        return "\n".join([head, *lines, *(f"{name}: kept, {reason}" for name, reason in self.kept.items())])


def compress_low_rank(
    model: Any,
    calibration: Any,
    ratio: float = 0.2,
    *,
    targets: str | Sequence[str] = "all-linear",
    exclude: Sequence[str] = ("lm_head",),
    refresh: Refresh = "group",
    beta: float | Literal["auto"] = 0.5,
    allocation: Allocation = "uniform",
    solver: Solver = "eigh",
    ranks: Mapping[str, int] | None = None,
    clip_norm: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_ram: float = 8e9,
    checkpoint_dir: str | Path | None = None,
    progress: bool | Silent = True,
) -> CompressionReport:
    """Replace the linear layers in the blocks of `model` by low-rank ones, in place.

    Parameters
    ----------
    calibration
        Token ids (N, T); (tokenizer, list of texts); or batches, as mappings that the model takes (a DataLoader, a list).
    ratio
        Share of the layers' parameters that is removed, in (0, 1).
    targets, exclude
        Names or last parts of names of layers ("q_proj", "mlp.down_proj"); "all-linear": all in the blocks. Embeddings and the head
        are outside of the blocks and stay.
    refresh
        "group": statistics from the model as compressed so far, anew for each group of layers; "block": once a block, in two thirds of
        the time; "none": from the original model.
    beta
        0: approximate each layer under its new inputs; 1: match what the original computed; between: a mixture. "auto": the best of five
        by the loss on a tenth of the calibration text (a causal language model; six times the time).
    allocation
        "uniform": the same ratio for each layer; "energy": ranks that lose the least energy in all.
    solver
        "eigh"; "cholesky", faster; "qr", which never squares the inputs. Groups with fewer tokens than inputs take "qr".
    ranks
        The rank of each layer by name, in place of ratio and allocation.
    clip_norm
        0.995: tokens with longer inputs than this quantile of their batch count as if they had that length.
    device, dtype
        Where blocks are computed, and the type of the factors. None: as the model is.
    max_ram
        Bytes of hidden states in memory; the rest goes to memory-mapped files.
    checkpoint_dir
        Finished blocks are kept there; the same call goes on from them.
    progress
        A bar on stderr, or an `acclimate.show.Silent` of your own.

    Raises
    ------
    ValueError
        A ratio outside of (0, 1), unknown arguments, no calibration text, inputs that are not finite, an architecture without one list
        of blocks. TypeError: weights that are quantised already. In every case, as after any other exception, the model is as it was.
    """
    begun = time.perf_counter()
    check_settings(ratio, refresh, beta, allocation, solver, clip_norm)
    if low_rank_layers(model):
        raise ValueError("the model has low-rank layers already. Start from the original, or make them dense first")
    layers, kept = choose_layers(model, targets, exclude)
    batches = calibration_batches(calibration, model)
    show = progress if isinstance(progress, Silent) else progress_bar() if progress else Silent()
    common: dict[str, Any] = {"clip_norm": clip_norm, "device": device, "max_ram": max_ram}
    chosen = _ranks(model, batches, layers, ratio, allocation, solver, ranks, {**common, "show": show})
    if ranks is not None:
        layers = {name: layers[name] for name in chosen}
    settings: dict[str, Any] = {
        "ratio": None if ranks else ratio, "refresh": refresh, "beta": beta, "allocation": "given" if ranks else allocation,
        "solver": solver, "clip_norm": clip_norm, "dtype": None if dtype is None else str(dtype),
    }  # fmt: skip
    tried: dict[str, float] = {}
    if beta == "auto":
        tried = _losses_of_betas(model, batches, layers, chosen, solver, refresh, {**common, "show": show})
        beta = float(min(tried, key=lambda value: tried[value]))
        settings |= {"beta": beta, "losses": tried}
    before = _parameters(model)
    method = _Compress(chosen, beta, solver, refresh, dtype)
    streamed = stream_blocks(
        model,
        batches,
        method,
        {name: layers[name] for name in chosen},
        refresh=refresh,
        cross=beta > 0,
        keep_root=solver == "qr",
        checkpoint_dir=checkpoint_dir,
        settings={**settings, "ranks": chosen},
        show=show,
        **common,
    )
    mark(model)
    dense = dict.fromkeys(layers.keys() - chosen.keys(), "low rank would not be smaller")
    report = CompressionReport(
        streamed.layers,
        streamed.blocks,
        {**kept, **dict(sorted(dense.items())), **streamed.kept},
        settings,
        before,
        _parameters(model),
        sum(m.weight.numel() for m in layers.values()),
        sum(_weights(model, name) for name in layers),
        time.perf_counter() - begun,
    )
    report.warnings = _warnings(method.few, report, streamed)
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    return report


class ShiftAwareCompressor:
    """`fit` finds the low-rank layers of a model and leaves it as it is; `transform` puts them in, also into a copy of it.

    Parameters are those of `compress_low_rank`. `layers_` has the low-rank layers by name, `report_` its report.
    """

    def __init__(self, ratio: float = 0.2, **options: Any) -> None:
        self.ratio, self.options = ratio, options

    def fit(self, model: Any, calibration: Any) -> ShiftAwareCompressor:
        layers, _ = choose_layers(
            model, self.options.get("targets", "all-linear"), self.options.get("exclude", ("lm_head",))
        )
        self.report_ = compress_low_rank(model, calibration, self.ratio, **self.options)
        self.layers_ = low_rank_layers(model)
        restore(model, {name: layers[name] for name in self.layers_})
        unmark(model)
        return self

    def transform(self, model: Any) -> Any:
        """Put copies of the layers into `model`, in place; returns it. Raises ValueError where it lacks one of them."""
        known = dict(model.named_modules())
        missing = [name for name in self.layers_ if name not in known]
        if missing:
            raise ValueError(
                f"{type(model).__name__} has no layer '{missing[0]}'; fit and transform take the same model"
            )
        for name, layer in self.layers_.items():
            bias = layer.bias
            copied = LowRankLinear.from_factors(
                layer.second.weight.detach().clone(), layer.first.weight.detach().clone(), bias
            )
            model.set_submodule(name, copied.to(known[name].weight.device))
        mark(model)
        return model


# --- arguments ---


def check_settings(
    ratio: float,
    refresh: str = "group",
    beta: Any = 0.5,
    allocation: str = "uniform",
    solver: str = "eigh",
    clip_norm: float | None = None,
) -> None:
    """Raises ValueError for an argument of `compress_low_rank` out of its range."""
    if not 0 < ratio < 1:
        raise ValueError(f"ratio is the share of parameters to remove, between 0 and 1, not {ratio:g}")
    if clip_norm is not None and not 0 < clip_norm <= 1:
        raise ValueError(f"clip_norm is a quantile between 0 and 1, not {clip_norm:g}")
    if beta != "auto" and not (isinstance(beta, int | float) and 0 <= beta <= 1):
        raise ValueError(f"beta is a number from 0 to 1, or 'auto', not {beta!r}")
    for name, value, known in (
        ("refresh", refresh, ("group", "block", "none")),
        ("allocation", allocation, ("uniform", "energy")),
        ("solver", solver, ("eigh", "qr", "cholesky")),
    ):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not '{value}'")


def _ranks(
    model: Any,
    batches: Sequence[Batch],
    layers: Mapping[str, nn.Linear],
    ratio: float,
    allocation: Allocation,
    solver: Solver,
    ranks: Mapping[str, int] | None,
    options: dict[str, Any],
) -> dict[str, int]:
    """Ranks of the layers for which low rank is smaller."""
    shapes = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
    if ranks is not None:
        unknown = sorted(ranks.keys() - layers.keys())
        if unknown:
            raise ValueError(f"ranks names '{unknown[0]}', which is no layer to compress")
        wrong = [name for name, rank in ranks.items() if not 1 <= rank <= min(shapes[name])]
        if wrong:
            raise ValueError(f"the rank of '{wrong[0]}' is 1 to {min(shapes[wrong[0]])}, not {ranks[wrong[0]]}")
        return dict(ranks)
    if allocation == "energy":
        method = _Spectra(solver)
        stream_blocks(model, batches, method, layers, refresh="none", keep_root=solver == "qr", **options)
        return energy_ranks(method.found, shapes, ratio)[0]
    chosen = {name: uniform_rank(m, n, ratio) for name, (m, n) in shapes.items()}
    return {name: rank for name, rank in chosen.items() if saves(shapes[name], rank)}


def _losses_of_betas(
    model: Any,
    batches: Sequence[Batch],
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    solver: Solver,
    refresh: Refresh,
    options: dict[str, Any],
) -> dict[str, float]:
    """Loss of a held-out tenth of the calibration batches after compression on the others, by beta."""
    if not all("input_ids" in batch for batch in batches) or not hasattr(model, "lm_head"):
        raise ValueError("beta='auto' needs a causal language model and batches of token ids")
    held, rest = hold_out(batches)
    losses = {}
    for beta in BETAS:
        method = _Compress(ranks, beta, solver, refresh, None)
        chosen = {name: layers[name] for name in ranks}
        streamed = stream_blocks(
            model, rest, method, chosen, refresh=refresh, cross=beta > 0, keep_root=solver == "qr", **options
        )
        try:
            losses[str(beta)] = token_loss(model, held)
        finally:
            restore(model, streamed.originals)
    return losses


def _warnings(few: Sequence[str], report: CompressionReport, streamed: Streamed) -> list[str]:
    found = []
    if few:
        found.append(
            f"fewer calibration tokens than inputs for {len(few)} layers, e.g. '{few[0]}': they were whitened by QR with a larger ridge. "
            "Take more text"
        )
    if report.kept:
        name, reason = next(iter(report.kept.items()))
        found.append(f"{len(report.kept)} layers stay as they were, e.g. '{name}': {reason}")
    dead = sum(row["dead_inputs"] for row in streamed.layers)
    if dead:
        found.append(f"{dead} inputs of layers were zero for every calibration token; their weights are zero now")
    return found


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in weights_once(model))


def _weights(model: nn.Module, name: str) -> int:
    layer: Any = model.get_submodule(name)
    if isinstance(layer, LowRankLinear):
        return layer.first.weight.numel() + layer.second.weight.numel()
    return int(layer.weight.numel())
