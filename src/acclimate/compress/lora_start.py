"""Start a LoRA in whitened coordinates: the part of each layer that matters most to its outputs on your data, or that a compressed one lacks.

With C = E[x x^T] + lambda I = S S^T over the inputs of a layer and R S = U diag(sigma) V^T, the adapter starts at the rank-r part

    B A = U_r diag(sigma_r) V_r^T S^-1

role="principal": R = W. The base becomes W - B A, as in PiSSA, but ranked by what reaches the output, not by the weights alone. The
weights of the base are not touched: a frozen second adapter takes the start away again (`acclimate.adapters.residual`), and
`save_pretrained` writes both as one ordinary LoRA of twice the rank.

role="repair": R = W - W^, for a model whose layers W^ are low-rank approximations of W. The adapter starts at the best correction of its
rank: where the layer was cut with the same C, the next components of the same SVD. Its start is not taken away.

Scale: one pass over the data, block by block; every rank makes the same pass, nothing is reduced.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from acclimate.adapters import residual
from acclimate.compress.blocks import Group, stream_blocks
from acclimate.compress.streams import Batch
from acclimate.compress.text import calibration_batches
from acclimate.compress.whitening import Whitened, factors, whiten

Role = Literal["principal", "repair"]


@dataclass
class StartReport:
    """The start of every layer: its rank, and the share of the layer's output energy on the data that the adapter holds (for "repair":
    of the energy of the error); layers that kept their default start with the reason; what it cost."""

    method: str
    layers: list[dict[str, Any]]
    skipped: list[str]
    settings: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def init_lora(
    peft_model: Any,
    calibration: Any,
    role: Role = "principal",
    *,
    original: Any = None,
    adapter_name: str = "default",
    call: Callable[[Any, Any], Any] | None = None,
) -> StartReport:
    """Start a fresh LoRA adapter, in place.

    Parameters
    ----------
    peft_model
        From `get_peft_model(model, LoraConfig(...))`; for low-rank layers as a whole, with `acclimate.compress.lora_config(...)`.
    calibration
        As in `compress_low_rank`.
    role
        "principal" or "repair", see the module docstring.
    original
        role="repair": the model before it was compressed.
    call
        (model, batch) -> anything: how to run the model on a batch; None: `model(**batch)`.

    Raises
    ------
    ValueError
        No LoRA on a linear layer in the model's blocks, DoRA with "principal", "repair" without `original`, or what `stream_blocks` says.
    """
    begun = time.perf_counter()
    config = peft_model.peft_config.get(adapter_name) if isinstance(peft_model, PeftModel) else None
    if not isinstance(config, LoraConfig):
        raise ValueError(f"the model has no LoRA adapter named '{adapter_name}'; call init_lora after get_peft_model")
    if role not in ("principal", "repair"):
        raise ValueError(f"role is principal or repair, not '{role}'")
    if role == "principal" and config.use_dora:
        raise ValueError(
            "role 'principal' subtracts its start, which DoRA's rescaling does not allow; take a plain LoRA"
        )
    if role == "repair" and original is None:
        raise ValueError("role 'repair' needs the model before it was compressed: init_lora(..., original=model)")
    layers: dict[str, LoraLayer] = {
        name: layer
        for name, layer in peft_model.named_modules()
        if isinstance(layer, LoraLayer) and adapter_name in layer.lora_A and hasattr(layer.base_layer, "in_features")
    }
    wanted = {name: _original(original, _plain(name)) for name in layers} if role == "repair" else {}
    targets: dict[str, Any] = {f"{name}.base_layer": layer.base_layer for name, layer in layers.items()}
    method = _Start({f"{name}.base_layer": layer.r[adapter_name] for name, layer in layers.items()}, wanted)
    streamed = stream_blocks(
        peft_model, calibration_batches(calibration, peft_model), method, targets, refresh="none", call=call
    )
    if not method.found:
        raise ValueError("no LoRA layer in the model's blocks could be started; target linear layers there")
    if role == "principal":
        residual.add_start(peft_model, adapter_name)
    with torch.no_grad():
        for name, layer in layers.items():
            if f"{name}.base_layer" not in method.found:
                continue
            B, A = method.found[f"{name}.base_layer"]
            root = math.sqrt(layer.scaling[adapter_name])
            layer.lora_A[adapter_name].weight.copy_(A / root)  # type: ignore[operator]
            layer.lora_B[adapter_name].weight.copy_(B / root)  # type: ignore[operator]
            if role == "principal":
                layer.lora_A[residual.START].weight.copy_(A / root)  # type: ignore[operator]
                layer.lora_B[residual.START].weight.copy_(-B / root)  # type: ignore[operator]
    rows = [{**row, "name": _plain(row["name"].removesuffix(".base_layer"))} for row in streamed.layers]
    started = {row["name"] for row in rows}
    skipped = sorted(_plain(name) for name in layers if _plain(name) not in started)
    kept = [{key: row[key] for key in ("name", "block", "shape", "rank", "kept")} for row in rows]
    return StartReport(role, kept, skipped, {"role": role}, time.perf_counter() - begun)


def principal_init(
    peft_model: Any,
    data: Iterable[Any],
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    n_examples: int = 256,
    adapter_name: str = "default",
    advance: Callable[[int], None] = lambda count: None,
) -> StartReport:
    """`init_lora` with role="principal" on the first `n_examples` rows of a DataLoader; what `--init principal` calls.

    `loss_fn` (model, batch) runs the model on a batch; None: `model(**batch)`. `advance` is called with the rows of each batch.
    """
    batches: list[Batch] = []
    rows = 0
    for batch in data:
        if rows >= n_examples:
            break
        size = next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1)
        batches.append(batch)
        rows += size
        advance(size)
    report = init_lora(peft_model, batches, "principal", adapter_name=adapter_name, call=loss_fn)
    report.settings = {"n_examples": n_examples}
    return report


class _Start:
    """`BlockMethod`: leave the layers, and note the leading part of each (or of what each lacks)."""

    def __init__(self, ranks: Mapping[str, int], wanted: Mapping[str, Tensor]) -> None:
        self.ranks, self.wanted = ranks, wanted
        self.found: dict[str, tuple[Tensor, Tensor]] = {}

    def prepare(self, group: Group) -> Whitened:
        return whiten(group)

    def replace(self, name: str, linear: nn.Linear, group: Group, prepared: Whitened) -> tuple[None, dict[str, Any]]:
        W = linear.weight.detach().double().cpu()
        lacking = self.wanted.get(name.removesuffix(".base_layer"))
        R = W if lacking is None else lacking.detach().double().cpu() - W
        rank = self.ranks[name]
        B, A, sigma = factors(R @ prepared.S, prepared.S_inv, rank)
        self.found[name] = (B, A)
        energy = sigma.square()
        return None, {"rank": rank, "kept": float(energy[:rank].sum() / energy.sum().clamp_min(1e-300))}

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        raise AssertionError("nothing is replaced")


def _plain(name: str) -> str:
    """The name of a layer in the model without PEFT around it."""
    return name.removeprefix("base_model.model.")


def _original(model: nn.Module, name: str) -> Tensor:
    try:
        weight = model.get_submodule(name).weight
    except AttributeError:
        raise ValueError(f"the original model has no layer '{name}'") from None
    assert isinstance(weight, Tensor)
    return weight
