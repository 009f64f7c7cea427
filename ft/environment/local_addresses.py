"""The addresses of this host's interfaces, as the kernel has them now in this network namespace."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from dataclasses import dataclass

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
