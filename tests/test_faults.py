"""A disk that fills up during a run: one clear message, the right exit code, and a run that goes on once there is room."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.runs import PARTIAL
from conftest import colour_rows, write_jsonl
from disks import tmpfs


def command(tiny_lm: Path, rows: Path) -> list[str]:
    return [
        sys.executable, "-m", "acclimate", "tune", "--model", str(tiny_lm), "--data", str(rows), "--task", "choice", "--quiet",
        "--adapter", "full", "--set", "train.max_steps=12", "--set", "train.save_every=2", "--set", "train.keep_checkpoints=9",
        "--set", "train.lr=1e-3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("faults") / "rows.jsonl", colour_rows(60))


@pytest.fixture(scope="module")
def uninterrupted(tiny_lm: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run([*command(tiny_lm, rows), "-o", str(where)], check=True)
    return where


def assert_went_on(run: Path, uninterrupted: Path) -> None:
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    assert (run / "model/model.safetensors").read_bytes() == (uninterrupted / "model/model.safetensors").read_bytes()
    assert not list(run.rglob(f"{PARTIAL}*"))


def test_full_disk(tiny_lm: Path, rows: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Each checkpoint of the tiny model (weights and both Adam moments) is about 0.8 MB: 3 MB hold a few of the six."""
    disk = tmp_path / "disk"
    with tmpfs(disk, "3m") as mounted:
        run = disk / "run"
        # without the right to mount, a limit on the size of files stands in: the kernel refuses the write all the same
        limit = None if mounted else (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)))
        result = subprocess.run(
            [*command(tiny_lm, rows), "-o", str(run)], capture_output=True, text=True, preexec_fn=limit
        )
        if mounted:
            assert result.returncode == 3, result.stderr
            assert "no space left on the disk" in result.stderr
            assert "--resume" in result.stderr
            assert "Traceback" not in result.stderr
            kept = sorted(p.name for p in (run / "checkpoints").glob("checkpoint-*"))
            assert kept, "the checkpoints before the fault are kept"
            for name in kept:
                state = json.loads((run / "checkpoints" / name / "trainer_state.json").read_text())
                assert name == f"checkpoint-{state['global_step']}"
            subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
        else:
            assert result.returncode != 0
        subprocess.run([sys.executable, "-m", "acclimate", "tune", "--quiet", "--resume", str(run)], check=True)
        assert_went_on(run, uninterrupted)


def test_disk_full_from_the_start(tiny_lm: Path, rows: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk, "1m") as mounted:
        if mounted:
            with pytest.raises(OSError, match="No space left"):
                (disk / "ballast").write_bytes(bytes(2**21))
        where = disk / "run" if mounted else Path("/dev/full/run")
        result = subprocess.run([*command(tiny_lm, rows), "-o", str(where)], capture_output=True, text=True)
        assert result.returncode in (2, 3), result.stderr
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("error: ")
