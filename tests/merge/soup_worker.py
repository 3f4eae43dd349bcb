"""Soups in a process of their own: one that is killed, and one whose memory is measured."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from acclimate.merge import monosoup_adapter, monosoup_checkpoint, unfinished
from acclimate.merge.adapter_files import StreamedFile
from acclimate.runs import peak_memory, reset_peak_memory


def killed_at(write: int, paths: list[str], out: str, log: str, settings: dict[str, Any]) -> None:
    """Make a soup, and die with half of the `write`-th tensor written; otherwise log how many were written."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = Path(log).open("w")  # noqa: SIM115 - lives as long as the process
    unfinished.JOURNAL_SECONDS = 0.0
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
    if len(paths) == 1:
        monosoup_adapter(paths[0], out, **settings)
    else:
        monosoup_checkpoint(paths[0], paths[1], out, **settings)
    print(count)
    sys.stdout.flush()


def peak(paths: list[str], out: str, log: str) -> None:
    """Write the growth of resident memory over a soup, in bytes, to `log`."""
    torch.set_num_threads(1)
    torch.linalg.eigh(torch.eye(64, dtype=torch.float64))  # the linear algebra library is loaded before
    reset_peak_memory()
    before = peak_memory()
    monosoup_checkpoint(paths[0], paths[1], out)
    Path(log).write_text(str(peak_memory() - before))
