"""Codes of 2, 3, 4 or 8 bits in 32-bit words, one bit after the other from the lowest on, as GPTQ and compressed-tensors files have them.

Codes of one column of the packed matrix follow each other; 3-bit codes may lie across two words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def words(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """(n, m) uint8 codes -> (words(n), m) int32, packed along the first dimension; the last word is filled up with zeros."""
    n, m = codes.shape
    padded = torch.zeros(-(-n // 32) * 32, m, dtype=torch.int64)
    padded[:n] = codes.cpu()
    shifts = torch.arange(bits)
    stream = ((padded[:, None] >> shifts[:, None]) & 1).reshape(-1, 32, m)  # bits in order, 32 to a word
    packed = (stream << torch.arange(32)[:, None]).sum(1)[: words(n, bits)]
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """(words(count), m) int32 -> (count, m) uint8."""
    m = packed.shape[1]
    packed = nn.functional.pad(packed, (0, 0, 0, -len(packed) % bits))  # whole runs of 32 codes
    stream = (packed[:, None] >> torch.arange(32, device=packed.device, dtype=torch.int32)[:, None]) & 1
    shifts = torch.arange(bits, device=packed.device, dtype=torch.int32)
    codes = (stream.reshape(-1, bits, m) << shifts[:, None]).sum(1)
    return codes[:count].to(torch.uint8)
