"""IO-Adam: AdamW whose second moment is two short vectors a layer, from its inputs and output gradients.

The gradient of a layer's weight W (m x n) is G = D^T X. Adam keeps m n squared gradients; IO-Adam keeps averages of s = sum_t X_t^2 (n)
and r = sum_t D_t^2 (m) (acclimate.optim.gradient_factors) in b rows C (b x n) and R (b x m) that take turns, row t mod b at step t:

    C <- beta2 C,  C_j += (1 - beta2) s',      R <- beta2 R,  R_j += (1 - beta2) r',      V = R^T C
    M <- beta1 M + (1 - beta1) G,              W <- (1 - lr wd) W - lr M / (1 - beta1^t) / (sqrt(V^) + eps)

scale "energy" (default): s' = s / sum(s), r' = r |G|^2 / sum(r), V^ = k V / sum(V) with k = sum(R) / (1 - beta2^t). Then V^ sums to what
    Adam's second moment sums to, so Adam's learning rate carries over, whatever the number of tokens, the scale of the loss, b, and
    the number of processes.
scale "paper": s' = s, r' = r, V^ = V / (1 - beta2^t)^2: up to T (tokens) times Adam's, so use 3 to 10 times its learning rate with b = 1.

Other exponents (`p`): V = sum_c (R_c^(1/q) C_c^(1/p))^2 of sums of |X|^p and |D|^q. Parameters that are not the weight of one linear
layer or ungrouped convolution are AdamW's. V >= G^2 for one batch (Cauchy-Schwarz), but not after the averages.

With `fused`, linear layers never have a gradient: the backward pass adds (1 - beta1) D^T X to M, block by block. |G|^2 is then the sum over
uses of the layer and micro-batches of their own |G|^2 (exact for one). Such gradients cannot be clipped, scaled by a GradScaler, or
averaged over processes; `rms_clip` bounds the step instead.

At scale: DDP averages the gradients; the sums of all layers go through one all-reduce of 4 (m + n) bytes a layer. FSDP2: W and M
are sharded, C and R replicated. FSDP1, DeepSpeed ZeRO and tensor parallelism are refused. Every process of the default group must take
part in each step.

Source: "IO-Adam: Rethinking Memory-Efficient Adaptive Optimizers from Gradient Computation", ICML 2026; the energy scale is ours.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import TrainerCallback

from acclimate import runs
from acclimate.errors import InputError
from acclimate.optim.gradient_factors import InputSums, LayerFactors, Owner, owners
from acclimate.optim.groups import decay_groups
from acclimate.optim.memory import parameter_bytes, total_bytes
from acclimate.optim.sharding import copies, local, local_rows, processes, refuse_unsupported

Scale = Literal["energy", "paper"]

CACHE_MB = 1  # a block of a matrix that a processor's second-level cache holds


# --- the mathematics ---


def add_sums(
    in_sq: Tensor,
    out_sq: Tensor,
    sums: Tensor,
    totals: tuple[float, float, float],
    beta2: float,
    slot: int,
    scale: Scale,
) -> None:
    """One step of the averages, in place.

    in_sq: C (b, n). out_sq: R (b, m). sums: s and r, one after the other (n + m). totals: sum(s), sum(r), |G|^2. slot: the row.
    """
    in_sq.mul_(beta2)
    out_sq.mul_(beta2)
    s, r = sums.split([in_sq.shape[1], out_sq.shape[1]])
    total_s, total_r, energy = totals
    if scale == "energy":
        if energy == 0:
            return
        # A gradient from elsewhere (the weight is used outside its layer, too) is spread evenly
        s = s / total_s if total_s > 0 else torch.full_like(s, 1 / len(s))
        r = r * (energy / total_r) if total_r > 0 else torch.full_like(r, energy / len(r))
    elif total_s == 0 or total_r == 0:
        return
    in_sq[slot].add_(s, alpha=1 - beta2)
    out_sq[slot].add_(r, alpha=1 - beta2)


def second_moment(
    in_sq: Tensor, out_sq: Tensor, step: int, beta2: float, p: float = 2.0, scale: Scale = "energy"
) -> tuple[Tensor, Tensor]:
    """(outputs (b, m), inputs (b, n)) whose product outputs^T inputs is V^ (m, n)."""
    inputs, outputs = (in_sq, out_sq) if p == 2 else (in_sq.pow(2 / p), out_sq.pow(2 - 2 / p))
    correction = 1 - beta2**step
    if scale == "paper":
        return outputs / correction**2, inputs
    total = (outputs.sum(1) * inputs.sum(1)).sum()
    return outputs * torch.where(total > 0, out_sq.sum() / (correction * total), 0.0), inputs


def denominator(left: Tensor, right: Tensor, eps: float) -> Tensor:
    """sqrt(left^T right) + eps, for left (b, rows) and right (b, columns)."""
    if len(left) == 1:
        return torch.outer(left[0].sqrt(), right[0].sqrt()).add_(eps)
    return (left.T @ right).sqrt_().add_(eps)


def from_second_moment(exp_avg_sq: Tensor, p: float = 2.0) -> tuple[Tensor, Tensor]:
    """(C (n), R (m)) of an Adam second moment v (m, n): for p = 2, R C^T has the row and column sums of v."""
    rows, columns, total = exp_avg_sq.sum(1), exp_avg_sq.sum(0), exp_avg_sq.sum()
    if total == 0:
        return torch.zeros_like(columns), torch.zeros_like(rows)
    inputs, outputs = (columns / total).pow(p / 2), rows.pow(p / (2 * (p - 1)))
    return inputs / inputs.sum(), outputs * (total / outputs.sum())


# --- the optimiser ---


@dataclass
class _Update:
    """A parameter with something to do in this step. `norm` is its gradient's squared norm."""

    group: dict[str, Any]
    parameter: Tensor
    layer: LayerFactors | None
    sums: Tensor | None
    norm: Tensor
    totals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    uses: float = 0.0


