"""Claim of shift-aware whitening: whitening with the inputs that a layer will really see loses less than whitening with the original ones.

SmolLM2-135M-Instruct, WikiText-2: calibration windows from the validation text, evaluation windows from the test text (fixed, one after the
other, tokens 2 to 512 of each scored). All systems cut the same layers to the same ranks; only their coordinates differ:

    SVD               the weights' own
    ASVD              columns times mean|x|^(1/2) over the calibration tokens (arXiv 2312.05821, its alpha = 0.5)
    FWSVD             rows times the root of their summed squared gradients (arXiv 2207.00112)
    static whitening  inputs of the original model (SVD-LLM, arXiv 2403.07378): our code with refresh="none"
    shift-aware       inputs of the model as it has been compressed so far: beta = 0, which is the claim
    shift-aware, beta 0.5   the product's default

The loss of a window is the unit: systems are compared window by window, on the same windows, for each calibration text by itself. The
Cholesky solver is used throughout, which finds the same matrices as the default (a test says so) in a part of the time.

The second part starts a LoRA of rank 8 (q and v of the last 10 layers) on worked GSM8K problems at the default start and at role="principal".
Both take the rate 0.002, which the search of the claim `fisher-init` had found the best of three for the default start and for PiSSA.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acclimate import data, models
from acclimate.claims.base import Bar, Budget, Claim, Row
from acclimate.claims.gsm8k import problems
from acclimate.compress.blocks import choose_layers
from acclimate.compress.lora_start import init_lora
from acclimate.compress.low_rank_linear import LowRankLinear
from acclimate.compress.text import windows
from acclimate.compress.whitening import compress_low_rank, factors, uniform_rank
from acclimate.prefix import FrozenPrefixCache, blocks, suffix_model

STATIC, OURS, DEFAULT = "static whitening", "shift-aware", "shift-aware, beta 0.5"
LR, RANK = 2e-3, 8


@dataclass(frozen=True)
class Size:
    ratios: tuple[float, ...]
    calibrations: int  # texts drawn anew
    windows: int  # to calibrate on and to measure on
    length: int
    steps: int  # of the LoRA part
    seeds: int
    blocks: int | None  # how many of the model's blocks are there; None: all


SIZES: dict[str, Size] = {
    "fast": Size((0.2,), 1, 2, 48, 2, 1, 1),
    "default": Size((0.2, 0.4), 2, 8, 512, 100, 2, None),
    "full": Size((0.2, 0.4), 2, 16, 512, 150, 3, None),
}


def _loss(ratio: float, calibration: int) -> str:
    return f"loss at {ratio:g}, calibration {calibration}"


def _error(ratio: float, calibration: int) -> str:
    return f"error of the last hidden state at {ratio:g}, calibration {calibration}"


class ShiftAwareWhiteningClaim(Claim):
    name = method = "shift-aware-whitening"
    statement = (
        "At 20 and 40 % fewer parameters, whitening with the evolving inputs has a lower token loss and a lower error of the last hidden state than "
        "whitening with the original inputs, which is ahead of ASVD and FWSVD, and those of plain SVD; a LoRA started in whitened "
        "coordinates trains to a lower loss than the default start"
    )
    bars = (
        *(
            Bar(metric(ratio, calibration), OURS, STATIC, better="lower")
            for metric in (_loss, _error)
            for ratio in (0.2, 0.4)
            for calibration in (0, 1)
        ),
        *(
            Bar(_loss(ratio, 0), system, than, better="lower")
            for ratio in (0.2, 0.4)
            for system, than in ((STATIC, "ASVD"), (STATIC, "FWSVD"), ("ASVD", "SVD"), (DEFAULT, OURS))
        ),
        Bar("LoRA, mean loss of the last half", "principal start", "default start", better="lower"),
    )

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        size = SIZES[budget]
        model, tokenizer = load(size.blocks)
        held = windows(tokenizer, data.read_text("wikitext2", split="test"), size.windows, size.length)
        text = data.read_text("wikitext2", split="validation")
        judge = Judge(model, held)
        rows = [row for ratio in size.ratios for row in judge.rows("dense", ratio, 0, model, 0.0)[:1]]
        begun = time.perf_counter()
        ids = windows(tokenizer, text, size.windows, size.length, 0)
        peers = scalings(model, ids)
        preparation = {name: seconds for name, (_, _, seconds) in peers.items()}
        report(f"dense: perplexity {rows[0].extra['perplexity']:.2f}; scalings {time.perf_counter() - begun:.0f} s")
        for ratio in size.ratios:
            for name, (left, right, _) in peers.items():
                begun = time.perf_counter()
                compressed = scaled_svd(model, ratio, left, right)
                spent = time.perf_counter() - begun + preparation[name]
                rows += _said(judge.rows(name, ratio, 0, compressed, spent), report)
        for calibration in range(size.calibrations):
            ids = windows(tokenizer, text, size.windows, size.length, calibration)
            for ratio in size.ratios:
                arms: dict[str, dict[str, Any]] = {STATIC: {"refresh": "none", "beta": 0.0}, OURS: {"beta": 0.0}}
                if calibration == 0:
                    arms[DEFAULT] = {"beta": 0.5}
                for name, options in arms.items():
                    compressed = copy.deepcopy(model)
                    made = compress_low_rank(compressed, ids, ratio, solver="cholesky", progress=False, **options)
                    rows += _said(judge.rows(name, ratio, calibration, compressed, made.seconds), report)
                    del compressed
                    gc.collect()
        rows += perplexities(rows, size)
        del judge
        rows += lora_part(model, tokenizer, size, report)
        return rows


def load(count: int | None) -> tuple[Any, Any]:
    """SmolLM2 and its tokenizer, with the first `count` of its blocks; None: all."""
    model, tokenizer = models.load_model("smollm2")
    if count is not None:
        parent, name = blocks(model)
        setattr(parent, name, getattr(parent, name)[:count])
        model.config.num_hidden_layers = count
    return model.eval(), tokenizer


def _said(rows: list[Row], report: Callable[[str], None]) -> list[Row]:
    loss, error = rows
    report(f"{loss.system}, {loss.metric}: {loss.mean:.4f}, last state's error {error.mean:.4f}, {loss.seconds:.0f} s")
    return rows


class Judge:
    """Scores models window by window, next to the original's hidden states."""

    def __init__(self, model: Any, held: Tensor) -> None:
        self.held = held
        self.states = [self._run(model, window)[1] for window in held]

    @torch.no_grad()
    def _run(self, model: Any, window: Tensor) -> tuple[float, list[Tensor]]:
        """(mean loss of tokens 2 on, hidden states after each block, the last one after the final norm)."""
        output = model(input_ids=window[None], output_hidden_states=True)
        loss = nn.functional.cross_entropy(output.logits[0, :-1].float(), window[1:])
        return float(loss), [states[0] for states in output.hidden_states[1:]]

    def rows(self, system: str, ratio: float, calibration: int, model: Any, seconds: float) -> list[Row]:
        """Loss and error of the last hidden state, a value a window; the error after every block is in `extra`."""
        losses, errors = [], []
        for window, reference in zip(self.held, self.states, strict=True):
            loss, states = self._run(model, window)
            losses.append(loss)
            errors.append(
                [float(((x - y).norm(dim=1) / x.norm(dim=1)).mean()) for x, y in zip(reference, states, strict=True)]
            )
        places = list(range(len(losses)))
        parameters = sum(p.numel() for p in model.parameters())
        by_block = [round(statistics.fmean(column), 5) for column in zip(*errors, strict=True)]
        extra = {
            "perplexity": math.exp(statistics.fmean(losses)),
            "unit": "evaluation window",
            "error by block": by_block,
        }
        return [
            Row.from_values(
                system, _loss(ratio, calibration), losses, places, seconds=seconds, parameters=parameters, extra=extra
            ),
            Row.from_values(system, _error(ratio, calibration), [row[-1] for row in errors], places, seconds=seconds),
        ]


