"""`ProcessHandle`: how a process is named to those that it will be connected with: see `Communicator.reconfigure`.

A handle is a short JSON text. It says which process it is, which backends can run there, and at which store of its own
the members meet if it is their first.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence, Set
from typing import Annotated

import msgspec

from holdfast.comms.errors import UNDECODABLE, BackendUnavailable, Mismatch
from holdfast.comms.system.keys import mac
from holdfast.comms.transport.base import Peer

VERSION = 1
_MOST_BYTES = 4096
_MOST_MEMBERS = 1 << 16
_EPOCHS = 1 << 48

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class ProcessHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of a communicator. `number` distinguishes the communicators of one process.

    `job` is a fingerprint of the job's key, "" without one; `at` is the "host:port" of the process's own store.
    """

    version: int
    job: Annotated[str, msgspec.Meta(max_length=64)]
    peer: Peer
    number: Annotated[int, msgspec.Meta(ge=0)]
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    backends: Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)]
    at: Annotated[str, msgspec.Meta(min_length=3, max_length=300)]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the store."""
        host, _, port = self.at.rpartition(":")
        return host, int(port)


class LastingIdentity:
    """What stays of a communicator when it gets other members: what it was asked for, its handle and name."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.request, self.handle, self.name = "", "", ""
        self.store: object = None
        """Where the members meet if this is the first of them. Held, since it ends with its last reference."""
        self.used: set[int | str] = set()
        self.suspended: tuple[str, list[str]] | None = None
        """While the communicator is suspended, the name of its resumption, and all members' handles."""


def fingerprint(key: bytes | None) -> str:
    """What a handle says of a job's key."""
    return "" if key is None else mac(key, b"process handle")[:16].hex()


class Members(msgspec.Struct, frozen=True):
    """The processes of a reconfigured communicator, in rank order; this one is number `rank`."""

    handles: tuple[ProcessHandle, ...]
    rank: int
    backends: tuple[str, ...]
    """Those that all of them can run, in the order of the first."""

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(handle.peer for handle in self.handles)

    @property
    def digest(self) -> str:
        """Equal on the members that were given the same handles in the same order."""
        return hashlib.blake2b(b"\n".join(each.encode().encode() for each in self.handles), digest_size=12).hexdigest()


def epoch_of(uuid: int | str) -> int:
    """The epoch of a reconfiguration. Raises ValueError, TypeError for what is no uuid."""
    if isinstance(uuid, bool) or not isinstance(uuid, int | str):
        raise TypeError(f"reconfigure: uuid must be an integer or a text, not {type(uuid).__name__}")
    if isinstance(uuid, int) and 0 <= uuid < _EPOCHS:
        return uuid
    if uuid == "" or len(str(uuid)) > 200:
        raise ValueError("reconfigure: uuid must have 1 to 200 characters")
    return int.from_bytes(hashlib.blake2b(str(uuid).encode(), digest_size=8).digest(), "little") % _EPOCHS


def parse_members(handles: Sequence[str] | Set[str], own: str) -> Members:
    """Decode and check the handles of all members, of which `own` is one. A set is put into an order that all compute.

    Raises ValueError for malformed, missing or repeated ones, `Mismatch` for those of another job, version or device,
    `BackendUnavailable` if the members have no backend in common.
    """
    if isinstance(handles, str | bytes) or not isinstance(handles, Sequence | Set):
        raise TypeError(f"reconfigure: handles must be a list or a set of texts, not {type(handles).__name__}")
    texts = [handle.decode(errors="replace") if isinstance(handle, bytes) else handle for handle in handles]
    if others := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        raise TypeError(f"reconfigure: a handle must be a text, not {others[0]}")
    texts = sorted(texts) if isinstance(handles, Set) else texts
    if not 0 < len(texts) <= _MOST_MEMBERS:
        raise ValueError(f"reconfigure: {len(texts)} handles; pass those of 1 to {_MOST_MEMBERS} processes")
    mine, members = _decoded(own), [_decoded(text) for text in texts]
    for rank, member in enumerate(members):
        _check_like(rank, member, mine)
    if mine not in members:
        raise ValueError(
            f"reconfigure: this process's own handle is not among the {len(texts)} handles: the others go on without it"
        )
    if len(set(members)) < len(members):
        twice = next(rank for rank, member in enumerate(members) if member in members[:rank])
        first = members.index(members[twice])
        raise ValueError(f"reconfigure: the handles of rank {first} and rank {twice} are the same")
    common = tuple(name for name in members[0].backends if all(name in member.backends for member in members))
    if not common:
        offered = "; ".join(f"rank {rank}: {', '.join(member.backends)}" for rank, member in enumerate(members))
        raise BackendUnavailable("auto", f"the members have no backend in common ({offered})")
    return Members(tuple(members), members.index(mine), common)


def _check_like(rank: int, member: ProcessHandle, mine: ProcessHandle) -> None:
    """Raise `Mismatch` if the handle of `rank` is of another version, job or device than this process's own."""
    for what, theirs, ours, hint in (
        ("version", member.version, mine.version, "run the same version of holdfast in all processes"),
        ("job", member.job or "none", mine.job or "none", "start all processes with the same HOLDFAST_KEY_FILE"),
        ("device", member.device, mine.device, "pass the same device in all processes"),
    ):
        if theirs != ours:
            raise Mismatch(
                f"reconfigure: the handle of rank {rank} is of another {what} ({theirs}, this process's {ours}); {hint}"
            )


def _decoded(text: str) -> ProcessHandle:
    if len(text) > _MOST_BYTES:
        raise ValueError(f"reconfigure: a text of {len(text)} characters is not the handle of a process")
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise Mismatch(
                f"reconfigure: a handle has version {version}, this process reads {VERSION}; run the same version of "
                "holdfast in all processes"
            )
        handle = msgspec.json.decode(text, type=ProcessHandle)
        _, port = handle.place
        if not 0 < port < 1 << 16 or not (0 < handle.peer.pid < 1 << 31) or len(handle.peer.host) > 500:
            raise ValueError("it names no process")
    except (*UNDECODABLE, ValueError) as error:
        raise ValueError(f"reconfigure: {text[:80]!r} is not the handle of a process: {error}") from error
    return handle


class _Version(msgspec.Struct, frozen=True):
    """What handles of all versions have."""

    version: int
