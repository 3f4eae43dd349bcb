"""Which parameters decay, for optimisers that build their own parameter groups."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import Trainer


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay pulls towards zero: Trainer's rule (no biases, no norms), less what the adapter spares.

    An adapter names what it spares, weights that mean noise for instance, as parts of names in `base_model.undecayed`.
    """
    # The method looks at nothing but the model; calling it keeps one rule for every optimiser.
    names = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    spared = getattr(getattr(model, "base_model", None), "undecayed", ())
    return {name for name in names if not any(part in name for part in spared)}
