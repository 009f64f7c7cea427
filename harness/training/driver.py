"""The driver of a run: the engine that a configuration names, and the run in it. It shows nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.ft.console.interruptible import run_interruptible
from holdfast.ft.console.units import counted
from holdfast.ft.environment.listen_address import choose_address
from holdfast.ft.environment.local_addresses import local_addresses
from holdfast.ft.environment.slurm_hosts import found_hosts
from holdfast.harness.training.preload import PRELOAD
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.local import LocalEngine
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.telemetry import Observer, TensorBoard
from holdfast.rl.run.training_run import RunResult, TrainingRun


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


def train_here(
    config: RunConfig, directory: Path, folder: Path = Path(), observers: Sequence[Observer] = ()
) -> RunResult:
    """Be the driver of a run until it is done. Raises `RunFailed`, and the errors of the run's beginning."""
    with RunDirectory(directory).open() as opened:
        return run_interruptible(_run(config, opened, folder, observers))


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
