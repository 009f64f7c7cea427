"""Two groups of torchft, one of which is killed and started again; each is a command, and prints a line of JSON."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

from torchft.coordination import LighthouseServer

SECONDS = 280.0
Start = Callable[..., subprocess.Popen[str]]


@contextlib.contextmanager
def groups(least: int, heartbeat_timeout_ms: int = 1000) -> Iterator[Start]:
    """Starts a group by its words; a step takes `least` groups or more."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=least, heartbeat_timeout_ms=heartbeat_timeout_ms)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    with contextlib.ExitStack() as stack:
        stack.callback(lighthouse.shutdown)

        def start(*words: object) -> subprocess.Popen[str]:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            group = subprocess.Popen([str(word) for word in words], env=environ, **pipes)
            stack.callback(group.terminate)  # torchrun ends its ranks
            return group

        yield start


def result(group: subprocess.Popen[str]) -> dict[str, Any]:
    """What a group reports at its end."""
    out, errors = group.communicate(timeout=SECONDS)
    if group.returncode:
        raise SystemExit(f"{group.args} ended with {group.returncode}:\n{errors[-4000:]}")
    return json.loads(out.strip().splitlines()[-1])


def killed_and_back(
    survivor: Any, killed: Any, replacement: Any, **options: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the survivor reports, and what the replacement of the other group, which kills itself."""
    with groups(1, **options) as start:
        first, second = start(*survivor), start(*killed)
        _, errors = second.communicate(timeout=SECONDS)
        if second.returncode != -signal.SIGKILL and "Signal 9 (SIGKILL)" not in errors:  # torchrun says it of its ranks
            raise SystemExit(f"the second group ended before it was killed:\n{errors[-4000:]}")
        third = start(*replacement)
        return result(first), result(third)
