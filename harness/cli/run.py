"""`holdfast run`: start a script as a job, on this host or on several."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.harness.command_line import in_one_line, with_options

if TYPE_CHECKING:
    from holdfast.ft.launch.host_agent import HostPlan
    from holdfast.ft.launch.local_launcher import LaunchPlan


@dataclass(frozen=True)
class RunOptions:
    """The options of `holdfast run`."""

    script: Annotated[str, typer.Argument(help="The Python script to run; it joins by holdfast.ft.Session.")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None
    size: Annotated[
        int | None, typer.Option("-n", "--size", min=1, show_default="nnodes * nproc, or 2", help="How many ranks.")
    ] = None
    spares: Annotated[int, typer.Option(min=0, help="Further processes, on each host, that wait for a death.")] = 0
    backend: Annotated[
        str | None, typer.Option(show_default="shm, or gloo on several hosts", help="A backend, or several: ucx,gloo.")
    ] = None
    job: Annotated[str | None, typer.Option(show_default="job", help="The name of the job.")] = None
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, show_default="no limit", help="Seconds that processes may go on after the job's last step."
        ),
    ] = float("inf")
    min_size: Annotated[
        int | None, typer.Option(min=1, help="How few ranks the job can go on with, if the script does not say it.")
    ] = None
    shards: Annotated[
        int | None, typer.Option(min=1, help="Into how many parts a step is divided, if the script does not say it.")
    ] = None
    check: Annotated[
        bool, typer.Option("--check", help="Check that all ranks call the same ops with the same arguments (slower).")
    ] = False
    logs: Annotated[
        Path | None, typer.Option(help="Write event logs, flight recordings and output to this folder, as they come.")
    ] = None
    restarts: Annotated[int, typer.Option(min=0, help="How many processes that die are started again, as spares.")] = 0
    leave: Annotated[
        float | None, typer.Option(min=0.0, show_default="25", help="Seconds after SIGTERM to end a step and leave.")
    ] = None
    nnodes: Annotated[
        int | None, typer.Option(min=1, show_default="the scheduler's, or 1", help="On how many hosts the job runs.")
    ] = None
    nproc: Annotated[int | None, typer.Option(min=1, help="How many ranks each host starts.")] = None
    register: Annotated[str | None, typer.Option(help="The URL of the job's register: etcd://a:2379,b:2379/job.")] = (
        None
    )
    interface: Annotated[
        str | None, typer.Option(help="Where the other hosts reach this one: eth0, 10.0.0.0/24 or an address.")
    ] = None
    key_file: Annotated[Path | None, typer.Option(help="The file with the job's key, alike on all hosts.")] = None
    node: Annotated[
        str | None, typer.Option(show_default="the scheduler's or the host's", help="This host's name.")
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", help="Let the processes go on if this command is killed; needs --logs.")
    ] = False

    def plan(self, several: bool) -> LaunchPlan:
        """What to start here, as a job on `several` hosts or on this one. Raises ValueError."""
        from holdfast.ft.launch.local_launcher import Grace, LaunchPlan, python_command
        from holdfast.ft.schedulers import placement

        environ = os.environ if several else {}
        return LaunchPlan(
            python_command(self.script, self.arguments or ()),
            self.size or (self.nodes() * self.nproc if self.nproc else 2),
            self.spares,
            self.backend or environ.get("HOLDFAST_BACKEND") or ("gloo" if several else "shm"),
            self.job or environ.get("HOLDFAST_JOB") or (placement(environ).job if several else "") or "job",
            Grace(self.grace, Grace().after_sigterm if self.leave is None else self.leave),
            self.min_size,
            self.shards,
            self.check,
            (self.nproc or self.size or 2) if several else None,
            self.restarts,
            self.detach,
        )

    def nodes(self) -> int:
        """On how many hosts the job is. Raises ValueError."""
        from holdfast.ft.schedulers import placement

        return self.nnodes or (placement(os.environ).nodes or 1 if self.nproc else 1)

    def host(self) -> HostPlan:
        """This host's part in the job, from options and environment. Raises ValueError for what is missing."""
        from holdfast.ft.launch.host_agent import HostPlan, host_name

        url = self.register or os.environ.get("HOLDFAST_REGISTER")
        key = str(self.key_file or os.environ.get("HOLDFAST_KEY_FILE") or "")
        if not url or not key:
            raise ValueError(
                f"a job on {self.nodes()} hosts needs a register that all of them reach, and one key: give --register "
                "etcd://host:2379/name and --key-file"
            )
        name, interface = self.node or host_name(os.environ), self.interface or os.environ.get("HOLDFAST_INTERFACE", "")
        return HostPlan(self.nodes(), url, Path(key), name, interface)


@with_options(RunOptions)
def run(options: RunOptions) -> None:
    """Run a script as one job: its ranks and spares, each of which joins by ft.Session().

    [bold]Examples[/bold]

        holdfast run -n 4 train.py --lr 0.1

        holdfast run -n 4 --spares 1 --backend ucx --logs events train.py

        holdfast run --nnodes 3 --nproc 2 --spares 1 --interface eth0 --register etcd://a:2379/x --key-file k train.py

    The last one, on each of three hosts, starts two ranks and a spare
    there: all hosts join the job by its name. HOLDFAST_REGISTER,
    HOLDFAST_KEY_FILE, HOLDFAST_INTERFACE, HOLDFAST_JOB, HOLDFAST_BACKEND
    and HOLDFAST_NODE stand for options that are not given.

    The script needs no rank and no size: holdfast.ft.Session() finds
    the job by the environment that this command sets: HOLDFAST_JOB,
    HOLDFAST_REGISTER, HOLDFAST_KEY_FILE, HOLDFAST_BACKEND, HOLDFAST_SIZE,
    and HOLDFAST_MIN_SIZE and HOLDFAST_SHARDS if they are given here.

    When a process dies the sessions put a spare in its place or go on
    without it. With --restarts, up to so many that died are started again
    here, each after a longer delay. All processes end with this command,
    unless they are detached, and with each process all that it has
    started. A job on one host ends as soon as fewer processes are left
    than it needs. Output is shown with the number of the process in front.

    At SIGTERM each process finishes its step and leaves; the rest of the
    job goes on. The second SIGTERM ends all at once.

    After the last step the members of the job go on as long as they
    like, or for --grace seconds; one that is stopped, or a spare, is ended
    5 s after the last of them.

    Exit status: 0 only if the job finished and its last members here
    exited with 0 as well; 143 if all left after SIGTERM; 2 if nothing was
    started. If not 0, a table at the end says which ranks failed, and how.
    """
    from holdfast.ft.launch.local_launcher import launch

    if not Path(options.script).is_file():
        raise typer.BadParameter(f"there is no file {options.script}", param_hint="SCRIPT")
    with in_one_line("holdfast run", ValueError, OSError):
        several = options.nodes() > 1 or options.register is not None
        host = options.host() if several else None
        status = launch(options.plan(several), options.logs, host)
    raise typer.Exit(status)
