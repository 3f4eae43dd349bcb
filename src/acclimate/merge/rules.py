"""Merging rules: how the changes of several tasks to one layer become one change.

A rule sees task t as the small matrix w_t M_t = left_t right_t^T (p x q) with left_t (p x r_t) and right_t (q x r_t), in float64,
for a batch of layers at once. tsv, iso, sum and mean do not depend on the coordinates; ties, dare and functions of the user do.

Sources: task arithmetic (Ilharco et al., ICLR 2023); TIES (Yadav et al., NeurIPS 2023); DARE (Yu et al., ICML 2024);
TSV-M (Gargiulo et al., CVPR 2025); Iso-C (Marczak et al., ICML 2025).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from acclimate.linalg import polar_factor

RuleFunction = Callable[[list[Tensor], list[float]], Tensor]
RuleName = Literal["sum", "mean", "ties", "dare", "dare_ties", "tsv", "iso", "tsv_iso"]
LINEAR = ("sum", "mean")
COORDINATE_FREE = ("sum", "mean", "tsv", "iso", "tsv_iso")


def compact(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """The tasks' matrices (..., p, q) from their factors (..., p, r_t) and (..., q, r_t)."""
    return [a @ b.mT for a, b in zip(left, right, strict=True)]


def task_sum(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """sum_t M_t (..., p, q)."""
    return torch.cat(tuple(left), dim=-1) @ torch.cat(tuple(right), dim=-1).mT


def trim(task: Tensor, density: float) -> Tensor:
    """(..., p, q) with the `density` share of largest absolute entries of each matrix (at least one); the others become zero."""
    size = task.abs().flatten(-2)
    kept = max(1, round(density * size.shape[-1]))
    threshold = size.kthvalue(size.shape[-1] - kept + 1, dim=-1).values
    return torch.where(task.abs() >= threshold[..., None, None], task, 0.0)


def elect(tasks: Sequence[Tensor], sign: Literal["total", "frequency"] = "total") -> Tensor:
    """Mean of the tasks' (..., p, q) over those that agree with the elected sign of their entry (TIES, steps 2 and 3).

    The sign is that of the sum ("total") or of the majority ("frequency"); where that is zero, the one most entries elected.
    """
    votes = torch.zeros_like(tasks[0])
    for task in tasks:
        votes += task if sign == "total" else task.sign()
    elected = votes.sign()
    overall = torch.where(elected.sum((-2, -1), keepdim=True) < 0, -1.0, 1.0).to(elected)
    elected = torch.where(elected == 0, overall, elected)
    total, agreeing = torch.zeros_like(votes), torch.zeros_like(votes)
    for task in tasks:
        agree = task.sign() == elected
        total += task * agree
        agreeing += agree
    return total / agreeing.clamp_min(1)


def drop_randomly(task: Tensor, drop: float, key: str, names: Sequence[str]) -> Tensor:
    """(L, p, q) with entries kept with probability 1 - drop and divided by it (DARE).

    The mask of a layer depends on `key` and the layer's name alone, not on what else is merged.
    """
    keep = torch.empty(task.shape, dtype=torch.bool)
    for mask, name in zip(keep, names, strict=True):
        digest = hashlib.sha256(f"{key}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        mask[:] = torch.rand(mask.shape, generator=generator) >= drop
    return task * keep.to(task.device) / (1 - drop)


def task_singular_vectors(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """TSV-M: each task's leading singular vectors, made orthonormal over all tasks, with all their singular values.

    T tasks keep max(1, min(p, q) // T) directions each, so that all fit into the space.
    """
    kept = max(1, min(left[0].shape[-2], right[0].shape[-2]) // len(left))
    lefts, sigmas, rights = [], [], []
    for a, b in zip(left, right, strict=True):
        (qa, ra), (qb, rb) = torch.linalg.qr(a), torch.linalg.qr(b)
        u, sigma, vt = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
        lefts.append(qa @ u[..., :kept])
        sigmas.append(sigma[..., :kept])
        rights.append(qb @ vt[..., :kept, :].mT)
    u_all, v_all = polar_factor(torch.cat(lefts, dim=-1)), polar_factor(torch.cat(rights, dim=-1))
    return (u_all * torch.cat(sigmas, dim=-1)[..., None, :]) @ v_all.mT


def isotropic(matrix: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Iso-C: (..., p, q) with its non-zero singular values replaced by their mean."""
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    keep = sigma > tolerance * sigma.amax(-1, keepdim=True)
    mean = (sigma * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp_min(1)
    return (left * (mean * keep)[..., None, :]) @ right
