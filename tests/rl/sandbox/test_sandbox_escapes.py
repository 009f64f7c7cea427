"""Each attempt to leave the sandbox ends where it should, and the host is as before.

Code that got what it wanted says ESCAPED. `{canary}` stands for a process of the host, `{secret}` for a file.
"""

from __future__ import annotations

import errno
import platform
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.environments.sandbox import Limits, Sandbox
from holdfast.rl.environments.sandbox.inside import seccomp
from holdfast.rl.environments.sandbox.inside.seccomp import program
from holdfast.rl.environments.sandbox.limits import MEBIBYTE

LIMITS = Limits(
    cpu_seconds=1.0,
    wall_seconds=20.0,
    memory_bytes=64 * MEBIBYTE,
    output_bytes=20_000,
    disk_bytes=MEBIBYTE,
    processes=6,
)
SHORT = Limits(cpu_seconds=1.0, wall_seconds=1.0)
LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
IGNORE_SIGNALS = "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Code, the reasons for which it may end, and what it must leave on stdout or stderr."""

    name: str
    code: str
    reasons: str
    seen: str = ""
    limits: Limits = LIMITS


PROCESSES = (
    Attempt("fork_bomb", "import os\nwhile True: os.fork()", "error timeout", "BlockingIOError"),
    Attempt(
        "thread_bomb",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "error",
        "can't start new thread",
    ),
    Attempt(
        "daemon",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\n    os._exit(0)",
        "ok",
    ),
    Attempt(
        "daemon_that_ignores_signals", IGNORE_SIGNALS + "import os, time\nif os.fork() == 0: time.sleep(999)", "ok"
    ),
    Attempt("execute_a_shell", "import os; os.execv('/bin/sh', ['sh'])", "error", "PermissionError"),
    Attempt("execute_python", "import subprocess; subprocess.run(['/bin/python'])", "error", "PermissionError"),
    Attempt("dump_core", "import os; os.abort()", "killed"),
    Attempt("ptrace_the_first_process", LIBC + "libc.ptrace(16, 1, 0, 0)", "refused"),
    Attempt("kill_a_process_of_the_host", "import os; os.kill({canary}, 9)", "error", "ProcessLookupError"),
    Attempt("kill_every_process", "import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()", "ok killed"),
    Attempt("kill_the_first_process", "import os; os.kill(1, 9); os.kill(1, 19); print('ignored')", "ok", "ignored"),
    Attempt(
        "limit_the_first_process",
        "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (0, 0))",
        "error",
        "PermissionError",
    ),
    Attempt("open_the_first_process", "import os; os.pidfd_open(1)", "error", "PermissionError"),
)

FILES = (
    Attempt("read_proc", "print(open('/proc/1/environ').read(), 'ESCAPED')", "error", "FileNotFoundError"),
    Attempt("read_sys", "import os; print(os.listdir('/sys'), 'ESCAPED')", "error", "FileNotFoundError"),
    Attempt("read_the_password_file", "print(open('/etc/passwd').read(), 'ESCAPED')", "error", "FileNotFoundError"),
    Attempt("read_a_file_of_the_host", "print(open('{secret}').read(), 'ESCAPED')", "error", "FileNotFoundError"),
    Attempt("write_a_file_of_the_host", "open('{secret}', 'w').write('gone')", "error", "FileNotFoundError"),
    Attempt(
        "symbolic_link",
        "import os; os.symlink('{secret}', '/tmp/a'); print(open('/tmp/a').read(), 'ESCAPED')",
        "error",
        "FileNotFoundError",
    ),
    Attempt("dots", "print(open('../' * 50 + '{secret}').read(), 'ESCAPED')", "error", "FileNotFoundError"),
    Attempt("chroot", "import os; os.mkdir('/tmp/a'); os.chroot('/tmp/a')", "refused"),
    Attempt("hard_link", "import os; os.link(os.__file__, '/tmp/a')", "error", "OSError"),
    Attempt("change_the_library", "import os; open(os.__file__, 'a').write('#')", "error", "Errno"),
    Attempt("create_in_the_root", "open('/a', 'w')", "error", "Errno"),
    Attempt("make_a_device", "import os; os.mknod('/tmp/a', 0o60600, os.makedev(8, 0))", "error", "PermissionError"),
    Attempt("mount_proc", LIBC + "libc.mount(b'proc', b'/tmp', b'proc', 0, None)", "refused"),
)

