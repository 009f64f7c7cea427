"""Changes the members of a process group: `reconfigure(uuid, handles)`, as in torch 2.14.

A handle names a member: its process, and the backends that it can run. Handles are passed in rank order, or as a set,
which is then sorted, with a `uuid` that was never used before, under which the members meet in the group's store. So
survivors go on without dead members, groups merge and split, and new members join, in the same process group object.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import choose_backend, connect_members, runnable_backends
from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.torchdist.group_store import group_store
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_process

_MOST_HANDLE_BYTES = 4096


class ReconfigureMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member of a group, as its handle encodes it. `number` distinguishes the groups of one process."""

    peer: Peer
    number: int
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReconfigureRequest:
    """The contents of torch's `ReconfigureOptions`: the members in rank order, and a timeout in seconds."""

    uuid: int
    handles: tuple[str, ...]
    timeout: float | None


def member_handle(preference: str, device: torch.device, number: int) -> str:
    """This process's handle for a group that prefers the backends of `preference`."""
    runnable, _ = runnable_backends(preference, device)
    return msgspec.json.encode(ReconfigureMember(this_process(), number, tuple(runnable))).decode()


def parse_request(
    given: Any, handles: Sequence[str] | Set[str] | None, timeout: timedelta | float | None
) -> ReconfigureRequest:
    """Parse the arguments of `reconfigure(options)` or `reconfigure(uuid, handles, timeout)`."""
    if handles is None:
        given, handles, timeout = given.uuid, given.handles, given.timeout
    if isinstance(handles, Set):
        handles = sorted(handles)  # the order of a set differs between processes
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return ReconfigureRequest(int(given), tuple(handles), seconds)


def check_request(request: ReconfigureRequest, own_handle: str) -> None:
    """Raise ValueError for malformed or repeated handles, or if this process's own is missing."""
    for each in request.handles:
        _decoded(each)
    if len(set(request.handles)) != len(request.handles) or own_handle not in request.handles:
        raise ValueError(f"reconfigure({request.uuid}): the handles must differ, and hold this process's own")


def connect_requested(
    request: ReconfigureRequest, own_handle: str, store: dist.Store, name: str, device: torch.device, timeout: float
) -> Communicator:
    """Connect the members of `request`; collective over them. `timeout` (seconds) is the default of later ops."""
    members = [_decoded(each) for each in request.handles]
    peers = [member.peer for member in members]
    common = [name for name in members[0].backends if all(name in member.backends for member in members)]
    if not common:
        offered = "; ".join(f"rank {rank}: {', '.join(member.backends)}" for rank, member in enumerate(members))
        raise BackendUnavailable("auto", f"the members have none in common ({offered})")
    limit = timeout if request.timeout is None else request.timeout
    return connect_members(
        choose_backend(",".join(common), peers, device),
        rank=request.handles.index(own_handle),
        size=len(members),
        store=group_store(store, f"reconfigure/{request.uuid}", limit),
        peers=peers,
        epoch=request.uuid,
        name=f"{name}/{request.uuid}",
        device=device,
        timeout=limit,
        op_timeout=timeout,
    )


def _decoded(handle: str) -> ReconfigureMember:
    if len(handle) > _MOST_HANDLE_BYTES:
        raise ValueError(f"a handle of {len(handle)} bytes is none of a holdfast group")
    try:
        return msgspec.json.decode(handle, type=ReconfigureMember)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{handle[:80]!r} is no handle of a holdfast group: {error}") from error
