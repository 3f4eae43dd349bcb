"""Merge adapters that are loaded in a PEFT model, with the signature of PEFT's own `add_weighted_adapter`."""

from __future__ import annotations

import json
import warnings
from typing import Any, Literal

from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from acclimate.merge.adapter_files import in_memory, jsonable
from acclimate.merge.adapters import merge_in_memory
from acclimate.merge.plan import plan_merge

PREFIX = "circu_"


def add_weighted_adapter(
    peft_model: Any,
    adapters: list[str],
    weights: list[float],
    adapter_name: str,
    combination_type: str = "circu_tsv",
    svd_rank: int | None = None,
    svd_clamp: float | None = None,
    svd_full_matrices: bool = True,
    svd_driver: str | None = None,
    density: float | None = None,
    majority_sign_method: Literal["total", "frequency"] = "total",
    **settings: Any,
) -> None:
    """Add a new adapter that merges loaded ones. It is frozen and not active; `model.set_adapter(adapter_name)` uses it.

    `combination_type` is "circu_" and a rule (circu_tsv, circu_ties, ...), or one of PEFT's own, which is passed on to PEFT.
    `svd_rank`: rank of the new adapter, default the largest of the inputs. `density`: the share of entries that ties and dare keep.
    The other svd_... arguments are PEFT's. `settings` are those of `MergeSettings`.

    Raises ValueError for an adapter that does not exist, a name that is taken, or arguments out of range; InputError for adapters
    that are not plain low-rank pairs.
    """
    if not combination_type.startswith(PREFIX):
        if settings:
            raise ValueError(f"{', '.join(settings)}: only for combination types that begin with '{PREFIX}'")
        peft_model.base_model.add_weighted_adapter(
            adapters,
            weights,
            adapter_name,
            combination_type,
            svd_rank,
            svd_clamp,
            svd_full_matrices,
            svd_driver,
            density,
            majority_sign_method,
        )
        return
    missing = [name for name in adapters if name not in peft_model.peft_config]
    if missing:
        raise ValueError(f"the model has no adapter '{missing[0]}', but {', '.join(peft_model.peft_config)}")
    if adapter_name in peft_model.peft_config:
        raise ValueError(f"the model has an adapter '{adapter_name}' already")
    if not adapters:
        raise ValueError("merging needs at least one adapter")
    if svd_clamp is not None:
        raise ValueError(f"svd_clamp is for PEFT's own combination types, not for '{combination_type}'")
    rule = combination_type.removeprefix(PREFIX)
    if density is not None:
        settings["drop" if rule.startswith("dare") else "density"] = 1 - density if rule.startswith("dare") else density
    sources = [
        in_memory(
            name,
            json.loads(json.dumps(peft_model.peft_config[name].to_dict(), default=jsonable)),
            get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False),
        )
        for name in adapters
    ]
    plan = plan_merge(sources, weights=weights, rule=rule, rank=svd_rank, sign=majority_sign_method, **settings)
    config, state, report = merge_in_memory(plan)
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    config.pop("peft_type")
    peft_model.add_adapter(adapter_name, LoraConfig(**config))
    set_peft_model_state_dict(peft_model, state, adapter_name=adapter_name)
    for name, parameter in peft_model.named_parameters():
        if f".{adapter_name}." in f"{name}.":
            parameter.requires_grad_(False)
