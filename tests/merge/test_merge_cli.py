"""`acclimate merge`: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acclimate.cli.common import run_app
from merge.synthetic import adapter, deltas, distance


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of two adapters in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("first", 1), ("second", 2)):
        adapter(Path(name), seed)
    return ["first", "second"]


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app(["merge", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_merges_and_says_what_it_did(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    code, out, err = called(
        capsys, *two, "-o", "both", "--rule", "sum", "--rank", "8", "--weights", "1,-0.5", "--report", "r.json"
    )
    assert code == 0
    assert out.rstrip().endswith("wrote both")
    assert "100.0%" in out
    assert "merging: 3/3" in err
    wanted = {key: value - 0.5 * deltas(Path("second"))[key] for key, value in deltas(Path("first")).items()}
    assert distance(deltas(Path("both")), wanted) < 1e-5
    report = json.loads(Path("r.json").read_text())
    assert report["totals"]["rank"] == 8
    assert len(report["modules"]) == 3


def test_one_json_document(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    code, out, err = called(capsys, *two, "-o", "both", "--rank", "auto:0.5", "--rule", "sum", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["directory"] == "both"
    assert document["totals"]["energy"] >= 0.5
    assert document["totals"]["rank"] == json.loads(Path("both/adapter_config.json").read_text())["r"] < 8
    assert document["warnings"] == [
        f"rank {document['totals']['rank']} keeps {document['totals']['energy']:.0%} of the merged change's squared norm; "
        + document["warnings"][0].partition("; ")[2]
    ]
    assert {"name", "shape", "R", "p", "q", "erank_in", "erank_out", "energy", "seconds"} <= set(document["modules"][0])
    assert called(capsys, *two, "-o", "quiet", "--quiet") == (0, "", "")


def test_notes_for_people(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    code, out, _ = called(capsys, *two, "-o", "both", "--rank", "1")
    assert code == 0
    assert "note: rank 1 keeps" in out
    assert "would keep 90%" in out


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    before = sorted(Path().rglob("*"))
    code, out, _ = called(capsys, *two, "--dry-run")
    assert code == 0
    assert "layers.0.up_proj" in out
    assert "40 x 48" in out
    assert "rank of the result: 4, float32; other tensors: 0" in out
    code, out, _ = called(capsys, *two, "--dry-run", "--json", "-o", "both")
    assert json.loads(out)["modules"][1] == {"name": "layers.0.up_proj", "shape": [40, 48], "ranks": [4, 4]}
    assert sorted(Path().rglob("*")) == before


def test_compare_basis(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    code, out, _ = called(capsys, *two, "--compare-basis", "--json")
    assert code == 0
    assert [row["basis"] for row in json.loads(out)] == ["svd", "gram", "circulant"]
    code, out, _ = called(capsys, *two, "--compare-basis")
    assert code == 0
    assert "distance from svd" in out
    assert sorted(path.name for path in Path().iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say where to write the merged adapter: -o DIRECTORY"),
        (("-o", "first"), "'first' is, or holds, the input 'first'. Choose another place with -o"),
        (("-o", "x", "--rule", "tise"), "Did you mean 'ties'?"),
        (("-o", "x", "--rank", "0"), "rank must be at least 1, not 0"),
        (("-o", "x", "--rank", "-3"), "rank must be at least 1, not -3"),
        (("-o", "x", "--rank", "half"), "rank is a number or auto:E"),
        (("-o", "x", "--weights", "1;2"), "--weights takes numbers with commas between them, not '1;2'"),
        (("-o", "x", "--weights", "1"), "there are 2 adapters and 1 weights"),
        (("-o", "x", "--density", "0"), "density must be above 0"),
        (("third", "-o", "x"), "no adapter_config.json in 'third'"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    capsys: pytest.CaptureFixture[str], two: list[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = called(capsys, *two, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["first", "second"]


def test_overwrite(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    assert called(capsys, *two, "-o", "both", "-q")[0] == 0
    assert called(capsys, *two, "-o", "both", "-q")[0] == 2
    before = Path("both/README.md").read_text()
    assert called(capsys, *two, "-o", "both", "-q", "--overwrite", "--seed", "5")[0] == 0
    assert Path("both/README.md").read_text() != before


@pytest.mark.parametrize("out", ["first", "."])
def test_an_input_is_not_overwritten(capsys: pytest.CaptureFixture[str], two: list[str], out: str) -> None:
    before = {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()}
    code, _, err = called(capsys, *two, "-o", out, "--overwrite")
    assert code == 2
    assert f"'{out}' is, or holds, the input 'first'. Choose another place with -o" in err
    assert {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()} == before


def test_a_full_disk_leaves_no_half_result(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    from disks import tmpfs

    with tmpfs(Path("small"), "16k") as mounted:
        if not mounted:  # without root, what the system says is put in its place
            pytest.MonkeyPatch().setattr(
                "acclimate.merge.adapter_files.StreamedFile.write",
                lambda *rest: (_ for _ in ()).throw(OSError(28, "full")),
            )
        code, _, err = called(capsys, *two, "-o", "small/both")
        assert code == 3
        assert "no space left on the disk" in err
        assert not Path("small/both").exists()
