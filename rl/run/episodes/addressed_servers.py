"""The work of environment servers that ran before the run, and may run on other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from holdfast.comms.transport.liveness import this_host
from holdfast.rl.environments.client import websocket_url
from holdfast.rl.environments.work_channel import NoWorkChannel, ask_work
from holdfast.rl.run.run_events import ProcessLost, ProcessStarted
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.work_log import WorkReport


@dataclass(slots=True)
class _Server:
    """What is known of a server. `mark` tells one start of it from the next."""

    url: str
    name: str
    pid: int = 0
    host: str = ""
    mark: str = ""
    since: int | None = None
    starts: int = 0
    silent: bool = False


class AddressedServers:
    """Asks the servers at some URLs what they did. Each is a process of the run from its first answer on.

    Servers that are no program of ours tell nothing, and are asked once.
    """

    def __init__(self, urls: Iterable[str], role: str, telemetry: RunTelemetry) -> None:
        self._role, self._telemetry = role, telemetry
        self._servers = [_Server(url, _place(url)) for url in urls]

    async def work(self) -> Mapping[str, WorkReport]:
        """What each server did since the last call, without those that do not answer. The first call begins."""
        asked = [each for each in self._servers if not each.silent]
        answers = await asyncio.gather(*map(self._ask, asked))
        return {name: report for name, report in answers if report is not None}

    async def _ask(self, server: _Server) -> tuple[str, WorkReport | None]:
        try:
            answer = await ask_work(server.url, server.since)
            if answer is not None and answer.server != server.mark:
                # What another start did is not what was asked for: begin there.
                answer = answer if server.since is None else await ask_work(server.url, None)
        except NoWorkChannel:
            server.silent = True
            return server.name, None
        if answer is None:
            return server.name, None
        if answer.server != server.mark:
            self._started(server, answer.server, "" if answer.host == this_host() else server.url, answer.pid)
        server.since = answer.next
        return server.name, answer.report

    def _started(self, server: _Server, mark: str, host: str, pid: int) -> None:
        now, before, role = self._telemetry.now(), server.name, self._role
        replaces = before if server.starts else ""
        if server.starts:
            how = "another process serves at its address"
            self._telemetry.emit(
                ProcessLost(time=now, name=before, role=role, host=server.host, pid=server.pid, how=how)
            )
            server.name = f"{_place(server.url)}, start {server.starts + 1}"
        server.starts, server.mark, server.host, server.pid = server.starts + 1, mark, host, pid
        self._telemetry.emit(
            ProcessStarted(time=now, name=server.name, role=role, host=host, pid=pid, replaces=replaces)
        )


def _place(url: str) -> str:
    """The host and the port of a server."""
    return urlsplit(websocket_url(url)).netloc.rpartition("@")[2]
