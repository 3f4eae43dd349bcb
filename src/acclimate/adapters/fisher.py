"""Fisher-guided start for LoRA: begin in the directions of weight space to which the predictions on your data are most sensitive.

One pass over a few hundred examples, before training. `fisher_moments.py` sums up each layer's two Fisher factors, A (n x n, inputs)
and G (m x m, output gradients); moving W along u v^T changes the predictions by about (u^T G u)(v^T A v). LoRA starts at their
leading eigenvectors v_i and u_i, without touching W. For F = A (x) G these pairs maximise the total energy of r orthonormal
pairs: sum_i lambda_i(G) lambda_i(A) (von Neumann). With mode="split" (default) half of the rank starts at a = kappa v_i, b = 0
and half at a = 0, b = kappa u_i: B A = 0, and both subspaces get gradient at the first step. kappa = 1/sqrt(3) is the row norm of
PEFT's default start, so that learning rates carry over.

    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    report = fisher_init(model, batches)            # then train as always

The result is an ordinary LoRA for the untouched base, which stock PEFT and vLLM load.

Scale: every rank makes the same pass over the same batches (nothing is reduced), or one rank does and broadcasts the adapter, as DDP
does when it wraps a model. Memory is 8 (m^2 + n^2) bytes a layer, or 8 p (m + n) where the sides are sketched (above 1,024). Not for weights that FSDP has sharded:
call it before.

Source: "Learning in the Fisher Subspace: A Guided Initialization for LoRA Fine-Tuning", ICML 2026, arXiv 2605.01046 (Kronecker factors of
the empirical Fisher, energy per direction). The marginal factors, the modes and the scales are ours.
"""

from __future__ import annotations

import heapq
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from acclimate.adapters import residual
from acclimate.adapters.fisher_moments import (
    Factors,
    LossFunction,
    Moments,
    collect_moments,
    evaluating,
    model_loss,
    sampled_loss,
)
from acclimate.linalg import complete_basis, overlap, participation_ratio, symmetric_power

Criterion = Literal["fisher", "svd", "whitened", "gradient"]
Mode = Literal["input", "split", "residual"]
State = dict[str, Tensor]

KAPPA = 3**-0.5
WIDE = 1024  # sides above this are sketched unless the caller says otherwise
RANK_FLOOR = 1e-10  # eigenvalues below this share of the largest carry no direction


# --- which directions ---


