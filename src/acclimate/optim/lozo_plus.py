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

Scale: DDP all-reduces two numbers a step; randomness is drawn on the CPU from (seed, step), so all ranks agree. Sharded parameters (FSDP,
DeepSpeed) are refused.

Source: "LOZO+: Provably Efficient Zeroth-Order Fine-Tuning via Greedy Low-Rank Subspace Selection" (ICML 2026); its listing was not available, so
the mechanism above is derived from its abstract. Baselines: LOZO, arXiv 2410.07698 (`algo="lozo"`), MeZO, arXiv 2305.17333 (`algo="mezo"`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D

from acclimate.optim.groups import decay_groups, embeddings_and_heads
from acclimate.optim.perturbation import Matrix, Noisy, generator_of
from acclimate.optim.sharding import check_not_flattened, processes
from acclimate.prefix import evaluation_mode

Algo = Literal["lozo+", "lozo", "mezo"]
Mode = Literal["hook", "inplace"]
Closure = Callable[[], Any]

BLOCK_ROWS = 20_000  # most rows of all matrices that are perturbed together
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
    clip_c
        c is clipped to this many times its running root mean square.
    noise_floor
        |c| below it is taken for rounding and the step left out; "auto": 4 |F| ulp / (2 eps).
    adapter_rank
        Also keep the sum of all changes as factors of this rank, for `export_adapter`.

    Raises
    ------
    ValueError
        Arguments out of range, no matrix to train. RuntimeError: half precision in place, sharded parameters.
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
        seed: int = 0,
        clip_c: float | None = None,
        noise_floor: float | Literal["auto"] = "auto",
        allow_drift: bool = False,
        adapter_rank: int | None = None,
    ) -> None:
        plus = algo == "lozo+"
        probes = probes if plus else 0
        _check(algo, mode, rank, period, threshold, probes, blocks)
        super().__init__(params, {"lr": lr, "eps": eps, "beta": beta, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_group(group)
        self.settings: dict[str, Any] = {
            "algo": algo, "mode": mode, "rank": rank, "period": period, "threshold": threshold, "probes": probes, "seed": seed,
            "clip_c": clip_c, "noise_floor": noise_floor,
        }  # fmt: skip
        self.model = model
        self.adapter_rank = adapter_rank
        self.matrices, self.noisy = self._sort(exclude, train_1d, allow_drift)
        self._probes = [int((i + 0.5) * period / probes) for i in range(probes)]  # their places in a period
        self._blocks = _blocks(self.matrices, blocks if plus else 1)
        self.sides: list[dict[str, Any]] = [{"right": True, "selected": [False] * rank} for _ in self._blocks]
        self.changes: dict[str, tuple[Tensor, Tensor]] = {}  # L, R of all changes, with `adapter_rank`
        self.counts = dict.fromkeys(
            ("step", "period", "in_period", "accepted", "below_noise", "not_finite", "equal", "lost"), 0
        )
        self.history: list[
            list[float]
        ] = []  # of each period: last step, mean c^2, that of random directions, columns kept
        self.records: list[
            float
        ] = []  # of each step: c (nan where it was left out) and the learning rate of each group
        self.rms = 0.0  # of c
        self._open: dict[str, Any] | None = None
        self.energy = self._no_energy()
        if self.matrices:
            self._start_period()

    def _sort(self, exclude: Sequence[str] | None, train_1d: bool, drift: bool) -> tuple[list[Matrix], list[Noisy]]:
        """The parameters that are trained, by how they are perturbed."""
        names: dict[int, str] = {}
        layers: dict[int, nn.Module] = {}
        spared: set[int] = set()
        owners: Counter[int] = Counter()
        if self.model is not None:
            names = {id(p): name for name, p in self.model.named_parameters()}
            owners = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
            layers = {id(m.weight): m for m in self.model.modules() if isinstance(m, nn.Linear | Conv1D)}
            if exclude is None:
                embeddings, heads = embeddings_and_heads(self.model)
                spared = embeddings | heads
        matrices: list[Matrix] = []
        noisy: list[Noisy] = []
        in_place = []
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                name = names.get(id(p), f"parameter {place} of group {number}")
                if not p.requires_grad or id(p) in spared or any(word in name for word in exclude or ()):
                    continue
                check_not_flattened(name, p)
                if isinstance(p, DTensor):
                    raise RuntimeError(f"'{name}' is sharded (FSDP2), and LOZO+ needs whole parameters: use DDP")
                if self.settings["algo"] == "mezo" or (p.ndim != 2 and train_1d):
                    noisy.append(Noisy(name, p, group))
                elif p.ndim == 2:
                    # a weight that several modules share acts in more places than one output
                    hooked = self.settings["mode"] == "hook" and owners[id(p)] == 1
                    layer = layers.get(id(p)) if hooked else None
                    if layer is None:
                        in_place.append(name)
                        if p.element_size() < 4 and not drift:
                            raise RuntimeError(
                                f"'{name}' is {p.dtype} and would be perturbed in place, where rounding makes it drift: train it in "
                                "float32, leave it out (exclude), or say allow_drift=True"
                            )
                    least = min(self.settings["rank"], *p.shape)
                    matrices.append(Matrix(name, p, group, layer, least, self.settings["probes"]))
        if not matrices and not noisy:
            raise ValueError(
                "there is no matrix to train: LOZO+ moves parameters of two dimensions, and leaves embeddings and the output head alone "
                "(exclude=() trains them too)"
            )
        if in_place and self.settings["mode"] == "hook" and self.model is not None:
            warnings.warn(
                f"{len(in_place)} matrices are perturbed in place, e.g. '{in_place[0]}': no linear layer has them for itself",
                stacklevel=4,
            )
        return matrices, noisy

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
            basis = basis.to(matrix.p.device)
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

    def _begin_step(self) -> dict[str, Any]:
        """Choose the direction of this step and draw it."""
        t, rank = self.counts["in_period"], self.settings["rank"]
        before = sum(place < t for place in self._probes)
        probe, column = t in self._probes, (t - before) % rank
        generator = self._random(_DIRECTION, self.counts["step"])
        for matrix in self._active:
            place = slice(column, min(column + 1, matrix.rank))
            if self.settings["algo"] == "lozo":
                place = slice(0, matrix.rank)
            elif probe:
                place = slice(matrix.rank + before, matrix.rank + before + 1)
                b = torch.randn(matrix.sizes[0], 1, generator=generator)
                matrix.basis[:, place] = (b * len(b) ** 0.5 / b.norm()).to(matrix.p.device)
            elif column >= matrix.rank:  # of a matrix with fewer columns, which rests
                place = slice(0, 0)
            matrix.choose(place, generator)
        return {"losses": [0.0, 0.0], "dtype": torch.float32, "probe": probe, "column": column}

    def _noise(self) -> Iterator[tuple[Noisy, Tensor]]:
        """The same noise whenever it is asked for within a step, a parameter at a time."""
        generator = self._random(_NOISE, self.counts["step"])
        for noisy in self.noisy:
            z = torch.randn(noisy.p.shape, generator=generator, dtype=noisy.exact.dtype)
            yield noisy, z.to(noisy.p.device)

    @contextlib.contextmanager
    def _moved(self, sign: float) -> Iterator[None]:
        """The weights at W + sign eps Z; afterwards, whatever happens, at W."""
        try:
            for matrix in self._active:
                matrix.perturb(sign * matrix.group["eps"])
            for noisy, z in self._noise():
                noisy.perturb(sign * noisy.group["eps"], z)
            yield
        finally:
            for matrix in self._active:
                matrix.perturb(-sign * matrix.group["eps"] if matrix.module is None else 0.0)
            for noisy in self.noisy:
                noisy.settle()

    def _evaluating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.model is None else evaluation_mode(self.model)

    def _at_both(self, closure: Closure, opened: dict[str, Any], reach: float = 1.0) -> list[float]:
        """The losses at W + reach eps Z and W - reach eps Z."""
        losses = []
        for sign in (reach, -reach):
            with self._moved(sign):
                losses.append(_evaluate(closure, opened))
        return losses

    @torch.no_grad()
    def accumulate(self, closure: Closure) -> Tensor:
        """Evaluate a micro-batch at both points and add it to the step; `step()` finishes. Returns the mean of its two losses.

        Raises ValueError for a closure that calls backward or returns a loss with a gradient. What the closure raises itself goes through,
        with the weights where they were.
        """
        opened = self._open or self._begin_step()
        with self._evaluating():
            losses = self._at_both(closure, opened)
        opened["losses"] = [known + new for known, new in zip(opened["losses"], losses, strict=True)]
        self._open = opened  # not before: closures call zero_grad()
        return torch.tensor((losses[0] + losses[1]) / 2)

    @torch.no_grad()
    def step(self, closure: Closure | None = None, grad_scaler: Any = None) -> Tensor:  # type: ignore[override]
        """One step, from `closure` or from what was accumulated. Returns the mean of both losses.

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
        plus, minus = self._over_ranks(opened["losses"])
        self._finish(self._judge(plus, minus, opened["dtype"]), opened)
        return torch.tensor((plus + minus) / 2)

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

    def _finish(self, c: float, opened: Mapping[str, Any]) -> None:
        """Move along the direction of this step, note what c says of it, and end the period where it is over."""
        self.records += [c, *(float(group["lr"]) for group in self.param_groups)]
        if not math.isnan(c):
            self.counts["accepted"] += 1
            for matrix in self._active:
                self._move(matrix, c * self._share(matrix.group), opened["probe"])
            for noisy, z in self._noise():
                group = noisy.group
                noisy.move(group["lr"], c * self._share(group) * z, group["weight_decay"])
            self._note(c, opened["probe"], opened["column"])
        for matrix in self.matrices:
            matrix.draw = torch.empty(0)
        self.counts["step"] += 1
        self.counts["in_period"] += 1
        if self.matrices and self.counts["in_period"] == self.settings["period"]:
            self._end_period()
        if self.counts["step"] % CHECK_EVERY == 0:
            self._compare_ranks()

    def _share(self, group: Mapping[str, Any]) -> float:
        """Groups that are perturbed by more than the first count for more in c."""
        return float(self.param_groups[0]["eps"] / group["eps"])

    def _move(self, matrix: Matrix, c: float, probe: bool) -> None:
        if not matrix.draw.numel():
            return
        group, found = matrix.group, c * matrix.draw
        if not probe:
            if self.settings["algo"] == "lozo+":
                matrix.sums[:, matrix.place] += found
            if group["beta"]:
                found = matrix.momentum[:, matrix.place].mul_(group["beta"]).add_(found, alpha=1 - group["beta"])
        matrix.move(group["lr"], found, group["weight_decay"])

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

    def _over_ranks(self, values: Sequence[float]) -> list[float]:
        """Means over processes."""
        if processes() == 1:
            return list(values)
        device = next(p.device for group in self.param_groups for p in group["params"])
        both = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(both)
        return [float(value) / processes() for value in both]

    def _compare_ranks(self) -> None:
        mine = math.fsum(value for value in self.records if not math.isnan(value))
        if not math.isclose(self._over_ranks([mine])[0], mine, rel_tol=1e-9, abs_tol=1e-12):
            raise RuntimeError("the ranks took different steps: they need the same model, seed and learning rates")

    # --- results ---

    @torch.no_grad()
    def fold(self) -> None:
        """Put what was found into the weights; before, the layers only act as if it were there. Call it before the model is saved."""
        generator = self._random(_ROUNDING, self.counts["step"])
        for matrix in self.matrices:
            change = matrix.fold(generator)
            if change is not None and self.adapter_rank is not None:
                self.changes[matrix.name] = _added(self.changes.get(matrix.name), change, self.adapter_rank)

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
                opened = self._begin_step()
                losses = self._at_both(closure, opened, reach)
                curvatures.append((sum(losses) - 2 * _evaluate(closure, opened)) / h**2)
                self.counts["step"] += 1
        self.counts["step"] = step
        positive = [value for value in curvatures if value > 0]
        if not positive:
            raise ValueError("the loss bends down along every direction tried: give lr yourself, or raise reach")
        return 0.5 / statistics.median(positive)

    def export_adapter(self, directory: str | Path) -> None:
        """Write the sum of all changes, cut to `adapter_rank`, as a PEFT LoRA of the weights before training.

        Raises RuntimeError without `adapter_rank`, or where not every trained matrix belongs to a linear layer.
        """
        from acclimate.optim.forward_only import save_as_lora

        if self.adapter_rank is None:
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
        parts = ("basis", "free", "sums", "momentum", "kept")
        return {
            **super().state_dict(),
            "lozo": {
                "settings": self.settings,
                "matrices": [
                    {"name": m.name, "right": m.right, "used": m.used, "scale": m.scale, **{part: getattr(m, part) for part in parts}}
                    for m in self.matrices
                ],
                "noisy": [{"name": noisy.name, "exact": noisy.exact} for noisy in self.noisy],
                "sides": [{**side, "selected": list(side["selected"])} for side in self.sides],
                "energy": {key: list(values) for key, values in self.energy.items()},
                "counts": dict(self.counts), "history": [list(row) for row in self.history], "records": list(self.records),
                "rms": self.rms, "changes": {name: list(factors) for name, factors in self.changes.items()},
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
            matrix.group = groups[id(matrix.p)]
            for part in ("basis", "free", "sums", "momentum", "kept"):
                setattr(matrix, part, saved[part].to(matrix.p.device, copy=True))
            matrix.right, matrix.used, matrix.scale = saved["right"], saved["used"], saved["scale"]
        for noisy, saved in zip(self.noisy, state["noisy"], strict=True):
            noisy.group = groups[id(noisy.p)]
            noisy.exact = saved["exact"].to(noisy.p.device, copy=True)
        self.sides = [{**side, "selected": list(side["selected"])} for side in state["sides"]]
        self.energy = {key: list(values) for key, values in state["energy"].items()}
        self.counts, self.rms = dict(state["counts"]), state["rms"]
        self.history, self.records = [list(row) for row in state["history"]], list(state["records"])
        self.changes = {name: (factors[0], factors[1]) for name, factors in state["changes"].items()}
        self._open = None

    def run_callbacks(self, directory: Path) -> list[TrainerCallback]:
        """What `acclimate tune` adds to a run."""
        from acclimate.optim.forward_only import LOZOCallback

        return [LOZOCallback(self, directory)]


class LOZOPlusFactory:
    """For `Trainer(optimizer_cls_and_kwargs=(LOZOPlusFactory, {...}))`: the optimiser of a model, with Trainer's groups."""

    def __call__(self, model: nn.Module, **options: Any) -> LOZOPlus:
        return LOZOPlus(decay_groups(model), model=model, **options)


def _evaluate(closure: Closure, opened: dict[str, Any]) -> float:
    try:
        loss = closure()
    except RuntimeError as error:
        if "does not require grad" in str(error):
            raise ValueError(
                "the closure calls backward(); LOZO+ needs the loss alone: return it and nothing else"
            ) from error
        raise
    if not isinstance(loss, Tensor):
        return float(loss)
    if loss.requires_grad:
        raise ValueError("the closure returns a loss with a gradient: do not enable gradients in it")
    if loss.is_floating_point():
        opened["dtype"] = loss.dtype
    return float(loss.double())


def _added(known: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """L (m, k), R (n, k) of the sum of two changes, the best of `rank` where they have more."""
    left, right = (torch.cat([a, b], dim=1) for a, b in zip(known, new, strict=True)) if known else new
    if left.shape[1] <= rank:
        return left, right
    (Q, S), (P, T) = torch.linalg.qr(left.double()), torch.linalg.qr(right.double())
    U, sigma, Vt = torch.linalg.svd(S @ T.T, full_matrices=False)
    cut = slice(rank)
    return (Q @ (U[:, cut] * sigma[cut])).to(left), (P @ Vt[cut].T).to(right)


def _blocks(matrices: Sequence[Matrix], blocks: int | Literal["auto"]) -> list[list[Matrix]]:
    """Neighbouring matrices in groups of at most BLOCK_ROWS rows together, or in `blocks` groups of about equal rows."""
    rows = sum(matrix.p.shape[0] for matrix in matrices)
    most = BLOCK_ROWS if blocks == "auto" else rows / blocks
    found: list[list[Matrix]] = [[]]
    count = 0.0
    for matrix in matrices:
        if found[-1] and count + matrix.p.shape[0] > most:
            found.append([])
            count = 0.0
        found[-1].append(matrix)
        count += matrix.p.shape[0]
    return found


def _check(algo: str, mode: str, rank: int, period: int, threshold: float, probes: int, blocks: int | str) -> None:
    for name, value, known in (("algo", algo, get_args(Algo)), ("mode", mode, get_args(Mode))):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
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
