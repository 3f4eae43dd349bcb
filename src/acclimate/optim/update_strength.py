"""How far fine-tuning has moved each matrix, and how: the strength of updates, by which a change of optimiser does its damage.

For a weight W that was W0, with Delta = W - W0 and singular values sigma:

    cosine distance  1 - <W, W0> / (|W| |W0|)        relative change  |Delta|_F / |W0|_F,  |Delta|_2 / |W0|_2
    stable rank      |.|_F^2 / |.|_2^2               SVD entropy      -sum p log p / log k,  p = sigma^2 / sum sigma^2

both of W and of Delta. For LoRA the same of A, of B, and of the layer, W0 + (alpha/r) B A against W0, from QR of both factors and the
SVD of an r x r matrix; B A is never formed. 1 - cos is computed as (1 - cos^2) / (1 + cos) from the part of Delta orthogonal to W0,
without cancellation. Spectra come from the Gram matrix of the smaller side in float64.

At scale: one matrix at a time, gathered from its shards (FSDP2), so every rank must call.

Source: "Can Muon Fine-tune Adam-Pretrained Models?" (arXiv 2605.10468, ICML 2026).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from acclimate.linalg import from_triangle, gram_triangle
from acclimate.optim.muon import Muon
from acclimate.optim.muon_routing import grouped
from acclimate.runs import read_json, remove, replacing, write_json, write_text

POINTS = 8  # measurements a run
BEFORE = "checkpoints/weights_before.safetensors"  # among what a finished run does not need
_GROUPS = (
    ("embedding and head", re.compile(r"(embed|wte|wpe|lm_head|classifier|score)")),
    ("attention q/o", re.compile(r"(q_proj|o_proj|out_proj|query|attention\.output|\.(q|o)(\.|$))")),
    ("attention k/v", re.compile(r"(k_proj|v_proj|key|value|\.(k|v)(\.|$))")),
    ("attention qkv", re.compile(r"(qkv|c_attn|query_key_value|Wqkv|in_proj)")),
)


class Snapshot(Mapping[str, Tensor]):
    """Weights by name: of a state dict, or of a safetensors file (or a directory of them) that is read when asked."""

    def __init__(self, source: Mapping[str, Tensor] | str | Path) -> None:
        self._tensors = source if isinstance(source, Mapping) else None
        self._files: dict[str, Path] = {}
        if not isinstance(source, Mapping):
            path = Path(source)
            for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
                with safe_open(file, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
            if not self._files:
                raise ValueError(f"there is no safetensors file in '{path}'")

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is not None:
            return self._tensors[name]
        with safe_open(self._files[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors if self._tensors is not None else self._files)

    def __len__(self) -> int:
        return len(self._tensors if self._tensors is not None else self._files)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies, on the CPU, of the trained weights of two dimensions and more."""
    return {name: whole.to("cpu", copy=True) for name, whole in _trained(model)}


def update_report(
    model: nn.Module,
    reference: Mapping[str, Tensor] | str | Path,
    spectra: bool = True,
    to_json: str | Path | None = None,
) -> list[dict[str, Any]]:
    """A row a trained matrix, and a row a LoRA product: {"name", "group", "kind", ...} with the module's quantities as columns.

    reference: the weights before, as `snapshot(model)`, a state dict, or the path of a safetensors file or directory. `kind` is
        "weight", "lora_A", "lora_B" or "product". What has no meaning is None (the cosine of a B that was zero; the distance of a
        product whose base weight is quantised).
    spectra: False leaves out what needs singular values of whole weights, which is nearly all of the time.
    to_json: a file for the rows.

    Raises ValueError when the reference lacks a trained matrix.
    """
    before, rows = Snapshot(reference), []
    for name, weight in _trained(model):
        factor = re.search(r"lora_(?:embedding_)?[AB]", name)
        if name not in before:
            if factor:  # the reference is the base model; the product needs no more
                continue
            raise ValueError(
                f"the reference has no '{name}'; give the weights from before training, e.g. snapshot(model)"
            )
        row = {"name": name, "group": group_of(name), "kind": factor[0] if factor else "weight"}
        rows.append(row | of_weight(weight.flatten(1), before[name].to(weight.device).flatten(1), spectra))
    for name, module in model.named_modules():
        for adapter, a, b, scale in _lora_pairs(module):
            base = _plain_base(module)
            row = {"name": f"{name}.{adapter}", "group": group_of(name), "kind": "product"}
            rows.append(row | of_product(a, b, scale, base, spectra))
    if to_json is not None:
        write_text(Path(to_json), json.dumps(rows, indent=1) + "\n")
    return rows


def group_of(name: str) -> str:
    """Where a weight is in a transformer, from its name: attention q/o, k/v or qkv, embedding and head, or dense."""
    return next((group for group, pattern in _GROUPS if pattern.search(name)), "dense")


