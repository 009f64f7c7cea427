"""`nccl_ras`: what NCCL's RAS service tells of lost processes, over its socket from a service of this test."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import CorruptData, OpTimeout, PeerFailed, Unsupported
from holdfast.comms.transport.base import Peer
from holdfast.ft.detectors import nccl_ras
from holdfast.ft.detectors.nccl_ras import NcclRasDetector, RasStatus, decode, lost_members, query
from holdfast.ft.membership.view import Job, Member, Timeouts, View
from support.rpc_servers import in_a_loop
from support.views import detector_context


def member(number: int, pid: int, host: str) -> Member:
    return Member(f"m{number}", f"{host}:7000", Peer(f"boot-{host}", pid, 1))


MEMBERS = (
    member(0, 100, "10.0.0.1"),
    member(1, 101, "10.0.0.1"),
    member(2, 100, "10.0.0.2"),
    member(3, 103, "10.0.0.2"),
)


def view_of(backend: str = "nccl") -> View:
    job = Job("job", size=4, min_size=2, shards=4, backends=(backend,), backend=backend)
    return View(epoch=3, phase="running", job=job, members=MEMBERS, reason="test")


def rank(number: int, pid: int, host: str, **status: bool) -> dict[str, Any]:
    """A rank as NCCL writes it (src/ras/client_support.cc, 2.30)."""
    other = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    line = {"rank": number, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status or other}
    return line if status else {**line, "collective_counts": {"AllReduce": 7}}


def status_of(missing: list[dict[str, Any]], present: int = 100) -> bytes:
    ranks = [rank(0, present, "10.0.0.1")]
    communicator = {
        "hash": "0x1f", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 1, "missing_ranks_count": len(missing),
        "ranks": ranks, "missing_ranks": missing,
    }  # fmt: skip
    head = {"nccl_version": "2.30.7", "cuda_runtime_version": 13020, "timestamp": "2026-11-27 01:20:00"}
    tail = {"ras": {"collection_time_sec": 0.003, "timeouts_count": 0}}
    return msgspec.json.encode({**head, "communicators_count": 1, "communicators": [communicator], **tail})


DEAD = {"unresponsive": True, "considered_dead": True}
SILENT = {"unresponsive": True, "considered_dead": False}


@asynccontextmanager
async def service(
    answers: dict[str, bytes], asked: list[str] | None = None, keep_open: bool = False
) -> AsyncIterator[str]:
    """A RAS service that answers each command as `answers` says, by its first word; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError, ConnectionError):
            await converse(reader, writer)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            command = line.decode().strip()
            if asked is not None:
                asked.append(command)
            writer.write(answers.get(command.split()[0], b"OK\n"))
            if command == "STATUS" and not keep_open:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


HELLO = {"CLIENT": b"SERVER PROTOCOL 2\n"}


@in_a_loop
async def test_a_query_speaks_the_protocol_of_ncclras() -> None:
    asked: list[str] = []
    async with service({**HELLO, "STATUS": status_of([rank(3, 103, "10.0.0.2", **DEAD)])}, asked) as address:
        status = await query(address)
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]
    assert status.communicators[0].missing_ranks[0].status.considered_dead


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"CLIENT": b"HTTP/1.1 400 Bad Request\n"}, CorruptData, "is not NCCL's RAS"),
        ({"CLIENT": b"x" * 10_000}, CorruptData, "did not answer 'CLIENT PROTOCOL 2' with a line"),
        ({**HELLO, "SET": b"ERROR: Unknown command SET FORMAT json\n"}, Unsupported, "NCCL 2.28 or later"),
        ({**HELLO, "TIMEOUT": b"no\n"}, CorruptData, "answers 'no'"),
        ({**HELLO, "STATUS": b'{"nccl_version": "2.30"'}, CorruptData, "no status"),
        ({**HELLO, "STATUS": b""}, CorruptData, "0 bytes"),
        ({**HELLO, "STATUS": b"x" * 70_000}, CorruptData, "more than 65536 bytes"),
    ],
)
@in_a_loop
async def test_an_answer_that_is_none_is_a_typed_error(
    answers: dict[str, bytes], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_BYTES", 1 << 16)
    async with service(answers) as address:
        with pytest.raises(error, match=words):
            await query(address)


@in_a_loop
async def test_a_service_that_never_ends_its_answer_is_left() -> None:
    async with service({**HELLO, "STATUS": b"{"}, keep_open=True) as address:
        with pytest.raises(TimeoutError):
            await query(address, seconds=0.2)


@given(st.binary(max_size=400) | st.integers(0, 700).map(lambda end: status_of([rank(1, 101, "h", **DEAD)])[:end]))
def test_no_bytes_make_the_decoder_raise_another_error(answer: bytes) -> None:
    try:
        status = decode(answer)
    except (CorruptData, Unsupported):
        return
    assert isinstance(status, RasStatus)


def test_the_comma_that_nccl_2_28_9_leaves_out_before_a_missing_ranks_status_is_no_error() -> None:
    """As its service answered on a GPU when one of three ranks had been killed."""
    sound = status_of([rank(1, 101, "h", **DEAD)])
    answer = re.sub(rb',(\s*"status")', rb"\n         \1", sound)
    assert answer != sound
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer)
    assert decode(answer) == decode(sound)


