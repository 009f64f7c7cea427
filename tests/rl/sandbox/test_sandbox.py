"""The sandbox: attempts to leave it, limits, and lifetimes. The host is as before, and each run costs itself alone.

Code that got what it wanted says ESCAPED. `{canary}` stands for a process of the host, `{secret}` for a file.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.ft.launch.guardian import descendants
from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxError, SandboxResult
from holdfast.rl.environments.sandbox.inside import seccomp
from holdfast.rl.environments.sandbox.inside.seccomp import program
from holdfast.rl.environments.sandbox.limits import MEBIBYTE
from holdfast.rl.environments.sandbox.sandbox import unavailable
from support.children import Start
from support.programs import seccomp_deny
from support.programs.forked_programs import run_forked
from support.source_tree import ROOT
from support.waiting import eventually

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


ATTEMPTS = (
    # processes
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
    # files
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
    # network
    Attempt("listen", "import socket; socket.create_server(('0.0.0.0', 0))", "error", "PermissionError"),
    Attempt("connect", "import socket; socket.create_connection(('127.0.0.1', 22))", "error", "PermissionError"),
    Attempt("unix_socket", "import socket; socket.socket(socket.AF_UNIX)", "error", "PermissionError"),
    Attempt("netlink", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "error", "PermissionError"),
    Attempt("resolve_a_name", "import socket; socket.getaddrinfo('a.example', 80)", "error", "gaierror"),
    # resources
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
    # rights
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


@pytest.fixture(scope="module")
def canary() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


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
    assert descendants(sandbox.pid or 0) == []


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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a table of x86_64")
def test_the_second_table_of_system_calls_is_closed(sandbox: Sandbox) -> None:
    assert sandbox.run(LIBC + "libc.syscall(0x40000000 + 39)").reason == "refused"


REFUSED, NO_CALL = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
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
    verdicts = (ALLOW, KILL, REFUSED, NO_CALL, 0x50000 | errno.ENOTTY)
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
        ("seccomp", [1], False),
        ("capset", [], False),
    ],
)
def test_arguments_decide(machine: str, name: str, arguments: list[int], passes: bool) -> None:
    number = seccomp.conditional(machine)[name]
    assert (verdict(machine, number, arguments) == ALLOW) == passes
    assert verdict(machine, seccomp.conditional(machine)["clone3"]) == NO_CALL, "so that libc takes clone instead"


few = settings(max_examples=12)


@few
@given(limit=st.integers(16, 128), amount=st.integers(1, 256))
def test_memory_is_given_up_to_the_limit(sandbox: Sandbox, limit: int, amount: int) -> None:
    limits = Limits(memory_bytes=limit * MEBIBYTE)
    result = sandbox.run(f"x = b'1' * ({amount} << 20); print(len(x) >> 20)", limits=limits)
    if amount < limit - 8:
        assert (result.reason, result.stdout) == ("ok", f"{amount}\n")
    elif amount > limit:
        assert result.reason == "memory"


@few
@given(limit=st.integers(1, 300_000), out=st.integers(0, 200_000), err=st.integers(0, 200_000))
@example(limit=1000, out=500, err=500)
@example(limit=1000, out=500, err=501)
def test_no_byte_more_than_the_limit_comes_out(sandbox: Sandbox, limit: int, out: int, err: int) -> None:
    code = f"import sys; sys.stdout.write('o' * {out}); sys.stderr.write('e' * {err})"
    result = sandbox.run(code, limits=Limits(output_bytes=limit))
    if out + err <= limit:
        assert (result.reason, result.stdout, result.stderr) == ("ok", "o" * out, "e" * err)
    else:
        assert result.reason == "output"
        assert len(result.stdout) + len(result.stderr) <= limit


@few
@given(limit=st.integers(64, 2048), amount=st.integers(1, 4096))
@example(limit=65, amount=1)
def test_the_disk_holds_as_much_as_the_limit(sandbox: Sandbox, limit: int, amount: int) -> None:
    code = f"for i in range(16): open(f'/tmp/{{i}}', 'wb').write(bytes({amount} * 64)); print('written')"
    result = sandbox.run(code, limits=Limits(disk_bytes=limit * 1024))
    if amount + 16 * 4 <= limit:
        assert result.reason == "ok"
    elif amount > limit:
        assert result.reason == "error"
        assert "No space left" in result.stderr or "too large" in result.stderr


@few
@given(limit=st.integers(1, 12), wanted=st.integers(0, 16))
def test_as_many_processes_as_the_limit(sandbox: Sandbox, limit: int, wanted: int) -> None:
    code = f"""
