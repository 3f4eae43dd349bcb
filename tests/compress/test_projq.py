"""ProjQ: its maths against explicit samples and competitors, whole models, and the folders they are saved in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate.compress.blocks import stream_blocks
from acclimate.compress.gptq import Grid, gptq, round_to_nearest
from acclimate.compress.projq import (
    Found,
    bits_per_weight,
    project_and_quantize,
    quantize_projq,
    uncorrectable,
)
from acclimate.compress.quant_linear import QuantLinear, quantized_layers
from acclimate.compress.quantized_formats import (
    FORMATS,
    dequantize_and_merge,
    load_quantized,
    save_quantized,
    to_compressed_tensors,
)
from acclimate.compress.whitening import factors
from acclimate.linalg import whitening_pair
from compress.small import ids, llama, random
from fresh_process import logits_in_a_fresh_process

M, N, RANK = 24, 32, 4
GRID = Grid(2, 16)


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(W (m, n), X (tokens, n), S, S^-1) with correlated inputs."""
    X = random(400, N, seed=seed + 1) @ (random(N, N, seed=seed + 2) * 0.9 ** torch.arange(N))
    C = X.T @ X / len(X)
    return random(M, N, seed=seed).float() * 0.1, X, *whitening_pair(C, 1e-9 * float(C.trace()) / N)


def j(W: Tensor, Q: Tensor, S: Tensor, rank: int) -> float:
    """The definition, by a whole SVD."""
    return float(torch.linalg.svdvals((W.double() - Q) @ S)[rank:].square().sum())


# --- one layer ---


@pytest.mark.parametrize(("m", "n"), [(24, 32), (32, 24), (9, 9)])
def test_what_no_adapter_can_correct(m: int, n: int) -> None:
    error = random(m, n)
    _, sigma, Vt = torch.linalg.svd(error)
    loss, V = uncorrectable(error, 4)
    assert loss == pytest.approx(float(sigma[4:].square().sum()), rel=1e-10)
    torch.testing.assert_close(V @ V.T, Vt[:4].T @ Vt[:4])
    assert uncorrectable(error, min(m, n))[0] == pytest.approx(0, abs=1e-9)


def test_the_square_form_is_the_published_one_on_samples() -> None:
    """X (I - P) with P the projector on the leading left singular vectors of the samples' errors has the second moment
    S (I - V V^T) S^T, and the same J."""
    W, X, S, _ = problem()
    Q = round_to_nearest(W, GRID).dequantize()
    samples = X.T / len(X) ** 0.5  # (n, N), samples samples^T = C
    P = torch.linalg.svd((W - Q).double() @ samples, full_matrices=False).Vh[:RANK]
    projected = samples - (samples @ P.T) @ P
    loss, V = uncorrectable((W - Q).double() @ S, RANK)
    torch.testing.assert_close(S @ (torch.eye(N) - V @ V.T) @ S.T, projected @ projected.T, rtol=0, atol=1e-7)
    assert loss == pytest.approx(float(((W - Q).double() @ projected).square().sum()), rel=1e-7)


@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.5])
def test_it_is_never_worse_than_gptq_by_j(kappa: float) -> None:
    better = 0
    for seed in range(8):
        W, _, S, S_inv = problem(seed)
        found = project_and_quantize(W, S, S_inv, GRID, RANK, kappa=kappa)
        first = gptq(W, S @ S.T, GRID)
        assert found.losses[0] == pytest.approx(j(W, first.dequantize(), S, RANK), rel=1e-8)
        kept = j(W, found.quantized.dequantize(), S, RANK)
        assert kept == pytest.approx(min(found.losses), rel=1e-8)
        assert found.share == pytest.approx(1 - kept / j(W, found.quantized.dequantize(), S, 0), rel=1e-8)
        better += kept < found.losses[0]
    assert better >= 6


def test_with_kappa_one_nothing_is_projected() -> None:
    """The second iterate is GPTQ's with the same damping, so J stands still and the work stops."""
    W, _, S, S_inv = problem()
    found = project_and_quantize(W, S, S_inv, GRID, RANK, kappa=1.0)
    assert torch.equal(found.quantized.codes, gptq(W, S @ S.T, GRID).codes)
    assert found.losses == pytest.approx([found.losses[0]] * 2)


