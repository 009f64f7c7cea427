"""What processes write to their output files: its end, the stacks in it, and an echo of it as it comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def tail(output: Path, limit: int = 4000) -> str:
    """The end of a process's output, `limit` bytes at most; empty if there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def last_stack(output: Path) -> str:
    """The last stack that a fault handler wrote there; without one, the end of the output."""
    text = tail(output, 16000)
    _, found, stack = text.rpartition("(most recent call first):\n")
    return stack.partition("\n\nExtension modules")[0].strip() if found else text


class Echo:
    """Follows files and prints what is new in them to `sys.stdout`, if `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._files: dict[Path, tuple[str, int]] = {}

    def follow(self, name: str, path: Path) -> None:
        """Show what is written to `path` from now on, as `[name] line`."""
        at = path.stat().st_size if path.exists() else 0
        self._files.setdefault(path, (name, at))

    def skip(self, path: Path) -> None:
        """Leave out what `path` holds by now."""
        if path in self._files:
            self._files[path] = (self._files[path][0], path.stat().st_size)

    def pump(self) -> None:
        """Print the lines that are new and complete."""
        if not self._enabled:
            return
        for path, (name, at) in self._files.items():
            if not path.exists() or path.stat().st_size <= at:
                continue
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self._files[path] = (name, at + len(whole) + 1)
                for line in whole.decode(errors="replace").splitlines():
                    print(f"[{name}] {line}", file=sys.stdout)