import os, time
started = 1
for _ in range({wanted}):
    try:
        if os.fork() == 0: time.sleep(999)
        started += 1
    except BlockingIOError: break
print(started)
"""
    assert int(sandbox.run(code, limits=Limits(processes=limit)).stdout) == min(limit, wanted + 1)


@few
@given(limit=st.integers(8, 200))
def test_as_many_open_files_as_the_limit(sandbox: Sandbox, limit: int) -> None:
    code = "import os\ntry:\n    while True: last = os.open('/dev/null', 0)\nexcept OSError: print(last + 1)"
    assert int(sandbox.run(code, limits=Limits(open_files=limit)).stdout) == limit


@settings(max_examples=4)
@given(seconds=st.floats(0.1, 0.4), processes=st.integers(1, 3))
def test_processor_time_of_all_processes_together(sandbox: Sandbox, seconds: float, processes: int) -> None:
    code = f"import os\nfor _ in range({processes} - 1): os.fork() or exec('while True: pass')\nwhile True: pass"
    result = sandbox.run(code, limits=Limits(cpu_seconds=seconds, wall_seconds=60.0))
    assert result.reason == "timeout"
    assert seconds <= result.cpu_seconds + 0.02 < seconds + 5.0


def test_children_whose_ends_are_ignored_count(sandbox: Sandbox) -> None:
    """The kernel keeps no time of these."""
    child = "\n    if os.fork() == 0:\n        while time.process_time() < 0.4: pass\n        os._exit(0)"
    wait = "\n    try: os.wait()\n    except ChildProcessError: pass"
    code = f"import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(9):{child}{wait}"
    result = sandbox.run(code, limits=Limits(cpu_seconds=1.0, wall_seconds=60.0))
    assert result.reason == "timeout" and result.cpu_seconds > 1.0


@few
@given(text=st.text(max_size=300))
def test_every_text_goes_in_and_comes_out(sandbox: Sandbox, text: str) -> None:
    text = text.replace("\r", "\n")  # as every text file is read
    code = f"import sys; assert sys.stdin.read() == {text!r}; print({text!r})"
    result = sandbox.run(code, stdin=text)
    assert (result.reason, result.stdout) == ("ok", text + "\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit", 0), ("import sys; sys.exit(7)", 7), ("exit()", 1), ("1 +", 1), ("1 / 0", 1)],
)
def test_a_program_ends_with_its_exit_status(sandbox: Sandbox, code: str, status: int) -> None:
    result = sandbox.run(code)
    assert (result.status, result.reason) == (status, "error" if status else "ok")


def test_an_exception_is_shown_with_its_line(sandbox: Sandbox) -> None:
    stderr = sandbox.run("def f(x):\n    return 1 / x\nf(0)\n").stderr
    assert stderr.splitlines()[:5] == [
        "Traceback (most recent call last):",
        '  File "<solution>", line 3, in <module>',
        "    f(0)",
        '  File "<solution>", line 2, in f',
        "    return 1 / x",
    ]
    assert stderr.endswith("ZeroDivisionError: division by zero\n")


def test_threads_tasks_and_exit_functions_end_as_in_an_interpreter(sandbox: Sandbox) -> None:
    code = """
import asyncio, atexit, threading, time
atexit.register(print, "third")
print(asyncio.run(asyncio.sleep(0.01, "first")))
threading.Thread(target=lambda: (time.sleep(0.05), print("second"))).start()
"""
    assert sandbox.run(code).stdout.split() == ["first", "second", "third"]


def test_the_same_program_gives_the_same_in_every_sandbox(sandbox: Sandbox) -> None:
    code = "print(hash('text'), list({'a', 'b', 'c', 'd'}))"
    with Sandbox() as other:
        assert other.run(code).stdout == sandbox.run(code).stdout


@pytest.mark.parametrize(
    "limits",
    [{"cpu_seconds": 0.0}, {"wall_seconds": float("nan")}, {"memory_bytes": 5}, {"open_files": 2}, {"processes": 0}],
)
def test_a_limit_that_cannot_be_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=f"the limit {next(iter(limits))}=.*give at least"):
        Limits(**limits)


def test_descriptors_stay_as_they_are(sandbox: Sandbox) -> None:
    sandbox.run("pass")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for code in ("pass", "1 / 0", "while True: print('x' * 9999)"):
        sandbox.run(code)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


PATIENT = Limits(cpu_seconds=20.0, wall_seconds=60.0)
SLEEP = "import os, time\nos.fork()\ntime.sleep(999)"


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def own(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox for one test, which may break it."""
    with Sandbox() as started:
        yield started