class IOAdamW(torch.optim.Optimizer):
    """AdamW with the second moments of linear layers in factors.

    params: parameters, groups, or the model itself. model: where the layers are; needed before the first step (or `attach`).
    lr, betas, eps, weight_decay, maximize, foreach: as in torch.optim.AdamW (foreach: of the parameters that stay with AdamW).
    buffer: b. p, scale, rms_clip: see above (rms_clip: divide a layer's step, before lr, by max(1, its RMS / rms_clip)).
    fused: no gradients of linear layers. embeddings: "adam", or "io" for factors (counts of tokens). exclude: names or patterns
    of parameters that stay with AdamW. on_untracked: what to do with a layer whose weight is used without calling the layer: "adam"
    moves it to AdamW before its first step, with a warning; "error" raises. workspace_mb: bound of temporary memory.
    momentum_dtype: of M; None is the parameter's.

    A step or statistic that is not finite (or too large to square) is left out and counted in `skipped`. With `scale="paper"` under a
    GradScaler, set `grad_scale` to its scale before each step. A model's `zero_grad(set_to_none=False)` after a skipped step
    is not noticed; the optimiser's is.

    Raises ValueError for settings out of range, and RuntimeError for what cannot work (see `step` and `attach`).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        model: nn.Module | None = None,
        buffer: int = 1,
        p: float = 2.0,
        scale: Scale = "energy",
        fused: bool = False,
        embeddings: Literal["adam", "io"] = "adam",
        rms_clip: float | None = None,
        exclude: Collection[str] = (),
        on_untracked: Literal["adam", "error"] = "adam",
        workspace_mb: float = 16,
        foreach: bool | None = None,
        maximize: bool = False,
        momentum_dtype: torch.dtype | str | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            model, params = params, [p for p in params.parameters() if p.requires_grad]
        for name, value, known in (("embeddings", embeddings, ("adam", "io")), ("on_untracked", on_untracked, ("adam", "error"))):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}; got {value!r}")
        if workspace_mb <= 0:
            raise ValueError(f"workspace_mb must be positive, got {workspace_mb}")
        self.fused, self.embeddings, self.exclude = fused, embeddings, tuple(exclude)
        self.on_untracked, self.workspace_mb = on_untracked, workspace_mb
        self._start()
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "buffer": buffer, "p": p, "scale": scale,
            "rms_clip": rms_clip, "foreach": foreach, "maximize": maximize, "momentum_dtype": _dtype_name(momentum_dtype),
        }  # fmt: skip
        super().__init__(params, defaults)
        if model is not None:
            self.attach(model)

    def _start(self) -> None:
        self.model: nn.Module | None = None
        self.layers: dict[str, LayerFactors] = {}
        self.skipped: dict[str, int] = {}  # steps left out, by parameter
        self.grad_scale: float | Tensor = 1.0
        self._owners: dict[str, Owner] = {}
        self._group_of: dict[str, dict[str, Any]] = {}
        self._open: dict[str, tuple[Tensor, Tensor]] = {}  # fused windows: (|G|^2 so far, whether M was decayed)
        self._grad_bytes = 0

    # --- the model ---

    def attach(self, model: nn.Module) -> None:
        """Watch the layers of `model` whose weights are in the groups.

        Raises RuntimeError for DeepSpeed, FSDP1 and for `fused` with several processes, ValueError when loaded states do not fit.
        """
        self.detach()
        refuse_unsupported(model.parameters())
        if self.fused and processes() > 1:
            raise RuntimeError("fused mode keeps no gradients that several processes could average: use fused=False")
        self.model = model
        self._owners = owners(model, self.embeddings == "io", self.exclude)
        self._refresh()
        self._check_states([(p, self.state[p]) for group in self.param_groups for p in group["params"] if p in self.state])  # fmt: skip

    def detach(self) -> None:
        """Stop watching, and leave the model as it was. States are kept."""
        for layer in self.layers.values():
            layer.unwatch()
        self.layers, self.model, self._owners = {}, None, {}

    def tracked(self) -> dict[str, str]:
        """Names of the parameters with factors, and of what kind each is: linear, transposed, convolution, embedding, or fused."""
        return {name: "fused" if layer.fused else layer.kind for name, layer in self.layers.items()}

    def _refresh(self) -> None:
        """Follow the groups: they may be new objects, and have new parameters."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        sums = InputSums()
        for name, owner in self._owners.items():
            weight = owner.module._parameters.get("weight") if owner.kind else None
            if weight is None or id(weight) not in groups or "demoted" in self.state.get(weight, ()):
                if name in self.layers:
                    self.layers.pop(name).unwatch()
                continue
            self._group_of[name] = groups[id(weight)]
            if name not in self.layers:
                layer = self.layers[name] = LayerFactors(name, owner)
                if self.fused and layer.can_fuse():
                    layer.fused = functools.partial(self._absorb, layer)
                layer.watch(sums)
            self.layers[name].p = groups[id(weight)]["p"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        if self.model is None:
            return
        known = {id(p) for p in self.model.parameters()}
        if not all(id(p) in known for p in group["params"]):
            warnings.warn("parameters that are not the attached model's get AdamW's second moment", stacklevel=2)
        self._refresh()

    # --- a step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `closure` computes the loss and its gradients again; the sums are then its own only.

        Raises RuntimeError without a model, for sparse or complex gradients, for a weight with factors whose layer was not called
        (its gradient came from elsewhere), and for sharding that is not FSDP2's.
        """
        if self.model is None:
            raise RuntimeError("IOAdamW needs the model: pass model= or call attach()")
        loss = None
        if closure is not None:
            self._drop()
            with torch.enable_grad():
                loss = closure()
        updates = self._gather()
        self._demote([update for update in updates if update.layer and not update.uses and update.totals[2] > 0])
        plain: list[_Update] = []
        for update in updates:
            broken = not all(map(math.isfinite, update.totals))
            if update.layer is not None and update.layer.fused and update.parameter.grad is None:
                broken = broken or not update.uses  # none: all micro-batches were broken, and left out
            if broken:
                name = self._name(update.parameter)
                self.skipped[name] = self.skipped.get(name, 0) + 1
            elif update.layer is None:
                plain.append(update)
            else:
                self._update_layer(update, update.layer)
        for group in self.param_groups:
            self._update_plain(group, [update.parameter for update in plain if update.group is group])
        self._open.clear()
        self._drop()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._open:
            warnings.warn("fused: gradients since the last step are in the first moment and stay there", stacklevel=2)
        self._drop()

    def _drop(self) -> None:
        for name, layer in self.layers.items():
            layer.drop()
            layer.p = self._group_of[name]["p"]

    def _gather(self) -> list[_Update]:
        """What there is to do, with the sums of all processes, and the scalars fetched at once."""
        layers = {id(layer.weight): layer for layer in self.layers.values()}
        updates, grad_bytes, unused = [], 0, torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                layer = layers.get(id(p))
                norm = self._open[layer.name][0] if layer and layer.name in self._open else unused
                if p.grad is not None:
                    if p.grad.is_sparse or p.grad.is_complex():
                        raise RuntimeError(f"'{self._name(p)}': IOAdamW supports neither sparse nor complex gradients")
                    grad = local(p.grad)
                    grad_bytes += grad.nbytes
                    norm = norm.to(grad.device) + torch.linalg.vector_norm(grad, dtype=torch.float32).square()
                elif norm is unused:
                    continue
                updates.append(_Update(group, p, layer, layer.sums if layer else None, norm))
        if not self.state:
            refuse_unsupported(update.parameter for update in updates)
        self._grad_bytes = grad_bytes
        for update in updates:
            if update.layer is not None and update.sums is None:
                update.sums = torch.zeros_like(update.layer.probe, device=update.norm.device, requires_grad=False)
        if processes() > 1:
            self._sum_over_processes(updates)
        scalars = []
        for update in updates:
            if update.layer is not None and update.sums is not None:
                s, r, uses = update.sums.split([update.layer.inputs, update.layer.outputs, 1])
                scalars += [s.sum(), r.sum(), uses[0], update.norm]
            else:
                scalars += [unused, unused, unused, update.norm]
        if scalars:
            device = updates[0].norm.device
            values = torch.stack([scalar.to(device) for scalar in scalars]).view(-1, 4).tolist()
            for update, (total_s, total_r, uses_now, norm_now) in zip(updates, values, strict=True):
                update.totals, update.uses = (total_s, total_r, norm_now), uses_now
        return updates

    def _sum_over_processes(self, updates: list[_Update]) -> None:
        """All sums, and the squared norms of sharded gradients, in one all-reduce."""
        if self.fused:
            raise RuntimeError("fused mode keeps no gradients that several processes could average: use fused=False")
        sharded = [update for update in updates if isinstance(update.parameter, DTensor)]
        parts = [update.sums for update in updates if update.sums is not None]
        norms = [update.norm / copies(update.parameter) for update in sharded]
        if not parts and not norms:
            return
        flat = torch.cat([part.view(-1) for part in (*parts, *norms)])
        dist.all_reduce(flat)
        found = list(flat.split([part.numel() for part in (*parts, *norms)]))
        for update in updates:
            if update.sums is not None:
                update.sums = found.pop(0)
        for update in sharded:
            update.norm = found.pop(0)[0]

    def _demote(self, updates: list[_Update]) -> None:
        """To AdamW, where a gradient came but its layer was not called."""
        if not updates:
            return
        names = [self._name(update.parameter) for update in updates]
        for update, name in zip(updates, names, strict=True):
            if self.state.get(update.parameter):
                raise RuntimeError(
                    f"'{name}' has a gradient, but its layer was not called since the last step, as it was before: "
                    "exclude it (exclude=), or use the layer always or never"
                )
        message = f"used without calling their layer, so AdamW's second moment is kept for: {', '.join(names)}"
        if self.on_untracked == "error":
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=3)
        for update, name in zip(updates, names, strict=True):
            update.layer, update.sums = None, None
            self.state[update.parameter]["demoted"] = True
            self.layers.pop(name).unwatch()

    def _update_layer(self, update: _Update, layer: LayerFactors) -> None:
        group, p = update.group, update.parameter
        state = self._layer_state(p, group, layer)
        beta1, beta2 = group["betas"]
        sums, totals = update.sums, update.totals
        assert sums is not None
        sums = sums[:-1]
        if group["scale"] == "paper":
            # the gradient is the processes' mean, of an unscaled loss
            unit = (processes() * float(self.grad_scale)) ** -layer.q
            sums = torch.cat([sums[: layer.inputs], sums[layer.inputs :] * unit])
        state["step"] += 1
        step = int(state["step"].item())
        add_sums(state["in_sq"], state["out_sq"], sums, totals, beta2, step % group["buffer"], group["scale"])
        outputs, inputs = second_moment(state["in_sq"], state["out_sq"], step, beta2, group["p"], group["scale"])
        left, right = (inputs, outputs) if layer.rows_are_inputs else (outputs, inputs)
        weight, momentum = local(p.detach()), local(state["exp_avg"])
        left = left[:, local_rows(p)]
        if p.grad is not None:
            gradient = local(p.grad).to(momentum.dtype)
            gradient = -gradient if group["maximize"] else gradient
            if layer.fused:  # what came from outside the layer; the rest is there already
                momentum.add_(gradient, alpha=1 - beta1)
            else:
                momentum.lerp_(gradient, 1 - beta1)
        if group["weight_decay"] != 0:
            weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
        blocks = self._blocks(weight)
        size = 1 / (1 - beta1**step)
        if group["rms_clip"] is not None:
            squares = weight.new_zeros((), dtype=torch.float32)
            for rows in blocks:
                divisor = denominator(left[:, rows], right, group["eps"]).view(weight[rows].shape)
                squares += (momentum[rows] / divisor).square().sum()
            if isinstance(p, DTensor):
                squares /= copies(p)
                dist.all_reduce(squares)
            size /= max(1.0, size * math.sqrt(squares.item() / p.numel()) / group["rms_clip"])
        for rows in blocks:
            divisor = denominator(left[:, rows], right, group["eps"]).view(weight[rows].shape)
            if weight.dtype == momentum.dtype == torch.float32:
                weight[rows].addcdiv_(momentum[rows], divisor, value=-float(group["lr"]) * size)
            else:  # rounded once, at the end
                weight[rows].add_(momentum[rows] / divisor, alpha=-float(group["lr"]) * size)

    def _update_plain(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """AdamW, by torch's own function."""
        if not parameters:
            return
        for p in parameters:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # In blocks of rows, as for layers: each number is computed as in the whole, and temporary memory stays small.
        weights, grads, first, second, steps = [], [], [], [], []
        for p in parameters:
            state = self.state[p]
            assert p.grad is not None
            weight = local(p.detach())
            for rows in self._blocks(weight) if weight.dim() else [...]:
                weights.append(weight[rows])
                grads.append(local(p.grad)[rows])
                first.append(local(state["exp_avg"])[rows])
                second.append(local(state["exp_avg_sq"])[rows])
                steps.append(state["step"].clone())
            state["step"] += 1
        adamw(
            weights, grads, first, second, [], steps,
            foreach=group["foreach"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip

    def _layer_state(self, p: Tensor, group: dict[str, Any], layer: LayerFactors) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            dtype = getattr(torch, group["momentum_dtype"]) if group["momentum_dtype"] else p.dtype
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            state["in_sq"] = torch.zeros(group["buffer"], layer.inputs, device=p.device)
            state["out_sq"] = torch.zeros(group["buffer"], layer.outputs, device=p.device)
        elif len(state["in_sq"]) != group["buffer"]:
            raise ValueError(
                f"'{layer.name}': buffer is {group['buffer']} now, but it was {len(state['in_sq'])}; it cannot change"
            )
        return state

    def _blocks(self, weight: Tensor) -> list[slice]:
        """Rows that fit in the workspace together, and on a CPU in its cache."""
        size = min(self.workspace_mb, CACHE_MB) if weight.device.type == "cpu" else self.workspace_mb
        rows = max(1, int(size * 2**20) // (4 * max(1, weight[:1].numel())))
        return [slice(start, start + rows) for start in range(0, len(weight), rows)]

    # --- fused mode ---

    @torch.no_grad()
    def _absorb(self, layer: LayerFactors, x: Tensor, d: Tensor) -> Tensor:
        """Add (1 - beta1) D^T X to the first moment; returns what to add to the sums. Nothing, where it is not finite.

        x: (T, n). d: (T, m). No value is fetched from the device.
        """
        group, weight = self._group_of[layer.name], layer.weight
        momentum = self._layer_state(weight, group, layer)["exp_avg"]
        sums = torch.cat([layer.input_sums(x), layer.output_sums(d), torch.ones(1, device=x.device)])
        # then D^T X and |D^T X|^2 are finite too, by Cauchy-Schwarz
        finite = torch.isfinite(sums[: layer.inputs].sum() * sums[layer.inputs :].sum())
        zero = torch.zeros((), device=x.device)
        energy, decayed = self._open.get(layer.name, (zero, torch.zeros_like(finite)))
        keep = torch.where(finite & ~decayed, group["betas"][0], 1.0).to(momentum.dtype)
        change = (1 - group["betas"][0]) * (-1 if group["maximize"] else 1)
        left, right = (x, d) if layer.rows_are_inputs else (d, x)
        for rows in self._blocks(weight):
            block = (left[:, rows].T @ right).masked_fill_(~finite, 0.0)
            energy = energy + torch.linalg.vector_norm(block, dtype=torch.float32).square()
            momentum[rows].mul_(keep).add_(block, alpha=change)
        self._open[layer.name] = (energy, decayed | finite)
        return torch.where(finite, sums, 0.0)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # a GradScaler asks this before its step
        if self.fused:
            raise RuntimeError("fused mode cannot undo a GradScaler's scale: use bfloat16, or fused=False")
        return False

    # --- saving and loading ---

    def state_dict(self) -> dict[str, Any]:
        """As any optimiser's. Raises RuntimeError between a fused backward pass and its step, where M is half made."""
        if self._open:
            raise RuntimeError("fused: save the state after step(), not between a backward pass and its step")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], from_adamw: bool = False) -> None:
        """Load what `state_dict` returned, or an AdamW's (`from_adamw`): its first moments, and factors with the row and column
        sums of its second moments.

        Raises ValueError when other parameters have factors than when it was saved.
        """
        pairs = _pairs(self.param_groups, state_dict)
        if from_adamw:
            state_dict = self._converted(state_dict, pairs)
            pairs = _pairs(self.param_groups, state_dict)
        elif self.model is not None:
            self._check_states(pairs)
        super().load_state_dict(state_dict)
        for p, saved in pairs:
            for key in ("exp_avg", "in_sq", "out_sq"):  # torch has cast them to the parameter's type
                if key in saved and self.state[p][key].dtype != saved[key].dtype:
                    self.state[p][key] = saved[key].to(p.device)
        self._refresh()

    def _check_states(self, pairs: list[tuple[Tensor, dict[str, Any]]]) -> None:
        layers = {id(layer.weight) for layer in self.layers.values()}
        changed = [
            self._name(p) for p, saved in pairs
            if saved and "demoted" not in saved and ("in_sq" in saved) != (id(p) in layers)
        ]  # fmt: skip
        if changed:
            raise ValueError(
                f"the saved state has other parameters with factors; they differ in: {', '.join(changed)}. "
                "Use the model, embeddings and exclude of the saved run, or from_adamw=True for a state of AdamW"
            )

    def _converted(self, saved: dict[str, Any], pairs: list[tuple[Tensor, dict[str, Any]]]) -> dict[str, Any]:
        layers = {id(layer.weight): layer for layer in self.layers.values()}
        of = {id(p): group for group in self.param_groups for p in group["params"]}
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        states: dict[int, Any] = {}
        by_parameter = {id(p): state for p, state in pairs}
        for index, p in zip(indices, (p for group in self.param_groups for p in group["params"]), strict=True):
            state = by_parameter.get(id(p))
            if not state:
                continue
            states[index] = {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
            if (layer := layers.get(id(p))) is not None:
                group, step = of[id(p)], int(state["step"])
                matrix = states[index].pop("exp_avg_sq").float().flatten(1)
                inputs, outputs = from_second_moment(matrix.T if layer.rows_are_inputs else matrix, group["p"])
                for key, row in (("in_sq", inputs), ("out_sq", outputs)):
                    states[index][key] = row.new_zeros(group["buffer"], len(row))
                    states[index][key][step % group["buffer"]] = row
        shared = ("lr", "initial_lr", "betas", "eps", "weight_decay", "maximize", "params")
        groups = [
            {**{k: v for k, v in own.items() if k != "params"}, **{k: group[k] for k in shared if k in group}}
            for own, group in zip(self.param_groups, saved["param_groups"], strict=True)
        ]
        return {"state": states, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("fused", "embeddings", "exclude", "on_untracked", "workspace_mb")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "layers" not in self.__dict__:  # unpickled or copied: the model is another one
            self._start()

    # --- memory ---

    def memory_report(self) -> dict[str, dict[str, int]]:
        """{"formula": ..., "measured": ..., "adamw": ...}: bytes of "weights", "grads", "states" (moments and counters), "buffers"
        (C and R) and their "total". Measured gradients are those of the last step; "adamw" is AdamW by formula."""
        layers = {id(layer.weight): layer for layer in self.layers.values()}
        parameters = [(p, group, layers.get(id(p))) for group in self.param_groups for p in group["params"]]
        measured = {"weights": 0, "grads": self._grad_bytes, "states": 0, "buffers": 0}
        for p, _, _ in parameters:
            measured["weights"] += local(p).nbytes
            for key, value in self.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    measured["buffers" if key in ("in_sq", "out_sq") else "states"] += local(value).nbytes
        formula = []
        for p, group, layer in parameters:
            factors = (layer.inputs + layer.outputs) * group["buffer"] if layer else None
            formula.append(parameter_bytes(p, factors, bool(layer and layer.fused), group["momentum_dtype"]))
        return {
            "formula": total_bytes(formula),
            "measured": {**measured, "total": sum(measured.values())},
            "adamw": total_bytes([parameter_bytes(p) for p, _, _ in parameters]),
        }

    def run_callbacks(self, directory: Path) -> list[TrainerCallback]:
        """What `acclimate tune` adds to a run."""
        return [IOAdamCallback(directory)]

    def _name(self, p: Tensor) -> str:
        return next((name for name, q in self.model.named_parameters() if q is p), "?") if self.model else "?"


def _check(group: dict[str, Any]) -> None:
    checks = {
        "lr": group["lr"] >= 0, "eps": group["eps"] >= 0, "weight_decay": group["weight_decay"] >= 0,
        "betas": len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]),
        "buffer": isinstance(group["buffer"], int) and group["buffer"] >= 1, "p": group["p"] > 1,
        "scale": group["scale"] in get_args(Scale), "rms_clip": group["rms_clip"] is None or group["rms_clip"] > 0,
    }  # fmt: skip
    for name, holds in checks.items():
        if not holds:
            raise ValueError(f"{name} is out of range: {group[name]!r}")


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    """A name, because groups are saved."""
    if dtype is None:
        return None
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(dtype), str(dtype).removeprefix("torch."))
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"momentum_dtype is bfloat16, float16 or float32; got {dtype!r}")
    return name


