"""Network namespaces as the hosts of a run of reinforcement learning: on each a node of etcd, and Monarch's host.

with ActorHosts(3, folder) as hosts:
    ...             # a driver enters hosts.entry(0); its configuration has hosts.addresses and hosts.register
    hosts.network.lose(2)

Needs what `Network` and `EtcdCluster` need.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.framed_socket import ChannelClosed
from holdfast.ft.processes.zygote_client import ForkedProcess, inherit_zygote, zygote
from holdfast.harness.testbed.netns import EnterNamespace, Network

START_SECONDS = 120.0
PORT = 26600
DRIVER = 0
"""The host of the driver."""


class ActorHosts:
    """`count` hosts, with their files in the empty folder `folder`. A context manager.

    `environ` is added to the environment of all processes on them. Raises `Unsupported` without root or pyroute2,
    `HoldfastError` without etcd or if a host does not start.
    """

    def __init__(self, count: int, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder, self._environ = folder, dict(environ or {})
        self.network = Network(count)
        hosts = self.network.addresses
        self.addresses = tuple(f"tcp://{each}:{PORT}" for each in hosts)
        self._undo = contextlib.ExitStack()
        self._started: list[ForkedProcess] = []

    def __enter__(self) -> ActorHosts:
        with contextlib.ExitStack() as undo:
            network = undo.enter_context(self.network)
            numbers = range(len(network.addresses))
            entries = [network.entry(number) for number in numbers]
            from holdfast.harness.testbed.etcd import EtcdCluster  # needs etcd3gw

            etcd = EtcdCluster(len(numbers), self._folder / "etcd", host=network.addresses, enter=entries)
            self.register = f"{undo.enter_context(etcd).url}/run"
            undo.callback(self._end)
            for number in numbers:
                self._started.append(self._start(number))
            for number in numbers:
                self._await(number)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def entry(self, host: int) -> EnterNamespace:
        """The call that moves a process to a host."""
        return self.network.entry(host)

    def of(self, pid: int) -> int:
        """The number of the host that a process is on. Raises `HoldfastError` if it is on none."""
        found = self.network.host_of(pid)
        if found is None:
            raise HoldfastError(f"process {pid} is on none of the hosts")
        return found

    def outputs(self) -> dict[str, Path]:
        """What the hosts write, by name."""
        return {each.name: each.output for each in self._started}

    def _start(self, number: int) -> ForkedProcess:
        name, temporary = f"host-{number}", self._folder / f"tmp-{number}"
        temporary.mkdir(mode=0o700)
        serve = partial(_serve, self.entry(number), self.addresses[number])
        output = self._folder / f"{name}.log"
        return zygote().spawn(serve, name=name, output=output, environ={**self._environ, "TMPDIR": str(temporary)})

    def _await(self, number: int) -> None:
        process = self._started[number]
        try:
            process.channel.recv(START_SECONDS)
        except (ChannelClosed, EOFError, TimeoutError) as error:
            why = "did not start in time" if process.alive() else process.epitaph()
            raise HoldfastError(f"host {number} of the run is not there: {why}") from error

    def _end(self) -> None:
        for each in self._started:
            each.kill()
        for each in self._started:
            each.close()
        for number in range(len(self.addresses)):
            self.network.lose(number)


def _serve(entry: EnterNamespace, address: str, channel: ProcessChannel) -> None:
    """The body of a host's process: Monarch's host, until it is killed."""
    entry()
    tempfile.tempdir = None  # the zygote may have asked for it before this process had its environment
    inherit_zygote()
    from holdfast.rl.actors.monarch_host import main

    main(address, channel.send)
