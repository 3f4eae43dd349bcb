"""L-SR1: the mathematics against closed forms and dense algebra, the optimiser against the mathematics, and what it refuses."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from torch import Tensor, nn

from acclimate.claims.lsr1 import PEERS
from acclimate.errors import MissingError
from acclimate.optim import LSR1, LSR1Policy, meta_train
from acclimate.optim.meta_training import (
    LogisticRegressions,
    Quadratics,
    TestFunctions,
    families,
    meta_loss,
    rastrigin,
    rosenbrock,
    styblinski,
    unroll,
    with_gradient,
)
from acclimate.optim.pose_problems import PoseProblems, axis_angle, clip, pa_mpjpe, positions, rotation
from acclimate.optim.sr1_minimize import lsr1_method, minimize
from acclimate.optim.sr1_policy import Memory, direction, inverse_hessian_times
from optim.matrix import copies

few = settings(max_examples=4, deadline=None)


def wild(seed: int, size: float = 0.5) -> LSR1Policy:
    """A policy with random weights, in float64."""
    torch.manual_seed(seed)
    policy = LSR1Policy()
    for p in policy.parameters():
        nn.init.normal_(p, std=size)
    return policy.double()


def quadratic(d: int, condition: float, problems: int, seed: int = 0):
    """f = x^T A x / 2 with log-uniform eigenvalues, both ends reached, and starts."""
    draw = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(problems, d, d, generator=draw, dtype=torch.float64)).Q
    spectrum = 10 ** (math.log10(condition) * torch.rand(problems, d, generator=draw, dtype=torch.float64))
    spectrum[:, 0], spectrum[:, -1] = 1, condition
    A = (Q * spectrum[:, None]) @ Q.mT
    x = torch.randn(problems, d, generator=draw, dtype=torch.float64)
    return lambda z: 0.5 * ((A[: len(z)] @ z[..., None])[..., 0] * z).sum(1), x


def walk(policy, f, x: Tensor, steps: int, **options) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor, Memory]]]:
    """Where it ends, and (x, g, d, memory) of every step."""
    memory, found = Memory.of(x, options.pop("buffer", 4)), []
    for _ in range(steps):
        _, g = with_gradient(f, x, graph=False)
        with torch.no_grad():
            d, memory, _ = direction(policy, memory, x, g, **options)
        found.append((x, g, d, memory))
        x = x + d
    return x, found


# --- the mathematics ---


@few
@given(seed=st.integers(0, 1000), d=st.integers(1, 50), plain=st.booleans())
def test_the_estimate_is_positive_definite_and_every_direction_descends(seed: int, d: int, plain: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    c = torch.randn(3, d, generator=draw, dtype=torch.float64)
    x = 2 * torch.randn(3, d, generator=draw, dtype=torch.float64)
    policy = None if plain else wild(seed)
    _, steps = walk(policy, lambda z: ((z - c).square().log1p() + 0.3 * (3 * z).sin()).sum(1), x, 30)
    for _, g, move, memory in steps:
        columns = torch.eye(d, dtype=torch.float64).repeat(3, 1)
        dense = inverse_hessian_times(
            memory.vectors.repeat_interleave(d, 0), memory.gamma.repeat_interleave(d), columns
        ).view(3, d, d)
        reference = memory.gamma[:, None, None] * torch.eye(d, dtype=torch.float64) + memory.vectors.mT @ memory.vectors
        torch.testing.assert_close(dense, reference)
        least = torch.linalg.eigvalsh(reference)[:, 0]
        assert (least >= memory.gamma - 1e-6 * reference.flatten(1).norm(dim=1).clamp(min=1)).all()
        assert (memory.gamma > 0).all()
        assert ((move * g).sum(1) < 0).all()


def test_plain_sr1_meets_the_secant_relation_whenever_it_can() -> None:
    f, x = quadratic(12, 100, 6)
    _, steps = walk(None, f, x, 12)
    met = 0
    for (x0, g0, _, before), (x1, g1, _, after) in itertools.pairwise(steps):
        p, q = x1 - x0, g1 - g0
        u = p - inverse_hessian_times(before.vectors[:, 1:], after.gamma, q)
        can = (u * q).sum(1) > 1e-3 * u.norm(dim=1) * q.norm(dim=1)
        error = (inverse_hessian_times(after.vectors, after.gamma, q) - p).norm(dim=1) / p.norm(dim=1)
        assert (error[can] < 1e-5).all()
        met += int(can.sum())
    assert met > 40  # of 66 pairs


def test_gamma_is_set_by_the_first_pair_and_then_only_falls() -> None:
    f, x = quadratic(8, 100, 4)
    _, steps = walk(None, f, x, 8)
    gammas = torch.stack([memory.gamma for *_, memory in steps])
    torch.testing.assert_close(gammas[0], 0.5 / steps[0][1].norm(dim=1))
    p, q = steps[1][0] - steps[0][0], steps[1][1] - steps[0][1]
    torch.testing.assert_close(gammas[1], 0.5 * (p * q).sum(1) / (q * q).sum(1))
    assert (gammas[2:] <= gammas[1:-1]).all()


@pytest.mark.parametrize(("d", "bar"), [(10, -5.0), (50, -2.8)])
def test_plain_sr1_on_quadratics(d: int, bar: float) -> None:
    f, x = quadratic(d, 100, 16)
    losses, _, _, _ = unroll(None, f, x, Memory.of(x, 4), 16, graph=False)
    assert float((losses[-1] / losses[0]).log10().mean()) <= bar


def test_without_a_buffer_it_is_gradient_descent_with_half_barzilai_borwein_steps() -> None:
    f, x = quadratic(6, 30, 2)
    _, steps = walk(None, f, x, 6, buffer=0, guard=False)
    for (x0, g0, _, before), (x1, g1, d, after) in itertools.pairwise(steps):
        p, q = x1 - x0, g1 - g0
        half = 0.5 * (p * q).sum(1) / (q * q).sum(1)
        expected = half if x0 is x else torch.minimum(before.gamma, half)
        torch.testing.assert_close(after.gamma, expected)
        torch.testing.assert_close(d, -expected[:, None] * g1)


@few
@given(seed=st.integers(0, 1000), power=st.floats(-3, 3), plain=st.booleans())
def test_scaling_f_and_permuting_x_change_nothing(seed: int, power: float, plain: bool) -> None:
    f, x = quadratic(
        30, 50, 2, seed
    )  # few steps for the dimension: SR1 amplifies rounding where u is nearly in the span
    policy = None if plain else wild(seed, 0.2)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    back = order.argsort()
    end, _ = walk(policy, f, x, 6)
    scaled, _ = walk(policy, lambda z: 10**power * f(z), x, 6)
    permuted, _ = walk(policy, lambda z: f(z[:, back]), x[:, order], 6)
    torch.testing.assert_close(scaled, end, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(permuted[:, back], end, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("d", [1, 7, 60])
@pytest.mark.parametrize("policy", ["sr1", "pose"])
def test_a_batch_is_each_alone_bit_for_bit(policy: str, d: int) -> None:
    scale = torch.rand(17, d, generator=torch.Generator().manual_seed(0)) + 0.1
    start = torch.randn(17, d, generator=torch.Generator().manual_seed(1))

    def solved(rows: slice) -> Tensor:
        x = nn.Parameter(start[rows].clone())
        optimizer = LSR1([x], policy=policy, batch_dim=0)
        for _ in range(8):
            x.grad = (scale[rows] * x.detach() + 0.1 * x.detach() ** 3).contiguous()
            optimizer.step()
        return x.detach()

    whole = solved(slice(None))
    assert whole.norm() < start.norm()
    for row in range(17):
        assert torch.equal(solved(slice(row, row + 1))[0], whole[row])


@pytest.mark.parametrize("d", [1, 7, 1000])
def test_the_same_weights_serve_every_dimension(d: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, d, generator=draw)
    curvature = 10 ** torch.rand(4, d, generator=draw)
    policy = LSR1Policy.from_pretrained("generic")
    losses, *_ = unroll(policy, lambda z: (curvature * z.square()).sum(1), x, Memory.of(x, 4), 12, graph=False)
    assert (losses[-1] < 0.02 * losses[0]).all()


def test_the_network_has_6947_weights_and_starts_as_sr1_with_a_gate_of_sigmoid_2() -> None:
    policy = LSR1Policy().double()
    assert sum(p.numel() for p in policy.parameters()) == 6947
    f, x = quadratic(5, 10, 3)
    _, plain = walk(None, f, x, 2)
    _, learned = walk(policy, f, x, 2)
    gate = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(learned[1][3].vectors, gate * plain[1][3].vectors)


def test_what_a_step_does_with_pairs_that_say_nothing() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    g = torch.tensor([[0.3, 0.4]], dtype=torch.float64)
    d, first, _ = direction(None, Memory.of(x, 2), x, g)
    torch.testing.assert_close(d, -g)  # 0.5 long
    for where, slope in ((x, 2 * g), (x + d, g)):  # p = 0, q = 0
        _, memory, residual = direction(None, first, where, slope)
        assert torch.equal(memory.vectors, first.vectors)
        assert torch.equal(memory.gamma, first.gamma)
        assert memory.counts.tolist() == [[0, 0, 1]]
        assert float(residual) == 0
    _, memory, _ = direction(None, first, x + d, 2 * g)  # the gradient grew on the way down
    assert torch.equal(memory.gamma, first.gamma)
    assert torch.count_nonzero(memory.vectors) == 0
    assert memory.counts.tolist() == [[0, 1, 0]]
    _, learned, _ = direction(wild(0), first, x + d, 2 * g)
    assert torch.count_nonzero(learned.vectors[:, -1]) == 2  # the network may still add one
    d, memory, _ = direction(None, Memory.of(x, 2), x, 0 * g)  # a start at a stationary point
    assert torch.count_nonzero(d) == 0
    assert not memory.started.any()


def test_the_norm_guard_limits_a_step_to_twice_the_last() -> None:
    f = lambda z: -(z**2).sum(1)  # noqa: E731
    x = torch.full((1, 3), 0.1, dtype=torch.float64)
    _, steps = walk(None, f, x, 6)
    for (*_, before, _), (*_, d, _) in itertools.pairwise(steps):
        assert d.norm() <= 2 * max(float(before.norm()), 0.5) + 1e-12


# --- meta-training ---


def test_the_meta_gradient_is_that_of_finite_differences() -> None:
    """Gradients of f are constants to it, so they are recorded and played back where the weights are moved."""
    policy = wild(3, 0.2)
    f, x = quadratic(4, 20, 2)
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(play: bool) -> Tensor:
        steps = iter(list(seen))

        def rule(policy, memory, x, g):
            if play:
                x, g = next(steps)
            else:
                seen.append((x, g))
            return direction(policy, memory, x, g)

        losses, residuals, _, _ = unroll(policy, f, x, Memory.of(x, 4), 2, rule=rule)
        return meta_loss(losses, residuals, torch.zeros(2), 0.1)

    value = loss(play=False)
    value.backward()
    torch.testing.assert_close(loss(play=True), value)
    step = 1e-6
    for name, p in policy.named_parameters():
        place = int(p.grad.abs().argmax())
        flat = p.data.view(-1)
        ends = []
        for sign in (1, -1):
            flat[place] += sign * step
            ends.append(float(loss(play=True).detach()))
            flat[place] -= sign * step
        assert float(p.grad.view(-1)[place]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-8), (
            name
        )


def test_meta_training_improves_and_is_a_function_of_its_seed() -> None:
    tasks = [Quadratics(dimensions=(5,), condition=30)]
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        policy = LSR1Policy(width=16, code=8)
        history = meta_train(policy, tasks, steps=30, unroll_steps=4, batch=8, lr=1e-2, seed=1)
        found.append(policy.digest)
    assert found[0] == found[1]
    assert np.mean(history.loss[-10:]) < np.mean(history.loss[:10]) - 0.05
    assert not history.dropped


def test_the_secant_penalty_lowers_the_residual_by_a_third() -> None:
    """Of policies trained with a weight of 0.1 and their twins without it, on problems that none was trained on."""
    pairs: list[tuple[str | Path, Path, list]] = [
        ("generic", PEERS / "generic-no-secant", families(["quadratic", "functions", "logistic", "curves"])),
        (PEERS / "pose-strong-secant", PEERS / "pose-no-secant", [PoseProblems(330, 455)]),
    ]
    for trained_with, without, tasks in pairs:
        residual = {}
        for name, path in (("with", trained_with), ("without", without)):
            policy = LSR1Policy.from_pretrained(path)
            total = 0.0
            for task, seed in itertools.product(tasks, range(3)):  # the residuals have a long tail
                f, x, _ = task.sample(64, torch.Generator().manual_seed(seed))
                total += float(unroll(policy, f, x, Memory.of(x, 4), 10, graph=False)[1].mean())
            residual[name] = total
        assert residual["with"] <= 0.7 * residual["without"], without.name


class Cliff:
    """Not finite beyond 0."""

    name = "cliff"

    def sample(self, batch: int, generator: torch.Generator):
        return (
            lambda x: torch.where(x > 0.4, x, x.new_tensor(math.nan)).sum(1),
            torch.full((batch, 1), 0.5),
            torch.zeros(batch),
        )


def test_a_family_that_diverges_is_named() -> None:
    with pytest.raises(RuntimeError, match="family 'cliff' diverged"):
        meta_train(LSR1Policy(), [Cliff()], steps=12, unroll_steps=2, batch=2)


def test_families_know_their_minima() -> None:
    draw = torch.Generator().manual_seed(0)
    for task in (*families(["quadratic", "functions", "curves", "pose"]), LogisticRegressions()):
        f, x, low = task.sample(8, draw)
        assert x.shape[0] == low.shape[0] == 8
        assert (f(x) > low).all()
    f, x, low = LogisticRegressions().sample(4, draw)
    for _ in range(300):
        x = x - 0.5 * with_gradient(f, x, graph=False)[1]
    torch.testing.assert_close(f(x), low, rtol=0, atol=0.02)
    assert (f(x) >= low).all()
    z = torch.ones(1, 4, dtype=torch.float64)
    assert [float(rosenbrock(z)), float(rastrigin(0 * z))] == pytest.approx([0, 0], abs=1e-12)
    assert float(styblinski(-2.903534 * z)) == pytest.approx(0, abs=1e-8)
    f, x, _ = TestFunctions((4,)).sample(3, draw)
    assert f(x).shape == (3,)
    with pytest.raises(ValueError, match="unknown family poses: choose quadratic"):
        families(["poses"])


def test_the_skeleton_moves_as_a_chain_of_rotations() -> None:
    skeleton, theta = clip()
    assert len(skeleton.names) == 19
    assert theta.shape == (455, 19, 3)
    elbow = skeleton.names.index("LeftElbow")
    place, turn, chain = np.zeros(3), Rotation.identity(), []
    joint = elbow
    while joint >= 0:
        chain.append(joint)
        joint = skeleton.parents[joint]
    for joint in reversed(chain):
        place = place + turn.apply(skeleton.offsets[joint].numpy())
        turn = turn * Rotation.from_rotvec(theta[100, joint].numpy())
    R = rotation(theta[100:101])
    np.testing.assert_allclose(positions(skeleton, R)[0, elbow].numpy(), place, atol=1e-10)
    torch.testing.assert_close(rotation(axis_angle(R)), R, rtol=1e-9, atol=1e-9)
    tiny = torch.tensor([[1e-5, 0.0, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(rotation(tiny)[0].numpy(), Rotation.from_rotvec(tiny[0].numpy()).as_matrix(), atol=1e-15)


def test_pose_problems_are_solved_by_the_truth() -> None:
    problems = PoseProblems()
    f, truth = problems.problems(torch.tensor([10, 200]), torch.zeros(2, 2))
    x = torch.cat([problems.frames[[10, 200]].flatten(1), torch.tensor([[0.0, 0.05, -0.05]] * 2)], 1)
    prior = 1e-3 * (problems.frames[[10, 200]] - problems.mean).square().sum((1, 2))
    torch.testing.assert_close(f(x), prior, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(problems.found(x), truth, rtol=1e-4, atol=1e-5)
    turn = torch.from_numpy(Rotation.from_rotvec([0.3, -2.0, 1.0]).as_matrix()).float()
    moved = 2.5 * truth @ turn + torch.tensor([1.0, 2.0, 3.0])
    assert float(pa_mpjpe(moved, truth).max()) < 1e-2  # of a millimetre
    assert float(pa_mpjpe(truth * torch.tensor([-1.0, 1.0, 1.0]), truth).min()) > 5  # a mirror image is another pose


# --- the optimiser ---


def bowl(x: Tensor) -> Tensor:
    return (torch.arange(1, x.numel() + 1) * x.reshape(-1).square()).sum() / 2


def run(optimizer: LSR1, params: list[nn.Parameter], steps: int, f=bowl) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(f(p) for p in params).backward()
        optimizer.step()


def test_it_takes_the_steps_of_the_mathematics() -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    a, b = nn.Parameter(start[:4].view(2, 2).clone()), nn.Parameter(start[4:].clone())
    optimizer = LSR1([a, b], policy="generic", lr=0.7, first_step=0.2)
    policy, memory, x = LSR1Policy.from_pretrained("generic").double(), Memory.of(start[None], 4), start[None]
    for _ in range(7):
        optimizer.zero_grad()
        (bowl(a) + bowl(b) + (a.sum() * b.sum())).backward()
        g = torch.cat([a.grad.view(-1), b.grad])[None]
        optimizer.step()
        with torch.no_grad():
            d, memory, _ = direction(policy, memory, x, g, 0.2)
            x = x + 0.7 * d
        assert torch.equal(torch.cat([a.view(-1), b])[None], x)
    assert optimizer.stats["steps"] == 7


def test_problems_are_groups_tensors_or_rows() -> None:
    start = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    rows = nn.Parameter(start.clone())
    optimizer = LSR1([rows], batch_dim=0)
    run(optimizer, [rows], 6, lambda x: sum(bowl(row) for row in x))
    tensors = [nn.Parameter(row.clone()) for row in start]
    run(LSR1(tensors, per_tensor=True), tensors, 6)
    groups = [nn.Parameter(row.clone()) for row in start]
    run(LSR1([{"params": [p]} for p in groups]), groups, 6)
    for row, one, two in zip(rows, tensors, groups, strict=True):
        assert torch.equal(row, one)
        assert torch.equal(row, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_run_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    start = torch.linspace(-1, 1, 12).to(dtype)
    whole = nn.Parameter(start.clone())
    optimizer = LSR1([whole])
    run(optimizer, [whole], 3)
    again = nn.Parameter(whole.detach().clone())
    state = copies(optimizer.state_dict())
    run(optimizer, [whole], 4)
    resumed = LSR1([again])
    resumed.load_state_dict(state)
    run(resumed, [again], 4)
    assert torch.equal(whole, again)
    assert resumed.stats == optimizer.stats
    other = LSR1([again], policy="sr1")
    with pytest.raises(ValueError, match="another policy"):
        other.load_state_dict(state)
    LSR1([again], policy="sr1", allow_policy_mismatch=True).load_state_dict(state)


def test_reset_starts_anew() -> None:
    x = nn.Parameter(torch.ones(3))
    optimizer = LSR1([x])
    run(optimizer, [x], 3)
    first = x.detach().clone()
    with torch.no_grad():
        x.fill_(1.0)
    optimizer.reset()
    run(optimizer, [x], 3)
    assert torch.equal(x, first)


def closure_of(x: nn.Parameter, f, optimizer: LSR1):
    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = f(x)
        losses.sum().backward()
        return losses.detach()

    return closure


def test_armijo_never_lets_the_loss_rise() -> None:
    start = torch.tensor([[-1.2, 1.0, 0.3], [2.0, -1.0, 1.5]], dtype=torch.float64)
    x = nn.Parameter(start.clone())
    optimizer = LSR1([x], policy="sr1", guard="armijo", batch_dim=0, first_step=2.0)
    values = []
    for _ in range(30):
        optimizer.step(closure_of(x, rosenbrock, optimizer))
        values.append(rosenbrock(x.detach()))
    assert (torch.stack(values).diff(dim=0) <= 1e-12).all()
    assert (values[-1] < 0.05 * rosenbrock(start)).all()
    assert optimizer.stats["halvings"] > 0
    assert optimizer.stats["evaluations"] >= 60


def test_armijo_falls_back_to_the_gradient_after_five_halvings() -> None:
    x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = LSR1([x], policy="sr1", guard="armijo", first_step=0.25)
    values = iter([1.0] + [2.0] * 6)

    def closure() -> float:
        x.grad = torch.tensor([4.0], dtype=torch.float64)
        return next(values)

    optimizer.step(closure)
    assert x.tolist() == [0.75]
    assert optimizer.stats["halvings"] == 5
    assert optimizer.stats["fallbacks"] == 1


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_not_finite_is_refused(where: str) -> None:
    x = nn.Parameter(torch.linspace(-1, 1, 4))
    optimizer = LSR1([x])
    run(optimizer, [x], 3)
    before, memory = x.detach().clone(), optimizer.memories["0"]

    def closure() -> float:
        x.grad = torch.ones(4)
        if where == "gradient":
            x.grad[2] = math.inf
        return math.nan if where == "loss" else 1.0

    with pytest.raises(FloatingPointError, match="not finite in 1 of 1 problems; nothing was changed"):
        optimizer.step(closure)
    assert torch.equal(x, before)
    assert optimizer.memories["0"] is memory


def test_on_nan_reset_goes_back_and_on() -> None:
    x = nn.Parameter(torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64))
    optimizer = LSR1([x], policy="sr1", batch_dim=0, on_nan="reset")
    run(optimizer, [x], 2, lambda z: z.square().sum())
    last = optimizer.memories["0"]
    x.grad = 2 * x.detach()
    x.grad[1] = math.nan
    optimizer.step()
    torch.testing.assert_close(x.detach()[1], last.x[1] - last.gamma[1] / 2 * last.g[1])
    memory = optimizer.memories["0"]
    assert torch.count_nonzero(memory.vectors[1]) == 0
    assert torch.count_nonzero(memory.vectors[0]) > 0
    assert optimizer.stats["resets"] == 1
    run(optimizer, [x], 10, lambda z: z.square().sum())
    assert x.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer": 0}, "buffer must be at least 1"),
        ({"lr": 0.0}, "lr and first_step positive"),
        ({"first_step": -1.0}, "lr and first_step positive"),
        ({"guard": "wolfe"}, "guard is none, norm or armijo"),
        ({"batch_dim": 1}, "batch_dim None or 0"),
        ({"policy": "poses"}, "unknown policy 'poses': choose sr1, generic, pose"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSR1([nn.Parameter(torch.ones(2))], **options)


def test_parameters_it_cannot_use() -> None:
    with pytest.raises(TypeError, match="real floating-point numbers: z"):
        LSR1([("x", nn.Parameter(torch.ones(2))), ("z", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    with pytest.raises(TypeError, match="parameter 0 of group 0"):
        LSR1([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="no unknowns"):
        LSR1([nn.Parameter(torch.ones(0))])
    with pytest.raises(ValueError, match="one first axis; got"):
        LSR1([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))], batch_dim=0)
    x = nn.Parameter(torch.ones(2))
    optimizer = LSR1([("w", x)])
    with pytest.raises(TypeError, match="no parameter has a gradient: w"):
        optimizer.step()
    x.grad = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="sparse gradients cannot be used: w"):
        optimizer.step()
    with pytest.raises(ValueError, match="needs step\\(closure\\)"):
        LSR1([x], guard="armijo").step()
    with pytest.warns(UserWarning, match="costs 14 Gflop"):
        LSR1([nn.Parameter(torch.empty(1_000_001))])


def test_a_changed_shape_asks_for_a_reset() -> None:
    x = nn.Parameter(torch.ones(3))
    optimizer = LSR1([x])
    run(optimizer, [x], 2)
    x.data = torch.ones(5)
    x.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match="call reset\\(\\)"):
        optimizer.step()
    optimizer.reset()
    optimizer.step()


def test_policies_are_files_of_two_parts(tmp_path: Path) -> None:
    policy = LSR1Policy(width=8, code=4, name="mine")
    policy.save_pretrained(tmp_path / "mine")
    again = LSR1Policy.from_pretrained(tmp_path / "mine")
    assert again.digest == policy.digest
    assert again.config == policy.config
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**config, "width": 16}))
    with pytest.raises(ValueError, match=r"does not match its config\.json"):
        LSR1Policy.from_pretrained(tmp_path / "mine")
    for name in ("generic", "pose"):
        shipped = LSR1Policy.from_pretrained(name)
        assert shipped.config["name"] == name
        assert sum(p.numel() for p in shipped.parameters()) == 6947


# --- the published network ---


def paper(seed: int = 0) -> LSR1Policy:
    torch.manual_seed(seed)
    return LSR1Policy(arch="paper").double().eval()


def test_the_published_network_has_three_parts_of_residual_layers() -> None:
    """Per layer of width n: n^2 + n weights, 2 n of the normalisation, 1 of PReLU; three times two blocks of two, and 5 -> n, 2 x (n -> 1)."""
    n = 256
    layer = n * n + n + 2 * n + 1
    policy = paper()
    assert sum(p.numel() for p in policy.parameters()) == 12 * layer + 6 * n + 2 * (n + 1) == 797_710
    assert policy(torch.randn(9, 5, dtype=torch.float64)).shape == (9, 2)
    with pytest.raises(ValueError, match="arch is compact or paper"):
        LSR1Policy(arch="large")  # type: ignore[arg-type]


def test_the_published_step_rescales_what_the_estimate_gives() -> None:
    f, x = quadratic(7, 20, 3)
    policy = paper()
    _, steps = walk(policy, f, x, 5, guard=False)
    for index, (at, g, d, memory) in enumerate(steps):
        torch.testing.assert_close(d.norm(dim=1), g.norm(dim=1))  # a new network has e = 0, so lambda = 1
        B = torch.eye(7, dtype=torch.float64) + memory.vectors.mT @ memory.vectors
        product = (B @ g[..., None])[..., 0]
        torch.testing.assert_close(d, -product * (g.norm(dim=1) / product.norm(dim=1))[:, None])
        assert int((memory.vectors.norm(dim=2) > 0).sum(1).max()) == min(index, 4)
        if index == 1:  # the vector is what the network says of x, p, B q, g and q; B is I before there is one
            p, q = at - steps[0][0], g - steps[0][1]
            said = policy(torch.stack([at, p, q, g, q], dim=2).flatten(0, 1)).view(3, 7, 2)
            torch.testing.assert_close(memory.vectors[:, -1], said[..., 0])
    with torch.no_grad():
        policy.scale[-1].bias.fill_(2 * math.log(3.0))
    _, scaled = walk(policy, f, x, 1, guard=False)
    torch.testing.assert_close(scaled[0][2], 3 * steps[0][2])


def test_the_published_network_can_be_trained_and_used(tmp_path: Path) -> None:
    task = Quadratics((5,), 10)

    def loss(policy: LSR1Policy) -> float:
        f, x, low = task.sample(64, torch.Generator().manual_seed(9))
        losses, residuals, _, _ = unroll(policy, f, x, Memory.of(x, 4), 4, graph=False)
        return float(meta_loss(losses, residuals, low, 0.1))

    torch.manual_seed(3)
    policy = LSR1Policy(width=32, arch="paper", name="published").eval()
    before = loss(policy)
    history = meta_train(policy, [task], steps=80, unroll_steps=4, batch=16, seed=4)
    assert loss(policy) < before - 0.05
    assert not history.dropped
    policy.save_pretrained(tmp_path)
    again = LSR1Policy.from_pretrained(tmp_path)
    assert again.digest == policy.digest
    ends = []
    for chosen in (again, policy.train()):  # the optimiser does not drop out
        x = nn.Parameter(torch.linspace(-1, 1, 8))
        run(LSR1([x], policy=chosen), [x], 8, lambda z: 0.3 * z.square().sum())
        ends.append(x.detach().clone())
    assert torch.equal(*ends)
    assert ends[0].norm() < 0.5 * torch.linspace(-1, 1, 8).norm()


# --- SciPy and ASE ---


def test_minimize_finds_what_scipy_finds() -> None:
    start = np.array([-1.2, 1.0])
    found = minimize(scipy.optimize.rosen, start, policy="sr1", jac=scipy.optimize.rosen_der, maxiter=300)
    assert found.success
    np.testing.assert_allclose(found.x, np.ones(2), atol=1e-5)
    assert found.nit < found.nfev < 2 * found.nit  # an accepted trial is not evaluated twice
    assert np.abs(found.jac).max() <= 1e-6
    learned = minimize(scipy.optimize.rosen, start, jac=scipy.optimize.rosen_der, maxiter=50)  # trained for few steps
    assert learned.fun < 0.01 * scipy.optimize.rosen(start)
    assert learned.fun == scipy.optimize.rosen(learned.x)


def test_it_is_a_method_of_scipy() -> None:
    seen: list[np.ndarray] = []
    both = lambda x, c: (float(((x - c) ** 2).sum()), 2 * (x - c))  # noqa: E731
    found = scipy.optimize.minimize(
        both,
        np.zeros(3),
        args=(2.0,),
        jac=True,
        method=lsr1_method,
        tol=1e-5,
        callback=seen.append,
        options={"policy": "sr1"},
    )
    assert found.success
    assert len(seen) == found.nit
    np.testing.assert_allclose(found.x, 2.0, atol=1e-5)
    without = minimize(lambda x: float(((x - 1) ** 2).sum()), np.zeros((2, 2)), policy="sr1", gtol=1e-4)
    np.testing.assert_allclose(without.x, np.ones((2, 2)), atol=1e-3)
    with pytest.raises(ValueError, match="without bounds"):
        scipy.optimize.minimize(both, np.zeros(3), args=(2.0,), jac=True, method=lsr1_method, bounds=[(0, 1)] * 3)


def test_minimize_says_how_it_ended() -> None:
    short = minimize(scipy.optimize.rosen, np.zeros(3), policy="sr1", jac=scipy.optimize.rosen_der, maxiter=3)
    assert (short.status, short.success, short.nit) == (1, False, 3)
    far = minimize(lambda x: float(x.sum()), np.full(2, 1e20), policy="sr1", jac=np.ones_like)
    assert (far.status, far.nit) == (4, 1)  # 1e20 - 0.5 is 1e20
    bad = minimize(lambda x: math.nan, np.zeros(2), policy="sr1", jac=lambda x: x)
    assert bad.status == 2

    def stop(x: np.ndarray) -> None:
        raise StopIteration

    assert minimize(scipy.optimize.rosen, np.zeros(3), jac=scipy.optimize.rosen_der, callback=stop).status == 3


def aluminium(amount: float = 0.1):
    pytest.importorskip("ase")
    from ase.build import bulk
    from ase.calculators.emt import EMT

    atoms = bulk("Al", "fcc", cubic=True) * (2, 1, 1)
    atoms.rattle(amount, seed=0)
    atoms.calc = EMT()
    return atoms


@pytest.mark.parametrize("policy", ["sr1", "generic"])
def test_structures_relax_to_where_bfgs_takes_them(policy: str) -> None:
    reference, atoms = aluminium(), aluminium()
    from ase.optimize import BFGS

    from acclimate import ase as ours

    bfgs = BFGS(reference, logfile=None)
    bfgs.run(fmax=0.005)
    optimizer = ours.LSR1(atoms, logfile=None, policy=policy, maxstep=0.05)
    places = [atoms.get_positions()]
    optimizer.attach(lambda: places.append(atoms.get_positions()))
    assert optimizer.run(fmax=0.005, steps=100)
    assert atoms.get_potential_energy() == pytest.approx(reference.get_potential_energy(), abs=1e-4)
    longest = [np.linalg.norm(b - a, axis=1).max() for a, b in itertools.pairwise(places)]
    assert max(longest) <= 0.05 + 1e-9


def test_a_relaxation_goes_on_from_its_file(tmp_path: Path) -> None:
    from acclimate import ase as ours

    whole = aluminium()
    ours.LSR1(whole, logfile=None).run(fmax=0, steps=6)
    parts = aluminium()
    file = str(tmp_path / "restart.json")
    ours.LSR1(parts, logfile=None, restart=file, trajectory=str(tmp_path / "path.traj")).run(fmax=0, steps=3)
    ours.LSR1(parts, logfile=None, restart=file).run(fmax=0, steps=3)
    np.testing.assert_allclose(parts.get_positions(), whole.get_positions(), atol=1e-12)
    parts.calc.calculate = functools.partial(_not_finite, parts.calc, parts.calc.calculate)
    parts.rattle(0.01)
    before = parts.get_positions()
    with pytest.raises(FloatingPointError, match="forces are not finite"):
        ours.LSR1(parts, logfile=None).step()
    assert np.array_equal(parts.get_positions(), before)


def _not_finite(calculator, calculate, *args, **options) -> None:
    calculate(*args, **options)
    calculator.results["forces"][0, 0] = math.nan


def test_without_ase_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ase.optimize.optimize", None)
    monkeypatch.delitem(sys.modules, "acclimate.ase", raising=False)
    with pytest.raises(MissingError, match=r"pip install 'acclimate\[materials\]'"):
        importlib.import_module("acclimate.ase")
