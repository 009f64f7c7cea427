"""`Liveness` ends a wait at every death of a peer process; a process that runs out of a resource calls no peer dead."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast import comms
from holdfast.backends.gloo.connecting import meaning_of
from holdfast.comms import BackendUnavailable, Communicator, HoldfastError, PeerFailed, ResourceExhausted, Revoked
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.local_causes import local_cause, resource_exhausted, unopenable_file, unreadable_memory
from holdfast.comms.transport import liveness as processes
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, this_process
from holdfast.ft import Session
from holdfast.harness import LocalCluster
from support.comms.ranks import on_ranks
from support.programs import seccomp_deny
from support.programs.forked_programs import run_forked
from support.programs.seccomp_deny import CALLS
from support.waiting import PROGRAM_SECONDS, eventually


@pytest.fixture
def wake() -> Iterator[OwnedDescriptor]:
    fd = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC))
    yield fd
    fd.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as each:
        yield each
        each.kill()


def peer_of(process: subprocess.Popen[bytes], host: str | None = None) -> Peer:
    return Peer(host or processes.this_host(), process.pid, processes.start_time(process.pid))


@pytest.fixture
def liveness(process: subprocess.Popen[bytes]) -> Iterator[Liveness]:
    """That of this process, rank 0, and of `process`, rank 1."""
    with contextlib.closing(Liveness([this_process(), peer_of(process)], 0)) as made:
        yield made


def test_a_process_that_exits_counts_as_dead_before_the_kernel_has_freed_its_memory(
    process: subprocess.Popen[bytes], liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not liveness.is_ending(1)
    monkeypatch.setattr("holdfast.comms.transport.liveness.is_exiting", lambda pid: pid == process.pid)
    eventually(lambda: liveness.is_ending(1))  # it looks once a millisecond
    assert liveness.dead() == (1,), "for good, and for all waits"
    with contextlib.closing(Liveness([this_process(), Peer("elsewhere", process.pid, 1)], 0)) as elsewhere:
        assert not elsewhere.is_ending(1), "the number is another process's there"


def test_a_process_is_exiting_from_its_sigkill_on(process: subprocess.Popen[bytes]) -> None:
    assert not processes.is_exiting(process.pid)
    process.kill()
    eventually(lambda: processes.is_exiting(process.pid))
    process.wait()
    assert processes.is_exiting(process.pid)


@pytest.mark.parametrize("when", ["before it was made", "before the first wait", "while somebody waits"])
def test_a_death_ends_a_wait(process: subprocess.Popen[bytes], wake: OwnedDescriptor, when: str) -> None:
    peers = [this_process(), peer_of(process)]
    if when == "before it was made":
        process.kill()
        process.wait()
    with contextlib.closing(Liveness(peers, 0)) as liveness:
        if when == "before the first wait":
            process.kill()
            process.wait()
        if when == "while somebody waits":
            threading.Timer(0.05, process.kill).start()
        assert liveness.wait(wake, PROGRAM_SECONDS)
        assert liveness.dead() == (1,), "the death ended the wait, not the time"
        assert liveness.wait(wake, 0.01), "a death ends one wait only: this one ends by its timeout"


def test_a_wake_up_ends_a_wait(liveness: Liveness, wake: OwnedDescriptor) -> None:
    os.eventfd_write(wake, 1)
    assert not liveness.wait(wake)
    assert liveness.dead() == ()


def test_threads_may_call_dead_while_another_thread_waits(
    process: subprocess.Popen[bytes], liveness: Liveness, wake: OwnedDescriptor
) -> None:
    asked = threading.Barrier(9, timeout=10.0)

    def ask() -> tuple[int, ...]:
        for _ in range(1000):
            assert liveness.dead() == ()
        asked.wait()
        while not (dead := liveness.dead()):
            pass
        return dead

    with ThreadPoolExecutor(9) as threads:
        waited = threads.submit(liveness.wait, wake, 10.0)
        answers = [threads.submit(ask) for _ in range(8)]
        with contextlib.suppress(threading.BrokenBarrierError):
            asked.wait()
        process.kill()
        assert [answer.result() for answer in answers] == [(1,)] * 8
        assert waited.result()


def test_a_recycled_pid_counts_as_a_death_but_on_another_host(
    process: subprocess.Popen[bytes], wake: OwnedDescriptor
) -> None:
    now = peer_of(process)
    peers = [this_process(), Peer(now.host, now.pid, now.started - 1), Peer("elsewhere", now.pid, now.started - 1)]
    with contextlib.closing(Liveness(peers, 0)) as liveness:
        assert liveness.dead() == (1,)
        assert liveness.wait(wake), "although `dead` returned it before"


def test_stopped_processes_are_found_among_the_other_processes_of_this_host(process: subprocess.Popen[bytes]) -> None:
    peers = [this_process(), peer_of(process, "another host"), peer_of(process)]
    assert processes.stopped_ranks(peers) == ()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.stopped_ranks(peers) == (2,)
    process.kill()
    process.wait()
    assert processes.stopped_ranks(peers) == ()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "file descriptors"),
        (errno.ENFILE, "the host has no more"),
        (errno.ENOSPC, "'/somewhere' is full"),
        (errno.EDQUOT, "'/somewhere' is full"),
        (errno.EROFS, "'/somewhere' is read-only"),
        (errno.ENOMEM, "memory"),
    ],
)
def test_an_error_names_the_resource_that_ran_out(number: int, words: str) -> None:
    cause = local_cause(OSError(number, os.strerror(number), "/somewhere"), "a test")
    assert isinstance(cause, ResourceExhausted) and words in str(cause) and "for a test" in str(cause)
    again = local_cause(RuntimeError(f"[socket.cc:12] socket: {os.strerror(number)}"), "a test")
    assert isinstance(again, ResourceExhausted) and again.resource == cause.resource


def test_an_error_that_a_peer_may_have_caused_is_no_local_cause_and_a_refused_read_of_memory_no_death() -> None:
    """The system refuses such reads for user namespaces, seccomp and Yama."""
    for number in (errno.ESRCH, errno.ECONNRESET, errno.EPIPE, errno.EFAULT, errno.ENOENT):
        assert resource_exhausted(number, "a test") is None
        assert local_cause(OSError(number, os.strerror(number)), "a test") is None
    refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
    for error in (
        unreadable_memory("inproc", 1, errno.EPERM),
        unreadable_memory("inproc", 1, errno.ENOSYS),
        unopenable_file("inproc", 1, "window", refused),
    ):
        assert isinstance(error, BackendUnavailable) and error.name == "inproc"
        assert "rank 1" in str(error) and "user namespace" in str(error)
    assert isinstance(unreadable_memory("inproc", 1, errno.EFAULT), PeerFailed)
    assert isinstance(unopenable_file("inproc", 1, "window", OSError(errno.ENOENT, "no")), PeerFailed)


_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("Operation timed out!", "timeout"),
        (_GLOO + "unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete", "timeout"),
        (_GLOO + "pair.cc:1] Application timeout caused pair closure", "timeout"),
        ("wait timeout after 5000ms, keys: /0", "timeout"),
        (_GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:17819. This is typically caused by", "connection"),
        (_GLOO + "pair.cc:537] Read error [127.0.0.1]:40638: Connection reset by peer. This is", "connection"),
        (_GLOO + "pair.cc:537] Read error [127.0.0.1]:40638: Connection timed out", "connection"),
        (_GLOO + "pair.cc:99] writev [127.0.0.1]:40638: Broken pipe", "connection"),
        ("Invalid scalar type", "local"),
        ("ProcessGroupGloo::allreduce: requires dense tensors", "local"),
        ("Inplace update to inference tensor outside InferenceMode is not allowed.", "local"),
    ],
)
def test_errors_of_gloo_and_of_torch_are_distinguished(said: str, meaning: str) -> None:
    """The first messages are those seen from torch 2.13; gloo's errors have no others."""
    assert meaning_of(RuntimeError(said)) == meaning


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (RuntimeError("Invalid scalar type"), HoldfastError, "own failed in this process, .*RuntimeError: Invalid"),
    ],
)
def test_an_interrupt_or_an_error_of_torch_is_no_death_of_a_peer_and_is_named_by_later_ops(
    comm: Communicator, raised: BaseException, error: type[BaseException], said: str | None
) -> None:
    def fails(deadline: float) -> None:
        raise raised

    with pytest.raises(error, match=said):
        comm.issue("own", 0, fails, lambda: "")
    with pytest.raises(Revoked, match=rf"an earlier op failed: .*{type(raised).__name__}\b"):
        comm.barrier()