def test_the_extreme_ranks() -> None:
    W, _, S, S_inv = problem()
    none = project_and_quantize(W, S, S_inv, GRID, 0)
    assert torch.equal(none.quantized.codes, gptq(W, S @ S.T, GRID).codes)
    assert none.B.shape == (M, 0)
    whole = project_and_quantize(W, S, S_inv, GRID, M)
    assert whole.losses == pytest.approx([0], abs=1e-12)
    torch.testing.assert_close(whole.quantized.dequantize() + (whole.B @ whole.A).float(), W, rtol=0, atol=1e-5)
    other = project_and_quantize(W, S, S_inv, GRID, RANK, comp_rank=7)
    assert other.A.shape == (7, N)


def test_no_other_adapter_of_its_rank_corrects_more() -> None:
    W, _, S, S_inv = problem()
    found = project_and_quantize(W, S, S_inv, GRID, RANK)
    gap = W.double() - found.quantized.dequantize()

    def left(L: Tensor) -> float:
        return float(((gap - L) @ S).square().sum())

    least = left(found.B @ found.A)
    assert least == pytest.approx(min(found.losses), rel=1e-8)
    U, sigma, Vt = torch.linalg.svd(gap, full_matrices=False)
    assert least < left((U[:, :RANK] * sigma[:RANK]) @ Vt[:RANK])
    for seed in range(200):  # nearby ones of the same rank, and far ones
        step = 10.0 ** (seed % 4 - 4)
        B, A = found.B + step * random(M, RANK, seed=seed), found.A + step * random(RANK, N, seed=seed + 500)
        assert left(B @ A) > least


def test_permuting_rows_permutes_the_result() -> None:
    W, _, S, S_inv = problem()
    order = torch.randperm(M, generator=torch.Generator().manual_seed(0))
    plain, turned = (project_and_quantize(w, S, S_inv, GRID, RANK) for w in (W, W[order]))
    assert torch.equal(turned.quantized.codes, plain.quantized.codes[order])
    torch.testing.assert_close(turned.B @ turned.A, (plain.B @ plain.A)[order], rtol=1e-6, atol=1e-9)
    assert turned.losses == pytest.approx(plain.losses, rel=1e-8)
    assert turned.share == pytest.approx(plain.share, rel=1e-8)


def test_more_bits_lose_less() -> None:
    W, _, S, S_inv = problem()
    eight, three = (min(project_and_quantize(W, S, S_inv, Grid(bits, 16), RANK).losses) for bits in (8, 3))
    assert 100 * eight < three


@pytest.mark.parametrize("method", ["rtn", "gptq", "loftq"])
def test_the_methods_to_compare_with(method: Any) -> None:
    W, _, S, S_inv = problem()
    found = project_and_quantize(W, S, S_inv, GRID, RANK, method=method)
    first = round_to_nearest(W, GRID) if method == "rtn" else gptq(W, S @ S.T, GRID)
    if method != "loftq":
        assert torch.equal(found.quantized.codes, first.codes)
        assert len(found.losses) == 1
    else:  # its second iterate rounds what the first adapter leaves
        B, A, _ = factors((W - first.dequantize()).double() @ S, S_inv, RANK)
        again = gptq(W - B @ A, S @ S.T, GRID).dequantize()
        assert found.losses[1] == pytest.approx(j(W, again, S, RANK), rel=1e-8)


# --- whole models ---


def quantised(**options: Any) -> tuple[Any, Any]:
    return quantize_projq(llama(), ids(24), **{"bits": 3, "group_size": 16, "rank": RANK, "progress": False, **options})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits


def distance(model: Any) -> float:
    wanted = logits(llama())
    return float((logits(model) - wanted).norm() / wanted.norm())


def test_a_model_and_its_report() -> None:
    model, report = quantised()
    layers = quantized_layers(model)
    assert len(layers) == 14 == len(report.layers)
    assert not report.kept
    for row in report.layers:
        assert row["ratio"] == pytest.approx(min(row["losses"]) / row["losses"][0])
        assert row["ratio"] <= 1
        assert row["error_corrected"] < row["error_quantised"]
    assert distance(model) < 0.9 * distance_without(model)
    assert report.settings["comp_rank"] == RANK
    assert json.loads(report.to_json())["method"] == "projq"
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def distance_without(model: Any) -> float:
    with model.disable_adapter():
        return distance(model)


