"""Fine-tune with forward passes only, in the memory of inference, along low-rank directions that the loss itself has shown to be good.

Trained matrices W_l (m_l x n_l); F is the loss of a mini-batch, one number. In a period, each matrix has `rank` basis columns b_j on one
side; column j of all matrices together is one candidate direction. A step takes the next column, draws the other side, u_l ~ N(0, I), and with
Z_l = u_l b_lj^T (or its mirror image)

    c = (F(W + eps Z) - F(W - eps Z)) / (2 eps)          W_l <- W_l (1 - lr wd) - lr c Z_l

For a linear F, E[c^2] = sum_l ||G_l b_lj||^2: the mean of c^2 is the gradient energy that a direction captures, and is known without a
gradient. E[c u] = G b points where the gradient does on the other side. So at the end of a period

    e_j = mean c^2 of column j,    e_rand = mean c^2 of all random directions of this period (new columns, and `probes` fresh ones)

columns that were kept before stay if e_j >= threshold * e_rand, new ones always; the means of c u of those that stay, orthonormalised,
become the basis of the other side (a step of block power iteration), and the other columns are drawn anew. With LOZO's fixed random
directions the alignment a = E[c^2] / ||G||^2 is 1; here it grows, and min_t ||G_t||^2 <= 2 (F_0 - F*) / (lr a T) + O(eps^2).

In `mode="hook"` the weights are not touched within a period: layers add the low-rank change to their output, so perturbing is exact and
16-bit weights lose nothing. It is folded in (16-bit weights by stochastic rounding) at the end of a period, or by `fold()`.

Scale: DDP all-reduces two numbers a step; randomness is drawn on the CPU from (seed, step), so all ranks agree. With sharded parameters
(FSDP2, tensor parallelism) every rank holds u and b in full, they are thin, and folds its part. FSDP1 and DeepSpeed are refused.

Source: "LOZO+: Provably Efficient Zeroth-Order Fine-Tuning via Greedy Low-Rank Subspace Selection" (ICML 2026); its listing was not available, so
the mechanism above is derived from its abstract. Baselines: LOZO, arXiv 2410.07698 (`algo="lozo"`), MeZO, arXiv 2305.17333 (`algo="mezo"`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from acclimate.optim.groups import decay_groups
from acclimate.optim.perturbation import Matrix, Noisy, generator_of
from acclimate.optim.perturbed_parameters import in_blocks, sort_parameters
from acclimate.optim.sharding import processes
from acclimate.prefix import evaluation_mode

Algo = Literal["lozo+", "lozo", "mezo"]
Mode = Literal["hook", "inplace"]
Closure = Callable[[], Any]

PATIENCE = 20  # losses in a row that are not finite, or do not change
CHECK_EVERY = 100  # steps after which ranks compare what they have done
_DIRECTION, _BASIS, _NOISE, _ROUNDING = range(4)  # what random numbers are for


# --- the mathematics ---


def probe_steps(period: int, probes: int) -> set[int]:
    """The steps of a period, spread evenly, that try a fresh random direction."""
    return {int((i + 0.5) * period / probes) for i in range(probes)}


def survivors(energies: Sequence[float], selected: Sequence[bool], random: float, threshold: float) -> list[int]:
    """The columns that are promoted, best first: new ones, and those whose energy (a mean of c^2) is `threshold` times that of random
    directions. Columns that were not tried (their energy is not a number) are left out."""
    tried = [j for j, energy in enumerate(energies) if not math.isnan(energy)]
    kept = [j for j in tried if not selected[j] or energies[j] >= threshold * random]
    return sorted(kept, key=lambda j: -energies[j])


def promoted(sums: Tensor, order: Sequence[int]) -> Tensor:
    """(m, k): orthonormal columns, times sqrt(m), that span the sums of c u (m, r) of the columns in `order`."""
    Q = torch.linalg.qr(sums[:, list(order)]).Q
    return Q * len(sums) ** 0.5


def carried_over(momentum: Tensor, old: Tensor, new: Tensor, flipped: bool) -> Tensor:
    """Momentum (., r) of the free factor over the basis `old`, as that of the basis `new`: the matrix they stand for, projected.

    `flipped`: the new basis is on the side where the free factor was, so the product N B^T is seen from the other side.
    """
    if flipped:
        return old @ (momentum.T @ new) / len(new)
    return momentum @ (old.T @ new) / len(new)


# --- the optimiser ---


class LOZOPlus(torch.optim.Optimizer):
    """Zeroth-order optimiser: `step(closure)` calls the closure, a forward pass that returns the loss, twice and never needs a gradient.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> optimizer = LOZOPlus(model.parameters(), lr=1e-2, model=model, rank=2, period=20)
    >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
    >>> loss = optimizer.step(lambda: nn.functional.mse_loss(model(x), y))
    >>> optimizer.fold()  # until then the layers add what was found to their outputs

    Parameters
    ----------
    params
        Parameters or groups; `lr`, `eps`, `beta`, `weight_decay` may differ between groups and change between steps. What is trained of them:
        matrices, less embeddings and the output head.
    lr
        Much lower than a first-order one, since Z is not normalised: `suggest_lr` measures one. 1e-7 to 1e-6 above 350M parameters.
    model
        Whose linear layers are perturbed through their outputs; without it all is done in place.
    eps
        Half the distance of the two points.
    rank, period, threshold, probes
        Columns of a basis (less where a matrix is smaller), steps that it lasts, what a kept column must be worth, random directions tried a period.
    beta
        Momentum of the free factors; it moves to a new basis by projection.
    algo
        "lozo+"; "lozo": all columns of a random basis at once, drawn anew each period; "mezo": Gaussian noise of full size.
    mode
        "hook" or "inplace" (float32 only, unless `allow_drift`).
    blocks
        Groups of matrices that take turns, a period each; "auto": as many as keep 20,000 rows a group.
    train_1d
        Also biases and norms, with Gaussian noise.
    exclude
        Words: parameters with one of them in their name stay; None: embeddings and the output head do.
    grow
        Train the model's quantised linear layers, which stay as they are: what is found becomes an adapter on them, at most `adapter_rank` wide.
    paired
        Both points in one forward pass of twice the batch: the closure runs the model on `doubled(batch)`, whose first half is evaluated at
        W + eps Z and the second at W - eps Z, and returns the losses of both halves. Linear layers alone can do it.
    candidates
        Directions a step, whose changes are averaged. Processes share them out: each is measured on the batch of the process that has it
        (with sharded parameters, all on all).
    clip_c
        c is clipped to this many times its running root mean square.
    noise_floor
        |c| below it is taken for rounding and the step left out; "auto": 4 |F| ulp / (2 eps).
    adapter_rank
        Also keep the sum of all changes as factors of this rank, for `export_adapter`; of quantised layers it is kept anyway (64).

    Raises
    ------
    ValueError
        Arguments out of range, no matrix to train. RuntimeError: half precision in place, flattened parameters.
    """

    forward_only = True
    _step_supports_amp_scaling = True  # so that `step` is told of a GradScaler, and can refuse it

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        *,
        model: nn.Module | None = None,
        eps: float = 1e-3,
        rank: int = 4,
        period: int = 100,
        threshold: float = 0.5,
        probes: int = 4,
        beta: float = 0.0,
        weight_decay: float = 0.0,
        algo: Algo = "lozo+",
        mode: Mode = "hook",
        blocks: int | Literal["auto"] = "auto",
        train_1d: bool = False,
        exclude: Sequence[str] | None = None,
        grow: bool = False,
        paired: bool = False,
        candidates: int = 1,
        seed: int = 0,
        clip_c: float | None = None,
        noise_floor: float | Literal["auto"] = "auto",
        allow_drift: bool = False,
        adapter_rank: int | None = None,
    ) -> None:
        plus = algo == "lozo+"
        probes = probes if plus else 0
        _check(algo, mode, rank, period, threshold, probes, blocks, candidates)
        super().__init__(params, {"lr": lr, "eps": eps, "beta": beta, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_group(group)
        self.settings: dict[str, Any] = {
            "algo": algo, "mode": mode, "blocks": blocks, "rank": rank, "period": period, "threshold": threshold, "probes": probes, "seed": seed,
            "clip_c": clip_c, "noise_floor": noise_floor, "grow": grow, "paired": paired, "candidates": candidates, "adapter_rank": adapter_rank,
        }  # fmt: skip
        self.model = model
        self._shards = [m for m in model.modules() if isinstance(m, FSDPModule)] if model is not None else []
        self._gather_anew()
        self.matrices, self.noisy = sort_parameters(
            self.param_groups, model, self.settings, exclude, train_1d, allow_drift
        )
        self._is_sharded = any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])
        self._parameters = self._identities()
        self._in_place = bool(self.noisy) or any(matrix.module is None for matrix in self.matrices)
        if paired and self._in_place:
            raise ValueError(
                "paired=True perturbs outputs of linear layers alone, and other parameters are trained too"
            )
        self._probes = probe_steps(period, probes)
        self._blocks = in_blocks(self.matrices, blocks if plus else 1)
        self.sides: list[dict[str, Any]] = [{"right": True, "selected": [False] * rank} for _ in self._blocks]
        self.counts = dict.fromkeys(
            ("step", "period", "in_period", "accepted", "below_noise", "not_finite", "equal", "lost"), 0
        )
        self.history: list[
            list[float]
        ] = []  # of each period: last step, mean c^2, that of random directions, columns kept
        self.records: list[
            float
        ] = []  # of each step: c of each candidate (nan where it was left out), and the learning rate of each group
        self.rms = 0.0  # of c
        self._open: dict[str, Any] | None = None
        self._drawn: tuple[int, int] | None = None  # step and candidate that the matrices' draws are of
        self.energy = self._no_energy()
        if self.matrices:
            self._start_period()

    def _identities(self) -> list[int]:
        return [id(p) for group in self.param_groups for p in group["params"]]

    # --- periods ---

    @property
    def _side(self) -> dict[str, Any]:
        return self.sides[self.counts["period"] % len(self._blocks)]

    @property
    def _active(self) -> list[Matrix]:
        return self._blocks[self.counts["period"] % len(self._blocks)] if self.matrices else []

    def _random(self, purpose: int, number: int) -> torch.Generator:
        return generator_of(self.settings["seed"], purpose, number)

    def _no_energy(self) -> dict[str, list[float]]:
        """Sums of c^2 and how many there are: by column, of random directions, of all."""
        rank = self.settings["rank"]
        return {"columns": [0.0] * rank, "tried": [0.0] * rank, "random": [0.0, 0.0], "all": [0.0, 0.0]}

    def _start_period(self) -> None:
        """Bases of the active matrices: the columns that were kept, the others drawn."""
        self.counts["in_period"] = 0
        self.energy = self._no_energy()
        generator = self._random(_BASIS, self.counts["period"])
        for matrix in self._active:
            before, was_right = matrix.basis, matrix.right
            matrix.right = self._side["right"]
            basis = torch.randn(matrix.sizes[0], matrix.rank, generator=generator)
            if self.settings["algo"] == "lozo+":
                basis *= matrix.sizes[0] ** 0.5 / basis.norm(dim=0)
            basis = basis.to(matrix.device)
            if len(matrix.kept):
                basis[:, : matrix.kept.shape[1]] = matrix.kept
            if matrix.group["beta"] and len(before):
                old = before[:, : matrix.rank]
                matrix.momentum = carried_over(matrix.momentum, old, basis, matrix.right != was_right)
            elif matrix.group["beta"]:
                matrix.momentum = basis.new_zeros(matrix.sizes[1], matrix.rank)
            matrix.begin(basis)

    def _end_period(self) -> None:
        self.fold()
        energy, kept = self.energy, list[int]()
        random = energy["random"][0] / energy["random"][1] if energy["random"][1] else 0.0
        if self.settings["algo"] == "lozo+":
            means = [e / n if n else math.nan for e, n in zip(energy["columns"], energy["tried"], strict=True)]
            kept = survivors(means, self._side["selected"], random, self.settings["threshold"])
            for matrix in self._active:
                own = [column for column in kept if column < matrix.rank]
                matrix.kept = promoted(matrix.sums, own) if own else torch.empty(0)
            self._side["right"] = not self._side["right"]
            self._side["selected"] = [column < len(kept) for column in range(self.settings["rank"])]
        if energy["all"][1]:
            mean = energy["all"][0] / energy["all"][1]
            self.history.append([float(self.counts["step"]), mean, random, float(len(kept))])
        self.counts["period"] += 1
        self._start_period()

    # --- steps ---

    def _choose(self, candidate: int = 0) -> tuple[bool, int]:
        """Draw a direction of this step, if it is not there yet; returns whether it is a fresh one (a probe), and its column."""
        t, rank, k = self.counts["in_period"], self.settings["rank"], self.settings["candidates"]
        before = sum(place < t for place in self._probes)
        probe, column = t in self._probes, ((t - before) * k + candidate) % rank
        if self._drawn == (self.counts["step"], candidate):
            return probe, column
        self._drawn = (self.counts["step"], candidate)
        generator = self._random(_DIRECTION, self._number(candidate))
        for matrix in self._active:
            place = slice(column, min(column + 1, matrix.rank))
            if self.settings["algo"] == "lozo":
                place = slice(0, matrix.rank)
            elif probe:
                own = matrix.rank + before * k + candidate
                place = slice(own, own + 1)
                b = torch.randn(matrix.sizes[0], 1, generator=generator)
                matrix.basis[:, place] = (b * len(b) ** 0.5 / b.norm()).to(matrix.device)
            elif column >= matrix.rank:  # of a matrix with fewer columns, which rests
                place = slice(0, 0)
            matrix.choose(place, generator)
        return probe, column

    def _number(self, candidate: int) -> int:
        """Of a direction, among all."""
        return self.counts["step"] * int(self.settings["candidates"]) + candidate

    def _noise(self, candidate: int = 0) -> Iterator[tuple[Noisy, Tensor]]:
        """The same noise whenever it is asked for within a step, a parameter at a time."""
        generator = self._random(_NOISE, self._number(candidate))
        for noisy in self.noisy:
            yield noisy, noisy.draw(generator)

    @contextlib.contextmanager
    def _moved(self, sign: float, candidate: int) -> Iterator[None]:
        """The weights at W + sign eps Z (paired: for the first half of a batch); afterwards, whatever happens, at W."""
        try:
            for matrix in self._active:
                matrix.perturb(sign * matrix.group["eps"], paired=self.settings["paired"])
            for noisy, z in self._noise(candidate):
                noisy.perturb(sign * noisy.group["eps"], z)
            if self._in_place:
                self._gather_anew()
            yield
        finally:
            for matrix in self._active:
                matrix.perturb(-sign * matrix.group["eps"] if matrix.module is None else 0.0)
            for noisy, z in self._noise(candidate):
                noisy.settle(sign * noisy.group["eps"], z)
            if self._in_place:
                self._gather_anew()

    def _gather_anew(self) -> None:
        """FSDP2's root keeps what it has gathered; after shards have changed, that must go."""
        for module in self._shards:
            module.reshard()

    def _evaluating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.model is None else evaluation_mode(self.model)

    def _at_both(self, closure: Closure, opened: dict[str, Any], reach: float = 1.0, candidate: int = 0) -> list[float]:
        """The losses at W + reach eps Z and W - reach eps Z."""
        self._choose(candidate)
        if self.settings["paired"]:
            with self._moved(reach, candidate):
                return _evaluate(closure, opened, 2)
        losses = []
        for sign in (reach, -reach):
            with self._moved(sign, candidate):
                losses += _evaluate(closure, opened)
        return losses

    @property
    def _own(self) -> list[int]:
        """The candidates that this process evaluates: all where the others need it for each forward pass."""
        k, rank = self.settings["candidates"], dist.get_rank() if processes() > 1 else 0
        return [i for i in range(k) if self._is_sharded or i % processes() == rank % k]

    @torch.no_grad()
    def accumulate(self, closure: Closure) -> Tensor:
        """Evaluate a micro-batch at both points and add it to the step; `step()` finishes. Returns the mean of its two losses.

        Raises ValueError for a closure that calls backward or returns a loss with a gradient. What the closure raises itself goes through,
        with the weights where they were.
        """
        if self._identities() != self._parameters:
            raise RuntimeError(
                "the groups have other parameters than at first: Accelerate replaces them where it shards a model (FSDP2). Make the optimiser "
                "of the model that accelerator.prepare(model) returns"
            )
        opened = self._open or {"losses": [0.0, 0.0] * self.settings["candidates"], "dtype": torch.float32}
        sums, mean = list(opened["losses"]), 0.0
        with self._evaluating():
            for i in self._own:
                for sign, loss in enumerate(self._at_both(closure, opened, candidate=i)):
                    sums[2 * i + sign] += loss
                    mean += loss / (2 * len(self._own))
        opened["losses"] = sums
        self._open = opened  # not before: closures call zero_grad()
        return torch.tensor(mean)

    @torch.no_grad()
    def step(self, closure: Closure | None = None, grad_scaler: Any = None) -> Tensor:  # type: ignore[override]
        """One step, from `closure` or from what was accumulated. Returns the mean of the losses.

        Raises RuntimeError with neither, or under a GradScaler; FloatingPointError when no loss was finite 20 times in a row.
        """
        if grad_scaler is not None:
            raise RuntimeError("LOZO+ has no gradients to scale: leave the GradScaler out")
        if closure is not None:
            self.accumulate(closure)
        if self._open is None:
            raise RuntimeError(
                "step() needs a closure that returns the loss, or accumulate(closure) before it. With a Trainer: put "
                "ZerothOrderTrainerMixin in front of its class, or use ZerothOrderTrainer"
            )
        opened, self._open = self._open, None
        losses = self._over_ranks(opened["losses"])
        pairs = list(zip(losses[::2], losses[1::2], strict=True))
        self._finish([self._judge(plus, minus, opened["dtype"]) for plus, minus in pairs])
        return torch.tensor(statistics.fmean(losses))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was accumulated: the step starts anew, in the same direction."""
        super().zero_grad(set_to_none)
        self._open = None

    def _judge(self, plus: float, minus: float, dtype: torch.dtype) -> float:
        """c, or nan for a step that is left out."""
        counts, eps = self.counts, self.param_groups[0]["eps"]
        c, loss = (plus - minus) / (2 * eps), (plus + minus) / 2
        if not math.isfinite(c):
            counts["not_finite"] += 1
            counts["lost"] += 1
            if counts["lost"] >= PATIENCE:
                raise FloatingPointError(
                    f"no loss was a finite number {PATIENCE} times in a row; the weights are as they were"
                )
            return math.nan
        counts["lost"] = 0
        counts["equal"] = counts["equal"] + 1 if plus == minus else 0
        if counts["equal"] == PATIENCE:
            warnings.warn(
                f"loss resolution too coarse: both losses were equal {PATIENCE} times. Raise eps or reduce the loss in fp32",
                stacklevel=3,
            )
        floor = self.settings["noise_floor"]
        if floor == "auto":
            floor = 4 * abs(loss) * torch.finfo(dtype).eps / (2 * eps)
        if abs(c) <= floor:
            counts["below_noise"] += 1
            return math.nan
        if self.settings["clip_c"] is not None:
            self.rms = math.sqrt(0.99 * self.rms**2 + 0.01 * c * c) if self.rms else abs(c)
            limit = self.settings["clip_c"] * self.rms
            c = max(-limit, min(limit, c))
        return c

    def _finish(self, slopes: Sequence[float]) -> None:
        """Move along the directions of this step, note what their c say of them, and end the period where it is over."""
        self.records += [*slopes, *(float(group["lr"]) for group in self.param_groups)]
        decayed = False
        for candidate, c in enumerate(slopes):
            if math.isnan(c):
                continue
            self.counts["accepted"] += 1
            probe, column = self._choose(candidate)
            part = c / len(slopes)
            for matrix in self._active:
                self._move(matrix, part * self._share(matrix.group), probe, decay=not decayed)
            for noisy, z in self._noise(candidate):
                group = noisy.group
                noisy.move(group["lr"], part * self._share(group) * z, 0.0 if decayed else group["weight_decay"])
            decayed = True
            self._note(c, probe, column)
        if self._in_place:
            self._gather_anew()
        for matrix in self.matrices:
            matrix.draw = torch.empty(0)
        self._drawn = None
        self.counts["step"] += 1
        self.counts["in_period"] += 1
        if self.matrices and self.counts["in_period"] == self.settings["period"]:
            self._end_period()
        if self.counts["step"] % CHECK_EVERY == 0:
            self._compare_ranks()

    def _share(self, group: Mapping[str, Any]) -> float:
        """Groups that are perturbed by more than the first count for more in c."""
        return float(self.param_groups[0]["eps"] / group["eps"])

    def _move(self, matrix: Matrix, c: float, probe: bool, *, decay: bool) -> None:
        if not matrix.draw.numel():
            return
        group, found = matrix.group, c * matrix.draw
        if not probe:
            if self.settings["algo"] == "lozo+":
                matrix.sums[:, matrix.place] += found
            if group["beta"]:
                found = matrix.momentum[:, matrix.place].mul_(group["beta"]).add_(found, alpha=1 - group["beta"])
        matrix.move(group["lr"], found, group["weight_decay"] if decay else 0.0)

    def _note(self, c: float, probe: bool, column: int) -> None:
        kinds = ["all"]
        if probe or not self._side["selected"][column]:
            kinds.append("random")
        for kind in kinds:
            self.energy[kind][0] += c * c
            self.energy[kind][1] += 1
        if not probe:
            self.energy["columns"][column] += c * c
            self.energy["tried"][column] += 1

    # --- processes ---

    def _over_ranks(self, losses: Sequence[float]) -> list[float]:
        """Two losses of each candidate: their means over the processes that evaluated it."""
        if processes() == 1:
            return list(losses)
        own = self._own
        found = self._reduced([*losses, *(float(i in own) for i in range(len(losses) // 2))], dist.ReduceOp.SUM)
        counts = found[len(losses) :]
        return [loss / counts[i // 2] for i, loss in enumerate(found[: len(losses)])]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        """Over all processes, each value for itself."""
        device = next(p.device for group in self.param_groups for p in group["params"])
        found = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(found, op=operation)
        return [float(value) for value in found.tolist()]

    def _compare_ranks(self) -> None:
        if processes() == 1:
            return
        mine = math.fsum(value for value in self.records if not math.isnan(value))
        largest, negated = self._reduced([mine, -mine], dist.ReduceOp.MAX)
        if not math.isclose(largest, -negated, rel_tol=1e-9, abs_tol=1e-12):
            raise RuntimeError("the ranks took different steps: they need the same model, seed and learning rates")

    # --- results ---

    @torch.no_grad()
    def fold(self) -> None:
        """Put what was found into the weights; before, the layers only act as if it were there. Call it before the model is saved."""
        generator = self._random(_ROUNDING, self.counts["step"])
        for matrix in self.matrices:
            matrix.fold(generator)
        self._gather_anew()

    def detach(self) -> None:
        """Fold, and take the hooks off the model; the optimiser is not to be used any more."""
        self.fold()
        for matrix in self.matrices:
            if matrix.hook is not None:
                matrix.hook.remove()

    @property
    def alignment(self) -> dict[str, float]:
        """`ratio` a = E[c^2] over that of random directions (LOZO: 1), over all periods; `kept_rank` of the last; steps `accepted`, and
        left out `below_noise`."""
        found = [row for row in self.history if row[2] > 0]
        ratio = sum(row[1] for row in found) / sum(row[2] for row in found) if found else math.nan
        return {
            "ratio": ratio,
            "kept_rank": self.history[-1][3] if self.history else 0.0,
            "accepted": self.counts["accepted"],
            "below_noise": self.counts["below_noise"],
        }

    @torch.no_grad()
    def suggest_lr(self, closure: Closure, n: int = 16, reach: float = 10.0) -> float:
        """0.5 over the median of the positive curvatures (F+ + F- - 2F) / h^2 along `n` directions of the first steps; it moves nothing.

        h is `reach` times eps: rounding is divided by h^2 here, and by h in a step. Raises ValueError where no curvature is positive.
        """
        step, h = self.counts["step"], reach * self.param_groups[0]["eps"]
        curvatures = []
        with self._evaluating():
            for _ in range(n):
                losses = self._at_both(closure, {}, reach)
                here = _evaluate(closure, {}, 2 if self.settings["paired"] else 1)
                curvatures.append((sum(losses) - 2 * statistics.fmean(here)) / h**2)
                self.counts["step"] += 1
        self.counts["step"] = step
        positive = [value for value in curvatures if value > 0]
        if not positive:
            raise ValueError("the loss bends down along every direction tried: give lr yourself, or raise reach")
        return 0.5 / statistics.median(positive)

    def export_adapter(self, directory: str | Path) -> None:
        """Write the sum of all changes, cut to `adapter_rank`, as a PEFT LoRA of the weights before training (of quantised ones: as they are).

        Raises RuntimeError without `adapter_rank`, or where not every trained matrix belongs to a linear layer.
        """
        from acclimate.optim.forward_only import save_as_lora

        if any(matrix.adapter_rank is None for matrix in self.matrices):
            raise RuntimeError(
                "export_adapter needs the sum of all changes: make the optimiser with adapter_rank=64, say"
            )
        if self.noisy or any(matrix.module is None for matrix in self.matrices):
            raise RuntimeError(
                "export_adapter knows the changes of linear layers alone, and other parameters are trained too"
            )
        self.fold()
        save_as_lora(self, Path(directory))

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings alone: all that a resumed run needs to go on bit for bit. Raises RuntimeError within a step."""
        if self._open is not None:
            raise RuntimeError("a step has been accumulated and not finished: call step() before state_dict()")
        return {
            **super().state_dict(),
            "lozo": {
                "settings": self.settings,
                "matrices": [matrix.saved() for matrix in self.matrices],
                "noisy": [noisy.saved() for noisy in self.noisy],
                "sides": [{**side, "selected": list(side["selected"])} for side in self.sides],
                "energy": {key: list(values) for key, values in self.energy.items()},
                "counts": dict(self.counts), "history": [list(row) for row in self.history], "records": list(self.records),
                "rms": self.rms,
            },
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises ValueError for one of other parameters or settings."""
        state = state_dict["lozo"]
        differing = [key for key in self.settings if state["settings"][key] != self.settings[key]]
        if differing:
            key = differing[0]
            raise ValueError(
                f"the state is of an optimiser with {key}={state['settings'][key]!r}, not {self.settings[key]!r}"
            )
        for kind, mine in (("matrices", self.matrices), ("noisy", self.noisy)):
            saved, own = [row["name"] for row in state[kind]], [one.name for one in mine]
            if saved != own:
                raise ValueError(f"the state is of other parameters: {sorted(set(saved) ^ set(own))[:5]}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "lozo"})
        # groups are new dictionaries now
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for matrix, saved in zip(self.matrices, state["matrices"], strict=True):
            matrix.group = self.param_groups[0] if matrix.p is None else groups[id(matrix.p)]
            matrix.load(saved)
        for noisy, saved in zip(self.noisy, state["noisy"], strict=True):
            noisy.group = groups[id(noisy.p)]
            noisy.load(saved)
        self.sides = [{**side, "selected": list(side["selected"])} for side in state["sides"]]
        self.energy = {key: list(values) for key, values in state["energy"].items()}
        self.counts, self.rms = dict(state["counts"]), state["rms"]
        self.history, self.records = [list(row) for row in state["history"]], list(state["records"])
        self._open = self._drawn = None

    def run_callbacks(self, directory: Path) -> list[TrainerCallback]:
        """What `acclimate tune` adds to a run."""
        from acclimate.optim.forward_only import LOZOCallback

        return [LOZOCallback(self, directory)]


class LOZOPlusFactory:
    """For `Trainer(optimizer_cls_and_kwargs=(LOZOPlusFactory, {...}))`: the optimiser of a model, with Trainer's groups."""

    def __call__(self, model: nn.Module, **options: Any) -> LOZOPlus:
        return LOZOPlus(decay_groups(model), model=model, **options)


def doubled(batch: Any) -> Any:
    """A batch twice, one after the other: every tensor (B, ..) in it as (2B, ..). For closures under `paired=True`."""
    if isinstance(batch, Tensor):
        return torch.cat([batch, batch])
    if isinstance(batch, Mapping):
        return {key: doubled(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(doubled(value) for value in batch)
    return batch


def _evaluate(closure: Closure, opened: dict[str, Any], count: int = 1) -> list[float]:
    """The loss that the closure returns, or its `count` losses."""
    try:
        loss = closure()
    except RuntimeError as error:
        if "does not require grad" in str(error):
            raise ValueError(
                "the closure calls backward(); LOZO+ needs the loss alone: return it and nothing else"
            ) from error
        raise
    losses = [loss]
    if count > 1:
        several = isinstance(loss, Sequence) or (isinstance(loss, Tensor) and loss.ndim > 0)
        losses = list(loss) if several else []
    if len(losses) != count:
        raise ValueError(
            "with paired=True the closure returns two losses, of the two halves of the batch that `doubled` makes"
        )
    for one in losses:
        if isinstance(one, Tensor) and one.requires_grad:
            raise ValueError("the closure returns a loss with a gradient: do not enable gradients in it")
        if isinstance(one, Tensor) and one.is_floating_point():
            opened["dtype"] = one.dtype
    return [float(one.double()) if isinstance(one, Tensor) else float(one) for one in losses]


def _check(
    algo: str, mode: str, rank: int, period: int, threshold: float, probes: int, blocks: int | str, candidates: int
) -> None:
    for name, value, known in (("algo", algo, get_args(Algo)), ("mode", mode, get_args(Mode))):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
    if candidates < 1:
        raise ValueError(f"candidates is at least 1, not {candidates}")
    if rank < 1 or probes < 0:
        raise ValueError(f"rank is at least 1 and probes at least 0, not {rank} and {probes}")
    if period <= probes + rank:
        raise ValueError(
            f"period {period} must be longer than probes + rank, {probes} + {rank}: every column is tried in it"
        )
    if not threshold >= 0:
        raise ValueError(f"threshold is at least 0, not {threshold}")
    if blocks != "auto" and (not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"blocks is 'auto' or at least 1, not {blocks!r}")


def _check_group(group: Mapping[str, Any]) -> None:
    if not group["eps"] > 0:
        raise ValueError(f"eps must be above 0, not {group['eps']}")
    if group["lr"] < 0 or group["weight_decay"] < 0:
        raise ValueError(f"lr and weight_decay must not be below 0, not {group['lr']} and {group['weight_decay']}")
    if not 0 <= group["beta"] < 1:
        raise ValueError(f"beta is in [0, 1), not {group['beta']}")
