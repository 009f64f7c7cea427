"""The environment of a run: servers as replicas of a service, or servers that run already; never in the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from urllib.parse import urlencode

from holdfast.comms.errors import again
from holdfast.ft import faultpoints
from holdfast.ft.listen_address import choose_address, local_addresses
from holdfast.rl.actors.engine import endpoint
from holdfast.rl.actors.errors import EndpointFailed, ServiceFailed
from holdfast.rl.actors.service import ReplicaEvent, ServiceReplica
from holdfast.rl.config.run_config import EnvironmentConfig, RunConfig
from holdfast.rl.environments.client import EnvironmentClient, EnvironmentPool
from holdfast.rl.environments.registry import check_environment, environment_factory
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.errors import EnvironmentFailed, UnknownEnvironment
from holdfast.rl.run.services import RunServices
from holdfast.rl.telemetry import WorkReport

ROLE = "environment"
START_SECONDS = 60.0
"""Seconds in which a server must have tried its environment, and listen."""
LEASE_SECONDS = 3600.0
"""How long a server keeps an episode while the policy does not go on."""
_MARGIN = 2.0
"""Seconds by which a client waits longer than the server, which knows more of what hangs."""
_LOOK_SECONDS = 1.0


class ServedEnvironment:
    """An actor that serves an environment to clients. Once all its sessions hang, its process ends.

    If it is `reached` from other hosts, it listens on the address of its own that HOLDFAST_INTERFACE chooses.
    """

    def __init__(self, name: str, sessions: int, timeout: float, reached: bool) -> None:
        faultpoints.arm_from_environment()
        self._name, self._sessions, self._timeout, self._reached = name, sessions, timeout, reached
        self._open = contextlib.AsyncExitStack()
        self._server: EnvironmentServer | None = None

    @endpoint(idempotent=True)
    async def listen(self) -> str:
        """The URL of the server, which is started at the first call. Raises `UnknownEnvironment`, `AddressNeeded`."""
        if self._server is None:
            why = "other hosts play at this server" if self._reached else ""
            interface = os.environ.get("HOLDFAST_INTERFACE", "") if self._reached else ""
            await asyncio.to_thread(check_environment, self._name)
            self._server = await self._open.enter_async_context(
                EnvironmentServer(
                    environment_factory(self._name),
                    self._name,
                    host=choose_address(interface, why, local_addresses()),
                    sessions=self._sessions,
                    lease=LEASE_SECONDS,
                    timeout=self._timeout,
                )
            )
            looking = asyncio.create_task(_end_when_all_hang(self._server))
            self._open.callback(looking.cancel)
        return self._server.url

    async def work(self) -> WorkReport:
        """What this server did since the last call."""
        if self._server is None:
            return WorkReport(spans=(), cpu=time.process_time())
        return self._server.work.report()

    async def close(self) -> None:
        """End the server, and with it all sessions. Idempotent."""
        await self._open.aclose()


async def _end_when_all_hang(server: EnvironmentServer) -> None:
    while (health := server.health()).status != "unhealthy":
        await asyncio.sleep(_LOOK_SECONDS)
    print(f"all {health.hung} sessions of {health.environment} hang: the process ends", file=sys.stderr, flush=True)
    os._exit(1)


class EnvironmentServers:
    """The source of a run's sessions. `start` before use; `close` ends the servers that it started."""

    def __init__(self, config: RunConfig, services: RunServices) -> None:
        self._config, self._services = config.environment, services
        self._reached = bool(config.engine.hosts)
        self._urls: dict[str, str] = {}
        self._pool: EnvironmentPool | None = None

    async def start(self) -> EnvironmentPool:
        """Start what must run. Raises `UnknownEnvironment`."""
        config, name = self._config, full_name(self._config)
        if not config.servers:
            if all(found := await asyncio.gather(*(_why_not(url, config.timeout) for url in config.addresses))):
                raise UnknownEnvironment(name, f"no server of it can be used: {'; '.join(found)}")
            self._pool = _pool(config, config.addresses, keep=False)
            return self._pool
        try:
            await self._services.start(
                ROLE,
                ServedEnvironment,
                *(name, config.sessions, config.timeout, self._reached),
                num_replicas=config.servers,
                environ={},  # the job is none of the environment's business
                prepare=self._listen,
                observer=self._hear,
                start_failures=3,
            )
        except ServiceFailed as error:
            raise UnknownEnvironment(name, f"no server of it can be started: {error}") from error
        # No other client has a use for its own servers, so sessions are kept.
        self._pool = _pool(config, tuple(self._urls.values()), keep=True)
        return self._pool

    async def close(self) -> None:
        """Leave all servers; those that it started end with their service. Idempotent."""
        if self._pool is not None:
            await self._pool.close()

    async def _listen(self, replica: ServiceReplica) -> None:
        try:
            self._urls[replica.name] = await replica.call("listen", timeout=START_SECONDS)
        except EndpointFailed as error:
            if isinstance(error.__cause__, UnknownEnvironment):  # which says all: its traceback is holdfast's
                raise again(error.__cause__) from None
            raise
        self._use()

    def _hear(self, event: ReplicaEvent) -> None:
        if event.kind in ("lost", "start_failed"):
            self._urls.pop(event.replica.name, None)
            self._use()

    def _use(self) -> None:
        """Tell the pool of the servers; while there is none, it looks for the last ones."""
        if self._pool is not None and self._urls:
            self._pool.set_servers(self._urls.values())


def check_name(config: EnvironmentConfig) -> None:
    """Raise `UnknownEnvironment` if the name, or an option, is not one that there is; the user's code is imported."""
    if not config.addresses:
        environment_factory(full_name(config))


def _pool(config: EnvironmentConfig, urls: tuple[str, ...], *, keep: bool) -> EnvironmentPool:
    return EnvironmentPool(urls, timeout=config.timeout + _MARGIN, limit=config.sessions, keep=keep)


async def _why_not(url: str, timeout: float) -> str:
    """Begin an episode at a server; why it cannot, or nothing."""
    try:
        async with EnvironmentClient(url, timeout=timeout) as client:
            await client.reset(0)
    except EnvironmentFailed as error:
        return str(error)
    return ""


def full_name(config: EnvironmentConfig) -> str:
    """The environment's name in the registry, with its options."""
    options = {key: str(value).lower() if isinstance(value, bool) else value for key, value in config.arguments.items()}
    return f"{config.name}?{urlencode(options)}" if options else config.name
