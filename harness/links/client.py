"""The harness's side of links: starts the supervisor, and sends it the rules."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import connect_unix
from holdfast.ft.processes.channel import ChannelClosed
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness.links import seccomp
from holdfast.harness.links.policy import LinkRule, LinkTraffic
from holdfast.harness.links.supervisor import Address, Answer, SetRules, TrafficQuery, supervise

_SECONDS = 30.0


class LinksLost(HoldfastError):
    """The process that runs the proxy has failed."""


class Links:
    """A proxy between the processes that call the result of `prepare()`. A context manager, for one thread."""

    def __init__(self, seed: int = 0) -> None:
        """Start the proxy. Raises `Unsupported` on an unknown processor, `StartFailed`."""
        seccomp.machine()
        self._directory = tempfile.TemporaryDirectory(prefix="holdfast-links-")
        self._path = Path(self._directory.name) / "door"
        self._rules: dict[int, LinkRule] = {}
        self._numbers = itertools.count()
        self._control: frozenset[Address] = frozenset()
        output = Path(self._directory.name) / "output"
        self._process: ForkedProcess = zygote().spawn(supervise(self._path, seed), name="links", output=output)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def prepare(self) -> Callable[[], None]:
        """The call that leads a process's links through the proxy; the process makes it before it opens any socket."""
        return partial(_join, self._path, self._process.pid)

    def add(self, rules: Iterable[LinkRule]) -> tuple[int, ...]:
        """Add rules to those that hold; returns their numbers, for `remove`."""
        new = dict(zip(self._numbers, rules, strict=False))
        self._rules.update(new)
        self._tell()
        return tuple(new)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove rules. Bytes that they held back go on."""
        for number in numbers:
            self._rules.pop(number, None)
        self._tell()

    def control_endpoints(self, addresses: Iterable[str]) -> None:
        """Declare these addresses ("host:port") to be those of the control plane."""
        parted = (address.rpartition(":") for address in addresses)
        found = frozenset((host.strip("[]"), int(port)) for host, _, port in parted)
        if found != self._control:
            self._control = found
            self._tell()

    def traffic(self) -> tuple[LinkTraffic, ...]:
        """The traffic so far, by sender, receiver and plane."""
        self._process.channel.send(TrafficQuery())
        return self._answer()

    def close(self) -> None:
        """End the proxy and every connection through it. Idempotent."""
        self._process.close()
        self._directory.cleanup()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self) -> None:
        self._process.channel.send(SetRules(tuple(self._rules.values()), self._control))
        self._answer()

    def _answer(self) -> tuple[LinkTraffic, ...]:
        try:
            answer = self._process.channel.recv(_SECONDS)
        except ChannelClosed:
            raise LinksLost(f"the proxy between the processes has ended: {self._process.epitaph()}") from None
        if not isinstance(answer, Answer):
            raise LinksLost(f"the proxy between the processes has failed: {answer.reason}")
        return answer.traffic


def _join(path: Path, supervisor: int) -> None:
    """Put this process under the supervisor that listens at `path`."""
    global _line
    _line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connect_unix(_line, path)
    listener = seccomp.install(supervisor)
    socket.send_fds(_line, [b"!"], [listener])
    os.close(listener)


_line: socket.socket | None = None
"""Open as long as the process lives: the supervisor sees its end."""
