"""What one of two processes does in test_learned_sr1.py. It imports little, since every process pays for that."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acclimate.optim.learned_sr1 import LSR1


def network(way: str) -> nn.Sequential:
    """Layers whose rows do not divide by two, and a bias of one row, which one of the processes has nothing of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    return model if way == "generic" else model.double()  # differences of gradients amplify what float32 rounds


def train(model: nn.Module, optimizer: LSR1, rows: slice, steps: int = 6, armijo: bool = False) -> list[Tensor]:
    """The weights after every step."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)
    x, y = x.to(model[0].weight.dtype), y.to(model[0].weight.dtype)
    path = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if armijo:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        path.append(torch.cat([whole(p).flatten() for p in model.parameters()]))
    return path


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


WAYS: dict[str, Callable[[nn.Module], tuple[LSR1, bool]]] = {
    "generic": lambda model: (LSR1(model.parameters()), False),
    "sr1": lambda model: (LSR1(model.parameters(), policy="sr1", first_step=0.1), False),
    "per tensor": lambda model: (LSR1(model.parameters(), per_tensor=True), False),
    "armijo": lambda model: (LSR1(model.parameters(), guard="armijo", first_step=4.0), True),
}


def worker(rank: int, output: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = slice(8 * rank, 8 * rank + 8)
    found: dict[str, Any] = {}
    for name, make in WAYS.items():
        model: Any = network(name)
        fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))  # by columns
        fully_shard(model, mesh=mesh)
        optimizer, armijo = make(model)
        found[name] = train(model, optimizer, rows, armijo=armijo)
        found[f"{name}, stats"] = optimizer.stats
    found["local"] = sum(p.to_local().numel() for p in model.parameters())
    found["state"] = [len(memory.x[0]) for memory in optimizer.memories.values()]

    before = [whole(p) for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = math.nan
    try:
        LSR1(model.parameters()).step()
    except FloatingPointError as error:
        found["refused"] = str(error)
    found["unmoved"] = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))

    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    copied = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    for name, options in {
        "mixed": {"params": [sharded, copied]},
        "batch": {"params": [sharded], "batch_dim": 0},
    }.items():
        try:
            LSR1(**options)
        except RuntimeError as error:
            found[name] = str(error)
    LSR1([copied, nn.Parameter(torch.ones(2))])
    if rank == 0:
        torch.save(found, output)
    dist.barrier()
    os._exit(0)  # without gloo's destructors, see adapters.matrix.leave
