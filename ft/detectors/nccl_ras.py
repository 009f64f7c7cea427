"""`nccl_ras`: asks NCCL's own service, RAS, which processes of the job it has lost.

Each process with a communicator of NCCL (2.24 and later) has a thread that watches its peers, and one of them answers
clients of its host at NCCL_RAS_ADDR, localhost:28028 by default. The protocol is one of lines, the answer JSON (2.28
and later). A query goes to all processes of the job, so one member asks, now and then, and each member with a failed op
that names no culprit. What NCCL considers dead is reported as a suspicion: other processes have to agree.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from typing import Annotated

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError, OpTimeout, PeerFailed, Unsupported, describe
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.membership.view import Member, View

BACKENDS = ("nccl", "rccl")
"""The backends whose processes have the service."""

DEFAULT_ADDRESS = "localhost:28028"
PROTOCOL = 2
PERIOD_SECONDS = 10.0
"""How often one member asks while nothing has failed."""

LEG_SECONDS = 2.0
"""How long the service waits for the other processes; a query lasts a few times that at most."""

QUERY_SECONDS = 10.0
MOST_BYTES = 32 << 20
"""Some 300 bytes a rank and communicator: what 8,192 ranks in twelve communicators fill."""

_LINE_BYTES = 4096
_log = logging.getLogger("holdfast.ft")

Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]


class MissingStatus(msgspec.Struct, frozen=True):
    """What the service says of a rank from which it has no data."""

    unresponsive: bool
    considered_dead: bool


class MissingRank(msgspec.Struct, frozen=True):
    """A rank from which the service has no data. `pid` is -1 if it does not know the process."""

    rank: Count
    host: str
    pid: Count
    status: MissingStatus


class PresentRank(msgspec.Struct, frozen=True):
    """A rank that has answered."""

    rank: Count
    host: str
    pid: Count


class RasCommunicator(msgspec.Struct, frozen=True):
    """One communicator of NCCL, with the ranks that have answered and those that have not."""

    hash: str
    size: Count
    ranks: list[PresentRank]
    missing_ranks: list[MissingRank]


class RasStatus(msgspec.Struct, frozen=True):
    """The answer to STATUS; fields that are not used here are left out."""

    nccl_version: str
    communicators: list[RasCommunicator]


_decoder = msgspec.json.Decoder(RasStatus)
_WITHOUT_COMMA = re.compile(rb'(\d)(\s+"status")')
"""Where NCCL 2.28.9 leaves out a comma: after the last number of each rank from which it has no data."""


def decode(answer: bytes) -> RasStatus:
    """Decode the answer to STATUS. Raises `CorruptData`, and `Unsupported` for a service that has no JSON."""
    _refuse_error(answer[:_LINE_BYTES].decode("utf-8", "replace"))
    try:
        return _decoder.decode(_WITHOUT_COMMA.sub(rb"\1,\2", answer))
    except UNDECODABLE as error:
        raise CorruptData(f"NCCL's RAS sent {len(answer)} bytes that are no status: {error}") from error


def _refuse_error(answer: str) -> None:
    """Raise `Unsupported` for the answer to a command that the service does not know."""
    if answer.startswith("ERROR"):
        raise Unsupported(f"JSON from NCCL's RAS, which says {answer.splitlines()[0]!r}", "use NCCL 2.28 or later")


async def query(address: str, seconds: float = QUERY_SECONDS) -> RasStatus:
    """Ask the service at `address` ("host:port") for its status, within `seconds`.

    Raises OSError, TimeoutError, `CorruptData` and `Unsupported`.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"NCCL_RAS_ADDR={address!r} is not host:port")
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_LINE_BYTES)
        try:
            greeting = await _say(reader, writer, f"CLIENT PROTOCOL {PROTOCOL}")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise CorruptData(f"{address} is not NCCL's RAS: it answers {greeting!r}")
            for command in (f"TIMEOUT {LEG_SECONDS:g}", "SET FORMAT json"):
                if (answer := await _say(reader, writer, command)).upper() != "OK":
                    _refuse_error(answer)
                    raise CorruptData(f"NCCL's RAS answers {answer!r} to {command!r}")
            writer.write(b"STATUS\n")
            body = bytearray()
            while piece := await reader.read(1 << 16):
                body += piece
                if len(body) > MOST_BYTES:
                    raise CorruptData(f"NCCL's RAS sent more than {MOST_BYTES} bytes")
        finally:
            writer.close()
    return decode(bytes(body))


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, command: str) -> str:
    """Send a command, and return the line that answers it."""
    writer.write(command.encode() + b"\n")
    try:
        line = await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise CorruptData(f"NCCL's RAS did not answer {command!r} with a line") from error
    return line.decode("utf-8", "replace").strip()