@contextmanager
def sleeping(box: Sandbox, limits: Limits = PATIENT) -> Iterator[tuple[Future[SandboxResult], list[int]]]:
    """A run of two processes that sleep, and the processes below the sandbox's own."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(box.run, SLEEP, "", limits)
        eventually(lambda: len(descendants(box.pid or 0)) == 3)
        yield run, descendants(box.pid or 0)


def test_eight_runs_at_once_do_not_mix(sandbox: Sandbox) -> None:
    code = "import os, time\nname = input()\nopen('mine', 'w').write(name)\ntime.sleep(0.1)\nprint(open('mine').read())"
    names = [f"run {number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda name: sandbox.run(code, name + "\n", PATIENT), names))
    assert [result.stdout.strip() for result in results] == names


def test_fork_bombs_leave_room_for_an_honest_run(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    with ThreadPoolExecutor(5) as pool:
        bombs = [pool.submit(sandbox.run, bomb, "", Limits(cpu_seconds=0.5, wall_seconds=30.0)) for _ in range(4)]
        honest = pool.submit(sandbox.run, "print('here')", "", PATIENT)
        assert honest.result().stdout == "here\n"
        assert {bomb.result().reason for bomb in bombs} == {"timeout"}


def test_a_run_that_is_stopped_from_outside_ends_by_the_wall_limit(own: Sandbox) -> None:
    with sleeping(own, Limits(wall_seconds=2.0)) as (run, below):
        for pid in below:
            os.kill(pid, signal.SIGSTOP)
        assert run.result(60.0).reason == "timeout"
    eventually(lambda: descendants(own.pid or 0) == [])


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_whose_process_is_killed_costs_itself_alone(own: Sandbox, which: int) -> None:
    """The first process of the run, or the one that executes the code."""
    with sleeping(own) as (run, below):
        os.kill(below[which], signal.SIGKILL)
        assert run.result(60.0).reason == ("lost", "killed")[which]
    assert own.run("print(1)").stdout == "1\n"


def test_a_template_that_is_killed_costs_its_runs_and_is_replaced(own: Sandbox) -> None:
    with sleeping(own) as (run, below):
        os.kill(own.pid or 0, signal.SIGKILL)
        assert run.result(60.0).reason == "lost"
    eventually(lambda: living(below) == [])
    assert "lost" in {own.run("print(1)").reason, own.run("print(1)").reason}
    assert own.run("print(1)").stdout == "1\n"


SLOW = "import time\ndef f(x):\n    time.sleep(1.0)\n    return x"
coder: Any = sys.modules[load_code(f"{ROOT / 'examples' / 'rl' / 'coder.py'}:run_tests").__module__]


def test_a_right_solution_passes_although_its_judge_is_killed_but_not_again_and_again(own: Sandbox) -> None:
    tests = [coder.CallTest("f", (1,), 1)]
    with ThreadPoolExecutor(1) as pool:
        judged = pool.submit(coder.run_tests, SLOW, tests, PATIENT, sandbox=own)
        eventually(lambda: len(descendants(own.pid or 0)) == 2)
        os.kill(own.pid or 0, signal.SIGKILL)
        assert judged.result(60.0).fraction == 1.0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(coder.SandboxLost, match="no score"):
        patch.setattr(own, "run", lambda *_: SandboxResult(reason="lost"))
        coder.run_tests(SLOW, tests, sandbox=own)


def test_closing_ends_what_still_runs() -> None:
    sandbox = Sandbox()
    with sleeping(sandbox) as (run, below):
        sandbox.close()
        assert run.result(60.0).reason == "lost"
    eventually(lambda: living(below) == [])
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("pass")


def test_a_killed_job_leaves_no_process(sandbox: Sandbox, start: Start) -> None:
    def work(pipe: Connection) -> None:
        mine = Sandbox()
        pipe.send(mine.pid)
        with ThreadPoolExecutor(2) as pool:
            pool.map(mine.run, [SLEEP] * 2, [""] * 2, [Limits(wall_seconds=600.0)] * 2)

    job = start(work)
    template = job.hear()
    eventually(lambda: len(descendants(template)) == 6)
    below = [template, *descendants(template)]
    job.kill()
    eventually(lambda: living(below) == [])


def test_the_thread_that_made_a_sandbox_may_end(sandbox: Sandbox) -> None:
    made = list[Sandbox]()
    thread = threading.Thread(target=lambda: made.append(Sandbox()))
    thread.start()
    thread.join()
    with made[0]:
        assert made[0].run("print(1)").stdout == "1\n"


def test_a_warm_run_costs_less_than_a_new_interpreter(sandbox: Sandbox) -> None:
    imports = "import asyncio, decimal, json, random, re, statistics, unittest"
    spawn = [sys.executable, "-I", "-S", "-c", imports]
    warm = timeit.repeat(lambda: sandbox.run(imports), number=1, repeat=4)
    assert min(warm) < min(timeit.repeat(lambda: subprocess.run(spawn, check=True), number=1, repeat=4))


UNPRIVILEGED = """
import ctypes, os, sys
from pathlib import Path
from typing import Any
from holdfast.rl.environments.sandbox.inside.seccomp import libc
from holdfast.rl.environments.sandbox.inside.namespaces import mount
assert libc.unshare(0x00020000) == 0  # a mount namespace, in which the interpreter is where every user may read it
mount("none", "/", None, 16384 | 1 << 18)
mount("place", "/mnt", "tmpfs", 0, "mode=755")
for name, folder in (("python", sys.base_prefix), ("inside", str(Path(sandbox.__file__).parent))):
    Path("/mnt", name).mkdir()
    mount(folder, f"/mnt/{name}", None, 4096 | 16384)
