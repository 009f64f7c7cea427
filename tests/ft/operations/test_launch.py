"""`holdfast run`: the end and the report of a failed job, and cleaning up after it; and the zygotes that it forks."""

from __future__ import annotations

import array
import fcntl
import inspect
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from holdfast.comms.system.environment import flag
from holdfast.ft.launch import held_directory, local_launcher, run_report
from holdfast.ft.launch.guardian import EXEC_SECONDS, is_tracker
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.launch.local_launcher import Grace, GuardedProcess, Launcher, LaunchPlan, launch, python_command
from holdfast.ft.launch.run_report import LastErrorLine, ProcessFailure, last_ranks, table, whereabouts
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, ExecutedProcess
from holdfast.ft.processes.process_group import end_group, members_of
from holdfast.ft.processes.zygote_client import ZygoteClient, call_in_fork, inherit_zygote, zygote, zygote_pid
from holdfast.ft.processes.zygote_start import Exited, Ready, RequestRefused, StartedZygote
from holdfast.ft.telemetry.flight import find
from holdfast.harness import LocalCluster
from support.children import Child, children
from support.event_records import an_event
from support.programs.forked_programs import HOLDFAST, run_python, script
from support.views import view_of
from support.waiting import PATIENCE, PROGRAM_SECONDS, becomes_true, eventually, next_line


def ended(pids: Sequence[int]) -> bool:
    """Whether all these processes are gone soon."""
    if becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), interval=0.02):
        return True
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    return False


# -- a job that cannot go on


PATIENT = Grace(at_end=60.0)
"""Processes have time to end by themselves, however busy the machine is."""

FAILS = """
    from holdfast import ft
    with ft.Session() as session:
        for attempt in session.steps(20):
            with attempt:
                if attempt.step == 3 and attempt.rank == 1:
                    raise ValueError(f"no such batch in {attempt.step}")
                attempt.comm.barrier()
"""


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def for_others(folder: Path) -> list[str]:
    """What of a folder and its files others than their owner may read or write."""
    assert list(folder.iterdir())
    return [path.name for path in (folder, *folder.iterdir()) if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_run_ends_with_a_repeated_exception_names_the_failed_rank_and_writes_nothing_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_umask: None
) -> None:
    path, logs = script(tmp_path, FAILS), tmp_path / "logs"
    assert launch(LaunchPlan(python_command(path, ()), 3, grace=PATIENT), logs) == 1
    output = capsys.readouterr().out
    rows = [line.removeprefix("holdfast run: ").split() for line in output.splitlines() if "holdfast run:" in line]
    assert "the same exception came again: ValueError: no such batch in 3 (step 3, rank 1" in output
    assert "the job did not finish" in output
    assert ["rank", "pid", "exit", "last", "error", "line"] in rows
    failures = rows[rows.index(["rank", "pid", "exit", "last", "error", "line"]) + 1 :]
    raised = [" ".join((row[0], *row[2:])) for row in failures if "ValueError:" in row[6:7]]
    assert raised == ["1 exited with status 1 ValueError: no such batch in 3"] * 2
    assert not for_others(logs)


def test_run_ends_at_once_when_min_size_cannot_be_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The register has what members of a session would write there."""
    view, made = view_of("hh", epoch=1), LocalContract.made

    def with_a_view(contract: LocalContract, logs: Path | None = None) -> LocalContract:
        with made(contract, logs).open_register() as register:
            assert register.compare_and_set(0, structs.replace(view, job=structs.replace(view.job, min_size=2)))
        return contract

    monkeypatch.setattr(LocalContract, "made", with_a_view)
    one_fails = ("sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 600")
    assert launch(LaunchPlan(one_fails, 2, grace=Grace(at_end=0.2))) == 1
    output = capsys.readouterr().out
    assert "1 process is left of the 2 members needed, and nobody else can come" in output
    assert "[1] exited with status 3" in output and "[0] still ran" in output


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="min_size=3 must be at least 1 and at most size=2"):
        LaunchPlan(("true",), 2, min_size=3)
    with pytest.raises(ValueError, match="shards=0"):
        LaunchPlan(("true",), 2, shards=0)


LATE = """
    import os, pathlib, time
    while os.environ["RANK"] == "1" and not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
    from holdfast import ft
    with ft.Session(timeouts=ft.Timeouts(join=200.0)) as session:
        for attempt in session.steps(1000):
            with attempt:
                attempt.comm.barrier()
                terms = session.view.job.min_size, attempt.shards  # the other may leave the job after this step
            print("job", *terms)
            break