def directions(
    A: Tensor, G: Tensor, rank: int, criterion: Criterion, weight: Tensor | None = None, cross: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(U (m, r), V (n, r)): the pairs that a criterion ranks highest, best first. A (n, n) and G (m, m) are the Fisher factors.

    "svd": singular triples of the weight W (m, n) by sigma^2 (u^T G u)(v^T A v), the predicted cost of deleting the triple.
    "whitened": singular pairs of G^(1/2) W A^(1/2), mapped back by G^(-1/2), A^(-1/2) and normalised.
    "gradient": singular pairs of G^(-1/4) E[g x^T] A^(-1/4), with `cross` = E[g x^T] (m, n).
    "fisher" is the leading eigenvectors, see `Gram.leading`.
    """
    A, G = A.double(), G.double()
    if criterion == "svd":
        assert weight is not None
        left, sigma, right = torch.linalg.svd(weight.double(), full_matrices=False)
        cost = sigma**2 * ((G @ left) * left).sum(0) * ((right @ A) * right).sum(1)
        best = cost.argsort(descending=True)[:rank]
        return left[:, best], right[best].T
    if criterion == "whitened":
        assert weight is not None
        P, _, Qt = torch.linalg.svd(
            symmetric_power(G, 0.5) @ weight.double() @ symmetric_power(A, 0.5), full_matrices=False
        )
        back_u, back_v = symmetric_power(G, -0.5) @ P[:, :rank], symmetric_power(A, -0.5) @ Qt[:rank].T
        return nn.functional.normalize(back_u, dim=0), nn.functional.normalize(back_v, dim=0)
    assert cross is not None
    P, _, Qt = torch.linalg.svd(
        symmetric_power(G, -0.25) @ cross.double() @ symmetric_power(A, -0.25), full_matrices=False
    )
    return P[:, :rank], Qt[:rank].T


def place(U: Tensor, V: Tensor, rank: int, mode: Mode, gamma: float = 0.0) -> tuple[Tensor, Tensor]:
    """LoRA factors (A (r, n), B (m, r)) that start in directions U (m, >= r), V (n, >= r); BA = 0 unless mode="residual",
    where both are scaled by `gamma`."""
    A = torch.zeros(rank, V.shape[0], dtype=torch.float64)
    B = torch.zeros(U.shape[0], rank, dtype=torch.float64)
    if mode == "residual":
        return gamma * V[:, :rank].T, gamma * U[:, :rank]
    inputs = rank if mode == "input" else (rank + 1) // 2
    A[:inputs] = KAPPA * V[:, :inputs].T
    B[:, inputs:] = KAPPA * U[:, : rank - inputs]
    return A, B


def allocate(gains: Mapping[str, Tensor], rank: int) -> dict[str, int]:
    """Ranks by layer that sum to `rank` a layer, given greedily to the largest next gain, each from rank/4 to 2 rank.

    `gains`: what each further pair of a layer is worth, best first.
    """
    ranks = dict.fromkeys(gains, max(1, math.ceil(rank / 4)))
    queue = [(-float(g[ranks[name]]), name) for name, g in gains.items() if len(g) > ranks[name]]
    heapq.heapify(queue)
    spare = rank * len(gains) - sum(ranks.values())
    while spare > 0 and queue:
        _, name = heapq.heappop(queue)
        ranks[name] += 1
        spare -= 1
        if ranks[name] < min(2 * rank, len(gains[name])):
            heapq.heappush(queue, (-float(gains[name][ranks[name]]), name))
    return ranks


# --- the pass over the data ---


def fisher_state_dict(
    model: nn.Module,
    config: LoraConfig,
    data: Iterable[Any],
    *,
    loss_fn: LossFunction | None = None,
    fisher: Literal["empirical", "true"] = "empirical",
    factors: Factors = "marginal",
    criterion: Criterion = "fisher",
    n_examples: int = 256,
    seed: int = 0,
    sketch: int | None = None,
    max_rank: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> State:
    """Directions of every layer that `config` targets in a plain model, for `initialize_lora_fisher_weights`.

    The state is a flat dictionary of tensors: save it with safetensors and use it for any rank up to `max_rank` (None: four times
    the rank of `config`). The other arguments are those of `fisher_init`. The model is left as it was.
    """
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    with torch.random.fork_rng(devices=[]):
        peft_model = get_peft_model(model, config)
    options: dict[str, Any] = {"factors": factors, "criterion": criterion, "n_examples": n_examples, "sketch": sketch}
    try:
        layers = lora_layers(peft_model)
        return _state(peft_model, layers, "default", data, loss_fn, fisher, seed, max_rank, advance, **options)
    finally:
        peft_model.unload()
        for parameter, wants in wanted:
            parameter.requires_grad_(wants)


def _state(
    peft_model: Any,
    layers: Mapping[str, LoraLayer],
    adapter_name: str,
    data: Iterable[Any],
    loss_fn: LossFunction | None,
    fisher: str,
    seed: int,
    max_rank: int | None,
    advance: Callable[[int], None],
    *,
    factors: Factors,
    criterion: Criterion,
    n_examples: int,
    sketch: int | None,
) -> State:
    _one_of("fisher", fisher, ("empirical", "true"))
    _one_of("factors", factors, ("marginal", "kfac"))
    _one_of("criterion", criterion, ("fisher", "svd", "whitened", "gradient"))
    if n_examples < 1:
        raise ValueError(f"n_examples must be at least 1, not {n_examples}")
    if sketch and criterion != "fisher":
        raise ValueError(
            f"criterion '{criterion}' needs the whole factors: leave sketch away, or take criterion='fisher'"
        )
    if loss_fn is None:
        loss_fn = sampled_loss(torch.Generator().manual_seed(seed)) if fisher == "true" else model_loss
    elif fisher == "true":
        raise ValueError("fisher='true' draws labels for the model's own loss: leave loss_fn away")
    rank = max(layer.r[adapter_name] for layer in layers.values())
    if sketch and sketch < rank:
        raise ValueError(f"sketch must be at least the rank {rank} (16 times the rank is a good choice), not {sketch}")

    def width(size: int) -> int:
        if sketch is not None or criterion != "fisher":
            return sketch or 0
        return max(128, 16 * rank) if size > WIDE else 0

    with evaluating(peft_model), peft_model.disable_adapter():
        moments = collect_moments(
            peft_model,
            {name: layer.get_base_layer() for name, layer in layers.items()},
            data,
            loss_fn,
            factors=factors,
            cross=criterion == "gradient",
            sketch=width,
            rank=rank,
            n_examples=n_examples,
            advance=advance,
        )
    state: State = {}
    for name in list(moments):
        found = _layer_state(moments.pop(name), layers[name], rank, max_rank or 4 * rank, factors, criterion)
        state |= {f"{_base_name(name)}.{key}": value.contiguous() for key, value in found.items()}
    return state


@torch.no_grad()
def _layer_state(
    m: Moments, layer: LoraLayer, rank: int, most: int, factors: Factors, criterion: Criterion
) -> dict[str, Tensor]:
    """What is kept of one layer: directions, the spectrum they come from, and how they lie to EVA's and PiSSA's."""
    (scale_a, scale_g), weight = m.scales(factors), base_weight(layer)
    (input_values, V), (output_values, U) = m.inputs.leading(most), m.outputs.leading(most)
    input_values, output_values = input_values / scale_a, output_values / scale_g
    if criterion == "fisher":
        V = V[:, input_values > RANK_FLOOR * input_values[0]]
        U = U[:, output_values > RANK_FLOOR * output_values[0]]
        energy = output_values[: U.shape[1]][: V.shape[1]] * input_values[: V.shape[1]][: U.shape[1]]
    else:
        A, G = m.factor_pair(factors)
        cross = None if m.cross is None else m.cross / m.positions
        U, V = directions(A, G, min(most, *weight.shape), criterion, weight, cross)
        energy = ((G @ U) * U).sum(0) * ((A @ V) * V).sum(0)
    r = min(rank, V.shape[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, eva = torch.svd_lowrank(m.sample, q=min(rank + 8, *m.sample.shape), niter=4)
        _, _, pissa = torch.svd_lowrank(weight.float().cpu(), q=min(rank + 8, *weight.shape), niter=4)
    facts = {
        "positions": float(m.positions),
        "share_inputs": float(input_values[:r].sum()) * scale_a / m.inputs.trace,
        "share_outputs": float(output_values[:r].sum()) * scale_g / m.outputs.trace,
        "effective_rank_inputs": math.nan if m.inputs.test is not None else participation_ratio(m.inputs.sum),
        "effective_rank_outputs": math.nan if m.outputs.test is not None else participation_ratio(m.outputs.sum),
        "overlap_eva": overlap(V[:, :r], eva[:, :r]),
        "overlap_pissa": overlap(V[:, :r], pissa[:, :r]),
        "weight_norm": float(weight.double().norm()),
    }
    found = {"U": U.float(), "V": V.float(), "energy": energy, "inputs": input_values, "outputs": output_values}
    return found | {key: torch.tensor(value, dtype=torch.float64) for key, value in facts.items()}


def lora_layers(model: nn.Module, adapter_name: str = "default") -> dict[str, LoraLayer]:
    """The linear and convolution layers with this LoRA adapter, by name. Raises ValueError when there is none.

    Embeddings and grouped convolutions are left at their default start, with a warning.
    """
    found, other = {}, []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if (
            adapter_name in module.lora_A
            and getattr(base, "groups", 1) == 1
            and not isinstance(base, nn.Conv1d | nn.Conv3d)
        ):
            found[name] = module
        elif adapter_name in module.lora_A or adapter_name in module.lora_embedding_A:
            other.append(_base_name(name))
    if other:
        warnings.warn(
            f"these layers keep their default start, since Fisher directions need a linear map: {', '.join(other)}",
            stacklevel=3,
        )
    if not found:
        raise ValueError(
            f"no LoRA layer with an adapter '{adapter_name}': call this after get_peft_model(model, LoraConfig(...)), with linear targets"
        )
    return found


def base_weight(layer: LoraLayer) -> Tensor:
    """The frozen weight as (m, n), dequantised if need be."""
    base = layer.get_base_layer()
    weight = dequantize_module_weight(base).detach()
    if isinstance(base, nn.Conv2d):
        return weight.flatten(1)
    return weight.T if getattr(layer, "fan_in_fan_out", False) else weight


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _one_of(what: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what} is one of {', '.join(known)}, not {value!r}")


# --- the start ---


@dataclass(frozen=True)
class LayerReport:
    """What the start of one layer rests on. Shares are of the trace: how much of the energy the leading r directions hold.

    `effective_rank_*` is tr(M)^2 / ||M||_F^2 (None with a sketch). Overlaps of the input space with those that EVA (leading
    directions of the first 512 inputs) and PiSSA (of W) would take: 1 is the same space, r/n that of random ones.
    """

    name: str
    rank: int
    positions: float
    share_inputs: float
    share_outputs: float
    effective_rank_inputs: float | None
    effective_rank_outputs: float | None
    overlap_eva: float
    overlap_pissa: float
    inputs: list[float] = field(repr=False)
    outputs: list[float] = field(repr=False)


@dataclass
class FisherReport:
    """The start of every layer; which layers kept their default start, since the loss does not reach them; what it cost."""

    layers: list[LayerReport]
    skipped: list[str]
    settings: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"method": "fisher", **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def table(self) -> str:
        """Plain text, a line for each layer."""
        width = max([5, *(len(layer.name) for layer in self.layers)])
        head = f"{'layer':{width}} {'rank':>4} {'inputs':>7} {'outputs':>7} {'EVA':>5} {'PiSSA':>5}"
        rows = [
            f"{r.name:{width}} {r.rank:4d} {r.share_inputs:7.3f} {r.share_outputs:7.3f} {r.overlap_eva:5.2f} {r.overlap_pissa:5.2f}"
            for r in self.layers
        ]
        return "\n".join([head, *rows])


def initialize_lora_fisher_weights(
    peft_model: PeftModel,
    state: State,
    *,
    mode: Mode = "split",
    rank_budget: Literal["uniform", "fisher"] = "uniform",
    init_scale: float = 0.1,
    seed: int = 0,
    adapter_name: str = "default",
) -> FisherReport:
    """Start a LoRA adapter in the directions of a state from `fisher_state_dict`. Arguments as in `fisher_init`."""
    _check_start(peft_model, adapter_name, mode, rank_budget)
    layers = lora_layers(peft_model, adapter_name)
    return _start(peft_model, layers, state, mode, rank_budget, init_scale, seed, adapter_name)


def _check_start(peft_model: PeftModel, adapter_name: str, mode: str, rank_budget: str) -> None:
    """What can be refused before the pass over the data."""
    _one_of("mode", mode, ("input", "split", "residual"))
    _one_of("rank_budget", rank_budget, ("uniform", "fisher"))
    config: Any = peft_model.peft_config.get(adapter_name)
    if mode == "residual" and getattr(config, "use_dora", False):
        raise ValueError(
            "mode='residual' subtracts its start, which DoRA's rescaling does not allow; take 'split' or 'input'"
        )


@torch.no_grad()
def _start(
    peft_model: PeftModel,
    layers: Mapping[str, LoraLayer],
    state: State,
    mode: Mode,
    rank_budget: Literal["uniform", "fisher"],
    init_scale: float,
    seed: int,
    adapter_name: str,
) -> FisherReport:
    begun = time.perf_counter()
    known = {name: layer for name, layer in layers.items() if f"{_base_name(name)}.V" in state}
    ranks = {name: layer.r[adapter_name] for name, layer in known.items()}
    if rank_budget == "fisher":
        ranks = _give_ranks(peft_model, known, ranks, state, adapter_name)
    if mode == "residual":
        residual.add_start(peft_model, adapter_name)
    generator = torch.Generator().manual_seed(seed)
    reports, filled = [], []
    for name, layer in known.items():
        own = {key: state[f"{_base_name(name)}.{key}"] for key in (*_DIRECTIONS, *_FACTS)}
        rank, scale = ranks[name], layer.scaling[adapter_name]
        needed = {"input": (0, rank), "split": (rank // 2, (rank + 1) // 2), "residual": (rank, rank)}[mode]
        if any(own[key].shape[1] < count for key, count in zip("UV", needed, strict=True)):
            filled.append(_base_name(name))
        U, V = (complete_basis(own[key], rank, generator) for key in "UV")
        gamma = math.sqrt(init_scale * float(own["weight_norm"]) / math.sqrt(min(len(U), len(V))) / scale)
        A, B = place(U, V, rank, mode, gamma)
        _set(layer, adapter_name, A, B)
        if mode == "residual":
            _set(layer, residual.START, A, -B)
        facts: dict[str, Any] = {key: float(own[key]) for key in _FACTS if key != "weight_norm"}
        facts = {key: None if math.isnan(value) else value for key, value in facts.items()}
        facts |= {key: own[key][:rank].tolist() for key in ("inputs", "outputs")}
        reports.append(LayerReport(name=_base_name(name), rank=rank, **facts))
    if filled:
        warnings.warn(
            f"the data fix fewer directions than the rank in {', '.join(filled)}: the rest are random. Take more examples or a lower rank",
            stacklevel=4,
        )
    settings = {"mode": mode, "rank_budget": rank_budget, "seed": seed}
    skipped = sorted(_base_name(name) for name in layers.keys() - known.keys())
    return FisherReport(reports, skipped, settings, time.perf_counter() - begun)


_DIRECTIONS = ("U", "V", "energy", "inputs", "outputs")
_FACTS = (
    "positions",
    "share_inputs",
    "share_outputs",
    "effective_rank_inputs",
    "effective_rank_outputs",
    "overlap_eva",
    "overlap_pissa",
    "weight_norm",
)


def fisher_init(
    peft_model: PeftModel,
    data: Iterable[Any],
    *,
    loss_fn: LossFunction | None = None,
    fisher: Literal["empirical", "true"] = "empirical",
    factors: Factors = "marginal",
    criterion: Criterion = "fisher",
    mode: Mode = "split",
    rank_budget: Literal["uniform", "fisher"] = "uniform",
    n_examples: int = 256,
    init_scale: float = 0.1,
    sketch: int | None = None,
    seed: int = 0,
    adapter_name: str = "default",
    advance: Callable[[int], None] = lambda count: None,
) -> FisherReport:
    """Start a fresh LoRA adapter in the leading Fisher directions of some data. The base weights are not touched.

    Parameters
    ----------
    peft_model
        From `get_peft_model(model, LoraConfig(...))`; rsLoRA too, and DoRA with mode "input" or "split".
    data
        Batches (a DataLoader or a list): mappings with `labels`, or whatever `loss_fn` takes.
    loss_fn
        (model, batch) -> loss summed over the batch; None: the model's own loss times the number of its labels.
    fisher
        "empirical": the labels of the data; "true": labels drawn from the model's predictions.
    factors
        "marginal": the exact partial traces of the Fisher block; "kfac": those of K-FAC.
    criterion
        "fisher": leading eigenvectors; "svd", "whitened", "gradient": see `directions`.
    mode
        "input": A starts at the input directions, B at 0. "split": half of the rank there, half with B at the output directions and
        A at 0. "residual": both start at the directions and their product is subtracted by a frozen second adapter
        "start"; `save_pretrained` then writes one LoRA of twice the rank.
    rank_budget
        "uniform", or "fisher": the same total rank, shared out by energy (writes `rank_pattern`, which vLLM does not read).
    n_examples
        Rows to look at (at most 65,536 positions); up to four times as many where the directions have not settled.
    init_scale
        Size of the start of mode="residual": its product has the norm sqrt(r/min(m, n)) init_scale ||W||_F.
    sketch
        p: keep n x p numbers of a factor instead of n x n (at 16 times the rank the leading spaces of real
        MLP layers overlap with the exact ones by .97 to 1, at 8 times by .83 to .99); 0: never; None: max(128, 16 r) for sides
        above 1,024, for criterion "fisher".
    seed
        Of drawn labels and of the random directions that fill up where the data fix fewer than the rank.
    advance
        Called with the number of rows of each batch, for a progress bar.

    Raises
    ------
    ValueError
        No LoRA layer; no data; no label that counts; a loss that is not finite in more than a tenth of the batches; unknown
        arguments.
    """
    begun = time.perf_counter()
    options: dict[str, Any] = {"factors": factors, "criterion": criterion, "n_examples": n_examples, "sketch": sketch}
    _check_start(peft_model, adapter_name, mode, rank_budget)
    layers = lora_layers(peft_model, adapter_name)
    most = max(layer.r[adapter_name] for layer in layers.values()) * (2 if rank_budget == "fisher" else 1)
    state = _state(peft_model, layers, adapter_name, data, loss_fn, fisher, seed, most, advance, **options)
    report = _start(peft_model, layers, state, mode, rank_budget, init_scale, seed, adapter_name)
    report.settings = {"fisher": fisher, **options, **report.settings}
    report.seconds = time.perf_counter() - begun
    return report


def _set(layer: LoraLayer, adapter_name: str, A: Tensor, B: Tensor) -> None:
    for module, value in ((layer.lora_A[adapter_name], A), (layer.lora_B[adapter_name], B)):
        weight: Any = module.weight
        weight.copy_(value.reshape(weight.shape))


def _give_ranks(
    peft_model: Any, layers: Mapping[str, LoraLayer], ranks: Mapping[str, int], state: State, adapter_name: str
) -> dict[str, int]:
    """Other ranks by energy, for a change of the weight relative to its size: lambda(G) lambda(A) ||W||_F^2 / (m + n)."""
    gains = {}
    for name in layers:
        own = {key: state[f"{_base_name(name)}.{key}"] for key in ("U", "V", "energy", "weight_norm")}
        gains[name] = own["energy"] * own["weight_norm"] ** 2 / (len(own["U"]) + len(own["V"]))
    config = peft_model.peft_config[adapter_name]
    given = allocate(gains, round(sum(ranks.values()) / len(ranks)))
    for name, layer in layers.items():
        share = given[name] / ranks[name]
        alpha = layer.lora_alpha[adapter_name] * (math.sqrt(share) if config.use_rslora else share)  # the scaling stays
        with torch.random.fork_rng(devices=[]):  # what it draws is overwritten
            layer.update_layer(adapter_name, r=given[name], lora_alpha=alpha, config=config)
        config.rank_pattern[_base_name(name)], config.alpha_pattern[_base_name(name)] = given[name], alpha
    warnings.warn(
        "the ranks differ by layer (rank_pattern): stock PEFT loads such an adapter, vLLM does not", stacklevel=5
    )
    return given
