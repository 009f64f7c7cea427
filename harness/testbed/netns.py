"""Network namespaces as hosts: each with an address of its own, joined by a switch. Their cables can be pulled.

with Network(3) as network:
    network.cut(2)          # its cable is pulled: nothing gets in or out, and no end is told
    network.heal(2)
    network.lose(2)         # the same, and all of its processes are killed

Needs root, and pyroute2 (`pip install 'holdfast[netns]'`); no system package. The namespaces have no names, and only
descriptors of this process hold them: they end with it, however it ends, once the processes in them have ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.transport.liveness import HOST, this_host

_CLONE_NEWNET = 0x40000000
_NOWHERE = "02:00:00:00:00:ff"
"""A hardware address that no host has: packets to it are lost silently."""
_PERMANENT = 0x80
_NO_DUPLICATE_SEARCH = 0x02  # IFA_F_NODAD: else an address of IPv6 cannot be bound for a second
LOSE_SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnterNamespace:
    """A call that moves a fresh process to a host, before anything uses the network. Can be pickled."""

    path: str
    name: str

    def __call__(self) -> None:
        self.move_thread()
        os.environ[HOST] = self.name
        this_host.cache_clear()

    def move_thread(self) -> None:
        """Move the calling thread alone: the sockets that it makes from now on are that host's."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class ClaimHost:
    """Called in a process: moves it to a free host. `folder` has a file for each host that is taken."""

    folder: Path
    entries: tuple[EnterNamespace, ...]
    addresses: tuple[str, ...]

    def __call__(self) -> Mapping[str, Any]:
        for number, entry in enumerate(self.entries):
            try:
                (self.folder / f"host-{number}").touch(0o600, exist_ok=False)
            except FileExistsError:
                continue
            entry()
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            return {"host": self.addresses[number]}
        raise HoldfastError(f"all {len(self.entries)} hosts are taken: a job with namespaces cannot grow")


