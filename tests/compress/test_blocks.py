"""The block-streaming engine hands each method the inputs that the layers really see, and leaves nothing half-done."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acclimate.compress.blocks import Group, InputMoments, linear_layers, restore, stream_blocks
from acclimate.compress.streams import Spill
from compress.small import ids, inputs_of, llama, random


class Halved:
    """A method that replaces each layer by half of it, and keeps what it was given."""

    def __init__(self, fail: tuple[str, ...] = (), stop: str = "") -> None:
        self.groups: list[Group] = []
        self.fail, self.stop = fail, stop

    def prepare(self, group: Group) -> str:
        self.groups.append(group)
        return group.names[0]

    def replace(self, name: str, linear: nn.Linear, group: Group, prepared: str) -> tuple[nn.Module, dict[str, Any]]:
        assert prepared == group.names[0]
        if name == self.stop:
            raise KeyboardInterrupt
        if name in self.fail:
            raise torch.linalg.LinAlgError("no convergence")
        return self.rebuild(linear, {"weight": linear.weight / 2}), {"half": True}

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        new = copy.deepcopy(linear)
        new.weight = nn.Parameter(state["weight"].clone())
        return new


def llama_groups(block: int) -> list[list[str]]:
    kinds = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    kinds += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    return [[f"model.layers.{block}.{kind}" for kind in group] for group in kinds]


def padded() -> list[dict[str, Any]]:
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 15:] = 0
    mask[2, :4] = 0
    return [{"input_ids": ids(4)}, {"input_ids": ids(3, seed=1), "attention_mask": mask}]


def gram(x: Tensor) -> Tensor:
    return x.double().T @ x.double() / len(x)


@pytest.mark.parametrize("max_ram", [8e9, 0.0], ids=["memory", "files"])
def test_statistics_are_those_of_the_model_as_it_is_when_a_group_is_reached(max_ram: float) -> None:
    """The inputs of a layer depend on the layers below alone, so in the finished model they are what the method was given."""
    model, batches, method = llama(dtype=torch.float64), padded(), Halved()
    original = copy.deepcopy(model)
    streamed = stream_blocks(model, batches, method, linear_layers(model)[0], cross=True, max_ram=max_ram)
    assert [group.names for group in method.groups] == llama_groups(0) + llama_groups(1)
    names = [group.names[0] for group in method.groups]
    now, before = inputs_of(model, names, batches), inputs_of(original, names, batches)
    for group in method.groups:
        x, y = before[group.names[0]], now[group.names[0]]
        assert group.tokens == len(y) == 4 * 24 + 24 + 15 + 20
        torch.testing.assert_close(group.gram, gram(y), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(group.cross, x.T @ y / len(y), rtol=1e-9, atol=1e-12)
    row = {row["name"]: row for row in streamed.layers}["model.layers.1.mlp.down_proj"]
    W = original.get_submodule(row["name"]).weight.detach()
    x, y = before[row["name"]][:96], now[row["name"]][:96]  # the first batch
    assert row["inherited"] == pytest.approx(float((x @ W.T - y @ W.T).norm() / (x @ W.T).norm()))
    assert row["error"] == pytest.approx(float((x @ W.T - y @ W.T / 2).norm() / (x @ W.T).norm()))
    with torch.no_grad():
        a, b = (m.model(**batches[0], output_hidden_states=True).hidden_states[1] for m in (original, model))
        c, d = (m.model(**batches[1], output_hidden_states=True).hidden_states[1] for m in (original, model))
    x, y = (torch.cat([p.flatten(0, 1), q[batches[1]["attention_mask"].bool()]]) for p, q in ((a, c), (b, d)))
    assert streamed.blocks[0]["error"] == pytest.approx(float(((x - y).norm(dim=1) / x.norm(dim=1)).mean()), rel=1e-5)
    assert streamed.blocks[0]["error_frobenius"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)


def test_refresh_none_gives_the_original_inputs_and_block_those_below_the_block() -> None:
    batches = padded()
    none, block = Halved(), Halved()
    original = llama(dtype=torch.float64)
    for refresh, method in (("none", none), ("block", block)):
        model = llama(dtype=torch.float64)
        stream_blocks(model, batches, method, linear_layers(model)[0], refresh=refresh, cross=True)  # type: ignore[arg-type]
    names = [group.names[0] for group in none.groups]
    expected = inputs_of(original, names, batches)
    for group in none.groups:
        torch.testing.assert_close(group.gram, gram(expected[group.names[0]]), rtol=1e-9, atol=1e-12)
        assert group.cross is None
    half_done = llama(dtype=torch.float64)
    with torch.no_grad():
        for name, layer in linear_layers(half_done)[0].items():
            if ".layers.0." in name:
                layer.weight.div_(2)
    expected |= inputs_of(half_done, [name for name in names if ".layers.1." in name], batches)
    for group in block.groups:
        torch.testing.assert_close(group.gram, gram(expected[group.names[0]]), rtol=1e-9, atol=1e-12)


def test_encoders_whose_first_layer_takes_the_states_themselves() -> None:
    """BERT's query reads the block's own input; the streams overwrite their states in place, and must not overwrite that."""
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    bert = BertModel(BertConfig(vocab_size=120, **sizes)).double()
    vit = ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).double()
    for model, batches in ((bert, padded()), (vit, [{"pixel_values": random(8, 3, 8, 8)}])):
        original, method = copy.deepcopy(model).eval(), Halved()
        stream_blocks(model, batches, method, linear_layers(model)[0], cross=True)
        assert [len(group.names) for group in method.groups] == 2 * [3, 1, 1, 1]
        names = [group.names[0] for group in method.groups]
        static = Halved()
        layers = linear_layers(original)[0]
        stream_blocks(original, batches, static, layers, refresh="none")
        restore(original, layers)
        for whole, found in ((original, static), (model, method)):
            expected = inputs_of(whole.eval(), names, batches)
            for group in found.groups:
                torch.testing.assert_close(group.gram, gram(expected[group.names[0]]), rtol=1e-9, atol=1e-12)


class Experts(nn.Module):
    """A block with what needs care: experts that few or no tokens reach, a layer that runs twice, one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 1, bias=False)
        self.wide, self.narrow, self.idle = (nn.Linear(6, 6) for _ in range(3))
        self.twice, self.tied, self.twin = (nn.Linear(6, 6) for _ in range(3))
        self.twin.weight = self.tied.weight

    def forward(self, x: Tensor, scale: float) -> Tensor:
        flat = x.flatten(0, 1)
        high = self.router(flat)[:, 0] > 0
        out = torch.zeros_like(flat)
        out[high] = self.wide(flat[high])
        out[~high] = self.narrow(flat[~high])
        return self.twice(self.twice(self.tied(self.twin(x + scale * out.view_as(x)))))