def lost_members(status: RasStatus, view: View, me: Member, *, unresponsive: bool) -> Iterator[tuple[Member, str]]:
    """Members of `view` that the service considers dead, with the evidence; `unresponsive` ones too if asked for.

    Only communicators that have this process count: the service of another job of this host may have answered.
    """
    reported: set[str] = set()
    for communicator in status.communicators:
        if not any(rank.pid == me.peer.pid for rank in communicator.ranks):
            continue
        for missing in communicator.missing_ranks:
            state = "dead" if missing.status.considered_dead else "unresponsive" if missing.status.unresponsive else ""
            if not state or (state == "unresponsive" and not unresponsive):
                continue
            member = _member_of(missing, view)
            if member is not None and member.id not in {me.id, *reported}:
                reported.add(member.id)
                yield (
                    member,
                    (
                        f"NCCL's RAS ({status.nccl_version}) considers rank {missing.rank} of communicator "
                        f"{communicator.hash}, process {missing.pid} of {missing.host}, {state}"
                    ),
                )


def _member_of(missing: MissingRank, view: View) -> Member | None:
    """The member with that process; None if several have its number, and its host does not tell which."""
    alike = [member for member in view.members if member.peer.pid == missing.pid]
    if len(alike) > 1:
        alike = [member for member in alike if member.address.rpartition(":")[0].strip("[]") == missing.host]
    return alike[0] if len(alike) == 1 else None


class NcclRasDetector(Detector):
    """Asks while the job runs over NCCL, in a task of the event loop, one query at a time."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self.address = os.environ.get("NCCL_RAS_ADDR", DEFAULT_ADDRESS)
        self._view: View | None = None
        self._due = 0.0
        self._op_failed = False
        self._query: asyncio.Task[None] | None = None
        self._complained = False

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._view = view if view is not None and view.job.backend in BACKENDS else None
        self._op_failed = False

    def look(self, now: float) -> None:
        view = self._view
        if view is None or (self._query is not None and not self._query.done()):
            return
        if self._op_failed or (now >= self._due and view.members[0].id == self.context.me.id):
            self._due = now + PERIOD_SECONDS
            self._query = asyncio.get_running_loop().create_task(self._ask(view, self._op_failed))
            self._op_failed = False

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        without_culprit = not (failure.ranks if isinstance(failure, PeerFailed) else ())
        if isinstance(failure, PeerFailed | OpTimeout) and without_culprit and self._view is not None:
            self._op_failed = True
            self.look(now)

    async def _ask(self, view: View, op_failed: bool) -> None:
        try:
            status = await query(self.address)
        except (OSError, TimeoutError, ValueError, HoldfastError) as error:
            self._complain(error)
            return
        if self._view is view:
            for member, evidence in lost_members(status, view, self.context.me, unresponsive=op_failed):
                self.context.suspect(member.id, evidence)

    def _complain(self, error: Exception) -> None:
        """Say once that the service does not answer: it is off with NCCL_RAS_ENABLE=0, and all else works on."""
        if not self._complained:
            self._complained = True
            _log.warning("NCCL's RAS at %s tells nothing of this job's processes: %s", self.address, describe(error))

    def close(self) -> None:
        if self._query is not None:
            self._query.cancel()
