"""`holdfast run`: start a script in several processes of this machine, which form one job by `ft.Session`.

The launcher starts processes, shows their output, and ends them when it ends. The sessions themselves detect deaths,
assign ranks and recover. On several hosts, one launcher on each starts that host's part. On one host, the launcher ends
the job if the sessions cannot know that it is over: too few processes are left for it ever to go on.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, BinaryIO

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.comms.errors import BackendUnavailable, CorruptData, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import require
from holdfast.comms.system.files import OwnedDescriptor, write_all
from holdfast.comms.transport.liveness import is_stopped, this_host
from holdfast.ft.console.console import console
from holdfast.ft.console.output import LineSplitter, visible, visible_but_colours
from holdfast.ft.console.units import counted
from holdfast.ft.departure import TERMINATED
from holdfast.ft.events import JoinRequested
from holdfast.ft.launch import guardian, run_report
from holdfast.ft.launch.held_directory import HeldDirectory, private_file
from holdfast.ft.launch.host_agent import HostAgent, HostPlan, JobWatch, host_name
from holdfast.ft.launch.job_contract import LocalContract, ReservedPort, TorchEnvironment
from holdfast.ft.launch.launcher import Launch, how_it_ended
from holdfast.ft.launch.launcher import launch as launch_ranks
from holdfast.ft.launch.run_report import LastErrorLine
from holdfast.ft.listen_address import LOOPBACK
from holdfast.ft.membership.view import Member, View
from holdfast.ft.registers import RegisterAway

END_SECONDS = 10.0


COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
ASK_AGAIN_SECONDS = 0.5
"""Seconds from the first SIGTERM to the second, which ends a session that is still in a step."""

LOOK = 0.25
"""Seconds between two reads of the register."""

FIRST_RESTART_SECONDS, MOST_RESTART_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0
"""A process that lived for so long has not failed because it was started too soon."""


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds that processes get to end by themselves before they are ended.

    `after_steps`: members that still work after the job's last step. `after_sigterm`: all, after SIGTERM, to finish a
    step and leave; SLURM and Kubernetes kill after 30. `at_end`: those without work, from the end of the job or of its
    last member; and all from the SIGTERM that ends them to SIGKILL.
    """

    after_steps: float = float("inf")
    after_sigterm: float = 25.0
    at_end: float = 5.0

    def __post_init__(self) -> None:
        if min(self.after_steps, self.after_sigterm, self.at_end) < 0:
            raise ValueError(f"{self}: no period can be negative")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes to start: `size` + `spares` of `command`.

    `min_size` and `shards` are defaults for sessions of scripts that do not set them; `check` turns agreement checks
    on. `here`: how many of the `size` members this host starts (None: all). Up to `restarts` processes that die are
    started again, as spares. With `detach`, the processes outlive the launcher.
    """

    command: tuple[str, ...]
    size: int
    spares: int = 0
    backend: str = "shm"
    job: str = "job"
    grace: Grace = Grace()
    min_size: int | None = None
    shards: int | None = None
    check: bool = False
    here: int | None = None
    restarts: int = 0
    detach: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.spares < 0:
            raise ValueError(f"size={self.size} must be at least 1 and spares={self.spares} not negative")
        if self.min_size is not None and not 1 <= self.min_size <= self.size:
            raise ValueError(f"min_size={self.min_size} must be at least 1 and at most size={self.size}")
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards={self.shards} must be at least 1")
        if self.here is not None and not 1 <= self.here <= self.size:
            raise ValueError(f"here={self.here} must be at least 1 and at most size={self.size}")
        if self.restarts < 0:
            raise ValueError(f"restarts={self.restarts} must not be negative")
        if not self.command:
            raise ValueError("there is no script to run")

    @property
    def needs_sessions(self) -> bool:
        """Whether the plan asks for what only processes that join by `ft.Session` have."""
        return bool(self.spares or self.min_size or self.shards or self.restarts or self.here is not None)

    @property
    def members_here(self) -> int:
        return self.size if self.here is None else self.here


class RestartBudget:
    """`limit` restarts for all processes of a host, each after twice the delay of the one before."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self._delay = FIRST_RESTART_SECONDS

    def take(self, lived: float) -> float | None:
        """Seconds until a process that lived for `lived` seconds is started again; None if none is left."""
        if self.left < 1:
            return None
        self.left -= 1
        delay = FIRST_RESTART_SECONDS if lived >= STABLE_SECONDS else self._delay
        self._delay = min(2 * delay, MOST_RESTART_SECONDS)
        return delay