NETWORK = (
    Attempt("listen", "import socket; socket.create_server(('0.0.0.0', 0))", "error", "PermissionError"),
    Attempt("connect", "import socket; socket.create_connection(('127.0.0.1', 22))", "error", "PermissionError"),
    Attempt("unix_socket", "import socket; socket.socket(socket.AF_UNIX)", "error", "PermissionError"),
    Attempt("netlink", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "error", "PermissionError"),
    Attempt("resolve_a_name", "import socket; socket.getaddrinfo('a.example', 80)", "error", "gaierror"),
)

RESOURCES = (
    Attempt(
        "fill_the_disk",
        "for i in range(99):\n    with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(99999))",
        "error",
        "No space left",
    ),
    Attempt("one_large_file", "open('/tmp/a', 'wb').write(bytes(1 << 23))", "error", "Errno"),
    Attempt("sparse_file", "open('/tmp/a', 'wb').truncate(1 << 40)", "error", "Errno"),
    Attempt("many_files", "for i in range(99999): open(f'/tmp/{i}', 'w').close()", "error", "No space left"),
    Attempt("memory_bit_by_bit", "x = []\nwhile True: x.append(bytes(99999))", "memory"),
    Attempt(
        "memory_in_many_processes",
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = b'1' * (40 << 20)\ntime.sleep(99)",
        "memory",
    ),
    Attempt("memory_in_a_file", "import os; print(os.memfd_create('a'), 'ESCAPED')", "error", "PermissionError"),
    Attempt("shared_memory", LIBC + "print('ESCAPED' if libc.shmget(0, 4096, 0o1600) >= 0 else 'none')", "ok", "none"),
    Attempt("flood_stdout", "while True: print('x' * 9999)", "output"),
    Attempt("flood_stderr", "import os\nwhile True: os.write(2, b'x' * 9999)", "output"),
    Attempt("flood_the_value", "import os\nwhile True: os.write(3, b'x' * 9999)", "output"),
    Attempt("spin_in_native_code", "import re; re.match(r'(a+)+$', 'a' * 99 + 'b')", "timeout"),
    Attempt("spin_without_signals", IGNORE_SIGNALS + "while True: pass", "timeout"),
    Attempt("sleep", "import time; time.sleep(99)", "timeout", limits=SHORT),
    Attempt("wait_for_a_pipe", "import os; r, w = os.pipe(); os.read(r, 1)", "timeout", limits=SHORT),
    Attempt("stop", "import os; os.kill(os.getpid(), 19)", "timeout", limits=SHORT),
    Attempt("raise_a_limit", "import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))", "error", "ValueError"),
    Attempt(
        "exhaust_the_stack",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "error memory killed timeout",
    ),
)

RIGHTS = (
    Attempt("become_root", "import os; os.setuid(0); print('ESCAPED')", "error", "PermissionError"),
    Attempt("new_user_namespace", LIBC + "libc.unshare(0x10000000)", "refused"),
    Attempt(
        "new_user_namespace_by_clone",
        LIBC + f"libc.syscall({seccomp.number('clone')}, 0x10000011, 0, 0, 0, 0)",
        "refused",
    ),
    Attempt(
        "new_user_namespace_by_clone3",
        LIBC + "print('ESCAPED' if libc.syscall(435, bytes(88), 88) >= 0 else ctypes.get_errno())",
        "ok",
        "38",
    ),
    Attempt("filter_of_its_own", LIBC + "print('ESCAPED' if libc.prctl(22, 2, None) == 0 else 'none')", "ok", "none"),
    Attempt("type_into_the_terminal", "import fcntl; fcntl.ioctl(0, 0x5412, b'x')", "error", "OSError"),
    Attempt("crash_the_interpreter", "import ctypes; ctypes.string_at(0)", "killed"),
    Attempt(
        "forge_the_report",
        "import os\nfor fd in range(4, 200):\n    try: print('ESCAPED', os.write(fd, b'started'))\n"
        "    except OSError: pass\nos._exit(7)",
        "error",
    ),
)

