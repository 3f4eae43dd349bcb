"""A run directory survives kills, full disks and second processes: every file is old or new, never half."""
# ruff: noqa: PT012 - the contexts themselves are tested, so more than one statement runs inside

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate import runs
from acclimate.errors import InputError, MissingError
from acclimate.runs import PARTIAL, Interrupted, Run
from disks import read_only, tmpfs, write_half


def names(path: Path) -> set[str]:
    return {item.name for item in path.iterdir()}


# --- writing ---


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    runs.write_text(path, "old é\n")
    with runs.replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent  # the same file system, or renaming would copy
        assert path.read_text(encoding="utf-8") == "old é\n"
    assert path.read_text() == "new"
    assert names(path.parent) == {"file.txt"}


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.txt"
    runs.write_text(path, "old")
    with pytest.raises(type(error)), runs.replacing(path) as temporary:
        temporary.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file.txt"}


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    for content in ("one", "two"):
        with runs.replacing(path) as temporary:
            (temporary / "inner").mkdir(parents=True)
            (temporary / f"{content}.txt").write_text(content)
            (temporary / "inner" / "file").write_text(content)
    assert names(path) == {"two.txt", "inner"}
    assert (path / "inner" / "file").read_text() == "two"
    with contextlib.suppress(RuntimeError), runs.replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "three.txt").write_text("thr")
        raise RuntimeError
    assert names(path) == {"two.txt", "inner"}
    assert names(tmp_path) == {"adapter"}


def test_a_leftover_of_this_process_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    leftover = tmp_path / f"{PARTIAL}{os.getpid()}-adapter"
    leftover.mkdir()
    (leftover / "old.bin").write_text("old")
    with runs.replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "new.bin").write_text("new")
    assert names(path) == {"new.bin"}


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the rename must not leave a name in front of empty blocks."""
    events: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    with runs.replacing(tmp_path / "adapter") as temporary:
        temporary.mkdir()
        for name in ("a.bin", "b.bin"):
            (temporary / name).write_text(name)
    assert set(events[:2]) == {("sync", "a.bin"), ("sync", "b.bin")}
    assert events[2:] == [("rename", "adapter"), ("sync", tmp_path.name)]


def test_others_may_read_what_was_written_for_the_owner_alone(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    with runs.replacing(tmp_path / "weights.safetensors") as temporary:
        temporary.touch(mode=0o600)
    with runs.replacing(tmp_path / "adapter") as temporary:
        temporary.mkdir()
        (temporary / "weights.safetensors").touch(mode=0o600)
    for path in (tmp_path / "weights.safetensors", tmp_path / "adapter" / "weights.safetensors"):
        assert path.stat().st_mode == ordinary.stat().st_mode


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\u2028é"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(value=json_values)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    runs.write_json(path, value)
    assert runs.read_json(path) == value
    runs.write_jsonl(path, [{"row": value}, {"row": 2}])
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] == [
        {"row": value},
        {"row": 2},
    ]


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        runs.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert names(tmp_path) == set()


def test_reading_json_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*x\.json"):
        runs.read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"status": ')
    with pytest.raises(InputError, match=r"cannot read .*x\.json"):
        runs.read_json(tmp_path / "x.json")


# --- full and read-only disks ---


def test_a_full_disk_keeps_the_old_file_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk) as mounted:
        runs.write_text(disk / "metrics.json", "old")
        if not mounted:
            monkeypatch.setattr(Path, "write_text", write_half)
        with pytest.raises(MissingError) as caught:
            runs.write_text(disk / "metrics.json", "x" * 2_000_000)
        assert f"no space left on the disk of '{disk}'" in str(caught.value)
        assert "--resume" in str(caught.value)
        assert caught.value.exit_code == 3
        assert (disk / "metrics.json").read_text() == "old"
        assert names(disk) == {"metrics.json"}


def test_a_disk_that_fills_while_torch_writes(tmp_path: Path) -> None:
    """torch and safetensors wrap the error of the operating system in their own."""
    import torch
    from safetensors.torch import save_file

    disk = tmp_path / "disk"
    weights = {"w": torch.zeros(1_000_000)}
    writers = {
        "torch": lambda path: torch.save(weights, path / "optimizer.pt"),
        "safetensors": lambda path: save_file(weights, path / "model.safetensors"),
    }
    with tmpfs(disk) as mounted:
        if not mounted:  # the errors that they raise there, word for word

            def torch_error(path: Path) -> None:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

            def safetensors_error(path: Path) -> None:
                raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

            writers = {"torch": torch_error, "safetensors": safetensors_error}
        for name, write in writers.items():
            with (
                pytest.raises(MissingError, match="no space left on the disk"),
                runs.replacing(disk / name) as temporary,
            ):
                temporary.mkdir()
                write(temporary)
        assert names(disk) == set()


def test_a_run_on_a_full_disk_ends_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording the failure fails too; the first error is what the user must see."""
    disk = tmp_path / "disk"
    with tmpfs(disk) as mounted:
        with pytest.raises(MissingError, match="no space left"), Run(disk / "run") as run:
            run.update(status="running")
            if mounted:
                (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 4096))
            else:
                monkeypatch.setattr(Path, "write_text", write_half)
            runs.write_text(run / "recipe.yaml", "y" * 100_000)
        assert json.loads((disk / "run" / "run.json").read_text())["status"] in ("running", "failed")


