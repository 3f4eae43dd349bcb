"""Claim of `circumerge`: as good as the best subspace mergers, in little more than half of their time.

Eight domains of CLINC150 (15 intents each) are eight tasks. MiniLM-L6 with text heads (acclimate.claims.zero_shot) learns each with a
LoRA of rank 16 on all linear layers, 100 steps of 32 sentences; three seeds. Each merger makes one adapter of the eight with each of
six rules: CircuMerge (the sketch, `basis="circulant"`; also with `refine=0`), the Gram basis, Core Space and KnOTS, the last two
written here as published, in float64. PEFT's own types have their own rules. All are cut to the inputs' rank 16, and those that can
also leave nothing out (rank 128). Rule and scale are chosen for each merger on validation sentences, from the same values.

Measured is the mean over tasks of accuracy / accuracy of the task's own adapter, on test sentences; and accuracy over all 120 intents
at once. An adapter that equals one that was scored already to 1e-4 of its norm has the same score. Effective rank and quality are
correlated over CircuMerge's rules, cut and uncut, with both values of `refine`.

Time is that of reading, merging (rule tsv) and writing eight adapters of random numbers, with the shapes of SmolLM2-135M and of
layers of width 4,096; a round has one merge of each.

Sources: Core Space, arXiv 2509.17786; KnOTS, arXiv 2410.19735. The full text of CircuMerge was not at hand; the published experiments
are ViT and Llama-3-8B.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor

from acclimate import data, models
from acclimate.claims import zero_shot
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.claims.zero_shot import Sentences
from acclimate.merge import merge_adapters, plan_merge, rules
from acclimate.merge.adapter_files import CONFIG, PREFIX, WEIGHTS
from acclimate.merge.adapters import merge_in_memory

DOMAINS = ("banking", "credit_cards", "kitchen_and_dining", "home", "auto_and_commute", "travel", "utility", "work")
INTENTS, RANK, LR = 15, 16, 1e-3
RULES = ("sum", "ties", "dare_ties", "tsv", "iso", "tsv_iso")
DENSITY, DROP = 0.3, 0.3
SCALES = (0.3, 0.6, 0.9, 1.2, 1.5)
OURS: dict[str, dict[str, Any]] = {
    "circumerge": {"basis": "circulant"},
    "circumerge, refine 0": {"basis": "circulant", "refine": 0},
    "gram": {"basis": "gram"},
}
PEFT_TYPES = ("linear", "svd", "ties_svd", "dare_ties_svd")
SAME = 1e-4

Deltas = dict[str, Tensor]  # the change of each layer
Pairs = list[tuple[Tensor, Tensor]]  # (B_t, A_t) of the tasks for a layer


@dataclass(frozen=True)
class Size:
    domains: int
    steps: int
    seeds: tuple[int, ...]
    rules: tuple[str, ...]
    scales: tuple[float, ...]
    validation: int  # sentences of an intent
    test: int
    shapes: dict[str, dict[str, tuple[int, int]]]  # of the layers of a block, by what it is called
    blocks: dict[str, int]  # of the merges that are timed
    rounds: int
    slow: tuple[str, ...]  # shapes on which KnOTS is timed too, once and with one block
    adapted: str = "all layers"


def block(width: int, key: int, inner: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a Llama block."""
    sizes = {"q": (width, width), "k": (key, width), "v": (key, width), "o": (width, width)}
    return {**sizes, "gate": (inner, width), "up": (inner, width), "down": (width, inner)}


SMALL, WIDE = block(576, 192, 1536), block(4096, 4096, 11008)
BOTH = {"smollm2": SMALL, "width_4096": WIDE}
SIZES: dict[str, Size] = {
    "fast": Size(2, 2, (0,), ("sum", "tsv"), (1.0,), 1, 1, {"smollm2": block(48, 32, 96)}, {"smollm2": 1}, 1, ("smollm2",), "one layer"),
    "default": Size(8, 100, (0, 1, 2), RULES, SCALES, 4, 15, BOTH, {"smollm2": 10, "width_4096": 1}, 5, ("smollm2",)),
    "full": Size(8, 100, (0, 1, 2), RULES, SCALES, 20, 30, BOTH, {"smollm2": 30, "width_4096": 8}, 5, tuple(BOTH)),
}  # fmt: skip


