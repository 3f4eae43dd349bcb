"""Use what acclimate trained without acclimate: the exported folder is an ordinary PEFT adapter."""

import argparse
import shutil

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

from acclimate import export, tune

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="embedded name, directory or hub id of a causal language model")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--output", default="runs/example-peft")
args = parser.parse_args()

train = {"max_steps": args.steps}
run = tune(model=args.model, max_eval_samples=8, train=train, directory=args.output, overwrite=True)
shutil.rmtree(f"{args.output}-adapter", ignore_errors=True)
folder = export(run.path, "peft", f"{args.output}-adapter")

# from here on only PEFT and transformers
model = AutoPeftModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
words = ["bank", "credit", "food", "travel", "work"]
tokens = [tokenizer(" " + word, add_special_tokens=False)["input_ids"][0] for word in words]
inputs = tokenizer("Request: what is my balance\nTopic:", return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0, -1, tokens]
for word, value in zip(words, logits.softmax(0).tolist(), strict=True):
    print(f"{word:8}{value:.2f}")
