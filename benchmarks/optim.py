"""Memory and time of optimisers next to their peers, in one run.

    python benchmarks/optim.py                       # about half an hour on two idle cores
    python benchmarks/optim.py --part training --output benchmarks/optim.json
    python benchmarks/optim.py --fast                # a smoke test with small sizes

"training": three steps of 1 x 64 tokens on SmolLM2-135M (all weights; "lora ..": rank 8 on all linear layers), each optimiser in a process
of its own: bytes of weights, of gradients after the last backward pass and of states, the peak of resident memory from loading on, and the
median of the steps' seconds. "muon": steps on matrices of SmolLM2's shapes. "forward only": a step of LOZO+ over two bare passes, next to LOZO's
and MeZO's. "lsr1": a step over L-BFGS's, and a batch of problems over one at a time. "surge": a binary layer over torch's own.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import measure_parts, take_turns
from torch import Tensor, nn

from acclimate import models, runs
from acclimate.claims.base import in_a_process_of_its_own
from acclimate.claims.io_adam import PEERS, tensor_bytes
from acclimate.compress.surge import BinaryConv2d, SurgeConfig
from acclimate.optim import LSR1, LOZOPlus, LOZOPlusFactory, Muon, MuonFactory, doubled
from acclimate.optim.meta_training import with_gradient
from acclimate.optim.pose_problems import PoseProblems
from acclimate.prefix import blocks

# --- training ---


def _adam_8bit(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=lr)
    return optimizer


def _lbfgs(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=1, history_size=4)


def _forward_only(**options: Any) -> Callable[[nn.Module, float], LOZOPlus]:
    return lambda model, lr: LOZOPlusFactory()(model, lr=lr, **options)


ALL_WEIGHTS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": PEERS["adamw"].make,
    "adafactor": PEERS["adafactor"].make,
    "adamw 8 bit": _adam_8bit,
    "galore": PEERS["galore"].make,
    "apollo": PEERS["apollo"].make,
    "adam-mini": PEERS["adam-mini"].make,
    "io-adam": PEERS["io-adam"].make,
    "io-adam, fused": PEERS["io-adam, fused"].make,
    "muon": lambda model, lr: MuonFactory()(model, lr=lr, warn_mismatch=False),
    "l-bfgs": _lbfgs,
    "mezo": _forward_only(algo="mezo"),
    "lozo": _forward_only(algo="lozo"),
    "lozo-plus": _forward_only(),
}
LORA = ("adamw", "io-adam", "muon", "lozo-plus")


def training(fast: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    jobs = [(name, False) for name in ALL_WEIGHTS] + [(name, True) for name in LORA]
    for name, lora in jobs[:1] + jobs[-1:] if fast else jobs:
        label = f"lora, {name}" if lora else name
        try:
            found[label] = in_a_process_of_its_own(three_steps, name, lora, fast)
        except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
            # a peer that does not run on this machine
            found[label] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print(f"  {label}: {found[label]}", file=sys.stderr)
    base = found["adamw"]
    for row in found.values():
        if "error" not in row:
            row["gradients_and_states_over_adamw"] = (row["gradients"] + row["states"]) / (
                base["gradients"] + base["states"]
            )
            row["peak_over_adamw"] = row["peak"] / base["peak"]
    return found


def smollm2(short: bool) -> Any:
    """The model, or only its first block."""
    model: Any = models.load_model("smollm2")[0]
    if short:
        parent, name = blocks(model)
        setattr(parent, name, getattr(parent, name)[:1])
        model.config.num_hidden_layers = 1
    return model


def three_steps(name: str, lora: bool, short: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    runs.reset_peak_memory()
    model = smollm2(short).train()
    vocabulary = model.config.vocab_size
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    optimizer: Any = ALL_WEIGHTS[name](model, 1e-6)
    draw = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(3):
        ids = torch.randint(vocabulary, (1, 64), generator=draw)

        def loss(ids: Tensor = ids) -> Tensor:
            found: Tensor = model(input_ids=ids, labels=ids).loss
            return found

        begun = time.perf_counter()
        if isinstance(optimizer, LOZOPlus):
            optimizer.step(loss)
        elif isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: (optimizer.zero_grad(), total := loss(), total.backward(), total)[1])
        else:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begun)
    trained = [p for p in model.parameters() if p.requires_grad]
    states = sum(tensor_bytes(state) for state in optimizer.state.values())
    if isinstance(optimizer, LOZOPlus):
        from acclimate.optim.forward_only import state_bytes

        states = state_bytes(optimizer)
    return {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "states": states,
        "peak": runs.peak_memory(),
        "seconds": statistics.median(seconds),
    }


# --- Muon ---


def muon(fast: bool) -> dict[str, Any]:
    """LoRA factors of all layers, and all weights of one layer, with random gradients."""
    linear = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
    layers = 2 if fast else 30
    shapes = {
        "lora": [shape for _ in range(layers) for m, n in linear for shape in ((8, n), (m, 8))],
        "full": list(linear),
    }
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "torch_muon": lambda p: torch.optim.Muon(p, lr=5e-4, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        "adamw": lambda p: torch.optim.AdamW(p, lr=5e-4),
        "muon": lambda p: Muon(p, lr=5e-4),
        "muon_float32": lambda p: Muon(p, lr=5e-4, ns_dtype=torch.float32),
    }
    found: dict[str, Any] = {}
    for name, sizes in shapes.items():
        optimizers = {}
        for maker, make in makers.items():
            torch.manual_seed(0)
            parameters = [nn.Parameter(0.02 * torch.randn(size)) for size in sizes]
            for p in parameters:
                p.grad = 1e-3 * torch.randn_like(p)
            optimizers[maker] = make(parameters)
        times = take_turns({maker: optimizer.step for maker, optimizer in optimizers.items()}, 3 if fast else 15)
        found[name] = {
            **times,
            "muon_over_adamw": times["ms"]["muon"] / times["ms"]["adamw"],
            "state_bytes": sum(tensor_bytes(state) for state in optimizers["muon"].state.values()),
            "state_bytes_by_formula": sum(4 * m * n for m, n in sizes),
        }
    return found


# --- LOZO+ ---


def forward_only(fast: bool) -> dict[str, Any]:
    """256 and 16 tokens through SmolLM2: two bare passes, and steps of LOZO+, as two passes and as one of twice the batch, of LOZO in place, which
    rewrites all weights, and of MeZO."""
    model = smollm2(fast).eval()
    ways: dict[str, dict[str, Any]] = {
        "lozo-plus": {},
        "lozo-plus, paired": {"paired": True},
        "lozo, in place": {"algo": "lozo", "mode": "inplace"},
        "mezo": {"algo": "mezo"},
    }
    return {
        f"{tokens} tokens": _steps_of(ways, model, tokens, 1 if fast else 10)
        for tokens in ((16,) if fast else (256, 16))
    }


def _steps_of(ways: dict[str, dict[str, Any]], model: Any, tokens: int, repeats: int) -> dict[str, Any]:
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))

    def loss(own: Any) -> Tensor:
        found: Tensor = own(input_ids=ids, labels=ids).loss
        return found

    def losses(own: Any) -> list[Tensor]:
        logits = own(input_ids=doubled(ids)).logits
        return [
            own.loss_function(logits=half, labels=ids, vocab_size=own.config.vocab_size) for half in logits.chunk(2)
        ]

    @torch.no_grad()
    def two_passes() -> None:
        loss(model)
        loss(model)

    steps: dict[str, Callable[[], Any]] = {"two passes": two_passes}
    for name, options in ways.items():
        own = copy.deepcopy(model)
        optimizer = LOZOPlusFactory()(own, lr=0.0, **options)
        steps[name] = partial(optimizer.step, partial(losses if options.get("paired") else loss, own))
    return take_turns(steps, repeats)


# --- L-SR1 ---


def lsr1(fast: bool) -> dict[str, Any]:
    """A step on a quadratic of d unknowns over L-BFGS's (no line search, as many gradients), and 125 pose problems as one batch over one by one."""
    found: dict[str, Any] = {}
    for d in (10, 1000) if fast else (10, 100, 1000, 10_000):
        makers: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
            "l-bfgs": lambda x: torch.optim.LBFGS([x], 1e-3, 1, history_size=4, tolerance_grad=0, tolerance_change=0),
            "sr1": lambda x: LSR1([x], "sr1", lr=1e-3),
            "generic": lambda x: LSR1([x], "generic", lr=1e-3),
        }
        if not fast:
            makers["generic, compiled"] = lambda x: LSR1([x], "generic", lr=1e-3, compile=True)
        found[f"{d} unknowns"] = take_turns(
            {name: partial(quadratic_steps, make, d, 10 if fast else 40) for name, make in makers.items()},
            1 if fast else 5,
        )
    frames = 5 if fast else 125
    poses = PoseProblems(330, 455)
    views = torch.zeros(2, frames)
    together, _ = poses.problems(torch.arange(frames), views)
    alone = [poses.problems(torch.arange(i, i + 1), views[:, i : i + 1])[0] for i in range(frames)]

    def batch() -> None:
        x = nn.Parameter(poses.start.repeat(frames, 1))
        optimizer = LSR1([x], "pose", batch_dim=0)
        for _ in range(8):
            x.grad = with_gradient(together, x.detach().clone(), False)[1]
            optimizer.step()

    def one_by_one() -> None:
        for problem in alone:
            x = nn.Parameter(poses.start[None].clone())
            optimizer = torch.optim.LBFGS([x], 0.3, 1, history_size=4, tolerance_grad=0, tolerance_change=0)

            def closure(x: nn.Parameter = x, problem: Any = problem) -> float:
                value, x.grad = with_gradient(problem, x.detach().clone(), False)
                return float(value[0])

            for _ in range(8):
                optimizer.step(closure)

    found[f"{frames} poses"] = take_turns({"batch": batch, "l-bfgs, one by one": one_by_one}, 1 if fast else 3)
    return found


