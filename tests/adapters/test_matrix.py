"""Every adapter on every architecture, through everything PEFT promises. The rows are in `matrix.py`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

from adapters.matrix import (
    ADAPTERS,
    ARCHITECTURES,
    Adapter,
    Architecture,
    disturb,
    inputs,
    labels,
    logits,
    loss,
    one_step,
    quantised,
)

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums in another order


@pytest.fixture(params=sorted(ARCHITECTURES))
def where(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def architecture(where: str) -> Architecture:
    return ARCHITECTURES[where]


@pytest.fixture(params=sorted(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param]


def test_no_op_at_the_start(adapter: Adapter, architecture: Architecture, where: str) -> None:
    base = logits(architecture.model(), where)
    found = logits(adapter.attach(architecture), where)
    if adapter.identity_at_start:
        torch.testing.assert_close(found, base, rtol=0, atol=1e-6)
    else:
        assert not torch.equal(found, base)


def test_only_the_adapter_learns(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss(model, where).backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(adapter.prefix in name for name in trained)
    for name, parameter in model.named_parameters():
        if name in trained:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None, name
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name


def test_save_and_load(adapter: Adapter, architecture: Architecture, where: str, tmp_path: Path) -> None:
    model = adapter.attach(architecture, trained=True)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    loaded = PeftModel.from_pretrained(architecture.model(), str(tmp_path)).eval()
    assert torch.equal(logits(loaded, where), logits(model, where))
    assert PeftConfig.from_pretrained(str(tmp_path)).peft_type == model.peft_config["default"].peft_type
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    first, second = (load_file(p / "adapter_model.safetensors") for p in (tmp_path, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_merge_and_unmerge(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if adapter.prefix not in name}
    unmerged, base = logits(model, where), logits(architecture.model(), where)
    assert (unmerged - base).abs().max() > 1e-3, "the disturbed adapter must do something"
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model, where), unmerged, **TOLERANCE)
    model.unmerge_adapter()
    for name, parameter in model.named_parameters():
        if name in weights:
            torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(model, where), unmerged, **TOLERANCE)
    plain = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits(plain, where), unmerged, **TOLERANCE)
    assert not any(adapter.prefix in name for name, _ in plain.named_parameters())


def test_safe_merge_refuses_nan(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if adapter.prefix not in name}
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    first = next(iter(weights))
    assert torch.equal(dict(model.named_parameters())[first], weights[first])


def test_disable(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    with model.disable_adapter():
        assert torch.equal(logits(model, where), logits(architecture.model(), where))
    assert not torch.equal(logits(model, where), logits(architecture.model(), where))


def test_two_adapters(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    first = logits(model, where)
    model.add_adapter("other", adapter.config(target_modules=list(architecture.targets)))
    model.set_adapter("other")
    disturb(model, seed=2, only="other")
    second = logits(model, where)
    assert (first - second).abs().max() > 1e-4
    model.set_adapter("default")
    assert torch.equal(logits(model, where), first)
    model.set_adapter("other")
    assert torch.equal(logits(model, where), second)
    model.delete_adapter("default")
    assert not any(".default" in name for name, _ in model.named_parameters())
    assert torch.equal(logits(model, where), second)


@pytest.mark.parametrize("adapter", [row for row in ADAPTERS.values() if row.mixed_batch])
@pytest.mark.parametrize("where", ["bert", "llama", "vit"])  # PEFT routes encoder-decoders only inside generate()
def test_an_adapter_per_row(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True)
    model.add_adapter("other", adapter.config(target_modules=list(architecture.targets)))
    model.set_adapter("other")
    disturb(model, seed=2, only="other")
    second = logits(model, where)
    model.set_adapter("default")
    first, base = logits(model, where), logits(architecture.model(), where)
    mixed = logits(model, where, adapter_names=["default", "other", "__base__", "other"])
    for row, expected in enumerate((first, second, base, second)):
        torch.testing.assert_close(mixed[row], expected[row], **TOLERANCE)


def test_bf16(adapter: Adapter, architecture: Architecture, where: str) -> None:
    """A bf16 base works, and agrees with fp32 to bf16's eight bits through two layers."""
    exact = logits(adapter.attach(architecture, trained=True), where)
    model = adapter.attach(architecture, architecture.model().to(torch.bfloat16), trained=True)
    batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs(where).items()}
    found = model(**batch).logits
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() / exact.norm() < 0.05
    found.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_base(adapter: Adapter, bits: int) -> None:
    """The adapter learns beside the weights, which stay as they are; it is merged into them only by adapters that say so."""
    architecture = ARCHITECTURES["llama"]
    base = logits(quantised(architecture.model(), bits), "llama")
    start = adapter.attach(architecture, quantised(architecture.model(), bits))
    torch.testing.assert_close(
        logits(start, "llama"), base, rtol=1e-3, atol=1e-5
    )  # 8-bit products round inputs to fp16
    model = adapter.attach(architecture, quantised(architecture.model(), bits), trained=True)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype in (torch.int8, torch.uint8)}
    assert len(weights) == 14
    found = logits(model, "llama")
    loss(model, "llama").backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert not torch.equal(logits(model, "llama"), found)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, "llama"), base, rtol=1e-3, atol=1e-5)
    if adapter.merges_quantised:
        model.merge_adapter()
    else:
        with pytest.raises(NotImplementedError, match="quantised"):
            model.merge_adapter()
        assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)


