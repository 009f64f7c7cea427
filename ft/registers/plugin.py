"""The built-in registers, offered through the entry-point group `holdfast` like any plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.comms.plugins.spec import hookimpl
from holdfast.ft.registers import Cell, RegisterAway


def _memory(url: str, name: str) -> Cell:
    """memory://name: cells of this process, for tests and ranks that are threads"""
    from holdfast.ft.registers import MemoryCell

    return MemoryCell(url, name)


def _sqlite(url: str, name: str) -> Cell:
    """sqlite:///absolute/path: a file of one host; no server, survives the kill of any process"""
    from holdfast.ft.registers.sqlite import SqliteCell

    return SqliteCell(url, name)


def _tcp(url: str, name: str) -> Cell:
    """tcp://host:port/name: a torch TCPStore; easy, but open to all that reach the port, and lost with its server"""
    from holdfast.ft.registers.tcp import TcpCell

    return TcpCell(url, name)


def _etcd(url: str, name: str) -> Cell:
    """etcd://host:port,host:port/name: an etcd cluster; survives the loss of its leader"""
    try:
        from holdfast.ft.registers.etcd import EtcdCell
    except ImportError as error:
        raise RegisterAway(url, "it needs etcd3gw: pip install 'holdfast[etcd]'") from error
    return EtcdCell(url, name)


def _etcds(url: str, name: str) -> Cell:
    """etcds://user@host:port/name?cacert=&cert=&key=&password_file=: the same with TLS, and files for secrets"""
    return _etcd(url, name)


@hookimpl
def holdfast_registers() -> Mapping[str, Callable[[str, str], Cell]]:
    return {"memory": _memory, "sqlite": _sqlite, "tcp": _tcp, "etcd": _etcd, "etcds": _etcds}