"""


def test_run_names_each_rank_that_has_not_joined_after_a_while_and_passes_on_what_sessions_do_not_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, name_missing = tmp_path / "go", Launcher._name_missing
    command = python_command(script(tmp_path, LATE.format(go=str(go))), ())

    def name_and_go_on(launcher: Launcher, waited: float) -> None:
        late = launcher._late
        joined = any(event.kind == "joined" for event in launcher._contract.events())
        name_missing(launcher, waited if joined else 0.0)
        if launcher._late != late:
            go.touch()

    monkeypatch.setattr(run_report, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(Launcher, "_name_missing", name_and_go_on)
    assert launch(LaunchPlan(command, 2, min_size=2, shards=6)) == 0
    output = capsys.readouterr().out
    assert "job 2 (0, 1, 2)" in output and "job 2 (3, 4, 5)" in output
    assert "of 2 joined the job; missing:" in output
    missing = [line for line in output.splitlines() if "has not joined" in line]
    assert missing and all(line.startswith("[1] pid ") for line in missing), output
    assert "torch is not imported yet" in missing[0] and "s of processor time" in missing[0]


def test_whereabouts_tell_a_stopped_process_from_one_that_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    assert becomes_true(lambda: whereabouts(process.pid).startswith("is stopped"))
    process.kill()
    assert becomes_true(lambda: whereabouts(process.pid) == "has ended")
    process.wait(PATIENCE)


def test_the_line_of_the_last_traceback_says_why_a_process_ended() -> None:
    words = LastErrorLine()
    for line in (
        "starting",
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "KeyError: 1",
        "",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "x.py", line 2',
        "ValueError: two",
        "closing down",
        "",
    ):
        words.hear(line)
    assert str(words) == "ValueError: two"
    quiet = LastErrorLine()
    quiet.hear("out of memory ")
    assert str(quiet) == "out of memory"


def test_the_table_has_ranks_first_and_spares_last() -> None:
    failures = [ProcessFailure(None, 7, 1, "x"), ProcessFailure(1, 5, -9, ""), ProcessFailure(0, 60, 2, "y")]
    assert table(failures) == [
        "rank   pid  exit                  last error line",
        "0      60   exited with status 2  y",
        "1      5    was ended by SIGKILL  -",
        "spare  7    exited with status 1  x",
    ]
    assert table([]) == []
    assert last_ranks([an_event("installed", pid=5, members=[], rank=rank) for rank in (0, None, 2)]) == {5: 2}


def test_output_that_its_file_cannot_take_is_shown_and_the_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process's file is on a full disk; the second one's cannot be made."""
    files = {0: Path("/dev/full"), 1: tmp_path / "missing" / "output-1.log", 2: tmp_path / "output-2.log"}
    monkeypatch.setattr(local_launcher, "_output_file", lambda folder, node, number: files[number])
    steps = ("sh", "-c", "echo first; sleep 0.2; echo second; sleep 0.2; echo last")
    assert launch(LaunchPlan(steps, 3), tmp_path / "logs") == 0
    shown = capsys.readouterr().out.splitlines()
    for number, why in ((0, "No space left on device"), (1, "No such file or directory"), (2, None)):
        lines = [line.removeprefix(f"[{number}] ") for line in shown if line.startswith(f"[{number}]")]
        told = [line for line in lines if "its output is kept in no file from here on, only shown" in line]
        assert [why in line for line in told] == ([] if why is None else [True])
        assert [line for line in lines if line not in told] == ["first", "second", "last"]
    assert files[2].read_text() == "first\nsecond\nlast\n"


# -- checks


@pytest.mark.parametrize(
    ("check", "inherited", "seen"), [(False, None, "None"), (True, "0", "1"), (False, "yes", "yes")]
)
def test_checks_are_off_unless_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, check: bool, inherited: str | None, seen: str
) -> None:
    monkeypatch.delenv("HOLDFAST_CHECK")
    if inherited is not None:
        monkeypatch.setenv("HOLDFAST_CHECK", inherited)
    launch(LaunchPlan(("sh", "-c", "echo check ${HOLDFAST_CHECK-None}"), 1, check=check))
    assert f"check {seen}" in capsys.readouterr().out


