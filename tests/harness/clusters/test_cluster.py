"""`LocalCluster`: a function on every rank, a job of sessions, failures, and what is left when everything dies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from holdfast import comms
from holdfast.ft import Session
from holdfast.ft.processes import zygote_client
from holdfast.ft.processes.remote_calls import pack_error, unpack_error
from holdfast.ft.registers import RegisterAway
from holdfast.harness import LocalCluster, RankDied, RankFailed, RunTimeout
from holdfast.harness.cluster.cluster_ranks import rank_failure
from holdfast.harness.cluster.job import standing_by
from support.comms.ranks import each_of, second_tier
from support.event_records import an_event
from support.programs.forked_programs import run_forked, script
from support.waiting import PATIENCE, PROGRAM_SECONDS, becomes_true, next_line


class Custom(Exception):
    """An error with a constructor that takes other arguments than it keeps."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


DEARER = second_tier("gloo", "mpi")
"""Of what a cluster does they change the end of an op only, which the conformance kit has in the first tier."""


backend = each_of("inproc", "shm", *DEARER)
process_backend = each_of("shm", *DEARER)


def total(comm: comms.Communicator, start: float = 0.0) -> float:
    tensor = torch.full((3,), start + comm.rank)
    comm.all_reduce(tensor)
    return float(tensor[0])


def started_together(backend: str) -> bool:
    """Whether a launcher starts all ranks of this backend, so that one that died is replaced with all others."""
    return bool(comms.backends()[backend].info.capabilities.launcher)


def pid_of(comm: comms.Communicator) -> int:
    return os.getpid()


# -- normal use


def test_run_gives_the_results_by_rank(cluster: LocalCluster) -> None:
    """Of functions with arguments, which may end with an op, and give tensors and classes of the test."""
    assert cluster.run(lambda comm: (comm.rank, comm.size)) == [(0, 2), (1, 2)]
    assert cluster.run(total) == [1.0, 1.0]
    assert cluster.run(total, 10.0) == [21.0, 21.0]
    assert cluster.run(total, start=5.0) == [11.0, 11.0]
    assert cluster.run(partial(total, start=1.0)) == [3.0, 3.0]
    assert all(work.done() for work in cluster.run(lambda comm: comm.all_reduce(torch.ones(2))))
    for rank, (tensor, kind) in enumerate(cluster.run(lambda comm: (torch.arange(comm.rank + 1), Custom))):
        assert torch.equal(tensor, torch.arange(rank + 1))
        assert kind is Custom


def test_the_processes_live_on_from_run_to_run_and_after_failures(process_backend: str) -> None:
    with LocalCluster(2, process_backend) as cluster:
        first = cluster.run(pid_of)
        assert os.getpid() not in first
        assert cluster.run(pid_of) == first
        with pytest.raises(RankFailed, match="SystemExit"):
            cluster.run(lambda comm: sys.exit(3))
        with pytest.raises(TypeError, match="must be picklable"):
            cluster.run(lambda comm: threading.Lock())
        assert cluster.run(pid_of) == first


def test_the_ranks_have_our_environment_and_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_ONE", "1")
    monkeypatch.chdir(tmp_path)
    with LocalCluster(2, environ={"HOLDFAST_TEST_TWO": "2"}, threads=3) as cluster:
        found = cluster.run(
            lambda comm: (
                os.environ["HOLDFAST_TEST_ONE"],
                os.environ["HOLDFAST_TEST_TWO"],
                str(Path.cwd()),
                torch.get_num_threads(),
                os.environ["HOLDFAST_CHECK"],
            )
        )
    assert found == [("1", "2", str(tmp_path), 3, "1")] * 2


def test_output_of_ranks_and_of_a_job_is_shown_with_their_names_unless_echo_is_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(session: Session) -> None:
        for attempt in session.steps(1):
            with attempt:
                print("at work")

    with LocalCluster(2) as cluster:
        cluster.run(lambda comm: print("hello from", comm.rank))
        assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
        cluster.start(work).results()
        assert capsys.readouterr().out.count("at work") == 2
    with LocalCluster(2, echo=False) as cluster:
        cluster.run(lambda comm: print("hello"))
        assert (cluster.logs / "rank-1.log").read_text() == "hello\n"
    assert capsys.readouterr().out == ""


