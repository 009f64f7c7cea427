"""`holdfast run`: start a script in several processes of this machine, which form one job by `ft.Session`.

The launcher starts processes, shows their output, and ends them when it ends. The sessions themselves detect deaths,
assign ranks and recover. The launcher ends the job only if the sessions cannot know that it is over: too few processes
are left for it ever to go on.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.registry import registry
from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft.console.console import console
from holdfast.ft.console.output import LineSplitter
from holdfast.ft.console.units import counted
from holdfast.ft.console.visible import visible, visible_but_colours
from holdfast.ft.launch import run_report
from holdfast.ft.launch.exit_status import how_it_ended
from holdfast.ft.launch.guarded_process import GuardedProcess
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.launch.launcher import Launch
from holdfast.ft.launch.launchers import launch as launch_ranks
from holdfast.ft.launch.run_report import LastErrorLine
from holdfast.ft.launch.torch_environment import TorchEnvironment
from holdfast.ft.membership.view import View
from holdfast.ft.registers import RegisterAway

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL, and from the end of the job, or of its last member, to that of other processes."""

LOOK = 0.25
"""Seconds between two reads of the register."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes to start: `size` + `spares` of `command`. They may run for `grace` seconds after the job.

    `min_size` and `shards` are defaults for sessions whose script does not set them; `check` turns agreement checks on.
    """

    command: tuple[str, ...]
    size: int
    spares: int = 0
    backend: str = "shm"
    job: str = "job"
    grace: float = float("inf")
    min_size: int | None = None
    shards: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.spares < 0:
            raise ValueError(f"size={self.size} must be at least 1 and spares={self.spares} not negative")
        if self.min_size is not None and not 1 <= self.min_size <= self.size:
            raise ValueError(f"min_size={self.min_size} must be at least 1 and at most size={self.size}")
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards={self.shards} must be at least 1")
        if not self.command:
            raise ValueError("there is no script to run")


