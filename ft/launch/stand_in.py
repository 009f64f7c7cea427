"""Lets another launcher's children be forks of the zygote: it starts a small shim, which asks here for the fork.

The launcher (Monarch's host) starts `shim_command(...)` as if it were the process. The shim sends its environment and
token over a Unix socket of its owner's, this process has the zygote fork, and the shim ends as the fork ends. If the
shim ends first, as when the launcher kills it, the fork is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping

import msgspec

from holdfast.comms.system.paths import bind_unix
from holdfast.ft.launch.held_directory import HeldDirectory

SOCKET = "HOLDFAST_FORK_SOCKET"
"""The variable with the path of the Unix socket, for shims that are not told it by their command."""

_SHIM = """
import json,os,signal,socket,sys
s=socket.socket(socket.AF_UNIX); s.settimeout(60)
p=sys.argv[1] or os.environ["HOLDFAST_FORK_SOCKET"]
d=os.open(os.path.dirname(p),os.O_PATH); s.connect(f"/proc/self/fd/{d}/{os.path.basename(p)}"); os.close(d)
s.sendall(json.dumps([sys.argv[2],dict(os.environ)]).encode()+b"\\n"); s.settimeout(None)
r=s.recv(64)
if not r: os.kill(os.getpid(),signal.SIGKILL)
c=int(r)
if c<0: signal.signal(-c,signal.SIG_DFL) if -c not in (9,19) else 0; os.kill(os.getpid(),-c)
os._exit(c if c>=0 else 1)
"""
_LONGEST = 1 << 20
_START_SECONDS = 60.0


def shim_command(token: str, path: str = "") -> list[str]:
    """The arguments of a Python that becomes the shim with this token."""
    return ["-I", "-S", "-c", _SHIM, path, token]


class ForkRequest:
    """A shim that waits for its process. `environ` is what the launcher gave it."""

    def __init__(self, token: str, environ: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        self.token, self.environ = token, environ
        self._writer = writer

    def end(self, code: int) -> None:
        """Let the shim end as the process did: with this status, or by the signal of a negative one."""
        with contextlib.suppress(OSError):
            self._writer.write(str(code).encode())
            self._writer.close()


class ShimServer:
    """Hears shims. `on_request` is called for each, `on_gone` with its token when the shim has ended."""

    def __init__(self, on_request: Callable[[ForkRequest], None], on_gone: Callable[[str], None]) -> None:
        self._on_request, self._on_gone = on_request, on_gone
        self._folder = HeldDirectory("holdfast-forks-")
        self.path = str(self._folder.path / "shims")
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen in the running event loop."""
        listener = socket.socket(socket.AF_UNIX)
        bind_unix(listener, self.path)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_LONGEST)

    async def close(self) -> None:
        """Stop listening; shims that still wait end. Idempotent."""
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._open):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None
        self._folder.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        token = ""
        try:
            credentials = writer.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                return
            async with asyncio.timeout(_START_SECONDS):
                line = await reader.readline()
            token, environ = msgspec.json.decode(line, type=tuple[str, dict[str, str]])
            self._on_request(ForkRequest(token, environ, writer))
            await reader.read(1)  # the shim sends no more: this is its end
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()
            if token:
                self._on_gone(token)
