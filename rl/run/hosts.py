"""What a run on several hosts has besides one on this host: a register elsewhere, and transports between hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from holdfast.ft.timeouts import Timeouts
from holdfast.rl.actors.engine import ActorProcess
from holdfast.rl.actors.errors import ActorHostAway
from holdfast.rl.config.run_config import RunConfig

UCX_TLS = "UCX_TLS"
MANY_HOSTS = "tcp,self"
"""The transports of UCX that every network has."""


def new_register(url: str) -> str | None:
    """The register of one driver of a run. Each driver has a job of its own, under a name that no other one has.

    None without a URL: a file.
    """
    if not url:
        return None
    place, mark, options = url.partition("?")
    return f"{place}-{secrets.token_hex(6)}{mark}{options}"


def between_hosts(config: RunConfig) -> dict[str, str]:
    """The variables by which the run's processes reach other hosts. UCX has them in this process too."""
    planes = {} if config.store.plane == "auto" else {"HOLDFAST_PLANE": config.store.plane}
    if not config.engine.hosts:
        return planes
    return {**planes, UCX_TLS: os.environ.setdefault(UCX_TLS, MANY_HOSTS)}


def session_options(config: RunConfig) -> dict[str, Timeouts]:
    """The options of the trainers' session: between hosts, a trainer may be as silent as a host."""
    if not config.engine.hosts:
        return {}
    usual = Timeouts()
    suspect = max(config.engine.silence, usual.suspect)
    return {
        "timeouts": replace(
            usual, suspect=suspect, rebuild=usual.rebuild + suspect, operation=usual.operation + suspect
        )
    }


class HostTurns:
    """Gives each new process the next host in turn, or the one after that if it is away."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._turns: Sequence[str | None] = hosts or (None,)
        self._next = itertools.cycle(self._turns)

    async def start(self, start: Callable[[str | None], Awaitable[ActorProcess]]) -> ActorProcess:
        """Await `start` with a host. Raises `ActorHostAway` if all of them are, and what `start` raises."""
        for _ in self._turns[1:]:
            with contextlib.suppress(ActorHostAway):
                return await start(next(self._next))
        return await start(next(self._next))
