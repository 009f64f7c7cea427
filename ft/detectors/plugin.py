"""The built-in detectors, offered through the entry-point group `holdfast` like any plugin."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.comms.plugins.kernel_calls import refused
from holdfast.comms.plugins.spec import API_VERSION, Available, DetectorInfo, Unavailable, hookimpl
from holdfast.ft.detectors.detector import Detector, DetectorContext


def _pidfd(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.pidfd import PidfdDetector

    return PidfdDetector(context)


def _heartbeat(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.heartbeat import HeartbeatDetector

    return HeartbeatDetector(context)


def _observers(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.observers import ObserversDetector

    return ObserversDetector(context)


def _transport(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.transport_errors import TransportErrorsDetector

    return TransportErrorsDetector(context)


def _progress(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.progress import ProgressDetector

    return ProgressDetector(context)


def _nccl_ras(context: DetectorContext) -> Detector:
    from holdfast.ft.detectors.nccl_ras import NcclRasDetector

    return NcclRasDetector(context)


def _available() -> Available:
    return Available()


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
    return [
        DetectorInfo(
            "pidfd", API_VERSION, "the kernel reports the end of processes on this host", "proof", _kernel, _pidfd
        ),
        DetectorInfo(
            "heartbeat",
            API_VERSION,
            "heartbeats in shared memory on this host; a silent process is inspected, and killed if it is stopped",
            "proof",
            _shared_memory,
            _heartbeat,
        ),
        DetectorInfo(
            "observers",
            API_VERSION,
            "heartbeats between hosts; a majority of a member's observers must agree",
            "suspicion",
            _available,
            _observers,
        ),
        DetectorInfo(
            "transport",
            API_VERSION,
            "failures of peers that the backend reports",
            "suspicion",
            _available,
            _transport,
        ),
        DetectorInfo(
            "progress",
            API_VERSION,
            "a rank that did not enter an op before it timed out on the others",
            "suspicion",
            _shared_memory,
            _progress,
        ),
        DetectorInfo(
            "nccl_ras",
            API_VERSION,
            "over nccl: NCCL's own RAS service tells which processes it has lost",
            "suspicion",
            _available,
            _nccl_ras,
        ),
    ]
