"""Around optimisers that need forward passes alone: in a Trainer, replayed from a log, saved as an adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.pytorch_utils import Conv1D

from acclimate.errors import InputError
from acclimate.optim.lozo_plus import LOZOPlus, LOZOPlusFactory, doubled
from acclimate.optim.perturbation import PARTS
from acclimate.runs import replacing, write_json

LOG = "zeroth_order.safetensors"  # of a run: what `replay` needs

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class ZerothOrderTrainerMixin(_Base):
    """In front of a Trainer class: with an optimiser that is `forward_only`, a training step is two forward passes and no backward."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate's wrapper
        if not getattr(optimizer, "forward_only", False):
            return super().training_step(model, inputs, num_items_in_batch)
        batch = self._prepare_inputs(inputs)
        scaled = (
            self.loss_is_scaled_for_ga
        )  # whether compute_loss has divided by the whole step's items, as in Trainer's own step
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        share = 1 if scaled else self.current_gradient_accumulation_steps
        compute: Any = self.paired_losses if optimizer.settings["paired"] else self.compute_loss

        def loss() -> torch.Tensor:
            with self.compute_loss_context_manager():
                found: torch.Tensor = compute(model, batch, num_items_in_batch=num_items_in_batch)
            return found / share

        mean: torch.Tensor = optimizer.accumulate(loss)
        return mean.to(self.args.device)

    def paired_losses(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """(2,): the losses of the two halves of the batch, doubled; each is what `compute_loss` would find for the batch.

        Raises InputError for a model without transformers' `loss_function`, and with label smoothing.
        """
        plain: Any = self.accelerator.unwrap_model(model)
        if "labels" not in inputs or not hasattr(plain, "loss_function") or self.label_smoother is not None:
            raise InputError(
                "paired=True needs a model of transformers, labels in its inputs and no label smoothing; this task has something else. Leave "
                "paired out: both points are then evaluated one after the other"
            )
        logits = model(**doubled({key: value for key, value in inputs.items() if key != "labels"})).logits
        facts = {"labels": inputs["labels"], "vocab_size": getattr(plain.config, "vocab_size", None), "config": plain.config,
                 "num_items_in_batch": num_items_in_batch}  # fmt: skip
        losses = torch.stack(
            [plain.loss_function(logits=half, pooled_logits=half, **facts) for half in logits.chunk(2)]
        )
        if (
            self.args.average_tokens_across_devices
            and self.model_accepts_loss_kwargs
            and num_items_in_batch is not None
        ):
            losses = losses * (self.accelerator.num_processes // self.get_tp_size())  # as compute_loss does
        return losses


class ZerothOrderTrainer(ZerothOrderTrainerMixin, Trainer):
    """transformers' Trainer for LOZO+: `ZerothOrderTrainer(model, args, optimizer_cls_and_kwargs=(LOZOPlusFactory, {"lr": 1e-6}), ..)`.

    The model is folded when training ends. Clipping (max_grad_norm) has nothing to act on.
    """

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(optimizer, LOZOPlus):
            optimizer.fold()
        return result


class LOZOCallback(TrainerCallback):
    """Folds at the end of a run, and writes the log for `replay` and what the report shows."""

    def __init__(self, optimizer: LOZOPlus, directory: Path) -> None:
        self.optimizer, self.directory = optimizer, directory

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer.fold()
        if state.is_world_process_zero:
            save_log(self.optimizer, self.directory / LOG)
            write_json(self.directory / "optimizer.json", said_of(self.optimizer))


def said_of(optimizer: LOZOPlus) -> dict[str, Any]:
    """What the report shows."""
    counts, alignment = optimizer.counts, optimizer.alignment
    rows = [
        ["matrices trained", str(len(optimizer.matrices))],
        ["steps, two forward passes each", f"{counts['step']:,}"],
        ["left out: below the loss's resolution", f"{counts['below_noise']:,}"],
        ["left out: loss not finite", f"{counts['not_finite']:,}"],
        ["bytes for bases and steps", f"{state_bytes(optimizer):,}"],
    ]
    if math.isfinite(alignment["ratio"]):
        rows.insert(2, ["alignment: energy of the directions over random ones", f"{alignment['ratio']:.3g}"])
    periods = [row for row in optimizer.history if row[2] > 0]
    plots = [
        {
            "title": "How much more of the gradient than random directions the directions of each period held",
            "x": "step", "y": "energy over random", "series": {"ratio": [[row[0], row[1] / row[2]] for row in periods]},
        },
        {"title": "Columns kept", "x": "step", "y": "columns", "series": {"kept": [[row[0], row[3]] for row in periods]}},
    ]  # fmt: skip
    return {
        "title": "LOZO+: forward passes only",
        "notes": [
            f"{LOG} holds the {8 * len(optimizer.records):,} bytes from which acclimate.optim.replay makes these weights again."
        ],
        "tables": [{"title": "Steps", "columns": ["what", "how much"], "rows": rows}],
        "plots": plots if periods else [],
    }


def state_bytes(optimizer: LOZOPlus) -> int:
    """Bytes of what the optimiser keeps for its matrices, and of exact values of the other parameters."""
    parts = [getattr(matrix, part) for matrix in optimizer.matrices for part in PARTS]
    exact = [noisy.exact for noisy in optimizer.noisy if noisy.exact is not None]
    return sum(t.numel() * t.element_size() for t in [*parts, *exact])


# --- replay ---


def save_log(optimizer: LOZOPlus, path: str | Path) -> None:
    """Write what `replay` needs: the settings, and for each step c and the learning rate of each group, 8 bytes each."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    facts = {"settings": optimizer.settings, "groups": groups, "names": [m.name for m in optimizer.matrices],
             "noisy": [noisy.name for noisy in optimizer.noisy]}  # fmt: skip
    width = optimizer.settings["candidates"] + len(groups)
    with replacing(Path(path)) as temporary:
        save_file(
            {"records": torch.tensor(optimizer.records, dtype=torch.float64).view(-1, width)},
            temporary,
            metadata={"facts": json.dumps(facts)},
        )


@torch.no_grad()
def replay(model: nn.Module, log: str | Path) -> LOZOPlus:
    """Give `model`, which is as it was before training, the weights that it had after: by a log, without data, in seconds.

    Bit for bit on the same device, type and number of folds. Returns the optimiser, folded. Raises ValueError for a model with other parameters.
    """
    with safe_open(log, framework="pt") as file:
        facts, records = json.loads(file.metadata()["facts"]), file.get_tensor("records").tolist()
    settings, first = dict(facts["settings"]), facts["groups"][0]
    exclude: Any = None
    optimizer = LOZOPlusFactory()(
        model, lr=first["lr"], eps=first["eps"], beta=first["beta"], train_1d=bool(facts["noisy"]), exclude=exclude,
        **settings,
    )  # fmt: skip
    if [m.name for m in optimizer.matrices] != facts["names"] or [n.name for n in optimizer.noisy] != facts["noisy"]:
        raise ValueError(
            "the log is of a model with other parameters, or of an optimiser with other groups than Trainer's"
        )
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        group |= {key: saved[key] for key in ("eps", "beta", "weight_decay")}
    k = settings["candidates"]
    for record in records:
        for group, rate in zip(optimizer.param_groups, record[k:], strict=True):
            group["lr"] = rate
        optimizer._finish(record[:k])
    optimizer.fold()
    return optimizer


# --- as an adapter ---


@torch.no_grad()
def save_as_lora(optimizer: LOZOPlus, directory: Path) -> None:
    """The optimiser's sum of changes as a LoRA adapter directory (scaling 1), its rank that of the largest change."""
    rank = max((matrix.grown[0].shape[1] for matrix in optimizer.matrices if matrix.grown), default=1)
    shell = nn.Module()
    targets = []
    for matrix in optimizer.matrices:
        place: Any = shell
        *parents, last = matrix.name.removesuffix(".weight").split(".")
        for part in parents:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]
        inputs, outputs = matrix.shape if isinstance(matrix.module, Conv1D) else matrix.shape[::-1]
        layer = Conv1D(outputs, inputs) if isinstance(matrix.module, Conv1D) else nn.Linear(inputs, outputs, bias=False)
        place.add_module(last, layer.to("meta"))
        targets.append(matrix.name.removesuffix(".weight"))
    fan_in = any(isinstance(matrix.module, Conv1D) for matrix in optimizer.matrices)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=fan_in)
    adapted: Any = get_peft_model(shell, config)
    for matrix, name in zip(optimizer.matrices, targets, strict=True):
        layer = adapted.base_model.model.get_submodule(name)
        inner, outer = matrix.ordered(matrix.grown or tuple(torch.zeros(size, 0) for size in matrix.shape))
        a, b = torch.zeros(rank, len(inner)), torch.zeros(len(outer), rank)
        a[: inner.shape[1]], b[:, : outer.shape[1]] = inner.T, outer
        layer.lora_A["default"].weight = nn.Parameter(a)
        layer.lora_B["default"].weight = nn.Parameter(b)
    adapted.save_pretrained(directory)
