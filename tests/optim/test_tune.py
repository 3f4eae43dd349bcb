"""`acclimate tune --optimizer ..`, for each optimiser that builds its own groups: it learns, resumes byte for byte, and says what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from acclimate.errors import InputError
from acclimate.pipeline import tune
from acclimate.recipe import Recipe
from acclimate.runs import read_json, read_rows
from acclimate.training import RunTrainer


def recipe(model: Path, folder: Path, optimizer: str, **fields: Any) -> Recipe:
    rows = [{"prompt": f"colour {i % 3}", "completion": ["red", "green", "blue"][i % 3]} for i in range(24)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"max_steps": 8, "batch_size": 8, "save_every": 3, "lr": 2e-2, "weight_decay": 0.01}
    return Recipe(model=str(model), data=str(data), task="sft", optimizer=optimizer, train=train, **fields)


@pytest.mark.parametrize(
    ("optimizer", "adapter", "told"),
    [
        ("muon", "lora", "Muon"),
        ("muon", "full", "Muon"),
        ("io-adam", "lora", "IO-Adam"),
        ("io-adam", "full", "IO-Adam"),
    ],
)
def test_a_run(
    optimizer: str, adapter: str, told: str, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = recipe(tiny_lm, tmp_path, optimizer, adapter=adapter)
    run = tune(job, directory=tmp_path / "run")
    losses = [row["loss"] for row in read_rows(run / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    assert told in read_json(run / "optimizer.json")["title"]
    assert told in (run / "report.html").read_text()

    class KilledError(BaseException):
        pass

    steps = []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 6:
            raise KilledError
        return original(self, *args, **kwargs)

    original = RunTrainer.training_step
    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", step)
        with pytest.raises(KilledError):
            tune(job, directory=tmp_path / "killed")
    again = tune(directory=tmp_path / "killed", resume=True)
    name = "adapter/adapter_model.safetensors" if adapter == "lora" else "model/model.safetensors"
    expected, found = load_file(run / name), load_file(again / name)
    assert found.keys() == expected.keys()
    assert (again / name).read_bytes() == (run / name).read_bytes()
    if optimizer == "muon":
        assert read_json(again / "optimizer.json")["points"] == read_json(run / "optimizer.json")["points"]


def test_arguments_that_do_not_fit_are_one_line(tiny_lm: Path, tmp_path: Path) -> None:
    for arguments, match in (({"speed": 3}, "speed"), ({"momentum": 2.0}, "momentum")):
        with pytest.raises(InputError, match=rf"^optimizer_args do not fit optimizer 'muon': .*{match}"):
            tune(
                recipe(tiny_lm, tmp_path, "muon", optimizer_args=arguments), directory=tmp_path / "run", overwrite=True
            )
