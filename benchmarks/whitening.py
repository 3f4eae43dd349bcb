"""Time of shift-aware whitening next to static whitening, and of low-rank layers next to dense ones. Ratios in one run, taking turns.

    python benchmarks/whitening.py            # about five minutes on two idle cores
    python benchmarks/whitening.py --fast     # a smoke test with small sizes

"refresh": compressing the first 6 blocks of SmolLM2-135M at ratio 0.2 on 8 windows of 512 tokens of WikiText-2, with statistics anew for each
group of layers or each block, over that with statistics of the original model (SVD-LLM). "inference": a 4096 x 4096 layer at ratio 0.4 over the
dense one. "gram": adding rows to the moments of 1,536 inputs over torch's own product of the same matrices.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from common import command_line, take_turns, write
from torch import nn

from acclimate import data, models
from acclimate.compress.blocks import InputMoments
from acclimate.compress.low_rank_linear import LowRankLinear
from acclimate.compress.text import windows
from acclimate.compress.whitening import compress_low_rank, uniform_rank
from acclimate.prefix import blocks


def refresh(fast: bool) -> dict[str, Any]:
    model, tokenizer = models.load_model("smollm2")
    parent, name = blocks(model)
    count = 1 if fast else 6
    setattr(parent, name, getattr(parent, name)[:count])
    model.config.num_hidden_layers = count
    text = data.read_text("wikitext2", split="validation")
    ids = windows(tokenizer, text, 2 if fast else 8, 64 if fast else 512, seed=0)

    def compress(**options: Any) -> None:
        compress_low_rank(copy.deepcopy(model), ids, 0.2, beta=0.0, progress=False, **options)

    return take_turns(
        {
            "none": lambda: compress(refresh="none"),
            "block": lambda: compress(refresh="block"),
            "group": lambda: compress(refresh="group"),
            "none, cholesky": lambda: compress(refresh="none", solver="cholesky"),
            "group, cholesky": lambda: compress(refresh="group", solver="cholesky"),
        },
        1 if fast else 3,
    )


@torch.no_grad()
def inference(fast: bool) -> dict[str, Any]:
    size = 256 if fast else 4096
    dense = nn.Linear(size, size, bias=False)
    low = LowRankLinear(size, size, uniform_rank(size, size, 0.4), bias=False)
    found: dict[str, Any] = {"rank": low.rank, "bytes_ratio": 2 * low.rank / size}
    for tokens in (1, 128, 512):
        x = torch.randn(tokens, size)
        steps = {"dense": lambda x=x: dense(x), "low rank": lambda x=x: low(x)}
        found[f"{tokens} tokens"] = take_turns(steps, 2 if fast else 20)
    return found


@torch.no_grad()
def gram(fast: bool) -> dict[str, Any]:
    x = torch.randn(256 if fast else 4096, 96 if fast else 1536)
    moments = InputMoments(x.shape[1], root=False, cross=False, clip_norm=None)
    return take_turns({"torch": lambda: x.T @ x, "moments": lambda: moments.add(x)}, 2 if fast else 10)


def main() -> None:
    parser = command_line(__doc__)
    parser.set_defaults(output=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"threads": torch.get_num_threads()}
    for part in (gram, inference, refresh):
        print(part.__name__, file=sys.stderr)
        result[part.__name__] = part(arguments.fast)
    print(write(result, arguments.output))


if __name__ == "__main__":
    main()
