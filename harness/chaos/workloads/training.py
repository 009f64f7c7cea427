"""The workload of reinforcement learning: the body of the driver, which does what `holdfast rl train` does."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import inherit_zygote, shut_down
from holdfast.rl.config.run_config import RunConfig


def driver_of(
    config: RunConfig, directory: Path, enter: Callable[[], None] | None = None
) -> Callable[[ProcessChannel], None]:
    """The target of the driver's process: begins or resumes the run in `directory`, then sends its result.

    A failure of the run is sent in words. `enter` moves the process to its host first.
    """

    def target(channel: ProcessChannel) -> None:
        from holdfast.harness.training.driver import train_here  # needs the extra rl; a list of scenarios does not

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
