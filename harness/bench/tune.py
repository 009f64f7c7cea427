"""Measures what a message costs over a backend, for the cost model that chooses collective algorithms.

Two ranks play ping-pong; half a round trip is one message. Latency and bandwidth are the best fit to the medians over
all sizes. Errors are relative to the time of each size, so that small messages count as much as large ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from holdfast.comms.algorithms.message_passing import cost, tuning
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.communicator import Communicator
from holdfast.comms.plugins.registry import backends, registry
from holdfast.comms.transport.base import Link
from holdfast.harness.cluster.local_cluster import LocalCluster

SIZES = (8, 256, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes of the messages that are timed."""

_SECONDS_A_SIZE = 0.3
_LEAST, _MOST = 8, 2000
_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The algorithm that runs `op` of `nbytes` on `ranks` ranks, and the modelled seconds of each algorithm."""

    op: str
    ranks: int
    nbytes: int
    algorithm: str
    seconds: Mapping[str, float]


def fit(samples: Mapping[int, float]) -> tuple[float, float, float]:
    """Latency (s), bandwidth (B/s) and the worst relative error of the model over {bytes: seconds a message}.

    ValueError for fewer than two sizes.
    """
    if len(samples) < 2:
        raise ValueError("a latency and a bandwidth need messages of two sizes")
    nbytes = np.array(list(samples), dtype=np.float64)
    seconds = np.array(list(samples.values()), dtype=np.float64)
    rows = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, byte), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    latency = max(float(latency), float(seconds.min()) / 10)
    byte = max(float(byte), float(np.min(seconds / nbytes)) / 10)
    return latency, 1 / byte, float(np.max(np.abs(rows @ [latency, byte] - 1)))


def measure(backend: str) -> tuple[str, tuning.Measured] | None:
    """The name and the measured costs of the link that `backend` uses between two ranks of this machine.

    None if the backend does not choose algorithms by cost. Raises the errors of `LocalCluster`.
    """
    with LocalCluster(2, backend, environ={"HOLDFAST_CHECK": "0"}) as cluster:
        name, samples = cluster.run(_ping_pong, SIZES)[0]
    if not name:
        return None
    latency, bandwidth, error = fit(samples)
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    return name, tuning.Measured(latency, bandwidth, moment, round(error, 3))


def _ping_pong(comm: Communicator, sizes: Sequence[int]) -> tuple[str, dict[int, float]]:
    transport: Any = comm._transport
    if not isinstance(transport, MessageTransport) or not transport._link.name:
        return "", {}
    return transport._link.name, {nbytes: _half_round_trip(comm, transport, nbytes) for nbytes in sizes}


def _half_round_trip(comm: Communicator, transport: MessageTransport, nbytes: int) -> float:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)

    def round_trip() -> float:
        deadline = time.monotonic() + _DEADLINE
        began = time.perf_counter()
        if comm.rank == 0:
            transport.send(tensor, 1, 0, deadline)
            transport.recv(tensor, 1, 0, deadline)
        else:
            transport.recv(tensor, 0, 0, deadline)
            transport.send(tensor, 0, 0, deadline)
        return time.perf_counter() - began

    comm.barrier()
    first = min(round_trip() for _ in range(3))
    count = comm.broadcast_object(int(min(max(_SECONDS_A_SIZE / first, _LEAST), _MOST)), 0)
    return statistics.median(round_trip() for _ in range(count)) / 2


def tunable() -> list[str]:
    """The backends that can run here and may choose algorithms by cost."""
    return [name for name, backend in backends().items() if backend.info.connect is not None and not backend.missing]


def tune(names: Sequence[str]) -> dict[str, tuning.Measured]:
    """Measure the backends and add the results to the stored ones; returns them by link.

    Raises `CorruptData`, before anything is measured, if the stored ones cannot be read.
    """
    kept = dict(tuning.load().links)
    found = dict(filter(None, map(measure, names)))
    if found:
        tuning.save(tuning.Tuning(links=kept | found))
    return found


def links() -> dict[str, tuple[Link, tuning.Measured | None]]:
    """Every link by name: the constants in use here, and their measurement, or None for a default."""
    measured = tuning.load().links
    known = {link.name: link for backend in registry().backends.values() for link in backend.links}
    for name, each in measured.items():
        known[name] = Link(each.latency, each.bandwidth, name)
    return {name: (link, measured.get(name)) for name, link in sorted(known.items())}


def choices(link: Link, ranks: Sequence[int], sizes: Sequence[int]) -> list[AlgorithmChoice]:
    """One choice over `link` for each op with several algorithms, each number of ranks and each size."""
    found = []
    for op, costs in cost.OPS.items():
        for count in ranks:
            for nbytes in sizes:
                seconds = costs(link, count, nbytes)
                found.append(AlgorithmChoice(op, count, nbytes, cost.choose(seconds), seconds))
    return found
