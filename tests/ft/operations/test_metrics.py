"""Metrics: a scrape of a real job's endpoint, beside its flight recordings, and invalid settings."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from holdfast.comms.errors import HoldfastError
from holdfast.ft.event_lines import read_events, to_record
from holdfast.ft.telemetry import flight
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight import OpStatus, RecordingState
from holdfast.ft.telemetry.metrics import Metrics, OpTally, ports
from holdfast.harness import LocalCluster
from support.programs.forked_programs import run_forked

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Samples:
    """The endpoint's values, by name and labels."""
    assert url.startswith("http://127.0.0.1:")
    text = urllib.request.urlopen(url, timeout=5.0).read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _train(session: Any, scraped_at: int) -> Samples:
    """Steps with one kill in the middle; the survivors scrape themselves near the end."""
    victim, said = False, {}
    for attempt in session.steps(scraped_at + 1):
        victim = victim or (attempt.step == 0 and attempt.rank == 1)
        if attempt.step == scraped_at:
            logged = map(to_record, read_events(Path(os.environ["HOLDFAST_LOG_DIR"])))
            mine = [event for event in logged if event["process"] == session.identity]
            [url] = [event["url"] for event in mine if event["kind"] == "metrics"]
            said = scrape(url)
        with attempt:
            if attempt.step == 2 and victim:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            attempt.comm.all_reduce(torch.ones(256))
    return said


def test_a_job_that_lost_a_rank_has_counted_all_and_recorded_the_ops_of_all_ranks() -> None:
    with LocalCluster(3, "shm", environ={"HOLDFAST_METRICS_PORT": "0"}) as cluster, cluster.start(_train, 5) as job:
        results = job.results(timeout=60.0)
        recordings = [flight.read(path) for path in flight.find(job.directory / "events")]
    for said in results:
        assert said["holdfast_members", ()] == 2
        assert said["holdfast_step", ()] == 4
        assert said["holdfast_epochs_total", ()] == 2
        assert said["holdfast_failures_detected_total", ()] == 1
        assert said["holdfast_rebuild_seconds_count", ()] == 2
        for name in ("detection", "recovery", "resume"):
            assert said[f"holdfast_{name}_seconds_count", ()] == 1
            assert 0 < said[f"holdfast_{name}_seconds_sum", ()] < 30
        assert said["holdfast_recovery_seconds_sum", ()] <= said["holdfast_resume_seconds_sum", ()]
        ops = said["holdfast_op_seconds_count", (("op", "all_reduce"),)]
        assert ops == 6  # five steps, one of them twice
        assert said["holdfast_op_seconds_bucket", (("le", "+Inf"), ("op", "all_reduce"))] == ops
        assert said["holdfast_op_bytes_total", (("op", "all_reduce"),)] == ops * 1024
        assert said["holdfast_ops_failed_total", (("op", "all_reduce"),)] == 1
        assert ("holdfast_heartbeats_missed_total", ()) in said
    killed, *survivors = sorted(recordings, key=lambda recording: recording.state)
    assert [each.state for each in (killed, *survivors)] == [RecordingState.OPEN, *[RecordingState.CLOSED] * 2]
    assert (killed.ops[-1].signature.op, killed.ops[-1].step, killed.step) == ("barrier", 1, 2)
    named = []
    for survivor in survivors:
        assert len({op.communicator.epoch for op in survivor.ops}) == 2
        (failed,) = [op for op in survivor.ops if op.status != OpStatus.DONE]
        assert (failed.signature.op, failed.step) == ("all_reduce", 2)
        named.append(failed.failed_ranks)
    assert (1,) in named and set(named) <= {(1,), ()}, "the other one may hear first that the epoch is over"


def metrics(asked: str, tally: OpTally | None = None) -> Metrics:
    return Metrics(asked, "job", EventLog("p1", ""), tally or OpTally(None), lambda: 7)


def test_buckets_count_ops_up_to_their_bound_until_the_server_is_closed() -> None:
    tally = OpTally(None)
    journal = tally.journal("job", 1, 0, 2, "shm")
    for nap in (0.0, 0.0, 0.3):
        journal.enter("barrier", 1, 0, None, None, -1)
        time.sleep(nap)
        journal.leave(None)
    served = metrics("0", tally)
    said = scrape(served.url)
    served.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(served.url, timeout=1.0)
    buckets = [v for (name, labels), v in said.items() if name == "holdfast_op_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert said["holdfast_op_seconds_bucket", (("le", "0.262144"), ("op", "barrier"))] == 2
    assert said["holdfast_op_seconds_bucket", (("le", "+Inf"), ("op", "barrier"))] == 3
    assert said["holdfast_op_seconds_sum", (("op", "barrier"),)] >= 0.3
    assert said["holdfast_heartbeats_missed_total", ()] == 7


def test_each_process_takes_the_first_free_port_of_a_range_and_none_left_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HoldfastError, match=f"no port of {port} is free"):
            metrics(str(port))
        served = metrics(f"{port}-{port + 50}")
        try:
            assert served.url != f"http://127.0.0.1:{port}/metrics"
            assert scrape(served.url)["holdfast_rank", ()] == -1
        finally:
            served.close()


@pytest.mark.parametrize("asked", ["http", "70000", "-1", "10-5", "0-9", "1-2-3", ""])
def test_a_setting_that_names_no_ports_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="HOLDFAST_METRICS_PORT"):
        ports(asked)


def test_numbers_stay_in_the_process_whatever_another_library_has_set(tmp_path: Path) -> None:
    """Otherwise prometheus_client would keep them in files, with the counts of earlier processes of the same number."""
    (tmp_path / "there").mkdir()
    text = """
import sys, urllib.request
from holdfast.ft.events import StepCommitted, ViewInstalled
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.metrics import Metrics, OpTally
events = EventLog("p0")
metrics = Metrics("0", "job", events, OpTally(None), lambda: 0)
events.emit(StepCommitted(step=3, epoch=1))
events.emit(ViewInstalled(epoch=1, members=("p0",), rank=0))
print(urllib.request.urlopen(metrics.url).read().decode())
metrics.close()
"""
    for folder in ("there", "there", "missing"):
        environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / folder)}
        done = run_forked(text, ["program"], environ=environ)
        assert done.returncode == 0, done.stderr
        assert 'holdfast_steps_committed_total{how="normal"} 1.0' in done.stdout
        assert "holdfast_epochs_total 1.0" in done.stdout
        assert 'holdfast_process_info{job="job"' in done.stdout
    assert list((tmp_path / "there").iterdir()) == []
