"""Two gloo processes with the same global batch learn and score what one process does.

Tolerance: the two sum gradients in another order, so losses agree to fp32 rounding (relative 1e-4 after Adam has amplified
it over a dozen steps), not bit for bit. Scoring does not train: its rows must agree to 1e-5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from conftest import colour_rows, write_jsonl

LAUNCH = (
    # --multi_gpu is accelerate's word for "start several processes with torchrun"; without GPUs they talk through gloo
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
)  # fmt: skip
HERE = Path(__file__).parent


def run(*command: str, cwd: Path) -> str:
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(HERE))
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def losses(path: Path) -> np.ndarray:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return np.array([row["loss"] for row in rows if "loss" in row])


@pytest.fixture(scope="module")
def plans(tiny_lm: Path, tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    where = tmp_path_factory.mktemp("data")
    rows = colour_rows(40)
    files = {
        "words": write_jsonl(where / "words.jsonl", rows),
        "pairs": write_jsonl(
            where / "pairs.jsonl", [{"prompt": r["text"], "completion": " " + r["label"]} for r in rows]
        ),
        "dpo": write_jsonl(
            where / "dpo.jsonl",
            [
                {
                    "prompt": r["text"],
                    "chosen": " " + r["label"],
                    "rejected": " red" if r["label"] != "red" else " blue",
                }
                for r in rows
            ],
        ),
    }
    train = {"lr": 5e-3, "max_steps": 8, "batch_size": 8, "micro_batch_size": 2, "save_every": 100}
    base = {"train": train, "model": str(tiny_lm)}
    return {
        "choice": base | {"data": str(files["words"]), "task": "choice"},
        "answer": base | {"data": str(files["words"]), "task": "choice", "labels": {"red": "red and hot", "green": "green", "blue": "blue sky"}},
        "sft": base | {"data": str(files["pairs"]), "task": "sft"},
        "dpo": base | {"data": str(files["dpo"]), "task": "dpo"},
        "classify": base | {"data": str(files["words"]), "task": "classify", "model": str(tiny_encoder)},
        "fisher": base | {"data": str(files["words"]), "task": "choice", "init": "fisher"},
        "principal": base | {"data": str(files["words"]), "task": "choice", "init": "principal"},
        "full": base | {"data": str(files["words"]), "task": "choice", "adapter": "full"},
    }  # fmt: skip


def test_two_processes_equal_one(plans: dict[str, dict], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plans))
    worker = str(HERE / "distributed_worker.py")
    run(sys.executable, worker, str(plan), "one", cwd=tmp_path)
    run(*LAUNCH, worker, str(plan), "two", cwd=tmp_path)
    for name in plans:
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        np.testing.assert_allclose(losses(two), losses(one), rtol=1e-4, err_msg=name)
        rows = [
            [json.loads(line) for line in (p / "predictions_before.jsonl").read_text().splitlines()] for p in (one, two)
        ]
        assert [r["id"] for r in rows[0]] == [r["id"] for r in rows[1]]
        np.testing.assert_allclose([r["nll"] for r in rows[1]], [r["nll"] for r in rows[0]], rtol=1e-5, err_msg=name)
        info = json.loads((two / "run.json").read_text())
        assert info["status"] == "done"
        assert info["hardware"]["processes"] == 2


def test_the_command_line_under_accelerate_launch(plans: dict[str, dict], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(plans["choice"]))
    one = json.loads(run(sys.executable, "-m", "acclimate", "tune", "recipe.yaml", "-o", "one", "--json", cwd=tmp_path))
    two = json.loads(run(*LAUNCH, "-m", "acclimate", "tune", "recipe.yaml", "-o", "two", "--json", cwd=tmp_path))
    final = [document["evaluation"]["after"]["metrics"]["nll"]["value"] for document in (one, two)]
    assert final[1] == pytest.approx(final[0], rel=1e-3)  # a whole run apart, and eight Adam steps of rounding
    assert losses(tmp_path / "two")[-1] == pytest.approx(losses(tmp_path / "one")[-1], rel=1e-4)