def test_methods_and_streams_on_a_model() -> None:
    plain = {method: quantised(bits=2, method=method)[1] for method in ("projq", "gptq", "rtn")}
    first = [report.layers[0] for report in plain.values()]
    assert first[0]["losses"][0] == pytest.approx(first[1]["losses"][0])
    assert min(first[0]["losses"]) < first[1]["losses"][0] < first[2]["losses"][0]
    errors = {
        s: quantised(bits=2, stream=s)[1].blocks[-1]["error"] for s in ("quantised+adapter", "quantised", "original")
    }
    assert len(set(errors.values())) == 3
    assert errors["quantised+adapter"] < errors["quantised"]


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate.compress import projq

    wanted = logits(quantised()[0])
    calls = 0
    work = projq.project_and_quantize

    def dies(*arguments: Any, **options: Any) -> Found:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return work(*arguments, **options)

    monkeypatch.setattr(projq, "project_and_quantize", dies)
    model = llama()
    with pytest.raises(KeyboardInterrupt):
        quantize_projq(model, ids(24), 3, 16, RANK, checkpoint_dir=tmp_path, progress=False)
    assert not quantized_layers(model)
    torch.testing.assert_close(logits(model), logits(llama()), rtol=0, atol=0)
    calls = 100
    again, report = quantize_projq(model, ids(24), 3, 16, RANK, checkpoint_dir=tmp_path, progress=False)
    assert calls == 107  # the first block of seven layers was there
    assert len(report.layers) == 14
    torch.testing.assert_close(logits(again), wanted, rtol=0, atol=0)


def test_arguments_that_are_refused() -> None:
    for options, message in (
        ({"bits": 5}, "bits is one of 2, 3, 4, 8, not 5"),
        ({"group_size": 12}, r"group_size 12 does not divide the 32 inputs of 'model\.layers\.0\.self_attn\.q_proj'"),
        ({"comp_rank": 0}, "comp_rank at least 1"),
        ({"kappa": 2.0}, "kappa is between 0 and 1"),
        ({"iterations": -1}, "iterations is at least 0"),
        ({"stream": "none"}, "stream is one of"),
        ({"method": "awq"}, "method is one of"),
        ({"rank": 32}, "rank 32 is that of every layer or more"),
    ):
        with pytest.raises(ValueError, match=message):
            quantised(**options)


def test_layers_that_a_rank_fills_are_left_alone() -> None:
    with pytest.warns(UserWarning, match="rank 16 would make up for all of its error"):
        _, report = quantised(rank=16)
    assert sorted(report.kept) == [f"model.layers.{i}.self_attn.{k}_proj" for i in (0, 1) for k in "kv"]


def test_little_text_is_told_and_damped_more() -> None:
    with pytest.warns(UserWarning, match="fewer calibration tokens than inputs for 14 layers"):
        model, _ = quantize_projq(llama(), ids(1, 12), 3, 16, RANK, progress=False)
    assert logits(model).isfinite().all()


def test_inputs_that_are_not_finite_stop_the_work() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"sequence .*layers\.1|layers\.1.*sequence"):
        quantize_projq(model, ids(24), 3, 16, RANK, progress=False)
    assert not quantized_layers(model)


def test_what_is_quantised_already_is_refused() -> None:
    model, _ = quantised()
    base = model.unload()
    with pytest.raises(TypeError, match="is quantised already"):
        quantize_projq(base, ids(24), 3, 16, RANK, progress=False)


