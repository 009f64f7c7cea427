"""System calls that a container profile forbids: probes name them, and other backends still run."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from support.programs import seccomp_deny
from support.programs.forked_programs import run_forked
from support.programs.seccomp_deny import CALLS

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows the numbers of x86_64 alone")


def run_without(calls: list[str], code: str, *arguments: str) -> str:
    """Run a program that may not make these system calls; return its output."""
    numbers = ",".join(str(CALLS[call]) for call in calls)
    script = Path(seccomp_deny.__file__)
    done = run_forked(script.read_text(), [str(script), numbers, code, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


_STATUS = """
from holdfast.comms.plugins.registry import registry
from holdfast.ft.detectors.plugin import _kernel
print(registry().backend("shm").status)
print(registry().backend("gloo").status)
print(_kernel())
"""


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "process_vm_readv"])
def test_a_probe_tries_what_its_backend_needs_and_says_what_to_allow(call: str) -> None:
    shm, gloo, _ = run_without([call], _STATUS).splitlines()
    assert shm.startswith("Unavailable") and call in shm and "Operation not permitted" in shm
    assert "profile that" in shm and gloo.startswith("Available")


def test_the_detector_that_ends_processes_tries_to_send_a_signal() -> None:
    shm, _, pidfd = run_without(["pidfd_send_signal"], _STATUS).splitlines()
    assert shm.startswith("Available") and pidfd.startswith("Unavailable") and "pidfd_send_signal" in pidfd


_PAIR = """
import os, signal, sys, time, torch
from holdfast import comms
place = "file://" + sys.argv[1]
child = os.fork()
comm = comms.connect("auto", rank=0 if child else 1, size=2, rendezvous=place, timeout=20)
tensor = torch.ones(4)
comm.all_reduce(tensor)
if not child:
    time.sleep(60)
os.kill(child, signal.SIGKILL)
try:
    comm.all_reduce(tensor)
except comms.PeerFailed as error:
    print(comm.backend, tensor.tolist() == [2.0] * 4)
os.waitpid(child, 0)
comm.close()
"""


def test_auto_takes_a_runnable_backend_that_still_detects_deaths(tmp_path: Path) -> None:
    """Without pidfds, processes are polled, and a zombie counts as dead."""
    assert run_without(["pidfd_open"], _PAIR, str(tmp_path / "meeting")).split() == ["gloo", "True"]


_RUN = """
import sys
from holdfast.harness.cli.app import app
open(sys.argv[1], "w").close()
app(["run", "-n", "1", sys.argv[1]])
"""


def test_a_run_that_cannot_start_its_ranks_names_the_call_and_what_to_allow(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"holdfast run: .* pidfd_open fails: Operation not permitted; .*allows p"):
        run_without(["pidfd_open"], _RUN, str(tmp_path / "script.py"))
