"""How long finding a Fisher start takes next to PEFT's data-driven starts, on the same batches. Ratios in one run, taking turns.

    python benchmarks/fisher_init.py            # about fifteen minutes of one core
    python benchmarks/fisher_init.py --fast     # a smoke test with one round and few rows

SmolLM2-135M-Instruct, LoRA r=8, worked GSM8K problems of at most 112 tokens in batches of 8, loss on the answer. LoRA-GA and
Fisher run forward and backward over all batches, EVA forward until its directions have settled. PEFT's `get_peft_model` is
part of each time, since LoRA-GA's decomposition happens there. "epoch" is one training epoch of LoRA on the same batches. Times are
seconds of the processor on one thread, which other work on the machine hardly changes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from common import command_line, write
from peft import EvaConfig, LoraConfig, LoraGAConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora import preprocess_loraga
from threadpoolctl import threadpool_limits

from acclimate import models
from acclimate.adapters.fisher import fisher_init
from acclimate.claims.gsm8k import problems

Batches = list[dict[str, torch.Tensor]]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def batches_of(tokenizer: Any, count: int) -> Batches:
    rows, found = problems(tokenizer, count), []
    for start in range(0, count, 8):
        part = rows[start : start + 8]
        width = max(len(ids) for ids, _ in part)

        def padded(values: list[list[int]], fill: int, width: int = width) -> torch.Tensor:
            return torch.tensor([v + [fill] * (width - len(v)) for v in values])

        found.append(
            {
                "input_ids": padded([ids for ids, _ in part], tokenizer.eos_token_id),
                "attention_mask": padded([[1] * len(ids) for ids, _ in part], 0),
                "labels": padded([[-100] * begin + ids[begin:] for ids, begin in part], -100),
            }
        )
    return found


def eva(model: Any, options: dict[str, Any], batches: Batches) -> None:
    config = LoraConfig(**options, init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
    initialize_lora_eva_weights(get_peft_model(model, config), batches, show_progress_bar=False)


def lora_ga(model: Any, options: dict[str, Any], batches: Batches) -> None:
    more: dict[str, Any] = {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}
    config = LoraConfig(**options, **more)

    def train_step() -> None:
        for batch in batches:
            model(**batch).loss.backward()

    preprocess_loraga(model, config, train_step)
    get_peft_model(model, config)


def fisher(model: Any, options: dict[str, Any], batches: Batches) -> None:
    fisher_init(get_peft_model(model, LoraConfig(**options)), batches, n_examples=8 * len(batches))


def epoch(model: Any, options: dict[str, Any], batches: Batches) -> None:
    peft_model = get_peft_model(model, LoraConfig(**options))
    optimiser = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-4)
    for batch in batches:
        peft_model(**batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


SYSTEMS: dict[str, Callable[[Any, dict[str, Any], Batches], None]] = {
    "fisher": fisher,
    "lora-ga": lora_ga,
    "eva": eva,
    "epoch": epoch,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.set_defaults(output=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    rounds, count = (1, 2) if arguments.fast else (3, 64)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threadpool_limits(1)
    whole, tokenizer = models.load_model("smollm2")
    batches = batches_of(tokenizer, count)
    result: dict[str, Any] = {"rows": count, "tokens": sum(int(b["attention_mask"].sum()) for b in batches)}
    choices = {"q and v": ["q_proj", "v_proj"], "all linear layers": LINEAR}
    for name, targets in list(choices.items())[: 1 if arguments.fast else None]:
        options = {"r": 8, "lora_alpha": 16, "target_modules": targets}
        seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for number in range(rounds):
            for system, work in SYSTEMS.items():
                if number and system not in ("fisher", "lora-ga"):  # what the bar compares
                    continue
                model = copy.deepcopy(whole)
                begun = time.process_time()
                with redirect_stderr(StringIO()):
                    work(model, options, batches)
                seconds[system].append(round(time.process_time() - begun, 3))
                print(f"  {name}, {system}: {seconds[system][-1]:.1f} s", file=sys.stderr)
        middle = {system: statistics.median(values) for system, values in seconds.items()}
        ratios = {
            f"{other}_ratio": round(middle["fisher"] / middle[other], 3) for other in SYSTEMS if other != "fisher"
        }
        result[name] = {**ratios, "seconds": seconds}
        text = write(result, arguments.output)
    print(text)


if __name__ == "__main__":
    main()
