"""The mathematics of L-SR1 (see `learned_sr1`): the network, what is remembered of a problem, and the direction of a step."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acclimate import runs

POLICIES = Path(__file__).parent / "policies"
CHUNK = 65_536  # coordinates that the network sees at once: bounds its workspace
ROWS = 64  # ... in multiples of this, so that a matrix product sums a row in the same order in every batch
Arch = Literal["compact", "paper"]
FEATURES = {"compact": 6, "paper": 5}
COUNTS = ("norm_guard", "negative_curvature", "no_pair")

Total = Callable[..., tuple[Tensor, ...]]  # sums over the unknowns that a process has, to those over all unknowns


class LSR1Policy(nn.Module):
    """The network: features (n, 6) to (n, 3), the numbers a, b, e of each coordinate. New ones start as SR1 (b = e = 0).

    `arch="paper"` is the published network: features (n, 5) to (n, 2), the vector itself and e, by residual layers with batch normalisation
    and dropout; `width` is 256 then, with 798,000 weights. `name` is for people; `config.json` keeps it with the sizes.
    """

    def __init__(self, width: int | None = None, code: int = 32, name: str = "custom", arch: Arch = "compact") -> None:
        super().__init__()
        if arch not in get_args(Arch):
            raise ValueError(f"arch is compact or paper; got '{arch}'")
        width = width or {"compact": 64, "paper": 256}[arch]
        self.arch = arch
        self.config: dict[str, Any] = {
            "features": FEATURES[arch], "arch": arch, "width": width, "code": code, "name": name,
        }  # fmt: skip
        heads: list[Any]
        if arch == "paper":
            self.encoder = nn.Sequential(nn.Linear(FEATURES[arch], width), Residual(width), Residual(width))
            self.vector = nn.Sequential(Residual(width), Residual(width), nn.Linear(width, 1))
            self.scale = nn.Sequential(Residual(width), Residual(width), nn.Linear(width, 1))
            heads = [self.scale[2]]
        else:
            self.encoder = nn.Sequential(nn.Linear(FEATURES[arch], width), nn.SiLU(), nn.Linear(width, code), nn.SiLU())
            heads = [nn.Linear(width, 2), nn.Linear(width, 1)]
            self.vector = nn.Sequential(nn.Linear(code, width), nn.SiLU(), heads[0])
            self.scale = nn.Sequential(nn.Linear(code, width), nn.SiLU(), heads[1])
        for head in heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, features: Tensor) -> Tensor:
        code = self.encoder(features)
        return torch.cat([self.vector(code), self.scale(code)], dim=1)

    @property
    def digest(self) -> str:
        """Of all weights, in float32."""
        found = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.state_dict().items()):
            found.update(name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with runs.replacing(directory / "model.safetensors") as path:
            save_file({name: value.float().contiguous() for name, value in self.state_dict().items()}, path)
        runs.write_text(directory / "config.json", json.dumps(self.config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> LSR1Policy:
        """One that comes with the package ("generic", "pose"), or a directory. ValueError: there is none, or its files do not match."""
        directory = POLICIES / str(name_or_path)
        if not directory.is_dir():
            directory = Path(name_or_path)
        if not (directory / "config.json").is_file():
            known = ", ".join(["sr1", *sorted(path.name for path in POLICIES.iterdir() if path.is_dir())])
            raise ValueError(
                f"unknown policy '{name_or_path}': choose {known}, or a directory that save_pretrained() wrote"
            )
        try:
            config = json.loads((directory / "config.json").read_text())
            features = config.pop("features")
            policy = cls(**config)
            if features != policy.config["features"]:
                raise ValueError(f"this version has {policy.config['features']} features")
            policy.load_state_dict(load_file(directory / "model.safetensors"))
        except (OSError, SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the policy in '{directory}' does not match its config.json: {error}") from None
        return policy.eval()


class Residual(nn.Module):
    """x + two linear layers, each with batch normalisation, PReLU and dropout, as the published network has."""

    def __init__(self, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.PReLU(), nn.Dropout(dropout))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


@dataclass
class Memory:
    """What is kept of B problems of d unknowns."""

    vectors: Tensor  # (B, L, d): the oldest first; zeros where there is none yet
    gamma: Tensor  # (B,)
    started: Tensor  # (B,) bool: there is a previous point
    scaled: Tensor  # (B,) bool: a pair has set gamma
    x: Tensor  # (B, d): the previous point, its gradient, and the first point
    g: Tensor
    x0: Tensor
    counts: Tensor  # (B, len(COUNTS))

    @classmethod
    def of(cls, x: Tensor, buffer: int) -> Memory:
        """Of problems that start at `x` (B, d)."""
        size, d = x.shape
        started, scaled = (torch.zeros(size, dtype=torch.bool, device=x.device) for _ in range(2))
        counts = torch.zeros(size, len(COUNTS), dtype=torch.int64, device=x.device)
        return cls(
            x.new_zeros(size, buffer, d), x.new_zeros(size), started, scaled, torch.zeros_like(x), torch.zeros_like(x),
            x.clone(), counts,
        )  # fmt: skip

    def after(
        self, x: Tensor, g: Tensor, vectors: Tensor, gamma: Tensor, started: Tensor, scaled: Tensor, happened: Tensor
    ) -> Memory:
        """With the point `x` in it. What has started, or been scaled, stays so; `happened` (B, len(COUNTS)) is counted."""
        return Memory(
            vectors, gamma, self.started | started, self.scaled | scaled, x, g, self.x0, self.counts + happened
        )


def alone(*sums: Tensor) -> tuple[Tensor, ...]:
    """The `Total` of a process that has all unknowns."""
    return sums


def inverse_hessian_times(vectors: Tensor, gamma: Tensor, y: Tensor, total: Total = alone) -> Tensor:
    """(B, d): (gamma I + sum_i v_i v_i^T) y, for vectors (B, L, d), gamma (B,), y (B, d)."""
    (along,) = total((vectors * y[:, None]).sum(2))
    return gamma[:, None] * y + (vectors * along[..., None]).sum(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def nonzero(value: Tensor) -> Tensor:
    """`value`, and 1 where it is 0: to divide by."""
    return torch.where(value > 0, value, 1.0)


def advised(policy: nn.Module, features: Tensor, multiple: int = ROWS) -> Tensor:
    """What the network says, (B, d, n), of features (B, d, m), in pieces that bound the memory."""
    flat = features.reshape(-1, features.shape[2])
    short = -len(flat) % multiple
    if short:
        flat = torch.cat([flat, flat.new_zeros(short, flat.shape[1])])
    said = torch.cat([policy(piece) for piece in flat.split(CHUNK)]) if len(flat) > CHUNK else policy(flat)
    return said[: features.shape[0] * features.shape[1]].view(*features.shape[:2], said.shape[1])


def direction(
    policy: LSR1Policy | None,
    memory: Memory,
    x: Tensor,
    g: Tensor,
    first_step: float = 0.5,
    guard: bool = True,
    residual: bool = True,
    unknowns: int | None = None,
    total: Total = alone,
) -> tuple[Tensor, Memory, Tensor]:
    """The step of each problem at `x` (B, d) with gradient `g`, both without a graph; None is plain SR1.

    Returns d (B, d), the memory with this point in it, and |p - B q|^2 / |p|^2 (B,), 0 where no positive definite B that keeps the older
    vectors can meet the secant relation (u.q <= 0). d and the last two have a graph to the weights of the policy. Where p or q is 0 nothing
    is stored; at the first point B = first_step / |g| I.

    Where this process has only some of the problems' `unknowns`, `total` adds up what the processes have summed: five times, 2 L + 7 numbers.
    """
    if policy is not None and policy.arch == "paper":
        return published(policy, memory, x, g, first_step, guard, total)
    root = (unknowns or x.shape[1]) ** 0.5
    p, q = changes(memory, x, g)
    kept = memory.vectors[:, 1:]
    # No graph to `kept` here: through u / sqrt(u.q) of every later vector, meta-gradients grow beyond use.
    along = (kept.detach() * q[:, None]).sum(2)
    pp, qq, pq, gg, along = total(dot(p, p), dot(q, q), dot(p, q), dot(g, g), along)
    pair = (pp > 0) & (qq > 0)
    p_norm, q_norm, g_norm = pp.sqrt(), qq.sqrt(), gg.sqrt()
    positive = pair & (pq > 1e-10 * p_norm * q_norm)

    gamma = torch.where(memory.started, memory.gamma, first_step / nonzero(g_norm))
    half = 0.5 * pq / nonzero(qq)
    gamma = torch.where(positive, torch.where(memory.scaled, torch.minimum(gamma, half), half), gamma)

    Bq = gamma[:, None] * q + (kept.detach() * along[..., None]).sum(1)
    u = p - Bq
    w, uu = total(dot(u, q), dot(u, u))
    good = positive & (w > 1e-3 * uu.sqrt() * q_norm)
    shrink = torch.where(good, w, 1.0).rsqrt()
    v = torch.where(good, shrink, 0.0)[:, None] * u
    h = None
    if policy is not None:
        P, Q, G = (nonzero(value)[:, None] / root for value in (p_norm, q_norm, g_norm))  # root mean squares
        features = torch.stack([p / P, q / Q, g / G, Bq / P, u / P, (x - memory.x0) / P], dim=2)
        a, b, e = advised(policy, features.sign() * features.abs().log1p()).unbind(2)
        length = torch.where(good, nonzero(uu).sqrt() * shrink, gamma.sqrt())
        (said,) = total(a.sum(1))
        v = torch.sigmoid(said / root**2 + 2)[:, None] * v + 0.3 * b * (length / root)[:, None]
        h = (0.25 * e).clamp(max=0.5 * math.log(10.0)).exp()
    vectors = stored(memory, v, pair)

    if h is None:
        d = -inverse_hessian_times(vectors, gamma, g, total)
    else:
        d = -h * inverse_hessian_times(vectors, gamma, h * g, total)
    left = torch.zeros_like(pp)
    if residual:
        r = p - inverse_hessian_times(vectors, gamma, q, total)
        (rr,) = total(dot(r, r))
        left = torch.where(good, rr / nonzero(pp), 0.0)
    d, scaled_down = guarded(d, pp, first_step, guard, total)
    happened = torch.stack([scaled_down, pair & (pq <= 0), memory.started & ~pair], dim=1)
    return d, memory.after(x, g, vectors, gamma, gg > 0, positive, happened), left


def changes(memory: Memory, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """p and q (B, d): what x and g have changed by; 0 at a first point."""
    started = memory.started[:, None]
    return torch.where(started, x - memory.x, 0.0), torch.where(started, g - memory.g, 0.0)


def stored(memory: Memory, v: Tensor, pair: Tensor) -> Tensor:
    """(B, L, d): the vectors with v (B, d) in the place of the oldest, where there is a pair."""
    if not memory.vectors.shape[1]:
        return memory.vectors
    return torch.where(pair[:, None, None], torch.cat([memory.vectors[:, 1:], v[:, None]], dim=1), memory.vectors)


def guarded(d: Tensor, pp: Tensor, first_step: float, guard: bool, total: Total) -> tuple[Tensor, Tensor]:
    """d, at most twice as long as the longer of p and `first_step`, and where it was longer (B,)."""
    if not guard:
        return d, torch.zeros_like(pp, dtype=torch.bool)
    (dd,) = total(dot(d, d).detach())
    share = 2 * pp.sqrt().clamp(min=first_step) / nonzero(dd.sqrt())
    return d * share.clamp(max=1)[:, None], share < 1


def published(
    policy: LSR1Policy,
    memory: Memory,
    x: Tensor,
    g: Tensor,
    first_step: float = 0.5,
    guard: bool = True,
    total: Total = alone,
) -> tuple[Tensor, Memory, Tensor]:
    """`direction` as published: B = I + sum_i v_i v_i^T, where v is what the network says, of x, p, B q, g, q as they are;

    B y is made as long as y, and d = -min(exp(e / 2), 10) B g, which need not descend. (The guard is ours.)
    """

    def times(vectors: Tensor, y: Tensor) -> Tensor:
        product = inverse_hessian_times(vectors, torch.ones_like(memory.gamma), y, total)
        before, after = total(dot(y, y), dot(product, product))
        return product * (before / nonzero(after)).sqrt()[:, None]

    p, q = changes(memory, x, g)
    pp, qq, pq, gg = total(dot(p, p), dot(q, q), dot(p, q), dot(g, g))
    pair = (pp > 0) & (qq > 0)
    features = torch.stack([x, p, times(memory.vectors, q).detach(), g, q], dim=2)
    v, e = advised(policy, features, multiple=1).unbind(2)  # padding would change the batch's statistics
    vectors = stored(memory, v, pair)
    d = -(0.5 * e).clamp(max=math.log(10.0)).exp() * times(vectors, g)
    r = p - times(vectors, q)
    (rr,) = total(dot(r, r))
    left = torch.where(pair, rr / nonzero(pp), 0.0)
    d, scaled_down = guarded(d, pp, first_step, guard, total)
    happened = torch.stack([scaled_down, pair & (pq <= 0), memory.started & ~pair], dim=1)
    return d, memory.after(x, g, vectors, torch.ones_like(memory.gamma), gg > 0, pair, happened), left