class CircuMergeClaim(Claim):
    name = "circumerge"
    method = "circumerge"
    statement = (
        "CircuMerge takes at most 0.56 of the time of Core Space and of KnOTS for the same rule, its merged adapter is at most half a "
        "point (normalised accuracy) behind the better of them and not behind PEFT's best, and the effective rank of the merged layers "
        "predicts the quality (Spearman's rho of at least 0.5)"
    )
    bars = (
        Bar("smollm2_ms_per_block", "circumerge", than="core space", better="lower", kind="ratio", limit=0.56),
        Bar("smollm2_ms_per_block", "circumerge", than="knots", better="lower", kind="ratio", limit=0.56),
        Bar("width_4096_ms_per_block", "circumerge", than="core space", better="lower", kind="ratio", limit=0.56),
        Bar("normalised_accuracy", "circumerge", than="better of core space and knots", limit=-0.005),
        Bar("normalised_accuracy_uncut", "circumerge", than="better of core space and knots", limit=-0.005),
        Bar("normalised_accuracy", "circumerge", than="best of peft"),
        Bar("spearman_effective_rank", "circumerge", limit=0.5),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        rows = quality(size, report)
        for name, shapes in size.shapes.items():
            report(f"time of merging, {name}")
            for system, values in merge_times(shapes, size.blocks[name], size.rounds, name in size.slow).items():
                rows.append(Row.from_values(system, f"{name}_ms_per_block", values, list(range(len(values)))))
                report(f"{system}: {statistics.median(values):.1f} ms a block")
        return rows


# --- quality ---


@dataclass(frozen=True)
class Score:
    """Of a merged adapter: mean over tasks of accuracy / own adapter's accuracy, and accuracy over all intents."""

    normalised: float
    joint: float


@dataclass(frozen=True)
class Candidate:
    """What a merger made with one rule, at the scale that was best on validation."""

    rule: str
    scale: float
    validation: float
    test: Score


def quality(size: Size, report: Callable[[str], None]) -> list[Row]:
    seeds, rows = list(size.seeds), []
    chosen: dict[tuple[str, str], list[Candidate]] = {}  # (system, metric) -> of each seed
    correlations, untouched = [], []
    for seed in seeds:
        report(f"seed {seed}: training {size.domains} adapters")
        paths = [trained_adapter(size, task, seed) for task in range(size.domains)]
        bench = Bench(size, paths)
        untouched.append(bench.score({}, 0.0, bench.test, bench.own_test))
        spaces = {"core space": spaces_of(paths, core_space), "knots": spaces_of(paths, knots)}
        points: list[tuple[float, float]] = []
        for metric, rank in (("normalised_accuracy", RANK), ("normalised_accuracy_uncut", RANK * len(paths))):
            made: dict[str, list[Candidate]] = {}
            for rule in size.rules:
                for system, options in OURS.items():
                    deltas, erank = ours(paths, rule, rank, options)
                    made.setdefault(system, []).append(bench.candidate(rule, deltas))
                    if system.startswith("circumerge"):
                        points.append((erank, made[system][-1].test.normalised))
                for system, layers in spaces.items():
                    deltas = {name: product(*space.merge(rule, name, rank)) for name, space in layers.items()}
                    made.setdefault(system, []).append(bench.candidate(rule, deltas))
            made["better of core space and knots"] = made["core space"] + made["knots"]
            if rank == RANK:
                for kind, deltas in peft_merges(paths, seed):
                    made[f"peft {kind}"] = [bench.candidate(kind, deltas)]
                    made.setdefault("best of peft", []).extend(made[f"peft {kind}"])
            for one in made["circumerge"]:
                made[f"circumerge, {one.rule}"] = [one]
            for system, candidates in made.items():
                best = max(candidates, key=lambda one: one.validation)
                chosen.setdefault((system, metric), []).append(best)
                report(f"{system}, {metric}: {best.test.normalised:.4f} ({best.rule}, scale {best.scale:g})")
        correlations.append(float(spearmanr(points).statistic))
    for (system, metric), found in chosen.items():
        extra = {"rules": [one.rule for one in found], "scales": [one.scale for one in found]}
        rows.append(Row.from_values(system, metric, [one.test.normalised for one in found], seeds, extra=extra))
        joint = metric.replace("normalised", "joint")
        rows.append(Row.from_values(system, joint, [one.test.joint for one in found], seeds, extra=extra))
    rows.append(Row.from_values("base", "normalised_accuracy", [one.normalised for one in untouched], seeds))
    rows.append(Row.from_values("base", "joint_accuracy", [one.joint for one in untouched], seeds))
    rows.append(Row.from_values("circumerge", "spearman_effective_rank", correlations, seeds))
    return sorted(rows, key=lambda row: row.metric != "normalised_accuracy")  # this one is plotted


class Bench:
    """Scores changes of the encoder on the tasks of one seed."""

    def __init__(self, size: Size, paths: Sequence[Path]) -> None:
        self.scales = size.scales
        self.validation = sentences("validation", range(size.domains), size.validation)
        self.test = sentences("test", range(size.domains), size.test)
        self.own_validation: list[float] = []
        self.own_test: list[float] = []
        for task, path in enumerate(paths):
            change = {name: product(b, a) for name, (b, a) in pairs_of(load_file(path / WEIGHTS)).items()}
            for examples, own in ((self.validation, self.own_validation), (self.test, self.own_test)):
                mine = examples.part([i for i, label in enumerate(examples.labels) if label // INTENTS == task])
                own.append(accuracies(change, 1.0, mine)[0][task])
        self.known: list[tuple[Deltas, float, Candidate]] = []

    def candidate(self, rule: str, deltas: Deltas) -> Candidate:
        """The best scale by validation, and its score on test; those of an equal adapter where there was one."""
        size = norm(deltas)
        for other, other_size, found in self.known:
            if abs(size - other_size) < SAME * size:
                gap = norm({name: value - other[name] for name, value in deltas.items()})
                if gap < SAME * size:
                    return Candidate(rule, found.scale, found.validation, found.test)
        tried = {s: self.score(deltas, s, self.validation, self.own_validation).normalised for s in self.scales}
        scale = max(tried, key=tried.__getitem__)
        found = Candidate(rule, scale, tried[scale], self.score(deltas, scale, self.test, self.own_test))
        self.known.append((deltas, size, found))
        return found

    def score(self, deltas: Deltas, scale: float, examples: Sentences, own: Sequence[float]) -> Score:
        tasks, joint = accuracies(deltas, scale, examples)
        return Score(statistics.fmean(a / b for a, b in zip(tasks, own, strict=True)), joint)


def norm(deltas: Deltas) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in deltas.values()))


def accuracies(deltas: Deltas, scale: float, examples: Sentences) -> tuple[list[float], float]:
    """Accuracy of each task among its own intents, and of all among all, of the encoder changed by scale * deltas."""
    model = zero_shot.fresh()
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_submodule(name).weight.add_(delta.float(), alpha=scale)
    similar = zero_shot.embed_all(model, examples.ids) @ examples.heads.T
    right = similar.argmax(1) == examples.labels
    tasks = []
    for start in range(0, len(examples.heads), INTENTS):
        mine = examples.labels // INTENTS == start // INTENTS
        answers = start + similar[mine, start : start + INTENTS].argmax(1)
        tasks.append(float((answers == examples.labels[mine]).double().mean()))
    return tasks, float(right.double().mean())


def sentences(split: str, tasks: Sequence[int], each: int | None = None) -> Sentences:
    names = zero_shot.intents([DOMAINS[task] for task in tasks])
    return zero_shot.sentences(data.read_table("clinc150", split=split).rows, names, each)


def trained_adapter(size: Size, task: int, seed: int) -> Path:
    """The PEFT directory of a task's adapter, made when it is not in the cache."""
    from peft import LoraConfig, get_peft_model

    def make(place: Path) -> None:
        torch.manual_seed(1000 * seed + task)
        config = LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            target_modules=["query", "key", "value", "dense"],
            exclude_modules=["pooler.dense"],
            layers_to_transform=[0] if size.adapted == "one layer" else None,
        )
        model = get_peft_model(zero_shot.fresh(), config)
        zero_shot.fine_tune(model, sentences("train", [task]), size.steps, LR, 1000 * seed + task)
        with models.quiet():
            model.save_pretrained(str(place))

    settings: dict[str, Any] = {"domain": DOMAINS[task], "steps": size.steps, "lr": LR, "rank": RANK, "seed": seed}
    if size.adapted != "all layers":
        settings["adapted"] = size.adapted
    return zero_shot.cached("circumerge", settings, make)


