"""What acclimate costs over the same training written by hand, and what its scoring saves. Ratios in one run.

    python benchmarks/overhead.py            # about ten minutes on two idle cores
    python benchmarks/overhead.py --fast     # a smoke test with a few steps

1. `acclimate tune` (classify, LoRA) against the same training on peft + transformers' Trainer, each in processes of its own,
   alternating: seconds per step, peak memory while training, seconds from process start to the end of the first step.
2. Scoring 150 intents: all choices packed behind one prompt, against each (prompt, choice) string on its own.
3. Training on answers: logits at the scored positions only, against logits at all positions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import command_line, write

MODEL = "smollm2"
BATCH = int(os.environ.get("OVERHEAD_BATCH", "16"))  # the workers are told through their environment
LR = 1e-3


# --- 1. the same training, by hand ---


def by_hand(rows_file: str, steps: int) -> None:
    """What a user writes today. Prints one JSON line: when the first step ended, seconds per step, peak memory."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from acclimate.models import resolve  # only for the path of the converted model
    from acclimate.runs import peak_memory, reset_peak_memory

    set_seed(0)
    path = resolve(MODEL)
    rows = [json.loads(line) for line in Path(rows_file).read_text().splitlines()]
    labels = sorted({row["label"] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(labels), dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear"))
    data = [{"input_ids": tokenizer(row["text"])["input_ids"], "labels": labels.index(row["label"])} for row in rows]

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012 - one run a process

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter() - self.begin)
            if len(self.ends) == 1:
                self.first = time.time()

    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LR, save_strategy="no", logging_steps=1,
            report_to="none", disable_tqdm=True, use_cpu=True, seed=0, data_seed=0, weight_decay=0.0, warmup_steps=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), train_dataset=data, callbacks=[clock])
        reset_peak_memory()
        trainer.train()
    print(json.dumps({"first": clock.first, "step": statistics.median(clock.ends[1:]), "peak": peak_memory()}))


