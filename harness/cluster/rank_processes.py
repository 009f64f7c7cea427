"""Ranks as processes of this machine: forked once, reused from call to call, replaced when they die; their output."""

from __future__ import annotations

import contextlib
import importlib.metadata
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.comms.plugins.registry import GROUP
from holdfast.comms.system.files import url_of
from holdfast.ft.console.output import LineSplitter, tail, visible
from holdfast.ft.launch.launcher import Launch, launch
from holdfast.ft.processes.channel import ChannelClosed
from holdfast.ft.processes.zygote_client import ForkedProcess, ZygoteClient, zygote, zygote_with
from holdfast.harness.cluster.cluster_ranks import ClusterRanks, ClusterSettings, Ended, RankResult, death
from holdfast.harness.cluster.rank_worker import Abort, CallRequest, pickle_by_value, rank_target


def last_stack(output: Path) -> str:
    """The last stack that faulthandler wrote to `output`; without one, the end of the output."""
    text = tail(output, 16000)
    _, found, stack = text.rpartition("(most recent call first):\n")
    return stack.partition("\n\nExtension modules")[0].strip() if found else text


class Echo:
    """Follows files and prints their new lines to `sys.stdout`, if `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._files: dict[Path, _FollowedFile] = {}

    def follow(self, name: str, path: Path) -> None:
        """Print lines written to `path` from now on, as `[name] line`."""
        if path not in self._files:
            self._files[path] = _FollowedFile(name, path.stat().st_size if path.exists() else 0)

    def skip(self, path: Path) -> None:
        """Do not print what `path` holds now."""
        if path in self._files:
            self._files[path] = _FollowedFile(self._files[path].name, path.stat().st_size)

    def pump(self) -> None:
        """Print the new complete lines of all files."""
        if not self._enabled:
            return
        for path, followed in self._files.items():
            if not path.exists() or path.stat().st_size <= followed.at:
                continue
            with path.open("rb") as file:
                file.seek(followed.at)
                data = file.read()
            followed.at += len(data)
            for line in followed.lines.feed(data):
                _print(f"[{followed.name}] {visible(line)}")


class _FollowedFile:
    """A followed file: its display name, the bytes read so far, and the incomplete last line."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.at, self.lines = name, at, LineSplitter()


def _print(line: str) -> None:
    """Print to the current `sys.stdout`, with characters replaced that it cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), file=sys.stdout)


def zygote_of_ranks(*workers: str) -> ZygoteClient:
    """The zygote, with the modules of workers imported, and holdfast's own plugins, which every rank loads.

    A fork has them at once; to import them takes a rank longer than to start.
    """
    return zygote_with(*workers, *_plugins())


@cache
def _plugins() -> list[str]:
    """The modules of our plugins. Those of others may not be importable, which each rank reports by itself."""
    modules = {point.module for point in importlib.metadata.entry_points(group=GROUP)}
    return sorted(module for module in modules if module.startswith("holdfast."))


class RankProcesses(ClusterRanks):
    """`size` processes that call functions together. Not safe to use from several threads."""

    def __init__(self, settings: ClusterSettings, directory: Path) -> None:
        super().__init__(settings)
        self._directory = directory
        self._processes: dict[int, ForkedProcess] = {}
        self._launch: Launch | None = None
        self._echo = Echo(settings.echo)

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._processes[rank].pid

    def start(self) -> None:
        if self._launch is None:
            self._launch = launch(self._settings.launcher, self._settings.size)
            zygote_of_ranks("holdfast.harness.cluster.rank_worker")
        for rank in range(self._settings.size):
            if rank not in self._processes:
                output = self._directory / f"rank-{rank}.log"
                self._processes[rank] = zygote().spawn(
                    rank_target(rank),
                    name=f"rank {rank}",
                    output=output,
                    threads=self._settings.threads,
                    environ={**self._settings.environ, **self._launch.environ(rank)},
                )
                self._launch.attach(rank, self._processes[rank].pidfd)
                self._echo.follow(f"rank {rank}", output)

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        abort: bool,
    ) -> list[RankResult]:
        self._replace_dead()
        self._calls += 1
        body = pickle_by_value((fn, args, kwargs))
        meeting = self._directory / f"meeting-{self._calls}"
        try:
            return self._gather(self._issue(body, url_of("file", meeting)), abort)
        except BaseException:
            self.close()
            raise
        finally:
            meeting.unlink(missing_ok=True)
            self._echo.pump()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        if self._launch is not None:
            self._launch.close()
            self._launch = None

    def _replace_dead(self) -> None:
        """Replace dead processes: each alone, or all of them where a launcher starts them together."""
        if self._settings.launcher and not all(process.alive() for process in self._processes.values()):
            self.close()
        for rank, process in list(self._processes.items()):
            if not process.alive():
                process.close()
                del self._processes[rank]
        self.start()

    def _issue(self, body: bytes, meeting: str) -> dict[int, RankResult]:
        outcomes = {}
        for rank, process in self._processes.items():
            try:
                process.channel.send(CallRequest(self._calls, self._link(rank, meeting), body))
            except ChannelClosed:
                outcomes[rank] = death(rank, process)
        return outcomes

    def _receive(self, outcomes: dict[int, RankResult], deadline: float) -> None:
        """Wait for messages or ends of the ranks without outcome, 0.1 s at most, so that output flows."""
        poller = select.poll()
        waiting = {}
        for rank, process in self._processes.items():
            if rank not in outcomes:
                for fd in (process.channel.fileno(), process.pidfd):
                    waiting[fd] = rank
                    poller.register(fd, select.POLLIN)
        left = min(0.1, max(0.0, deadline - time.monotonic()))
        for fd, _ in sorted(poller.poll(left * 1000), key=lambda event: self._is_pidfd(event[0], waiting)):
            rank = waiting[fd]
            if rank in outcomes:
                continue
            if self._is_pidfd(fd, waiting):
                outcomes[rank] = death(rank, self._processes[rank])
            else:
                self._read(rank, outcomes, deadline)
        self._echo.pump()

    def _is_pidfd(self, fd: int, waiting: Mapping[int, int]) -> bool:
        return self._processes[waiting[fd]].pidfd == fd

    def _read(self, rank: int, outcomes: dict[int, RankResult], deadline: float) -> None:
        process = self._processes[rank]
        with contextlib.suppress(TimeoutError):
            try:
                ended: Ended = process.channel.recv(max(1.0, deadline - time.monotonic()))
            except ChannelClosed:
                outcomes[rank] = death(rank, process)
                return
            if ended.number == self._calls:
                outcomes[rank] = ended.result(rank)

    def _abort(self, rank: int, reason: str) -> None:
        try:
            self._processes[rank].channel.send(Abort(self._calls, reason), timeout=1.0)
        except (ChannelClosed, TimeoutError):
            pass

    def _end_stuck(self, ranks: Sequence[int]) -> list[str]:
        """On SIGABRT their fault handlers write their stacks."""
        self._echo.pump()
        for rank in ranks:
            self._processes[rank].signal(signal.SIGCONT)
            self._processes[rank].signal(signal.SIGABRT)
        where = []
        for rank in ranks:
            process = self._processes[rank]
            try:
                process.wait(2.0)
            except TimeoutError:
                process.kill()
                process.wait(5.0)
            self._echo.skip(process.output)
            where.append(f"[rank {rank}] {last_stack(process.output)}")
        return where
