"""Lets a foreign launcher's children be forks of the zygote: it starts a proxy for each.

The launcher (mpirun, Monarch's host) starts `proxy_command(...)` as if it were the process. The proxy sends its
environment and token over a Unix socket of its owner's, this process has the zygote fork, and the proxy ends as the
fork ends. If it ends first, as when the launcher kills it, the server says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.comms.system.files import bind_unix
from holdfast.ft.launch import proxy_program
from holdfast.ft.launch.held_directory import HeldDirectory

_LONGEST = 1 << 20


def proxy_command(token: str, path: str = "") -> list[str]:
    """The arguments of a Python that becomes the proxy with this token; `path` is the server's."""
    return ["-I", "-S", str(proxy_program.__file__), path, token]


class ProcessProxy:
    """A proxy that waits for its process. `environ` is what the launcher gave it; `gone` is set once it has ended."""

    def __init__(self, token: str, environ: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        self.token, self.environ = token, environ
        self.gone = asyncio.Event()
        self._writer = writer

    def end(self, code: int) -> None:
        """Let it end as the process did: with this status, or by the signal of a negative one."""
        with contextlib.suppress(OSError):
            self._writer.write(str(code).encode())
            self._writer.close()


class ProxyServer:
    """Hears proxies; `on_arrival` is called for each."""

    def __init__(self, on_arrival: Callable[[ProcessProxy], None]) -> None:
        self._on_arrival = on_arrival
        self._folder = HeldDirectory("holdfast-forks-")
        self.path = str(self._folder.path / "proxies")
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen in the running event loop."""
        listener = socket.socket(socket.AF_UNIX)
        bind_unix(listener, self.path)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_LONGEST)

    async def close(self) -> None:
        """Stop listening; those that still wait end. Idempotent."""
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._open):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None
        self._folder.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        proxy = None
        try:
            credentials = writer.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                return
            async with asyncio.timeout(proxy_program.SECONDS):
                line = await reader.readline()
            token, environ = msgspec.json.decode(line, type=tuple[str, dict[str, str]])
            proxy = ProcessProxy(token, environ, writer)
            self._on_arrival(proxy)
            await reader.read(1)  # it sends no more: this is its end
        except (OSError, TimeoutError, ValueError, *UNDECODABLE):
            pass
        finally:
            self._open.discard(writer)
            writer.close()
            if proxy is not None:
                proxy.gone.set()
