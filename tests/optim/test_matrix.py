"""Every optimiser through everything that users of torch's own rely on. The rows are in `matrix.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from optim.matrix import OPTIMIZERS, Entry, Net, all_weights, copies, loss_of, three_steps


@pytest.fixture(params=sorted(OPTIMIZERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def entry(name: str) -> Entry:
    return OPTIMIZERS[name]


with_gradients = pytest.mark.parametrize("name", sorted(n for n, e in OPTIMIZERS.items() if not e.forward_only))


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in left.items():
        torch.testing.assert_close(
            right[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains(entry: Entry, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer = entry.make(model)
    before, start = all_weights(model), float(loss_of(model))
    for _ in range(entry.steps):
        entry.step(model, optimizer)
    entry.weights(model, optimizer)
    assert float(loss_of(model)) < 0.5 * start
    for name, value in model.named_parameters():
        assert value.dtype == dtype
        assert torch.equal(value, before[name]) != (name in entry.trained(model)), name


def test_accumulation_is_the_whole_batch(entry: Entry) -> None:
    found = []
    for parts in (1, 3):
        model = Net()
        optimizer = entry.make(model)
        for seed in range(3):
            entry.step(model, optimizer, parts, seed)
        found.append(entry.weights(model, optimizer))
    close(*found, entry.tolerance)


@with_gradients
def test_clipping_that_does_not_clip_changes_nothing_and_clipping_is_a_smaller_gradient(entry: Entry) -> None:
    found = []
    for limit in (None, 1e9, 1e-2):
        model = Net()
        optimizer = entry.make(model)
        for seed in range(3):
            entry.backward(model, optimizer, [slice(None)], seed)
            if limit is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                assert limit > norm or float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])) == pytest.approx(limit, rel=1e-4)  # fmt: skip
            optimizer.step()
        found.append(entry.weights(model, optimizer))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert all(value.isfinite().all() for value in found[2].values())


def test_schedules_set_the_step(entry: Entry) -> None:
    model = Net()
    optimizer = entry.make(model)
    schedule = LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0, 0.0][step])
    rates = []
    for seed in range(3):
        before = all_weights(model)
        rates.append([group["lr"] for group in optimizer.param_groups])
        entry.step(model, optimizer, seed=seed)
        schedule.step()
        entry.weights(model, optimizer)
        moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
        assert bool(moved) == (seed < 2)
    assert rates[1] == pytest.approx([0.5 * rate for rate in rates[0]])
    assert rates[2] == [0.0] * len(rates[0])


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not(entry: Entry) -> None:
    whole = Net()
    optimizer = entry.make(whole)
    for seed in range(3):
        entry.step(whole, optimizer, seed=seed)
    half, state = copies(whole.state_dict()), copies(optimizer.state_dict())
    for seed in range(3, 6):
        entry.step(whole, optimizer, seed=seed)

    again = Net(seed=1)
    again.load_state_dict(half)
    resumed = entry.make(again, lr=123.0)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for seed in range(3, 6):
        entry.step(again, resumed, seed=seed)
    expected, found = entry.weights(whole, optimizer), entry.weights(again, resumed)
    assert all(torch.equal(expected[name], value) for name, value in found.items())


def test_groups_have_their_own_settings(entry: Entry) -> None:
    model = Net()
    optimizer = entry.make(model)
    entry.step(model, optimizer)
    still, *others = [group for group in optimizer.param_groups if group["params"]]
    still["lr"] = 0.0
    before = entry.weights(model, optimizer)
    entry.step(model, optimizer, seed=1)
    entry.weights(model, optimizer)
    frozen = {id(p) for p in still["params"]}
    moving = {id(p) for group in others for p in group["params"]} & {id(p) for p in entry.trained(model).values()}
    for name, p in model.named_parameters():
        if id(p) in frozen:
            assert torch.equal(p, before[name]), name
        elif id(p) in moving:
            assert not torch.equal(p, before[name]), name


def test_weight_decay_is_decoupled(entry: Entry) -> None:
    """With the same losses, one step with decay d ends lr d W below one without."""
    after = []
    for decay in (0.0, 0.1):
        model = Net()
        optimizer = entry.make(model, weight_decay=decay)
        entry.step(model, optimizer)
        after.append(entry.weights(model, optimizer))
    start = all_weights(Net())
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    weight = dict(model.named_parameters())["up.weight"]
    torch.testing.assert_close(
        after[0]["up.weight"] - after[1]["up.weight"],
        0.1 * rates[id(weight)] * start["up.weight"],
        rtol=1e-3,
        atol=1e-6,
    )
    assert torch.equal(after[0]["norm.weight"], after[1]["norm.weight"])
    assert torch.equal(after[0]["up.bias"], after[1]["up.bias"])


def test_frozen_parameters_stay_and_cost_nothing(entry: Entry) -> None:
    model = Net()
    model.up.requires_grad_(False)
    before = all_weights(model)
    optimizer = entry.make(model)
    for seed in range(2):
        entry.step(model, optimizer, seed=seed)
    entry.weights(model, optimizer)
    assert torch.equal(model.up.weight, before["up.weight"])
    assert model.up.weight not in optimizer.state
    assert not torch.equal(model.down.weight, before["down.weight"])


@with_gradients
def test_parameters_without_a_gradient_are_left_out_of_a_step(entry: Entry) -> None:
    model = Net()
    optimizer = entry.make(model)
    for _ in range(2):
        before = all_weights(model)
        optimizer.zero_grad()
        torch.tanh(model.up(model.embed(torch.arange(4)[None]))).square().mean().backward()  # neither down nor head
        optimizer.step()
        assert torch.equal(model.down.weight, before["down.weight"])
        assert not torch.equal(model.up.weight, before["up.weight"])
    entry.step(model, optimizer)
    assert not torch.equal(model.down.weight, before["down.weight"])


def test_a_gradient_of_zeros_is_no_harm(entry: Entry) -> None:
    model = Net()
    optimizer = entry.make(model)
    for _ in range(2):
        if entry.forward_only:
            optimizer.step(lambda: 0 * loss_of(model))
        else:
            optimizer.zero_grad()
            (0 * loss_of(model)).backward()
            optimizer.step()
    start = all_weights(Net())
    assert all(torch.equal(start[name], value) for name, value in entry.weights(model, optimizer).items())


def test_closures(entry: Entry) -> None:
    model, other = Net(), Net()
    optimizer, plain = entry.make(model), entry.make(other)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        if not entry.forward_only:
            loss.backward()
        return loss

    for _ in range(2):
        expected = float(loss_of(model))
        returned = optimizer.step(closure)
        assert float(returned) == pytest.approx(expected, rel=1e-3)
        entry.step(other, plain)
    close(entry.weights(other, plain), entry.weights(model, optimizer), entry.tolerance)


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights after three steps under DDP, a file for each optimiser."""
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(three_steps, args=(2, str(folder)), nprocs=2)
    return folder


def test_two_processes_end_where_one_does(name: str, entry: Entry, of_two_processes: Path) -> None:
    model = Net()
    optimizer = entry.make(model)
    for seed in range(3):
        entry.step(model, optimizer, seed=seed)
    close(entry.weights(model, optimizer), load_file(of_two_processes / f"{name}.safetensors"), 10 * entry.tolerance)