def lost(missing: list[dict[str, Any]], *, unresponsive: bool = False, present: int = 100) -> list[str]:
    status = decode(status_of(missing, present))
    return [found.id for found, _ in lost_members(status, view_of(), MEMBERS[0], unresponsive=unresponsive)]


def test_a_dead_process_is_found_by_its_number_and_host() -> None:
    assert lost([rank(3, 103, "10.0.0.2", **DEAD)]) == ["m3"]
    assert lost([rank(2, 100, "10.0.0.2", **DEAD)]) == ["m2"], "not m0, which has the same number on another host"
    assert lost([rank(2, 100, "192.168.7.7", **DEAD)]) == [], "two have this number, and no host tells which"
    assert lost([rank(9, 999, "10.0.0.2", **DEAD), rank(8, -1, "unknown", **DEAD)]) == [], "no member of this view"
    assert lost([rank(0, 100, "10.0.0.1", **DEAD)]) == [], "this process lives"


def test_an_unresponsive_process_is_reported_only_once_an_op_has_failed() -> None:
    missing = [rank(1, 101, "10.0.0.1", **SILENT)]
    assert (lost(missing), lost(missing, unresponsive=True)) == ([], ["m1"])
    assert lost([rank(1, 101, "10.0.0.1", unresponsive=False, considered_dead=False)], unresponsive=True) == []


def test_the_service_of_another_job_of_the_host_says_nothing_here() -> None:
    assert lost([rank(3, 103, "10.0.0.2", **DEAD)], present=555) == []


def detector(
    address: str, suspected: list[tuple[str, str]], loop: asyncio.AbstractEventLoop, me: int = 0
) -> NcclRasDetector:
    suspect = {"suspect": lambda who, why: suspected.append((who, why))}
    found = NcclRasDetector(detector_context(MEMBERS[me], loop, timeouts=Timeouts(), **suspect))
    found.address = address
    return found


async def settled(found: NcclRasDetector) -> None:
    if found._query is not None:
        await found._query


@pytest.mark.parametrize("failure", [None, OpTimeout("all_reduce", 3, 1.0), PeerFailed((), "NCCL reports comm error")])
@in_a_loop
async def test_what_nccl_considers_dead_is_reported_to_all(failure: Any) -> None:
    """The first member asks now and then; each one does as soon as an op has failed without a culprit."""
    suspected: list[tuple[str, str]] = []
    me = 0 if failure is None else 1
    answer = status_of([rank(3, 103, "10.0.0.2", **DEAD)], present=MEMBERS[me].peer.pid)
    async with service({**HELLO, "STATUS": answer}) as address:
        found = detector(address, suspected, asyncio.get_running_loop(), me)
        found.follow(view_of(), MEMBERS)
        found.look(1.0)
        if failure is not None:
            assert found._query is None, "the first member asks"
            found.failed(view_of(), failure, 1.0)
        await settled(found)
        found.close()
    ((who, why),) = suspected
    assert who == "m3" and "considers rank 3" in why and "process 103 of 10.0.0.2, dead" in why


@in_a_loop
async def test_a_job_over_another_backend_or_with_a_culprit_asks_nothing() -> None:
    asked: list[str] = []
    async with service(HELLO, asked) as address:
        found = detector(address, [], asyncio.get_running_loop())
        found.follow(view_of("gloo"), MEMBERS)
        found.look(1.0)
        found.failed(view_of("gloo"), OpTimeout("all_reduce", 3, 1.0), 1.0)
        found = detector(address, [], asyncio.get_running_loop(), me=1)
        found.follow(view_of(), MEMBERS)
        found.failed(view_of(), PeerFailed((2,), "the kernel says"), 1.0)
        assert found._query is None and not asked


@in_a_loop
async def test_a_service_that_is_off_is_said_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with service(HELLO) as address:
        pass  # from here on nothing listens there
    found = detector(address, [], asyncio.get_running_loop())
    found.follow(view_of(), MEMBERS)
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 100.0):
            found.look(now)
            await settled(found)
    assert caplog.text.count("NCCL's RAS at 127.0.0.1") == 1
