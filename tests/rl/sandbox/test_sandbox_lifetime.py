"""Runs die with their sandbox, a sandbox with its job. A run that dies costs itself alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxError, SandboxResult
from holdfast.rl.environments.sandbox.inside import seccomp
from holdfast.rl.environments.sandbox.sandbox import unavailable
from support.programs import seccomp_deny
from support.programs.forked_programs import run_forked
from support.source_tree import ROOT
from support.waiting import eventually, next_line

PATIENT = Limits(cpu_seconds=20.0, wall_seconds=60.0)
SLEEP = "import os, time\nos.fork()\ntime.sleep(999)"


def descendants(pid: int) -> list[int]:
    """The processes below one, in no order."""
    found = list[int]()
    todo = [pid]
    while todo:
        try:
            tasks = list(Path(f"/proc/{todo.pop()}/task").iterdir())
            below = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
        found += below
        todo += below
    return found


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
        eventually(lambda: len(descendants(box.pid or 0)) == 3, 30.0)
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


example: Any = sys.modules[load_code(f"{ROOT / 'examples' / 'rl' / 'coder.py'}:run_tests").__module__]


def test_a_right_solution_passes_although_its_judge_is_killed(own: Sandbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        judged = pool.submit(example.run_tests, SLOW, [example.CallTest("f", (1,), 1)], PATIENT, sandbox=own)
        eventually(lambda: len(descendants(own.pid or 0)) == 2, 30.0)
        os.kill(own.pid or 0, signal.SIGKILL)
        assert judged.result(60.0).fraction == 1.0


def test_a_solution_whose_judge_is_killed_again_and_again_has_no_score(own: Sandbox) -> None:
    lost = SandboxResult(reason="lost")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(example.SandboxLost, match="no score"):
        patch.setattr(own, "run", lambda *_: lost)
        example.run_tests(SLOW, [example.CallTest("f", (1,), 1)], sandbox=own)


def test_closing_ends_what_still_runs() -> None:
    sandbox = Sandbox()
    with sleeping(sandbox) as (run, below):
        sandbox.close()
        assert run.result(60.0).reason == "lost"
    eventually(lambda: living(below) == [])
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("pass")


JOB = f"""
import threading, time
from holdfast.rl.environments.sandbox import Limits, Sandbox
sandbox = Sandbox()
limits = Limits(wall_seconds=600.0)
threads = [threading.Thread(target=sandbox.run, args=({SLEEP!r}, "", limits), daemon=True) for _ in range(2)]
[thread.start() for thread in threads]
print(sandbox.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_job_leaves_no_process(sandbox: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True) as job:
        template = int(next_line(job.stdout))
        eventually(lambda: len(descendants(template)) == 6, 30.0)
        below = [template, *descendants(template)]
        job.kill()
    eventually(lambda: living(below) == [], 20.0)


def test_the_thread_that_made_a_sandbox_may_end(sandbox: Sandbox) -> None:
    made = list[Sandbox]()
    thread = threading.Thread(target=lambda: made.append(Sandbox()))
    thread.start()
    thread.join()
    with made[0]:
        assert made[0].run("print(1)").stdout == "1\n"


def test_a_warm_run_costs_less_than_a_new_interpreter(sandbox: Sandbox) -> None:
    def fastest(body: object) -> float:
        took = list[float]()
        for _ in range(4):
            began = time.perf_counter()
            assert callable(body)
            body()
            took.append(time.perf_counter() - began)
        return min(took)

    imports = "import asyncio, decimal, json, random, re, statistics, unittest"
    spawn = [sys.executable, "-I", "-S", "-c", imports]
    assert fastest(lambda: sandbox.run(imports)) < fastest(lambda: subprocess.run(spawn, check=True))


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


def test_a_child_of_the_job_that_holds_the_pipes_keeps_no_run_waiting(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(sandbox.run, "import time; time.sleep(1.0); print('done' * 50_000)", "", PATIENT)
        eventually(lambda: len(descendants(sandbox.pid or 0)) == 2, 30.0)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        try:
            result = run.result(30.0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert (result.reason, result.stdout) == ("ok", "done" * 50_000 + "\n")
