"""Teach a language model to sort requests into ten topics, and see what changed.

python examples/tune_choice.py --steps 60 does the whole demonstration.
"""

import argparse
import json

from acclimate import predict, tune

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="embedded name, directory or hub id of a causal language model")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--output", default="runs/example-choice")
args = parser.parse_args()

run = tune(
    model=args.model,
    data="clinc150",
    max_eval_samples=40,
    train={"max_steps": args.steps},
    directory=args.output,
    overwrite=True,
)
scores = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
print(scores["differences"]["accuracy"]["words"])
for row in predict(run.path, [{"text": "what is my balance"}, {"text": "play some jazz"}]):
    print(f"{row['text']}: {row['prediction']} ({row['confidence']:.2f})")
print("report:", run / "report.html")
