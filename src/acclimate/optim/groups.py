"""What kinds of parameters a model has, for optimisers that do not treat all alike."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

_HEADS = {"lm_head", "head", "score", "classifier"}


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay pulls towards zero: Trainer's rule (no biases, no norms), less what the adapter spares.

    An adapter names what it spares, weights that mean noise for instance, as parts of names in `base_model.undecayed`.
    """
    from transformers import Trainer  # takes seconds, and plain torch users never come here

    # The method looks at nothing but the model; calling it keeps one rule for every optimiser.
    names = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    spared = getattr(getattr(model, "base_model", None), "undecayed", ())
    return {name for name in names if not any(part in name for part in spared)}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters as Trainer groups them: those that decay as the optimiser says, and those that do not (no empty group)."""
    decayed = decayed_names(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained if name in decayed]},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def embeddings_and_heads(model: nn.Module) -> tuple[set[int], set[int]]:
    """(ids of the parameters of embeddings, those of the output head, which is known by the model or by its name)."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    find = getattr(model, "get_output_embeddings", None)
    output = find() if callable(find) else None
    heads = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    heads |= {id(p) for name, p in model.named_parameters() if _HEADS & set(name.split("."))}
    return embeddings, heads
