"""Train a classification head and a LoRA on a sentence encoder, and show the weakest classes."""

import argparse
import json

from acclimate import tune

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="minilm", help="embedded name, directory or hub id of an encoder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="runs/example-classify")
args = parser.parse_args()

run = tune(
    model=args.model,
    data="clinc150",
    task="classify",
    max_eval_samples=200,
    train={"max_steps": args.steps},
    directory=args.output,
    overwrite=True,
)
after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["after"]
print(f"accuracy {after['metrics']['accuracy']['value']:.3f}, ECE {after['metrics']['ece']['value']:.3f}")
for row in sorted(after["per_class"], key=lambda row: row["accuracy"])[:3]:
    print(f"  {row['class']}: {row['accuracy']:.2f} of {row['n']}")
