"""The built-in detectors, offered through the entry-point group `holdfast` like any plugin."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from holdfast.comms.plugins.spec import API_VERSION, Available, DetectorInfo, Unavailable, hookimpl, refused
from holdfast.ft.detectors.detector import Detector, DetectorContext

Probe = Callable[[], Available | Unavailable]


def _made_by(name: str) -> Callable[[DetectorContext], Detector]:
    """Makes the detector `MODULE.CLASS` of this folder, which is imported only then."""
    module, _, kind = name.partition(".")

    def make(context: DetectorContext) -> Detector:
        made: Detector = getattr(importlib.import_module(f"holdfast.ft.detectors.{module}"), kind)(context)
        return made

    return make


def _kernel() -> Available | Unavailable:
    """Whether pidfds are available here, and whether they report the end of threads too."""
    if (wrong := refused("pidfd_open", "pidfd_send_signal")) is not None:
        return wrong
    major, minor = map(int, os.uname().release.split("-")[0].split(".")[:2])
    return Available(
        "reports the end of threads too, at once" if (major, minor) >= (6, 9) else "reports the end of processes"
    )


def _shared_memory() -> Available | Unavailable:
    if not Path("/proc/self/stat").exists():
        return Unavailable("/proc is not mounted: processes cannot be looked at")
    return Available()


@hookimpl
def holdfast_detectors() -> list[DetectorInfo]:
    def info(name: str, about: str, kind: Literal["proof", "suspicion"], probe: Probe, made: str) -> DetectorInfo:
        return DetectorInfo(name, API_VERSION, about, kind, probe, _made_by(made))

    ends = "the kernel reports the end of processes on this host"
    silence = "heartbeats in shared memory on this host; a silent process is inspected, and killed if it is stopped"
    between = "heartbeats between hosts; a majority of a member's observers must agree"
    behind = "a rank that did not enter an op before it timed out on the others"
    return [
        info("pidfd", ends, "proof", _kernel, "process_watch.PidfdDetector"),
        info("heartbeat", silence, "proof", _shared_memory, "heartbeat.HeartbeatDetector"),
        info("observers", between, "suspicion", Available, "observers.ObserversDetector"),
        info(
            "transport",
            "failures of peers that the backend reports",
            "suspicion",
            Available,
            "progress.TransportErrorsDetector",
        ),
        info("progress", behind, "suspicion", _shared_memory, "progress.ProgressDetector"),
        info(
            "nccl_ras",
            "over nccl: NCCL's own RAS service tells which processes it has lost",
            "suspicion",
            Available,
            "nccl_ras.NcclRasDetector",
        ),
    ]
