"""Which parameters a zeroth-order optimiser perturbs, and how each is."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from acclimate.optim.groups import embeddings_and_heads
from acclimate.optim.perturbation import Matrix, Noisy, is_quantised
from acclimate.optim.sharding import check_not_flattened

BLOCK_ROWS = 20_000  # most rows of all matrices that are perturbed together
ADAPTER_RANK = 64  # of what grows on quantised layers


def sort_parameters(
    groups: Sequence[dict[str, Any]],
    model: nn.Module | None,
    settings: Mapping[str, Any],
    exclude: Sequence[str] | None,
    train_1d: bool,
    allow_drift: bool,
) -> tuple[list[Matrix], list[Noisy]]:
    """The parameters of an optimiser's groups that are trained, as matrices and as those that noise is added to.

    `settings`, `exclude`, `train_1d` and `allow_drift` are LOZOPlus's. Raises ValueError where nothing is left to train; RuntimeError for half
    precision in place, and for parameters that FSDP1 or DeepSpeed flattened.
    """
    names: dict[int, str] = {}
    layers: dict[int, nn.Module] = {}
    spared: set[int] = set()
    owners: Counter[int] = Counter()
    if model is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and not is_quantised(m)]
        layers = {id(m.weight): m for m in linear}
        if exclude is None:
            embeddings, heads = embeddings_and_heads(model)
            spared = embeddings | heads

    def check_precision(name: str, p: nn.Parameter) -> None:
        if p.element_size() < 4 and not allow_drift:
            raise RuntimeError(
                f"'{name}' is {p.dtype} and would be perturbed in place, where rounding makes it drift: train it in "
                "float32, leave it out (exclude), or say allow_drift=True"
            )

    probes = settings["probes"] * settings["candidates"]
    matrices: list[Matrix] = []
    noisy: list[Noisy] = []
    in_place = []
    for number, group in enumerate(groups):
        for place, p in enumerate(group["params"]):
            name = names.get(id(p), f"parameter {place} of group {number}")
            if not p.requires_grad or id(p) in spared or any(word in name for word in exclude or ()):
                continue
            check_not_flattened(name, p)
            if isinstance(p, DTensor) and model is None:
                raise RuntimeError(f"'{name}' is sharded: give model=, whose layers gather it")
            if settings["algo"] == "mezo":
                check_precision(name, p)
                noisy.append(Noisy(name, p, group, aside=False))
            elif p.ndim != 2 and train_1d:
                noisy.append(Noisy(name, p, group))
            elif p.ndim == 2:
                # a weight that several modules share acts in more places than one output
                hooked = settings["mode"] == "hook" and owners[id(p)] == 1
                layer = layers.get(id(p)) if hooked else None
                if layer is None:
                    in_place.append(name)
                    check_precision(name, p)
                matrices.append(
                    Matrix(name, p, group, layer, min(settings["rank"], *p.shape), probes, settings["adapter_rank"])
                )
    if settings["grow"]:
        matrices += _growing(groups[0], model, settings, exclude)
    if not matrices and not noisy:
        raise ValueError(
            "there is no matrix to train: LOZO+ moves parameters of two dimensions, and leaves embeddings and the output head alone "
            "(exclude=() trains them too) and quantised layers (grow=True trains an adapter on them)"
        )
    if in_place and settings["mode"] == "hook" and model is not None:
        warnings.warn(
            f"{len(in_place)} matrices are perturbed in place, e.g. '{in_place[0]}': no linear layer has them for itself",
            stacklevel=4,
        )
    return matrices, noisy


def _growing(
    group: dict[str, Any], model: nn.Module | None, settings: Mapping[str, Any], exclude: Sequence[str] | None
) -> list[Matrix]:
    """The quantised linear layers of a model, with the first group's rates."""
    if model is None or settings["mode"] != "hook" or settings["algo"] == "mezo":
        raise ValueError(
            "grow=True adds to the outputs of a model's quantised layers: it needs model=, mode='hook', and not algo='mezo'"
        )
    if group["weight_decay"]:
        raise ValueError(
            "grow=True leaves quantised weights as they are, and weight_decay would change them: set it to 0"
        )
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    rank, probes = settings["adapter_rank"] or ADAPTER_RANK, settings["probes"] * settings["candidates"]
    found = []
    for name, layer in model.named_modules():
        if (
            not is_quantised(layer)
            or (layer is head and exclude is None)
            or any(word in name for word in exclude or ())
        ):
            continue
        shape: Any = (layer.out_features, layer.in_features)
        found.append(Matrix(f"{name}.weight", None, group, layer, min(settings["rank"], *shape), probes, rank))
    return found


def in_blocks(matrices: Sequence[Matrix], blocks: int | Literal["auto"]) -> list[list[Matrix]]:
    """Neighbouring matrices in `blocks` groups of about as many rows, or in as few as keep to BLOCK_ROWS rows each (a larger matrix is alone)."""
    if blocks != "auto":
        return _divided(matrices, blocks)
    for count in range(1, len(matrices) + 1):
        found = _divided(matrices, count)
        if all(len(block) == 1 or sum(matrix.shape[0] for matrix in block) <= BLOCK_ROWS for block in found):
            return found
    return [[matrix] for matrix in matrices] or [[]]


def _divided(matrices: Sequence[Matrix], count: int) -> list[list[Matrix]]:
    """Each matrix in the group that the middle of its rows falls into; no empty group."""
    total, before = sum(matrix.shape[0] for matrix in matrices), 0
    groups: list[list[Matrix]] = [[] for _ in range(count)]
    for matrix in matrices:
        groups[int((before + matrix.shape[0] / 2) * count / total)].append(matrix)
        before += matrix.shape[0]
    return [group for group in groups if group] or [[]]
