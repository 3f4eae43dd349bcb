"""Fine-tune a chat model on a few conversations, and ask it something. Loss and scores are those of the answers only."""

import argparse
import json
import tempfile
from pathlib import Path

from acclimate import predict, tune

QUESTIONS = {
    "Where is my parcel?": "Please give me your order number, and I will look.",
    "I want to cancel.": "Which order is it? Please give me its number.",
    "Do you ship to Norway?": "Yes. It takes three to five days.",
    "The lamp is broken.": "I am sorry. Shall I send a new one or refund it?",
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="embedded name, directory or hub id of a chat model")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--output", default="runs/example-sft")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    chats = Path(folder) / "chats.jsonl"
    with chats.open("w", encoding="utf-8") as file:
        for question, answer in QUESTIONS.items():
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    train = {"max_steps": args.steps, "batch_size": 3}
    run = tune(model=args.model, data=str(chats), task="sft", train=train, directory=args.output, overwrite=True)

question = [{"role": "user", "content": "Where is my parcel?"}]
for row in predict(run.path, [{"prompt": question}]):
    print(row["completion"])
