"""Registers the backend `holdfast` with torch, and makes its process groups.

torch functions that accept only torch's own backends are patched, so that they accept a holdfast group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect
from holdfast.comms.errors import HoldfastError, Revoked, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.torchdist.group_store import checked_members
from holdfast.comms.torchdist.process_group import (
    AVAILABLE,
    HoldfastBackend,
    HoldfastProcessGroup,
    Options,
    behind,
    forget_meshes,
    refused,
    resolve_options,
)
from holdfast.comms.torchdist.works import untraced

BACKEND = "holdfast"
DEVICE_BACKEND = "holdfast_device"
"""The backend name in a group with a backend for each device. Requires torch 2.14."""


def register() -> None:
    """Register the backend name with torch. Idempotent. The entry point `torch.distributed.backends` calls this."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    movable = {device for info in registry().backends.values() for device in info.capabilities.moves}
    devices = sorted(movable | {"cpu"})
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)
    dist.Backend.register_backend(DEVICE_BACKEND, create_for_device, extended_api=True, devices=devices)
    # torch 2.15 attaches its flight recorder to the C++ backends of a group that does not record by itself.
    recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(BACKEND)
    _accept_monitored_barrier()
    _accept_builtin_hooks()


def create(given: Any, pg_options: object = None) -> HoldfastProcessGroup:
    """Connect one rank of a new process group, through the store that torch passes; collective over the group.

    Raises the errors of `holdfast.comms.connect`, and TypeError for `pg_options` of another backend.
    """
    default = behind(c10d.GroupMember.WORLD) if dist.is_initialized() else None
    inherited = None if default is None else replace(default.options, over=None)
    timeout = given.timeout.total_seconds()
    if isinstance(default, SessionProcessGroup):
        options = inherited if pg_options is None else resolve_options(pg_options, inherited)
        assert options is not None
        part = default.split_communicator(given.global_ranks_in_group, options)
        return _group_over(part, given.store, options, timeout)
    options = resolve_options(pg_options, inherited)
    if not dist.is_initialized():
        forget_meshes(torch.device(options.device) if options.over is None else options.over.device)
    if options.over is not None:
        return SessionProcessGroup(given.store, options.over, options, timeout)
    with checked_members(given):
        communicator = connect(
            options.backend,
            rank=given.group_rank,
            size=given.group_size,
            rendezvous=given.store,
            name=f"torch-{given.group_id}",
            device=torch.device(options.device),
            timeout=timeout,
        )
    return _group_over(communicator, given.store, options, timeout)


def _group_over(
    communicator: Communicator, store: dist.Store, options: Options, timeout: float
) -> HoldfastProcessGroup:
    """A group over a communicator of its own; collective over the group. If that fails, closes the communicator."""
    try:
        return HoldfastProcessGroup(store, communicator, options, timeout)
    except BaseException:
        communicator.close()
        raise


def create_for_device(given: Any, pg_options: object = None) -> HoldfastBackend:
    """`create`, for one device of torch's own ProcessGroup. Raises `Unsupported` before torch 2.14."""
    if not AVAILABLE:
        raise Unsupported(
            f"a backend for one device of a group on torch {torch.__version__}",
            f"it takes torch 2.14; let {BACKEND!r} be the backend of the whole group",
        )
    return HoldfastBackend(create(given, pg_options))


def install_default_group(communicator: Communicator, store: dist.Store, timeout: float) -> SessionProcessGroup:
    """Make torch's default group run over `communicator`. `timeout` (seconds) is the default of its ops.

    Its subgroups meet at `store`. Raises HoldfastError if torch has a default group already: that of another library,
    or of another rank in this process.
    """
    if dist.is_initialized():
        raise HoldfastError(
            "torch.distributed has a default group in this process already; do not call init_process_group() where a "
            "session makes the group"
        )
    register()
    options = Options(backend=communicator.backend, device=communicator.device.type, over=communicator)
    dist.init_process_group(
        BACKEND,
        store=store,
        rank=communicator.rank,
        world_size=communicator.size,
        timeout=timedelta(seconds=timeout),
        pg_options=options,
    )
    group: Any = dist.group.WORLD
    assert isinstance(group, SessionProcessGroup)
    return group


def remove_default_group(group: SessionProcessGroup) -> None:
    """End the group's dependents; destroy it and its subgroups, if it is still torch's default group."""
    while group.dependents:
        group.dependents.popitem()[1].end()
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _accept_builtin_hooks() -> None:
    """Let DDP over holdfast use the Python version of its FP16 hook: the built-in one needs C++ futures."""
    original: Callable[[Any, Any], None] = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register(self: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if behind(self.process_group) is None or comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS:
            original(self, comm_hook_type)
        else:
            dist._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)

    patched: Any = DistributedDataParallel
    patched._register_builtin_comm_hook = register


def _accept_monitored_barrier() -> None:
    """Let torch's `monitored_barrier`, which accepts only gloo, call that of a holdfast group."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours = behind(c10d.GroupMember.WORLD if group is None else group)
        if ours is not None:
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


@untraced
class SessionProcessGroup(HoldfastProcessGroup):
    """A process group over a session's communicator. The session closes that, and decides on the members.

    `dependents` are objects that were made over the group; `remove_default_group` calls their `end()`.
    """

    supports_reconfigure = supports_shrinking = False
    reconfigure = refused("reconfigure", "the session decides who its members are")
    suspend = resume = refused("suspend", "a session owns its communicator; leave the session instead")

    def __init__(self, store: dist.Store, communicator: Communicator, options: Options, timeout: float) -> None:
        super().__init__(store, communicator, options, timeout)
        self.dependents: dict[int, Any] = {}

    def split_communicator(self, ranks: Sequence[int], options: Options) -> Communicator:
        """Make a communicator of `ranks` for a subgroup; exactly those ranks call this. It ends with this group's.

        Raises `Unsupported` for another transport: the session could not end its ops.
        """
        ours = self.communicator
        if options.backend not in (ours.backend, "auto") or torch.device(options.device).type != ours.device.type:
            raise Unsupported(
                f"a subgroup over {options.backend!r} on {options.device} in a session over {ours.backend!r} on "
                f"{ours.device}",
                "a session ends the ops of its own transport; give the subgroup no options",
            )
        return ours.split(ranks)

    def abort(self) -> None:
        """End the point-to-point ops, and leave the communicator to the session."""
        self._p2p.abort(Revoked(self.communicator.epoch, "the process group was aborted"))
        self.shutdown()

    def shutdown(self) -> None:
        self._p2p.close()
