"""A tuner that PEFT has never heard of, plugged in from outside: the toy of examples/third_party_method."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftConfig, PeftModel, PeftType, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from acclimate import methods
from acclimate.adapters._register import MINIMUM_PEFT, PeftTooOldError, register_tuner
from acclimate.errors import MissingError

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_method"
sys.path.insert(0, str(EXAMPLE))

from toy_scale import METHOD  # noqa: E402
from toy_scale.tuner import ToyScaleConfig, ToyScaleModel, scale_rows  # noqa: E402

IDS = torch.arange(12).reshape(2, 6)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
    )
    return LlamaForCausalLM(config).eval()


def adapted(init_std: float = 0.3, **config) -> PeftModel:
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(model, ToyScaleConfig(init_std=init_std, **config)).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_the_enum_has_the_member_like_any_other() -> None:
    member = PeftType.TOY_SCALE
    assert member is PeftType["TOY_SCALE"] is PeftType("TOY_SCALE")
    assert (member.name, member.value, member == "TOY_SCALE") == ("TOY_SCALE", "TOY_SCALE", True)
    assert member in list(PeftType)
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member
    assert repr(PeftType.LORA) == "<PeftType.LORA: 'LORA'>"


def test_default_targets_come_from_pefts_own_mapping_and_only_scales_train() -> None:
    model = adapted(init_std=0.0)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 4  # q and v of two layers
    assert all(name.endswith(("q_proj.toy_scale_log.default", "v_proj.toy_scale_log.default")) for name in names)
    assert model.get_nb_trainable_parameters()[0] == 4 * 16


def test_it_starts_as_a_no_op_bit_for_bit() -> None:
    assert torch.equal(logits(adapted(init_std=0.0)), logits(tiny_llama()))


def test_the_layer_is_the_stated_equation() -> None:
    layer = nn.Linear(3, 4)
    model = get_peft_model(nn.Sequential(layer), ToyScaleConfig(target_modules=["0"], init_std=1.0))
    x, s = torch.randn(5, 3), model.base_model.model[0].toy_scale_log["default"]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    torch.testing.assert_close(model(x), (x @ weight.T + bias) * s.exp(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scale_rows(weight, s), torch.diag(s.exp()) @ weight, rtol=1e-6, atol=1e-6)


def test_gradients_reach_the_scales_only() -> None:
    model = adapted()
    model(input_ids=IDS, labels=IDS).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, parameter in model.named_parameters() if "toy_scale_" in name}
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in with_gradient)


def test_save_and_load_in_the_same_process(tmp_path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["init_std"]) == ("TOY_SCALE", 0.3)
    config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, ToyScaleConfig)
    assert config.peft_type is PeftType.TOY_SCALE
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path)), logits(model))


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_save_here_and_load_in_a_fresh_process(tmp_path) -> None:
    model = adapted()
    tiny_llama().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    code = """
        import sys, torch, toy_scale.tuner
        from peft import PeftConfig, PeftModel
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM
        base, adapter, out = sys.argv[1:]
        assert type(PeftConfig.from_pretrained(adapter)) is toy_scale.tuner.ToyScaleConfig
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        with torch.no_grad():
            save_file({"logits": model(input_ids=torch.arange(12).reshape(2, 6)).logits.contiguous()}, out)
    """
    done = fresh(code, str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out.safetensors"))
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["logits"], logits(model), rtol=0, atol=1e-6)


def test_without_the_import_peft_does_not_know_the_type(tmp_path) -> None:
    adapted().save_pretrained(tmp_path)
    done = fresh("import sys; from peft import PeftConfig; PeftConfig.from_pretrained(sys.argv[1])", str(tmp_path))
    assert done.returncode != 0
    assert "TOY_SCALE" in done.stderr


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merging_changes_nothing_and_can_be_undone(safe_merge) -> None:
    model = adapted()
    expected, weight = logits(model), model.base_model.model.model.layers[0].self_attn.q_proj.weight.clone()
    model.merge_adapter(safe_merge=safe_merge)
    merged = model.base_model.model.model.layers[0].self_attn.q_proj.weight
    assert (merged - weight).abs().max() > 1e-3
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    model.unmerge_adapter()
    torch.testing.assert_close(merged, weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


def test_merge_and_unload_leaves_the_plain_model() -> None:
    model = adapted()
    expected = logits(model)
    plain = model.merge_and_unload()
    assert type(plain.model.layers[0].self_attn.q_proj) is nn.Linear
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-6)


def test_a_safe_merge_refuses_nan_and_leaves_the_base_alone() -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(3, 4)), ToyScaleConfig(target_modules=["0"]))
    layer = model.base_model.model[0]
    before = layer.base_layer.weight.clone()
    layer.toy_scale_log["default"].data[0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, before)


def test_two_adapters_switch_and_multiply() -> None:
    model = adapted()
    base, first = logits(tiny_llama()), logits(model)
    model.add_adapter("other", ToyScaleConfig(init_std=0.5))
    assert torch.equal(logits(model), first)  # adding does not activate
    assert not any(p.requires_grad for name, p in model.named_parameters() if name.endswith("toy_scale_log.other"))
    model.set_adapter("other")
    second = logits(model)
    assert (second - first).abs().max() > 1e-3
    assert (second - base).abs().max() > 1e-3
    model.set_adapter("default")
    assert torch.equal(logits(model), first)

    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 16)
    product = (layer.toy_scale_log["default"] + layer.toy_scale_log["other"]).exp()
    torch.testing.assert_close(layer(x), layer.base_layer(x) * product)
    model.merge_adapter(["default", "other"])
    torch.testing.assert_close(logits(model), both, rtol=0, atol=1e-6)


def test_disabling_gives_the_base_also_when_merged() -> None:
    model, base = adapted(), logits(tiny_llama())
    expected = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), expected)
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), base, rtol=0, atol=1e-6)


def test_deleting_an_adapter_removes_its_numbers() -> None:
    model = adapted()
    expected = logits(model)
    model.add_adapter("other", ToyScaleConfig(init_std=0.5))
    model.delete_adapter("other")
    assert not [name for name, _ in model.named_parameters() if name.endswith(".other")]
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)


def test_a_target_that_is_not_linear_is_named() -> None:
    with pytest.raises(TypeError, match=r"can only be put on torch.nn.Linear; '0' is Conv1d"):
        get_peft_model(nn.Sequential(nn.Conv1d(2, 2, 1)), ToyScaleConfig(target_modules=["0"]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 1000))
def test_merged_equals_unmerged_for_any_layer(inputs, outputs, bias, seed) -> None:
    torch.manual_seed(seed)
    model = get_peft_model(
        nn.Sequential(nn.Linear(inputs, outputs, bias)), ToyScaleConfig(target_modules=["0"], init_std=1.0)
    )
    x = torch.randn(4, inputs)
    expected = model(x)
    torch.testing.assert_close(model.merge_and_unload()(x), expected, rtol=1e-5, atol=1e-5)


# Registration itself.


class OtherConfig(PeftConfig):
    pass


class OtherModel(ToyScaleModel):
    prefix = "other_"


def enum_state() -> tuple[list[str], list[str], dict[str, object]]:
    return list(PeftType.__members__), [member.value for member in PeftType], dict(PeftType._value2member_map_)


def test_registering_twice_is_harmless() -> None:
    before = enum_state()
    assert register_tuner("toy_scale", ToyScaleConfig, ToyScaleModel, prefix="toy_scale_") is PeftType.TOY_SCALE
    assert enum_state() == before


@pytest.mark.parametrize(
    ("name", "owner"), [("lora", "peft.tuners.lora.config.LoraConfig"), ("toy_scale", "toy_scale.tuner.ToyScaleConfig")]
)
def test_a_name_that_is_taken_is_refused(name, owner) -> None:
    before = enum_state()
    with pytest.raises(ValueError, match=f"the PEFT method name '{name}' belongs to {owner}; it is not overwritten"):
        register_tuner(name, OtherConfig, OtherModel, prefix="other_")
    assert enum_state() == before
    assert peft.PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] is peft.LoraConfig


@pytest.mark.parametrize(
    ("name", "prefix", "reason"),
    [
        ("other", "another_", "Inconsistent prefixes"),
        ("Other", "other_", "lower case"),
    ],
)
def test_what_peft_refuses_leaves_no_trace(name, prefix, reason) -> None:
    before = enum_state()
    with pytest.raises(ValueError, match=f"peft refuses the tuner '{name}': .*{reason}"):
        register_tuner(name, OtherConfig, OtherModel, prefix=prefix)
    assert enum_state() == before
    assert not hasattr(PeftType, "OTHER")


def test_a_prefix_that_is_taken_is_refused() -> None:
    before = enum_state()
    with pytest.raises(ValueError, match="the parameter prefix 'lora_' belongs to another PEFT method"):
        register_tuner("other", OtherConfig, OtherModel, prefix="lora_")
    assert enum_state() == before


def test_an_old_peft_is_an_import_error_that_names_the_minimum(monkeypatch) -> None:
    monkeypatch.setattr(peft, "__version__", "0.9.0")
    with pytest.raises(PeftTooOldError) as caught:
        register_tuner("other", OtherConfig, OtherModel, prefix="other_")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MissingError)
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        f"peft 0.9.0 cannot take tuners from outside; acclimate's adapters need peft>={MINIMUM_PEFT}. "
        f"Update it with: pip install 'peft>={MINIMUM_PEFT}'"
    )


def test_no_file_of_peft_is_changed() -> None:
    files = [file for file in importlib.metadata.files("peft") or [] if file.suffix == ".py" and file.hash]
    assert len(files) > 100
    for file in files:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file


def test_the_table_finds_the_installed_package(tmp_path, monkeypatch) -> None:
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    lines = [f"{key} = {value}" for key, value in project["entry-points"]["acclimate.methods"].items()]
    info = tmp_path / "acclimate_toy_scale-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("[acclimate.methods]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert METHOD in methods.all_methods()
    assert methods.require("toy_scale", "adapter") is ToyScaleConfig


def test_the_row_of_the_example_imports_no_torch() -> None:
    done = fresh("import sys, toy_scale; print('torch' in sys.modules, 'peft' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr
