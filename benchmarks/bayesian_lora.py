"""What Bayesian-LoRA costs next to peft's LoRA. Ratios in one run, the systems taking turns.

    python benchmarks/bayesian_lora.py            # about five minutes on two idle cores
    python benchmarks/bayesian_lora.py --fast     # a smoke test with small sizes

1. A training step of SmolLM2-135M, query and value projections adapted, rank 8: LoRA, Bayesian-LoRA with a draw, the same with
   draw and KL (the last third of a training), and its mean alone.
2. The same on two wide random layers, as a large model has them: there the adapter is a small part of the work.
3. Prediction with 8 draws against one pass, with the last 10 of 30 blocks adapted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import command_line, take_turns, write
from peft import LoraConfig, get_peft_model
from torch import nn

from acclimate.adapters import BayesianLoraConfig
from acclimate.adapters.bayesian_lora.predict import predict_proba
from acclimate.adapters.bayesian_lora.training import kl_loss
from acclimate.models import load_model

BARS = {"smollm2": 1.3, "wide": 1.2, "mean": 1.05, "prediction": 3.0}


def arms(
    build: Callable[[], nn.Module], targets: list[str], loss: Callable[[nn.Module], torch.Tensor]
) -> dict[str, Any]:
    """A whole step (forward, backward, AdamW) of each system."""
    common: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": targets}
    configs = {
        "lora": LoraConfig(**common),
        "draw": BayesianLoraConfig(**common, n_train=64),
        "draw and kl": BayesianLoraConfig(**common, n_train=64),
        "mean": BayesianLoraConfig(**common, n_train=64, train="mean"),
    }
    steps: dict[str, Any] = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = get_peft_model(build(), config).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

        def step(name: str = name, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            value = loss(model)
            if name == "draw and kl":
                value = value + kl_loss(model, 1.0)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

        steps[name] = step
    return steps


def smollm2(rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    ids = torch.randint(100, 10_000, (rows, tokens), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=ids, logits_to_keep=1).logits[:, -1]
        return nn.functional.cross_entropy(logits, ids[:, 0])

    found = take_turns(arms(lambda: load_model("smollm2")[0], ["q_proj", "v_proj"], loss), rounds)
    return {"rows": rows, "tokens": tokens, **found}


class Wide(nn.Module):
    """Two blocks of what a large model's layers are made of: wide projections and an MLP, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up_proj, self.down_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + torch.tanh(self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x)))
            x = x + self.down_proj(torch.relu(self.up_proj(x)))
        return x


def wide(width: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, base = torch.randn(tokens, width), Wide(width).requires_grad_(False)
    state = base.state_dict()

    def build() -> nn.Module:
        model = Wide(8)  # built small, then given the shared weights
        for name, module in model.named_children():
            module.weight = nn.Parameter(state[f"{name}.weight"], requires_grad=False)
            module.out_features, module.in_features = module.weight.shape
        return model

    found = take_turns(arms(build, ["q_proj", "v_proj"], lambda model: model(x).square().mean()), rounds)
    return {"width": width, "tokens": tokens, **found}


def prediction(rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    model, _ = load_model("smollm2")
    config = BayesianLoraConfig(
        target_modules=["q_proj", "v_proj"], layers_to_transform=list(range(20, 30)), layers_pattern="layers"
    )
    model = get_peft_model(model, config).eval()
    ids = torch.randint(100, 10_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    choices = torch.tensor([10, 20])
    steps = {f"{n or 1} pass" if n is None else f"{n} draws": n for n in (None, 8)}
    found = take_turns({name: lambda n=n: predict_proba(model, batch, n, choices) for name, n in steps.items()}, rounds)  # type: ignore[misc]
    return {"rows": rows, "tokens": tokens, "adapted_blocks": 10, "blocks": 30, **found}


def main() -> None:
    options = command_line(__doc__).parse_args()
    if options.fast:
        found = {"smollm2": smollm2(2, 8, 1), "wide": wide(64, 32, 1), "prediction": prediction(2, 8, 1)}
    else:
        found = {"smollm2": smollm2(16, 28, 12), "wide": wide(2048, 512, 12), "prediction": prediction(16, 28, 8)}
    steps = [found["smollm2"]["ratio"], found["wide"]["ratio"]]
    result = {
        **found,
        "bars": BARS,
        "summary": {
            "smollm2": max(steps[0]["draw"], steps[0]["draw and kl"]),
            "wide": max(steps[1]["draw"], steps[1]["draw and kl"]),
            "mean": max(ratio["mean"] for ratio in steps),
            "prediction": found["prediction"]["ratio"]["8 draws"],
        },
        "threads": torch.get_num_threads(),
    }
    print(write(result, options.output))


if __name__ == "__main__":
    main()
