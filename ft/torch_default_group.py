"""torch.distributed's default group in a session: made anew for each epoch that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast.comms.communicator import Communicator

if TYPE_CHECKING:
    from holdfast.comms.torchdist.session_group import SessionProcessGroup


class DefaultGroup:
    """The default group of one session; made at first use."""

    def __init__(self) -> None:
        self._group: SessionProcessGroup | None = None

    def over(self, comm: Communicator, store: dist.Store, timeout: float) -> SessionProcessGroup:
        """The group over `comm`; its subgroups meet at `store`. `timeout` (seconds) is that of its ops.

        Raises HoldfastError if torch has another default group in this process.
        """
        from holdfast.comms.torchdist.default_group import install

        if self._group is None or self._group.communicator is not comm:
            self.drop()
            self._group = install(comm, dist.PrefixStore("torch", store), timeout)
        return self._group

    def drop(self) -> None:
        """Take the group from torch: its epoch is over. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            from holdfast.comms.torchdist.default_group import remove

            remove(group)
