"""`HoldfastBackend`: the interface of torch 2.14 for backends in Python, for the tensors of one device.

It lets a group have a backend for each device ("cpu:holdfast_device,cuda:nccl"). A group that is holdfast's as a whole
is a `HoldfastProcessGroup` instead: behind this interface, torch 2.14 and 2.15 drop what a Work reports beside `wait`
and `get_future` (completion, failure, the sender), and a group's ranks cannot change.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from holdfast.comms.errors import Unsupported
from holdfast.comms.torchdist.works import TorchWork

if TYPE_CHECKING:
    from holdfast.comms.torchdist.process_group import HoldfastProcessGroup

AVAILABLE = hasattr(c10d.Backend, "reconfigure")
"""Whether the installed torch calls methods of its backends that Python overrides."""


def refused(name: str, instead: str) -> Callable[..., Any]:
    """A method of torch's that raises `Unsupported`: what is accepted and ignored would be found out too late."""

    def refuse(self: object, *arguments: object, **named: object) -> Any:
        raise Unsupported(f"{name} of a holdfast process group", instead)

    return refuse


class HoldfastBackend(c10d.Backend):
    """One rank of a group, for torch's ProcessGroup. It forwards all calls to `group`."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False
    supports_abort_hooks = supports_completion_hooks = False

    def __init__(self, group: HoldfastProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def name(self) -> str:
        return self.group.name()

    getBackendName = name  # noqa: N815  # torch's name

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(self.group.name(), timedelta(seconds=self.group.timeout))

    new_window = refused("new_window of one device's backend", "use a group that is holdfast's as a whole")
    register_abort_hook = unregister_abort_hook = refused(
        "register_abort_hook of one device's backend", "use a group that is holdfast's as a whole"
    )
    get_reconfigure_handle = refused("get_reconfigure_handle of one device's backend", "use a group that is holdfast's")
    reconfigure = refused("reconfigure of one device's backend", "use a group that is holdfast's as a whole")
    split = refused("split of one device's backend", "call new_group()")
    merge = refused("merge of one device's backend", "use a group that is holdfast's as a whole, and reconfigure()")
    shrink = refused("shrink of one device's backend", "use a group that is holdfast's as a whole, and reconfigure()")

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self.group.allreduce(tensors, opts)

    def start_coalescing(self) -> None:
        self.group._start_coalescing(self.group.communicator.device)

    def end_coalescing(self) -> TorchWork:
        return self.group._end_coalescing(self.group.communicator.device)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(getattr(opts, "timeout", opts), wait_all_ranks)


def forward_shared_calls(group: type[HoldfastProcessGroup]) -> None:
    """Let a backend forward to its group each call that torch has for both, and the backend does not define."""

    def forwarded(name: str) -> Callable[..., Any]:
        return lambda self, *arguments, **named: getattr(self.group, name)(*arguments, **named)

    shared = (vars(group).keys() & set(dir(c10d.Backend))) - vars(HoldfastBackend).keys()
    for name in shared:
        if callable(getattr(group, name)) and not name.startswith("__"):
            setattr(HoldfastBackend, name, forwarded(name))
