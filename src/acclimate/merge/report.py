"""What is told about a merge: its report, the README beside the result, and the fingerprint by which it is taken up again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import acclimate
from acclimate.linalg import effective_rank
from acclimate.merge.adapter_files import PREFIX, Module
from acclimate.merge.circumerge import Core
from acclimate.merge.plan import MergePlan

ENOUGH = 0.9  # retained energy below which there is a warning


@dataclass
class MergeReport:
    """What was merged and how well it fits: a row a layer, totals, and warnings.

    `erank_in`, `erank_merged` and `erank_out` are the effective ranks of the weighted changes side by side, of the merged change, and
    of what was written; `energy` is the share of the merged change's squared norm that was written.
    """

    modules: list[dict[str, Any]]
    totals: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    directory: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def module_row(module: Module, core: Core, index: int, rank: int) -> dict[str, Any]:
    squares = core.sigma[index].square()
    total = float(squares.sum())
    return {
        "name": module.name,
        "shape": [module.b_head, module.n],
        "ranks": [part.rank for part in module.parts],
        "R": module.columns,
        "p": core.b.K.shape[-2],
        "q": core.a.K.shape[-2],
        "sketch": [core.b.sketch_size, core.a.sketch_size],
        "basis": core.basis,
        "erank_in": float(core.erank_in[index]),
        "erank_merged": float(effective_rank(core.sigma[index])),
        "erank_out": float(effective_rank(core.sigma[index, :rank])),
        "energy": float(squares[:rank].sum()) / total if total else 1.0,
        "spectrum": [float(f"{value:.6g}") for value in core.sigma[index].tolist()],
    }


def rank_for(spectra: Sequence[Tensor], share: float) -> int:
    longest = max(len(spectrum) for spectrum in spectra)
    squares = sum(
        (torch.nn.functional.pad(s.double().square(), (0, longest - len(s))) for s in spectra), torch.zeros(longest)
    )
    kept = squares.cumsum(0) / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
    # the last sum is 1 up to rounding
    return int((kept < share * (1 - 1e-12)).sum().clamp_max(max(0, longest - 1))) + 1


def make_report(plan: MergePlan, rank: int, rows: list[dict[str, Any]], seconds: float) -> MergeReport:
    spectra = [torch.tensor(row["spectrum"], dtype=torch.float64) for row in rows]
    total = sum(float(s.square().sum()) for s in spectra)
    kept = sum(float(s[:rank].square().sum()) for s in spectra)
    energy = kept / total if total else 1.0
    warnings = []
    if energy < ENOUGH:
        warnings.append(
            f"rank {rank} keeps {energy:.0%} of the merged change's squared norm; --rank {rank_for(spectra, ENOUGH)} would keep "
            f"{ENOUGH:.0%}"
        )
    heads = [key for key, holders in plan.kept_extras().items() if len(holders) > 1 and not plan.is_bias(key)]
    if heads:
        warnings.append(
            f"{len(heads)} tensors that the adapters hold whole were averaged, e.g. '{heads[0].removeprefix(PREFIX)}'. Heads of "
            "different tasks have no meaningful mean: --modules-to-save first or drop"
        )

    def mean(key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    order = {module.name: index for index, module in enumerate(plan.modules)}
    return MergeReport(
        [
            {key: value for key, value in row.items() if key != "spectrum"}
            for row in sorted(rows, key=lambda row: order[row["name"]])
        ],
        {
            "rule": plan.settings.rule_name,
            "basis": sorted({row["basis"] for row in rows}),
            "adapters": len(plan.adapters),
            "modules": len(rows),
            "rank": rank,
            "energy": energy,
            "erank_in": mean("erank_in"),
            "erank_merged": mean("erank_merged"),
            "erank_out": mean("erank_out"),
            "seconds": seconds,
        },
        warnings,
    )


def _settings_dict(plan: MergePlan) -> dict[str, Any]:
    return {**asdict(replace(plan.settings, rule="tsv")), "rule": plan.settings.rule_name}


def made_with(plan: MergePlan, hashes: list[str]) -> dict[str, Any]:
    return {
        "acclimate": acclimate.__version__,
        "settings": _settings_dict(plan),
        "inputs": [
            {"adapter": adapter.label, "weight": weight, "sha256": digest}
            for adapter, weight, digest in zip(plan.adapters, plan.weights, hashes, strict=True)
        ],
    }


def fingerprint(plan: MergePlan, hashes: list[str]) -> dict[str, Any] | None:
    """What must be equal for an interrupted merge to go on; None for a rule of the user's, which has no name to go by."""
    if callable(plan.settings.rule):
        return None
    content = {
        **made_with(plan, hashes),
        "configs": [adapter.config for adapter in plan.adapters],
        "dtype": str(plan.dtype),
        "device": str(plan.device),
        "modules_to_save": plan.modules_to_save,
    }
    plain: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return plain


def readme(plan: MergePlan, rank: int, hashes: list[str]) -> str:
    base = plan.adapters[0].config.get("base_model_name_or_path")
    settings = ", ".join(f"{key}={value}" for key, value in _settings_dict(plan).items() if key != "rank")
    lines = [
        "---",
        *([f"base_model: {json.dumps(base)}"] if base else []),
        "library_name: peft",
        "tags: [lora, merge]",
        "---",
        "# Merged LoRA adapter",
        "",
        f"Merged from {len(plan.adapters)} adapters by acclimate {acclimate.__version__} (`acclimate merge`), rank {rank}.",
        f"Settings: {settings}. Layers: merge_report.json.",
        "",
        "| input | weight | sha256 of its weights |",
        "|---|---|---|",
        *(
            f"| {adapter.label} | {weight:g} | {digest} |"
            for adapter, weight, digest in zip(plan.adapters, plan.weights, hashes, strict=True)
        ),
    ]
    return "\n".join(lines) + "\n"