def test_activation_checkpointing(adapter: Adapter, architecture: Architecture, where: str) -> None:
    model = adapter.attach(architecture, trained=True).train()
    loss(model, where).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    loss(model, where).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, **TOLERANCE)


def test_compiled_forward(adapter: Adapter) -> None:
    """One architecture is enough: what is compiled is the adapter's layer. `aot_eager` traces without a C++ compiler."""
    model = adapter.attach(ARCHITECTURES["llama"], trained=True)
    expected = logits(model, "llama")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, "llama"), expected, **TOLERANCE)


@pytest.mark.parametrize("where", [name for name, row in ARCHITECTURES.items() if row.head is not None])
def test_modules_to_save(adapter: Adapter, architecture: Architecture, where: str, tmp_path: Path) -> None:
    start = architecture.model()
    if where == "llama":  # a tied head would be trained together with the embedding
        start.lm_head.weight = torch.nn.Parameter(start.lm_head.weight.detach().clone())
    model = adapter.attach(architecture, copy.deepcopy(start), trained=True, modules_to_save=[architecture.head])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any(f"{architecture.head}.modules_to_save" in n for n in trained)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(start), str(tmp_path)).eval()
    assert torch.equal(logits(loaded, where), logits(model, where))


def test_layers_to_transform(adapter: Adapter, architecture: Architecture, where: str) -> None:
    extra = {"layers_to_transform": [1], "layers_pattern": architecture.pattern}
    model = adapter.attach(architecture, **extra)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all(f".{architecture.pattern}.1." in name for name in names), names


def test_tied_embeddings_stay_tied(adapter: Adapter) -> None:
    model = adapter.attach(ARCHITECTURES["llama"], trained=True)
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    merged = model.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_two_processes_equal_one(name: str, tmp_path: Path) -> None:
    """DDP averages the halves' gradients: the step is that of the whole batch, to fp32 rounding."""
    found = {}
    for world in (1, 2):
        output = tmp_path / f"{world}.safetensors"
        torch.multiprocessing.spawn(one_step, (world, name, str(output)), nprocs=world)
        found[world] = load_file(output)
    assert found[1].keys() == found[2].keys()
    for key, value in found[1].items():
        torch.testing.assert_close(found[2][key], value, rtol=1e-4, atol=1e-6)


def test_labels_and_inputs_are_fixed() -> None:
    """The matrix compares runs with each other, so its data must not move."""
    assert torch.equal(labels("llama"), labels("llama"))
    assert torch.equal(inputs("vit")["pixel_values"], inputs("vit")["pixel_values"])
