"""The KL term, for transformers' Trainer and for loops written by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from acclimate.adapters.bayesian_lora.config import BayesianLoraConfig
from acclimate.adapters.bayesian_lora.tuner import BayesianLoraModel, tuner_of


class KL(NamedTuple):
    """KL of the posterior from the prior in nats: of the inducing values, and of the factors given them."""

    u: Tensor
    conditional: Tensor

    @property
    def total(self) -> Tensor:
        return self.u + self.conditional


def kl_divergence(model: nn.Module) -> KL:
    """KL of the active adapters' posterior, differentiable. Add beta * total / n_train to a mean loss."""
    tuner = tuner_of(model)
    terms = [stack.kl() for name in tuner.active_adapters for stack in tuner.stacks(name)]
    own, conditional = zip(*terms, strict=True)
    device = own[0].device
    return KL(torch.stack([t.to(device) for t in own]).sum(), torch.stack([t.to(device) for t in conditional]).sum())


def kl_loss(model: nn.Module, progress: float) -> Tensor:
    """beta_t KL / n_train for a loop written by hand; `progress` is the share of the steps that is done.

    Raises ValueError when the configuration has no n_train.
    """
    config = _active_config(model)
    beta = config.beta(progress)
    if beta == 0:
        return torch.zeros((), device=next(model.parameters()).device)
    assert config.n_train is not None
    return beta * kl_divergence(model).total / config.n_train


def _active_config(model: nn.Module) -> BayesianLoraConfig:
    tuner = tuner_of(model)
    config = tuner.peft_config[tuner.active_adapters[0]]
    assert isinstance(config, BayesianLoraConfig)
    if config.n_train is None and config.kl_weight > 0:
        raise ValueError(
            "n_train is missing: set BayesianLoraConfig(n_train=number of training examples); the KL is divided by it"
        )
    return config


class KLCallback(TrainerCallback):
    """Adds the gradient of beta_t KL / n_train once an optimiser step, and logs the terms beside the loss.

    The KL has no data in it, so this is exact under gradient accumulation and DDP: micro-batches and ranks share one term. The trainer
    clips before: `max_grad_norm` bounds the gradient of the data, not of the KL. (With fp16 loss scaling keep `max_grad_norm` above 0:
    clipping is what unscales the gradients before the KL is added.) The logged `loss` stays the data term; `kl_u`, `kl_cond` are in
    nats and `beta` is their weight in that step.
    """

    def __init__(self) -> None:
        self.kl: KL | None = None
        self.beta = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _active_config(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        config = _active_config(model)
        self.kl, self.beta = None, config.beta(state.global_step / max(state.max_steps, 1))
        if self.beta == 0:
            return
        assert config.n_train is not None
        with torch.enable_grad():
            kl = kl_divergence(model)
            parameters = [p for n, p in tuner_of(model).named_parameters() if "blora_" in n and p.requires_grad]
            gradients = torch.autograd.grad(self.beta * kl.total / config.n_train, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.kl = KL(kl.u.detach(), kl.conditional.detach())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        row = state.log_history[-1]
        if "loss" not in row:
            return
        if self.kl is None:
            with torch.no_grad():
                self.kl = kl_divergence(model)
        terms = {"kl_u": float(self.kl.u), "kl_cond": float(self.kl.conditional), "beta": self.beta}
        row.update(terms)
        if logs is not None:
            logs.update(terms)


class BayesianTrainerMixin:
    """In front of a transformers trainer: `class MyTrainer(BayesianTrainerMixin, Trainer)` trains a Bayesian-LoRA, KL included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, KLCallback())  # type: ignore[attr-defined]  # before the loggers

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        names = super().get_decay_parameter_names(model)  # type: ignore[misc]
        return [name for name in names if not any(part in name for part in BayesianLoraModel.undecayed)]