class Launcher:
    """The processes of one job on this host, from start to end. `start` is the launcher that the plan's backend needs.

    `torch` has the variables of each process for torch.distributed. `watch` follows the job; `agent` is there if other
    hosts take part in it. `log` gives the file for the output of a process.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        contract: LocalContract,
        console: Console,
        start: Launch,
        torch: TorchEnvironment,
        watch: JobWatch,
        agent: HostAgent | None = None,
        log: Callable[[int], Path] | None = None,
    ) -> None:
        self._plan, self._contract, self._console, self._launch = plan, contract, console, start
        self._torch = torch
        self._watch, self._agent, self._log = watch, agent, log
        self._selector = selectors.DefaultSelector()
        self._processes: list[GuardedProcess] = []
        self._lines: dict[int, LineSplitter] = {}
        self._logs: dict[int, BinaryIO] = {}
        self._words: dict[int, LastErrorLine] = {}
        self._began = time.monotonic()
        self._budget = RestartBudget(plan.restarts)
        self._due: list[float] = []
        self._ending = False
        self._leaving: float | None = None
        self._late = run_report.LATE_SECONDS

    def run(self) -> int:
        """Start all processes and show their output until their end; returns 0 if the job ended well, else 1.

        128 + SIGTERM if `leave` has ended them before that.
        """
        try:
            self._start()
            self._follow()
        finally:
            self._end()
            self._selector.close()
            for file in self._logs.values():
                file.close()
        return self._exit_status()

    def leave(self) -> None:
        """Ask all processes to leave the job after their step, and start no other. A signal handler may call it."""
        self._leaving = time.monotonic()
        for process in self._processes:
            process.signal(signal.SIGTERM)

    def _start(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._environ = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self._plan.members_here))),
            "PYTHONUNBUFFERED": "1",
            **({"HOLDFAST_CHECK": "1"} if self._plan.check else {}),
            **self._contract.environ(),
        }
        for _ in range(self._plan.members_here + self._plan.spares):
            self._start_process()

    def _start_process(self) -> None:
        number = len(self._processes)
        shared = {} if self._plan.detach else self._launch.environ(number)  # its folder goes with the launcher
        own = {**self._torch.of(number), **shared}
        log = None if self._log is None else self._log(number)
        process = GuardedProcess(self._plan.command, {**self._environ, **own}, log if self._plan.detach else None)
        self._processes.append(process)
        self._words[number] = LastErrorLine()
        if process.output is not None:
            self._selector.register(process.output, selectors.EVENT_READ, number)
            if log is not None:
                try:
                    self._logs[number] = private_file(log, "ab")
                except OSError as error:
                    self._not_kept(number, error)
        self._selector.register(process.pidfd, selectors.EVENT_READ, number)
        self._launch.attach(number, process.pidfd)

    def _follow(self) -> None:
        """Show output until all processes are gone, or the job is over and the time of the others is up."""
        grace, look, over = self._plan.grace, time.monotonic(), None
        began = busy = look
        while self._running():
            self._turn(LOOK)
            now = time.monotonic()
            if self._leaving is not None:
                self._due.clear()
            self._start_due(now)
            if self._leaving is not None and now >= self._leaving + grace.after_sigterm:
                return
            if now < look:
                continue
            look = now + LOOK
            if over is None:
                over = self._over() or self._give_up()
                began = busy = now
                self._name_missing(now - self._began)
            elif self._members_at_work(over):
                busy = now
            if over is not None:
                self._due.clear()
            if over is not None and now >= min(began + grace.after_steps, busy + grace.at_end):
                for number, process in enumerate(self._processes):
                    if process.returncode is None:
                        text = f"still ran {now - began:.1f} s after the job was over: it is ended (pid {process.pid})"
                        self._say(number, text, "bold red")
                return

    def _name_missing(self, waited: float) -> None:
        """Print each missing rank and where it is; first after a while, then after twice as long each time."""
        if waited < self._late:
            return
        view = self._watch.view
        if view is not None and view.phase != "forming":
            self._late = float("inf")
            return
        # a script may never join: then once is enough
        self._late = 2 * self._late if view is not None else float("inf")
        members = () if view is None else view.members
        text = f"after {waited:.0f} s {counted(len(members), 'rank')} of {self._plan.size} joined the job; missing:"
        self._console.print(Text(f"holdfast run: {text}", "bold yellow"), soft_wrap=True)
        joined = {event.pid for event in self._contract.events() if isinstance(event, JoinRequested)}
        for number, process in enumerate(self._processes):
            if process.returncode is not None:
                continue
            if not process.started:
                self._say(number, "its guardian has not started it yet", "yellow")
            elif process.pid not in joined:
                self._say(number, f"pid {process.pid} has not joined: {run_report.whereabouts(process.pid)}", "yellow")
        for line in self._missing_elsewhere(members):
            self._console.print(Text(visible(line), "yellow"), soft_wrap=True)

    def _missing_elsewhere(self, members: Sequence[Member]) -> Iterator[str]:
        """A line for each other host of which ranks are missing, and for ranks that no host has come for."""
        if self._agent is None:
            return
        try:
            hosts = self._agent.hosts()
        except (RegisterAway, CorruptData) as error:
            yield f"the other hosts are not known: {error}"
            return
        for name, host in sorted(hosts.items()):
            there = sum(member.peer.host == host.machine for member in members)
            if host.machine != this_host() and there < host.count:
                yield f"host {name} ({host.address}): {there} of its {counted(host.count, 'rank')} joined"
        if (left := self._plan.size - sum(host.count for host in hosts.values())) > 0:
            yield f"no host has come for {counted(left, 'rank')}: start holdfast run there"

    def _running(self) -> bool:
        return bool(self._due) or any(process.returncode is None for process in self._processes)

    def _start_due(self, now: float) -> None:
        """Start the processes that have waited for their delay, in place of those that died."""
        for due in [each for each in self._due if each <= now]:
            self._due.remove(due)
            self._start_process()

    def _turn(self, seconds: float) -> None:
        """Wait up to `seconds` for output or the end of a process, and handle it."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.fileobj, OwnedDescriptor):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
                self._reap(key.data)
            else:
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _read(self, stream: IO[bytes], number: int) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(stream)
            stream.close()
        elif number in self._logs:
            try:
                write_all(self._logs[number].fileno(), data)
            except OSError as error:  # a full disk is no reason to end a job
                self._logs.pop(number).close()
                self._not_kept(number, error)
        lines = self._lines.setdefault(number, LineSplitter())
        for line in lines.feed(data) if data else lines.end():
            self._words[number].hear(line)
            self._say(number, line)

    def _not_kept(self, number: int, error: OSError) -> None:
        self._say(number, f"its output is kept in no file from here on, only shown: {error}", "bold yellow")

    def _reap(self, number: int) -> None:
        """Reap a process, ending it if it still runs, and print a bad exit status."""
        process = self._processes[number]
        if code := process.reap():
            self._say(number, f"{how_it_ended(code)} (pid {process.pid})", "bold red")
            if self._ending or self._leaving is not None:
                return
            delay = self._budget.take(time.monotonic() - process.began)
            if delay is not None:
                left = f"{counted(self._budget.left, 'restart')} left"
                self._say(number, f"another process takes its place in {delay:g} s, as a spare; {left}", "bold")
                self._due.append(time.monotonic() + delay)

    def _say(self, number: int, line: str, style: str = "") -> None:
        colour = COLOURS[number % len(COLOURS)]
        shown = Text.from_ansi(visible_but_colours(line), style=style) if "\x1b" in line else Text(visible(line), style)
        self._console.print(Text.assemble((f"[{number}] ", colour), shown), soft_wrap=True)

    def _over(self) -> View | None:
        """The last view of the job if it is over; else None."""
        view = self._watch.view
        return view if view is not None and view.phase in ("finished", "failed") else None

    def _give_up(self) -> View | None:
        """End the job if fewer processes are left than it needs, as no other can join.

        Returns its last view if so.
        """
        if self._agent is not None:
            return None
        left = sum(process.returncode is None for process in self._processes) + len(self._due)
        view = self._watch.read()  # after the count: a job's last view is in the register before its members end
        if view is None or view.phase not in ("forming", "running") or left >= view.job.min_size:
            return None
        needed = counted(view.job.min_size, "member")
        words = f"{counted(left, 'process is', 'processes are')} left of the {needed} needed, and nobody else can come"
        last = msgspec.structs.replace(view, epoch=view.epoch + 1, phase="failed", reason=words)
        with self._contract.open_register() as register, contextlib.suppress(RegisterAway):
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
        ranks = ((rank, member.peer) for rank, member in enumerate(view.members))
        return {rank: processes[p.pid] for rank, p in ranks if p.pid in processes and p.host == this_host()}

    def _end(self) -> None:
        """End all processes that still run, with their process groups, and show their last output."""
        self._ending = True
        self._due.clear()
        began = time.monotonic()
        for again in (ASK_AGAIN_SECONDS, self._plan.grace.at_end):
            for sent in (signal.SIGTERM, signal.SIGCONT):
                for process in self._processes:
                    process.signal(sent)
            while self._running() and (left := began + again - time.monotonic()) > 0:
                self._turn(left)
        for number, process in enumerate(self._processes):
            if process.returncode is None:
                self._reap(number)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, OwnedDescriptor):
                key.fileobj.close()
            else:
                self._drain(key.fileobj, key.data)  # type: ignore[arg-type]

    def _drain(self, stream: IO[bytes], number: int) -> None:
        os.set_blocking(stream.fileno(), False)
        try:
            while not stream.closed:
                self._read(stream, number)
        except BlockingIOError:
            stream.close()

    def _exit_status(self) -> int:
        status = self._judge()
        for line in run_report.table(self._failures()) if status not in (0, TERMINATED) else ():
            self._fail(line)
        return status

    def _failures(self) -> list[run_report.ProcessFailure]:
        """The processes that ended with an error."""
        events = (event for event in self._contract.events() if event.time >= self._began)
        ranks = run_report.last_ranks(events)
        return [
            run_report.ProcessFailure(ranks.get(process.pid), process.pid, process.returncode, str(self._words[number]))
            for number, process in enumerate(self._processes)
            if process.returncode
        ]

    def _judge(self) -> int:
        view = self._watch.read()
        if self._leaving is not None and (view is None or view.phase != "finished"):
            self._console.print(Text("holdfast run: left the job after SIGTERM", "bold"), soft_wrap=True)
            return TERMINATED
        if view is None:
            codes = [process.returncode for process in self._processes]
            statuses = [f"exit statuses {codes}"] if any(codes) else []
            if self._plan.needs_sessions:
                ended = (
                    "no process joined the job by holdfast.ft.Session(), so that nothing would have survived a death"
                )
                statuses.insert(0, ended if any(codes) else f"all ended well; {ended}")
            if any(codes):
                self._fail("; ".join(statuses))
            elif statuses:
                self._console.print(Text(f"holdfast run: {statuses[0]}"), soft_wrap=True)
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


