"""L-SR1 through torch.compile, and with parameters that two processes share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from acclimate.optim import LSR1
from acclimate.optim.learned_sr1 import compiled
from optim import lsr1_worker


def solved(d: int, steps: int = 8, **options) -> Tensor:
    """After some steps on a quadratic of d unknowns, float64."""
    draw = torch.Generator().manual_seed(d)
    curvature = 10 ** torch.rand(d, generator=draw, dtype=torch.float64)
    x = nn.Parameter(torch.randn(d, generator=draw, dtype=torch.float64))
    optimizer = LSR1([x], **options)
    for _ in range(steps):
        x.grad = curvature * x.detach()
        optimizer.step()
    return x.detach()


@pytest.fixture
def graphs():
    """How many graphs have been compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    compiled.cache_clear()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    compiled.cache_clear()


def test_compiled_steps_are_the_same_and_compiled_once_for_all_dimensions(graphs) -> None:
    """Dimension 1 is a graph of its own to torch; after the second dimension there is no other."""
    for d, most in ((1, 1), (7, 2), (1000, 2), (20, 2)):
        torch.testing.assert_close(solved(d, compile="eager"), solved(d), rtol=1e-9, atol=1e-9)
        assert graphs() == most, d


def test_plain_sr1_is_one_graph_without_breaks(graphs) -> None:
    torch.testing.assert_close(solved(9, policy="sr1", compile="aot_eager"), solved(9, policy="sr1"))
    assert graphs() == 1


def test_two_processes_with_half_of_every_weight_take_the_steps_of_one(tmp_path: Path) -> None:
    output = tmp_path / "found.pt"
    torch.multiprocessing.spawn(lsr1_worker.worker, args=(str(output),), nprocs=2, join=True)
    found = torch.load(output, weights_only=True)
    for name, make in lsr1_worker.WAYS.items():
        model = lsr1_worker.network(name)
        optimizer, armijo = make(model)
        path = lsr1_worker.train(model, optimizer, slice(None), armijo=armijo)
        close = 1e-5 if name == "generic" else 1e-9
        torch.testing.assert_close(found[name], path, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}")
        assert found[f"{name}, stats"] == optimizer.stats, name
    everything = sum(p.numel() for p in model.parameters())
    assert found["state"] == [found["local"]]
    assert found["local"] < 0.7 * everything
    assert "not finite in 1 of 1 problems" in found["refused"]  # also where the other process has the NaN
    assert found["unmoved"]
    assert "sharded in different ways" in found["mixed"]
    assert "give every process problems of its own" in found["batch"]


def test_flattened_parameters_are_refused() -> None:
    p = nn.Parameter(torch.ones(4))
    p._is_flat_param = True
    with pytest.raises(RuntimeError, match=r"'w' has been flattened.*use DDP or FSDP2"):
        LSR1([("w", p)])
