"""Which of a model's parameters go to Muon and which to AdamW, and why. The rules are in `route`; the first that fits decides."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from acclimate.optim.groups import embeddings_and_heads
from acclimate.optim.sharding import FLATTENED, check_not_flattened

log = logging.getLogger(__name__)

Algo = Literal["muon", "adamw"]

_LORA = re.compile(r"lora_(A|B|embedding_A|embedding_B)(\.|$)")
_QUANTISED = ("Params4bit", "Int8Params")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes. `split`: row counts of fused weights; `stacked`: (experts, m, n), a matrix an expert."""

    name: str
    shape: tuple[int, ...]
    algo: Algo
    reason: str
    split: tuple[int, ...] | None = None
    stacked: bool = False


def route(
    model: nn.Module,
    adamw: Sequence[str] = (),
    muon: Sequence[str] = (),
    split: Mapping[str, Sequence[int]] | None = None,
    stacked: Sequence[str] = (),
) -> list[Route]:
    """Every trained parameter of `model` with its algorithm.

    In this order: your own patterns (`adamw`, then `muon`: regular expressions that names are searched for); LoRA factors to Muon;
    embeddings, the output head, and weights that several modules share to AdamW; vectors to AdamW; everything else to Muon, where a
    convolution counts as (outputs, everything else). `stacked` are patterns of weights (experts, m, n), `split` maps patterns of
    fused weights to the row counts of their parts.

    Raises TypeError for a trained weight that is quantised, ValueError for `split` or `stacked` that do not fit, RuntimeError for
    flattened parameters (FSDP1, DeepSpeed ZeRO).
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise RuntimeError(f"the model is wrapped in FullyShardedDataParallel (FSDP1). {FLATTENED}")
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    embeddings, heads = embeddings_and_heads(model)

    def decide(name: str, p: Tensor) -> tuple[Algo, str]:
        for algo, patterns in (("adamw", adamw), ("muon", muon)):
            for pattern in patterns:
                if re.search(pattern, name):
                    return algo, f"'{pattern}'"  # type: ignore[return-value]
        if _LORA.search(name) and p.ndim > 1:
            return "muon", "LoRA factor"
        if id(p) in embeddings:
            return "adamw", "embedding"
        if id(p) in heads:
            return "adamw", "output head"
        if owners[id(p)] > 1:
            return "adamw", "shared by several modules"
        if p.ndim < 2:
            return "adamw", "vector"
        return "muon", "matrix" if p.ndim == 2 else "convolution"

    rows = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        check_not_flattened(name, p)
        if type(p).__name__ in _QUANTISED or p.element_size() < 2:
            raise TypeError(
                f"'{name}' is quantised ({p.dtype}) and would be trained: freeze it, and train an adapter beside it"
            )
        algo, reason = decide(name, p)
        parts, experts = None, False
        if algo == "muon":
            sizes = [tuple(rows) for pattern, rows in (split or {}).items() if re.search(pattern, name)]
            if sizes and not _LORA.search(name):
                parts, reason = sizes[0], "fused matrices"
                if sum(parts) != p.shape[0]:
                    raise ValueError(f"split {list(parts)} does not add up to the {p.shape[0]} rows of '{name}'")
            if any(re.search(pattern, name) for pattern in stacked):
                experts, reason = True, "stacked matrices"
                if p.ndim != 3:
                    raise ValueError(f"stacked weights are (experts, m, n); '{name}' is {tuple(p.shape)}")
        rows.append(Route(name, tuple(p.shape), algo, reason, parts, experts))
    return rows


def grouped(routes: Sequence[Route]) -> list[tuple[Algo, str, str, tuple[int, ...], int]]:
    """(algo, reason, last part of the name, shape, how many) of the routes, those that are alike as one row."""

    def kind(name: str) -> str:
        words = [word for word in name.split(".") if word not in ("weight", "default") and not word.isdigit()]
        return ".".join(words[-2:])

    counts = Counter((row.algo, row.reason, kind(row.name), row.shape) for row in routes)
    return [(*key, count) for key, count in sorted(counts.items())]


def table(routes: Sequence[Route]) -> str:
    """The routes as text, those that are alike as one line."""
    rows: list[tuple[str, ...]] = [
        (algo, reason, name, " x ".join(map(str, shape)), str(count))
        for algo, reason, name, shape, count in grouped(routes)
    ]
    lines = [("algorithm", "because", "parameter", "shape", "count"), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def muon_param_groups(
    model: nn.Module,
    lr: float | None = None,
    weight_decay: float = 0.0,
    *,
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
    adamw: Sequence[str] = (),
    muon: Sequence[str] = (),
    split: Mapping[str, Sequence[int]] | None = None,
    stacked: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`, with names. Which parameter goes where: see `acclimate.optim.muon_routing.route`, which takes
    `adamw`, `muon`, `split` and `stacked` and says what is raised. The table is logged at level INFO.

    lr: of Muon's groups, adamw_lr of AdamW's (None: the optimiser's own). Biases, norms and what the adapter spares do not decay.
    """
    return param_groups(
        model, route(model, adamw, muon, split, stacked), lr, weight_decay, adamw_lr, adamw_weight_decay
    )


def param_groups(
    model: nn.Module,
    routes: Sequence[Route],
    lr: float | None,
    weight_decay: float,
    adamw_lr: float | None,
    adamw_weight_decay: float | None,
) -> list[dict[str, Any]]:
    """The parameter groups for routes that `route` gave; see `muon_param_groups`."""
    from acclimate.optim.groups import decayed_names  # imports transformers' Trainer, which takes seconds

    log.info("Muon's routing:\n%s", table(routes))
    rates = {"muon": lr, "adamw": lr if adamw_lr is None else adamw_lr}
    decays = {"muon": weight_decay, "adamw": weight_decay if adamw_weight_decay is None else adamw_weight_decay}
    parameters, decayed = dict(model.named_parameters()), decayed_names(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(routes, key=lambda row: row.algo != "muon"):
        key = row.algo, row.name in decayed, row.split, row.stacked
        if key not in groups:
            extra = [
                note
                for note, wanted in (("no decay", not key[1]), ("fused", row.split), ("stacked", row.stacked))
                if wanted
            ]
            groups[key] = {
                "algo": row.algo,
                "name": ", ".join([row.algo, *extra]),
                "params": [],
                "weight_decay": decays[row.algo] if key[1] else 0.0,
            }
            if rates[row.algo] is not None:
                groups[key]["lr"] = rates[row.algo]
            if row.algo == "muon":
                groups[key] |= {"split": row.split, "stacked": row.stacked}
        groups[key]["params"].append((row.name, parameters[row.name]))
    return list(groups.values())