class _Signals:
    """SIGTERM calls `leave`, if there is one, and raises KeyboardInterrupt the second time; so does SIGHUP at once.

    A context manager, so that `finally` blocks run. Signals that are ignored, as by nohup, stay so.
    """

    def __init__(self) -> None:
        self.leave: Callable[[], None] | None = None

    def _handle(self, number: int, _: object) -> None:
        leave, self.leave = self.leave, None
        if leave is None or number == signal.SIGHUP:
            raise KeyboardInterrupt
        leave()

    def __enter__(self) -> _Signals:
        kept = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
        self._old = {number: signal.signal(number, self._handle) for number in kept}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def launch(plan: LaunchPlan, log_directory: Path | None = None, host: HostPlan | None = None) -> int:
    """Run the job; returns the exit status: 0 if it finished and its last members ended well, 130 if interrupted.

    Event logs, flight recordings and the output of the processes are written to `log_directory` (made if missing).
    `host` is this host's part in a job on several. Raises, before anything is started, `BackendUnavailable`,
    `Unsupported`, ValueError, what `HostAgent` raises, and OSError if that directory cannot be made.
    """
    launcher = _launcher(plan.backend)
    if launcher and (host is not None or plan.restarts or plan.detach):
        raise Unsupported(f"several hosts, restarts or detach with {launcher}", "use another backend")
    if plan.detach and (log_directory is None or host is None):
        raise ValueError("detached processes outlive this command: give --logs, --register and --key-file")
    out = console()
    node = host_name(os.environ) if host is None else host.node
    if log_directory is not None:
        log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(HeldDirectory("holdfast-run-"))
        signals = stack.enter_context(_Signals())
        agent = None if host is None else stack.enter_context(HostAgent(host, plan.job, plan.members_here, plan.size))
        if agent is None:
            port = stack.enter_context(ReservedPort(LOOPBACK)).number
            torch = TorchEnvironment(plan.size, plan.size, 0, LOOPBACK, port)
        else:
            torch = agent.torch
        contract = LocalContract(
            plan.job,
            folder.path,
            plan.backend,
            plan.size,
            None if host is None else host.register,
            min_size=plan.min_size,
            shards=plan.shards,
            key=None if host is None else host.key_file,
            host=None if agent is None else agent.address,
            interface=None if agent is None or ":" in agent.address else agent.interface,
        ).made(log_directory)
        try:
            start = stack.enter_context(closing(launch_ranks(launcher, plan.size + plan.spares)))
            log = None if log_directory is None else partial(_output_file, log_directory, node)
            watch = stack.enter_context(closing(JobWatch(contract.register_url))) if agent is None else agent.watch
            job = Launcher(plan, contract, out, start, torch, watch, agent, log)
            signals.leave = job.leave
            return job.run()
        except KeyboardInterrupt:
            out.print("holdfast run: interrupted; all processes are ended", style="bold red")
            return 130


