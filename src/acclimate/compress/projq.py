"""Quantise weights so that what is lost is low-rank, and hand that part to a LoRA adapter.

For a layer W (m x n) with inputs x, C = E[x x^T] + lambda I = S S^T, a rank r and quantised weights Q, the error that no adapter of
rank r can make up for is

    J(Q) = min over rank(L) <= r of ||(W - Q - L) S||_F^2 = sum_{i > r} sigma_i^2((W - Q) S)

GPTQ spreads its error over all directions. Here rounding and projection take turns:

    V    the r leading right singular vectors of (W - Q) S: what the adapter will carry
    C_p  = S (I - (1 - kappa) V V^T) S^T + 0.01 mean(diag C) I
    Q    = GPTQ(W; C_p), from the original W

so that errors along V cost only kappa, and the best Q by J is kept, GPTQ's own among them. At the end L = B A with
B = U_r Sigma_r^(1/2), A = Sigma_r^(1/2) V_r^T S^-1 from the SVD of (W - Q) S. kappa = 0 is the published projection; a small kappa keeps
errors in the free subspace from widening the ranges of the groups.

Scale: `blocks.py` streams block by block; a layer takes T + 1 passes of GPTQ and as many eigendecompositions of a min(m, n) square.

Source: "ProjQ: Project-and-Quantize for Adapter-Aware LLM Compression", arXiv 2606.00494; GPTQ, arXiv 2210.17323; LoftQ, arXiv
2310.08659; EoRA, arXiv 2410.21271. kappa > 0, the n x n form and the best of the iterates are ours.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from acclimate.compress.blocks import Group, choose_layers, progress_bar, stream_blocks
from acclimate.compress.gptq import DAMPING, Grid, Quantized, gptq, round_to_nearest
from acclimate.compress.quant_linear import QuantLinear, mark, quantized_layers
from acclimate.compress.text import calibration_batches
from acclimate.compress.whitening import Whitened, factors, whiten
from acclimate.linalg import from_triangle, gram_triangle, leading_eigh
from acclimate.show import Silent

Method = Literal["projq", "gptq", "rtn", "loftq"]
Stream = Literal["quantised+adapter", "quantised", "original"]

ITERATIONS = 5
TOLERANCE = 1e-4
FEW = 10  # times the damping where there are fewer tokens than inputs
WIDE = 2048  # from this width on the default rank is 64, below 16


@dataclass
class Found:
    """Quantised weights, the adapter's factors B (m, r) and A (r, n), and J of every iterate (the first is GPTQ's).

    `error` and `left` are ||(W - Q) S||^2 and ||(W - Q - B A) S||^2. `diverged`: an iterate's J was not a finite number, and the best of those
    before it was taken.
    """

    quantized: Quantized
    B: Tensor
    A: Tensor
    losses: list[float]
    error: float
    left: float
    diverged: bool = False

    @property
    def share(self) -> float:
        """Of the squared error, what the adapter carries."""
        return 1 - self.left / self.error if self.error else 1.0


def uncorrectable(error: Tensor, rank: int) -> tuple[float, Tensor]:
    """(J, V (n, r)) of an error (W - Q) S (m, n): what is left of its squared norm beyond rank r, and the leading right singular vectors."""
    m, n = error.shape
    rank = min(rank, m, n)
    if n <= m:
        values, V = leading_eigh(from_triangle(gram_triangle(error)), rank)
    else:
        values, U = leading_eigh(from_triangle(gram_triangle(error.T)), rank)
        V = error.T @ U / values.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return max(0.0, float(error.square().sum() - values.sum())), V


def project_and_quantize(
    W: Tensor,
    S: Tensor,
    S_inv: Tensor,
    grid: Grid,
    rank: int,
    *,
    comp_rank: int | None = None,
    iterations: int = ITERATIONS,
    kappa: float = 0.1,
    damping: float = DAMPING,
    method: Method = "projq",
) -> Found:
    """Quantise W (m, n) for inputs with the second moment C = S S^T, with an adapter of rank `comp_rank` (None: `rank`).

    `method`: "projq"; "gptq" and "rtn" (rounding to nearest) quantise once; "loftq" alternates on W - L instead of projecting.
    """
    W, S = W.detach().double().cpu(), S.double()
    C = S @ S.T
    best = round_to_nearest(W, grid) if method == "rtn" else gptq(W, C, grid, damping)

    def error_of(quantized: Quantized) -> Tensor:
        return (W - quantized.dequantize().double()) @ S

    error = error_of(best)
    loss, V = uncorrectable(error, rank)
    losses, best_error, diverged = [loss], error, False
    least = loss
    for _ in range(iterations if method in ("projq", "loftq") and 0 < rank < min(W.shape) else 0):
        if method == "projq":
            SV = S @ V
            free = C - (1 - kappa) * SV @ SV.T
            free += damping * C.diagonal().mean() * torch.eye(len(C), dtype=torch.float64)
            quantized = gptq(W, free, grid, damping=0.0)
        else:
            B, A, _ = factors(error, S_inv, rank)
            quantized = gptq(W - B @ A, C, grid, damping)
        error = error_of(quantized)
        now, V_now = uncorrectable(error, rank)
        if not math.isfinite(now):
            diverged = True
            break
        losses.append(now)
        if now < least:
            least, best, best_error = now, quantized, error
        still = (2 * max(0.0, V.shape[1] - float((V.T @ V_now).square().sum()))) ** 0.5 < TOLERANCE
        settled = abs(now - loss) < TOLERANCE * loss
        loss, V = now, V_now
        if still or settled:
            break
    kept = min(rank if comp_rank is None else comp_rank, *W.shape)
    B, A, sigma = factors(best_error, S_inv, kept)
    energy = sigma.square()
    return Found(best, B, A, losses, float(energy.sum()), float(energy[kept:].sum()), diverged)


# --- what is done to each layer ---


class Corrected(nn.Module):
    """A quantised layer with its adapter beside it, as long as the blocks above are worked on."""

    B: Tensor
    A: Tensor

    def __init__(self, base: QuantLinear, B: Tensor, A: Tensor, corrects: bool) -> None:
        super().__init__()
        self.base, self.corrects = base, corrects
        self.register_buffer("B", B)
        self.register_buffer("A", A)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ self.A.T @ self.B.T if self.corrects else y


class _Quantize:
    """`BlockMethod`: replace a layer by its quantised form and its adapter."""

    def __init__(self, grid: Grid, rank: int, comp_rank: int, corrects: bool, **options: Any) -> None:
        self.grid, self.rank, self.comp_rank, self.corrects, self.options = grid, rank, comp_rank, corrects, options
        self.few: list[str] = []
        self.diverged: list[str] = []

    def prepare(self, group: Group) -> Whitened:
        found = whiten(group)
        if group.tokens < len(found.S):
            self.few += group.names
        return found

    def replace(
        self, name: str, linear: nn.Linear, group: Group, prepared: Whitened
    ) -> tuple[nn.Module, dict[str, Any]]:
        damping = DAMPING * (FEW if name in self.few else 1)
        found = project_and_quantize(
            linear.weight, prepared.S, prepared.S_inv, self.grid, self.rank,
            comp_rank=self.comp_rank, damping=damping, **self.options,
        )  # fmt: skip
        if found.diverged:
            self.diverged.append(name)
        size = float((linear.weight.detach().double().cpu() @ prepared.S).norm()) or 1.0
        facts = {
            "losses": found.losses,
            "ratio": min(found.losses) / found.losses[0] if found.losses[0] else 1.0,
            "share": found.share,
            "error_quantised": math.sqrt(found.error) / size,
            "error_corrected": math.sqrt(found.left) / size,
        }
        return self._module(linear, found.quantized, found.B, found.A), facts

    def _module(self, linear: nn.Linear, quantized: Quantized, B: Tensor, A: Tensor) -> Corrected:
        # files keep the adapter in 16 bits, so that is what everything above sees
        kept = [factor.half().to(linear.weight.dtype) for factor in (B, A)]
        return Corrected(QuantLinear.from_quantized(quantized, linear), kept[0], kept[1], self.corrects)

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        m, n = linear.weight.shape
        base = QuantLinear(
            n, m, self.grid.bits, self.grid.group_size, linear.bias is not None, dtype=linear.weight.dtype
        )
        base.load_state_dict(
            {key.removeprefix("base."): value for key, value in state.items() if key.startswith("base.")}
        )
        return Corrected(base, state["B"], state["A"], self.corrects)


# --- the interface ---


@dataclass
class QuantizationReport:
    """What was quantised, and what it cost.

    A row of `layers` has `losses`, J of each iterate (GPTQ's first); `ratio`, the least of them over GPTQ's; `share`, of the squared error
    carried by the adapter; `error_quantised` and `error_corrected`, ||(W - Q) x|| and ||(W - Q - BA) x|| over ||W x||. `kept`: layers
    that stayed as they were, or were rounded to nearest, with the reason.
    """

    layers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    kept: dict[str, str]
    settings: dict[str, Any]
    bits_per_weight: dict[str, float]
    seconds: float
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"method": "projq", **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)


def quantize_projq(
    model: Any,
    calibration: Any,
    bits: int = 3,
    group_size: int = 64,
    rank: int | None = None,
    *,
    comp_rank: int | None = None,
    iterations: int = ITERATIONS,
    kappa: float = 0.1,
    sym: bool = False,
    desc_act: bool = False,
    mse_clip: bool = False,
    targets: str | Sequence[str] = "all-linear",
    exclude: Sequence[str] = ("lm_head",),
    stream: Stream = "quantised+adapter",
    method: Method = "projq",
    device: str | torch.device | None = None,
    max_ram: float = 8e9,
    checkpoint_dir: str | Path | None = None,
    progress: bool | Silent = True,
) -> tuple[PeftModel, QuantizationReport]:
    """Quantise the linear layers in the blocks of `model`, in place, and put a LoRA adapter on them that carries what it can of the error.

    Parameters
    ----------
    calibration
        Token ids (N, T); (tokenizer, list of texts); or batches, as mappings that the model takes.
    bits, group_size
        Bits of a code: 2, 3, 4 or 8. Inputs that share a scale; -1: all.
    rank
        Of the error that is left to the adapter while weights are rounded; None: 16, or 64 for layers of 2,048 inputs and more.
    comp_rank
        Rank of the adapter; None: `rank`.
    iterations, kappa
        Most rounds of projecting; what an error in the adapter's subspace counts (0: nothing, as published).
    sym, desc_act, mse_clip
        See `Grid`.
    targets, exclude
        As in `compress_low_rank`.
    stream
        What the layers above see: the quantised layers with their adapters, without, or the original model.
    method
        "projq"; "gptq", "rtn" (rounding to nearest) or "loftq", with the same adapter on top, to compare with.
    device, max_ram, checkpoint_dir, progress
        As in `compress_low_rank`.

    Returns
    -------
    (PeftModel, QuantizationReport)
        The model with `QuantLinear` layers under an ordinary LoRA (scaling 1), to train on, to evaluate, or to save with
        `save_quantized`.

    Raises
    ------
    ValueError
        Arguments out of range, groups that do not divide a layer, no calibration text, inputs that are not finite. TypeError: weights that
        are quantised already. In every case, as after any other exception, the model is as it was.
    """
    begun = time.perf_counter()
    grid = Grid(bits, group_size, sym, desc_act, mse_clip)
    layers, kept = choose_layers(model, targets, exclude)
    layers, full, rank, adapter_rank = check_layers(
        layers, grid, rank, comp_rank, iterations=iterations, kappa=kappa, stream=stream, method=method
    )
    kept |= full
    batches = calibration_batches(calibration, model)
    show = progress if isinstance(progress, Silent) else progress_bar() if progress else Silent()
    settings: dict[str, Any] = {
        **asdict(grid), "rank": rank, "comp_rank": adapter_rank, "iterations": iterations, "kappa": kappa, "stream": stream,
        "method": method,
    }  # fmt: skip
    work = _Quantize(
        grid, rank, adapter_rank, stream == "quantised+adapter", iterations=iterations, kappa=kappa, method=method
    )
    streamed = stream_blocks(
        model,
        batches,
        work,
        layers,
        refresh="none" if stream == "original" else "group",
        device=device,
        max_ram=max_ram,
        checkpoint_dir=checkpoint_dir,
        settings=settings,
        show=show,
    )
    corrections: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Corrected):
            corrections[name] = (module.B, module.A)
            model.set_submodule(name, module.base)
    for name, reason in streamed.kept.items():
        if "no calibration token" in reason:  # an expert that is never chosen
            model.set_submodule(
                name, QuantLinear.from_quantized(round_to_nearest(layers[name].weight, grid), layers[name])
            )
            streamed.kept[name] = f"{reason}: rounded to nearest, without an adapter"
    if not corrections:
        raise ValueError(f"no layer could be quantised: {next(iter(streamed.kept.values()))}")
    mark(model, settings)
    peft_model = _with_adapter(model, corrections, adapter_rank)
    report = QuantizationReport(
        streamed.layers,
        streamed.blocks,
        {**kept, **streamed.kept},
        settings,
        bits_per_weight(peft_model),
        time.perf_counter() - begun,
        _warnings({**kept, **streamed.kept}, work),
    )
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    return peft_model, report


def bits_per_weight(model: Any) -> dict[str, float]:
    """Bits that files spend on a weight of a quantised layer: `codes`, `grid` (scales, zero points, group of each input), `adapter` (16
    bits a number), and their sum `total`."""
    weights = codes = grid = adapter = 0
    for name, layer in quantized_layers(model).items():
        weights += layer.in_features * layer.out_features
        codes += 32 * layer.qweight.numel()
        grid += 32 * (layer.qzeros.numel() + layer.g_idx.numel()) + 16 * layer.scales.numel()
        parent: Any = model.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
        for part in (parent.lora_A, parent.lora_B) if parent is not None else ():
            adapter += 16 * sum(parameter.numel() for parameter in part.parameters())
    shares = {"codes": codes / weights, "grid": grid / weights, "adapter": adapter / weights}
    return {**shares, "total": sum(shares.values())}


def check_layers(
    layers: Mapping[str, nn.Linear],
    grid: Grid,
    rank: int | None = None,
    comp_rank: int | None = None,
    *,
    iterations: int = ITERATIONS,
    kappa: float = 0.1,
    stream: str = "quantised+adapter",
    method: str = "projq",
) -> tuple[dict[str, nn.Linear], dict[str, str], int, int]:
    """(layers to quantise, those that stay with the reason, rank, rank of the adapter) of `quantize_projq`.

    Raises ValueError for an argument out of its range, and for groups that do not divide a layer (it is named).
    """
    widest = max(layer.in_features for layer in layers.values())
    rank = (64 if widest >= WIDE else 16) if rank is None else rank
    adapter_rank = rank if comp_rank is None else comp_rank
    if rank < 0 or adapter_rank < 1:
        raise ValueError(f"rank is at least 0 and comp_rank at least 1, not {rank} and {adapter_rank}")
    if iterations < 0:
        raise ValueError(f"iterations is at least 0, not {iterations}")
    if not 0 <= kappa <= 1:
        raise ValueError(f"kappa is between 0 and 1, not {kappa:g}")
    for what, value, known in (
        ("stream", stream, ("quantised+adapter", "quantised", "original")),
        ("method", method, ("projq", "gptq", "rtn", "loftq")),
    ):
        if value not in known:
            raise ValueError(f"{what} is one of {', '.join(known)}, not '{value}'")
    for name, layer in layers.items():
        grid.columns(layer.in_features, name)
    largest = max(rank, adapter_rank)
    full = [name for name, layer in layers.items() if largest >= min(layer.weight.shape)]
    if len(full) == len(layers):
        raise ValueError(f"rank {largest} is that of every layer or more: take a lower one")
    return (
        {name: layer for name, layer in layers.items() if name not in full},
        dict.fromkeys(full, f"rank {largest} would make up for all of its error"),
        rank,
        adapter_rank,
    )


@torch.no_grad()
def _with_adapter(model: Any, corrections: Mapping[str, tuple[Tensor, Tensor]], rank: int) -> PeftModel:
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=sorted(corrections), init_lora_weights=False, task_type=_task(model)
    )
    peft_model: Any = get_peft_model(model, config)
    for name, (B, A) in corrections.items():
        layer: Any = peft_model.base_model.model.get_submodule(name)
        layer.lora_A["default"].weight.copy_(A)
        layer.lora_B["default"].weight.copy_(B)
    return peft_model


def _task(model: Any) -> str | None:
    return "CAUSAL_LM" if hasattr(model, "lm_head") else None


def _warnings(kept: Mapping[str, str], work: _Quantize) -> list[str]:
    found = []
    if work.few:
        found.append(
            f"fewer calibration tokens than inputs for {len(work.few)} layers, e.g. '{work.few[0]}': they were damped ten times as much. "
            "Take more text"
        )
    if kept:
        name, reason = next(iter(kept.items()))
        found.append(f"{len(kept)} layers were not treated as the others, e.g. '{name}': {reason}")
    if work.diverged:
        found.append(
            f"J was not finite in {len(work.diverged)} layers, e.g. '{work.diverged[0]}': an earlier iterate was taken"
        )
    return found
