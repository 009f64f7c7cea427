"""Addresses: those of this host's interfaces, and which of them, never all, a process listens on for its job."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import HoldfastError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UP = 1  # IFF_UP
_SIZES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where in a socket address the address is, and its length."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An address of an interface that is up."""

    interface: str
    address: Address

    def __str__(self) -> str:
        return f"{self.interface} {self.address}"


class _Entry(ctypes.Structure):
    pass


_Entry._fields_ = [  # struct ifaddrs
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def local_addresses() -> tuple[LocalAddress, ...]:
    """The addresses of all interfaces that are up, in the kernel's order. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the interfaces cannot be listed: {os.strerror(number)}")
    found = []
    try:
        entry = first
        while entry:
            each = entry.contents
            if each.address and each.flags & _UP:
                family = ctypes.c_ushort.from_address(each.address).value
                if family in _SIZES:
                    start, size = _SIZES[socket.AddressFamily(family)]
                    packed = ctypes.string_at(each.address + start, size)
                    found.append(LocalAddress(os.fsdecode(each.name), ipaddress.ip_address(packed)))
            entry = each.next
    finally:
        libc.freeifaddrs(first)
    return tuple(found)


LOOPBACK = "127.0.0.1"


class AddressNeeded(HoldfastError):
    """The job is on several hosts, and no address was chosen. `available` are those that this host has."""

    def __init__(self, why: str, available: Sequence[LocalAddress]) -> None:
        self.available = tuple(map(str, available))
        super().__init__(
            f"{why}, so an address that they reach must be chosen: set HOLDFAST_INTERFACE, interface= or --interface "
            f"to one of {', '.join(self.available) or 'none: this host has loopback alone'}"
        )


class NoSuchInterface(HoldfastError):
    """This host has no interface, or no address of a network, of this name. `available` are those that it has."""

    def __init__(self, asked: str, why: str, available: Sequence[LocalAddress]) -> None:
        self.asked, self.available = asked, tuple(map(str, available))
        super().__init__(f"interface {asked!r} {why}; this host has {', '.join(self.available) or 'loopback alone'}")


def address_of(interface: str, available: Sequence[LocalAddress]) -> str:
    """The address that `interface` means: the name of an interface, a network such as 10.0.0.0/24, or an address.

    An interface with several addresses means its first IPv4 address, or its first IPv6 address if it has no other;
    link-local addresses are never meant. Raises `NoSuchInterface`, ValueError for a network that is not one.
    """
    usable = [each for each in available if not each.address.is_link_local]
    others = [each for each in usable if not each.address.is_loopback]
    named = [each for each in usable if each.interface == interface]
    if named:
        return str(min(named, key=lambda each: each.address.version).address)
    if "/" in interface:
        try:
            network = ipaddress.ip_network(interface, strict=False)
        except ValueError as error:
            raise ValueError(f"interface {interface!r} is not a network: {error}") from None
        inside = [each for each in usable if each.address in network]
        if not inside:
            raise NoSuchInterface(interface, "is a network in which this host has no address", others)
        return str(inside[0].address)
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        known = any(each.interface == interface for each in available)
        why = "has only link-local addresses" if known else "is not there, or is not up"
        raise NoSuchInterface(interface, why, others) from None
    if all(each.address != address for each in usable):
        raise NoSuchInterface(interface, "is no address of this host", others)
    return str(address)


def choose_address(interface: str, why_spread: str, available: Sequence[LocalAddress]) -> str:
    """The address for `interface`; without one, loopback unless there is a reason `why_spread` against it.

    Raises what `address_of` raises, and `AddressNeeded`.
    """
    if interface:
        return address_of(interface, available)
    if why_spread:
        others = [each for each in available if not each.address.is_loopback and not each.address.is_link_local]
        raise AddressNeeded(why_spread, others)
    return LOOPBACK


# Checks of the host that a user or another process names ------------------------------------------------------------

LOOKUP_SECONDS = 5.0
"""How long the lookup of a name may take."""
LONGEST = 253

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")


def join_address(host: str, port: int) -> str:
    """The address "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; ValueError if it is not one."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not a control address: write host:port")
    return host, int(port)


def check_interface(host: object) -> str:
    """The host, if it can be the name or address of one interface. Raises TypeError, ValueError. Does no lookup."""
    if not isinstance(host, str):
        raise TypeError(f"host must be a name or an address as text, not {type(host).__name__}")
    if not host:
        raise ValueError("host '' means every interface; name the one to listen on")
    address = _read(host)
    if address is None:
        labels = host.removesuffix(".").split(".")
        if len(host) > LONGEST or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
            raise ValueError(
                f"host {host[:LONGEST]!r} is neither a name nor an address; name the interface to listen on"
            )
        return host
    _check_address(host, address)
    return host


def check_ours(host: object) -> str:
    """The host, if this machine can listen there now. Raises TypeError, ValueError. Looks names up."""
    name = check_interface(host)
    reasons = []
    for family, kind, protocol, _, address in _looked_up(name):
        _check_address(name, ipaddress.ip_address(address[0]))
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return name
        except OSError as error:
            reasons.append(f"{address[0]}: {error.strerror}")
    raise ValueError(f"host {name!r} is none of this machine ({'; '.join(reasons)}); name the interface to listen on")


def _read(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_address(host: str, address: Address) -> None:
    plain = getattr(address, "ipv4_mapped", None) or address
    if plain.is_unspecified:
        raise ValueError(f"host {host!r} means every interface; name the one to listen on")
    if plain.is_multicast or plain == ipaddress.ip_address("255.255.255.255"):
        raise ValueError(f"host {host!r} is the address of many; name the interface to listen on")


def _looked_up(name: str) -> list[Any]:
    """The addresses of a host. A lookup may never end, so a thread makes it."""
    found: list[list[Any] | Exception] = []

    def ask(flags: int) -> None:
        try:
            found.append(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | flags))
        except (OSError, UnicodeError) as error:
            found.append(error)

    if _read(name) is not None:
        ask(socket.AI_NUMERICHOST)
    else:
        thread = threading.Thread(target=ask, args=(0,), name="host-lookup", daemon=True)
        thread.start()
        thread.join(LOOKUP_SECONDS)
    answer = found[0] if found else TimeoutError(f"no answer within {LOOKUP_SECONDS:g} s")
    if isinstance(answer, Exception):
        raise ValueError(f"host {name!r} cannot be looked up: {answer}; name the interface to listen on")
    return answer
