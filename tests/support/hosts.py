"""Processes of one machine as if on several hosts: by a variable, or in network namespaces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.comms.transport.liveness import HOST, this_host
from holdfast.ft.launch.local_launcher import GuardedProcess
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness.testbed.netns import Network


def be_alone_on_host() -> None:
    """Make this process count as the only one of its host; its children too, unless they call this themselves."""
    os.environ[HOST] = str(os.getpid())
    this_host.cache_clear()


def start_holdfast(network: Network, host: int, arguments: Sequence[str], output: Path) -> ForkedProcess:
    """Start the command `holdfast` on a host, in a process that is forked: it has all that it imports."""
    entry = network.entry(host)

    def target(channel: ProcessChannel) -> None:
        from holdfast.harness.cli.app import app  # here, or it would be sent by value

        entry()
        try:
            app(list(arguments))
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)

    return zygote().spawn(target, name=output.stem, output=output, environ={"COLUMNS": "200"})


def start_program(network: Network, host: int, command: Sequence[str], environ: Mapping[str, str]) -> GuardedProcess:
    """Start any program on a host; its descendants end with it."""
    entry = network.entry(host)
    inside = ["nsenter", f"--net={entry.path}", "--", *command]
    return GuardedProcess(inside, {**os.environ, HOST: entry.name, **environ})
