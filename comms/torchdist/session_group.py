"""`SessionProcessGroup`: torch.distributed's default group over the communicator of a session's epoch.

The session owns the communicator: the group ends with the epoch, and the next epoch gets a new group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import Revoked, Unsupported
from holdfast.comms.torchdist.device_backend import refused
from holdfast.comms.torchdist.options import Options
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from holdfast.comms.torchdist.untraced import untraced


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