sys.executable = "/mnt/python/" + os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
sandbox._FOLDER = Path("/mnt/inside")
os.setgroups([]); os.setresgid(65533, 65533, 65533); os.setresuid(65533, 65533, 65533)
"""
AS_A_USER = """
from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxUnavailable
try:
    sandbox = Sandbox()
except SandboxUnavailable as error:
    print("unavailable", error.missing, error.hint, sep="|")
    raise SystemExit
with sandbox:
    bomb = "import os, time\\nwhile os.fork(): pass\\ntime.sleep(99)"
    for code in ("import os; print(os.getuid())", "open('/proc/1/maps')", bomb, "1 / 0"):
        result = sandbox.run(code, limits=Limits(processes=4))
        print(result.reason, (result.stdout or result.stderr).split("\\n")[-2], sep="|")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_it_stands_without_privileges(sandbox: Sandbox) -> None:
    code = "from holdfast.rl.environments.sandbox import sandbox\n" + UNPRIVILEGED + AS_A_USER
    ran = run_forked(code, ["program"])
    lines = ran.stdout.splitlines()
    assert lines == [
        "ok|1000",
        "error|FileNotFoundError: [Errno 2] No such file or directory: '/proc/1/maps'",
        "error|BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "error|ZeroDivisionError: division by zero",
    ], ran.stderr


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of seccomp_deny are those of x86_64")
@pytest.mark.parametrize("name", ["unshare", "mount", "pivot_root", "mount_setattr"])
def test_a_machine_that_forbids_a_wall_is_told_apart_and_nothing_runs(name: str, sandbox: Sandbox) -> None:
    number = {**seccomp.fatal("x86_64"), **seccomp.conditional("x86_64")}[name]
    denying = Path(seccomp_deny.__file__)
    ran = run_forked(denying.read_text(), [str(denying), str(number), AS_A_USER])
    word, missing, hint = ran.stdout.strip().split("|")
    assert word == "unavailable"
    assert missing.startswith(name)
    assert "Operation not permitted" in missing
    assert "allow user namespaces" in hint


def test_an_old_kernel_is_named() -> None:
    assert "needs Linux 5.14" in str(unavailable("mount_setattr /", 38))


def test_a_child_of_the_job_that_holds_the_pipes_keeps_no_run_waiting(sandbox: Sandbox, start: Start) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(sandbox.run, "import time; time.sleep(1.0); print('done' * 50_000)", "", PATIENT)
        eventually(lambda: len(descendants(sandbox.pid or 0)) == 2)
        start(lambda _: time.sleep(600.0))
        result = run.result(30.0)
    assert (result.reason, result.stdout) == ("ok", "done" * 50_000 + "\n")