ATTEMPTS = PROCESSES + FILES + NETWORK + RESOURCES + RIGHTS


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if number % 8 else ())
        for number, name in enumerate(sorted(seccomp.fatal(platform.machine())))
    ],
)
def test_a_call_that_only_an_attack_makes_is_fatal(name: str, sandbox: Sandbox) -> None:
    """One in eight in the first tier: `test_lists_are_followed_and_other_calls_refused` has all verdicts."""
    number = seccomp.fatal(platform.machine())[name]
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


ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED = 0x00050000 | errno.EPERM
MACHINES = list(seccomp.AUDIT)


def verdict(machine: str, number: int, arguments: Sequence[int] = (), architecture: int | None = None) -> int:
    """What the kernel would do with a call."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("IIQ6Q", number, architecture or seccomp.AUDIT[machine], 0, *given)
    code = list(struct.iter_unpack("HBBI", program(machine)))
    at, accumulator = 0, 0
    while True:
        operation, true, false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("I", data, value)
            case 0x15:
                at += true if accumulator == value else false
            case 0x35:
                at += true if accumulator >= value else false
            case 0x45:
                at += true if accumulator & value else false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_lists_are_followed_and_other_calls_refused(machine: str) -> None:
    tables = [seccomp.allowed(machine), seccomp.fatal(machine), seccomp.conditional(machine)]
    wanted = {number: found for table, found in zip(tables, (ALLOW, KILL), strict=False) for number in table.values()}
    known = wanted.keys() | tables[2].values()
    assert sum(map(len, tables)) == len(known), "a number stands twice"
    wanted |= {number: REFUSED for number in range(600) if number not in known}
    assert {number: verdict(machine, number) for number in wanted} == wanted


@pytest.mark.parametrize("machine", MACHINES)
@given(
    number=st.integers(0, 2**32 - 1),
    other=st.integers(1, 2**32 - 1),
    arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6),
)
def test_every_call_has_a_verdict_and_those_of_another_architecture_are_fatal(
    machine: str, number: int, other: int, arguments: list[int]
) -> None:
    verdicts = (ALLOW, KILL, REFUSED, 0x50000 | errno.ENOSYS, 0x50000 | errno.ENOTTY)
    assert verdict(machine, number, arguments) in verdicts
    if other != seccomp.AUDIT[machine]:
        assert verdict(machine, number % 600, architecture=other) == KILL
    assert verdict(machine, number % 600 | 0x40000000) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "passes"),
    [
        ("clone", [17], True),  # a fork
        ("clone", [0x3D0F00], True),  # a thread
        ("clone", [17 | 0x10000000], False),  # a user namespace
        ("clone", [17 | 0x00020000], False),
        ("prlimit64", [0, 7], True),
        ("prlimit64", [1, 7], False),
        ("socketpair", [1], True),
        ("socketpair", [2], False),
        ("ioctl", [0, 0x5401], True),
        ("ioctl", [0, 0x5412], False),
        ("prctl", [15], True),
        ("prctl", [22], False),
        ("clone3", [], False),
        ("seccomp", [1], False),
        ("capset", [], False),
    ],
)
def test_arguments_decide(machine: str, name: str, arguments: list[int], passes: bool) -> None:
    number = seccomp.conditional(machine)[name]
    assert (verdict(machine, number, arguments) == ALLOW) == passes


def test_the_numbers_are_those_of_this_machine() -> None:
    """`os.getpid` by its number."""
    import ctypes
    import os

    number = seccomp.allowed(platform.machine())["getpid"]
    assert ctypes.CDLL(None).syscall(number) == os.getpid()
