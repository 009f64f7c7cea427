"""What the kernel says of the memory that a tensor lies in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs transparent huge pages"
)


def said_of(tensor: torch.Tensor, field: str) -> str:
    """A field of /proc/self/smaps, of the mapping that holds a tensor."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith(f"{field}:"):
            return line.removeprefix(f"{field}:")
    raise AssertionError("no such memory")