def quadratic_steps(make: Callable[[nn.Parameter], torch.optim.Optimizer], d: int, steps: int) -> None:
    scale, x = torch.linspace(1, 2, d), nn.Parameter(torch.ones(d))
    optimizer = make(x)

    def closure() -> Tensor:
        x.grad = scale * x.detach()
        return (scale * x.detach().square()).sum() / 2

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


# --- SURGE ---


def surge(fast: bool) -> dict[str, Any]:
    """A training step of one 3 x 3 convolution, 64 x 64 channels (`--fast`: 8 x 8), forward and backward, over torch's own."""
    channels, size = (8, 8) if fast else (64, 28)
    x = torch.randn(16, channels, size, size, requires_grad=True)
    layers: dict[str, nn.Module] = {
        "torch": nn.Conv2d(channels, channels, 3, padding=1),
        "ste": BinaryConv2d(channels, channels, 3, padding=1, config=SurgeConfig(aux=None)),
        "surge": BinaryConv2d(channels, channels, 3, padding=1),
        "surge, shared": BinaryConv2d(channels, channels, 3, padding=1, config=SurgeConfig(aux="shared")),
    }
    steps = {name: partial(lambda layer: layer(x).square().sum().backward(), layer) for name, layer in layers.items()}
    found = take_turns(steps, 2 if fast else 20)
    return {
        **found,
        "surge_over_ste": found["ms"]["surge"] / found["ms"]["ste"],
        "shared_over_ste": found["ms"]["surge, shared"] / found["ms"]["ste"],
    }


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "training": training,
    "muon": muon,
    "forward only": forward_only,
    "lsr1": lsr1,
    "surge": surge,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_parts(__doc__, PARTS, {})
