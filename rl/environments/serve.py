"""`serve`: an environment server by name, for a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from holdfast.rl.environments.call_thread import CallThread
from holdfast.rl.environments.registry import check_environment, environment_factory
from holdfast.rl.environments.server import EnvironmentServer


async def serve(
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    sessions: int = 64,
    lease: float = 300.0,
    timeout: float = 30.0,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve the environment of this name until the task is cancelled; `on_start` is told the URL.

    Before, it tries one.
    Raises UnknownEnvironment, and OSError for an address that is taken.
    """
    trying = CallThread(name)  # a daemon: an environment that hangs does not keep Ctrl-C from ending the process
    await trying.run(partial(check_environment, name))
    trying.end(lambda: None)
    factory = environment_factory(name)
    async with EnvironmentServer(
        factory, name, host=host, port=port, sessions=sessions, lease=lease, timeout=timeout
    ) as server:
        if on_start is not None:
            on_start(server.url)
        await asyncio.get_running_loop().create_future()