def test_a_read_only_place(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with read_only(place):
        for attempt in (lambda: Run(place / "run").__enter__(), lambda: runs.write_text(place / "x", "y")):
            with pytest.raises(
                MissingError, match=r"cannot write to '.*place.*': .*Choose another place with -o"
            ) as caught:
                attempt()
            assert caught.value.exit_code == 3


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), runs.storage_errors(Path()):
        1 / 0  # noqa: B018
    with pytest.raises(InputError, match="mine"), runs.storage_errors(Path()):
        raise InputError("mine: No space left")


# --- the run ---


def test_status_is_recorded_however_a_run_ends(tmp_path: Path) -> None:
    cases = {
        "failed": (InputError("the data is wrong"), "the data is wrong"),
        "interrupted": (Interrupted("stopped"), None),
        "ctrl-c": (KeyboardInterrupt(), None),
    }
    for name, (error, text) in cases.items():
        with pytest.raises(type(error)), Run(tmp_path / name) as run:
            run.update(status="running")
            raise error
        info = runs.read_json(tmp_path / name / "run.json")
        assert info["status"] == ("failed" if name == "failed" else "interrupted")
        assert info["error"] == text


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Run(tmp_path) as run:
        run.update(status="running")
        run.update(status="done")
        raise RuntimeError
    assert Run(tmp_path).finished


def test_looking_at_a_run_does_not_change_it(tmp_path: Path) -> None:
    """A refused start must not turn somebody's interrupted run into a failed one."""
    with contextlib.suppress(Interrupted), Run(tmp_path) as run:
        run.update(status="running")
        raise Interrupted("later")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError), Run(tmp_path):
        raise InputError("there is a run here already")
    assert (tmp_path / "run.json").read_bytes() == before


