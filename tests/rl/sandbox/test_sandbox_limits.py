"""Limits hold for every amount: what stays below one goes through, and what goes beyond is stopped and named."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxError
from holdfast.rl.environments.sandbox.limits import MEBIBYTE

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


def test_threads_and_exit_functions_end_as_in_an_interpreter(sandbox: Sandbox) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "third")
threading.Thread(target=lambda: (time.sleep(0.05), print("second"))).start()
print("first")
"""
    assert sandbox.run(code).stdout.split() == ["first", "second", "third"]


def test_the_same_program_gives_the_same_in_every_sandbox(sandbox: Sandbox) -> None:
    code = "print(hash('text'), list({'a', 'b', 'c', 'd'}))"
    with Sandbox() as other:
        assert other.run(code).stdout == sandbox.run(code).stdout


def test_asyncio_works(sandbox: Sandbox) -> None:
    code = "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    return 5\nprint(asyncio.run(main()))"
    assert sandbox.run(code).stdout == "5\n"


@pytest.mark.parametrize(
    "limits",
    [{"cpu_seconds": 0.0}, {"wall_seconds": float("nan")}, {"memory_bytes": 5}, {"open_files": 2}, {"processes": 0}],
)
def test_a_limit_that_cannot_be_is_refused(limits: Mapping[str, float]) -> None:
    with pytest.raises(SandboxError, match=f"the limit {next(iter(limits))}=.*give at least"):
        Limits(**limits)  # type: ignore[arg-type]


def test_descriptors_stay_as_they_are(sandbox: Sandbox) -> None:
    sandbox.run("pass")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for code in ("pass", "1 / 0", "while True: print('x' * 9999)"):
        sandbox.run(code)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
