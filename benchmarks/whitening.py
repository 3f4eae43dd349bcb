"""Time of shift-aware whitening next to static whitening, and of low-rank layers next to dense ones. Ratios in one run, taking turns.

    python benchmarks/whitening.py            # about ten minutes on two idle cores
    python benchmarks/whitening.py --fast     # a smoke test with small sizes

"refresh": compressing the first 3 blocks of SmolLM2-135M at ratio 0.2 on 8 windows of 512 tokens of WikiText-2, with statistics anew for each
group of layers or each block, over that with statistics of the original model (SVD-LLM). "inference": a 4096 x 4096 layer at ratio 0.4 over the
dense one. "gram": adding rows to the moments of 1,536 inputs over torch's own product of the same matrices. "memory": the whole command on a
model of 2.1 GB.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import measure_parts, peak, take_turns
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from acclimate import data, models
from acclimate.compress.blocks import InputMoments
from acclimate.compress.low_rank_linear import LowRankLinear
from acclimate.compress.text import windows
from acclimate.compress.whitening import compress_low_rank, uniform_rank
from acclimate.prefix import blocks


def refresh(fast: bool) -> dict[str, Any]:
    model, tokenizer = models.load_model("smollm2")
    parent, name = blocks(model)
    count = 1 if fast else 3
    setattr(parent, name, getattr(parent, name)[:count])
    model.config.num_hidden_layers = count
    text = data.read_text("wikitext2", split="validation")
    ids = windows(tokenizer, text, 2 if fast else 8, 64 if fast else 512, seed=0)

    targets = ["q_proj"] if fast else "all-linear"

    def compress(**options: Any) -> None:
        compress_low_rank(copy.deepcopy(model), ids, 0.2, targets=targets, beta=0.0, progress=False, **options)

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


def memory(fast: bool) -> dict[str, Any]:
    """Megabytes for a model of 16 blocks and 2.1 GB, and above what one of 2 narrow blocks takes."""
    large = compress_peak(2 if fast else 16, 64 if fast else 1536)
    if fast:
        return {"peak_rss_mb": large}
    return {"peak_rss_mb": large, "above_nothing_mb": large - compress_peak(2, 64)}


def compress_peak(count: int, width: int) -> float:
    tokenizer = models.load_model("smollm2")[1]
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=count,
                num_attention_heads=width // 32, num_key_value_heads=width // 32, tie_word_embeddings=True,
            )
        )  # fmt: skip
        place = Path(folder)
        model.save_pretrained(place / "model", max_shard_size="500MB")
        tokenizer.save_pretrained(place / "model")
        del model
        small = [
            "--sequences",
            "2",
            "--seqlen",
            "128",
            "--target",
            "o_proj",
        ]  # what is done to a block does not depend on how many there are
        return peak(["compress", str(place / "model"), "-o", str(place / "out"), *small])


PARTS = {"gram": gram, "inference": inference, "refresh": refresh, "memory": memory}


if __name__ == "__main__":
    measure_parts(__doc__, PARTS, {"threads": torch.get_num_threads()})
