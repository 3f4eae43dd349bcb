"""Rows and columns of the optimiser test matrix: a new optimiser is one more `Entry` in OPTIMIZERS, nothing else.

Importable by name, since the two-process test starts fresh interpreters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acclimate.optim import LSR1, MuonFactory
from acclimate.optim.groups import decay_groups
from acclimate.optim.io_adam import IOAdamFactory
from acclimate.optim.lozo_plus import LOZOPlusFactory

ROWS, LENGTH, VOCABULARY, WIDTH, CLASSES = 24, 4, 12, 16, 3  # rows in two or three equal parts


class Net(nn.Module):
    """Token ids (B, LENGTH) to logits (B, CLASSES): an embedding, two matrices with biases, a norm, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(self.norm(torch.tanh(self.up(self.embed(ids))))).mean(1))
        return found


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, classes): which third of the vocabulary most tokens come from."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    third = VOCABULARY // CLASSES
    ids = classes[:, None] * third + torch.randint(0, third, (ROWS, LENGTH), generator=generator)
    noise = torch.rand(ROWS, LENGTH, generator=generator) < 0.2
    return torch.where(noise, torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), ids), classes


def loss_of(model: nn.Module, part: slice = slice(None), seed: int = 0) -> Tensor:
    ids, classes = rows(seed)
    return nn.functional.cross_entropy(model(ids[part]).float(), classes[part])


@dataclass(frozen=True)
class Entry:
    """How to make one of a model (decay and no-decay groups, as Trainer makes them), and what it promises.

    `lr` is a rate that trains `Net`; `trains` the parts of names of what it trains; `tolerance` is for sums in another order.
    """

    build: Callable[..., Optimizer]  # (model, lr=.., weight_decay=0.0)
    lr: float
    trains: tuple[str, ...] = ("",)
    forward_only: bool = False
    steps: int = 30
    tolerance: float = 1e-5

    def make(self, model: nn.Module, **options: Any) -> Optimizer:
        return self.build(model, **{"lr": self.lr, "weight_decay": 0.0, **options})

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in model.named_parameters() if any(part in name for part in self.trains)}

    def weights(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """Copies; what an optimiser has found and not yet put into them included."""
        if self.forward_only:
            optimizer.fold()
        return all_weights(model)

    def backward(self, model: nn.Module, optimizer: Any, parts: list[slice], seed: int = 0) -> None:
        """Everything of a step but `optimizer.step()`: the mean loss over equal parts of the rows."""
        optimizer.zero_grad()
        for part in parts:
            if self.forward_only:
                optimizer.accumulate(lambda part=part: loss_of(model, part, seed) / len(parts))
            else:
                (loss_of(model, part, seed) / len(parts)).backward()

    def step(self, model: nn.Module, optimizer: Any, parts: int = 1, seed: int = 0) -> None:
        size = ROWS // parts
        self.backward(model, optimizer, [slice(i * size, (i + 1) * size) for i in range(parts)], seed)
        optimizer.step()


def lsr1(model: nn.Module, **options: Any) -> Optimizer:
    """Two problems: what decays, and what does not."""
    return LSR1(decay_groups(model), **options)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    """torch's own: the matrix must hold for what everyone uses."""
    return torch.optim.AdamW(decay_groups(model), **options)


OPTIMIZERS = {
    "adamw": Entry(adamw, 0.02),
    "io-adam": Entry(lambda model, **options: IOAdamFactory()(model, **options), 0.02),
    "lozo-plus": Entry(
        lambda model, **options: LOZOPlusFactory()(model, rank=2, period=20, **options),
        2e-3,
        trains=("up.weight", "down.weight"),
        forward_only=True,
        steps=400,
        tolerance=1e-3,  # c is a difference of losses over 2e-3
    ),
    "lsr1": Entry(lsr1, 0.5, tolerance=1e-4),  # its steps are built from differences of gradients
    "muon": Entry(lambda model, **options: MuonFactory()(model, warn_mismatch=False, **options), 0.02),
}


def copies(state: Any) -> Any:
    """A state dict as it comes back from a file, read without unpickling code."""
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def three_steps(rank: int, world: int, folder: str) -> None:
    """Three steps of every optimiser under DDP, each rank with its part of the rows; rank 0 saves the weights as NAME.safetensors."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.nn.parallel import DistributedDataParallel

    from adapters.matrix import leave

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    size = ROWS // world
    for name, entry in OPTIMIZERS.items():
        model = Net()
        wrapped = model if entry.forward_only else DistributedDataParallel(model)
        optimizer = entry.make(model)
        for seed in range(3):
            entry.backward(wrapped, optimizer, [slice(rank * size, (rank + 1) * size)], seed)
            optimizer.step()
        if rank == 0:
            save_file(entry.weights(model, optimizer), f"{folder}/{name}.safetensors")
    leave()
