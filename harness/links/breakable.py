"""Decides whether the links between ranks of this host can be broken: the proxy sees only TCP."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.comms.plugins.registry import registry

_TCP_ALONE = frozenset(["tcp", "self"])


def unbreakable(backend: str, environ: Mapping[str, str], *, many_hosts: bool = False) -> str | None:
    """The reason why faults of links would break the control channel alone; None if all bytes pass the proxy.

    `backend` may list several in order of preference: any of them may be taken. `environ` is added to the environment
    of the ranks. `many_hosts`: each rank believes the others to be on other hosts. Raises `BackendUnavailable` for an
    unknown backend.
    """
    for name in (each.strip() for each in backend.split(",")):
        variable = registry().backend(name).info.capabilities.tcp
        if variable == "always":
            continue
        if not variable:
            return f"the {name} backend has no links to break: between processes of one host it does not go over TCP"
        value = environ.get(variable, os.environ.get(variable, ""))
        if not (set(value.split(",")) <= _TCP_ALONE if value else many_hosts):
            is_now = f"{variable} is {value!r}" if value else f"{variable} is not set"
            return f'the {name} backend has no links to break unless {variable} = "tcp,self": {is_now}'
    return None
