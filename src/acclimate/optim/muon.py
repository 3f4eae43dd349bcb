"""Muon for fine-tuning: matrices move by orthogonalised momentum, everything else by AdamW, in one ordinary optimiser.

For each matrix W (m x n) with gradient G and momentum B:

    B <- mu B + G,    D = G + mu B  (Nesterov)  or  B
    O = msign(D) = U V^T of D = U S V^T               (acclimate.optim.msign)
    W <- (1 - lr wd) W - lr scale(m, n) O

scale = 0.2 sqrt(max(m, n)) makes an update about as large as AdamW's. B is kept as torch.optim.Muon keeps it, times 1 - mu: O does not
change with the scale of D, and state dicts fit both ways. Matrices of one shape are orthogonalised together, which is what makes LoRA's
many small factors cheap. What goes where is decided in acclimate.optim.muon_routing.

At scale. DDP: the same on every rank, no extra traffic. FSDP2: momentum stays sharded; D of matrix i is gathered on rank i mod world,
orthogonalised there and scattered back. FSDP1's and DeepSpeed's flattened parameters have no rows and columns: RuntimeError.
State: one number a weight for matrices, two for the others, as in AdamW.

Sources: Jordan's Muon; "Muon is Scalable for LLM Training" (arXiv 2502.16982: the scale); "Can Muon Fine-tune Adam-Pretrained
Models?" (arXiv 2605.10468, ICML 2026: what to expect, and LoRA as the remedy).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw as adamw_update

from acclimate.errors import did_you_mean
from acclimate.optim.msign import (
    NS5,
    OrthogonalMethod,
    Scale,
    fast_dtype,
    largest_singular_value,
    msign,
    update_scale,
)
from acclimate.optim.muon_routing import Route, param_groups, route, table
from acclimate.optim.sharding import FLATTENED, check_not_flattened, local
from acclimate.runs import replacing

if TYPE_CHECKING:
    from transformers import TrainerCallback


# numbers orthogonalised at once, if one matrix has no more: what fits into half of a processor's cache, and what fills a GPU
CHUNK = {"cpu": 2**17, "cuda": 2**24}
STRONG_RANK = 128  # LoRA from this rank on is reported to suffer like full fine-tuning
DEFAULTS = {"lora": 5e-4, "full": 5e-5}  # learning rates


# --- the optimiser ---


class Muon(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser: each parameter group says which by `algo`, "muon" or "adamw".

    `params` come from `muon_param_groups(model)`; a group without `algo` is Muon's, and all its parameters must be matrices.

    lr, weight_decay: of Muon's groups; `adamw_lr` and `adamw_weight_decay` of the others (None: the same).
    momentum, nesterov, method, ns_steps, scale: see the module.
    ns_dtype: in which msign is computed (None: see `fast_dtype`); a name such as "float32" will do.
    momentum_dtype: of the momentum (None: that of the weight).
    update_cap: an update's spectral norm is at most this share of the weight's (which two steps of the power method estimate, from
        below). A weight that is zero, like LoRA's B at first, is not capped.
    anchor: pulls W towards where it began by lr * anchor * (W - W0) a step; W0 is kept in `anchor_dtype`, or in `anchor_file`
        (safetensors, read one matrix at a time; written when it does not exist, so give a path that a resumed run finds again).
    foreach: for AdamW's groups, as in torch. maximize: ascend. compile: torch.compile the orthogonalisation.

    A matrix whose gradient is not finite is left alone in that step and counted in `skipped` by name. Hyper-parameters of groups may
    be changed between steps. Clipping does not change Muon's step, which does not depend on the size of the gradient.

    Raises ValueError for values out of range and for vectors in Muon's groups, RuntimeError for sparse and complex gradients and for
    flattened parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 5e-4,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        method: OrthogonalMethod = "polar_express",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | str | None = None,
        scale: Scale = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        update_cap: float | None = None,
        anchor: float | None = None,
        *,
        anchor_dtype: torch.dtype | str = torch.bfloat16,
        anchor_file: str | Path | None = None,
        momentum_dtype: torch.dtype | str | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        compile: bool = False,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.routes: list[Route] = []
        self.notes: list[str] = []
        self._anchor_file = None if anchor_file is None else Path(anchor_file)
        self._anchor_dtype, self._momentum_dtype = _dtype(anchor_dtype), _dtype(momentum_dtype)
        self._defaults_of: dict[str, dict[str, Any]] = {
            "muon": {
                "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "method": method,
                "ns_steps": ns_steps, "ns_dtype": _dtype(ns_dtype), "scale": scale, "update_cap": update_cap, "anchor": anchor,
                "split": None, "stacked": False, "maximize": maximize, "compile": compile,
            },
            "adamw": {
                "lr": lr if adamw_lr is None else adamw_lr,
                "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
                "betas": tuple(adamw_betas), "eps": adamw_eps, "foreach": foreach, "maximize": maximize,
            },
        }  # fmt: skip
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if self._anchor_file is not None:
            self._write_anchor(self._anchor_file)

    def __getstate__(self) -> dict[str, Any]:
        own = ("skipped", "routes", "notes", "_anchor_file", "_anchor_dtype", "_momentum_dtype", "_defaults_of")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; fills in what `algo` needs. Raises ValueError, see the class."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        named = [p if isinstance(p, tuple) else (f"parameter {i}", p) for i, p in enumerate(params)]
        group = {**param_group, "params": params}
        for name, p in named:
            if isinstance(p, Tensor):
                check_not_flattened(name, p)
        if "algo" not in group:
            if any(p.ndim != 2 for _, p in named):
                raise ValueError(
                    "a parameter group without 'algo' must hold matrices only; it has "
                    f"{sorted({tuple(p.shape) for _, p in named if p.ndim != 2})[0]}: use muon_param_groups(model)"
                )
            group["algo"] = "muon"
        if group["algo"] not in self._defaults_of:
            raise ValueError(f"algo is 'muon' or 'adamw', not {group['algo']!r}")
        group = {**self._defaults_of[group["algo"]], **group}
        if group["algo"] == "muon":
            group["ns_dtype"] = _dtype(group["ns_dtype"])
            for name, p in named:
                if p.ndim < 2:
                    raise ValueError(
                        f"'{name}' has shape {tuple(p.shape)} and Muon moves matrices: use muon_param_groups(model)"
                    )
        _check(group)
        super().add_param_group(group)

    # --- a step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; returns what `closure` does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            names = _names(number, group)
            found = [(name, p) for name, p in zip(names, group["params"], strict=True) if p.grad is not None]
            for name, p in found:
                if p.grad.is_sparse or p.grad.is_complex():
                    kind = "sparse" if p.grad.is_sparse else "complex"
                    raise RuntimeError(f"Muon does not take {kind} gradients; '{name}' has one")
            if group["algo"] == "adamw":
                self._adamw(group, [p for _, p in found])
            else:
                self._muon(group, self._finite(found))
        return loss

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        states = [self.state[p] for p in params]
        adamw_update(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _finite(self, found: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Those whose gradients are finite, on all ranks; the others are counted."""
        if not found:
            return found
        grads = [local(p.grad) for _, p in found if p.grad is not None]
        full = [g for g in grads if g.numel()]  # the last shards of FSDP2 may be empty
        sizes = iter(torch._foreach_norm(full) if full else [])
        norms = [(next(sizes) if g.numel() else g.new_zeros(())).to(grads[0].device, torch.float32) for g in grads]
        broken = ~torch.stack(norms).isfinite()
        if bool(broken.any()):  # squares overflow long before numbers do
            broken = torch.stack([~g.isfinite().all().to(broken.device) for g in grads])
        sharded = next((p for _, p in found if isinstance(p, DTensor)), None)
        if sharded is not None:
            broken = broken.to(torch.int32)
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=_sharded_over(sharded)[1])
        flags = broken.tolist()
        if any(flags):
            names = [name for (name, _), flag in zip(found, flags, strict=True) if flag]
            if not self.skipped:
                warnings.warn(
                    f"the gradient of '{names[0]}' is not finite: such matrices are left alone, and counted in `skipped`",
                    stacklevel=3,
                )
            self.skipped.update(names)
        return [item for item, flag in zip(found, flags, strict=True) if not flag]

    def _muon(self, group: dict[str, Any], found: list[tuple[str, Tensor]]) -> None:
        buckets: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
        for name, p in found:
            state = self.state[p]
            if "momentum_buffer" not in state:
                if p.ndim < 2:
                    raise RuntimeError(f"parameter '{name}' has become one-dimensional: {FLATTENED}")
                state["momentum_buffer"] = torch.zeros_like(
                    p, dtype=self._momentum_dtype, memory_format=torch.preserve_format
                )
                if group["anchor"] is not None and self._anchor_file is None:
                    state["anchor"] = p.detach().to(self._anchor_dtype, copy=True)
            buckets.setdefault((p.shape, p.dtype, p.grad.dtype, p.device, isinstance(p, DTensor)), []).append((name, p))  # type: ignore[union-attr]
        for (*_, sharded), bucket in buckets.items():
            if sharded and group["update_cap"] is not None:
                raise RuntimeError("update_cap needs whole weights: leave it out under FSDP2, or use DDP")
            size = (
                _sharded_over(bucket[0][1])[2]
                if sharded
                else max(1, CHUNK.get(bucket[0][1].device.type, CHUNK["cuda"]) // bucket[0][1].numel())
            )
            for start in range(0, len(bucket), size):
                chunk = bucket[start : start + size]
                (self._move_sharded if sharded else self._move)(group, [p for _, p in chunk])
                if group["anchor"]:
                    for name, p in chunk:
                        self._pull_back(group, name, p)

    def _directions(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """D of each parameter, the local shard of it; moves the momentum."""
        buffers = [local(self.state[p]["momentum_buffer"]) for p in params]
        grads = [local(p.grad) for p in params if p.grad is not None]
        if grads[0].dtype != buffers[0].dtype:
            grads = [g.to(buffers[0].dtype) for g in grads]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers

    def _move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        parts = self._directions(group, params)
        directions = torch.stack(parts) if len(parts) > 1 else parts[0][None]  # a large matrix is not copied
        rate = float(group["lr"])
        shares = self._shares(group, params) if group["update_cap"] is not None else None
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        row = 0
        for o, scale in _orthogonal(group, directions):
            rows = o.shape[1]
            targets = params if group["split"] is None else [p[row : row + rows] for p in params]
            row += rows
            if shares is None:
                torch._foreach_add_(targets, list(o.unbind()), alpha=-rate * scale)
            else:
                for target, part, share in zip(targets, o, shares, strict=True):
                    target.add_(part, alpha=-rate * scale * share)

    def _move_sharded(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """At most as many matrices of one shape as there are ranks: each rank orthogonalises one."""
        dim, process_group, world = _sharded_over(params[0])
        rank = dist.get_rank(process_group)
        rows = math.ceil(params[0].shape[dim] / world)  # of a shard; the last ones may be shorter, or empty
        shape = [rows, *(size for i, size in enumerate(params[0].shape) if i != dim)]
        dtype = group["ns_dtype"] or fast_dtype(params[0])
        mine: Tensor | None = None
        for owner, d in enumerate(self._directions(group, params)):
            shard = d.new_zeros(shape, dtype=dtype)
            shard[: d.shape[dim]] = d.movedim(dim, 0)
            parts = [torch.empty_like(shard) for _ in range(world)] if rank == owner else None
            dist.gather(shard, parts, group=process_group, group_dst=owner)
            if parts is not None:
                whole = torch.cat(parts)[: params[0].shape[dim]].movedim(0, dim)
                scaled = [o * scale for o, scale in _orthogonal(group, whole[None])]
                mine = torch.zeros(world * rows, *shape[1:], dtype=dtype, device=d.device)
                mine[: params[0].shape[dim]] = torch.cat(scaled, dim=1)[0].movedim(dim, 0)
        rate = float(group["lr"])
        for owner, p in enumerate(params):
            here = local(p)
            shard = torch.empty(shape, dtype=dtype, device=here.device)
            parts = list(mine.split(rows)) if mine is not None and rank == owner else None
            dist.scatter(shard, parts, group=process_group, group_src=owner)
            here.mul_(1 - rate * group["weight_decay"])
            here.add_(shard[: here.shape[dim]].movedim(0, dim), alpha=-rate)

    # --- what keeps updates small ---

    def _shares(self, group: dict[str, Any], params: list[Tensor]) -> list[float]:
        """By how much each step is shortened so that its spectral norm is at most `update_cap` times the weight's."""
        found = []
        longest = float(group["lr"]) * largest_singular_value(group["method"], group["ns_steps"])
        for p in params:
            w, state = p.detach().flatten(1).float(), self.state[p]
            if "sv" not in state:
                start = torch.randn(w.shape[1], generator=torch.Generator().manual_seed(0))
                state["sv"] = (start / start.norm()).to(w.device)
            norm = 0.0
            for _ in range(2):
                image = w.T @ (w @ state["sv"])
                square = float(image.norm())  # of v with |v| = 1: tends to sigma_1^2
                if square == 0:
                    break
                norm = math.sqrt(square)
                state["sv"] = image / square
            scale = update_scale(group["scale"], *w.shape)
            found.append(min(1.0, group["update_cap"] * norm / (longest * scale)) if norm and longest else 1.0)
        return found

    def _pull_back(self, group: dict[str, Any], name: str, p: Tensor) -> None:
        if self._anchor_file is None:
            origin = local(self.state[p]["anchor"])
        else:
            with safe_open(self._anchor_file, framework="pt") as file:
                origin = file.get_tensor(name).to(p.device)
        here = local(p)
        here.lerp_(origin.to(here.dtype), float(group["lr"]) * group["anchor"])

    def _write_anchor(self, path: Path) -> None:
        named = {
            name: p.detach()
            for number, group in enumerate(self.param_groups)
            if group["algo"] == "muon" and group["anchor"] is not None
            for name, p in zip(_names(number, group), group["params"], strict=True)
        }
        if any(isinstance(p, DTensor) for p in named.values()):
            raise ValueError("anchor_file does not take shards (FSDP2); leave it out, and the anchor is sharded, too")
        if not path.exists():
            with replacing(path) as temporary:
                save_file({name: p.to("cpu", self._anchor_dtype).contiguous() for name, p in named.items()}, temporary)

    # --- state ---

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this class, or of torch.optim.Muon or AdamW for groups that match.

        Raises ValueError, with the names, when a parameter has changed its algorithm.
        """
        saved_groups = state_dict["param_groups"]
        before, now = _routing_of(saved_groups), _routing_of(self.param_groups)
        named = all("param_names" in group for group in (*saved_groups, *self.param_groups))
        if before != now and (named or len(saved_groups) == len(self.param_groups)):
            names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            raise ValueError(
                f"the saved optimiser routed {len(names)} parameters differently: "
                + ", ".join(f"'{n}' ({before.get(n, 'absent')}, now {now.get(n, 'absent')})" for n in names[:5])
                + (" ..." if len(names) > 5 else "")
            )
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"the saved optimiser has {len(saved_groups)} parameter groups, this one has {len(self.param_groups)}"
            )
        own = [self._translated(mine, saved) for mine, saved in zip(self.param_groups, saved_groups, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": own})
        # torch casts every state to the weight's type; momentum and anchor may have their own
        places = chain.from_iterable(group["params"] for group in saved_groups)
        for place, p in zip(places, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            for key, value in state_dict["state"].get(place, {}).items():
                if key in ("momentum_buffer", "anchor", "sv") and value.dtype != self.state[p][key].dtype:
                    self.state[p][key] = value.detach().to(self.state[p][key].device, copy=True)

    def _translated(self, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """A saved group with all of our keys."""
        if "algo" in saved:
            return saved
        if saved.get("amsgrad"):
            raise ValueError("the saved AdamW has amsgrad, which this optimiser does not have")
        if "ns_coefficients" in saved and tuple(saved["ns_coefficients"]) != NS5:
            raise ValueError(f"the saved Muon has ns_coefficients {saved['ns_coefficients']}; only {NS5} are known")
        algo = _algo(saved)
        group = {**self._defaults_of[algo], **{k: v for k, v in mine.items() if k in ("name", "param_names", "split")}}
        group |= {key: value for key, value in saved.items() if key in group or key in ("params", "initial_lr")}
        if "ns_coefficients" in saved:
            scales = {"match_rms_adamw": "match_rms_adamw", "original": "spectral", None: "spectral"}
            group |= {"method": "ns5", "scale": scales[saved["adjust_lr_fn"]]}
        return {**group, "algo": algo}

    # --- for people, and for acclimate tune ---

    def table(self) -> str:
        """Which parameters go where, as text (of an optimiser from `build_muon`)."""
        return table(self.routes)

    def run_callbacks(self, directory: Path) -> list[TrainerCallback]:
        """What `acclimate tune` adds to a run: how far the weights have moved, written to its directory."""
        from acclimate.optim.update_strength import MismatchCallback

        return [MismatchCallback(directory=directory)]


def _orthogonal(group: Mapping[str, Any], d: Tensor) -> list[tuple[Tensor, float]]:
    """O and its scale for directions (b, *shape) of parameters of one shape; of fused weights one pair a part."""
    found = []
    for part in d.split(list(group["split"]), dim=1) if group["split"] is not None else (d,):
        matrices = part.flatten(0, 1) if group["stacked"] else part.flatten(2)
        o = msign(matrices, group["method"], group["ns_steps"], group["ns_dtype"], compile=group["compile"])
        found.append((o.reshape(part.shape), update_scale(group["scale"], *matrices.shape[-2:])))
    return found


def _sharded_over(p: Tensor) -> tuple[int, dist.ProcessGroup, int]:
    """(dimension, process group, its size) of an FSDP2 shard; replicas (HSDP) all do the same."""
    assert isinstance(p, DTensor)
    places = [(i, placement.dim) for i, placement in enumerate(p.placements) if isinstance(placement, Shard)]
    if len(places) != 1:
        raise RuntimeError(f"Muon takes weights that are sharded along one dimension, not {p.placements}")
    group = p.device_mesh.get_group(places[0][0])
    return places[0][1], group, dist.get_world_size(group)


def _routing_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {name: _algo(group) for number, group in enumerate(groups) for name in _names(number, group)}


def _algo(group: Mapping[str, Any]) -> str:
    """Also of a group of torch's Muon or AdamW."""
    return group.get("algo") or ("adamw" if "betas" in group else "muon")


def _names(number: int, group: Mapping[str, Any]) -> list[str]:
    return group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]


def _dtype(value: torch.dtype | str | None) -> Any:
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{value!r} is not a torch data type; 'float32' is, for instance")
        return found
    return value


def _check(group: Mapping[str, Any]) -> None:
    """Raises ValueError that names the value."""
    for name in ("lr", "weight_decay", "eps", "update_cap", "anchor"):
        value = group.get(name)
        if value is not None and not float(value) >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if group["algo"] == "adamw":
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas must be in [0, 1), got {group['betas']}")
        return
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
    if not 1 <= group["ns_steps"] <= 99:
        raise ValueError(f"ns_steps must be 1 to 99, got {group['ns_steps']}")
    for name, known in (("method", get_args(OrthogonalMethod)), ("scale", get_args(Scale))):
        if group[name] not in known:
            hint = did_you_mean(str(group[name]), known)
            raise ValueError(f"{name} is one of {', '.join(known)}; got {group[name]!r}.{hint}")


# --- from a model ---


def build_muon(
    model: nn.Module,
    mode: Literal["auto", "lora", "full"] = "auto",
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    warn_mismatch: bool = True,
    adamw: Sequence[str] = (),
    muon: Sequence[str] = (),
    split: Mapping[str, Sequence[int]] | None = None,
    stacked: Sequence[str] = (),
    **options: Any,
) -> Muon:
    """`Muon` for a model, its parameters routed (`route` takes `adamw`, `muon`, `split` and `stacked`).

    mode: "lora" or "full", which decides lr when none is given (5e-4 and 5e-5); "auto" looks for LoRA factors. `options` are Muon's.

    Warns (unless `warn_mismatch` is false) where a weight pretrained with Adam is known to suffer from Muon: full fine-tuning, LoRA
    of rank 128 or more, rsLoRA. Raises as `Muon` and `route` do; ValueError when nothing is trained.
    """
    if mode not in ("auto", "lora", "full"):
        raise ValueError(f"mode is auto, lora or full; got {mode!r}")
    routes = route(model, adamw, muon, split, stacked)
    if not routes:
        raise ValueError("the model has no parameter that is trained")
    ranks = [min(row.shape) for row in routes if "lora_" in row.name and len(row.shape) == 2 and row.algo == "muon"]
    if mode == "auto":
        mode = "lora" if ranks else "full"
    lr = DEFAULTS[mode] if lr is None else lr
    groups = param_groups(model, routes, lr, weight_decay, options.get("adamw_lr"), options.get("adamw_weight_decay"))
    optimizer = Muon(groups, lr=lr, weight_decay=weight_decay, **options)
    optimizer.routes = routes
    optimizer.notes = mismatches(model, mode, ranks) if warn_mismatch else []
    for message in optimizer.notes:
        warnings.warn(message, stacklevel=2)
    return optimizer


def mismatches(model: nn.Module, mode: str, ranks: Sequence[int]) -> list[str]:
    """What is known to go badly with Muon on weights that Adam has trained."""
    found = []
    if mode == "full":
        found.append(
            "full fine-tuning with Muon of weights that were pretrained with Adam is usually worse than with Adam; LoRA closes the gap"
        )
    if max(ranks, default=0) >= STRONG_RANK:
        found.append(f"LoRA of rank {max(ranks)}: from rank {STRONG_RANK} on the mismatch of Muon and Adam returns")
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, Mapping) and any(getattr(config, "use_rslora", False) for config in configs.values()):
        found.append("use_rslora enlarges updates, which hurts with Muon: leave it out")
    return found


class MuonFactory:
    """For transformers' Trainer: `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 5e-4}))`."""

    def __call__(self, model: nn.Module, **options: Any) -> Muon:
        """`build_muon(model, **options)`"""
        return build_muon(model, **options)
