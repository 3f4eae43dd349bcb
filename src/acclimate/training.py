"""What every task's trainer shares: arguments from a recipe, atomic checkpoints, and stopping for good reasons.

The loop is transformers' Trainer (and TRL's trainers, which extend it). `RunTrainer` is a mixin in front of one of them.
Scale: under `accelerate launch` every process runs the loop, rank 0 writes; `batch_size` stays the global batch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from acclimate import methods
from acclimate.errors import AcclimateError, InputError, MissingError
from acclimate.models import quiet
from acclimate.recipe import Recipe
from acclimate.runs import PARTIAL, Interrupted, last_checkpoint, replacing, storage_errors, write_jsonl

# Peak learning rates that work for the built-in adapters; a method's own `suggest_lr` comes first.
DEFAULT_LR = {"full": 5e-5}
DEFAULT_ADAPTER_LR = 1e-3
MANY_STEPS = 1_000_000  # where only the clock ends a run


class DivergedError(AcclimateError):
    """The loss or a trained weight is not a finite number."""

    exit_code = 2


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


# A mixin for transformers' Trainer and TRL's: to the type checker it is one, at run time it stays out of their ancestry.
if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class RunTrainer(_Base):
    """Mixin in front of a transformers Trainer class: what makes its runs safe to kill, watch and resume.

    * a checkpoint appears whole or not at all (filled beside its place, renamed);
    * `metrics.jsonl` grows line by line and, on resume, is cut back to the checkpoint;
    * a loss or weight that is not finite stops the run before it can be saved;
    * Ctrl-C, SIGTERM and budgets end the run at a step boundary, with a checkpoint.
    """

    def __init__(self, *args: Any, recipe: Recipe, run_directory: Path, show: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        self.run_directory = run_directory
        self.checkpoints = run_directory / "checkpoints"
        self.watch = _Watch(self, show)
        self.add_callback(self.watch)
        self.remove_callback(PrinterCallback)  # it prints every log line as a dictionary
        self._directory_now: str | None = None

    # --- optimiser from the methods table ---

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.recipe.optimizer != "adamw":
            row = methods.find(self.recipe.optimizer, "optimizer")
            kind = methods.require(self.recipe.optimizer, "optimizer")
            options = {**row.defaults, **self.recipe.optimizer_args}
            self.optimizer_cls_and_kwargs = (kind, {"lr": self.args.learning_rate, **options})
        elif self.optimizer is None and self.recipe.optimizer_args:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer_cls_and_kwargs = (kind, {**options, **self.recipe.optimizer_args})
        try:
            self.optimizer = super().create_optimizer(model)
        except TypeError as error:
            raise InputError(f"optimizer_args do not fit optimizer '{self.recipe.optimizer}': {error}") from None
        return self.optimizer

    # --- checkpoints ---

    def _get_output_dir(self, trial: Any) -> str:
        return self._directory_now or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = self.checkpoints
        name = f"checkpoint-{self.state.global_step}"
        if (directory / name).exists():
            return
        self._check_weights()
        # Every rank must name the same place, so the name cannot carry a process id.
        workshop = directory / f"{PARTIAL}checkpoint"
        if self.args.should_save:
            shutil.rmtree(workshop, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._directory_now = str(workshop)
        try:
            with quiet(), storage_errors(directory):
                super()._save_checkpoint(model, trial)
        except BaseException:
            shutil.rmtree(workshop, ignore_errors=True)
            raise
        finally:
            self._directory_now = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # Trainer also writes its arguments as a pickle that nothing here reads
            (workshop / name / "training_args.bin").unlink(missing_ok=True)
            with replacing(directory / name) as temporary:
                os.replace(workshop / name, temporary)
            shutil.rmtree(workshop, ignore_errors=True)
            rotate_checkpoints(output_dir=str(directory), save_total_limit=self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Train from the last checkpoint, or from the start if there is none; raises `Interrupted` if told to stop."""
        checkpoint = last_checkpoint(self.checkpoints)
        if checkpoint is None:
            self.watch.restart([])
        else:
            state = json.loads((checkpoint / "trainer_state.json").read_text())
            self.watch.restart(state["log_history"])
            if state["global_step"] >= self.args.max_steps or self.watch.out_of_time:
                # killed between the last step and the end: Trainer would take one step more
                self._load_from_checkpoint(str(checkpoint))
                self.state.global_step = state["global_step"]
                return
        with self.watch.signals():
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if self.watch.interrupted:
            raise Interrupted("stopped on request")

    # --- finite numbers ---

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if loss.device.type == "cpu" and not torch.isfinite(loss):  # on a GPU this would wait for it; see _Watch.on_log
            self._stop_diverged("loss")
        return loss

    def _check_weights(self) -> None:
        assert self.model is not None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(parameter).all():
                self._stop_diverged(f"weight '{name}'")

    def _stop_diverged(self, what: str) -> None:
        kept = last_checkpoint(self.checkpoints)
        raise DivergedError(
            f"{what} is not a finite number at step {self.state.global_step + 1}. "
            f"{f'The last good checkpoint is kept ({kept.name})' if kept else 'No checkpoint had been written yet'}. "
            f"Try a lower learning rate (--set train.lr={learning_rate(self.recipe) / 5:.2g}), a longer warm-up "
            "(--set train.warmup=0.2) or gradient clipping (--set train.max_grad_norm=0.5)"
        )


