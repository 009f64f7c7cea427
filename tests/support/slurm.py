"""Runs a real SLURM on this machine for tests: a controller, and nodes that are all this machine.

with SlurmCluster(2, folder) as slurm:
    job = slurm.call("sbatch", "--parsable", "job.sbatch")

Needs root and Debian's packages (`apt install slurmctld slurmd munge slurm-client`); nothing has to be configured or
running. All files are in one folder, and the daemons end with the thread that started them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.liveness import HOST
from holdfast.ft.launch.held_directory import private_file
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.processes.zygote_start import die_with_parent
from support.waiting import becomes_true

START_SECONDS = 60.0
REQUEUE_SECONDS = 10
"""How long a requeued job waits before it may start again: the lifetime of its credential; 120 by default."""
_PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "munged", "sbatch", "srun", "scancel", "sinfo")


def missing() -> str | None:
    """The reason why SLURM cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "it takes root"
    absent = [name for name in _PROGRAMS if _program(name) is None]
    return f"there is no {', '.join(absent)}: apt install slurmctld slurmd munge slurm-client" if absent else None


class SlurmCluster:
    """`nodes` nodes, n1 and so on, of eight processors each, whatever this machine has. A context manager.

    With `apart`, the tasks on a node take it for a host of its own.
    """

    def __init__(self, nodes: int, folder: Path, *, apart: bool = False) -> None:
        self._folder, self._names = folder, [f"n{number + 1}" for number in range(nodes)]
        self._reserved = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._configuration = folder / "slurm.conf"
        self._socket = folder / "munge" / "socket"
        for path in (folder, self._socket.parent, folder / "state", *(folder / name for name in self._names)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        prolog = folder / "prolog"
        prolog.write_text(f'#!/bin/sh\necho "export {HOST}=$SLURMD_NODENAME"\n')
        prolog.chmod(0o700)
        self._configuration.write_text(self._settings() + (f"TaskProlog={prolog}\n" if apart else ""))
        with private_file(folder / "munge" / "key", "wb") as key:
            key.write(os.urandom(128))

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which SLURM's commands find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self._configuration)}

    def call(self, *command: str, timeout: float = 60.0) -> str:
        """What a command of SLURM prints. Raises `HoldfastError` with its complaint if it fails."""
        where = {"env": self.environ, "cwd": self._folder}
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise HoldfastError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def __enter__(self) -> SlurmCluster:
        try:
            munge = self._socket.parent
            files = [f"--{what}-file={munge / what}" for what in ("key", "pid", "log", "seed")]
            self._start("munged", "-F", "--force", f"--socket={self._socket}", *files)
            self._wait(self._socket.exists, "munged")
            self._start("slurmctld", "-D")
            for name in self._names:
                self._nodes[name] = self._start("slurmd", "-D", "-N", name, "-d", str(_program("slurmstepd")))
            self._wait(lambda: self.states() == {"idle"}, "the nodes")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons, the newest first, and what they leave of jobs. Idempotent."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._kill_all()
        self._reserved.close()

    def lose(self, node: str) -> None:
        """Kill all that runs on a node at once, and tell the controller that the node is down."""
        self._nodes[node].kill()
        self._kill_all(node)
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def processes(self, node: str = "") -> list[int]:
        """The living processes of jobs on a node, or on all, and the daemons of SLURM that started them."""
        wanted = {f"SLURM_CONF={self._configuration}".encode(), *([f"SLURMD_NODENAME={node}".encode()] if node else [])}
        found = set[int]()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if not wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    continue
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z":
                    continue
                found.add(int(path.name))
                if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                    found.add(int(parent))
        return sorted(found)

    def states(self, *nodes: str) -> set[str]:
        """The states of these nodes, or of all, such as "idle" and "draining"; empty if no controller answers."""
        chosen = ("--nodes", ",".join(nodes)) if nodes else ()
        try:
            return set(self.call("sinfo", "--noheader", "--Node", "--format=%T", *chosen).split())
        except HoldfastError:
            return set()

    def _kill_all(self, node: str = "") -> None:
        while found := self.processes(node):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with private_file(self._folder / f"{name}.log", "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            prepare = functools.partial(die_with_parent, os.getpid())
            command = [str(_program(name)), *options]
            started = subprocess.Popen(command, env=self.environ, preexec_fn=prepare, **streams)
        self._processes.append(started)
        return started

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not becomes_true(done, START_SECONDS, interval=0.1):
            raise HoldfastError(f"SLURM does not start: {what} not ready; see {self._folder}")

    def _settings(self) -> str:
        here, controller = socket.gethostname(), _program("slurmctld")
        plugins = next(iter(sorted((controller.parents[1] / "lib").glob("**/auth_munge.so"))), None)
        ports = [self._reserved.enter_context(ReservedPort("127.0.0.1")).number for _ in range(1 + len(self._names))]
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={here}(127.0.0.1)",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"AuthInfo=socket={self._socket},cred_expire={REQUEUE_SECONDS}",
            *([f"PluginDir={plugins.parent}"] if plugins is not None else []),
            f"StateSaveLocation={self._folder / 'state'}",
            f"SlurmdSpoolDir={self._folder}/%n",
            f"SlurmctldPidFile={self._folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={self._folder}/%n.pid",
            f"SlurmctldPort={ports[0]}",
            "SlurmdParameters=config_overrides",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "SchedulerType=sched/builtin",
            "MpiDefault=none",
            "KillWait=20",
        ]
        for name, port in zip(self._names, ports[1:], strict=True):
            lines.append(f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port} CPUs=8")
        lines.append(f"PartitionName=all Nodes={','.join(self._names)} Default=YES State=UP")
        return "\n".join(lines) + "\n"


def _program(name: str) -> Path | None:
    """The path of a program of SLURM. Debian appends -wlm to the names of the daemons."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin"
    found = shutil.which(name, path=places) or shutil.which(f"{name}-wlm", path=places)
    return None if found is None else Path(found)
