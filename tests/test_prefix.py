"""The upper part of a model on stored states is the whole model: logits, gradients, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from acclimate.prefix import FrozenPrefixCache, states_below, suffix_model

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40}
ROWS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16]]
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def qwen() -> Any:
    torch.manual_seed(0)
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, **windows)).eval()


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("build", [llama, qwen])
@pytest.mark.parametrize("n_last", [1, 2, 4])
def test_suffix_on_the_cache_is_the_whole_model(build: Any, n_last: int) -> None:
    model = build()
    cache = FrozenPrefixCache(model, n_last, ROWS, batch_size=2)
    chosen = [1, 3, 0]
    whole = padded([ROWS[i] for i in chosen])
    with torch.no_grad():
        expected = model(**whole).logits
        found = suffix_model(model, n_last)(**cache.batch(chosen)).logits
    real = whole["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], **TIGHT)


def test_adapter_gradients_are_those_of_the_whole_model() -> None:
    model = llama()
    cache = FrozenPrefixCache(model, 2, ROWS)
    targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "r": 3}
    torch.manual_seed(1)
    suffix = get_peft_model(suffix_model(model, 2), LoraConfig(**targets)).eval()
    whole = get_peft_model(llama(), LoraConfig(**targets, layers_to_transform=[2, 3], layers_pattern="layers")).eval()
    lower = {
        n.replace("layers.0.", "layers.2.").replace("layers.1.", "layers.3."): p for n, p in suffix.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                parameter.copy_(lower[name])
    labels = torch.where(padded(ROWS)["attention_mask"].bool(), padded(ROWS)["input_ids"], -100)
    losses = [suffix(**cache.batch(range(4)), labels=labels).loss, whole(**padded(ROWS), labels=labels).loss]
    torch.testing.assert_close(*losses, **TIGHT)
    for loss in losses:
        loss.backward()
    for name, parameter in whole.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(lower[name].grad, parameter.grad, **TIGHT)


def test_the_model_itself_is_left_alone() -> None:
    model = llama().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    suffix = get_peft_model(suffix_model(model, 1), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    FrozenPrefixCache(model, 1, ROWS)
    assert model.training
    assert len(model.model.layers) == 4
    assert model.config.num_hidden_layers == 4
    assert suffix.config.num_hidden_layers == 1
    assert not any("lora" in name for name in model.state_dict())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_states_on_disk_are_reused_only_for_the_same_model_and_rows(tmp_path: Path) -> None:
    model = llama()
    first = FrozenPrefixCache(model, 2, ROWS, tmp_path / "states")
    assert isinstance(first.states, np.memmap)
    expected = states_below(model, 2, torch.tensor([ROWS[1]]), torch.ones(1, 6, dtype=torch.long))
    torch.testing.assert_close(first.batch([1])["inputs_embeds"], expected, **TIGHT)
    stamp = (tmp_path / "states" / "states.npy").stat().st_mtime_ns
    FrozenPrefixCache(model, 2, ROWS, tmp_path / "states")
    assert (tmp_path / "states" / "states.npy").stat().st_mtime_ns == stamp
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    moved = FrozenPrefixCache(model, 2, ROWS, tmp_path / "states", dtype=torch.float16)
    assert json.loads((tmp_path / "states" / "key.json").read_text())["dtype"] == "float16"
    assert (moved.batch([1])["inputs_embeds"] - expected).abs().max() > 1e-3


def test_other_models_are_refused() -> None:
    small = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}
    with pytest.raises(ValueError, match=r"need more than the hidden states below them \(logits differ by"):
        suffix_model(GPT2LMHeadModel(GPT2Config(**small)), 1)  # adds its positions to whatever it is given
    with pytest.raises(ValueError, match="need more than the hidden states"):
        suffix_model(BertForMaskedLM(BertConfig(**SIZES)), 1)
    with pytest.raises(ValueError, match="n_last must be 1 to 4, the number of blocks, not 5"):
        suffix_model(llama(), 5)
    with pytest.raises(ValueError, match="rows must be there"):
        FrozenPrefixCache(llama(), 1, [[1], []])


@pytest.mark.embedded
def test_the_embedded_model_splits_exactly() -> None:
    from acclimate.models import load_model

    model, tokenizer = load_model("smollm2")
    rows = tokenizer(["The capital of France is", "Two and two"])["input_ids"]
    cache = FrozenPrefixCache(model, 10, rows)
    with torch.no_grad():
        expected = model(torch.tensor([rows[0]])).logits
        found = suffix_model(model, 10)(**cache.batch([0])).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
