"""Which adapter is better here, and is the difference real? Two adapters on the same rows, steps and seeds."""

import argparse
import shutil

from acclimate import compare

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="embedded name, directory or hub id of a causal language model")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--seeds", type=int, default=1, help="three or more, to learn about chance in training")
parser.add_argument("--output", default="runs/example-compare")
args = parser.parse_args()

shutil.rmtree(args.output, ignore_errors=True)
result = compare(
    vary={"adapter": ["lora", "ia3"]},
    seeds=args.seeds,
    budget=f"steps={args.steps}",
    directory=args.output,
    model=args.model,
    data="clinc150",
    max_eval_samples=24,
)
for cell in result.document["cells"]:
    print(f"{cell['name']}: accuracy {cell['metrics']['accuracy']['value']:.3f}, {cell['trainable']:,} trained")
print("\n".join(result.document["conclusion"]))