class Launcher:
    """The processes of one job, from start to end. `start` is the launcher that the plan's backend needs."""

    def __init__(self, plan: LaunchPlan, contract: LocalContract, console: Console, start: Launch) -> None:
        self._plan, self._contract, self._console, self._launch = plan, contract, console, start
        self._selector = selectors.DefaultSelector()
        self._processes: list[GuardedProcess] = []
        self._lines: dict[int, LineSplitter] = {}
        self._words: dict[int, LastErrorLine] = {}
        self._began = time.monotonic()

    def run(self) -> int:
        """Start all processes and show their output until their end; returns 0 if the job ended well, else 1."""
        with TorchEnvironment(self._plan.size) as self._torch:
            try:
                self._start()
                self._follow()
            finally:
                self._end()
                self._selector.close()
        return self._verdict()

    def _start(self) -> None:
        cores = len(os.sched_getaffinity(0))
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self._plan.size))),
            "PYTHONUNBUFFERED": "1",
            **({"HOLDFAST_CHECK": "1"} if self._plan.check else {}),
            **self._contract.environ(),
        }
        for number in range(self._plan.size + self._plan.spares):
            own = {**self._torch.of(number), **self._launch.environ(number)}
            process = GuardedProcess(self._plan.command, {**environ, **own})
            self._processes.append(process)
            self._words[number] = LastErrorLine()
            self._selector.register(process.output, selectors.EVENT_READ, number)
            self._selector.register(process.pidfd, selectors.EVENT_READ, number)
            self._launch.attach(number, process.pidfd)

    def _follow(self) -> None:
        """Show output until all processes are gone, or the job is over and the time of the others is up."""
        look, over = time.monotonic(), None
        began = busy = look
        while self._running():
            self._turn(LOOK)
            now = time.monotonic()
            if now < look:
                continue
            look = now + LOOK
            if over is None:
                over = self._over() or self._give_up()
                began = busy = now
            elif self._members_at_work(over):
                busy = now
            if over is not None and now >= min(began + self._plan.grace, busy + GRACE):
                for number, process in enumerate(self._processes):
                    if process.returncode is None:
                        text = f"still ran {now - began:.1f} s after the job was over: it is ended (pid {process.pid})"
                        self._say(number, text, "bold red")
                return

    def _running(self) -> bool:
        return any(process.returncode is None for process in self._processes)

    def _turn(self, seconds: float) -> None:
        """Wait up to `seconds` for output or the end of a process, and handle it."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
                os.close(key.fileobj)
                self._reap(key.data)
            else:
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _read(self, stream: IO[bytes], number: int) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(stream)
            stream.close()
        lines = self._lines.setdefault(number, LineSplitter())
        for line in lines.feed(data) if data else lines.end():
            self._words[number].hear(line)
            self._say(number, line)

    def _reap(self, number: int) -> None:
        """Reap a process, ending it if it still runs, and print a bad exit status."""
        process = self._processes[number]
        if code := process.reap():
            self._say(number, f"{how_it_ended(code)} (pid {process.pid})", "bold red")

    def _say(self, number: int, line: str, style: str = "") -> None:
        colour = COLOURS[number % len(COLOURS)]
        shown = Text.from_ansi(visible_but_colours(line), style=style) if "\x1b" in line else Text(visible(line), style)
        self._console.print(Text.assemble((f"[{number}] ", colour), shown), soft_wrap=True)

    def _view(self) -> View | None:
        with self._contract.register() as register:
            return register.read()

    def _over(self) -> View | None:
        """The last view of the job if it is over; else None."""
        view = self._view()
        return view if view is not None and view.phase in ("finished", "failed") else None

    def _give_up(self) -> View | None:
        """End the job if fewer processes are left than it needs, as no other can join.

        Returns its last view if so.
        """
        left = sum(process.returncode is None for process in self._processes)
        view = self._view()  # after the count: a job's last view is in the register before its members end
        if view is None or view.phase not in ("forming", "running") or left >= view.job.min_size:
            return None
        needed = counted(view.job.min_size, "member")
        words = f"{counted(left, 'process is', 'processes are')} left of the {needed} needed, and nobody else can come"
        last = msgspec.structs.replace(view, epoch=view.epoch + 1, phase="failed", reason=words)
        with self._contract.register() as register, contextlib.suppress(RegisterAway):
            return last if register.compare_and_set(view.epoch, last) else None
        return None

    def _members_at_work(self, last: View) -> bool:
        """Whether a member of a finished job still works after the last step; a stopped process does not."""
        return last.phase == "finished" and any(
            process.returncode is None and not is_stopped(process.pid) for process in self._members(last).values()
        )

    def _members(self, view: View) -> dict[int, GuardedProcess]:
        """The launched processes that are members of a view, by rank."""
        processes = {process.pid: process for process in self._processes}
        ranks = enumerate(member.peer.pid for member in view.members)
        return {rank: processes[pid] for rank, pid in ranks if pid in processes}

    def _end(self) -> None:
        """End all processes that still run, with their process groups, and show their last output."""
        for sent in (signal.SIGTERM, signal.SIGCONT):
            for process in self._processes:
                process.signal(sent)
        deadline = time.monotonic() + GRACE
        while self._running() and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        for number, process in enumerate(self._processes):
            if process.returncode is None:
                self._reap(number)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                self._drain(key.fileobj, key.data)  # type: ignore[arg-type]

    def _drain(self, stream: IO[bytes], number: int) -> None:
        os.set_blocking(stream.fileno(), False)
        try:
            while not stream.closed:
                self._read(stream, number)
        except BlockingIOError:
            stream.close()

    def _verdict(self) -> int:
        status = self._judge()
        for line in run_report.table(self._failures()) if status else ():
            self._fail(line)
        return status

    def _failures(self) -> list[run_report.ProcessFailure]:
        """The processes that ended with an error."""
        events = (event for event in self._contract.events() if event["time"] >= self._began)
        ranks = run_report.last_ranks(events)
        return [
            run_report.ProcessFailure(ranks.get(process.pid), process.pid, process.returncode, str(self._words[number]))
            for number, process in enumerate(self._processes)
            if process.returncode
        ]

    def _judge(self) -> int:
        view = self._view()
        if view is None:
            ended = "no process joined the job by holdfast.ft.Session(), so that nothing would have survived a death"
            codes = [process.returncode for process in self._processes]
            if any(codes):
                self._fail(f"{ended}; exit statuses {codes}")
            else:
                self._console.print(Text(f"holdfast run: all ended well; {ended}"), soft_wrap=True)
            return 1 if any(codes) else 0
        if view.phase == "finished":
            failed = {rank: process.returncode for rank, process in self._members(view).items() if process.returncode}
            if failed:
                how = ", ".join(f"rank {rank} {how_it_ended(code)}" for rank, code in failed.items())
                self._fail(f"all steps are done, but {how}")
            return 1 if failed else 0
        codes = [process.returncode for process in self._processes]
        why = view.reason if view.phase == "failed" else f"it was {view.phase} in epoch {view.epoch} when all ended"
        self._fail(f"the job did not finish: {why}; exit statuses {codes}")
        return 1

    def _fail(self, text: str) -> None:
        self._console.print(Text(visible(f"holdfast run: {text}"), "bold red"), soft_wrap=True)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that `finally` blocks run; not if ignored, as by nohup."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kept = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    old = {number: signal.signal(number, interrupt) for number in kept}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def launch(plan: LaunchPlan, log_directory: Path | None = None) -> int:
    """Run the job; returns the exit status: 0 if it finished and its last members ended well, 130 if interrupted.

    Event logs and flight recordings are written to `log_directory` (made if missing). Raises `BackendUnavailable`,
    ValueError, and, before anything is started, OSError if that directory cannot be made.
    """
    launcher = _launcher(plan.backend)
    out = console()
    if log_directory is not None:
        log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with HeldDirectory("holdfast-run-") as folder, _terminated_as_interrupted():
        contract = LocalContract.create(
            plan.job,
            folder.path,
            plan.backend,
            plan.size,
            min_size=plan.min_size,
            shards=plan.shards,
            logs=log_directory,
        )
        try:
            with closing(launch_ranks(launcher, plan.size + plan.spares)) as start:
                return Launcher(plan, contract, out, start).run()
        except KeyboardInterrupt:
            out.print("holdfast run: interrupted; all processes are ended", style="bold red")
            return 130


def _launcher(preference: str) -> str:
    """The launcher that the first available backend of the preference list needs; "" if it needs none.

    Raises `BackendUnavailable` if the only backend is unavailable, or one is unknown.
    """
    found = [registry().backend(name.strip()) for name in preference.split(",")]
    for backend in found:
        if (missing := backend.missing) is None:
            return backend.info.capabilities.launcher
        if len(found) == 1:
            raise BackendUnavailable(backend.info.name, missing.reason, missing.install_hint)
    return ""


def python_command(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command that runs a Python script with this interpreter."""
    return (sys.executable, script, *arguments)
