"""The plugin that offers holdfast's own fault types, through the same entry-point group as other plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.comms.plugins.spec import hookimpl


@hookimpl
def holdfast_faults() -> Mapping[str, Callable[..., Any]]:
    from holdfast.harness.chaos.faults import disk, link, process, register
    from holdfast.harness.chaos.faults.cable import HostLost, LinkCut

    return {
        "kill": process.Kill,
        "pause": process.Pause,
        "slow": process.Slow,
        "flap": process.Flap,
        "join": process.Join,
        "cut": link.Cut,
        "partition": link.Partition,
        "delay": link.Delay,
        "slow-link": link.SlowLink,
        "lossy": link.Lossy,
        "corrupt": link.Corrupt,
        "reset": link.Reset,
        "link-cut": LinkCut,
        "host-lost": HostLost,
        "register-away": register.RegisterOutage,
        "disk-full": disk.DiskFull,
        "corrupt-memory": process.CorruptMemory,
    }
