"""Addresses of processes, and checks of the interface that one listens on: one of this machine, never all of them."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

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
