"""torch.distributed's default group over a communicator that belongs to somebody else: that of a session's epoch.

Its end is the communicator's, so the group ends with the epoch; the next epoch gets a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import Revoked, Unsupported
from holdfast.comms.torchdist.options import Options
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from holdfast.comms.torchdist.untraced import untraced
from holdfast.comms.torchdist.works import TorchWork


class Ending(Protocol):
    """What cannot outlive its group."""

    def end(self) -> None: ...


@untraced
class BorrowedProcessGroup(HoldfastProcessGroup):
    """A process group that leaves its communicator open, and its members to those who own that.

    `kept` are things that were made over the group and end with it: `remove` calls their `end()`.
    """

    supports_reconfigure = False

    def __init__(self, store: dist.Store, communicator: Communicator, options: Options, timeout: float) -> None:
        super().__init__(store, communicator, options, timeout)
        self.kept: dict[int, Ending] = {}

    def part(self, ranks: Sequence[int], options: Options) -> Communicator:
        """A communicator of `ranks` for a subgroup, which ends with this one; called by exactly those ranks.

        Raises `Unsupported` for one over another transport: the session would not end it.
        """
        ours = self.communicator
        if options.backend not in (ours.backend, "auto") or torch.device(options.device).type != ours.device.type:
            raise Unsupported(
                f"a subgroup over {options.backend!r} on {options.device} in a session over {ours.backend!r} on "
                f"{ours.device}",
                "a session ends the ops of its own transport; give the subgroup no options",
            )
        return ours.split(ranks)

    def reconfigure(
        self, given: Any, handles: Sequence[str] | None = None, timeout: timedelta | float | None = None
    ) -> TorchWork:
        raise Unsupported("to reconfigure a session's process group", "the session decides who its members are")

    def abort(self) -> None:
        """End what is beside the communicator: point-to-point ops."""
        self._p2p.abort(Revoked(self.communicator.epoch, "the process group was aborted"))
        self.shutdown()

    def shutdown(self) -> None:
        self._p2p.close()