def test_a_variable_is_turned_on_or_off_by_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other word is refused: tests/ft/session/test_joining.py."""
    words = dict.fromkeys(("1", "true", "Yes", " on "), True) | dict.fromkeys(("0", "false", "No", "off", ""), False)
    for word, on in words.items():
        monkeypatch.setenv("HOLDFAST_CHECK", word)
        assert flag("HOLDFAST_CHECK", default=not on) == on, word
    monkeypatch.delenv("HOLDFAST_CHECK")
    assert flag("HOLDFAST_CHECK", default=True)


# -- nothing outlives a job

CHILDREN = """
import os, subprocess, sys, time
children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
quiet = "stdout=s.DEVNULL, stderr=s.DEVNULL"
daemon = f"import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True, {quiet}).pid)"
orphan = subprocess.run([sys.executable, "-c", daemon], capture_output=True, text=True).stdout
print("pids", os.getpid(), *(child.pid for child in children), orphan.strip(), flush=True)
"""


def test_a_killed_launcher_leaves_no_child_of_a_rank_behind_and_keeps_the_recordings(tmp_path: Path) -> None:
    text = """
from holdfast import ft
with ft.Session() as session:
    for attempt in session.steps(10**6):
        with attempt:
            attempt.comm.barrier()
            if attempt.step == 2:
                start_children()
"""
    start = "def start_children():\n" + textwrap.indent(CHILDREN, "    ")
    path, logs = script(tmp_path, start + text), tmp_path / "logs"
    launcher = subprocess.Popen([HOLDFAST, "run", "-n", "1", "--logs", logs, path], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids: list[int] = []
    while len(pids) < 4:
        line = next_line(launcher.stdout)
        assert line, "the job has ended"
        pids += map(int, line.split("pids ")[1].split() if "pids " in line else [])
    launcher.kill()
    launcher.wait(PATIENCE)
    launcher.stdout.close()
    assert ended(pids)
    assert len(find(logs)) == 1, "flight recordings"
    assert len(list(logs.glob("*.jsonl"))) == 1
    assert logs.stat().st_mode & 0o777 == 0o700


@contextmanager
def guarded(command: list[str]) -> Iterator[GuardedProcess]:
    process = GuardedProcess(command, os.environ)
    with process.output:
        yield process
    os.close(process.pidfd)


MEMORY = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1)
print(memory.name, end=" ")
"""


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_a_process_leaves_no_children_and_no_shared_memory_behind_however_it_ends(tmp_path: Path, end: str) -> None:
    with guarded([sys.executable, "-W", "ignore", script(tmp_path, MEMORY + CHILDREN + end)]) as process:
        name, _, *numbers = next_line(process.output).split()
        segment, pids = Path("/dev/shm", name), list(map(int, numbers))
        assert pids[0] == process.pid
        if "sleep" not in end:
            assert process.output.read() == b"", "its children had the other end of the pipe"
        code = process.reap()
    assert ended(pids) and not segment.exists()
    assert code == {"os._exit(3)": 3}.get(end, -signal.SIGKILL)


def test_a_process_does_not_outlive_its_guardian() -> None:
    with guarded(["sleep", "600"]) as process:
        pid = process.pid
        process._guardian.kill()
        assert ended([pid])
        assert process.reap() == -signal.SIGKILL


def test_signals_reach_a_process_and_dispositions_are_not_inherited() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with guarded(["sleep", "600"]) as process:
            assert process.pid
            process.signal(signal.SIGINT)
            assert process.output.read() == b""
            assert process.reap() == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_missing_command_is_an_error_that_names_it(tmp_path: Path) -> None:
    with guarded([str(tmp_path / "nothing")]) as process:
        assert b"cannot run" in process.output.read()
        assert process.reap() == 127


def test_a_hangup_that_nohup_ignores_does_not_end_a_job(tmp_path: Path, start: Callable[..., Child]) -> None:
    here, go = tmp_path / "here", tmp_path / "go"

    def body(pipe: Connection) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        wait = f"touch {here}; until [ -e {go} ]; do sleep 0.05; done"
        pipe.send(launch(LaunchPlan(("sh", "-c", wait), 1)))

    child = start(body)
    eventually(here.exists)
    os.kill(child.pid, signal.SIGHUP)
    go.touch()
    assert child.hear() == 0


