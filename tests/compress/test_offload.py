"""A model whose weights lie on disk is compressed like one in memory, and only the block that is worked on is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from acclimate.compress import blocks
from acclimate.compress.blocks import fingerprint
from acclimate.compress.files import latency
from acclimate.compress.offload import DISK, compute_device, in_memory, on_disk, weights_once
from acclimate.compress.text import perplexity
from acclimate.compress.whitening import compress_low_rank
from compress.small import ids, llama


def both(tmp_path: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The tiny model in memory, and on disk."""
    llama().save_pretrained(tmp_path / "model")
    where = tmp_path / "model"
    return tuple(
        AutoModelForCausalLM.from_pretrained(where, **more).eval()
        for more in ({}, {"device_map": DISK, "offload_folder": str(tmp_path / "folder")})
    )


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    with in_memory(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_same_model_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = both(tmp_path)
    calibration = ids(4)
    assert on_disk(there)
    assert compute_device(there) == torch.device("cpu")
    assert perplexity(there, calibration) == perplexity(here, calibration)
    assert fingerprint(there, [], {}) == fingerprint(here, [], {})
    assert sum(p.numel() for p in weights_once(there)) == sum(p.numel() for p in here.parameters())
    read: list[set[str]] = []
    block = blocks._Work._block

    def watched(self: blocks._Work, index: int, begun: float) -> None:
        read.append({name for name, p in self.model.named_parameters() if not p.is_meta and ".layers." in name})
        block(self, index, begun)

    monkeypatch.setattr(blocks._Work, "_block", watched)
    reports = [
        compress_low_rank(model, calibration, 0.3, checkpoint_dir=tmp_path / name, progress=False).to_dict()
        for model, name in ((there, "there"), (here, "here"))
    ]
    for index, names in enumerate(read[: len(read) // 2]):
        assert {name.split(".layers.")[1].split(".")[0] for name in names} == {str(index)}
    assert all(p.is_meta for name, p in there.named_parameters())
    for left, right in zip(*(report["layers"] for report in reports), strict=True):
        assert left == right
    assert reports[0]["parameters_after"] == reports[1]["parameters_after"]
    expected = weights(here)
    found = weights(there)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert perplexity(there, calibration) == perplexity(here, calibration)
    assert latency(there, calibration[:1], rounds=1) > 0


def test_after_a_failure_it_is_as_it_was(tmp_path: Path) -> None:
    here, there = both(tmp_path)

    class StopError(Exception):
        pass

    def fail(self: blocks._Work, index: int, layers: object, block: object) -> None:
        if index == 1:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks._Work, "_save", fail)
        with pytest.raises(StopError):
            compress_low_rank(there, ids(4), 0.3, progress=False)
    assert all(p.is_meta for p in there.parameters())
    assert all(torch.equal(weights(there)[name], value) for name, value in here.state_dict().items())
