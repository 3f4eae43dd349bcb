"""What else people do with fine-tuned weights, for comparison: interpolation, soups, Model Stock, LiNeS, truncation; PEFT's linear merge.

All but the last take state dicts or paths of checkpoints (read one tensor at a time) and return a state dict with the names and types
of the fine-tuned one. Tensors that are not floating point, or that the base lacks, are those of the (first) fine-tuned one.

Sources: WiSE-FT (Wortsman et al., CVPR 2022); model soups (Wortsman et al., ICML 2022); Model Stock (Jang et al., ECCV 2024);
LiNeS (Wang et al., ICLR 2025).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InputError
from acclimate.merge.adapter_files import Adapter, find_modules, merged_config
from acclimate.merge.checkpoints import Checkpoint, as_checkpoint, counterparts
from acclimate.merge.monosoup import Source, weights_of

_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|resblocks)\.(\d+)\.")
_INPUT = re.compile(r"embed|wte|wpe|patch|conv1|cls_token|class_token")

Rule = Callable[[Tensor, list[Tensor], str], Tensor]


def _combine(base: Source | None, tuned: Sequence[Source], rule: Rule) -> dict[str, Tensor]:
    """Apply rule(base, tuned, name) in float64 to each floating tensor that all checkpoints have in one shape."""
    if not tuned:
        raise ValueError("there is no fine-tuned checkpoint")
    after = [as_checkpoint(source, f"tuned {number}") for number, source in enumerate(tuned, 1)]
    before = after[0] if base is None else as_checkpoint(base, "base")
    names = counterparts(before, after[0])
    result: dict[str, Tensor] = {}
    for name in after[0]:
        first, other = after[0].checked(name, infinity=True), names[name]
        if other is None or not first.is_floating_point() or before.shapes[other] != tuple(first.shape):
            result[name] = first
            continue
        for checkpoint in after[1:]:
            if checkpoint.shapes.get(name) != tuple(first.shape):
                raise InputError(f"'{name}' of '{after[0].label}' is not in '{checkpoint.label}' in the same shape")
        changed = [first.double(), *(checkpoint[name].double() for checkpoint in after[1:])]
        result[name] = rule(before[other].double(), changed, name).to(first.dtype)
    return result


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(0)


def wise_ft(base: Source, tuned: Source, alpha: float = 0.5) -> dict[str, Tensor]:
    """(1 - alpha) W0 + alpha W1: the base for 0, the fine-tune for 1."""
    return _combine(base, [tuned], lambda w0, w, name: torch.lerp(w0, w[0], alpha))


def uniform_soup(tuned: Sequence[Source]) -> dict[str, Tensor]:
    """The mean of several fine-tunes of one base."""
    return _combine(None, tuned, lambda w0, w, name: _mean(w))


def greedy_soup(tuned: Sequence[Source], score: Callable[[Mapping[str, Tensor]], float]) -> dict[str, Tensor]:
    """The mean of those fine-tunes that, added in the order of their own scores, do not lower the score of the mean."""
    if not tuned:
        raise ValueError("there is no fine-tuned checkpoint")
    sources = [as_checkpoint(source, f"tuned {number}") for number, source in enumerate(tuned, 1)]
    scores = [score(source) for source in sources]
    order = sorted(range(len(sources)), key=lambda index: -scores[index])
    chosen: list[Checkpoint] = [sources[order[0]]]
    soup, best = uniform_soup(chosen), scores[order[0]]
    for index in order[1:]:
        candidate = uniform_soup([*chosen, sources[index]])
        if (value := score(candidate)) >= best:
            soup, best = candidate, value
            chosen.append(sources[index])
    return soup


def model_stock(base: Source, tuned: Sequence[Source]) -> dict[str, Tensor]:
    """W0 + t (mean W_i - W0) with t = N cos / (1 + (N - 1) cos), cos the mean cosine of the N >= 2 changes to the tensor, at least 0."""
    if len(tuned) < 2:
        raise ValueError(f"Model Stock needs at least two fine-tunes of one base, not {len(tuned)}")

    def rule(w0: Tensor, w: list[Tensor], name: str) -> Tensor:
        changes = [(value - w0).flatten() for value in w]
        cosines = [torch.nn.functional.cosine_similarity(x, y, dim=0) for x, y in itertools.combinations(changes, 2)]
        cosine = float(torch.stack(cosines).mean().clamp(0, 1))
        return torch.lerp(w0, _mean(w), len(w) * cosine / (1 + (len(w) - 1) * cosine))

    return _combine(base, tuned, rule)


def lines(base: Source, tuned: Source, alpha: float = 0.5, beta: float = 0.5) -> dict[str, Tensor]:
    """W0 + (alpha + beta l / (L - 1)) Delta in block l = 0 .. L - 1: shallow blocks go back towards the base.

    Embeddings count as the first block, heads and final norms as the last.
    """
    after = as_checkpoint(tuned, "tuned")
    depths = [int(found[1]) for name in after if (found := _BLOCK.search(name))]
    if not depths:
        raise InputError(f"'{after.label}' has no numbered blocks (layers.0., blocks.0., h.0.) to scale by depth")
    last = max(depths)

    def rule(w0: Tensor, w: list[Tensor], name: str) -> Tensor:
        found = _BLOCK.search(name)
        depth = int(found[1]) if found else (0 if _INPUT.search(name) else last)
        return torch.lerp(w0, w[0], alpha + beta * (depth / last if last else 1.0))

    return _combine(base, [after], rule)


def low_rank_truncate(base: Source, tuned: Source, k: int | None = None) -> dict[str, Tensor]:
    """W0 + the best rank-k part of Delta for every matrix; k=None takes MonoSoup's k, which leaves its strong part at full weight."""
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")

    def rule(w0: Tensor, w: list[Tensor], name: str) -> Tensor:
        if w0.ndim < 2 or torch.equal(w0, w[0]):
            return w[0]
        left, sigma, right = torch.linalg.svd((w[0] - w0).flatten(1), full_matrices=False)
        kept = weights_of(sigma).k if k is None else k
        return w0 + ((left[:, :kept] * sigma[:kept]) @ right[:kept]).reshape(w0.shape)

    return _combine(base, [tuned], rule)