def perplexities(rows: list[Row], size: Size) -> list[Row]:
    """Perplexity over all windows by ratio, a value a calibration text."""
    found = []
    for ratio in size.ratios:
        metrics = {_loss(ratio, calibration): calibration for calibration in range(size.calibrations)}
        for system in dict.fromkeys(row.system for row in rows):
            own = {metrics[r.metric]: r.extra["perplexity"] for r in rows if r.system == system and r.metric in metrics}
            if own:
                found.append(Row.from_values(system, f"perplexity at {ratio:g}", list(own.values()), list(own)))
    return found


# --- peers ---


def scalings(model: Any, ids: Tensor) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], float]]:
    """{system: (row scales (m,) by layer, column scales (n,) by layer, seconds to find them)}; a missing layer has none."""
    layers, _ = choose_layers(model, "all-linear", ("lm_head",))
    sums: dict[str, Tensor] = {}
    begun = time.perf_counter()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + args[0].detach().abs().flatten(0, -2).sum(0)

        return hook

    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for window in ids:
            model(input_ids=window[None])
    for handle in handles:
        handle.remove()
    columns = {name: (total / ids.numel()).sqrt().double().clamp_min(1e-6) for name, total in sums.items()}
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    model.requires_grad_(False)
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    squares: dict[str, Tensor] = {}
    for window in ids:
        model(input_ids=window[None], labels=window[None]).loss.backward()
        for name, layer in layers.items():
            assert layer.weight.grad is not None
            squares[name] = squares.get(name, 0) + layer.weight.grad.double().square().sum(1)
            layer.weight.grad = None
    model.requires_grad_(True)
    rows = {name: total.sqrt().clamp_min(1e-12) for name, total in squares.items()}
    return {"SVD": ({}, {}, 0.0), "ASVD": ({}, columns, seconds), "FWSVD": (rows, {}, time.perf_counter() - begun)}


