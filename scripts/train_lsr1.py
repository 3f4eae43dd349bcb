"""Train the policies that come with acclimate, and the peers of its claim: `python scripts/train_lsr1.py [NAME ...] [--steps N]`.

    generic            quadratics, test functions, logistic regressions, curve fits     -> src/acclimate/optim/policies
    pose               frames 1-300 of the motion clip                                  -> src/acclimate/optim/policies
    *-no-secant        the same without the secant penalty                              -> src/acclimate/claims/lsr1_peers
    pose-strong-secant with the penalty of `generic`                                    -> src/acclimate/claims/lsr1_peers
    pose-lgd           learned gradient descent in place of L-SR1                       -> src/acclimate/claims/lsr1_peers

Seed 0, one thread. 2,000 steps each: two to four minutes of one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from acclimate.claims.lsr1 import LearnedGradientDescent, learned_gd
from acclimate.optim.meta_training import families, meta_train
from acclimate.optim.sr1_policy import LSR1Policy, direction

PACKAGE = Path(__file__).parents[1] / "src" / "acclimate"
SHIPPED, PEERS = PACKAGE / "optim" / "policies", PACKAGE / "claims" / "lsr1_peers"
TASKS = {"generic": ("quadratic", "functions", "logistic", "curves"), "pose": ("pose",)}
# 0.01 for poses: better than 0.1 on frames 301-330, which no policy was trained on
PENALTIES = {"generic": 0.1, "pose": 0.01, "pose-strong-secant": 0.1}
NAMES = ("pose", "pose-lgd", "generic", "pose-no-secant", "pose-strong-secant", "generic-no-secant")


def train(name: str, steps: int, out: Path | None) -> None:
    kind, _, variant = name.partition("-")
    torch.manual_seed(0)
    lgd = variant == "lgd"
    policy = LearnedGradientDescent() if lgd else LSR1Policy(name=name)
    if isinstance(policy, LSR1Policy) and kind == "generic":
        with torch.no_grad():
            policy.vector[2].bias[0] = 2.0  # a gate of 0.98: close to SR1, which is hard to beat on quadratics
    history = meta_train(
        policy,
        families(TASKS[kind]),
        steps=steps,
        w_sec=PENALTIES.get(name, 0.0),
        rule=learned_gd if lgd else direction,
        report=lambda line: print(f"{name}: {line}", flush=True),
    )
    directory = (out or (PEERS if variant else SHIPPED)) / name
    if isinstance(policy, LSR1Policy):
        policy.save_pretrained(directory)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(policy.state_dict(), directory / "model.safetensors")
    recent = slice(-100, None)
    summary = {
        "meta_steps": steps,
        "seed": 0,
        "dropped": dict(history.dropped),
        "last_100": {"loss": sum(history.loss[recent]) / 100, "residual": sum(history.residual[recent]) / 100},
    }
    print(name, json.dumps(summary), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a directory in place of the package's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for one in options.names:
        train(one, options.steps, options.out)
