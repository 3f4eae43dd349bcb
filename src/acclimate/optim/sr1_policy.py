"""The mathematics of L-SR1 (see `learned_sr1`): the network, what is remembered of a problem, and the direction of a step."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from acclimate import runs

POLICIES = Path(__file__).parent / "policies"
CHUNK = 65_536  # coordinates that the network sees at once: bounds its workspace
ROWS = 64  # ... in multiples of this, so that a matrix product sums a row in the same order in every batch
FEATURES = 6
COUNTS = ("norm_guard", "negative_curvature", "no_pair")


class LSR1Policy(nn.Module):
    """The network: features (n, 6) to (n, 3), the numbers a, b, e of each coordinate. New ones start as SR1 (b = e = 0).

    `name` is for people; `config.json` keeps it with the sizes.
    """

    def __init__(self, width: int = 64, code: int = 32, name: str = "custom") -> None:
        super().__init__()
        self.config: dict[str, Any] = {"features": FEATURES, "width": width, "code": code, "name": name}
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, code), nn.SiLU())
        heads = nn.Linear(width, 2), nn.Linear(width, 1)
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
            if config.pop("features") != FEATURES:
                raise ValueError(f"this version has {FEATURES} features")
            policy = cls(**config)
            policy.load_state_dict(load_file(directory / "model.safetensors"))
        except (OSError, SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the policy in '{directory}' does not match its config.json: {error}") from None
        return policy.eval()


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
        size, no = len(x), torch.zeros(len(x), dtype=torch.bool, device=x.device)
        counts = torch.zeros(size, len(COUNTS), dtype=torch.int64, device=x.device)
        nothing = torch.zeros_like(x)
        return cls(
            x.new_zeros(size, buffer, x.shape[1]), x.new_zeros(size), no, no, nothing, nothing, x.clone(), counts
        )


def inverse_hessian_times(vectors: Tensor, gamma: Tensor, y: Tensor) -> Tensor:
    """(B, d): (gamma I + sum_i v_i v_i^T) y, for vectors (B, L, d), gamma (B,), y (B, d)."""
    along = (vectors * y[:, None]).sum(2, keepdim=True)
    return gamma[:, None] * y + (vectors * along).sum(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def nonzero(value: Tensor) -> Tensor:
    """`value`, and 1 where it is 0: to divide by."""
    return torch.where(value > 0, value, torch.ones_like(value))


def advised(policy: nn.Module, features: Tensor) -> Tensor:
    """(B, d, 3) of features (B, d, 6), in pieces that bound the memory."""
    flat = features.reshape(-1, features.shape[2])
    short = -len(flat) % ROWS
    if short:
        flat = torch.cat([flat, flat.new_zeros(short, flat.shape[1])])
    said = torch.cat([policy(piece) for piece in flat.split(CHUNK)]) if len(flat) > CHUNK else policy(flat)
    return said[: len(said) - short].view(*features.shape[:2], -1)


def direction(
    policy: nn.Module | None,
    memory: Memory,
    x: Tensor,
    g: Tensor,
    first_step: float = 0.5,
    guard: bool = True,
    residual: bool = True,
) -> tuple[Tensor, Memory, Tensor]:
    """The step of each problem at `x` (B, d) with gradient `g`, both without a graph; None is plain SR1.

    Returns d (B, d), the memory with this point in it, and |p - B q|^2 / |p|^2 (B,), 0 where no positive definite B that keeps the older
    vectors can meet the secant relation (u.q <= 0). d and the last two have a graph to the weights of the policy. Where p or q is 0 nothing
    is stored; at the first point B = first_step / |g| I.
    """
    started = memory.started[:, None]
    p = torch.where(started, x - memory.x, torch.zeros_like(x))
    q = torch.where(started, g - memory.g, torch.zeros_like(x))
    pp, qq, pq, g_norm = dot(p, p), dot(q, q), dot(p, q), dot(g, g).sqrt()
    pair = (pp > 0) & (qq > 0)
    positive = pair & (pq > 1e-10 * (pp * qq).sqrt())

    gamma = torch.where(memory.started, memory.gamma, first_step / nonzero(g_norm))
    half = 0.5 * pq / nonzero(qq)
    gamma = torch.where(positive, torch.where(memory.scaled, torch.minimum(gamma, half), half), gamma)

    kept = memory.vectors[:, 1:]
    # No graph here: through u / sqrt(u.q) of every later vector, meta-gradients grow beyond use.
    Bq = inverse_hessian_times(kept.detach(), gamma, q)
    u = p - Bq
    w, u_norm = dot(u, q), dot(u, u).sqrt()
    good = positive & (w > 1e-3 * u_norm * qq.sqrt())
    v = torch.where(good[:, None], u / torch.where(good, w, torch.ones_like(w)).sqrt()[:, None], torch.zeros_like(u))
    h = None
    if policy is not None:
        sizes = [nonzero(value)[:, None] for value in (pp.sqrt(), qq.sqrt(), g_norm)]
        P, Q, G = (size / x.shape[1] ** 0.5 for size in sizes)  # root mean squares
        features = torch.stack([p / P, q / Q, g / G, Bq / P, u / P, (x - memory.x0) / P], dim=2)
        a, b, e = advised(policy, features.sign() * features.abs().log1p()).unbind(2)
        length = torch.where(good, nonzero(dot(v, v)).sqrt(), gamma.sqrt())
        v = torch.sigmoid(a.mean(1) + 2)[:, None] * v + 0.3 * b * (length / x.shape[1] ** 0.5)[:, None]
        h = (0.25 * e).clamp(max=0.5 * math.log(10.0)).exp()
    vectors = memory.vectors
    if vectors.shape[1]:
        vectors = torch.where(pair[:, None, None], torch.cat([kept, v[:, None]], dim=1), vectors)

    d = -inverse_hessian_times(vectors, gamma, g) if h is None else -h * inverse_hessian_times(vectors, gamma, h * g)
    left = torch.zeros_like(pp)
    if residual:
        r = p - inverse_hessian_times(vectors, gamma, q)
        left = torch.where(good, dot(r, r) / nonzero(pp), left)
    scaled_down = torch.zeros_like(pair)
    if guard:
        share = 2 * pp.sqrt().clamp(min=first_step) / nonzero(dot(d, d).sqrt().detach())
        scaled_down = share < 1
        d = d * share.clamp(max=1)[:, None]
    happened = torch.stack([scaled_down, pair & (pq <= 0), memory.started & ~pair], dim=1)
    return (
        d,
        Memory(
            vectors, gamma, memory.started | (g_norm > 0), memory.scaled | positive, x, g, memory.x0,
            memory.counts + happened,
        ),
        left,
    )  # fmt: skip
