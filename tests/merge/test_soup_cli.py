"""`acclimate soup`: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acclimate.cli.common import run_app
from acclimate.merge.monosoup import monosoup
from merge.synthetic import adapter


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of a base and its fine-tune in the working directory; an adapter lies beside them."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(12, 10, generator=generator), "b.weight": torch.randn(8, 12, generator=generator)}
    base["a.bias"] = torch.zeros(12)
    tuned = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator) * 0.5 ** torch.arange(value.shape[-1])
        for name, value in base.items()
    }
    for name, state in (("base", base), ("tuned", tuned)):
        Path(name).mkdir()
        save_file(state, Path(name, "model.safetensors"))
        Path(name, "config.json").write_text("{}")
    adapter(Path("adapter"), 1)
    return ["base", "tuned"]


PRESENT = ["adapter", "base", "tuned"]


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app(["soup", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_writes_and_says_what_it_did(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    code, out, err = called(capsys, *models, "-o", "robust", "--report", "r.json")
    assert code == 0
    assert out.rstrip().endswith("wrote robust")
    assert "souping: 3/3" in err
    wanted, report = monosoup(*models)
    written = load_file("robust/model.safetensors")
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert not torch.equal(written["a.weight"], load_file("tuned/model.safetensors")["a.weight"])
    assert json.loads(Path("r.json").read_text())["totals"]["lambda_low"] == report.totals["lambda_low"]
    assert {path.name for path in Path("robust").iterdir()} == {"model.safetensors", "config.json", "soup_report.json"}


def test_an_adapter_by_itself(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    code, out, _ = called(capsys, "adapter", "-o", "robust", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["directory"] == "robust"
    assert len(document["tensors"]) == document["totals"]["tensors"] == 3
    assert json.loads(Path("robust/adapter_config.json").read_text())["lora_alpha"] == 4


def test_one_json_document_and_silence(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    code, out, err = called(capsys, *models, "-o", "robust", "--json", "--mode", "variance", "--energy", "0.5")
    assert (code, err) == (0, "")
    assert json.loads(out)["totals"]["mode"] == "variance"
    assert called(capsys, *models, "-o", "quiet", "-q") == (0, "", "")


def test_notes_for_people(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    code, out, _ = called(capsys, "tuned", "tuned/model.safetensors", "-o", "same")
    assert code == 0
    assert "note: fine-tuning changed none of these weights: the result equals the input" in out


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    before = sorted(Path().rglob("*"))
    code, out, _ = called(capsys, *models, "--dry-run", "--exclude", "^b")
    assert code == 0
    assert "12 x 10" in out
    assert "about 4 kB of memory beside the program" in out
    code, out, _ = called(capsys, *models, "--dry-run", "--exclude", "^b", "--json")
    assert {row["name"]: row["what"] for row in json.loads(out)["tensors"]} == {
        "a.weight": "edit",
        "b.weight": "left out by name",
        "a.bias": "not a matrix",
    }
    code, out, _ = called(capsys, "adapter", "--dry-run", "--json")
    assert [row["what"] for row in json.loads(out)["tensors"]] == ["edit"] * 3
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("base", "tuned"), "say where to write the result: -o DIRECTORY"),
        (("base", "tuned", "-o", "adapter"), "'adapter' exists. Choose another place with -o, or replace it"),
        (("base", "tuned", "-o", "tuned", "--overwrite"), "'tuned' is, or holds, the input 'tuned'"),
        (("base", "tuned", "-o", "x", "--mode", "varience"), "Did you mean 'variance'?"),
        (("base", "tuned", "-o", "x", "--energy", "0"), "energy must be above 0 and at most 1, not 0.0"),
        (("base", "tuned", "-o", "x", "--dtype", "int4"), "dtype is float64, float32, float16, bfloat16; not 'int4'"),
        (("base", "tuned", "-o", "x", "--device", "gpu"), "device is cpu or cuda, not 'gpu'"),
        (("base", "tuned", "-o", "x", "--jobs", "0"), "jobs must be at least 1, not 0"),
        (("base", "tuned", "-o", "x", "--include", "c"), "leave none of the 2 matrices"),
        (("base", "adapter", "-o", "x"), "'adapter' is an adapter, which needs no base: acclimate soup adapter -o OUT"),
        (("tuned", "-o", "x"), "name its base first: acclimate soup BASE tuned -o OUT"),
        (("base", "tuned", "other", "-o", "x"), "soup takes BASE and TUNED, or one adapter, not 3 paths"),
        (("base", "none", "-o", "x"), "no file or directory 'none'"),
        (("none", "-o", "x"), "no adapter_config.json in 'none'"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    capsys: pytest.CaptureFixture[str], models: list[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == PRESENT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    code, _, err = called(capsys, *models, "-o", "x", "--device", "cuda")
    assert code == 3
    assert "device 'cuda' is not here" in err


def test_strict(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    state = load_file("base/model.safetensors")
    del state["b.weight"]
    save_file(state, "base/model.safetensors")
    code, out, _ = called(capsys, *models, "-o", "x")
    assert code == 0
    assert "note: " in out
    assert "lacks 1 tensors, e.g. 'b.weight': they are kept as fine-tuned" in out
    code, _, err = called(capsys, *models, "-o", "y", "--strict")
    assert code == 2
    assert "e.g. 'b.weight'" in err


def test_overwrite(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    assert called(capsys, *models, "-o", "robust", "-q")[0] == 0
    assert called(capsys, *models, "-o", "robust", "-q")[0] == 2
    before = Path("robust/soup_report.json").read_text()
    assert called(capsys, *models, "-o", "robust", "-q", "--overwrite", "--mode", "variance")[0] == 0
    assert Path("robust/soup_report.json").read_text() != before


def test_a_full_disk_leaves_no_half_result(capsys: pytest.CaptureFixture[str], models: list[str]) -> None:
    from disks import tmpfs

    with tmpfs(Path("small"), "4k") as mounted, pytest.MonkeyPatch().context() as patch:
        if not mounted:  # without root, what the system says is put in its place
            patch.setattr(
                "acclimate.merge.adapter_files.StreamedFile.write",
                lambda *rest: (_ for _ in ()).throw(OSError(28, "full")),
            )
        code, _, err = called(capsys, *models, "-o", "small/robust")
        assert code == 3
        assert "no space left on the disk" in err
        assert not Path("small/robust").exists()
