"""Time of ProjQ next to GPTQ, layer by layer. Ratios in one run, taking turns.

    python benchmarks/projq.py            # about a minute of one core
    python benchmarks/projq.py --fast     # a smoke test with small layers

The layers have the shapes of SmolLM2-135M's; weights are random, inputs are correlated, 3 bits in groups of 64, rank 16. ProjQ takes T = 5 rounds
after GPTQ's. "to_pass": its time over that of a single bare GPTQ pass, of which it takes T + 1, next to the spectra of the errors and the
adapter. "to_gptq": over GPTQ with the same adapter. "target" is 1.2 (T + 1), meant for "to_pass". Times are seconds of the processor
on one thread, which other work on the machine hardly changes.

gptqmodel wants torch 2.14.1 or newer, so our GPTQ is not compared with it here.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import command_line, write
from threadpoolctl import threadpool_limits

from acclimate.compress.gptq import Grid, gptq
from acclimate.compress.projq import ITERATIONS, project_and_quantize
from acclimate.linalg import whitening_pair

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536))


def layer(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(W, S, S^-1) of a random layer with correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(4 * n, n, generator=generator) @ torch.randn(n, n, generator=generator)
    C = (mixed.T @ mixed).double() / len(mixed)
    S, S_inv = whitening_pair(C, 1e-6 * float(C.trace()) / n)
    return torch.randn(m, n, generator=generator), S, S_inv


def measure(fast: bool) -> dict[str, Any]:
    grid, rank = Grid(3, 64), 16
    found: dict[str, Any] = {}
    for m, n in ((64, 128),) if fast else SHAPES:
        W, S, S_inv = layer(m, n)
        C = S @ S.T
        steps = {
            "pass": lambda W=W, C=C: gptq(W, C, grid),
            "gptq": lambda W=W, S=S, S_inv=S_inv: project_and_quantize(W, S, S_inv, grid, rank, method="gptq"),
            "projq": lambda W=W, S=S, S_inv=S_inv: project_and_quantize(W, S, S_inv, grid, rank),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        rounds = 0
        for turn in range(2 if fast else 6):
            for name, step in steps.items():
                begun = time.process_time()
                made = step()
                if turn:  # the first is not counted
                    seconds[name].append(time.process_time() - begun)
            rounds = len(made.losses)

        def ratio(other: str, seconds: dict[str, list[float]] = seconds) -> float:
            return statistics.median(a / b for a, b in zip(seconds["projq"], seconds[other], strict=True))

        found[f"{m} x {n}"] = {
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "passes": rounds,
            "to_pass": ratio("pass"),
            "to_gptq": ratio("gptq"),
        }
        print(f"  {m} x {n}: {found[f'{m} x {n}']}", file=sys.stderr)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.set_defaults(output=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        result: dict[str, Any] = {"target": 1.2 * (ITERATIONS + 1), "layers": measure(arguments.fast)}
    result["gptqmodel"] = "skipped: wants torch 2.14.1 or newer"
    print(write(result, arguments.output))


if __name__ == "__main__":
    main()
