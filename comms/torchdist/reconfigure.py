"""Who a process group is to be made of from now on: `reconfigure(uuid, handles)`, as torch 2.14 has it.

A handle is a member's name: its process, and the backends that it can run. The members are given in rank order, each
group of them with a `uuid` that was never used before; they meet under it in the store of the group. So survivors of a
death go on without the dead, groups merge and split, and newcomers join, in the same process group object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import choose_backend, connect_members, runnable_backends
from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_process

_MOST_HANDLE_BYTES = 4096


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member of a group. `number` tells apart the groups of one process."""

    peer: Peer
    number: int
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What torch's `ReconfigureOptions` say: the members in rank order, and how long to take (seconds)."""

    uuid: int
    handles: tuple[str, ...]
    timeout: float | None


def handle(preference: str, device: torch.device, number: int) -> str:
    """This process's handle for a group that prefers the backends of `preference`."""
    runnable, _ = runnable_backends(preference, device)
    return msgspec.json.encode(Member(this_process(), number, tuple(runnable))).decode()


def asked_for(given: Any, handles: Sequence[str] | None, timeout: timedelta | float | None) -> Change:
    """The change that `reconfigure(options)` or `reconfigure(uuid, handles, timeout)` asks for."""
    if handles is None:
        given, handles, timeout = given.uuid, given.handles, given.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return Change(int(given), tuple(handles), seconds)


def check(change: Change, mine: str) -> None:
    """ValueError for handles that are none, come twice, or lack this process's own."""
    for each in change.handles:
        _decoded(each)
    if len(set(change.handles)) != len(change.handles) or mine not in change.handles:
        raise ValueError(f"reconfigure({change.uuid}): the handles must differ, and hold this process's own")


def connect_changed(
    change: Change, mine: str, store: dist.Store, name: str, device: torch.device, timeout: float
) -> Communicator:
    """Connect the members of `change`; collective over them. `timeout` (seconds) is that of later ops."""
    members = [_decoded(each) for each in change.handles]
    peers = [member.peer for member in members]
    common = [name for name in members[0].backends if all(name in member.backends for member in members)]
    if not common:
        offered = "; ".join(f"rank {rank}: {', '.join(member.backends)}" for rank, member in enumerate(members))
        raise BackendUnavailable("auto", f"the members have none in common ({offered})")
    return connect_members(
        choose_backend(",".join(common), peers, device),
        rank=change.handles.index(mine),
        size=len(members),
        store=dist.PrefixStore(f"reconfigure/{change.uuid}", store),
        peers=peers,
        epoch=change.uuid,
        name=f"{name}/{change.uuid}",
        device=device,
        timeout=timeout if change.timeout is None else change.timeout,
        op_timeout=timeout,
    )


def _decoded(handle: str) -> Member:
    if len(handle) > _MOST_HANDLE_BYTES:
        raise ValueError(f"a handle of {len(handle)} bytes is none of a holdfast group")
    try:
        return msgspec.json.decode(handle, type=Member)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{handle[:80]!r} is no handle of a holdfast group: {error}") from error
