"""What merging and souping cost next to other ways. Ratios in one run, the systems taking turns.

    python benchmarks/merge.py            # about fifteen minutes on two idle cores, and 7 GB of disk
    python benchmarks/merge.py --fast     # a smoke test with small sizes
    python benchmarks/merge.py --part memory --output benchmarks/merge.json

1. Merging eight adapters of rank 16 from files to a file (rule tsv): the sketch, the Gram basis, Core Space and KnOTS (written in
   acclimate.claims.circumerge as published) on the shapes of SmolLM2-135M and of layers of width 4,096; and PEFT's `svd` type in memory.
2. MonoSoup's edit of one matrix next to a float32 and a float64 SVD with the same edit, of all of MiniLM, and of a LoRA of rank 16 of a
   model of 7 billion weights.
3. The shared linear algebra next to torch.linalg.svd and eigh.
4. Peak memory of `acclimate soup` and `acclimate merge` on 2 GB, measured by /usr/bin/time, beside the same on next to nothing.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import measure_parts, peak, take_turns
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate.claims.circumerge import DOMAINS, RANK, SMALL, WIDE, block, merge_times, random_adapter
from acclimate.linalg import eigh_descending, leading_eigh, polar_factor
from acclimate.merge.monosoup import SoupSettings, monosoup, soup_delta, soup_lora, weights_of

TASKS = len(DOMAINS)
SHARD = 2**28  # bytes


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- 1. merging ---


def merging(shapes: dict[str, tuple[int, int]], blocks: int, rounds: int, with_knots: bool) -> dict[str, Any]:
    found = merge_times(shapes, blocks, rounds, with_knots)
    milliseconds = {system: sorted(values)[len(values) // 2] for system, values in found.items()}
    milliseconds["peft svd"] = peft_svd(shapes)
    return {
        "blocks": blocks,
        "ms_per_block": milliseconds,
        "over_core_space": {system: value / milliseconds["core space"] for system, value in milliseconds.items()},
        "over_peft_svd": {system: value / milliseconds["peft svd"] for system, value in milliseconds.items()},
    }


def peft_svd(shapes: dict[str, tuple[int, int]]) -> float:
    """Milliseconds of PEFT's add_weighted_adapter of type svd for one block that is in memory."""
    layers = nn.ModuleDict({name: nn.Linear(n, m, bias=False) for name, (m, n) in shapes.items()})
    config = LoraConfig(r=RANK, target_modules=list(shapes), init_lora_weights=False)
    model = get_peft_model(layers, config, adapter_name="0")
    for task in range(1, TASKS):
        model.add_adapter(str(task), config)
    start = time.perf_counter()
    model.add_weighted_adapter(
        [str(task) for task in range(TASKS)], [1.0] * TASKS, "all", "svd", svd_full_matrices=False
    )
    return 1000 * (time.perf_counter() - start)


# --- 2. souping ---


def edit_by_svd(delta: Tensor) -> Tensor:
    """MonoSoup's edit by a full SVD in the precision of `delta`."""
    left, sigma, right = torch.linalg.svd(delta, full_matrices=False)
    edit = weights_of(sigma)
    high = (left[:, : edit.k] * sigma[: edit.k]) @ right[: edit.k]
    return high.mul_(edit.lambda_high - edit.lambda_low).add_(delta, alpha=edit.lambda_low)


def one_matrix(size: int, rounds: int) -> dict[str, Any]:
    delta = random(size, size) * torch.arange(1, size + 1) ** -0.5
    times = take_turns(
        {
            "auto": lambda: soup_delta(delta),
            "svd, float32": lambda: edit_by_svd(delta),
            "svd, float64": lambda: edit_by_svd(delta.double()),
        },
        rounds,
    )
    exact = edit_by_svd(delta.double())
    gap = {
        "auto": soup_delta(delta)[0],
        "svd, float32": edit_by_svd(delta).double(),
    }
    return {
        "size": size,
        "ms": times["ms"],
        "svd_float32_over_auto": times["ratio"]["svd, float32"],
        "svd_float64_over_auto": times["ratio"]["svd, float64"],
        "relative_error": {name: float((value - exact).norm() / exact.norm()) for name, value in gap.items()},
    }


def whole_model() -> float:
    """Seconds of MonoSoup on all of MiniLM."""
    from acclimate.models import load_model

    base = load_model("minilm", auto_class="AutoModel")[0].state_dict()
    tuned = {
        name: value + 0.01 * random(*value.shape) if value.is_floating_point() else value
        for name, value in base.items()
    }
    return monosoup(base, tuned)[1].totals["seconds"]


