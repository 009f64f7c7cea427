"""`make test &`: a shell ignores SIGINT for its jobs in the background; the tests' children must not inherit that."""

from __future__ import annotations

import subprocess
import sys

from support.source_tree import ROOT

_SAY = "print(next(line for line in open('/proc/self/status') if line.startswith('SigIgn')).split()[1])"


def test_children_of_tests_in_the_background_start_with_default_dispositions() -> None:
    start = f"subprocess.run([sys.executable, '-c', {_SAY!r}])"
    body = f"import subprocess, sys; from support import dispositions; dispositions.restore(); {start}"
    command = ["sh", "-c", "trap '' INT QUIT HUP; exec \"$@\"", "sh", sys.executable, "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", timeout=60.0, check=True)
    ignored = int(done.stdout, 16)
    assert not ignored & (1 << 1 | 1 << 2 | 1 << 0), "SIGINT is 2, SIGQUIT 3, SIGHUP 1"
