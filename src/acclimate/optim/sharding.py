"""Where a parameter's rows are, for optimisers that take whole weights or FSDP2's shards of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


FLATTENED = (
    "FSDP1 and DeepSpeed ZeRO flatten matrices, and this optimiser needs their rows and columns: use DDP or FSDP2 (fully_shard), or "
    "--optimizer adamw"
)


def check_not_flattened(name: str, p: Tensor) -> None:
    """RuntimeError for a parameter that FSDP1 or DeepSpeed made one-dimensional."""
    if getattr(p, "_is_flat_param", False) or hasattr(p, "ds_id"):
        raise RuntimeError(f"parameter '{name}' has been flattened. {FLATTENED}")


def refuse_unsupported(parameters: Iterable[Tensor]) -> None:
    """RuntimeError for parameters whose rows this process cannot tell: flattened, or sharded other than by rows."""
    for number, p in enumerate(parameters):
        check_not_flattened(f"number {number}", p)
        if isinstance(p, DTensor):
            shards = [placement for placement in p.placements if not placement.is_replicate()]
            if len(shards) > 1 or any(type(shard) is not Shard or shard.dim != 0 for shard in shards):
                raise RuntimeError(f"weights may be sharded by rows (FSDP2), not as {p.placements}")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(whole: Tensor, p: Tensor) -> Tensor:
    """A tensor of p's shape that every process has whole, sharded as p is: each takes its part, and nothing is sent."""
    return (
        distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else whole
    )


def shard_axis(p: DTensor) -> int | None:
    return next((axis for axis, placement in enumerate(p.placements) if not placement.is_replicate()), None)


def copies(p: Tensor) -> int:
    """How many processes hold the same shard."""
    assert isinstance(p, DTensor)
    axis = shard_axis(p)
    return processes() // (p.device_mesh.size(axis) if axis is not None else 1)


def local_rows(p: Tensor) -> slice:
    """Which rows of the weight this process has."""
    if not isinstance(p, DTensor) or (axis := shard_axis(p)) is None:
        return slice(None)
    size = -(-p.shape[0] // p.device_mesh.size(axis))
    start = min(size * p.device_mesh.get_local_rank(axis), p.shape[0])
    return slice(start, min(start + size, p.shape[0]))
