"""What a training step with FrameFT costs next to peft's FourierFT and LoRA. Ratios in one run, the systems taking turns.

    python benchmarks/frameft.py            # about five minutes on two idle cores
    python benchmarks/frameft.py --fast     # a smoke test with small sizes

1. One 4096 x 4096 layer, 2,048 tokens, float32, forward and backward: the layer with its adapter, and the adapter alone (on a
   base layer that computes nothing). FourierFT has as many coefficients as FrameFT.
2. A whole step of SmolLM2-135M with the query and value projections adapted: FrameFT, next to LoRA of rank 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import command_line, take_turns, write
from peft import FourierFTConfig, LoraConfig, get_peft_model
from torch import Tensor, nn

from acclimate.adapters import FrameFTConfig

COEFFICIENTS = 1000


class Nothing(nn.Linear):
    """A linear layer whose own product is left out."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)


def configurations(targets: list[str]) -> dict[str, Any]:
    return {
        "frameft": FrameFTConfig(n_coefficients=COEFFICIENTS, target_modules=targets, init_std=1.0),
        "frameft, compact support": FrameFTConfig(
            n_coefficients=COEFFICIENTS, target_modules=targets, support="compact", init_std=1.0
        ),
        "fourierft": FourierFTConfig(n_frequency=COEFFICIENTS, target_modules=targets),
        "lora": LoraConfig(r=8, target_modules=targets, init_lora_weights=False),
    }


def layer(width: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, g = torch.randn(tokens, width), torch.randn(tokens, width)

    def step_of(kind: type[nn.Linear], config: Any) -> Callable[[], Any]:
        model: nn.Module = nn.Sequential(kind(width, width, bias=False)).requires_grad_(False)
        if config is not None:
            model = get_peft_model(model, config)

        # the input needs a gradient, as in every layer but the first
        return lambda: model(x.detach().requires_grad_()).backward(g)

    whole = take_turns(
        {name: step_of(nn.Linear, config) for name, config in {"base": None, **configurations(["0"])}.items()}, rounds
    )["ms"]
    alone = take_turns({name: step_of(Nothing, config) for name, config in configurations(["0"]).items()}, rounds)["ms"]
    return {
        "width": width,
        "tokens": tokens,
        "coefficients": COEFFICIENTS,
        "layer_ms": whole,
        "adapter_alone_ms": alone,
        "layer_speedup_over_fourierft": whole["fourierft"] / whole["frameft"],
        "adapter_alone_speedup_over_fourierft": alone["fourierft"] / alone["frameft"],
    }


def model_step(batch: int, length: int, rounds: int) -> dict[str, Any]:
    from acclimate.models import load_model

    torch.manual_seed(0)
    ids = torch.randint(10, 40_000, (batch, length))

    def step_of(config: Any) -> Callable[[], Any]:
        base, _ = load_model("smollm2")
        model = get_peft_model(base, config).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        return step

    chosen = configurations(["q_proj", "v_proj"])
    times = take_turns({name: step_of(chosen[name]) for name in ("frameft", "fourierft", "lora")}, rounds)["ms"]
    return {
        "model": "SmolLM2-135M",
        "batch": batch,
        "length": length,
        "step_ms": times,
        "step_time_over_lora": times["frameft"] / times["lora"],
        "step_time_over_fourierft": times["frameft"] / times["fourierft"],
    }


def main() -> None:
    options = command_line(__doc__).parse_args()
    result = {
        "layer": layer(64, 16, 1) if options.fast else layer(4096, 2048, 9),
        "model": model_step(1, 8, 1) if options.fast else model_step(4, 256, 9),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(write(result, options.output))


if __name__ == "__main__":
    main()