def test_update_merges_one_level_and_is_on_disk_at_once(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.update(status="running", timings={"a": 1}, data={"rows": {"x": 1}})
        run.update(timings={"b": 2}, data={"rows": {"y": 2}}, error=None)
        expected = {"status": "running", "timings": {"a": 1, "b": 2}, "data": {"rows": {"y": 2}}, "error": None}
        assert runs.read_json(tmp_path / "run.json") == expected == Run(tmp_path).info


def test_warnings_are_kept_once_in_order(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for text in ("one", "two", "one"):
            run.warn(text)
    assert Run(tmp_path).info["warnings"] == ["one", "two"]


def test_stage_times_add_up_over_resumptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 100.0, 104.0, 0.0, 1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with Run(tmp_path) as run, contextlib.suppress(RuntimeError), run.stage("train"):
        assert runs.read_json(tmp_path / "run.json")["stage"] == "train"
        raise RuntimeError  # the time before an interruption counts
    with Run(tmp_path) as run:
        run.update(note="saved")
    with Run(tmp_path) as run:
        run.info["timings"] = {"train": 2.5}
        with run.stage("train"):
            pass
        with run.stage("save"):
            pass
        run.update(status="done")
    assert Run(tmp_path).info["timings"] == {"train": 6.5, "save": 1.0}


def test_the_time_of_an_interrupted_stage_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with contextlib.suppress(KeyboardInterrupt), Run(tmp_path) as run:
        run.update(status="running")
        with run.stage("train"):
            raise KeyboardInterrupt
    assert Run(tmp_path).info["timings"] == {"train": 2.5}


def test_half_written_things_are_swept_when_a_run_is_opened(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / f"{PARTIAL}checkpoint").mkdir(parents=True)
    (tmp_path / f"{PARTIAL}99-adapter").mkdir()
    (tmp_path / f"{PARTIAL}99-run.json").write_text("{")
    (tmp_path / "mine.txt").write_text("stays")
    with Run(tmp_path):
        pass
    assert names(tmp_path) == {"checkpoints", "mine.txt", ".lock"}
    assert names(tmp_path / "checkpoints") == set()


def test_the_other_ranks_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Run(tmp_path / "run", writer=False) as run:
        run.update(status="running")
        run.warn("something")
        raise RuntimeError
    assert not (tmp_path / "run").exists()
    assert run.info["warnings"] == ["something"]


HOLD = """
import sys, time
from acclimate.runs import Run
with Run(sys.argv[1]):
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_until_the_first_dies(tmp_path: Path, holder: subprocess.Popen) -> None:
    with pytest.raises(InputError) as caught:
        Run(tmp_path / "run").__enter__()
    assert f"'{tmp_path / 'run'}' is in use by process {holder.pid} on " in str(caught.value)
    assert "-o" in str(caught.value)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Run(tmp_path / "run"):  # the operating system has let go of the lock
        pass


def test_the_lock_is_let_go_at_the_end(tmp_path: Path) -> None:
    for _ in range(2):
        with Run(tmp_path), pytest.raises(InputError, match="is in use by process"):
            Run(tmp_path).__enter__()


def test_the_last_checkpoint_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    assert runs.last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20", f"{PARTIAL}checkpoint-500", "checkpoint-best"):
        (tmp_path / name).mkdir()
    assert runs.last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


# --- facts ---


def test_provenance_names_versions_and_no_places() -> None:
    import platform
    from importlib.metadata import version

    import torch

    facts = runs.provenance()
    assert facts["versions"]["torch"] == version("torch")
    assert facts["versions"]["acclimate"] == version("acclimate")
    assert facts["hardware"]["cores"] == os.cpu_count()
    assert facts["hardware"]["threads"] == torch.get_num_threads()
    text = json.dumps(facts)
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert platform.node() not in text


def test_git_state_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runs.provenance()["git"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert runs.provenance()["git"] == {"commit": head, "dirty": False}
    (tmp_path / "new").write_text("x")
    assert runs.provenance()["git"] == {"commit": head, "dirty": True}


PEAK = """
import numpy as np
from acclimate.runs import peak_memory, reset_peak_memory
def touch(megabytes):
    np.ones(megabytes * 2**17).sum()
touch(300)
reset_peak_memory()
base = peak_memory()
touch(200)
print(peak_memory() - base)
reset_peak_memory()
print(peak_memory() - base)
"""


def test_peak_memory_is_that_since_the_reset() -> None:
    result = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    grown, after_reset = (int(line) / 2**20 for line in result.stdout.split())
    assert 180 < grown < 260
    assert after_reset < 40


def test_numbers_of_numpy_do_not_reach_json_by_accident(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        runs.write_json(tmp_path / "x.json", {"value": np.float32(1.5)})