class Mixture(nn.Module):
    """A model of two such blocks that is not transformers'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = type("Config", (), {"num_hidden_layers": 2, "use_cache": True})()
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def test_experts_and_layers_that_cannot_be_replaced_are_left_with_a_reason() -> None:
    model, method = Mixture(), Halved()
    layers, kept = linear_layers(model)
    assert kept.keys() == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("tied", "twin")}
    batches = [{"x": random(4, 10, 6, seed=seed)} for seed in (1, 2)]
    streamed = stream_blocks(model, batches, method, layers, cross=True)
    assert {n: w.split()[-1] for n, w in streamed.kept.items()} == {
        f"blocks.{i}.{name}": word for i in (0, 1) for name, word in (("twice", "pass"), ("idle", "it"))
    }
    by_name = {group.names[0]: group for group in method.groups}
    assert by_name["blocks.0.wide"].tokens + by_name["blocks.0.narrow"].tokens == 80
    assert by_name["blocks.0.wide"].cross is not None  # nothing below has changed: the same tokens
    torch.testing.assert_close(by_name["blocks.0.wide"].cross, by_name["blocks.0.wide"].gram)
    expected = inputs_of(model, ["blocks.1.wide"], batches)["blocks.1.wide"]
    torch.testing.assert_close(by_name["blocks.1.wide"].gram, gram(expected))
    assert model.config.use_cache is True


def test_a_numerical_failure_leaves_that_layer_alone() -> None:
    name = "model.layers.0.self_attn.k_proj"
    model, method = llama(), Halved(fail=(name,))
    before = {n: layer.weight.clone() for n, layer in linear_layers(model)[0].items()}
    streamed = stream_blocks(model, [{"input_ids": ids()}], method, linear_layers(model)[0])
    assert streamed.kept == {name: "numerical failure: no convergence"}
    for other, weight in before.items():
        factor = 1 if other == name else 2
        assert torch.equal(model.get_submodule(other).weight * factor, weight), other


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_any_exception_leaves_the_model_as_it_was(error: type[BaseException]) -> None:
    model = llama().train()
    parts = dict(model.named_modules())
    batches = [{"input_ids": ids(3)}, {"input_ids": ids(3, seed=1)}]
    method = Halved(stop="model.layers.1.mlp.up_proj" if error is KeyboardInterrupt else "")
    if error is ValueError:

        def spoil(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            last = torch.arange(len(args[0]))[:, None, None] == 2
            return (torch.where(last, torch.nan, args[0]),) if method.groups else None  # once block 0 is done

        model.model.layers[1].register_forward_pre_hook(spoil)
    with pytest.raises(error) as caught:
        stream_blocks(model, batches, method, linear_layers(model)[0])
    if error is ValueError:
        assert "'model.layers.1.self_attn.q_proj' gets values that are not finite" in str(caught.value)
        assert "calibration sequence 2" in str(caught.value)
    assert {name: id(part) for name, part in model.named_modules()} == {name: id(part) for name, part in parts.items()}
    assert model.training
    assert "forward" not in vars(model.model.layers[0])


def test_finished_blocks_are_taken_up_again(tmp_path: Path) -> None:
    batches = padded()
    whole, cut = llama(3), llama(3)
    full = stream_blocks(whole, batches, Halved(), linear_layers(whole)[0], cross=True)
    options: dict[str, Any] = {"cross": True, "checkpoint_dir": tmp_path / "work", "settings": {"a": 1}}
    with pytest.raises(KeyboardInterrupt):
        stream_blocks(cut, batches, Halved(stop="model.layers.2.self_attn.o_proj"), linear_layers(cut)[0], **options)
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == [
        "block-0000.safetensors", "block-0001.safetensors", "job.json",
    ]  # fmt: skip
    again = Halved()
    resumed = stream_blocks(cut, batches, again, linear_layers(cut)[0], **options)
    assert [group.names for group in again.groups] == llama_groups(2)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, cut.get_parameter(name)), name
    assert [row["name"] for row in resumed.layers] == [row["name"] for row in full.layers]
    assert resumed.layers == full.layers
    other = llama(3, seed=1)
    with pytest.raises(ValueError, match="holds finished blocks of another model"):
        stream_blocks(other, batches, Halved(), linear_layers(other)[0], **options)
    assert json.loads((tmp_path / "work" / "job.json").read_text())["settings"]["a"] == 1


def test_a_model_whose_blocks_need_more_than_their_states_is_refused() -> None:
    class Skips(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](x + self.blocks[0](x, scale=0.5), scale=0.5)

    model = Skips()
    with pytest.raises(ValueError, match="need more than the hidden states below them"):
        stream_blocks(model, [{"x": random(2, 5, 6)}], Halved(), linear_layers(model)[0])


def test_what_cannot_be_compressed_is_refused() -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"'model.layers.0.mlp.up_proj' is quantised already"):
        linear_layers(model)
    with pytest.raises(ValueError, match="has no single list of blocks"):
        linear_layers(nn.Sequential(nn.Linear(2, 2)))


def test_moments_in_closed_form() -> None:
    x, y = random(50, 4), random(50, 4, seed=1)
    plain = InputMoments(4, root=False, cross=True, clip_norm=None)
    rooted = InputMoments(4, root=True, cross=False, clip_norm=None)
    for part in range(0, 50, 20):
        plain.add(y[part : part + 20], x[part : part + 20])
        rooted.add(y[part : part + 20])
    torch.testing.assert_close(plain.group(["a"]).gram, y.T @ y / 50)
    torch.testing.assert_close(plain.group(["a"]).cross, x.T @ y / 50)
    root = rooted.group(["a"]).root
    assert root is not None
    torch.testing.assert_close(root.T @ root, y.T @ y)
    assert torch.equal(root, root.triu())
    # the longest of 50 rows is shortened to the second longest, and its partner by the same factor
    clipped = InputMoments(4, root=False, cross=True, clip_norm=48 / 49)
    clipped.add(y, x)
    norms = y.norm(dim=1)
    factor = (norms.sort().values[-2] / norms).clamp_max(1)[:, None]
    torch.testing.assert_close(clipped.group(["a"]).gram, (factor * y).T @ (factor * y) / 50)
    torch.testing.assert_close(clipped.group(["a"]).cross, (factor * x).T @ (factor * y) / 50)
    # tokens that are routed elsewhere in the other stream have no partner
    plain.add(y[:3], x[:2])
    assert plain.group(["a"]).cross is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_beyond_the_limit_are_in_files(dtype: torch.dtype) -> None:
    spill = Spill(100 * torch.finfo(dtype).bits / 8)
    values = {key: random(8, 10, seed=key).to(dtype) for key in range(3)}
    for key, value in values.items():
        spill.put(key, value)
    assert len(list(Path(spill.directory.name).iterdir())) == 2
    spill.put(1, values[2])
    assert torch.equal(spill.get(0), values[0])
    assert torch.equal(spill.get(1), values[2])
    where = Path(spill.directory.name)
    spill.close()
    assert not where.exists()
