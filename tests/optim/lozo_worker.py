"""What one of two processes does in test_lozo_plus.py. It imports little, since every process pays for that."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acclimate.optim.lozo_plus import LOZOPlus

OPTIONS: dict[str, dict[str, Any]] = {
    "hook": {"weight_decay": 0.1},
    "in place": {"mode": "inplace", "train_1d": True, "weight_decay": 0.1},
    "mezo": {"algo": "mezo"},
    "candidates": {"candidates": 3},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 12), nn.Tanh(), nn.Linear(12, 5))


def train(model: nn.Module, rows: slice, **options: Any) -> LOZOPlus:
    """Eleven steps, a period and a half, folded."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(16, 12, generator=generator), torch.randn(16, 5, generator=generator)
    optimizer = LOZOPlus(
        model.parameters(),
        1e-2,
        model=model,
        rank=2,
        period=7,
        probes=2,
        eps=1e-2,
        noise_floor=0.0,
        exclude=(),
        **options,
    )
    for _ in range(11):
        optimizer.step(lambda: (model(x[rows]) - y[rows]).square().mean())
    optimizer.fold()
    return optimizer


def rounded(model: nn.Module) -> nn.Module:
    """With a change of all matrices folded into 16-bit weights at random, which must be the same for every part of them."""
    optimizer = LOZOPlus(model.parameters(), model=model, rank=2, period=7, probes=2, exclude=())
    for matrix in optimizer.matrices:
        matrix.free += 1e-3
        matrix.moved = True
    optimizer.fold()
    return model


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def worker(rank: int, output: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    half = slice(8 * rank, 8 * rank + 8)
    found: dict[str, list[Tensor]] = {}
    for name, options in OPTIONS.items():
        model: Any = network()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[4], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))  # by columns
        fully_shard(model, mesh=mesh)  # the root, which keeps what it has gathered
        optimizer = train(model, half, **options)
        found[f"fsdp2, {name}"] = whole(model)
        state = optimizer.state_dict()["lozo"]["noisy"]
        found[f"exact, {name}"] = [row["exact"] for row in state if row["exact"] is not None]

    plain = network()  # candidates are shared out among processes, and here each is to see all rows
    train(plain, slice(None), candidates=3)
    found["shared out"] = whole(plain)

    parallel = parallelize_module(network(), mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    train(parallel, slice(None), weight_decay=0.1)
    found["tensor parallel"] = whole(parallel)

    sharded: Any = network().bfloat16()
    fully_shard(sharded, mesh=mesh)
    found["rounded"] = whole(rounded(sharded))
    try:
        LOZOPlus(sharded.parameters())
    except RuntimeError as error:
        found["no model"] = [torch.tensor("give model=" in str(error))]
    if rank == 0:
        torch.save(found, output)
    dist.barrier()
    os._exit(0)  # without gloo's destructors, see adapters.matrix.leave
