"""The driver of a run: the engine that a configuration names, and the run in it. It shows nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.console.units import counted
from holdfast.ft.control import event_loop
from holdfast.ft.listen_address import choose_address, local_addresses
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import inherit_zygote, shut_down
from holdfast.ft.schedulers import found_hosts
from holdfast.harness.training import PRELOAD
from holdfast.rl.actors.engine import Engine, LocalEngine
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Evaluated, Event, StepTrained, WeightsServed
from holdfast.rl.run.telemetry import Observer
from holdfast.rl.run.training_run import RunResult, TrainingRun

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


def engine_of(config: RunConfig, logs: Path) -> Engine:
    """The engine that a configuration names; processes of this host write their output to files in `logs`.

    Raises `AddressNeeded` for a run on several hosts without HOLDFAST_INTERFACE, and `NotUnderSlurm`.
    """
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    if config.engine.kind == "local":
        return LocalEngine(logs=logs, preload=PRELOAD)
    from holdfast.rl.actors.monarch import MonarchEngine

    hosts = found_hosts(config.engine.hosts)
    if not hosts:
        return MonarchEngine(logs=logs, preload=PRELOAD)
    why = f"the run is on {counted(len(hosts), 'host')}"
    listen = choose_address(os.environ.get("HOLDFAST_INTERFACE", ""), why, local_addresses())
    return MonarchEngine(logs=logs, preload=PRELOAD, listen=listen, silence=config.engine.silence)


class TensorBoard:
    """An observer that writes scalars as TensorBoard reads them, by step. Close it after use."""

    def __init__(self, path: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer: SummaryWriter = SummaryWriter(str(path), flush_secs=5)

    def __call__(self, event: Event) -> None:
        add = self._writer.add_scalar
        match event:
            case StepTrained():
                step = event.version
                add("train/reward", event.reward, step)
                add("train/loss", event.loss, step)
                add("train/gradient_norm", event.gradient_norm, step)
                add("train/tokens", event.tokens, step)
                add("train/staleness", max(event.staleness, default=0), step)
                add("trainers/size", event.size, step)
                add("trainers/epoch", event.epoch, step)
            case Evaluated():
                if event.reward is not None:
                    add("evaluation/reward", event.reward, event.version)
                add("evaluation/failed", event.failed, event.version)
            case WeightsServed():
                add("weights/seconds_to_served", event.seconds, event.version)
            case _:
                return

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._writer.close()


def train_here(
    config: RunConfig, directory: Path, folder: Path = Path(), observers: Sequence[Observer] = ()
) -> RunResult:
    """Be the driver of a run until it is done. Raises `RunFailed`, and the errors of the run's beginning."""
    with RunDirectory(directory).open() as opened:
        return run_until_signalled(_run(config, opened, folder, observers))


async def _run(config: RunConfig, directory: RunDirectory, folder: Path, watching: Sequence[Observer]) -> RunResult:
    observers = list(watching)
    board = TensorBoard(directory.path / "tensorboard") if config.telemetry.tensorboard else None
    if board is not None:
        observers.append(board)
    try:
        async with engine_of(config, directory.path / "output") as engine:
            return await TrainingRun(config, directory, engine, observers, folder).run()
    finally:
        if board is not None:
            board.close()


def driver_of(
    config: RunConfig, directory: Path, enter: Callable[[], None] | None = None
) -> Callable[[ProcessChannel], None]:
    """The target of the driver's process: begins or resumes the run in `directory`, then sends its result.

    A failure of the run is sent in words. `enter` moves the process to its host first.
    """

    def target(channel: ProcessChannel) -> None:
        if enter is not None:
            enter()
        tempfile.tempdir = None  # the zygote may have asked for it before this process had its environment
        inherit_zygote()
        try:
            result: dict[str, Any] = {"digest": train_here(config, directory).digest}
        except HoldfastError as error:
            result = {"error": describe(error)}
        channel.send(result)
        shut_down()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # all is closed; at a usual exit Monarch waits a second for processes that are gone

    return target


T = TypeVar("T")


def run_until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but SIGTERM and SIGHUP cancel `work` as SIGINT does, and then exit with 128 + the signal.

    An exception that is raised out of a signal handler would end the loop between two callbacks, and leave what its
    tasks have opened. Signals that are ignored stay so, and threads other than the main one get none.
    """
    received: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            if not received:
                received.append(number)
                task.cancel()

        for number in handled:
            loop.add_signal_handler(number, end, number)
        return await work

    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if main_thread}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        return event_loop.run(main())
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        work.close()  # Ctrl-C may come before `main` awaits it
        for number in handled:
            signal.signal(number, before[number])
