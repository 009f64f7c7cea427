"""Network namespaces as the hosts of a job's processes, one host for each process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.file_io import write_all
from holdfast.harness.testbed.netns import EnterNamespace, Network

INTERFACE = "eth0"


@dataclass(frozen=True, slots=True)
class Claim:
    """Called in a process: moves it to a free host, and records the host's number and the process in `folder`."""

    folder: Path
    entries: tuple[EnterNamespace, ...]
    addresses: tuple[str, ...]

    def __call__(self) -> Mapping[str, Any]:
        for number, entry in enumerate(self.entries):
            try:
                fd = os.open(self.folder / f"host-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            write_all(fd, str(os.getpid()).encode())
            os.close(fd)
            entry()
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            return {"host": self.addresses[number]}
        raise HoldfastError(f"all {len(self.entries)} hosts are taken: a job with namespaces cannot grow")


class Hosts:
    """`count` hosts on one network. A context manager. Raises `Unsupported` without root or pyroute2."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder, self._network = folder, Network(count)

    def __enter__(self) -> Hosts:
        self._network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()

    @property
    def network(self) -> Network:
        """The network between the hosts; its cables can be pulled."""
        return self._network

    def claim(self) -> Claim:
        """The call that each process makes before it uses the network."""
        addresses = self._network.addresses
        return Claim(self._folder, tuple(self._network.entry(number) for number in range(len(addresses))), addresses)

    def of(self, pid: int) -> int:
        """The number of the host that a process is on. Raises `HoldfastError` if it is on none."""
        for path in self._folder.glob("host-*"):
            if path.read_text() == str(pid):
                return int(path.name.removeprefix("host-"))
        raise HoldfastError(f"process {pid} is on none of the hosts")
