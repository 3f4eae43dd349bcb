"""What every task's trainer shares: atomic checkpoints, a log, exact means, and stopping for good reasons.

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
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_utils import rotate_checkpoints

from acclimate import methods
from acclimate.adapters import residual
from acclimate.arguments import learning_rate
from acclimate.errors import AcclimateError, InputError
from acclimate.models import quiet
from acclimate.optim.forward_only import ZerothOrderTrainerMixin
from acclimate.optim.groups import decayed_names
from acclimate.optim.lozo_plus import doubled
from acclimate.recipe import Recipe
from acclimate.runs import PARTIAL, Interrupted, last_checkpoint, replacing, storage_errors, write_jsonl


class DivergedError(AcclimateError):
    """The loss or a trained weight is not a finite number."""

    exit_code = 2


class RunTrainer(ZerothOrderTrainerMixin):
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
        if self.optimizer is not None:
            return self.optimizer
        name, options = self.recipe.optimizer, self.recipe.optimizer_args
        if name != "adamw":
            row, kind = methods.find(name, "optimizer"), methods.require(name, "optimizer")
            given = {"lr": self.args.learning_rate, **row.defaults, **options}
            if is_optimizer_factory(kind):  # it builds its own groups
                given = {"weight_decay": self.args.weight_decay, **given}
            self.optimizer_cls_and_kwargs = (kind, given)
        elif options:
            kind, given = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer_cls_and_kwargs = (kind, {**given, **options})
        try:
            self.optimizer = super().create_optimizer(model)
        except (TypeError, ValueError) as error:
            raise InputError(f"optimizer_args do not fit optimizer '{name}': {error}") from None
        for callback in getattr(self.optimizer, "run_callbacks", lambda directory: [])(self.run_directory):
            self.put_first(callback)
        return self.optimizer

    # --- the loss alone, for a pass over the data before training ---

    def summed_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The training loss of one collated batch, summed over what it is a mean of (tokens, here)."""
        loss: Any = self.compute_loss(model, self._prepare_inputs(batch), num_items_in_batch=torch.tensor(1.0))
        return loss

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return sorted(decayed_names(model))

    def put_first(self, callback: TrainerCallback) -> None:
        """Add a callback that is called before all others, so that what it logs reaches the trackers and metrics.jsonl."""
        self.callback_handler.callbacks.insert(0, callback)

    # --- checkpoints ---

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if residual.is_residual(self.model):  # saved as one LoRA, trained as two
            residual.load(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

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
                self._finish_weights(checkpoint)
                return
        with self.watch.signals():
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if self.watch.interrupted:
            raise Interrupted("stopped on request")

    def _finish_weights(self, checkpoint: Path) -> None:
        """Put into the weights what a forward-only optimiser had found and not yet folded when the checkpoint was written."""
        optimizer: Any = self.create_optimizer()
        if getattr(optimizer, "forward_only", False):
            optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
            optimizer.fold()

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

    def summed_loss(self, model: Any, batch: Any) -> torch.Tensor:
        return self.example_losses(model, self._prepare_inputs(batch)).sum()

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

    def paired_losses(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if "labels" not in inputs:  # packed rows, which have no halves
            return super().paired_losses(model, inputs, num_items_in_batch)
        losses = self.example_losses(model, doubled(inputs)).view(2, -1)
        whole = losses.shape[1] if num_items_in_batch is None else num_items_in_batch / self.args.world_size
        return losses.sum(1) / whole

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
