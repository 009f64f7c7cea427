"""Does a service lose a call when its replicas are killed? `python docs/experiments/service_kills.py`.

Kills replicas in a row under six clients. Prints how long a call took if its replica was killed, how long until the
replacement served, whether a call was lost, and how the descriptors of the driver grew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.ft.console.units import counted
from holdfast.ft.processes.zygote_client import shut_down
from holdfast.rl.actors.engine import Engine, LocalEngine, endpoint
from holdfast.rl.actors.service import ReplicaEvent, Service, ServiceOptions

REPLICAS, CLIENTS = 3, 6
_CALL_SECONDS = 0.005
_PATIENCE = 60.0
_BALLAST = 16 << 20
_SETTLE_SECONDS = 0.05
"""Seconds between two looks whether a replica has the call."""


class BallastActor:
    """An actor of the size of one with torch and a small model."""

    def __init__(self) -> None:
        import torch

        self.ballast = torch.zeros(_BALLAST, device="cpu") + 1.0

    @endpoint(idempotent=True)
    async def work(self, number: int, seconds: float, mark: str = "") -> int:
        """Give `number` back after a while, the first time; the file `mark` has the process that was asked then."""
        if mark and Path(mark).exists():
            return number
        if mark:
            Path(mark).write_text(str(os.getpid()))
        await asyncio.sleep(seconds)
        return number


class KillFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; times in seconds."""

    engine: str
    kills: int
    calls: int
    start: float
    rerouted: tuple[float, ...]
    """From SIGKILL to the answer that another replica gave to the call in flight."""
    replaced: tuple[float, ...]
    """From SIGKILL to the replacement's service."""
    descriptors: tuple[int, ...]
    """Of the driver, before each kill."""


async def measure(engine: Engine, name: str, kills: int, folder: Path) -> KillFigures:
    """Kill one of three replicas again and again. Raises if a call is lost, or answered wrongly."""
    events: list[ReplicaEvent] = []
    began = time.monotonic()
    options = ServiceOptions(BallastActor, num_replicas=REPLICAS, engine=engine, observer=events.append)
    async with await options.as_service() as service:
        start = time.monotonic() - began
        over = False

        async def client(first: int) -> int:
            number = first
            while not over:
                assert await service.work.route(number, _CALL_SECONDS) == number
                number += 1
            return number - first

        clients = [asyncio.create_task(client(each * 10**9)) for each in range(CLIENTS)]
        rerouted, descriptors = list[float](), list[int]()
        killed = list[float]()
        for kill in range(kills):
            await _until(service, kill)
            descriptors.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
            mark = folder / str(kill)
            probe = asyncio.create_task(_probe(service, mark))
            victim = await _process_in(mark)
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)
            rerouted.append(await probe - killed[-1])
        await _until(service, kills)
        over = True
        calls = sum(await asyncio.gather(*clients))
    ready = [each.time for each in events if each.kind == "ready"][REPLICAS:]
    return KillFigures(
        engine=name,
        kills=kills,
        calls=calls,
        start=start,
        rerouted=tuple(rerouted),
        replaced=tuple(there - gone for gone, there in zip(killed, ready, strict=True)),
        descriptors=tuple(descriptors),
    )


async def _probe(service: Service, mark: Path) -> float:
    """Have a call in flight on the replica that is killed next; when another one's answer is here."""
    assert await service.work.options(timeout=_PATIENCE).route(-1, _PATIENCE, str(mark)) == -1
    return time.monotonic()


async def _process_in(mark: Path) -> int:
    """The process that has the call, once it has written that."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            await asyncio.sleep(_SETTLE_SECONDS)
            if mark.exists() and (said := mark.read_text()):
                return int(said)


async def _until(service: Service, lost: int) -> None:
    async with asyncio.timeout(_PATIENCE):
        while service.status().lost < lost or any(each.health != "ready" for each in service.status().replicas):
            await asyncio.sleep(0.002)


def lines(found: KillFigures) -> Sequence[str]:
    """The figures in words."""
    return (
        f"{found.engine}: {counted(found.kills, 'kill')} under {CLIENTS} clients, {found.calls} calls, none lost",
        f"  {REPLICAS} replicas serve after {found.start:.2f} s",
        f"  SIGKILL to the rerouted call's answer: {_spread(found.rerouted)}",
        f"  SIGKILL to the replacement's service: {_spread(found.replaced)}",
        f"  descriptors: {min(found.descriptors)} to {max(found.descriptors)}, at last {found.descriptors[-1]}",
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds) * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms"


def _monarch() -> Engine:
    from holdfast.rl.actors.monarch import MonarchEngine

    return MonarchEngine()


async def run(name: str, kills: int) -> KillFigures:
    """Measure one engine."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalEngine() if name == "local" else _monarch() as engine:
            return await measure(engine, name, kills, Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("local", "monarch"), default=("local", "monarch"))
    parser.add_argument("--kills", type=int, default=150)
    asked = parser.parse_args()
    for each in asked.engines:
        print(*lines(asyncio.run(run(each, asked.kills))), sep="\n", flush=True)
    shut_down()
