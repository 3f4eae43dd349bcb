"""What a Bayesian-LoRA is made of."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from peft import PeftConfig, PeftType

from acclimate.adapters.bayesian_lora import inducing


@dataclass
class BayesianLoraConfig(PeftConfig):
    """Arguments of a Bayesian-LoRA; the first seven are LoRA's.

    Parameters
    ----------
    inducing
        Inducing values of a factor (rows x columns): None for r+1 both ways, one number, or a pair.
    posterior
        Family of q(V): "diagonal", "matrix" (a covariance for rows and one for columns), "full", or "ensemble" (`members` means).
    flow
        "maf": an autoregressive flow on q(V); only with `parameterization="published"` and the diagonal family.
    prior_sd
        Scale of the prior of the published form; the tied form has its own.
    max_lambda, max_sd
        Upper ends of the conditional noise lambda and of the inducing posterior's sigma. Both 0: exactly LoRA.
    kl_weight, kl_schedule
        beta_t is 0 up to the first of the two shares of the steps, then rises linearly to `kl_weight` at the second. The paper's 0.1
        holds the mean of the tied form back on a few hundred examples (it no longer fits them); 0.01 leaves it LoRA's.
    n_train
        Number of training examples, which the KL is divided by. `acclimate tune` fills it in.
    train
        "all"; "mean" trains the LoRA factors alone, without noise; "posterior" everything but them (calibrates a trained LoRA).

    Raises ValueError for a value that cannot be used.
    """

    r: int = field(default=8)
    lora_alpha: float = field(default=16)
    target_modules: set[str] | list[str] | str | None = field(default=None)
    exclude_modules: set[str] | list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)
    layers_to_transform: list[int] | int | None = field(default=None)
    layers_pattern: list[str] | str | None = field(default=None)
    inducing: int | tuple[int, int] | None = field(default=None)
    posterior: Literal["diagonal", "matrix", "full", "ensemble"] = field(default="diagonal")
    members: int = field(default=4)
    flow: Literal["maf"] | None = field(default=None)
    parameterization: Literal["tied", "published"] = field(default="tied")
    prior_sd: float = field(default=0.1)
    max_lambda: float = field(default=0.1)
    max_sd: float = field(default=0.3)
    kl_weight: float = field(default=0.01)
    kl_schedule: tuple[float, float] = field(default=(1 / 3, 2 / 3))
    n_train: int | None = field(default=None)
    train: Literal["all", "mean", "posterior"] = field(default="all")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("BAYESIAN_LORA")
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))
        if self.r < 1:
            raise ValueError(f"r is a rank, at least 1, not {self.r}")
        choices = {
            "posterior": tuple(inducing.FAMILIES),
            "flow": (None, "maf"),
            "parameterization": ("tied", "published"),
            "train": ("all", "mean", "posterior"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {getattr(self, name)!r}")
        if self.flow and (self.parameterization == "tied" or self.posterior != "diagonal"):
            raise ValueError(
                'flow moves a free mean: it needs parameterization="published" and posterior="diagonal". '
                'The tied form has no free mean; leave flow out, or choose posterior="full"'
            )
        for name in ("max_lambda", "max_sd", "kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {getattr(self, name)}")
        if self.prior_sd <= 0 or self.members < 1:
            raise ValueError(f"prior_sd must be above 0 and members at least 1, not {self.prior_sd} and {self.members}")
        if len(self.kl_schedule) != 2 or not 0 <= self.kl_schedule[0] <= self.kl_schedule[1] <= 1:
            raise ValueError(
                f"kl_schedule is two shares of the steps in order, such as (0.33, 0.67), not {self.kl_schedule}"
            )
        self.kl_schedule = (self.kl_schedule[0], self.kl_schedule[1])  # JSON has lists only
        if self.n_train is not None and self.n_train < 1:
            raise ValueError(f"n_train is a number of examples, at least 1, not {self.n_train}")
        if isinstance(self.inducing, list):
            self.inducing = tuple(self.inducing)
        sizes = self.inducing_shape
        if min(sizes) < 1:
            raise ValueError(f"inducing must be at least 1 both ways, not {self.inducing}")
        if min(sizes) < self.r:
            warnings.warn(
                f"inducing {sizes[0]}x{sizes[1]} is less than the rank {self.r}: the inducing values cannot represent every LoRA factor",
                stacklevel=3,
            )
        if (
            self.target_modules is not None
            and isinstance(self.target_modules, str)
            and self.layers_to_transform is not None
        ):
            raise ValueError("layers_to_transform needs target_modules to be a list of names, not a pattern")

    @property
    def inducing_shape(self) -> tuple[int, int]:
        if self.inducing is None:
            return self.r + 1, self.r + 1
        return (self.inducing, self.inducing) if isinstance(self.inducing, int) else self.inducing

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r

    @property
    def random(self) -> bool:
        """Whether a draw can differ from the mean."""
        return self.max_lambda > 0 or self.max_sd > 0

    def beta(self, progress: float) -> float:
        """Weight of the KL after this share of the steps."""
        start, end = self.kl_schedule
        if progress < start:
            return 0.0
        return self.kl_weight * (1.0 if progress >= end else (progress - start) / (end - start))

    def trainer_callbacks(self, n_train: int) -> list[Any]:
        """What `acclimate tune` adds to its trainer; `n_train` counts where the user left it open."""
        from acclimate.adapters.bayesian_lora.training import KLCallback

        self.n_train = self.n_train or n_train
        return [KLCallback()]