class Network:
    """`hosts` hosts, numbered from 0, on one network. A context manager, used from one thread.

    `addresses` are those of the hosts: IPv4, or with `ipv6` IPv6 alone. Raises `Unsupported` if this process may not
    make namespaces, or without pyroute2.
    """

    def __init__(self, hosts: int, *, ipv6: bool = False) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"hosts={hosts}: from 1 to 200")
        why = missing()
        if why is not None:
            raise Unsupported("network namespaces as hosts", why)
        self._ipv6 = ipv6
        self.addresses = tuple(f"{'fd77::' if ipv6 else '10.77.0.'}{number + 1}" for number in range(hosts))
        self._spaces: list[int] = []

    def __enter__(self) -> Network:
        try:
            for _ in range(len(self.addresses) + 1):
                self._spaces.append(_new_namespace())
            self._inside(self._switch, self._build)
            for number in range(len(self.addresses)):
                self._inside(self._spaces[number], partial(self._configure, number=number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the namespaces. Idempotent."""
        while self._spaces:
            os.close(self._spaces.pop())

    def entry(self, host: int) -> EnterNamespace:
        """The call that moves a process to a host; valid while this network is open."""
        return EnterNamespace(f"/proc/{os.getpid()}/fd/{self._spaces[host]}", f"netns-{os.getpid()}-{host}")

    def claim(self, folder: Path) -> ClaimHost:
        """The call by which each of as many processes takes a host; `folder` is an empty folder for their claims."""
        return ClaimHost(folder, tuple(self.entry(host) for host in range(len(self.addresses))), self.addresses)

    def processes(self, host: int) -> list[int]:
        """The ids of the processes that are on a host now."""
        space = os.fstat(self._spaces[host])
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                there = (folder / "ns" / "net").stat()
                if (there.st_dev, there.st_ino) == (space.st_dev, space.st_ino):
                    found.append(int(folder.name))
        return found

    def host_of(self, pid: int) -> int | None:
        """The host that a process is on; None if it is on none of them, or has ended."""
        try:
            there = Path(f"/proc/{pid}/ns/net").stat()
        except OSError:
            return None
        spaces = [os.fstat(self._spaces[host]) for host in range(len(self.addresses))]
        return next(
            (host for host, space in enumerate(spaces) if (space.st_dev, space.st_ino) == (there.st_dev, there.st_ino)),
            None,
        )

    # Faults -------------------------------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Pull the cable: nothing gets in or out. The host's own interface stays up, so its processes see no event."""
        self._plug(host, plugged=False)

    def lose(self, host: int) -> None:
        """Pull the cable, then kill all processes of the host: the others hear nothing of their ends.

        Raises `HoldfastError` for processes that are there after `LOSE_SECONDS` all the same.
        """
        self.cut(host)
        deadline = time.monotonic() + LOSE_SECONDS
        while pids := self.processes(host):
            if time.monotonic() > deadline:
                raise HoldfastError(f"processes {pids} of host {host} do not end within {LOSE_SECONDS:g} s of SIGKILL")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def mute(self, host: int) -> None:
        """Lose what the host sends; it still hears the others."""
        others = [address for number, address in enumerate(self.addresses) if number != host]
        self._lose(host, others)

    def deafen(self, host: int) -> None:
        """Lose what others send to the host; they still hear it."""
        for other in range(len(self.addresses)):
            if other != host:
                self._lose(other, [self.addresses[host]])

    def throttle(self, host: int, bits_per_second: int, latency: float = 0.05) -> None:
        """Limit the host's rate in both directions; packets that would wait longer than `latency` seconds are lost."""
        for space, name in ((self._switch, f"port{host}"), (self._spaces[host], "eth0")):
            self._inside(space, partial(_shape, name=name, bits_per_second=bits_per_second, latency=latency))

    def heal(self, host: int) -> None:
        """Undo all faults of the host, and the losses of others on their way to it."""
        self._plug(host, plugged=True)
        for other in range(len(self.addresses)):
            lost = [address for number, address in enumerate(self.addresses) if number != host]
            self._find(other, lost if other == host else [self.addresses[host]])
        for space, name in ((self._switch, f"port{host}"), (self._spaces[host], "eth0")):
            self._inside(space, partial(_unshape, name=name))

    # Implementation -----------------------------------------------------------------------------------------------

    @property
    def _switch(self) -> int:
        return self._spaces[len(self.addresses)]

    def _inside(self, space: int, work: Callable[[Any], T]) -> T:
        """Call `work` with a netlink socket of a namespace, from a thread that has entered it."""
        results: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            from pyroute2 import IPRoute

            try:
                _setns(space)
                with IPRoute() as ip:
                    results.append(work(ip))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="netns")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def _build(self, ip: Any) -> None:
        """Build the switch: a bridge with a cable to each host."""
        ip.link("add", ifname="switch", kind="bridge")
        switch = _index(ip, "switch")
        ip.link("set", index=switch, state="up")
        for number in range(len(self.addresses)):
            peer = {"ifname": "eth0", "net_ns_fd": self._spaces[number]}
            ip.link("add", ifname=f"port{number}", kind="veth", peer=peer)
            ip.link("set", index=_index(ip, f"port{number}"), master=switch, state="up")

    def _configure(self, ip: Any, number: int) -> None:
        if not self._ipv6:
            with suppress(OSError):  # else libraries may choose a link-local address, which is not ready for seconds
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        ip.link("set", index=_index(ip, "lo"), state="up")
        given = {"prefixlen": 64, "flags": _NO_DUPLICATE_SEARCH} if self._ipv6 else {"prefixlen": 24}
        ip.addr("add", index=_index(ip, "eth0"), address=self.addresses[number], **given)
        ip.link("set", index=_index(ip, "eth0"), state="up")

    def _plug(self, host: int, *, plugged: bool) -> None:
        def work(ip: Any) -> None:
            ip.link("set", index=_index(ip, f"port{host}"), master=_index(ip, "switch") if plugged else 0)

        self._inside(self._switch, work)

    def _lose(self, host: int, addresses: list[str]) -> None:
        def work(ip: Any) -> None:
            for address in addresses:
                ip.neigh("replace", dst=address, lladdr=_NOWHERE, ifindex=_index(ip, "eth0"), state=_PERMANENT)

        self._inside(self._spaces[host], work)

    def _find(self, host: int, addresses: list[str]) -> None:
        def work(ip: Any) -> None:
            from pyroute2 import NetlinkError

            for address in addresses:
                with suppress(NetlinkError):  # there is no such entry
                    ip.neigh("del", dst=address, ifindex=_index(ip, "eth0"))

        self._inside(self._spaces[host], work)


def missing() -> str | None:
    """The reason why network namespaces cannot be made here; None if they can."""
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        return "pip install 'holdfast[netns]'"
    if os.geteuid() != 0:
        return "it takes root"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"the kernel refuses to make one ({error.strerror})"
    return None


@contextmanager
def _ended(pid: int, go: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(go)
        os.waitpid(pid, 0)


def _new_namespace() -> int:
    """A descriptor of a new network namespace, made by a child that then ends. Raises OSError."""
    made, told = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        failed = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0
        os.write(told, bytes([ctypes.get_errno() if failed else 0]))
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)
    os.close(told)
    try:
        with _ended(pid, go):
            error = os.read(made, 1)
            if error != b"\0":
                raise OSError(error[0] if error else 0, os.strerror(error[0]) if error else "the child died")
            return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)


def _setns(fd: int) -> None:
    """Move the calling thread into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _index(ip: Any, name: str) -> int:
    found: int = ip.link_lookup(ifname=name)[0]
    return found


def _shape(ip: Any, name: str, bits_per_second: int, latency: float) -> None:
    ip.tc(
        "replace",
        "tbf",
        _index(ip, name),
        0x10000,
        rate=bits_per_second // 8,
        latency=f"{latency * 1000:.0f}ms",
        burst=max(16_384, bits_per_second // 800),
    )


def _unshape(ip: Any, name: str) -> None:
    from pyroute2 import NetlinkError

    with suppress(NetlinkError):  # nothing is shaped
        ip.tc("del", index=_index(ip, name), root=True)