def _output_file(folder: Path, node: str, number: int) -> Path:
    """The file for the output of a process of this host."""
    return folder / f"output-{''.join(c if c.isalnum() else '-' for c in node)}-{number}.log"


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


class GuardedProcess:
    """Runs `command` with the environment `environ`; `output` reads its stdout and stderr.

    With a `log`, its output goes to that file, `output` is None, and it outlives this process. `pidfd` becomes readable
    once the command and all its descendants have ended; then call `reap`.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path | None = None) -> None:
        with contextlib.ExitStack() as files:
            into = subprocess.PIPE if log is None else files.enter_context(private_file(log, "ab"))
            self._start(command, environ, into, "tied" if log is None else "detached")

    def _start(self, command: Sequence[str], environ: Mapping[str, str], into: int | BinaryIO, how: str) -> None:
        require("the start of a process", "pidfd_open")
        status, said = os.pipe()
        self._status = OwnedDescriptor(status)
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(said), how, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=subprocess.STDOUT,
                bufsize=0,
                process_group=0,
                pass_fds=(said,),
            )
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(said)
        self.output: IO[bytes] | None = self._guardian.stdout
        self.began = time.monotonic()
        self.pidfd = OwnedDescriptor(os.pidfd_open(self._guardian.pid))
        self.returncode: int | None = None
        """The return code as in `subprocess`; None while the command runs."""

    @cached_property
    def pid(self) -> int:
        """The command's process id; the guardian's if it died before it could report that."""
        return int(self._line() or self._guardian.pid)

    @property
    def started(self) -> bool:
        """Whether the guardian has started the command, so that `pid` does not wait for it."""
        return "pid" in self.__dict__ or bool(select.select([self._status], [], [], 0)[0])

    def signal(self, number: int) -> None:
        """Send a signal (one of `guardian.FORWARDED`) to the command's process group."""
        if self.returncode is None:
            self._guardian.send_signal(number)

    def reap(self) -> int:
        """End the command, if it runs, and all its descendants; returns its return code. Idempotent."""
        if self.returncode is None:
            pid = self.pid
            self._guardian.send_signal(guardian.END)
            try:
                code = self._guardian.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._guardian.kill()
                code = self._guardian.wait()
            status = self._line()
            self._status.close()
            self.returncode = os.waitstatus_to_exitcode(int(status)) if status and pid else code
        return self.returncode

    def _line(self) -> str:
        """The next line that the guardian writes; "" at its end."""
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self._status, 1)):
            line += more
        return line.decode().strip()
