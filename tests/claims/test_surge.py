"""The SURGE claim runs end to end at its smallest size; what is exact in it is exact. Its verdict at that size means nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate.claims.io_adam import Classifier
from acclimate.claims.surge import CLAIM, ENCODERS, ETAS, PEERS, SIZES, digits, network, run, sklearn_digits
from acclimate.claims.surge_bias import measure, smoothed_gradient, summary, write
from acclimate.claims.surge_cifar import augmented, command_line, read
from acclimate.claims.surge_cifar import run as cifar_run
from acclimate.compress.surge import SurgeConfig, binarize, binary_layers
from acclimate.errors import InputError
from acclimate_claims import bench_fast


def test_fast_bench_measures_every_estimator(tmp_path: Path) -> None:
    evidence = bench_fast("surge", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    measured = {system for system, metric in rows if metric == "training loss"}
    assert measured >= {*PEERS, "SURGE", "SURGE, shared", "SURGE, fixed lambda 1"}
    assert len(measured) == len(PEERS) + 3 + len(ETAS) - 1
    assert {system for system, metric in rows if metric == "accuracy, 8 x 8"} == {*PEERS, "SURGE"}
    assert {system for system, metric in rows if metric == "sentiment accuracy"} == set(ENCODERS)
    assert {system for system, metric in rows if metric == "ms per step"} == {"STE", "SURGE", "SURGE, shared"}


def test_rows_do_not_overlap_and_every_estimator_starts_alike() -> None:
    size = SIZES["default"]
    for parts, sizes in ((sklearn_digits(size.small_rows), size.small_rows), (digits(size.rows), size.rows)):
        assert [len(y) for _, y in parts] == list(sizes)
        rows = torch.cat([x.flatten(1) for x, _ in parts])
        assert len(torch.unique(rows, dim=0)) == sum(sizes)
    shares = [torch.bincount(y) / len(y) for _, y in parts]
    assert all((share - 0.1).abs().max() < 0.01 for share in shares)
    plain, ours = network(PEERS["STE"], 8, 3), network(SurgeConfig(), 8, 3)
    assert len(list(binary_layers(ours))) == 5
    state = ours.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_a_run_repeats() -> None:
    size = SIZES["fast"]
    assert run(SurgeConfig(), size, 1) == run(SurgeConfig(), size, 1)


def test_the_best_lambda_is_never_worse_than_none(tmp_path: Path) -> None:
    """y = sign(w x + noise): with lambda* from the samples, the compensated gradient is no further from the smoothed loss's."""
    rows = measure(side=5, draws=(100, 10))
    assert len(rows) == 25 * 4
    assert all(row["mse_best"] <= row["mse_ste"] + 1e-12 for row in rows)
    assert sum(row["mse_best"] < 0.99 * row["mse_ste"] for row in rows) > 10
    assert all(abs(row[f"cosine_{name}"]) <= 1 + 1e-9 for row in rows for name in ("ste", "surge"))
    assert all(row["mse_ste"] >= row["bias_ste"] ** 2 - 1e-12 for row in rows)
    means = summary(rows)
    assert [row["sigma"] for row in means] == [0.25, 0.5, 1.0, 2.0]
    assert means[0]["bias_ste"] > 4 * means[3]["bias_ste"], "noise smooths what the estimator is blind to"
    write(rows, tmp_path)
    with (tmp_path / "surge-bias.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert float(table[7]["cosine_ste"]) == pytest.approx(rows[7]["cosine_ste"], rel=1e-5)
    assert (tmp_path / "surge-bias.svg").read_text().count("<svg") == 1


def test_the_smoothed_gradient_is_that_of_the_error_function() -> None:
    w, sigma = torch.tensor([1.0, 0.5], dtype=torch.float64), 0.7
    x = torch.tensor([0.4, -1.1], dtype=torch.float64, requires_grad=True)
    torch.erf(w * x / (sigma * 2**0.5)).sum().backward()
    torch.testing.assert_close(smoothed_gradient(w, x.detach(), sigma), x.grad)


def test_every_encoder_starts_from_the_same_head() -> None:
    heads = []
    for config in ENCODERS.values():
        model = Classifier(3)
        if config is not None:
            binarize(model, config)
            assert len(list(binary_layers(model))) == 36
        heads.append(model.head.weight)
    assert all(torch.equal(head, heads[0]) for head in heads)


# --- the published setting ---


def cifar(folder: Path) -> Path:
    """20 images to train on and 6 to test on, as in CIFAR-10's binary version."""
    draw = np.random.default_rng(0)
    for name, count in [(f"data_batch_{i}", 4) for i in range(1, 6)] + [("test_batch", 6)]:
        rows = draw.integers(0, 256, (count, 3073)).astype(np.uint8)
        rows[:, 0] = np.arange(count) % 10
        rows.tofile(folder / f"{name}.bin")
    return folder


def test_published_setting_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = cifar(tmp_path)
    options = [command_line(["--data", str(data), "--epochs", "2", "--device", "cpu", "-o", str(tmp_path / f"{i}.json")]) for i in range(2)]  # fmt: skip
    whole = cifar_run(options[0])
    cifar_run(options[1], until=1)
    assert cifar_run(options[1]) == whole
    states = [torch.load(tmp_path / f"{i}.pt", weights_only=True)["model"] for i in range(2)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert whole["published"] == 0.88
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 3000)
    with pytest.raises(InputError, match="is no file of CIFAR-10's binary version: 3000 bytes"):
        cifar_run(options[0])
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"there is no '.*data_batch_3\.bin'"):
        cifar_run(options[0])


def test_crops_and_mirror_images(tmp_path: Path) -> None:
    images, classes = read([cifar(tmp_path) / "data_batch_1.bin"])
    assert classes.tolist() == [0, 1, 2, 3]
    found = augmented(images.float(), torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(images.float(), (4, 4, 4, 4))
    for image, source in zip(found, padded, strict=True):
        cuts = [source[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any(torch.equal(image, cut) or torch.equal(image, cut.flip(2)) for cut in cuts)
