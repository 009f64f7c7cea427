"""The addresses of this host's interfaces, and which of them a process listens on for the others of its job."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

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
