"""The run directory: what a run leaves behind, written so that a kill at any moment loses at most the last few steps.

Every file appears whole: it is written under a temporary name, flushed to disk and renamed. A directory (the adapter, a
checkpoint) is filled beside its place and renamed too. One process at a time owns a run through a lock that the operating
system releases when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from acclimate.errors import AcclimateError, InputError, MissingError

PARTIAL = ".partial-"  # prefix of everything half-written; swept away when a run is opened

_UMASK = os.umask(0o022)
os.umask(_UMASK)  # it can only be read by setting it

Status = Literal["running", "done", "failed", "interrupted"]


class Interrupted(AcclimateError):  # noqa: N818 - a request, not a fault
    """The user (or the scheduler) asked the run to stop; its state is kept."""

    exit_code = 130


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step; readers see the old file or the new one, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no file '{path}'") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read '{path}': {error}") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, for a file or a directory; renamed to `path` when the block ends without error."""
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{PARTIAL}{os.getpid()}-{path.name}"
        remove(temporary)
        try:
            yield temporary
            for file in temporary.rglob("*") if temporary.is_dir() else (temporary,):
                if file.is_file():
                    file.chmod(0o666 & ~_UMASK)  # safetensors writes for the owner alone
                    _sync(file)
            if temporary.is_dir():
                remove(path)  # a directory cannot be renamed over a filled one
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException:
            remove(temporary)
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's complaint about a full or read-only place into an error that says what to do.

    Libraries wrap the original error in their own, so its text is looked at too.
    """
    try:
        yield
    except (InputError, MissingError, Interrupted):
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        text = str(error)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "os error 28" in text
        # torch's zip writer reports a short write as an internal assertion, with no word about the disk
        full = full or ("inline_container.cc" in text and ("unexpected pos" in text or "failed writing" in text))
        if full:
            raise MissingError(
                f"no space left on the disk of '{where}' ({_free_bytes(where) / 2**20:,.0f} MB free). What was saved before "
                "is kept. Free some space and give the same command again; tune and compare go on with --resume"
            ) from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise MissingError(
                f"cannot write to '{where}': {os.strerror(number or 0)}. Choose another place with -o"
            ) from error
        raise


def _free_bytes(where: Path) -> int:
    while not where.exists():
        where = where.parent
    return shutil.disk_usage(where).free


def free_directory(stem: str, root: str = "runs") -> Path:
    """The first of runs/stem, runs/stem-2, ... that does not exist."""
    path, number = Path(root) / stem, 2
    while path.exists():
        path, number = Path(root) / f"{stem}-{number}", number + 1
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A JSONL file of ours."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    raise InputError(f"no file '{path}'")


class Run:
    """One run's directory. Use as a context manager: holds the lock, records status, and cleans up half-written files.

    In a multi-process run only the main process writes; the others read (`writer=False`).
    """

    def __init__(self, path: str | Path, *, writer: bool = True) -> None:
        self.path = Path(path)
        self.writer = writer
        self.info: dict[str, Any] = read_json(self.path / "run.json") if (self.path / "run.json").exists() else {}
        self._lock: int | None = None
        self._started = False  # by this process: only then is it ours to say how it ended

    @property
    def finished(self) -> bool:
        return self.info.get("status") == "done"

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __enter__(self) -> Run:
        if self.writer:
            with storage_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = acquire(self.path)
            for leftover in [*self.path.glob(f"{PARTIAL}*"), *(self.path / "checkpoints").glob(f"{PARTIAL}*")]:
                remove(leftover)
            if (self / "run.json").exists():  # it may have changed between construction and the lock
                self.info = read_json(self / "run.json")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.writer and error is not None and self._started and not self.finished:
            stopped = isinstance(error, KeyboardInterrupt | Interrupted)
            with contextlib.suppress(
                AcclimateError, OSError
            ):  # on a full disk the message matters more than the record
                self.update(status="interrupted" if stopped else "failed", error=None if stopped else str(error))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def update(self, **fields: Any) -> None:
        """Record facts in run.json; mappings are merged one level deep."""
        for key, value in fields.items():
            if isinstance(value, Mapping) and isinstance(self.info.get(key), dict):
                self.info[key] = {**self.info[key], **value}
            else:
                self.info[key] = value
        self._started = self._started or fields.get("status") == "running"
        if self.writer:
            write_json(self / "run.json", self.info)

    def warn(self, text: str) -> None:
        if text not in self.info.get("warnings", []):
            self.update(warnings=[*self.info.get("warnings", []), text])

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record that the run is in this stage and how long it took (seconds, added up over resumptions)."""
        self.update(stage=name)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.info.get("timings", {}).get(name, 0.0) + time.perf_counter() - start
            self.info.setdefault("timings", {})[name] = round(spent, 3)


def acquire(path: Path) -> int:
    import fcntl

    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise InputError(
            f"run '{path}' is in use by {owner}. Wait for it, or choose another directory with -o"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    return descriptor


def last_checkpoint(directory: Path) -> Path | None:
    """The checkpoint with the most steps; partial ones do not carry the name."""
    steps = {int(p.name.split("-")[1]): p for p in directory.glob("checkpoint-*") if p.name.split("-")[1].isdigit()}
    return steps[max(steps)] if steps else None


def provenance() -> dict[str, Any]:
    """Versions, hardware and git state, as run.json and evidence files record them. No host name, user or path."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {"python": platform.python_version()}
    for package in ("acclimate", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "git": _git_state(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory, since a recipe usually lives in the user's own repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        if commit.returncode != 0:
            return None
        changes = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5)
        return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout.strip())}
    except (OSError, subprocess.TimeoutExpired):
        return None


def _cpu_name() -> str:
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def reset_peak_memory() -> None:
    """Start a new measurement of peak memory (Linux and CUDA; elsewhere the peak is that of the whole process)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Peak bytes since the last reset: GPU memory where one is used, else this process's resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
