"""Network namespaces as the hosts of a job's processes, one host for each process."""

from __future__ import annotations

from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.harness.testbed.netns import ClaimHost, Network


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

    def claim(self) -> ClaimHost:
        """The call that each process makes before it uses the network."""
        addresses = self._network.addresses
        return ClaimHost(
            self._folder, tuple(self._network.entry(number) for number in range(len(addresses))), addresses
        )

    def of(self, pid: int) -> int:
        """The number of the host that a process is on. Raises `HoldfastError` if it is on none."""
        for path in self._folder.glob("host-*"):
            if path.read_text() == str(pid):
                return int(path.name.removeprefix("host-"))
        raise HoldfastError(f"process {pid} is on none of the hosts")