def scaled_svd(model: Any, ratio: float, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Any:
    """A copy of the model whose layers are D_l^-1 (best rank-r approximation of D_l W D_r) D_r^-1."""
    compressed = copy.deepcopy(model)
    layers, _ = choose_layers(compressed, "all-linear", ("lm_head",))
    for name, layer in layers.items():
        W = layer.weight.detach().double()
        one, other = (
            side.get(name, torch.ones(size, dtype=torch.float64))
            for side, size in zip((left, right), W.shape, strict=True)
        )
        B, A, _ = factors(one[:, None] * W * other, torch.diag(1 / other), uniform_rank(W.shape[0], W.shape[1], ratio))
        low = LowRankLinear.from_factors((B / one[:, None]).to(layer.weight), A.to(layer.weight), layer.bias)
        compressed.set_submodule(name, low)
    return compressed


# --- LoRA ---


def lora_part(model: Any, tokenizer: Any, size: Size, report: Callable[[str], None]) -> list[Row]:
    from peft import LoraConfig, get_peft_model

    n_last = min(10, model.config.num_hidden_layers)
    batch_size, steps = 4, size.steps
    chosen = problems(tokenizer, batch_size * steps)
    cache = FrozenPrefixCache(model, n_last, [ids for ids, _ in chosen])
    suffix = suffix_model(model, n_last)
    found: dict[str, dict[str, list[float]]] = {}
    for start in ("default start", "principal start"):
        found[start] = {"mean": [], "seconds": []}
        for seed in range(size.seeds):
            torch.manual_seed(seed)
            lora: Any = get_peft_model(
                copy.deepcopy(suffix), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"])
            )
            order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).tolist()
            parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
            begun = time.perf_counter()
            if start == "principal start":
                init_lora(lora, [cache.batch(part) for part in parts[: max(1, len(parts) // 4)]])
            losses = train(lora, cache, chosen, parts)
            found[start]["mean"].append(statistics.fmean(losses[len(losses) // 2 :]))
            found[start]["seconds"].append(time.perf_counter() - begun)
            report(f"LoRA, {start}, seed {seed}: {found[start]['mean'][-1]:.4f} in {found[start]['seconds'][-1]:.0f} s")
    seeds = list(range(size.seeds))
    return [
        Row.from_values(
            start,
            "LoRA, mean loss of the last half",
            values["mean"],
            seeds,
            seconds=statistics.fmean(values["seconds"]),
            extra={"learning_rate": LR, "steps": steps},
        )
        for start, values in found.items()
    ]


def train(
    lora: Any, cache: FrozenPrefixCache, chosen: list[tuple[list[int], int]], parts: list[list[int]], lr: float = LR
) -> list[float]:
    """Loss on the answers' tokens at each step."""
    optimiser = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 4))
    losses = []
    lora.train()
    for part in parts:
        batch = cache.batch(part)
        labels = torch.full(batch["attention_mask"].shape, -100)
        for place, index in enumerate(part):
            ids, begin = chosen[index]
            labels[place, begin : len(ids)] = torch.tensor(ids[begin:])
        loss = lora(**batch, labels=labels).loss
        loss.backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


CLAIM = ShiftAwareWhiteningClaim()