def test_an_error_that_is_not_a_number_falls_back_to_gptq(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate.compress import projq

    W, _, S, S_inv = problem()
    real, calls = projq.uncorrectable, 0

    def spoiled(error: Tensor, rank: int) -> tuple[float, Tensor]:
        nonlocal calls
        calls += 1
        loss, V = real(error, rank)
        return (float("nan") if calls == 2 else loss), V

    monkeypatch.setattr(projq, "uncorrectable", spoiled)
    found = project_and_quantize(W, S, S_inv, GRID, RANK)
    assert found.diverged
    assert torch.equal(found.quantized.codes, gptq(W, S @ S.T, GRID).codes)


# --- folders ---


@pytest.mark.parametrize("bits", [3, 4])
def test_folders_in_every_format_answer_alike(tmp_path: Path, bits: int) -> None:
    model, _ = quantised(bits=bits)
    wanted = logits(model)
    for format in FORMATS if bits == 4 else ("gptq", "compressed-tensors"):
        if format == "compressed-tensors" and bits == 3:
            with pytest.raises(ValueError, match="compressed-tensors holds weights of 4 or 8 bits"):
                save_quantized(model, tmp_path / format, format)
            continue
        save_quantized(model, tmp_path / format, format)
        torch.testing.assert_close(logits(load_quantized(tmp_path / format)), wanted, rtol=0, atol=1e-6)
        assert (
            load_file(tmp_path / format / "adapter" / "adapter_model.safetensors").popitem()[1].dtype == torch.float16
        )
    assert type(model.base_model.model.model.layers[0].mlp.up_proj.base_layer) is QuantLinear  # saving changed nothing
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
    with pytest.raises(ValueError, match="format is one of"):
        save_quantized(model, tmp_path / "other", "awq")  # type: ignore[arg-type]
    if bits == 3:
        return
    dense, without = logits_in_a_fresh_process(
        [(tmp_path / "dense", tmp_path / "dense" / "adapter"), (tmp_path / "dense", None)], ids().tolist(), tmp_path
    )
    torch.testing.assert_close(dense, wanted, rtol=0, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(without, logits(model), rtol=0, atol=1e-5)


def test_other_engines_read_the_packed_layouts(tmp_path: Path) -> None:
    """compressed-tensors' own code unpacks ours; with a symmetric grid transformers loads the folder through it."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from transformers import AutoModelForCausalLM

    for sym in (False, True):
        model, _ = quantised(bits=4, sym=sym)
        save_quantized(model, tmp_path / str(sym), "compressed-tensors")
        config = json.loads((tmp_path / str(sym) / "config.json").read_text())["quantization_config"]
        scheme = QuantizationScheme(**config["config_groups"]["group_0"])
        for layer in quantized_layers(model).values():
            found = PackedQuantizationCompressor.decompress(to_compressed_tensors(layer, sym), scheme)["weight"]
            torch.testing.assert_close(found.float(), layer.dequantize(), rtol=2e-3, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "True")
    torch.testing.assert_close(
        logits(base), logits(load_quantized(tmp_path / "True", adapter=False)), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("bits", "group_size"), [(2, 16), (3, 32), (8, -1)])
def test_bits_per_weight_are_those_of_the_files(tmp_path: Path, bits: int, group_size: int) -> None:
    """Up to names and shapes in the files' headers."""
    model = llama(blocks=1)
    found, report = quantize_projq(
        model, ids(24), bits, group_size, RANK, progress=False, targets=["gate_proj", "up_proj"]
    )
    save_quantized(found, tmp_path / "q")
    stored = load_file(tmp_path / "q" / "model.safetensors") | load_file(
        tmp_path / "q" / "adapter" / "adapter_model.safetensors"
    )
    own = {k: v for k, v in stored.items() if "gate_proj" in k or "up_proj" in k}
    size = sum(value.numel() * value.element_size() for value in own.values())
    weights = 2 * 48 * 32
    assert report.bits_per_weight == bits_per_weight(found)
    assert report.bits_per_weight["total"] == pytest.approx(8 * size / weights, rel=0.01)
    assert report.bits_per_weight["adapter"] == pytest.approx(16 * RANK * (48 + 32) / (48 * 32))


def test_merging_needs_a_dense_model() -> None:
    model, _ = quantised()
    with pytest.raises(ValueError, match="Cannot merge"):
        model.merge_and_unload()
    merged = dequantize_and_merge(model)
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear
    assert quantized_layers(model)


def test_what_is_written_to_the_weight_is_lost() -> None:
    model, _ = quantised()
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    expected = layer.dequantize()
    with torch.no_grad():
        layer.weight.normal_()  # as transformers does to weights that it did not find in a file
    torch.testing.assert_close(layer.weight, expected, rtol=0, atol=0)
    assert layer.weight is layer.weight
    layer.qweight = torch.zeros_like(layer.qweight)  # as it gives a layer what it did find
    torch.testing.assert_close(layer.weight, layer.dequantize(), rtol=0, atol=0)


def test_an_expert_without_tokens_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate.compress import projq

    def starved(*arguments: Any, **options: Any) -> Any:
        found = stream_blocks(*arguments, **options)
        name = "model.layers.1.mlp.up_proj"
        arguments[0].set_submodule(name, found.originals[name])  # as if no token had reached it
        found.kept[name] = "no calibration token reaches it"
        return found

    monkeypatch.setattr(projq, "stream_blocks", starved)
    with pytest.warns(UserWarning, match="rounded to nearest, without an adapter"):
        model, _ = quantised()
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    assert type(layer) is QuantLinear
    expected = round_to_nearest(llama().model.layers[1].mlp.up_proj.weight, Grid(3, 16)).dequantize()
    torch.testing.assert_close(layer.weight, expected)