def peft_linear(
    adapters: Sequence[Adapter], weights: Sequence[float] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of PEFT's `linear`: A and B averaged apart, sum_t sqrt(w_t s_t) A_t and the same of B, with weights of sum 1.

    A negative weight's root has its sign, in A. Raises ValueError where there is no such mean: for adapters of different ranks or
    layers, or with tensors beside the low-rank pairs, and for weights of sum 0.
    """
    modules, others = find_modules(list(adapters))
    ranks = {part.rank for module in modules for part in module.parts}
    if others or len(ranks) > 1 or any(len(module.parts) < len(adapters) for module in modules):
        raise ValueError("PEFT's linear merge needs adapters of one rank on the same layers, and nothing else in them")
    weights = [1.0] * len(adapters) if weights is None else list(weights)
    if sum(weights) == 0:
        raise ValueError("the weights add up to 0: they have no mean")
    state: dict[str, Tensor] = {}
    for module in modules:
        shares = [weights[part.adapter] / sum(weights) for part in module.parts]
        roots = [math.sqrt(abs(share) * part.scale) for share, part in zip(shares, module.parts, strict=True)]
        signs = [math.copysign(1.0, share) for share in shares]
        a = [adapters[part.adapter].finite(module.key_a).float() for part in module.parts]
        b = [adapters[part.adapter].finite(module.key_b).float() for part in module.parts]
        state[module.key_a] = sum(
            (root * sign * x for root, sign, x in zip(roots, signs, a, strict=True)), torch.zeros_like(a[0])
        )
        state[module.key_b] = sum((root * x for root, x in zip(roots, b, strict=True)), torch.zeros_like(b[0]))
    return merged_config(list(adapters), modules, ranks.pop(), None), state
