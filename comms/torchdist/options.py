"""`Options`: the `pg_options` that choose a process group's transport and device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from holdfast.comms.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Options:
    """`pg_options` of `init_process_group("holdfast")` and `new_group`.

    `backend` is a holdfast backend's name, a preference list ("ucx,gloo"), or "auto". `device` is the device of the
    group's tensors. `over` is an existing communicator to run over, which its owner closes.
    """

    backend: str = "auto"
    device: str = "cpu"
    over: Communicator | None = field(default=None, repr=False, compare=False)


def resolve_options(given: object, inherited: Options | None) -> Options:
    """The options of a new group: those given, else HOLDFAST_BACKEND, else those of the default group.

    Raises TypeError for options of another backend.
    """
    if given is not None:
        if not isinstance(given, Options):
            raise TypeError(
                f"pg_options must be a holdfast.comms.torchdist.Options, not {type(given).__name__}; "
                "pass Options(backend=NAME), or set HOLDFAST_BACKEND"
            )
        return given
    if named := os.environ.get("HOLDFAST_BACKEND"):
        return Options(backend=named)
    return inherited or Options()