def of_weight(weight: Tensor, origin: Tensor, spectra: bool = True) -> dict[str, Any]:
    """The quantities for W and W0, both (m, n)."""
    w0 = origin.double()
    change = weight.double() - w0
    row = _distances(float(change.square().sum()), float((change * w0).sum()), float(w0.square().sum()))
    if spectra:
        values, moved, old = (_squared_singular_values(x) for x in (weight.double(), change, w0))
        row["relative_change_spectral"] = _ratio(math.sqrt(float(moved[0])), math.sqrt(float(old[0])))
        row |= {"stable_rank": _stable_rank(values), "svd_entropy": _entropy(values)}
        row |= {"change_stable_rank": _stable_rank(moved), "change_svd_entropy": _entropy(moved)}
    return row


def of_product(a: Tensor, b: Tensor, scale: float, base: Tensor | None, spectra: bool = True) -> dict[str, Any]:
    """The quantities for Delta = scale B A, A (r, n) and B (m, r), on top of `base` (m, n), or None where that is quantised."""
    a, b = a.double(), b.double()
    values = scale**2 * torch.linalg.svdvals(torch.linalg.qr(b).R @ torch.linalg.qr(a.T).R.T).square()
    row: dict[str, Any] = {"cosine_distance": None, "relative_change": None}
    if base is not None:
        w0 = base.double()
        row = _distances(float(values.sum()), scale * float(((b.T @ w0) * a).sum()), float(w0.square().sum()))
        if spectra:
            size = math.sqrt(float(_squared_singular_values(w0)[0]))
            row["relative_change_spectral"] = _ratio(math.sqrt(float(values[0])), size)
    return row | {"change_stable_rank": _stable_rank(values), "change_svd_entropy": _entropy(values)}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{group: {quantity: its mean}} over the layers: over weights, and over products where a weight has LoRA."""
    found: dict[str, dict[str, float]] = {}
    for group in sorted({row["group"] for row in rows}):
        layers = [row for row in rows if row["group"] == group and row["kind"] in ("weight", "product")]
        keys = dict.fromkeys(key for row in layers for key, value in row.items() if isinstance(value, float))
        means = {}
        for key in keys:
            values = [row[key] for row in layers if isinstance(row.get(key), float)]
            means[key] = sum(values) / len(values)
        if means:
            found[group] = means
    return found


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, p in model.named_parameters():
        if p.requires_grad and p.ndim > 1:
            yield name, _whole(p)


def _whole(p: Any) -> Tensor:
    """All of a parameter, also of one that FSDP2 has sharded."""
    found: Tensor = p.full_tensor() if isinstance(p, DTensor) else p
    return found.detach()


def _lora_pairs(module: Any) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """(adapter, A, B, alpha / r) of the trained LoRA pairs of a linear layer of PEFT."""
    factors = getattr(module, "lora_A", None)
    if isinstance(factors, nn.ModuleDict):
        for adapter, layer in factors.items():
            a, b = layer.weight, module.lora_B[adapter].weight
            if isinstance(layer, nn.Linear) and a.requires_grad:
                yield adapter, _whole(a), _whole(b), float(module.scaling[adapter])


def _plain_base(module: Any) -> Tensor | None:
    """The frozen weight (m, n) below a LoRA layer, or None where it is quantised or of another kind."""
    layer = module.get_base_layer()
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or weight is None or weight.element_size() < 2:
        return None
    return _whole(weight)


def _distances(change: float, inner: float, origin: float) -> dict[str, Any]:
    """From |Delta|^2, <Delta, W0> and |W0|^2."""
    weight = origin + 2 * inner + change  # |W|^2
    row = {"cosine_distance": None, "relative_change": _ratio(math.sqrt(change), math.sqrt(origin))}
    if origin > 0 and weight > 0:
        cosine = (origin + inner) / math.sqrt(origin * weight)
        across = max(0.0, change - inner**2 / origin)  # of Delta, orthogonal to W0
        row["cosine_distance"] = across / weight / (1 + cosine) if cosine > 0 else 1 - cosine
    return row


def _squared_singular_values(matrix: Tensor) -> Tensor:
    """Largest first, of a float64 matrix (m, n), min(m, n) of them."""
    gram = from_triangle(gram_triangle(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T))
    return torch.linalg.eigvalsh(gram).clamp_min(0).flip(0)


def _stable_rank(squares: Tensor) -> float | None:
    return _ratio(float(squares.sum()), float(squares[0]))


def _entropy(squares: Tensor) -> float | None:
    total = float(squares.sum())
    if total == 0 or len(squares) < 2:
        return None
    return float(torch.special.entr(squares / total).sum()) / math.log(len(squares))


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


# --- during training ---


class MismatchCallback(TrainerCallback):
    """Logs how far the weights have moved: `mismatch/GROUP/cosine_distance` and `.../relative_change`, means by group.

    every: measure at every so many evaluations; runs without evaluations, and others besides, measure eight times.
    reference: the weights before, as `update_report` takes them. None: those at the start of training, kept in memory, or, with
        `directory`, in a file there (which a resumed run finds) until training ends.
    directory: where `optimizer.json` is written, too, for the report of `acclimate tune`.

    A measurement reads each trained matrix once; singular values are left out. Means are over weights, or over W0 + (alpha/r) B A.
    """

    def __init__(
        self,
        every: int = 1,
        reference: Mapping[str, Tensor] | str | Path | None = None,
        directory: str | Path | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every = every
        self.reference = reference
        self.directory = None if directory is None else Path(directory)
        self.points: list[tuple[int, dict[str, dict[str, float]]]] = []
        self._evaluations = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        file = None if self.directory is None else self.directory / BEFORE
        if state.global_step == 0:
            self.points = []
            if self.reference is None:
                self.reference = snapshot(model)
                if file is not None:
                    if state.is_world_process_zero:
                        with replacing(file) as temporary:
                            save_file({k: v.contiguous() for k, v in self.reference.items()}, temporary)
                    if dist.is_initialized():
                        dist.barrier()
                    self.reference = file
        elif self.directory is not None:
            saved = self.directory / "optimizer.json"
            if saved.exists():
                self.points = [(s, g) for s, g in read_json(saved).get("points", []) if s <= state.global_step]
            if self.reference is None and file is not None and file.exists():
                self.reference = file

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        evaluated = logs is not None and "eval_loss" in logs
        self._evaluations += evaluated
        last = self.points[-1][0] if self.points else 0
        gap = max(1, state.max_steps // POINTS)
        due = (evaluated and self._evaluations % self.every == 0) or state.global_step // gap > last // gap
        if not due or self.reference is None or state.global_step <= last:
            return
        values = self._measure(state, model)
        flat = {f"mismatch/{g}/{k}": v for g, means in values.items() for k, v in means.items() if k in _LOGGED}
        if logs is not None:
            logs.update(flat)  # trackers see this, and the history keeps a copy that was made before
        if state.log_history:
            state.log_history[-1].update(flat)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if self.reference is not None and (not self.points or self.points[-1][0] < state.global_step):
            self._measure(state, model)
        if self.directory is not None and state.is_world_process_zero:
            self._write(optimizer)
            if state.global_step >= state.max_steps:
                remove(self.directory / BEFORE)

    def on_save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.directory is not None and state.is_world_process_zero:
            self._write(optimizer)  # a run that is killed goes on from here

    def _measure(self, state: Any, model: Any) -> dict[str, dict[str, float]]:
        assert self.reference is not None
        values = summary(update_report(model, self.reference, spectra=False))
        self.points.append((state.global_step, values))
        return values

    def _write(self, optimizer: Any) -> None:
        assert self.directory is not None
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        plots = []
        for quantity, title in _LOGGED.items():
            series: dict[str, list[list[float]]] = {}
            for step, groups in self.points:
                for group, means in groups.items():
                    if quantity in means:
                        series.setdefault(group, []).append([step, means[quantity]])
            if series:
                plots.append({"title": title, "x": "step", "y": title.lower(), "log": False, "series": series})
        content = {"title": "How far the weights have moved", "notes": [], "tables": [], "plots": plots}
        if isinstance(optimizer, Muon):
            content |= of_muon(optimizer)
        write_json(self.directory / "optimizer.json", content | {"points": self.points})


_LOGGED = {"cosine_distance": "Cosine distance to the start", "relative_change": "Relative change of the weights"}


def of_muon(optimizer: Muon) -> dict[str, Any]:
    """What a report says of the optimiser: notes, the table of its routing, and every parameter's route under "routing"."""
    rows: list[list[Any]] = [
        ["Muon" if algo == "muon" else "AdamW", reason, name, " x ".join(map(str, shape)), count]
        for algo, reason, name, shape, count in grouped(optimizer.routes)
    ]
    if len(rows) > 30:
        rows = [*rows[:29], ["", "", f"{len(rows) - 29} more kinds", "", ""]]
    bytes_kept = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    notes = [*optimizer.notes, f"State of the optimiser: {bytes_kept / 1e6:.1f} MB."]
    if optimizer.skipped:
        notes.append(f"Gradients that were not finite, and skipped: {dict(optimizer.skipped)}.")
    return {
        "title": "Muon: matrices move by orthogonalised momentum, the rest by AdamW",
        "notes": notes,
        "tables": [
            {
                "title": "Which parameters go where",
                "columns": ["algorithm", "because", "parameter", "shape", "count"],
                "rows": rows,
            }
        ],
        "routing": [
            {"name": row.name, "shape": list(row.shape), "algo": row.algo, "reason": row.reason}
            for row in optimizer.routes
        ],
    }