def test_a_closed_cluster_can_be_used_again_and_closing_ends_a_stopped_rank_and_what_ranks_have_started() -> None:
    cluster = LocalCluster(2)
    first = cluster.run(pid_of)
    children = cluster.run(lambda comm: subprocess.Popen(["sleep", "600"]).pid)
    assert all(Path(f"/proc/{child}").exists() for child in children)
    os.kill(first[0], signal.SIGSTOP)
    cluster.close()
    cluster.close()
    assert all(_gone(pid) for pid in (*first, *children))
    assert set(cluster.run(pid_of)).isdisjoint(first)
    cluster.close()


def test_functions_of_a_script_work(tmp_path: Path) -> None:
    text = """
        import helper
        from holdfast.harness import LocalCluster

        OFFSET = 10

        class Box:
            def __init__(self, value): self.value = value

        def work(comm):
            return Box(helper.double(comm.rank) + OFFSET)

        with LocalCluster(2) as cluster:
            boxes = cluster.run(work)
            assert all(type(box) is Box for box in boxes)
            print([box.value for box in boxes])
    """
    (tmp_path / "helper.py").write_text("def double(x): return 2 * x\n")
    done = run_forked(textwrap.dedent(text), [script(tmp_path, text)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[10, 12]\n", "")


# -- failures


def test_an_exception_is_raised_as_its_own_type_with_rank_and_traceback(cluster: LocalCluster) -> None:
    def fail(comm: comms.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("no such thing")
        comm.barrier()

    with pytest.raises(KeyError, match=r"rank 1: .*no such thing") as caught:
        cluster.run(fail)
    error = caught.value
    assert isinstance(error, RankFailed)
    assert (error.rank, type(error.__cause__)) == (1, KeyError)
    assert "in fail" in error.trace

    def fail_with_fields(comm: comms.Communicator) -> None:
        raise Custom(7, hint="look here")

    with pytest.raises(Custom, match="code 7") as custom:
        cluster.run(fail_with_fields)
    assert (custom.value.code, custom.value.hint) == (7, "look here")
    assert cluster.run(total) == [1.0, 1.0], "the cluster goes on"


def test_the_cause_is_raised_and_a_rank_that_is_blocked_in_an_op_is_freed(backend: str) -> None:
    def fail(comm: comms.Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.2)
            raise ValueError("the cause")
        comm.recv(torch.zeros(1), 1)

    with LocalCluster(2, backend, timeout=2 * PATIENCE, grace=2 * PATIENCE) as cluster:
        before = cluster.run(pid_of)
        began = time.monotonic()
        with pytest.raises(ValueError, match="rank 1: ValueError: the cause"):
            cluster.run(fail)
        assert time.monotonic() - began < PATIENCE
        assert cluster.run(pid_of) == before, "it was freed, not killed"


def test_a_rank_that_does_not_return_is_ended_after_the_grace(process_backend: str) -> None:
    def fail(comm: comms.Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)  # so that the other rank is out of the barrier
            raise ValueError("the cause")
        time.sleep(600)

    with LocalCluster(2, process_backend, grace=0.2) as cluster:
        before = cluster.run(pid_of)
        with pytest.raises(ValueError, match="the cause"):
            cluster.run(fail)
        after = cluster.run(pid_of)
    assert after[0] != before[0]
    assert started_together(process_backend) or after[1] == before[1]


def test_a_run_that_takes_too_long_says_where_the_ranks_are(process_backend: str) -> None:
    def idle_away(comm: comms.Communicator) -> None:
        if comm.rank == 1:
            time.sleep(600)

    with LocalCluster(2, process_backend, timeout=4.0) as cluster:
        with pytest.raises(RunTimeout, match="idle_away") as caught:
            cluster.run(idle_away)
        assert caught.value.ranks == (1,)
        assert isinstance(caught.value, TimeoutError)
        assert cluster.run(total) == [1.0, 1.0]


def test_the_death_of_a_rank_is_raised_as_rank_died_and_outcomes_has_the_error_of_each_survivor(
    process_backend: str,
) -> None:
    def die(comm: comms.Communicator) -> str:
        try:
            comm.barrier()  # gloo's ranks do not wait for each other while they connect
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
        except comms.PeerFailed as error:
            return f"lost {error.ranks}"
        return "did not notice"

    with LocalCluster(3, process_backend) as cluster:
        before = cluster.run(pid_of)
        with pytest.raises(comms.PeerFailed, match="SIGKILL") as caught:
            cluster.run(die)
        assert isinstance(caught.value, RankDied)
        assert caught.value.ranks == (1,)
        assert caught.value.exit.signal == signal.SIGKILL
        after = cluster.run(pid_of)
        assert after[1] != before[1], "a new process stands in its place"
        assert started_together(process_backend) or (after[0], after[2]) == (before[0], before[2])
        os.kill(after[0], signal.SIGKILL)  # between two runs
        assert _gone(after[0])
        assert cluster.run(total) == [3.0] * 3
        outcomes = cluster.outcomes(die)
    assert [outcome.value for outcome in outcomes] == ["lost (1,)", None, "lost (1,)"]
    assert isinstance(outcomes[1].error, RankDied)


def test_an_early_exit_shows_its_status_and_last_output_and_a_crash_its_stack(process_backend: str) -> None:
    def leave(comm: comms.Communicator) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)

    def crash(comm: comms.Communicator) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with LocalCluster(1, process_backend, echo=False) as cluster:
        with pytest.raises(RankDied, match="status 7") as left:
            cluster.run(leave)
        assert "last words" in str(left.value)
        with pytest.raises(RankDied, match="SEGV") as crashed:
            cluster.run(crash)
        assert "in crash" in str(crashed.value)


# -- the zygote


PARENT = """
    import sys, time
    from holdfast.harness import LocalCluster; from holdfast.ft.processes import zygote_client
    cluster = LocalCluster(2)
    print(*cluster.run(lambda comm: __import__("os").getpid()), zygote_client.zygote_pid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_parent(number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(word) for word in next_line(parent.stdout).split()]
    assert parent.stdout is not None and len(pids) == 3
    parent.send_signal(number)
    parent.wait(PROGRAM_SECONDS)
    parent.stdout.close()
    assert all(_gone(pid) for pid in pids)


def test_nothing_outlives_the_zygote() -> None:
    with LocalCluster(2) as cluster:
        pids = cluster.run(pid_of)
        zygote = zygote_client.zygote_pid()
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        assert all(_gone(pid) for pid in pids)
        assert cluster.run(total) == [1.0, 1.0], "the next run has a new zygote"
        assert zygote_client.zygote_pid() != zygote


def test_a_module_that_starts_a_thread_is_imported_by_each_process_itself_and_one_that_is_not_there_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork of a zygote with threads would lose them, with the locks that they hold."""
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    zygote_client.shut_down()
    try:
        with pytest.raises(zygote_client.StartFailed, match="No module named 'there_is_no_such_module'"):
            zygote_client.zygote().preload("there_is_no_such_module")
        with pytest.raises(zygote_client.StartedThreads, match="importing starts_a_thread started threads"):
            zygote_client.zygote().preload("starts_a_thread")
        first = zygote_client.zygote_with("wave", "starts_a_thread").pid
        assert "each process imports starts_a_thread itself" in caplog.text
        threads = Path(f"/proc/{first}/task")
        assert len(list(threads.iterdir())) == 1
        assert zygote_client.zygote_with("wave", "starts_a_thread").pid == first, "no new one for each process"
    finally:
        zygote_client.shut_down()
    assert not Path(f"/proc/{first}").exists()


def _gone(pid: int, patience: float = 10.0) -> bool:
    """True once the process is no more."""
    return becomes_true(lambda: not Path(f"/proc/{pid}").exists(), patience, interval=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "at least one rank"),
        ({"size": 2, "spares": -1}, "negative"),
        ({"size": 2, "timeout": 0.0}, "positive"),
        ({"size": 2, "grace": -1.0}, "positive"),
        ({"size": 2, "threads": 0}, "threads"),
        ({"size": 2, "backend": "carrier-pigeon"}, "known are"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(comms.BackendUnavailable if "backend" in arguments else ValueError, match=message):
        LocalCluster(**arguments)


def test_a_job_of_threads_is_unsupported() -> None:
    with LocalCluster(2, "inproc") as cluster, pytest.raises(comms.Unsupported, match="shm"):
        cluster.start(lambda session: None)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "name"),
        Custom(3, hint="hint"),
        comms.OpTimeout("barrier", 4, 1.5, (2,)),
        comms.PeerFailed((1, 2), "seen"),
        comms.Revoked(3),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        comms.HoldfastError("root"),
        StopIteration(4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_with_all_fields(error: Exception) -> None:
    there = unpack_error(pack_error(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert there.__dict__ == error.__dict__
    raised_again = comms.errors.again(error)
    assert type(raised_again) is type(error) and raised_again.args == error.args
    assert str(raised_again) == str(error) and raised_again.__dict__ == error.__dict__
    failure = rank_failure(3, there, "the trace")
    assert isinstance(failure, type(error)) and isinstance(failure, RankFailed)
    assert str(failure).startswith("rank 3: ") and str(failure).endswith("the trace")
    again = pickle.loads(pickle.dumps(failure))
    assert str(again) == str(failure)
    assert isinstance(again, type(error))


def test_an_error_that_cannot_be_pickled_travels_as_text() -> None:
    there = unpack_error(pack_error(ValueError(threading.Lock())))
    assert type(there) is ValueError
    assert "lock" in str(there)


def train(session: Session, steps: int, pause: float = 0.0) -> tuple[int | None, float, int]:
    """Sum the numbers of all shards in each step; (rank, sum over all steps, pid)."""
    total = 0.0
    for attempt in session.steps(steps):
        with attempt:
            time.sleep(pause)
            tensor = torch.tensor([float(sum(attempt.shards))])
            attempt.comm.all_reduce(tensor)
        if attempt.committed:
            total += float(tensor)
    return session.rank, total, os.getpid()


def test_a_job_tells_its_pids_and_events_and_refuses_a_rank_out_of_range_and_a_cut_without_links() -> None:
    with LocalCluster(2, spares=1) as cluster:
        job = cluster.start(train, 50, 0.02)
        pids = [job.pid(rank) for rank in range(2)]
        assert set(pids) <= {process.pid for process in job.processes}
        assert len(job.processes) == 3
        with pytest.raises(comms.Unsupported, match=r"kill\(rank\)"):
            job.partition([0], [1])
        with pytest.raises(ValueError, match="out of range"):
            job.kill(2)
        assert [(rank, pid) for rank, _, pid in job.results()] == list(enumerate(pids)), "a spare gives no result"
        events = job.events()
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    committed = [(event["pid"], event["step"]) for event in events if event["kind"] == "committed"]
    assert len(committed) == len(set(committed)) == 2 * 50


def test_the_view_of_a_job_is_waited_for_while_its_register_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    away = RegisterAway("etcd://host/job", "no answer within 1 s")
    with LocalCluster(1) as cluster:
        job = cluster.start(train, 1)
        view = job.view()
        monkeypatch.setattr(job, "_register", Mock(watch=Mock(side_effect=[away, away, view])))
        assert job.view() == view
        monkeypatch.setattr(job, "_register", Mock(watch=Mock(side_effect=away)))
        with pytest.raises(RegisterAway, match="no answer"):
            job.view(timeout=0.2)
        monkeypatch.undo()
        job.results()


def test_two_jobs_run_side_by_side_and_a_paused_rank_goes_on_when_it_is_resumed() -> None:
    with LocalCluster(2) as cluster:
        job, other = cluster.start(train, 100, 0.005), cluster.start(train, 5)
        job.wait_for("committed", step=5)
        pid = job.pause(1)
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        assert job.resume(1) == pid
        assert [total for _, total, _ in other.results()] == [5.0, 5.0]
        assert [total for _, total, _ in job.results()] == [100.0, 100.0]


# -- failures


def test_results_that_do_not_come_in_time_say_where_the_ranks_are_and_the_death_of_all_processes_is_raised() -> None:
    def dawdle(session: Session) -> None:
        for attempt in session.steps(1):
            with attempt:
                time.sleep(600)

    with LocalCluster(2) as cluster:
        job = cluster.start(dawdle)
        job.view()
        for _ in range(2):
            with pytest.raises(RunTimeout, match="in dawdle") as caught:
                job.results(timeout=0.5)
            assert caught.value.ranks == (0, 1)
        for process in job.processes:
            process.kill()
        with pytest.raises(RankDied, match="SIGKILL"):
            job.results()


def test_closing_ends_a_running_job() -> None:
    with LocalCluster(2) as cluster:
        job = cluster.start(train, 100_000)
        pids = [job.pid(rank) for rank in range(2)]
        files = job.directory
        job.close()
        job.close()
        assert not files.exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_spare_stands_by_once_all_members_that_it_told_have_welcomed_it() -> None:
    told = an_event("spare", "spare", epoch=2, to=["first", "second"])
    first, second = (an_event("welcomed", by, 2.0, spare="spare") for by in ("first", "second"))
    assert standing_by([]) == standing_by([told]) == standing_by([told, first, first]) == set()
    assert standing_by([second, told, first]) == {"spare"}