@on_ranks(2, "shm", "gloo", "ucx", timeout=30.0)
def test_a_rank_without_descriptors_names_the_cause_and_no_peer_is_reported_dead(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        try:
            with comm.split([0, 1], timeout=5.0) as part:
                part.barrier()
        except HoldfastError as error:
            assert "out of file descriptors" not in str(error)
        return
    here = len(list(Path("/proc/self/fd").iterdir())) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (here, here))
    with pytest.raises(ResourceExhausted, match="file descriptors") as caught:
        comm.split([0, 1], timeout=5.0)
    assert "rank 1 failed" not in str(caught.value)


def test_a_member_without_descriptors_leaves_and_the_others_go_on() -> None:

    def train(session: Session) -> object:
        steps = 0
        for attempt in session.steps(6):
            with attempt:
                if attempt.step == 2 and attempt.rank == 1 and session.size == 3:
                    raise comms.ResourceExhausted("file descriptors", "one more for a test", "and has all of its 64")
                attempt.comm.all_reduce(torch.ones(2))
            steps += attempt.committed
        return steps, session.size

    with LocalCluster(3, "shm", timeout=60.0, session={"min_size": 2, "shards": 6}) as cluster:
        assert cluster.start(train).results(timeout=PROGRAM_SECONDS) == [(6, 2)] * 2


