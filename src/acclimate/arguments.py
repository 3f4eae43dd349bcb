"""transformers' training arguments from a recipe: device, precision, batch, steps, schedule."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from acclimate.errors import InputError, MissingError
from acclimate.models import quiet
from acclimate.recipe import Recipe

# Peak learning rates that work for the built-in adapters with AdamW.
DEFAULT_LR = {"full": 5e-5, "frameft": 0.08}
DEFAULT_ADAPTER_LR = 1e-3
# What other optimisers want in place of AdamW's: for adapters, and for all weights.
OPTIMIZER_LR = {"muon": (5e-4, 5e-5), "lozo-plus": (1e-4, 1e-6)}
MANY_STEPS = 1_000_000  # where only the clock ends a run


def pick_device(name: str) -> str:
    """`auto` is the best there is; anything else is checked for being known and present."""
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in ("cpu", "cuda", "mps"):
        raise InputError(
            f"unknown device '{name}'. Known: auto, cpu, cuda, mps (choose one GPU with CUDA_VISIBLE_DEVICES)"
        )
    if name not in available:
        raise MissingError(f"device '{name}' is not here. Available: {', '.join(available)}. Use --set device=auto")
    return name


def pick_precision(name: str, device: str) -> str:
    """The compute type. `auto` is bf16 only on a GPU that has it; CPUs without native bf16 are tens of times slower in it."""
    if name == "auto":
        return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp16" and device == "cpu":
        raise InputError("precision fp16 does not train on a CPU. Use fp32 (or bf16 where the processor has it)")
    return name


def learning_rate(recipe: Recipe) -> float:
    if recipe.train.lr is not None:
        return recipe.train.lr
    if recipe.optimizer in OPTIMIZER_LR:
        return OPTIMIZER_LR[recipe.optimizer][recipe.adapter == "full"]
    return DEFAULT_LR.get(recipe.adapter, DEFAULT_ADAPTER_LR)


def batch_plan(recipe: Recipe, processes: int) -> tuple[int, int]:
    """(rows per process and forward pass, accumulation steps) that make up the recipe's global batch."""
    total = recipe.train.batch_size
    if total % processes:
        raise InputError(f"train.batch_size {total} is global and must divide by the {processes} processes")
    per_process = total // processes
    micro = recipe.train.micro_batch_size or per_process
    if per_process % micro:
        raise InputError(
            f"train.micro_batch_size {micro} must divide {per_process}, the rows per process of batch {total}"
        )
    return micro, per_process // micro


def planned_steps(recipe: Recipe, lengths: list[int]) -> int:
    """Optimiser steps of the whole run: max_steps, else as many as max_tokens allows on average, else the epochs'."""
    train = recipe.train
    if train.max_steps is not None:
        return train.max_steps
    steps = max(1, math.ceil(train.epochs * math.ceil(len(lengths) / train.batch_size)))
    if train.max_tokens is not None:
        steps = max(1, round(train.max_tokens / (train.batch_size * sum(lengths) / len(lengths))))
    elif train.max_seconds is not None:
        steps = MANY_STEPS
    return steps


def arguments(
    recipe: Recipe,
    directory: Path,
    lengths: list[int],
    *,
    kind: type[TrainingArguments] = TrainingArguments,
    **special: Any,
) -> TrainingArguments:
    """TrainingArguments (or a TRL subclass) of a recipe; `special` wins."""
    train = recipe.train
    device = pick_device(recipe.device)
    precision = pick_precision(train.precision, device)
    micro, accumulation = batch_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    steps = planned_steps(recipe, lengths)
    warmup = int(train.warmup * steps) if train.lr_schedule != "constant" else 0
    if train.max_seconds:
        warmup, save = 10, 50
    else:
        save = max(1, math.ceil(steps / 10))
    # TRL's arguments still know activation checkpointing by its old name, and turn it on unless told
    checkpointing: dict[str, Any] = {}
    if train.activation_checkpointing or kind is not TrainingArguments:
        name = "activation_checkpointing" if kind is TrainingArguments else "gradient_checkpointing"
        checkpointing = {name: train.activation_checkpointing, f"{name}_kwargs": {"use_reentrant": False}}
    values: dict[str, Any] = {
        "output_dir": str(directory / "checkpoints"),
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "learning_rate": learning_rate(recipe),
        # with a time budget nobody knows the number of steps, so nothing can decay towards its end
        "lr_scheduler_type": "constant_with_warmup" if train.max_seconds else train.lr_schedule,
        "warmup_steps": warmup,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "train_sampling_strategy": "group_by_length" if train.group_by_length else "random",
        "length_column_name": "length",
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **checkpointing,
        "torch_compile": train.compile,
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device == "cuda",
        "logging_steps": train.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a filtered nan is a nan nobody sees; RunTrainer stops on it
        "eval_strategy": "steps" if train.eval_every else "no",
        "eval_steps": train.eval_every,
        "save_strategy": "steps",
        "save_steps": train.save_every or save,
        "save_total_limit": train.keep_checkpoints,
        "report_to": train.report_to or "none",
        "run_name": directory.name,
        "disable_tqdm": True,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "ddp_find_unused_parameters": False,
    }
    with quiet():
        return kind(**{**values, **special})