class ExampleMeanTrainer(RunTrainer, ABC):
    """For losses that are a mean over examples: exact over the global batch, however it is split into processes and steps.

    transformers leaves a model's own mean over each micro-batch unscaled when the model takes loss arguments it ignores
    (sequence classifiers do), which multiplies the gradient by the number of accumulation steps.
    """

    loss_is_scaled_for_ga = True

    @abstractmethod
    def example_losses(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Loss of each example of a micro-batch, (B,)."""

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        count = torch.tensor(float(sum(len(batch["input_ids"]) for batch in batch_samples)), device=device)
        return self.accelerator.reduce(count, reduction="sum") if self.args.world_size > 1 else count

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        losses = self.example_losses(model, inputs)
        # data parallelism averages gradients over processes, which the factor undoes
        whole = len(losses) if num_items_in_batch is None else num_items_in_batch / self.args.world_size
        loss = losses.sum() / whole
        return (loss, {}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            return self.example_losses(model, self._prepare_inputs(inputs)).mean(), None, None


class _Watch(TrainerCallback):
    """Follows a run: metrics.jsonl, progress, budgets, and requests to stop."""

    def __init__(self, trainer: Any, show: Any) -> None:
        self.trainer = trainer
        self.show = show
        self.interrupted = False
        self.file = trainer.run_directory / "metrics.jsonl"
        self.seconds = 0.0
        self.step_seconds: list[float] = []

    def restart(self, history: list[dict[str, Any]]) -> None:
        self.seconds = max((row.get("seconds", 0.0) for row in history), default=0.0)
        if self.trainer.args.should_save:
            write_jsonl(self.file, [row for row in history if "loss" in row or "eval_loss" in row])

    @property
    def out_of_time(self) -> bool:
        budget = self.trainer.recipe.train.max_seconds
        return budget is not None and self.seconds >= budget

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM end the run at the next step; a second Ctrl-C is immediate."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(number: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.show is not None:
            seconds = self.trainer.recipe.train.max_seconds
            if seconds is None:
                self.show.start("training", total=state.max_steps, done=state.global_step)
            else:
                self.show.start("training (seconds)", total=seconds, done=self.seconds)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        spent = time.perf_counter() - self._started
        self.seconds += spent
        self.step_seconds.append(spent)
        if self.show is not None:
            self.show.advance(1 if self.trainer.recipe.train.max_seconds is None else spent)
        spent_all = self.out_of_time
        if self.trainer.args.world_size > 1:  # one rank's wish must stop all of them, or the others wait for it forever
            wishes = torch.tensor([float(self.interrupted), float(spent_all)], device=self.trainer.args.device)
            interrupted, spent_all = (self.trainer.accelerator.reduce(wishes, reduction="sum") > 0).tolist()
            self.interrupted = self.interrupted or interrupted
        if self.interrupted or spent_all:
            control.should_save = control.should_training_stop = control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        row = state.log_history[-1]
        if "loss" not in row and "eval_loss" not in row:
            return
        row["seconds"] = round(self.seconds, 3)
        for key in ("loss", "grad_norm"):
            if not math.isfinite(row.get(key, 0.0)):
                self.trainer._stop_diverged(key.replace("grad_norm", "gradient norm"))
        if args.should_save:
            with storage_errors(self.file.parent), self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.show is not None and "loss" in row:
            self.show.note(f"loss {row['loss']:.3f}")


def trainable_state(model: torch.nn.Module) -> dict[str, int]:
    """{"total", "trainable"} parameter counts, each tensor once."""
    seen = {id(p): p for p in model.parameters()}.values()
    return {"total": sum(p.numel() for p in seen), "trainable": sum(p.numel() for p in seen if p.requires_grad)}