# -- directories that are held while their owner lives, and then removed by the next owner


@contextmanager
def owner(where: Path) -> Iterator[tuple[Child, Path]]:
    """Another process with a held directory, and that directory. The process closes it when it is told to."""

    def body(pipe: Connection) -> None:
        with HeldDirectory("job-", where) as folder:
            (folder.path / "segment").write_bytes(b"memory")
            pipe.send(folder.path)
            pipe.recv()

    with children() as start:
        process = start(body)
        yield process, process.hear()


def test_a_new_folder_that_another_process_looks_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, looking = tempfile.mkdtemp, list[int]()

    def seen_at_once(**where: object) -> str:
        path = make(**where)  # type: ignore[call-overload]
        if not looking:
            looking.append(os.open(path, os.O_RDONLY))
            fcntl.flock(looking[0], fcntl.LOCK_EX)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", seen_at_once)
    with HeldDirectory("job-", tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours.path] and (ours.path / held_directory.MARKER).exists()
    os.close(looking[0])


def test_a_held_folder_is_for_its_owner_alone_left_by_others_and_gone_when_closed(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, theirs), HeldDirectory("job-", tmp_path) as ours:
        assert {theirs, ours.path} == set(tmp_path.iterdir())
        assert stat.S_IMODE(ours.path.stat().st_mode) == 0o700
        process.tell("close it")
        process.end()
        assert list(tmp_path.iterdir()) == [ours.path], "its owner closed it"
        (ours.path / "segment").write_bytes(b"memory")
    assert list(tmp_path.iterdir()) == []
    ours.close()


def test_a_new_folder_removes_what_a_killed_owner_left_and_nothing_else(tmp_path: Path) -> None:
    """A folder of the user's own stays whatever its name, and a link is not followed."""
    kept = {"another's", "job-mybackup", "job-file", "elsewhere", "job-link"}
    for name in ("another's", "job-mybackup", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "job-mybackup" / "precious").touch()
    (tmp_path / "job-file").touch()
    with owner(tmp_path) as (process, left), owner(tmp_path / "elsewhere") as (other, linked):
        (tmp_path / "job-link").symlink_to(linked)
        process.kill()
        other.kill()
        assert (left / "segment").exists()
        with HeldDirectory("job-", tmp_path) as ours:
            assert {path.name for path in tmp_path.iterdir()} == {*kept, ours.path.name}
        assert (tmp_path / "job-mybackup" / "precious").exists() and (linked / "segment").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("of_another", ["folder", "marker"])
def test_root_leaves_folders_of_other_users(tmp_path: Path, of_another: str) -> None:
    with owner(tmp_path) as (process, left):
        process.kill()
        os.chown(left if of_another == "folder" else left / held_directory.MARKER, 1234, 1234)
        with HeldDirectory("job-", tmp_path):
            pass
        assert (left / "segment").exists()


def test_the_output_of_a_clusters_ranks_is_for_their_owner_alone(no_umask: None) -> None:
    with LocalCluster(1, "shm") as cluster:
        cluster.run(lambda comm: None)
        assert not for_others(cluster.logs)


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = held_directory._lock, list[Path]()

    def late(folder: Path, how: int) -> int:
        taken.append(folder)
        if len(taken) == 1:
            folder.rmdir()
        return lock(folder, how)

    monkeypatch.setattr(held_directory, "_lock", late)
    with HeldDirectory("job-", tmp_path) as ours:
        assert ours.path.is_dir()
        assert taken[0] != ours.path


# -- answers of a zygote: each belongs to one request, of which some were cut short