# --- mergers ---


def pairs_of(state: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(B, A) by layer of an adapter whose scale is 1."""
    names = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    return {
        name.removeprefix(PREFIX): (state[f"{name}.lora_B.weight"], state[f"{name}.lora_A.weight"]) for name in names
    }


def product(b: Tensor, a: Tensor) -> Tensor:
    return b.double() @ a.double()


def ours(paths: Sequence[Path], rule: str, rank: int, options: dict[str, Any]) -> tuple[Deltas, float]:
    """What `acclimate merge` makes, and the mean effective rank of its layers."""
    plan = plan_merge(paths, rule=rule, rank=rank, density=DENSITY, drop=DROP, **options)
    _, state, report = merge_in_memory(plan)
    return {name: product(b, a) for name, (b, a) in pairs_of(state).items()}, report.totals["erank_out"]


def peft_merges(paths: Sequence[Path], seed: int) -> Iterator[tuple[str, Deltas]]:
    """Each of PEFT's types, with the change it makes."""
    from peft import PeftModel

    names = [str(task) for task in range(len(paths))]
    model: Any = PeftModel.from_pretrained(zero_shot.fresh(), str(paths[0]), adapter_name="0")
    for name, path in zip(names[1:], paths[1:], strict=True):
        model.load_adapter(str(path), name)
    for kind in PEFT_TYPES:
        torch.manual_seed(seed)
        density = {"density": 1 - DROP if "dare" in kind else DENSITY} if "ties" in kind else {}
        full = {"svd_full_matrices": False} if "svd" in kind else {}
        model.add_weighted_adapter(names, [1.0] * len(names), kind, combination_type=kind, **density, **full)
        layers = ((name, module) for name, module in model.get_base_model().named_modules())
        yield (
            kind,
            {
                name: module.get_delta_weight(kind).detach().double()
                for name, module in layers
                if hasattr(module, "get_delta_weight")
            },
        )


@dataclass(frozen=True)
class Space:
    """Tasks of a layer in a common space: Delta_t = left task_t right, all float64."""

    left: Tensor
    tasks: list[Tensor]
    right: Tensor | None  # None: the tasks have the layer's own inputs

    def merge(self, rule: str, name: str, rank: int) -> tuple[Tensor, Tensor]:
        """(B, A) of the merged change, cut to a rank."""
        tasks = [task[None] for task in self.tasks]
        left, sigma, right = torch.linalg.svd(merged(rule, tasks, name)[0], full_matrices=False)
        half = sigma[:rank].sqrt()
        a = half[:, None] * right[:rank]
        return self.left @ (left[:, :rank] * half), a if self.right is None else a @ self.right


def merged(rule: str, tasks: list[Tensor], name: str) -> Tensor:
    """The rule on the tasks' matrices (1, p, q) as they are."""
    if rule in ("ties", "dare_ties"):
        if rule == "ties":
            return rules.elect([rules.trim(task, DENSITY) for task in tasks])
        return rules.elect([rules.drop_randomly(task, DROP, f"0:{t}", [name]) for t, task in enumerate(tasks)])
    if rule.startswith("tsv"):
        unit = torch.eye(tasks[0].shape[-2], dtype=torch.float64)[None]
        total = rules.task_singular_vectors([unit] * len(tasks), [task.mT for task in tasks])
    else:
        total = torch.stack(tasks).sum(0)
    return rules.isotropic(total) if rule.endswith("iso") else total


def core_space(pairs: Pairs) -> Space:
    """Core Space: reference bases from the SVDs of all B side by side and all A on each other, tasks through their own SVDs."""
    left = torch.linalg.svd(torch.cat([b for b, _ in pairs], 1).double(), full_matrices=False).U
    right = torch.linalg.svd(torch.cat([a for _, a in pairs], 0).double(), full_matrices=False).Vh
    tasks = []
    for b, a in pairs:
        ub, sb, vb = torch.linalg.svd(b.double(), full_matrices=False)
        ua, sa, va = torch.linalg.svd(a.double(), full_matrices=False)
        tasks.append((left.T @ ub) @ (sb[:, None] * (vb @ ua) * sa) @ (va @ right.T))
    return Space(left, tasks, right)


def knots(pairs: Pairs) -> Space:
    """KnOTS: the SVD of the full changes side by side, U Sigma [V_1 .. V_T]; the tasks are Sigma V_t."""
    left, sigma, right = torch.linalg.svd(torch.cat([product(b, a) for b, a in pairs], 1), full_matrices=False)
    keep = sigma > 1e-5
    scaled = sigma[keep, None] * right[keep]
    return Space(left[:, keep], list(scaled.chunk(len(pairs), 1)), None)


def spaces_of(paths: Sequence[Path], method: Callable[[Pairs], Space]) -> dict[str, Space]:
    adapters = [pairs_of(load_file(path / WEIGHTS)) for path in paths]
    return {name: method([adapter[name] for adapter in adapters]) for name in adapters[0]}


# --- time ---


def merge_times(
    shapes: dict[str, tuple[int, int]], blocks: int, rounds: int, with_knots: bool
) -> dict[str, list[float]]:
    """Milliseconds a block of reading, merging and writing eight adapters, one value a round, the systems taking turns.

    KnOTS, whose time is another order, has one round and one block.
    """

    def published(method: Callable[[Pairs], Space], paths: Sequence[Path], out: Path) -> None:
        state = {}
        for name, space in spaces_of(paths, method).items():
            b, a = space.merge("tsv", name, RANK)
            for key, value in (("lora_B", b), ("lora_A", a)):
                state[f"{PREFIX}{name}.{key}.weight"] = value.float().contiguous()
        save_file(state, out)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        paths = [random_adapter(place / str(task), shapes, blocks, task) for task in range(len(DOMAINS))]

        steps: dict[str, Callable[[], Any]] = {
            system: partial(merge_adapters, paths, place / "merged", overwrite=True, **options)
            for system, options in OURS.items()
        }
        steps["core space"] = partial(published, core_space, paths, place / "core")
        found: dict[str, list[float]] = {system: [] for system in steps}
        for number in range(rounds + 1):  # the first fills caches and is not counted
            for system, step in steps.items():
                start = time.perf_counter()
                step()
                if number:
                    found[system].append(1000 * (time.perf_counter() - start) / blocks)
        if with_knots:
            paths = [random_adapter(place / f"one-{task}", shapes, 1, task) for task in range(len(DOMAINS))]
            start = time.perf_counter()
            published(knots, paths, place / "knots")
            found["knots"] = [1000 * (time.perf_counter() - start)]
    return found


def random_adapter(place: Path, shapes: dict[str, tuple[int, int]], blocks: int, seed: int) -> Path:
    """A PEFT directory of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for number in range(blocks):
        for name, (m, n) in shapes.items():
            key = f"{PREFIX}layers.{number}.{name}_proj"
            state[f"{key}.lora_A.weight"] = torch.randn(RANK, n, generator=generator) / math.sqrt(n)
            state[f"{key}.lora_B.weight"] = torch.randn(m, RANK, generator=generator) / math.sqrt(m)
    place.mkdir()
    save_file(state, place / WEIGHTS)
    targets = [f"{name}_proj" for name in shapes]
    (place / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets})
    )
    return place


CLAIM = CircuMergeClaim()
