"""Which transport a process group runs over."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from holdfast.comms.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Options:
    """`pg_options` of `init_process_group("holdfast")` and `new_group`.

    `backend` is a holdfast backend's name, a preference list ("ucx,gloo"), or "auto"; `device` the device whose tensors
    the group takes. `over` is a communicator that exists already and stays its owner's.
    """

    backend: str = "auto"
    device: str = "cpu"
    over: Communicator | None = field(default=None, repr=False, compare=False)


def chosen(given: object, inherited: Options | None) -> Options:
    """The options of a new group: what was given, else the environment, else those of the default group.

    TypeError for options of another backend.
    """
    if given is not None:
        if not isinstance(given, Options):
            raise TypeError(
                f"pg_options must be a holdfast.comms.torchdist.Options, not {type(given).__name__}; "
                "pass Options(backend='shm'), or set HOLDFAST_BACKEND"
            )
        return given
    if named := os.environ.get("HOLDFAST_BACKEND"):
        return Options(backend=named)
    return inherited or Options()
