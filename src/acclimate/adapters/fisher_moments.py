"""The Fisher information of linear layers, streamed over data: second moments of their inputs and output gradients.

For a layer y = W x (W m x n) with inputs x_t and output gradients g_t = d loss / d y_t at positions t, the Fisher block is
F = E[(x (x) g)(x (x) g)^T] (mn x mn), and a change of W by eps Z moves the predictions by KL = eps^2 E(Z) / 2 per position, where
E(Z) = vec(Z)^T F vec(Z) = E[(g^T Z x)^2] is the energy of the direction Z. F is never formed. Kept are

    A = E[||g||^2 x x^T] / E||g||^2   (n x n)        G = E[||x||^2 g g^T] / E||x||^2   (m x m)      factors="marginal"
    A = E[x x^T]                                     G = E[g g^T]                                  factors="kfac"

The marginal ones are the exact partial traces of F (up to the scales E||g||^2 and E||x||^2); the others are those of K-FAC
(Martens and Grosse, 2015), which take x and g for independent. Expectations run over positions that the loss reaches (g != 0).
A convolution is a linear layer on unfolded patches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from acclimate.linalg import from_triangle, gram_triangle, leading_eigh, nystrom_eigh, overlap
from acclimate.prefix import evaluation_mode

Factors = Literal["marginal", "kfac"]
LossFunction = Callable[[nn.Module, Any], Tensor]

CHUNK = 4096  # positions in one matrix product
MAX_POSITIONS = 65_536
MAX_EXTENSION = 4  # times the examples asked for, where the directions have not settled
SETTLED = 0.9  # overlap of the leading input space after half of the data with that after all of it
MAX_BAD_SHARE = 0.1
SAMPLE = 512  # positions kept as they are


class Gram:
    """The sum of w_t z_t z_t^T over positions, in float64: whole (d, d), or, with `sketch` = p > 0, its product with d x p numbers."""

    def __init__(self, size: int, sketch: int = 0, seed: int = 0) -> None:
        self.test: Tensor | None = None
        if 0 < sketch < size:
            generator = torch.Generator().manual_seed(seed)
            self.test = torch.randn(size, sketch, generator=generator)
        # of the whole matrix the lower triangle
        self._sum = torch.zeros(size, size if self.test is None else self.test.shape[1], dtype=torch.float64)
        self.trace = 0.0

    def add(self, z: Tensor, weight: Tensor | None) -> None:
        """Add the rows of z (T, d), weighted by (T,). Products are taken in z's precision, sums in float64."""
        if weight is not None:
            z = weight.sqrt()[:, None] * z
        product = gram_triangle(z) if self.test is None else z.T @ (z @ self.test.to(z))
        self._sum += product.to(self._sum.device)
        self.trace += float(z.square().sum(dtype=torch.float64))

    @property
    def sum(self) -> Tensor:
        """The matrix (d, d), or its sketch (d, p)."""
        return from_triangle(self._sum) if self.test is None else self._sum

    def leading(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` leading eigenpairs ((k,), (d, k)); from a sketch no more than it holds."""
        if self.test is None:
            return leading_eigh(self.sum, k)
        values, vectors = nystrom_eigh(self.sum, self.test)
        return values[:k], vectors[:, :k]


@dataclass
class Moments:
    """What one layer's positions add up to."""

    inputs: Gram  # (n, n)
    outputs: Gram  # (m, m)
    cross: Tensor | None  # sum of g x^T (m, n), if asked for
    sample: Tensor  # the first inputs as they came, (up to SAMPLE, n)
    input_energy: float = 0.0  # sum of ||x||^2
    output_energy: float = 0.0  # sum of ||g||^2
    positions: int = 0
    half: Tensor | None = (
        None  # leading input directions at the last look: after half of the examples, then at each limit
    )

    def add(self, x: Tensor, g: Tensor, factors: Factors) -> None:
        """Add positions: x (T, n) inputs, g (T, m) output gradients; those with g = 0 do not count."""
        keep = g.square().sum(1) > 0
        x, g = x[keep], g[keep]
        self.positions += len(x)
        if len(self.sample) < SAMPLE:
            self.sample = torch.cat([self.sample, x[: SAMPLE - len(self.sample)].float().cpu()])
        for start in range(0, len(x), CHUNK):
            px, pg = x[start : start + CHUNK], g[start : start + CHUNK]
            nx, ng = px.square().sum(1), pg.square().sum(1)
            self.input_energy += float(nx.sum(dtype=torch.float64))
            self.output_energy += float(ng.sum(dtype=torch.float64))
            self.inputs.add(px, ng if factors == "marginal" else None)
            self.outputs.add(pg, nx if factors == "marginal" else None)
            if self.cross is not None:
                self.cross += (pg.T @ px).to(self.cross.device)

    def scales(self, factors: Factors) -> tuple[float, float]:
        """What `inputs` and `outputs` must be divided by to be A and G."""
        if factors == "kfac":
            return self.positions, self.positions
        return self.output_energy, self.input_energy

    def factor_pair(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """(A (n, n), G (m, m)) of the module docstring; not from sketches."""
        a, g = self.scales(factors)
        return self.inputs.sum / a, self.outputs.sum / g


def model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The model's own loss with its mean undone: times the number of labels that count in it."""
    labels = batch["labels"]
    output = model(**batch)
    if labels.is_floating_point():
        return output.loss * labels.numel()
    return output.loss * _counted(model, labels).sum()


def sampled_loss(generator: torch.Generator) -> LossFunction:
    """The summed loss on labels drawn from the model's own predictions, at the positions of the batch's labels: true Fisher."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        keep = _counted(model, batch["labels"]).flatten()
        if _shifts(model):
            logits = logits[:, :-1]
        chosen = logits.flatten(0, -2)[keep].float()
        drawn = torch.multinomial(chosen.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
        return nn.functional.cross_entropy(chosen, drawn.to(chosen.device), reduction="sum")

    return loss


def _shifts(model: Any) -> bool:
    return getattr(model, "loss_type", None) == "ForCausalLM"


def _counted(model: nn.Module, labels: Tensor) -> Tensor:
    counted = (labels[:, 1:] if _shifts(model) else labels) != -100
    if not bool(counted.any()):
        raise ValueError("all labels of a batch are -100: nothing to learn from. Check how the labels are masked")
    return counted


def collect_moments(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    data: Iterable[Any],
    loss_fn: LossFunction,
    *,
    factors: Factors = "marginal",
    cross: bool = False,
    sketch: Callable[[int], int] = lambda size: 0,
    rank: int = 8,
    n_examples: int = 256,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Moments]:
    """One pass over `n_examples` rows or 65,536 positions, whichever comes first.

    Where the leading `rank` input directions of half and of all of the data still overlap by less than 0.9 in some layer, twice
    and then four times as many. `sketch` gives the width of the sketch for a side of that size, 0 for none. The model runs in evaluation mode with nothing but the layers' outputs differentiated.

    Returns
    -------
    dict
        Moments by layer name; layers that the loss does not reach are missing.

    Raises
    ------
    ValueError
        No data; a loss that no layer reaches, or that is not finite in more than a tenth of the batches.
    """
    moments: dict[str, Moments] = {}
    seen = batches = bad = 0
    limit, most = n_examples, MAX_POSITIONS

    def take(name: str, x: Tensor, g: Tensor) -> None:
        nonlocal bad
        if not bool(torch.isfinite(g).all()):
            raise FloatingPointError
        x, g = as_positions(layers[name], x, g)
        if name not in moments:
            n, m = x.shape[1], g.shape[1]
            zero = torch.zeros(m, n, dtype=torch.float64) if cross else None
            moments[name] = Moments(Gram(n, sketch(n), seed=0), Gram(m, sketch(m), seed=1), zero, torch.zeros(0, n))
        moments[name].add(x, g, factors)

    device = next(model.parameters()).device
    with evaluating(model), torch.enable_grad(), recording(layers, take):
        for batch in data:
            moved = send_to_device(batch, device)
            batches += 1
            try:
                loss = loss_fn(model, moved)
                if not loss.requires_grad:
                    raise ValueError("the loss depends on none of the target layers: check target_modules and loss_fn")
                if not bool(torch.isfinite(loss)):
                    raise FloatingPointError
                loss.backward()
            except FloatingPointError:
                bad += 1
            count = rows_of(moved)
            advance(count)
            if seen < limit / 2 <= seen + count:
                _settled(moments, rank)
            seen += count
            positions = max((m.positions for m in moments.values()), default=0)
            if seen >= limit or positions >= most:
                if limit >= MAX_EXTENSION * n_examples or _settled(moments, rank):
                    break
                limit, most = 2 * limit, 2 * most
    if not batches:
        raise ValueError("no data to look at: there is no batch")
    if bad > MAX_BAD_SHARE * batches:
        raise ValueError(
            f"the loss was not finite in {bad} of {batches} batches, more than a tenth. Check the data, the labels and the model's precision"
        )
    if bad:
        warnings.warn(f"{bad} of {batches} batches were left out: their loss was not finite", stacklevel=3)
    return {name: m for name, m in moments.items() if m.positions}


def _settled(moments: Mapping[str, Moments], rank: int) -> bool:
    """Whether every layer's leading input space is that of the look before, which is kept for the next one."""
    settled = True
    for m in moments.values():
        before, m.half = m.half, m.inputs.leading(rank)[1]
        settled = settled and (before is None or overlap(before, m.half) >= SETTLED)
    return settled


def direction_energy(
    model: nn.Module, layer: nn.Module, data: Iterable[Any], loss_fn: LossFunction, U: Tensor, V: Tensor
) -> Tensor:
    """E(u_i v_i^T) = E[(g^T u_i)^2 (v_i^T x)^2] (k,) of k directions, U (m, k) and V (n, k), measured position by position."""
    total, positions = torch.zeros(U.shape[1], dtype=torch.float64), 0

    def take(name: str, x: Tensor, g: Tensor) -> None:
        nonlocal positions
        x, g = as_positions(layer, x, g)
        keep = g.square().sum(1) > 0
        total.add_(((g[keep] @ U.to(g)).double() * (x[keep] @ V.to(x)).double()).square().sum(0).cpu())
        positions += int(keep.sum())

    device = next(model.parameters()).device
    with evaluating(model), torch.enable_grad(), recording({"layer": layer}, take):
        for batch in data:
            loss_fn(model, send_to_device(batch, device)).backward()
    return total / positions


def as_positions(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(inputs (T, n), output gradients (T, m)) of a linear layer, or of a convolution on its unfolded patches, at least fp32."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        x = nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
        g = g.flatten(2).transpose(1, 2)
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return (x, g) if x.dtype == torch.float64 else (x.float(), g.float())


@contextlib.contextmanager
def recording(layers: Mapping[str, nn.Module], take: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `take(name, input, output gradient)` for every use of a layer in a backward pass."""

    def hook(name: str) -> Callable[..., Tensor]:
        def record(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:  # nothing below is differentiated: the chain begins here
                output.requires_grad_()
            x = arguments[0].detach()
            output.register_hook(lambda gradient: take(name, x, gradient.detach()))
            return output

        return record

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no activation checkpointing), no weight differentiated; all restored, also after an error."""
    wanted = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    try:
        with evaluation_mode(model):
            model.requires_grad_(False)
            yield
    finally:
        for parameter, (wants, gradient) in wanted.items():
            parameter.requires_grad_(wants)
            parameter.grad = gradient


def rows_of(batch: Any) -> int:
    """Rows in a batch: the length of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)