class ScriptedZygote:
    """A zygote that says what a test tells it to; its processes are programs that sleep."""

    def __init__(self) -> None:
        ours, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sleepers: list[subprocess.Popen[bytes]] = []
        self.says(Ready())
        process: Any = SimpleNamespace(pid=0, poll=lambda: None, wait=lambda timeout: 0)
        self.client = ZygoteClient(StartedZygote(process, ours, io.BytesIO()))

    def says(self, report: Ready | RequestRefused | Exited, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.control.sendmsg([msgspec.msgpack.encode(report)], rights)

    def starts(self, number: int) -> subprocess.Popen[bytes]:
        """Answer to the request of this number to fork a process."""
        sleeper = subprocess.Popen(["sleep", str(2 * PATIENCE)], start_new_session=True)
        self.sleepers.append(sleeper)
        pidfd = os.pidfd_open(sleeper.pid)
        self.says(Ready(sleeper.pid, number), pidfd)
        os.close(pidfd)
        return sleeper


@pytest.fixture
def scripted() -> Iterator[ScriptedZygote]:
    made = ScriptedZygote()
    yield made
    for sleeper in made.sleepers:
        sleeper.kill()
        sleeper.wait()
    made.client.close()
    made.control.close()


def interrupted(scripted: ScriptedZygote, request: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a request whose answer Ctrl-C does not let this process wait for."""

    def interrupt(deadline: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scripted.client, "_receive", interrupt)
        request()


SECONDS = 60.0


def _sleep(channel: ProcessChannel) -> None:
    channel.recv(SECONDS)


def test_the_answer_to_a_request_that_ctrl_c_cut_short_is_not_taken_for_a_later_ones(
    scripted: ScriptedZygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was started for it ends; so does the zygote's use, if the import that it was started threads."""
    client = scripted.client
    start = partial(client.spawn, _sleep, name="started", output=tmp_path / "started")
    interrupted(scripted, lambda: client.preload("colorsys"), monkeypatch)
    interrupted(scripted, start, monkeypatch)
    interrupted(scripted, lambda: client.preload("wave"), monkeypatch)
    scripted.says(Ready(number=1))
    nobodys = scripted.starts(2)
    scripted.says(RequestRefused("importing wave started threads: t", "wave", 3))
    wanted = scripted.starts(4)
    process = start()
    assert process.pid == wanted.pid
    assert nobodys.wait(PATIENCE) == -signal.SIGKILL
    assert client.has_threads
    scripted.says(Exited(nobodys.pid, signal.SIGKILL))
    scripted.says(Exited(wanted.pid, signal.SIGKILL))
    process.close()
    assert process.wait(0.0).signal == signal.SIGKILL


def test_a_start_without_room_for_the_descriptor_of_the_process_fails_and_says_so(
    scripted: ScriptedZygote, tmp_path: Path
) -> None:
    scripted.says(Ready(1, number=1))
    with pytest.raises(StartFailed, match="no more file descriptors"):
        scripted.client.spawn(_sleep, name="started", output=tmp_path / "started")
    assert not scripted.client.forked
    scripted.says(Exited(1, 0))
    scripted.starts(2)
    process = scripted.client.spawn(_sleep, name="started", output=tmp_path / "started")
    scripted.says(Exited(process.pid, signal.SIGKILL))
    process.close()


# -- zygotes that are started before anything slow, or forked from a process that has torch; and process groups that end


def test_a_fork_forks_its_own_zygote_which_has_nothing_of_it_open(tmp_path: Path) -> None:
    def facts(secret: str) -> tuple[int, int, bool]:
        open_files = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
        return os.getpid(), os.getppid(), secret in open_files

    def call() -> tuple[int, int | None, tuple[int, int, bool]]:
        with (tmp_path / "open").open("w") as secret:
            inherit_zygote()
            asked = partial(facts, secret.name)
            return (
                os.getpid(),
                zygote_pid(),
                call_in_fork(asked, name="inner", output=tmp_path / "inner", timeout=SECONDS),
            )

    pid, own, (inner, parent, sees) = call_in_fork(call, name="outer", output=tmp_path / "outer", timeout=SECONDS)
    assert own not in (None, zygote_pid()) and parent == own and inner not in (pid, own)
    assert not sees, "a descriptor of the process is open in what its zygote forks"


def test_nothing_outlives_the_parent_of_a_forked_zygote(tmp_path: Path) -> None:
    def wait_beside_a_forked_zygote(channel: ProcessChannel) -> None:
        inherit_zygote()
        source = zygote()
        child = source.spawn(_sleep, name="inner", output=Path(os.devnull))
        channel.send((source.pid, child.pid))
        _sleep(channel)

    process = zygote().spawn(wait_beside_a_forked_zygote, name="outer", output=tmp_path / "outer")
    try:
        pids: tuple[int, int] = process.channel.recv(SECONDS)
        process.kill()
        assert process.wait(PROGRAM_SECONDS).signal == signal.SIGKILL
        assert ended(pids)
    finally:
        process.close()


def test_no_zygote_is_forked_from_a_process_with_threads(tmp_path: Path) -> None:
    def with_a_thread() -> tuple[bool, int | None]:
        ended = threading.Event()
        thread = threading.Thread(target=ended.wait)
        thread.start()
        try:
            return inherit_zygote(), zygote_pid()
        finally:
            ended.set()
            thread.join()

    forked = call_in_fork(with_a_thread, name="outer", output=tmp_path / "outer", timeout=SECONDS)
    assert forked == (False, None)


def test_a_call_in_a_fork_raises_what_the_function_raised_and_says_how_its_process_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="NO_SUCH_THING"):
        call_in_fork(lambda: os.environ["NO_SUCH_THING"], name="a call", output=tmp_path / "call", timeout=SECONDS)
    with pytest.raises(StartFailed, match=r"a call ended without an answer: process .* exited with status 3"):
        call_in_fork(lambda: os._exit(3), name="a call", output=tmp_path / "call", timeout=SECONDS)


EARLY = """
import sys
from holdfast.ft.processes import zygote_start
zygote_start.start_early("colorsys")
print("torch" in sys.modules, zygote_start._early.process.pid)
"""

TAKEN = """
from pathlib import Path
from holdfast.ft.processes.zygote_client import call_in_fork
from holdfast.ft.processes.zygote_client import zygote_pid
has = call_in_fork(lambda: "colorsys" in sys.modules, name="call", output=Path("/dev/null"), timeout=240)
print(zygote_pid(), has)
"""


def test_a_zygote_that_is_started_early_is_the_one_that_is_used_and_ends_with_its_parent() -> None:
    heavy, early, used, has = run_python("-c", EARLY + TAKEN).split()
    assert (heavy, has) == ("False", "True") and early == used
    unused = run_python("-c", EARLY).split()
    assert unused[0] == "False"
    assert not any(Path(f"/proc/{pid}").exists() for pid in (early, unused[1]))


def hold_memory(channel: ProcessChannel) -> None:
    """Make shared memory, and have a child of this process make some too; tell the names, and wait."""
    own = SharedMemory(create=True, size=1)
    if os.fork() == 0:
        channel.send((own.name, SharedMemory(create=True, size=1).name))
    signal.pause()


PROGRAM = f"""
from __future__ import annotations
import os, signal, socket, sys
from multiprocessing.shared_memory import SharedMemory
from holdfast.ft.processes.channel import ProcessChannel
{inspect.getsource(hold_memory)}
hold_memory(ProcessChannel(socket.socket(fileno=int(sys.argv[1]))))
"""


def executed(output: Path) -> ChildProcess:
    return ExecutedProcess([sys.executable, "-c", PROGRAM], name="executed", output=output, environ={})


def forked(output: Path) -> ChildProcess:
    return zygote().spawn(hold_memory, name="forked", output=output)


@pytest.mark.parametrize("start", [executed, forked])
def test_the_group_of_a_killed_process_ends_with_its_memory(
    start: Callable[[Path], ChildProcess], tmp_path: Path
) -> None:
    process = start(tmp_path / "output")
    try:
        segments = [Path("/dev/shm", name) for name in process.channel.recv(SECONDS)]
        assert all(each.exists() for each in segments)
        assert len(members_of(process.pid)) == 3, "the process, its child, and their tracker"
        process.kill()
        process.wait(SECONDS)
        assert not members_of(process.pid)
        assert not [each for each in segments if each.exists()]
    finally:
        process.close()


def test_a_process_without_a_command_line_may_become_a_tracker_for_a_moment_and_has_no_group_once_it_is_gone() -> None:
    """In the middle of an exec it has none, and nor has a zombie."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_tracker(pid, 0.0) and not is_tracker(pid, EXEC_SECONDS)
    os.waitpid(pid, 0)
    assert not is_tracker(pid, 0.0) and not is_tracker(os.getpid(), 0.0)
    end_group(pid)
    assert members_of(pid) == set()
