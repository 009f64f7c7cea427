"""Turns a fork of the zygote into a Monarch proc. The zygote itself never imports Monarch, which starts threads."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import suppress
from importlib import import_module

from holdfast.ft.processes.channel import ProcessChannel


def become_proc(channel: ProcessChannel) -> None:
    """Do what Monarch's own bootstrap command does; its environment says which proc this is."""
    channel.close()
    sys.argv[:] = ["bootstrap_main"]
    bootstrap = import_module("monarch._src.actor.bootstrap_main")
    with suppress(ImportError):
        # Made under "forkserver", this lock is a named semaphore, which outlives a process that is killed.
        import_module("tqdm").tqdm.get_lock()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        bootstrap.invoke_main()
    except SystemExit as ended:
        if ended.code:
            raise