def adapter_seconds(layers: int, width: int) -> float:
    """Seconds of the edit of the factors of a LoRA of rank 16 on the seven linear layers of each block."""
    pairs = [(random(RANK, n), random(m, RANK)) for m, n in block(width, width, width * 43 // 16).values()]
    start = time.perf_counter()
    for _ in range(layers):
        for a, b in pairs:
            soup_lora(a, b, 1.0, SoupSettings())
    return time.perf_counter() - start


# --- 3. linear algebra ---


def linear_algebra(size: int, columns: int, rounds: int) -> dict[str, Any]:
    tall, square = random(size, columns).double(), random(size, size).double()
    symmetric = square @ square.T

    def polar_by_svd() -> Tensor:
        left, _, right = torch.linalg.svd(tall, full_matrices=False)
        return left @ right

    groups: dict[str, dict[str, Callable[[], Any]]] = {
        f"polar factor of {size} x {columns}": {"ours": lambda: polar_factor(tall), "svd": polar_by_svd},
        f"{columns} leading eigenpairs of {size} x {size}": {
            "ours": lambda: leading_eigh(symmetric, columns),
            "eigh": lambda: eigh_descending(symmetric),
            "svd": lambda: torch.linalg.svd(symmetric),
        },
    }
    return {name: take_turns(steps, rounds) for name, steps in groups.items()}


# --- 4. memory ---


def checkpoint(place: Path, tensors: int, shape: tuple[int, int], seed: int) -> Path:
    """A directory of safetensors shards with an index."""
    place.mkdir()
    names = [f"layers.{number}.weight" for number in range(tensors)]
    each = max(1, SHARD // (4 * math.prod(shape)))
    where: dict[str, str] = {}
    for start in range(0, tensors, each):
        part = names[start : start + each]
        file = f"model-{start:05d}.safetensors"
        save_file({name: random(*shape, seed=seed + start + i) for i, name in enumerate(part)}, place / file)
        where |= dict.fromkeys(part, file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return place


def soup_memory(tensors: int, shape: tuple[int, int]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base, tuned = (checkpoint(place / name, tensors, shape, seed) for seed, name in enumerate(("base", "tuned")))
        return peak(["soup", str(base), str(tuned), "-o", str(place / "soup")])


def merge_memory(width: int, blocks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shapes = block(width, width, 2 * width)
        adapters = [random_adapter(place / str(task), shapes, blocks, task) for task in range(TASKS)]
        return peak(["merge", *map(str, adapters), "-o", str(place / "merged")])


def memory() -> dict[str, Any]:
    """Megabytes for 2 GB of weights in each of two checkpoints, and 2 GB of adapters, and above what next to nothing takes."""
    shape = (1024, 4096)
    soup, merge = soup_memory(128, shape), merge_memory(4096, 60)
    return {
        "soup_peak_rss_mb": soup,
        "soup_above_nothing_mb": soup - soup_memory(1, (8, 8)),
        "soup_largest_tensor_float64_mb": 8 * math.prod(shape) / 1e6,
        "merge_peak_rss_mb": merge,
        "merge_above_nothing_mb": merge - merge_memory(16, 1),
    }


def soups() -> dict[str, Any]:
    return {
        "matrices": [one_matrix(2048, 3), one_matrix(3072, 1)],
        "minilm_seconds": whole_model(),
        "lora_7b_seconds": adapter_seconds(32, 4096),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "merge": lambda: {"smollm2": merging(SMALL, 30, 5, True), "width_4096": merging(WIDE, 2, 5, False)},
    "soup": soups,
    "linear_algebra": lambda: linear_algebra(2048, 32, 5),
    "memory": memory,
}
FAST: dict[str, Callable[[], dict[str, Any]]] = {
    "merge": lambda: {"tiny": merging(block(48, 32, 96), 1, 1, True)},
    "soup": lambda: {"matrices": [one_matrix(64, 1)], "minilm_seconds": None, "lora_7b_seconds": None},
    "linear_algebra": lambda: linear_algebra(64, 8, 1),
    "memory": lambda: {"soup_peak_rss_mb": soup_memory(2, (64, 64)), "merge_peak_rss_mb": merge_memory(32, 1)},
}

if __name__ == "__main__":
    both: dict[str, Callable[[bool], Any]] = {
        name: lambda fast, name=name: (FAST if fast else PARTS)[name]() for name in PARTS
    }
    measure_parts(__doc__, both, {"threads": torch.get_num_threads(), "torch": torch.__version__})
