"""The plugin that offers holdfast's own fault types, through the same entry-point group as other plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.comms.plugins.spec import hookimpl


@hookimpl
def holdfast_faults() -> Mapping[str, Callable[..., Any]]:
    from holdfast.harness.chaos.faults import network, process, storage

    return {
        "kill": process.Kill,
        "pause": process.Pause,
        "slow": process.Slow,
        "flap": process.Flap,
        "join": process.Join,
        "cut": network.Cut,
        "partition": network.Partition,
        "delay": network.Delay,
        "slow-link": network.SlowLink,
        "lossy": network.Lossy,
        "corrupt": network.Corrupt,
        "reset": network.Reset,
        "link-cut": network.LinkCut,
        "host-lost": network.HostLost,
        "register-away": storage.RegisterOutage,
        "disk-full": storage.DiskFull,
        "corrupt-memory": process.CorruptMemory,
    }
