"""Each attempt to leave the sandbox ends where it should, and the host is as before."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rl.environments.sandbox import Sandbox
from holdfast.rl.environments.sandbox.inside import syscalls
from support.rl.sandbox_attempts import ATTEMPTS, LIBC, Attempt


@pytest.fixture(scope="module")
def canary() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def living_runs(sandbox: Sandbox) -> list[str]:
    """The processes below the template."""
    return Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_an_attempt_ends_and_the_host_is_untouched(
    attempt: Attempt, sandbox: Sandbox, canary: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("unharmed")
    code = attempt.code.replace("{canary}", str(canary.pid)).replace("{secret}", str(secret))

    result = sandbox.run(code, limits=attempt.limits)

    assert result.reason in attempt.reasons.split(), result
    assert attempt.seen in result.stdout + result.stderr, result
    assert "ESCAPED" not in result.stdout
    assert len(result.stdout) + len(result.stderr) <= attempt.limits.output_bytes
    assert canary.poll() is None
    assert secret.read_text() == "unharmed"
    assert list(tmp_path.iterdir()) == [secret]
    assert living_runs(sandbox) == []


@pytest.mark.parametrize("name", sorted(syscalls.fatal(platform.machine())))
def test_a_call_that_only_an_attack_makes_is_fatal(name: str, sandbox: Sandbox) -> None:
    number = syscalls.fatal(platform.machine())[name]
    assert sandbox.run(LIBC + f"libc.syscall({number}, 0, 0, 0, 0, 0, 0)").reason == "refused"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a table of x86_64")
def test_the_second_table_of_system_calls_is_closed(sandbox: Sandbox) -> None:
    assert sandbox.run(LIBC + "libc.syscall(0x40000000 + 39)").reason == "refused"


def test_a_run_sees_the_library_three_devices_and_nothing_of_the_host(sandbox: Sandbox) -> None:
    code = """
import os, sys, socket
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
print("descriptors", *(fd for fd in range(999) if is_open(fd)))
print("environment", *sorted(os.environ))
print("host", socket.gethostname())
print("user", os.getuid(), os.getgid())
for folder, folders, files in os.walk("/"):
    if files and not folder.startswith(tuple(sys.path)):
        print("files", folder, *sorted(files))
"""
    assert sandbox.run(code).stdout.splitlines() == [
        "descriptors 0 1 2 3",
        "environment HOME LANG PATH TMPDIR",
        "host sandbox",
        "user 1000 1000",
        "files /dev null urandom zero",
    ]


def test_runs_share_no_files_and_no_state(sandbox: Sandbox) -> None:
    first = "import builtins, math; builtins.len = math.sqrt = None; open('/tmp/note', 'w').write('answers')"
    assert sandbox.run(first).reason == "ok"
    second = sandbox.run("import math, os; print(len('ab'), math.sqrt(4), os.listdir('/tmp'))")
    assert second.stdout == "2 2.0 []\n"
