"""A process listens on one interface of this machine only; other hosts are refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft import listen_address
from holdfast.ft.control.rpc import AsyncRpcServer
from holdfast.ft.listen_address import check_interface, check_ours

NONE_OF_OURS = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): no machine has it."""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.3"])
def test_an_interface_of_this_machine_is_accepted(host: str) -> None:
    assert check_ours(host) == host


BAD = [
    (None, TypeError, "must be a name or an address as text, not NoneType"),
    (5, TypeError, "not int"),
    (b"127.0.0.1", TypeError, "not bytes"),
    (["127.0.0.1"], TypeError, "not list"),
    ("", ValueError, "means every interface"),
    ("0.0.0.0", ValueError, "means every interface"),
    ("::", ValueError, "means every interface"),
    ("::ffff:0.0.0.0", ValueError, "means every interface"),
    ("0", ValueError, "neither a name nor an address"),
    ("0x0", ValueError, "neither a name nor an address"),
    ("127.0.0.256", ValueError, "neither a name nor an address"),
    ("127.0.0.1:29500", ValueError, "neither a name nor an address"),
    ("tcp://localhost", ValueError, "neither a name nor an address"),
    ("my host", ValueError, "neither a name nor an address"),
    (" 127.0.0.1", ValueError, "neither a name nor an address"),
    ("a..b", ValueError, "neither a name nor an address"),
    ("-a", ValueError, "neither a name nor an address"),
    ("a" * 64, ValueError, "neither a name nor an address"),
    ("a." * 200 + "b", ValueError, "neither a name nor an address"),
    ("node\0", ValueError, "neither a name nor an address"),
    ("224.0.0.1", ValueError, "the address of many"),
    ("255.255.255.255", ValueError, "the address of many"),
]


@pytest.mark.parametrize(("host", "kind", "words"), BAD)
def test_a_host_that_is_not_one_interface_is_refused(host: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_ours(host)
    listener = AsyncRpcServer(key=b"k" * 32, job="j", identity="i", handlers={})
    with pytest.raises(kind, match=words):
        asyncio.run(listener.start(host, 0))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is none of this machine \(192.0.2.1: .*\); name the interface"):
        check_ours(NONE_OF_OURS)


def test_an_unknown_host_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(ValueError, match=r"host 'node17' cannot be looked up: .*Name or service not known"):
        check_ours("node17")


def test_a_name_that_means_every_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: everywhere)
    with pytest.raises(ValueError, match="means every interface"):
        check_ours("node17")


def test_a_lookup_of_a_host_name_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(listen_address, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(20.0))
    try:
        with pytest.raises(ValueError, match=r"cannot be looked up: no answer within 0.05 s"):
            check_ours("node17")
    finally:
        answered.set()


@given(st.text(max_size=300))
def test_any_text_is_accepted_or_refused_with_a_hint(host: str) -> None:
    try:
        assert check_interface(host) == host
    except ValueError as error:
        assert "name the" in str(error)