def _pairs(groups: list[dict[str, Any]], saved: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """Each parameter with its saved state; torch checks that the groups fit."""
    parameters = [p for group in groups for p in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return [
        (p, saved["state"][index]) for p, index in zip(parameters, indices, strict=False) if index in saved["state"]
    ]


# --- transformers' Trainer ---


class IOAdamFactory:
    """`Trainer(optimizer_cls_and_kwargs=(IOAdamFactory, {"lr": 1e-3, ...}))`: Trainer's split into decayed and other parameters."""

    def __call__(self, model: nn.Module, **settings: Any) -> IOAdamW:
        return IOAdamW(decay_groups(model), model=model, **settings)


class IOAdamCallback(TrainerCallback):
    """Refuses what cannot work before the first step, and writes the memory account to `directory`/optimizer.json (None: nowhere).

    Raises InputError for `fused` with gradient clipping, and for DeepSpeed.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.optimizer: IOAdamW | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = kwargs.get("optimizer")
        found = getattr(found, "optimizer", found)  # Accelerate wraps it
        if getattr(args, "deepspeed", None):
            raise InputError("optimizer io-adam does not run under DeepSpeed: use DDP or FSDP2")
        if not isinstance(found, IOAdamW):
            return
        if found.fused and args.max_grad_norm and args.max_grad_norm > 0:
            raise InputError(
                "optimizer io-adam with fused has no gradients to clip: set train.max_grad_norm to 0 "
                "(optimizer_args.rms_clip bounds the step instead), or fused to false"
            )
        self.optimizer = found

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.optimizer is not None and (state.global_step == 1 or state.global_step >= state.max_steps):
            self._write(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.optimizer is not None:
            self._write(state)

    def _write(self, state: Any) -> None:
        if self.directory is None or not state.is_world_process_zero or self.optimizer is None:
            return
        report, kinds = self.optimizer.memory_report(), list(self.optimizer.tracked().values())
        rows = [[name, *(f"{report[column][name] / 1e6:,.2f}" for column in ("measured", "formula", "adamw"))] for name in report["measured"]]  # fmt: skip
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"
        notes = [f"Weights with factors in place of a second moment: {counts}. All others are AdamW's."]
        if self.optimizer.skipped:
            notes.append(f"Steps left out because they were not finite: {sum(self.optimizer.skipped.values())}.")
        runs.write_json(
            self.directory / "optimizer.json",
            {
                "title": "IO-Adam: second moments in factors",
                "notes": notes,
                "tables": [
                    {"title": "Memory of the trained parameters, MB", "columns": ["", "measured", "by formula", "AdamW by formula"], "rows": rows}
                ],
                "plots": [],
            },
        )  # fmt: skip
