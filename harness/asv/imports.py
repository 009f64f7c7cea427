"""What it costs to import holdfast: time beyond that of torch, and modules."""

from __future__ import annotations

import sys

from holdfast.harness.asv.common import profile


class Imports:
    """What the import adds in a fresh process that has torch imported."""

    timeout = 180

    def track_milliseconds(self) -> float:
        from holdfast.harness.bench.overhead.imports import measure

        return measure(profile(5, 15)).extra

    def track_modules(self) -> int:
        import subprocess

        program = (
            "import sys, torch; before = set(sys.modules); import holdfast.comms; print(len(set(sys.modules) - before))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout)

    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]
    track_modules.unit = "modules"  # type: ignore[attr-defined]


class Process:
    """Peak memory of a process that has imported holdfast, and the time of a plain command."""

    timeout = 120

    def peakmem_import(self) -> None:
        import holdfast.comms  # noqa: F401

    def timeraw_command_line(self) -> str:
        return "import holdfast.harness.cli.app"

    timeraw_command_line.repeat = (3, 5, 10.0)  # type: ignore[attr-defined]
