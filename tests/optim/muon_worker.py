"""What one of two processes does in test_muon.py. It imports little, since every process pays for that."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from acclimate.optim.muon import Muon
from acclimate.optim.muon_routing import route


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 12), nn.Tanh(), nn.Linear(12, 5), nn.Linear(5, 1))


def optimizer(model: nn.Module) -> Muon:
    named = dict(model.named_parameters())
    groups = [
        {"algo": algo, "params": [(row.name, named[row.name]) for row in route(model) if row.algo == algo]}
        for algo in ("muon", "adamw")
    ]
    return Muon(groups, lr=1e-2, weight_decay=0.1, ns_dtype=torch.float32, anchor=0.1)


def train(model: nn.Module, optimizer: Muon, rows: slice) -> None:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(16, 12, generator=generator), torch.randn(16, 1, generator=generator)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()


def worker(rank: int, output: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=2)
    rows = slice(8 * rank, 8 * rank + 8)
    found: dict[str, Any] = {}

    parallel = nn.parallel.DistributedDataParallel(network())
    train(parallel, optimizer(parallel.module), rows)
    found["ddp"] = [p.detach() for p in parallel.parameters()]

    sharded: Any = network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded[0], sharded[2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded[4], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))  # by columns
    fully_shard(sharded, mesh=mesh)
    muon = optimizer(sharded)
    train(sharded, muon, rows)
    found["fsdp2"] = [p.full_tensor().detach() for p in sharded.parameters()]
    found["local"] = [muon.state[sharded[i].weight]["momentum_buffer"].to_local() for i in (0, 4)]

    before = found["fsdp2"][0].clone()
    for p in sharded.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        sharded[0].weight.grad.to_local()[0, 0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        muon.step()
    moved = sharded[0].weight.full_tensor() - before
    found["skipped"] = [torch.tensor(muon.skipped["0.weight"]), moved.detach()]

    try:
        route(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))
    except RuntimeError as error:
        found["fsdp1"] = [torch.tensor("use DDP or FSDP2" in str(error))]
    if rank == 0:
        torch.save(found, output)
    dist.barrier()
    os._exit(0)  # without gloo's destructors, see adapters.matrix.leave
