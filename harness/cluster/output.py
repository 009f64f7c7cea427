"""The output of the processes of a cluster: printed as it grows, and the last stack in it."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.ft.console.output import LineSplitter, tail, visible


def last_stack(output: Path) -> str:
    """The last stack that faulthandler wrote to `output`; without one, the end of the output."""
    text = tail(output, 16000)
    _, found, stack = text.rpartition("(most recent call first):\n")
    return stack.partition("\n\nExtension modules")[0].strip() if found else text


class Echo:
    """Follows files and prints their new lines to `sys.stdout`, if `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._files: dict[Path, _FollowedFile] = {}

    def follow(self, name: str, path: Path) -> None:
        """Print lines written to `path` from now on, as `[name] line`."""
        if path not in self._files:
            self._files[path] = _FollowedFile(name, path.stat().st_size if path.exists() else 0)

    def skip(self, path: Path) -> None:
        """Do not print what `path` holds now."""
        if path in self._files:
            self._files[path] = _FollowedFile(self._files[path].name, path.stat().st_size)

    def pump(self) -> None:
        """Print the new complete lines of all files."""
        if not self._enabled:
            return
        for path, followed in self._files.items():
            if not path.exists() or path.stat().st_size <= followed.at:
                continue
            with path.open("rb") as file:
                file.seek(followed.at)
                data = file.read()
            followed.at += len(data)
            for line in followed.lines.feed(data):
                _print(f"[{followed.name}] {visible(line)}")


class _FollowedFile:
    """A followed file: its display name, the bytes read so far, and the incomplete last line."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.at, self.lines = name, at, LineSplitter()


def _print(line: str) -> None:
    """Print to the current `sys.stdout`, with characters replaced that it cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), file=sys.stdout)