def ours(rows_file: str, steps: int) -> None:
    """The same through acclimate's command line; the score of the untouched model is timed apart, since it is extra."""
    from acclimate import training
    from acclimate.pipeline import tune
    from acclimate.recipe import Recipe

    first: list[float] = []
    original = training._Watch.on_step_end

    def on_step_end(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not first:
            first.append(time.time())

    training._Watch.on_step_end = on_step_end  # type: ignore[method-assign]
    train = {"max_steps": steps, "batch_size": BATCH, "lr": LR, "save_every": 10_000}
    # the same file for evaluation, so that training sees the same rows as by hand, in the same order
    recipe = Recipe(
        model=MODEL, data=rows_file, eval_data=rows_file, task="classify", max_eval_samples=8, train=train, device="cpu"
    )
    with tempfile.TemporaryDirectory() as output:
        info = tune(recipe, directory=Path(output) / "run").info
    print(
        json.dumps(
            {
                "first": first[0] - info["timings"]["evaluate before"],
                "step": info["seconds_per_step"],
                "peak": info["peak_memory_bytes"],
            }
        )
    )


def worker(which: str, rows_file: str, steps: int) -> dict[str, float]:
    """What this script prints when it is started afresh for one measurement."""
    command = [sys.executable, __file__, "--worker", which, "--rows", rows_file, "--steps", str(steps)]
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if result.returncode != 0:
        sys.exit(result.stderr)
    return json.loads(result.stdout.strip().splitlines()[-1])


def timed(which: str, rows_file: str, steps: int) -> dict[str, float]:
    start = time.time()
    found = worker(which, rows_file, steps)
    return {"step": found["step"], "peak": found["peak"], "startup": found["first"] - start}


def overhead(steps: int, repeats: int) -> dict[str, Any]:
    from acclimate.data import read_table, sample

    table = sample(read_table("clinc150"), max(32, steps * BATCH), 0)
    rows = [{"text": row["text"], "label": row["domain"]} for row in table.rows]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs: dict[str, list[dict[str, float]]] = {"hand": [], "ours": []}
        for _ in range(repeats):
            for which, found in runs.items():
                found.append(timed(which, str(file), steps))
                print(f"  {which}: {found[-1]}", file=sys.stderr)
    middle = {w: {k: statistics.median(r[k] for r in found) for k in found[0]} for w, found in runs.items()}
    return {
        "step_time_ratio": middle["ours"]["step"] / middle["hand"]["step"],
        "peak_memory_ratio": middle["ours"]["peak"] / middle["hand"]["peak"],
        "startup_difference_seconds": middle["ours"]["startup"] - middle["hand"]["startup"],
        "runs": runs,
    }


# --- 2. scoring 150 choices ---


def scoring(prompts: int, choices: int | None = None) -> dict[str, Any]:
    """Of `prompts`; one at a time only the first `choices` of each, if given (then the ratio says nothing)."""
    from acclimate import prepare
    from acclimate.recipe import Recipe
    from acclimate.scoring import Item, score
    from acclimate.show import Silent
    from acclimate.tasks import get_task

    recipe = prepare.with_sample_defaults(Recipe(model=MODEL, data="clinc150-intent", max_eval_samples=prompts))
    task = get_task("choice")
    train, held_out = prepare.load_tables(recipe)
    recipe = task.complete(recipe, train)
    model, tokenizer = prepare.load_for(task, recipe, Silent())
    from acclimate.data import sample

    items = [e.item for e in task.examples(sample(held_out, prompts, 1), recipe, tokenizer).items]
    strings = [Item(item.prompt, [choice]) for item in items for choice in item.choices[:choices]]
    score(model, items[:1], tokenizer.pad_token_id)  # the first call pays for page faults and code caches
    start = time.perf_counter()
    packed = score(model, items, tokenizer.pad_token_id)
    middle = time.perf_counter()
    # one string at a time in full batches: the prompt is computed again for each of the 150 choices
    single = score(model, strings, tokenizer.pad_token_id)
    end = time.perf_counter()
    together = [s.total for row in packed for s in row[:choices]]
    alone = [row[0].total for row in single]
    return {
        "prompts": prompts,
        "choices": len(items[0].choices),
        "throughput_ratio": (end - middle) / (middle - start),
        "largest_difference": max(abs(a - b) for a, b in zip(together, alone, strict=True)),
    }


# --- 3. logits only where there are labels ---


def label_step(which: str, steps: int) -> None:
    """Forward and backward on one batch with the logits that `which` asks for. Prints seconds and growth of memory."""
    import torch

    from acclimate import prepare
    from acclimate.data import sample
    from acclimate.recipe import Recipe
    from acclimate.runs import peak_memory, reset_peak_memory
    from acclimate.scoring import MODEL_KEYS, edge_logprobs, pack, scored_logits
    from acclimate.show import Silent
    from acclimate.tasks import get_task

    recipe = prepare.with_sample_defaults(Recipe(model=MODEL))
    task = get_task("choice")
    table, _ = prepare.load_tables(recipe)
    recipe = task.complete(recipe, table)
    model, tokenizer = prepare.load_for(task, recipe, Silent())
    model = prepare.attach(model, recipe, task).train()
    items = [e.item for e in task.examples(sample(table, BATCH, 0), recipe, tokenizer).items]
    packed = pack(items, tokenizer.pad_token_id)

    def loss() -> torch.Tensor:
        if which == "at_labels":
            return -edge_logprobs(scored_logits(model, packed), packed).mean()
        logits = model(**{key: packed[key] for key in MODEL_KEYS}, use_cache=False).logits
        return -edge_logprobs(logits[:, -packed["logits_to_keep"] :], packed).mean()

    for parameter in model.parameters():
        parameter.data.sum()  # the file is memory-mapped: touch every weight before memory is measured
    reset_peak_memory()
    before, times = peak_memory(), []
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss().backward()
        times.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak_growth": peak_memory() - before}))


def label_only(steps: int, repeats: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"at_labels": [], "everywhere": []}
    for _ in range(repeats):
        for which, results in found.items():
            results.append(worker(which, "", steps))
            print(f"  {which}: {results[-1]}", file=sys.stderr)
    middle = {w: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for w, rs in found.items()}
    ratios = {k: middle["at_labels"][k] / middle["everywhere"][k] for k in ("seconds", "peak_growth")}
    return {**middle, "time_ratio": ratios["seconds"], "memory_growth_ratio": ratios["peak_growth"]}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--worker", choices=["hand", "ours", "at_labels", "everywhere"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.worker:
        if options.worker in ("hand", "ours"):
            (by_hand if options.worker == "hand" else ours)(options.rows, options.steps)
        else:
            label_step(options.worker, options.steps)
        return
    if options.fast:
        steps, repeats, prompts, choices = 2, 1, 1, 10
        os.environ["OVERHEAD_BATCH"] = "2"
    else:
        steps, repeats, prompts, choices = options.steps, 3, 8, None
    result = {
        "overhead": overhead(steps, repeats),
        "scoring": scoring(prompts, choices),
        "label_only": label_only(min(steps, 8), repeats),
    }
    print(write(result, options.output))


if __name__ == "__main__":
    main()
