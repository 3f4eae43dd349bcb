"""A run that is killed at any moment, any number of times, ends with the weights of one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from acclimate.runs import PARTIAL
from conftest import colour_rows, write_jsonl

RANDOM_KILLS = 20


@pytest.fixture(scope="module")
def spawn() -> Callable[..., BaseProcess]:
    """Start `killable.work` in a real process, with the libraries imported beforehand."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killable"])
    import killable

    def start(*arguments: object) -> BaseProcess:
        process = context.Process(target=killable.work, args=arguments)
        process.start()
        return process

    return start


@pytest.fixture(scope="module")
def settings(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    rows = write_jsonl(tmp_path_factory.mktemp("kill") / "rows.jsonl", colour_rows(120))
    return {
        "model": str(tiny_lm),
        "data": str(rows),
        "task": "choice",
        "adapter_args": {"lora_dropout": 0.1},  # so that the random state matters too
        "train": {"lr": 1e-2, "max_steps": 40, "batch_size": 8, "micro_batch_size": 4, "save_every": 3},
    }


@pytest.fixture(scope="module")
def reference(
    spawn: Callable[..., BaseProcess], settings: dict, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """(run never interrupted, seconds it took)."""
    where = tmp_path_factory.mktemp("reference") / "run"
    start = time.perf_counter()
    process = spawn(str(where), settings, str(where.parent / "log"))
    process.join(120)
    assert process.exitcode == 0, (where.parent / "log").read_text()
    return where, time.perf_counter() - start


def same_result(run: Path, reference: Path) -> None:
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    for name in ("adapter/adapter_model.safetensors", "predictions.jsonl", "predictions_before.jsonl"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name

    def losses(path: Path) -> list:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    assert losses(run) == losses(reference)
    assert not list(run.rglob(f"{PARTIAL}*")), "half-written files were left"
    assert (run / "report.html").read_text().rstrip().endswith("</html>")


def whole(run: Path) -> None:
    """What stands under its final name right after a kill can be read."""
    for file in run.rglob("*.json"):
        if PARTIAL not in str(file.relative_to(run)):
            json.loads(file.read_text())
    from safetensors import safe_open

    for file in run.rglob("*.safetensors"):
        if PARTIAL not in str(file.relative_to(run)):
            with safe_open(file, "pt") as tensors:
                assert list(tensors.keys())


def finish(spawn: Callable[..., BaseProcess], run: Path, settings: dict) -> None:
    log = run.parent / "log"
    process = spawn(str(run), None if (run / "recipe.yaml").exists() else settings, str(log))
    process.join(120)
    assert process.exitcode == 0, log.read_text()


def kill(process: BaseProcess) -> bool:
    """SIGKILL; whether the process was still at work."""
    assert process.pid is not None
    alive = process.is_alive()
    os.kill(process.pid, signal.SIGKILL) if alive else None
    process.join(10)
    return alive and process.exitcode == -signal.SIGKILL


def test_random_kills(
    spawn: Callable[..., BaseProcess], settings: dict, reference: tuple[Path, float], tmp_path: Path
) -> None:
    expected, seconds = reference
    rng = random.Random(0)
    kills = attempt = 0
    while kills < RANDOM_KILLS:
        attempt += 1
        run = tmp_path / f"run-{attempt}"
        for _ in range(4):  # the same run is killed up to four times before it may finish
            process = spawn(str(run), None if (run / "recipe.yaml").exists() else settings, str(tmp_path / "log"))
            time.sleep(rng.uniform(0.05, seconds))
            kills += kill(process)
            if run.exists():
                whole(run)
        finish(spawn, run, settings)
        same_result(run, expected)


@pytest.mark.parametrize(
    ("moment", "seen"),
    [
        ("checkpoint", lambda run: any((run / "checkpoints").glob(f"{PARTIAL}*/*"))),
        ("adapter", lambda run: any(run.glob(f"{PARTIAL}*adapter"))),
        ("report", lambda run: (run / "evaluation.json").exists()),
    ],
)
def test_kill_in_the_middle_of(
    moment: str,
    seen: Callable[[Path], bool],
    spawn: Callable[..., BaseProcess],
    settings: dict,
    reference: tuple[Path, float],
    tmp_path: Path,
) -> None:
    """Killed as soon as the file that is being written is seen under its temporary name."""
    for attempt in range(10):  # the window is a few milliseconds: it may close between looking and killing
        run = tmp_path / f"{moment}-{attempt}"
        process = spawn(str(run), settings, str(tmp_path / "log"))
        while process.is_alive() and not seen(run):
            pass
        hit = kill(process) and (seen(run) if moment != "report" else not (run / "report.html").exists())
        whole(run)
        finish(spawn, run, settings)
        same_result(run, reference[0])
        if hit:
            return
    pytest.fail(f"never caught the run while it wrote the {moment}")


def test_second_process_is_refused(spawn: Callable[..., BaseProcess], settings: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = spawn(str(run), settings, str(tmp_path / "first"))
    while not (run / "metrics.jsonl").exists() and first.is_alive():
        time.sleep(0.01)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)  # it holds the run, however long the second one takes to start
    second = spawn(str(run), None, str(tmp_path / "second"))
    second.join(60)
    assert kill(first)
    assert second.exitcode == 1  # the worker has no command line around it: the error is its traceback
    assert f"is in use by process {first.pid}" in (tmp_path / "second").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_keeps_the_last_step(
    number: int, spawn: Callable[..., BaseProcess], settings: dict, reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = spawn(str(run), settings, str(tmp_path / "log"))
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 5:
        assert process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    info = json.loads((run / "run.json").read_text())
    assert info["status"] == "interrupted"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (run / "checkpoints" / f"checkpoint-{steps[-1]}").is_dir(), "no step is lost"
    assert "--resume" in (tmp_path / "log").read_text()
    finish(spawn, run, settings)
    same_result(run, reference[0])
