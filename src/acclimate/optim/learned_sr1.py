"""Solve the same kind of problem again and again in fewer iterations: a quasi-Newton optimiser whose estimate of the inverse Hessian is learned.

Of a problem with d unknowns it keeps gamma > 0 and at most L vectors v_i. With p = x_k - x_{k-1}, q = g_k - g_{k-1}:

    B = gamma I + sum_i v_i v_i^T                                  positive definite, and never formed: B y costs 2 L d
    gamma <- min(gamma, p.q / 2 q.q)                               where p.q > 0; the first such pair sets it
    u = p - B q (oldest v dropped), v_s = u / sqrt(u.q)            then (B + v_s v_s^T) q = p: the secant relation
    v = sigmoid(mean_i a_i + 2) v_s + 0.3 b |v_s| / sqrt(d)        a, b, e: what a small network says of each coordinate, from
    h^2 = min(exp(e / 2), 10)                                      p, q, g, B q, u, x - x_0, all made free of scale
    x <- x - lr h * B (h * g)                                      so -d.g >= gamma min(h^2) |g|^2: always a direction of descent

The network acts on one coordinate at a time, so the same 6,947 weights serve any d, and a problem's steps do not depend on the others of its batch.
It is trained by unrolling (`meta_training`). The first step has
gamma = first_step / |g|. `policy="sr1"` is the form without a network:
v = v_s, h = 1.

Scale: on DDP all ranks see the same gradient and take the same step. Of parameters that FSDP2 or tensor parallelism has sharded, vectors and network
stay with the shards; a step adds up 2 L + 8 numbers in six all-reduces. A step costs 14,000 flops a coordinate, so this is not for large networks.

Source: "L-SR1: Learned Symmetric-Rank-One Preconditioning", arXiv 2508.12270 (ICML 2026). The symmetric scaling h, starting from the exact secant vector, the
running minimum of gamma, the limit of two (the paper has none) and a network without BatchNorm and dropout are our choices.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from acclimate.optim.sharding import check_not_flattened, local
from acclimate.optim.sr1_policy import COUNTS, LSR1Policy, Memory, Total, alone, direction, dot

Guard = Literal["none", "norm", "armijo"]
OnNaN = Literal["raise", "reset"]

LARGE = 1_000_000  # unknowns above which a step is slow
HALVINGS = 5


class LSR1(torch.optim.Optimizer):
    """Quasi-Newton optimiser with learned rank-one vectors, for problems whose gradient is exact (full batch).

    >>> x = nn.Parameter(torch.tensor([[-1.2, 1.0], [0.5, 2.0]]))  # two problems
    >>> optimizer = LSR1([x], batch_dim=0)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     (100 * (x[:, 1] - x[:, 0] ** 2) ** 2 + (1 - x[:, 0]) ** 2).sum().backward()
    ...     optimizer.step()

    Parameters
    ----------
    params
        Parameters or groups; the trained parameters of a group are one vector of unknowns. `lr`, `first_step`, `weight_decay` may differ
        between groups. Frozen ones are left out, and ones without a gradient in a step stay where they are.
    policy
        "generic", "pose", "sr1" (no network), a directory, or an LSR1Policy.
    lr
        1.0 takes the step as it is.
    buffer
        Most vectors that are kept.
    first_step
        Length of the first step, in the unknowns' units.
    guard
        "norm": a step is at most twice the longer of the one before and `first_step`. "armijo": it is also halved, up to five times,
        until the loss falls enough; then -gamma g is taken. It needs a closure, which returns one loss (or one per problem).
    per_tensor
        Every parameter is a problem of its own.
    batch_dim
        0: the first axis of all parameters counts independent problems.
    weight_decay
        Decoupled, as AdamW's. A penalty in the loss is usually what is meant with a quasi-Newton method.
    on_nan
        Loss or gradient not finite: "raise" leaves everything as it was; "reset" goes back to the last finite point, forgets the vectors and
        takes -gamma g with half of gamma.
    compile
        True, or the name of a backend: steps run through `torch.compile` (seconds, once in a process for most numbers of unknowns). By rounding, a
        problem's steps may then depend on the others of its batch.

    Sharded parameters: all of a group in the same way; a state dict holds the shards of this process, and a closure's losses are averaged over the
    processes.

    Raises
    ------
    ValueError
        Options out of range, an unknown policy, no unknowns. TypeError: complex or integer parameters, sparse or no gradients.
        FloatingPointError: a loss or gradient that is not finite. RuntimeError: a changed shape; parameters of a
        group that are sharded in different ways, or with `batch_dim`, or flattened (FSDP1, DeepSpeed).
    """

    def __init__(
        self,
        params: Iterable[Any],
        policy: str | Path | LSR1Policy = "generic",
        lr: float = 1.0,
        buffer: int = 4,
        first_step: float = 0.5,
        guard: Guard = "norm",
        per_tensor: bool = False,
        batch_dim: int | None = None,
        weight_decay: float = 0.0,
        on_nan: OnNaN = "raise",
        allow_policy_mismatch: bool = False,
        compile: bool | str = False,
    ) -> None:
        if buffer < 1 or not lr > 0 or not first_step > 0 or weight_decay < 0:
            raise ValueError(
                f"buffer must be at least 1, lr and first_step positive, weight_decay not negative; got {buffer}, {lr}, {first_step}, {weight_decay}"
            )
        if guard not in get_args(Guard) or on_nan not in get_args(OnNaN) or batch_dim not in (None, 0):
            raise ValueError(
                f"guard is none, norm or armijo, on_nan raise or reset, batch_dim None or 0; got {guard}, {on_nan}, {batch_dim}"
            )
        super().__init__(params, {"lr": lr, "first_step": first_step, "weight_decay": weight_decay})
        self.buffer, self.guard, self.per_tensor, self.batch_dim, self.on_nan = (
            buffer, guard, per_tensor, batch_dim, on_nan,
        )  # fmt: skip
        self.allow_policy_mismatch = allow_policy_mismatch
        self._direction = compiled("inductor" if compile is True else compile) if compile else direction
        self.policy: LSR1Policy | None = None
        if policy != "sr1":
            self.policy = policy if isinstance(policy, LSR1Policy) else LSR1Policy.from_pretrained(policy)
        self._digest = self.policy.digest if self.policy else "sr1"
        self._policies: dict[Any, LSR1Policy] = {}
        self._counts = dict.fromkeys(("steps", "evaluations", "halvings", "fallbacks", "resets"), 0)
        self.memories: dict[str, Memory] = {}
        for number, group in enumerate(self.param_groups):
            self._check(number, group)

    def reset(self) -> None:
        """Forget everything: the next step starts new problems."""
        self.memories = {}

    @property
    def stats(self) -> dict[str, int]:
        """How often what happened, over all steps and problems since the last reset."""
        sums = dict.fromkeys(COUNTS, 0)
        for memory in self.memories.values():
            for name, count in zip(COUNTS, memory.counts.sum(0).tolist(), strict=True):
                sums[name] += count
        return {**self._counts, **sums}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` evaluates the loss and its gradient, and its loss is returned."""
        loss = None
        if closure is not None:
            loss = self._evaluate(closure)
        elif self.guard == "armijo":
            raise ValueError("guard='armijo' needs step(closure), where closure evaluates the loss and its gradient")
        losses = None if loss is None else self._losses(loss)
        work = [found for problem in self._problems() if (found := self._gathered(*problem, losses))]
        if not work:
            names = [
                _name(group, n, i) for n, group in enumerate(self.param_groups) for i in range(len(group["params"]))
            ]
            raise TypeError(f"no parameter has a gradient: {', '.join(names[:5])}. Call backward() before step()")
        for move in work:
            move.find(self._direction, self._policy_for(move.x), self.guard != "none")
        for move in work:
            self.memories[move.key] = move.memory
            move.apply(move.d)
        self._counts["steps"] += 1
        if self.guard == "armijo":
            self._search(work, losses, closure)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._counts["evaluations"] += 1
        with torch.enable_grad():
            return closure()

    def _losses(self, loss: Any) -> Tensor:
        """What the closure returned, as a vector; with sharded parameters the mean over the processes, so that all decide alike."""
        losses = torch.as_tensor(loss).detach().reshape(-1)
        for _, _, params in self._problems():
            losses = losses.to(params[0].device)
            if shards := Shards.of(params[0]):
                (sums,) = shards(losses)
                return sums / math.prod(group.size() for group in shards.groups)
        return losses

    def _search(self, work: list[_Move], losses: Any, closure: Any) -> None:
        """Halve the steps until the loss has fallen enough. One loss for all problems, or one for each."""
        rows = len(losses)
        if rows != 1 and any(len(move.x) != rows for move in work):
            raise ValueError(f"the closure returned {rows} losses: guard='armijo' needs one, or one for each problem")
        slope = sum(move.group["lr"] * move.total(dot(move.d, move.g))[0].view(rows, -1).sum(1) for move in work)
        share = torch.ones_like(slope)
        for attempt in range(HALVINGS + 1):
            trial = self._losses(self._evaluate(closure))
            short = ~(trial <= losses + 1e-4 * share * slope)
            if not short.any():
                return
            last = attempt == HALVINGS
            share = torch.where(short, share / 2, share)
            self._counts["fallbacks" if last else "halvings"] += int(short.sum())
            for move in work:
                factor, failed = share[:, None], short[:, None]
                d = (
                    torch.where(failed, -move.memory.gamma[:, None] * move.g, factor * move.d)
                    if last
                    else factor * move.d
                )
                move.apply(d)

    def _problems(self) -> Iterator[tuple[str, dict[str, Any], list[Tensor]]]:
        for number, group in enumerate(self.param_groups):
            trained = [p for p in group["params"] if p.requires_grad]
            if self.per_tensor:
                yield from ((f"{number}.{place}", group, [p]) for place, p in enumerate(trained))
            elif trained:
                yield str(number), group, trained

    def _gathered(self, key: str, group: dict[str, Any], params: list[Tensor], losses: Tensor | None) -> _Move | None:
        """The problem as vectors; None where it has no gradient."""
        if all(p.grad is None for p in params):
            return None
        if any(p.grad is not None and p.grad.is_sparse for p in params):
            sparse = [_name(group, key, i) for i, p in enumerate(params) if p.grad is not None and p.grad.is_sparse]
            raise TypeError(f"sparse gradients cannot be used: {', '.join(sparse)}")
        rows = 1 if self.batch_dim is None else len(params[0])
        x = _flat([local(p) for p in params], rows)
        g = _flat([torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in params], rows)
        shards = Shards.of(params[0])
        memory = self.memories.get(key)
        if memory is None:
            memory = Memory.of(x, self.buffer)
        elif memory.x.shape != x.shape:
            raise RuntimeError(
                f"the unknowns of group {key} had the shape {tuple(memory.x.shape)} and now have {tuple(x.shape)}: call reset() for a new problem"
            )
        bad = ~g.isfinite().all(1)
        if losses is not None:
            bad |= ~(losses.isfinite() if len(losses) == rows else losses.isfinite().all()).to(bad.device)
        if shards:
            bad = shards(bad.to(x))[0] > 0
        if bad.any():
            if self.on_nan == "raise" or not bool(memory.started[bad].all()):
                raise FloatingPointError(
                    f"loss or gradient of group {key} is not finite in {int(bad.sum())} of {rows} problems; nothing was changed"
                )
            self._counts["resets"] += int(bad.sum())
            x, g = torch.where(bad[:, None], memory.x, x), torch.where(bad[:, None], memory.g, g)
            memory = dataclasses.replace(
                memory,
                vectors=memory.vectors.masked_fill(bad[:, None, None], 0),
                gamma=torch.where(bad, memory.gamma / 2, memory.gamma),
            )
        return _Move(
            key, group, params, x, g, memory, shards or alone, sum(p.numel() for p in params) if shards else None
        )

    def _policy_for(self, x: Tensor) -> LSR1Policy | None:
        """The policy on x's device and in its precision."""
        if self.policy is None:
            return None
        where = (x.device, x.dtype)
        if where not in self._policies:
            self._policies[where] = copy.deepcopy(self.policy).to(device=x.device, dtype=x.dtype).eval()
        return self._policies[where]

    def _check(self, number: int, group: dict[str, Any]) -> None:
        params = group["params"]
        wrong = [_name(group, number, i) for i, p in enumerate(params) if not p.is_floating_point()]
        if wrong:
            raise TypeError(f"parameters must be real floating-point numbers: {', '.join(wrong)}")
        for i, p in enumerate(params):
            check_not_flattened(_name(group, number, i), p)
        for _, _, problem in (entry for entry in self._problems() if entry[1] is group):
            ways = {Shards.of(p) for p in problem}
            if len(ways) > 1:
                raise RuntimeError(
                    f"parameters of group {number} are sharded in different ways, or some are not: give each kind a group of its own, or use per_tensor=True"
                )
            if self.batch_dim is not None and ways != {None}:
                raise RuntimeError(
                    "batch_dim=0 is for whole parameters, and these are sharded: give every process problems of its own"
                )
            sizes = {p.shape[0] if p.ndim else 0 for p in problem} if self.batch_dim == 0 else {1}
            if len(sizes) > 1:
                raise ValueError(f"with batch_dim=0 the parameters of a group have one first axis; got {sorted(sizes)}")
            d = sum(p.numel() for p in problem) / max(1, sizes.pop())
            if d == 0:
                raise ValueError(
                    f"group {number} has no unknowns: {', '.join(_name(group, number, i) for i in range(len(params)))}"
                )
            if d > LARGE and self.policy is not None:
                warnings.warn(
                    f"a step on {d:,.0f} unknowns costs {d * 14e3 / 1e9:.0f} Gflop: L-SR1 is meant for small problems",
                    stacklevel=3,
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "policy") and hasattr(self, "memories"):
            self._check(len(self.param_groups) - 1, self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Also "memories" (float32 whatever the parameters are), "counts", and the "policy" they belong to."""
        memories = {
            key: {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
            for key, memory in self.memories.items()
        }
        return {**super().state_dict(), "memories": memories, "counts": dict(self._counts), "policy": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on bit for bit. ValueError: saved with another policy, unless `allow_policy_mismatch`."""
        if state_dict["policy"] != self._digest and not self.allow_policy_mismatch:
            raise ValueError(
                f"the state was saved with another policy ({state_dict['policy']}, this one is {self._digest}): load that policy, "
                "or pass allow_policy_mismatch=True"
            )
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._counts = dict(state_dict["counts"])
        devices = {key: params[0].device for key, _, params in self._problems()}
        self.memories = {
            key: Memory(**{name: value.to(devices[key], copy=True) for name, value in memory.items()})
            for key, memory in state_dict["memories"].items()
        }


@dataclass
class _Move:
    """A problem in one step."""

    key: str
    group: dict[str, Any]
    params: list[Tensor]
    x: Tensor
    g: Tensor
    memory: Memory
    total: Total
    unknowns: int | None  # of all shards

    def find(self, rule: Callable[..., Any], policy: LSR1Policy | None, guard: bool) -> None:
        self.d, self.memory, _ = rule(
            policy, self.memory, self.x, self.g, self.group["first_step"], guard, residual=False, unknowns=self.unknowns, total=self.total,
        )  # fmt: skip
        self.with_gradient = [p.grad is not None for p in self.params]

    def apply(self, d: Tensor) -> None:
        """Put x + lr d into the parameters that had a gradient."""
        group = self.group
        x = self.x
        if group["weight_decay"]:
            x = (1 - group["lr"] * group["weight_decay"]) * x
        x = x + group["lr"] * d
        shards = [local(p) for p in self.params]
        pieces = x.split([p.numel() // len(x) for p in shards], dim=1)
        for p, piece, moves in zip(shards, pieces, self.with_gradient, strict=True):
            if moves:
                p.copy_(piece.reshape(p.shape))


@dataclass(frozen=True)
class Shards:
    """The processes that have parts of the same parameter; called with sums over the own part, it gives those over all."""

    groups: tuple[Any, ...]  # one for each axis of the mesh that shards

    @classmethod
    def of(cls, p: Tensor) -> Shards | None:
        """None where this process has the whole parameter. RuntimeError: it has a summand of it."""
        if not isinstance(p, DTensor):
            return None
        if any(placement.is_partial() for placement in p.placements):
            raise RuntimeError(f"parameters may be sharded or replicated, not {p.placements}")
        axes = [axis for axis, placement in enumerate(p.placements) if not placement.is_replicate()]
        return cls(tuple(p.device_mesh.get_group(axis) for axis in axes)) if axes else None

    def __call__(self, *sums: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([part.reshape(-1) for part in sums])
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        parts = flat.split([part.numel() for part in sums])
        return tuple(part.view_as(own) for part, own in zip(parts, sums, strict=True))


@functools.cache
def compiled(backend: str) -> Callable[..., Any]:
    """`direction` through `torch.compile`, for any number of unknowns."""
    return torch.compile(direction, backend=backend, dynamic=True)


def _flat(tensors: list[Tensor], rows: int) -> Tensor:
    """(rows, d), in float32 or float64."""
    flat = torch.cat([t.reshape(rows, -1) for t in tensors], dim=1)
    return flat if flat.dtype == torch.float64 else flat.float()


def _name(group: dict[str, Any], number: Any, place: int) -> str:
    names = group.get("param_names")
    return names[place] if names else f"parameter {place} of group {number}"
