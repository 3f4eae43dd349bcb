"""Merges and soups in a process of their own: one that is killed, and one whose memory is measured."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from acclimate import unfinished
from acclimate.merge import merge_adapters, monosoup_adapter, monosoup_checkpoint, plan
from acclimate.merge.adapter_files import StreamedFile
from acclimate.runs import peak_memory, reset_peak_memory

Job = Callable[..., Any]  # (paths, out, **settings)


def merge(paths: list[str], out: str, **settings: Any) -> None:
    merge_adapters(paths, out, **settings)


def soup(paths: list[str], out: str, **settings: Any) -> None:
    """Of an adapter where there is one path, of base and fine-tuned checkpoint where there are two."""
    (monosoup_adapter if len(paths) == 1 else monosoup_checkpoint)(*paths, out, **settings)


def killed_at(job: Job, write: int, paths: list[str], out: str, log: str, settings: dict[str, Any]) -> None:
    """Do the job in small batches, and die with half of the `write`-th tensor written; otherwise log how many were written."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = Path(log).open("w")  # noqa: SIM115 - lives as long as the process
    plan.BATCH_BYTES, unfinished.JOURNAL_SECONDS = 1, 0.0
    whole, count = StreamedFile.write, 0

    def half(self: StreamedFile, name: str, value: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count == write:
            self.file.seek(self.begin + self.header[name]["data_offsets"][0])
            self.file.write(b"\x7f" * (value.numel() * value.element_size() // 2))
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, name, value)

    StreamedFile.write = half  # type: ignore[method-assign]
    job(paths, out, **settings)
    print(count)
    sys.stdout.flush()


def peak(job: Job, paths: list[str], out: str, log: str) -> None:
    """Write the growth of resident memory over the job, in bytes, to `log`."""
    torch.set_num_threads(1)
    torch.linalg.eigh(torch.eye(64, dtype=torch.float64))  # the linear algebra library is loaded before
    reset_peak_memory()
    before = peak_memory()
    job(paths, out)
    Path(log).write_text(str(peak_memory() - before))
