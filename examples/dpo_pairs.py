"""Teach a model which of two answers people prefer, and see how far apart it puts them."""

import argparse
import json
import tempfile
from pathlib import Path

from acclimate import tune

PAIRS = [
    ("Can I return it?", " Yes, within 30 days.", " Read the terms."),
    ("Is it waterproof?", " Yes, to a depth of one metre.", " Probably."),
    ("When do you open?", " At nine, from Monday to Friday.", " In the morning."),
    ("Where are you?", " At 12 Mill Lane, near the station.", " Look at the map."),
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="embedded name, directory or hub id of a causal language model")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--output", default="runs/example-dpo")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    rows = Path(folder) / "pairs.jsonl"
    lines = [json.dumps({"prompt": p, "chosen": c, "rejected": r}) for p, c, r in PAIRS]
    rows.write_text("\n".join(lines), encoding="utf-8")
    train = {"max_steps": args.steps, "batch_size": 3}
    run = tune(model=args.model, data=str(rows), task="dpo", train=train, directory=args.output, overwrite=True)

scores = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
for when in ("before", "after"):
    print(when, f"margin {scores[when]['metrics']['margin']['value']:.2f} nats")
