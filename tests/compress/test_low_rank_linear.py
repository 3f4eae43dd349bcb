"""A compressed model is saved, loaded, made dense and adapted like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from acclimate.compress import LowRankLinear, compress_low_rank, export_dense, lora_config
from acclimate.compress.quantizer import unmark
from compress.small import ids, llama, random
from fresh_process import logits_in_a_fresh_process


def compressed() -> Any:
    model = llama()
    compress_low_rank(model, ids(), 0.4, progress=False)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits


def test_the_layer_is_its_equation() -> None:
    B, A, bias, x = random(6, 3), random(3, 8), random(6), random(5, 8)
    layer = LowRankLinear.from_factors(B, A, bias)
    torch.testing.assert_close(layer(x), x @ A.T @ B.T + bias)
    torch.testing.assert_close(layer.weight, B @ A)
    assert layer.bias is layer.second.bias
    assert (layer.in_features, layer.out_features, layer.rank) == (8, 6, 3)
    dense = layer.to_dense()
    assert type(dense) is nn.Linear
    torch.testing.assert_close(dense(x), layer(x))
    assert LowRankLinear.from_factors(B, A).bias is None
    with pytest.raises(ValueError, match="the rank of a 6 x 8 layer is 1 to 6, not 7"):
        LowRankLinear(8, 6, 7)


def test_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "a")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-6, atol=1e-6)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LowRankLinear)}
    others = sum(
        p.numel() for n, p in model.named_parameters() if not n.rpartition(".")[0].endswith((".first", ".second"))
    )
    low = sum(layer.rank * (layer.in_features + layer.out_features) for layer in layers.values())
    assert sum(value.numel() for value in stored.values()) == low + others
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert config["ranks"] == {name: layer.rank for name, layer in layers.items()}
    # once more, in half precision, without the head, and made dense
    again.save_pretrained(tmp_path / "b")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b")), logits(model))
    assert again.half().model.layers[0].mlp.up_proj.first.weight.dtype == torch.float16
    body = AutoModel.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        torch.testing.assert_close(body(ids()).last_hidden_state, model.model(ids()).last_hidden_state)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "a").dequantize()
    assert type(dense.model.layers[0].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(logits(dense), logits(model), rtol=1e-5, atol=1e-5)


def test_another_process_needs_one_import(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "low")
    export_dense(model, tmp_path / "dense")
    assert isinstance(model.model.layers[0].mlp.up_proj, LowRankLinear)
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    (low,) = logits_in_a_fresh_process(
        [(tmp_path / "low", None)], ids().tolist(), tmp_path, prepare="import acclimate.compress"
    )
    torch.testing.assert_close(low, logits(model), rtol=1e-6, atol=1e-6)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not any(isinstance(part, LowRankLinear) for part in dense.modules())
    torch.testing.assert_close(logits(dense), logits(model), rtol=1e-5, atol=1e-5)


def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = compressed()
    model.config.quantization_config.ranks["model.layers.9.mlp.up_proj"] = 4
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"gives a rank for 'model.layers.9.mlp.up_proj', which LlamaForCausalLM does not have"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    unmark(model)
    assert not hasattr(model.config, "quantization_config")


def test_adapters_on_the_thin_layers_and_beside_the_whole(tmp_path: Path) -> None:
    plain = logits(compressed())
    inside = get_peft_model(compressed(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert (
        sum(name.endswith(("first.lora_A.default", "second.lora_A.default")) for name, _ in inside.named_modules())
        == 28
    )
    changed = logits(inside)
    assert not torch.allclose(changed, plain, atol=1e-3)
    merged = inside.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.up_proj, LowRankLinear)
    torch.testing.assert_close(logits(merged), changed, rtol=1e-4, atol=1e-5)

    options: dict[str, Any] = {"r": 2, "target_modules": ["up_proj"], "init_lora_weights": False}
    beside = get_peft_model(compressed(), lora_config(**options))
    layer: Any = beside.base_model.model.model.layers[0].mlp.up_proj
    x = torch.randn(4, 32)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    torch.testing.assert_close(layer(x), layer.base_layer(x) + x @ delta.T, rtol=1e-4, atol=1e-5)
    beside(input_ids=ids(), labels=ids()).loss.backward()
    assert {name for name, p in beside.named_parameters() if p.grad is not None} == {
        name for name, _ in beside.named_parameters() if "lora_" in name
    }
    beside.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(compressed(), str(tmp_path), config=lora_config(**options))
    torch.testing.assert_close(logits(again), logits(beside))
    with pytest.raises(NotImplementedError, match="cannot be merged into its two factors"):
        beside.merge_and_unload()