_WITH_OWN_SHARED_MEMORY = """
import ctypes, subprocess, sys
if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
    sys.exit("unshare failed")
for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", sys.argv[2], "tmpfs", "/dev/shm"]):
    subprocess.run(["mount", *arguments], check=True)
"""
_TINY = """
import sys, torch
from holdfast import comms
try:
    comms.connect("ucx", rank=0, size=1, rendezvous="file://" + sys.argv[1], timeout=10)
except comms.ResourceExhausted as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a file system of its own")
@pytest.mark.parametrize(("options", "words"), [("size=1m", "1.0 of 1.0 MiB are free"), ("size=64m,ro", "read-only")])
def test_ucx_reports_missing_shared_memory(options: str, words: str, tmp_path: Path) -> None:
    done = run_forked(_WITH_OWN_SHARED_MEMORY + _TINY, ["tiny.py", str(tmp_path / "meeting"), options])
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "out of shared memory (/dev/shm): it needs 3.0 MiB" in done.stdout and words in done.stdout
    assert "--shm-size" in done.stdout


def test_ucx_reports_a_missing_network_device(tmp_path: Path) -> None:
    environ = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "nope0"}
    done = run_forked(_TINY, ["tiny.py", str(tmp_path / "meeting")], environ=environ)
    assert done.returncode == 0, done.stderr
    assert "UCX_NET_DEVICES=nope0" in done.stdout and "this host has" in done.stdout and "lo" in done.stdout


def shared_memory_of_this_process() -> int:
    """The bytes of shared memory in the files that this process has open: others of the machine have theirs."""
    files = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd)]
    shared = {os.fstat(int(fd.name)) for fd in files if str(fd.readlink()).startswith("/dev/shm/")}
    return sum(512 * file.st_blocks for file in shared)


@on_ranks(2, "ucx")
def test_two_ranks_over_ucx_fit_into_the_shared_memory_of_a_container(comm: Communicator) -> None:
    """docker gives 64 MB; a rank, its spare worker and four windows must fit."""
    with contextlib.ExitStack() as windows:
        for _ in range(4):
            windows.enter_context(comm.window(torch.ones(4)))
        comm.barrier()
        used = shared_memory_of_this_process()
        comm.barrier()
    assert 1e6 < used < 16e6


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows the numbers of x86_64 alone")


def run_without(call: str, code: str, *arguments: str) -> str:
    """Run a program that may not make this system call; return its output."""
    script = Path(seccomp_deny.__file__)
    done = run_forked(script.read_text(), [str(script), str(CALLS[call]), code, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


_STATUS = """
from holdfast.comms.plugins.registry import registry
from holdfast.ft.detectors.plugin import _kernel
print(registry().backend("shm").status)
print(registry().backend("gloo").status)
print(_kernel())
"""


@needs_x86
@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "process_vm_readv", "pidfd_send_signal"])
def test_a_probe_tries_what_its_backend_or_detector_needs_and_says_what_to_allow(call: str) -> None:
    shm, gloo, pidfd = run_without(call, _STATUS).splitlines()
    refused, other = (pidfd, shm) if call == "pidfd_send_signal" else (shm, gloo)
    assert refused.startswith("Unavailable") and call in refused and "Operation not permitted" in refused
    assert "profile that" in refused and other.startswith("Available")


_PAIR = """
import os, signal, sys, time, torch
from holdfast import comms
place = "file://" + sys.argv[1]
child = os.fork()
comm = comms.connect("auto", rank=0 if child else 1, size=2, rendezvous=place, timeout=20)
tensor = torch.ones(4)
comm.all_reduce(tensor)
if not child:
    time.sleep(60)
os.kill(child, signal.SIGKILL)
try:
    comm.all_reduce(tensor)
except comms.PeerFailed as error:
    print(comm.backend, tensor.tolist() == [2.0] * 4)
os.waitpid(child, 0)
comm.close()
"""


@needs_x86
def test_auto_takes_a_runnable_backend_that_still_detects_deaths(tmp_path: Path) -> None:
    """Without pidfds, processes are polled, and a zombie counts as dead."""
    assert run_without("pidfd_open", _PAIR, str(tmp_path / "meeting")).split() == ["gloo", "True"]


_RUN = """
import sys
from holdfast.harness.cli.app import app
open(sys.argv[1], "w").close()
app(["run", "-n", "1", sys.argv[1]])
"""


@needs_x86
def test_a_run_that_cannot_start_its_ranks_names_the_call_and_what_to_allow(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"holdfast run: .* pidfd_open fails: Operation not permitted; .*allows p"):
        run_without("pidfd_open", _RUN, str(tmp_path / "script.py"))
