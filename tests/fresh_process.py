"""What a saved model answers in a process of its own: with what `prepare` imports, or as for someone who has never heard of acclimate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

WITHOUT_ACCLIMATE = """
import importlib.util, os
sys.path = [p for p in sys.path if not os.path.isdir(os.path.join(p, "acclimate"))]
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__ + getattr(f, "__module__", "")]
assert importlib.util.find_spec("acclimate") is None
"""
_SCRIPT = """
import json, sys
{prepare}
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
pairs, ids, output = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
found = {{}}
for number, (base, adapter) in enumerate(pairs):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found[str(number)] = model.eval()(input_ids=ids).logits
save_file(found, output)
"""


class FreshProcessError(Exception):
    """Carries what the process wrote to standard error."""


def logits_in_a_fresh_process(
    pairs: Sequence[tuple[str | Path, str | Path | None]],
    ids: list[list[int]],
    where: Path,
    prepare: str = WITHOUT_ACCLIMATE,
) -> list[Tensor]:
    """Logits of (base, adapter) directories, one tensor a pair, with stock transformers and PEFT. Raises FreshProcessError."""
    output = where / "fresh_process.safetensors"
    named = [[str(base), str(adapter) if adapter else None] for base, adapter in pairs]
    command = [sys.executable, "-c", _SCRIPT.format(prepare=prepare), json.dumps(named), json.dumps(ids), str(output)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=where, check=False)
    if result.returncode != 0:
        raise FreshProcessError(result.stderr)
    found = load_file(output)
    return [found[str(number)] for number in range(len(pairs))]
