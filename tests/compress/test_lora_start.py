"""LoRA starts in whitened coordinates: what is in the adapter, that nothing has changed at the start, and what is saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from acclimate import tune
from acclimate.compress import compress_low_rank, lora_config
from acclimate.compress.lora_start import init_lora, principal_init
from acclimate.errors import InputError
from acclimate.runs import Interrupted
from compress.small import ids, inputs_of, llama
from conftest import colour_rows, signal_at, task_rows, write_jsonl

TARGETS = ["q_proj", "up_proj", "down_proj"]


def delta(layer: Any, adapter: str = "default") -> torch.Tensor:
    product: torch.Tensor = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight * layer.scaling[adapter]
    return product.detach()


def lora_layers(model: Any) -> dict[str, Any]:
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


@pytest.mark.parametrize("rslora", [False, True])
def test_principal_is_the_best_part_of_the_outputs_and_changes_nothing(rslora: bool, tmp_path: Path) -> None:
    plain = llama(dtype=torch.float64)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, use_rslora=rslora)
    model = get_peft_model(copy.deepcopy(plain), config)
    report = init_lora(model, ids())
    torch.testing.assert_close(model(ids()).logits, plain(ids()).logits, rtol=1e-9, atol=1e-9)
    names = [row["name"] for row in report.layers]
    seen = inputs_of(plain, names, [{"input_ids": ids()}])
    for name, layer in lora_layers(model).items():
        X, W = seen[name.removeprefix("base_model.model.")], layer.base_layer.weight.detach()
        sigma = torch.linalg.svdvals(W @ X.T).square()
        left = ((W - delta(layer)) @ X.T).square().sum()
        assert float(left / sigma[4:].sum()) == pytest.approx(1, rel=1e-3)  # the ridge
        torch.testing.assert_close(delta(layer, "start"), -delta(layer))
        row = {row["name"]: row for row in report.layers}[name.removeprefix("base_model.model.")]
        assert row["kept"] == pytest.approx(float(sigma[:4].sum() / sigma.sum()), rel=1e-3)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name and ".default." in name
    }
    # trained, saved as one LoRA of twice the rank, and loaded by stock PEFT on the untouched base
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B["default"].weight.mul_(1.1)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    stock = PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path))
    torch.testing.assert_close(stock(ids()).logits, model(ids()).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dense", [False, True], ids=["low rank", "dense"])
def test_repair_holds_the_next_components_of_the_same_svd(dense: bool) -> None:
    original = llama(dtype=torch.float64)
    cut, more = copy.deepcopy(original), copy.deepcopy(original)
    name = "model.layers.0.mlp.up_proj"  # one layer alone: its inputs are those of the original
    compress_low_rank(cut, ids(), ranks={name: 6}, beta=0, progress=False)
    compress_low_rank(more, ids(), ranks={name: 9}, beta=0, progress=False)
    if dense:
        cut.set_submodule(name, cut.get_submodule(name).to_dense())
    peft_model = get_peft_model(cut, lora_config(r=3, target_modules=[name]))
    report = init_lora(peft_model, ids(), "repair", original=original)
    (layer,) = lora_layers(peft_model).values()
    torch.testing.assert_close(
        layer.base_layer.weight + delta(layer), more.get_submodule(name).weight, rtol=1e-6, atol=1e-6
    )
    assert list(peft_model.peft_config) == ["default"]
    assert 0 < report.layers[0]["kept"] < 1

    def gap() -> float:
        with torch.no_grad():
            return float((peft_model(ids()).logits - original(ids()).logits).norm())

    repaired = gap()
    with peft_model.disable_adapter():
        assert repaired < gap()


def test_what_cannot_be_started_is_refused() -> None:
    plain = llama()
    with pytest.raises(ValueError, match="has no LoRA adapter named 'default'"):
        init_lora(plain, ids())
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=TARGETS))
    with pytest.raises(ValueError, match="role is principal or repair, not 'x'"):
        init_lora(model, ids(), "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the model before it was compressed"):
        init_lora(model, ids(), "repair")
    dora = get_peft_model(llama(), LoraConfig(r=2, target_modules=TARGETS, use_dora=True))
    with pytest.raises(ValueError, match="which DoRA's rescaling does not allow"):
        init_lora(dora, ids())
    head = get_peft_model(llama(), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="no LoRA layer in the model's blocks"):
        init_lora(head, ids())


def test_principal_init_looks_at_as_many_rows_as_it_is_told() -> None:
    models = [get_peft_model(llama(), LoraConfig(r=2, target_modules=TARGETS, lora_dropout=0.5)) for _ in range(2)]
    told: list[int] = []
    batches = [{"input_ids": ids(4, seed=seed)} for seed in range(3)]
    principal_init(models[0], batches, n_examples=8, advance=told.append)
    init_lora(models[1], batches[:2])
    assert told == [4, 4]
    for one, other in zip(*(lora_layers(model).values() for model in models), strict=True):
        assert torch.equal(delta(one), delta(other))


@pytest.mark.parametrize("task", ["choice", "sft", "classify"])
def test_tune_with_init_principal(task: str, tiny_lm: Path, tmp_path: Path) -> None:
    rows = task_rows(task, colour_rows(24))
    source = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    run = tune(
        model=str(tiny_lm), data=source, task=task, init="principal", init_args={"n_examples": 8}, adapter_args={"r": 3},
        train={"max_steps": 2, "batch_size": 4}, directory=tmp_path / "run",
    )  # fmt: skip
    found = json.loads((run / "init.json").read_text())
    assert found["method"] == "principal"
    assert len(found["layers"]) == 14
    assert found["settings"] == {"n_examples": 8}
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["r"] == 6
    assert "output energy on this data" in (run / "report.html").read_text()


def test_an_interrupted_run_keeps_its_start_and_ends_with_the_same_adapter(tiny_lm: Path, tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "rows.jsonl", colour_rows(24)))
    settings: dict[str, Any] = {
        "model": str(tiny_lm), "data": source, "task": "choice", "init": "principal", "adapter_args": {"r": 3},
        "train": {"max_steps": 3, "batch_size": 4},
    }  # fmt: skip
    whole = tune(**settings, directory=tmp_path / "whole")
    with signal_at(2), pytest.raises(Interrupted):
        tune(**settings, directory=tmp_path / "cut")
    tune(directory=tmp_path / "cut", resume=True)
    one, other = (load_file(d / "adapter" / "adapter_model.safetensors") for d in (whole.path, tmp_path / "cut"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_tune_refuses_principal_for_dpo_and_for_unknown_arguments(tiny_lm: Path, tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "pairs.jsonl", task_rows("dpo", colour_rows(12))))
    with pytest.raises(InputError, match="init 'principal' does not fit task 'dpo'"):
        tune(model=str(tiny_lm), data=rows, task="dpo", init="principal", directory=tmp_path / "a")
    rows = str(write_jsonl(tmp_path / "rows.jsonl", colour_rows(12)))
    with pytest.raises(InputError, match=r"unknown 'n_exampels'\. Did you mean 'n_examples'"):
        tune(
            model=str(tiny_lm),
            data=rows,
            task="choice",
            init="principal",
            init_args={"n_exampels": 3},
            directory=tmp_path / "b",
        )
