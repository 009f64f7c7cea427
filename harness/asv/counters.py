"""Counts that do not depend on the noise of a machine: bytecodes of Python, and instructions of the processor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Op = Callable[[], object]
WARM_UP, OPS = 50, 200
SECONDS = 60.0

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_USER_ONLY = 1 << 5 | 1 << 6
"""exclude_kernel and exclude_hv of `struct perf_event_attr` (man 2 perf_event_open)."""
_SIZE = 136


@contextlib.contextmanager
def one_rank() -> Iterator[Communicator]:
    """A communicator of one rank, to count what a call executes."""
    import torch.distributed as dist

    from holdfast import comms

    with comms.connect("inproc", rank=0, size=1, rendezvous=dist.HashStore(), timeout=SECONDS) as comm:
        yield comm


class CountersUnavailable(RuntimeError):
    """This machine or its kernel has no counters that we may use."""


def bytecodes(op: Op) -> int:
    """Bytecode instructions that one `op` executes in this thread, by the interpreter's own trace."""
    for _ in range(WARM_UP):
        op()
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        op()
    finally:
        sys.settrace(before)
    return count


def instructions(op: Op) -> int:
    """Instructions in user mode that one `op` takes in this thread, the mean of many. Raises `CountersUnavailable`."""
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None or sys.platform != "linux":
        raise CountersUnavailable(f"no counter for {platform.machine()} on {sys.platform}")
    attributes = bytearray(_SIZE)
    struct.pack_into("IIQQQQQ", attributes, 0, _HARDWARE, _SIZE, _INSTRUCTIONS, 0, 0, 0, _USER_ONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    counter = libc.syscall(number, (ctypes.c_char * _SIZE).from_buffer(attributes), 0, -1, -1, 0)
    if counter < 0:
        raise CountersUnavailable(f"the machine does not count instructions: {os.strerror(ctypes.get_errno())}")
    try:
        for _ in range(WARM_UP):
            op()
        (before,) = struct.unpack("Q", os.read(counter, 8))
        for _ in range(OPS):
            op()
        (after,) = struct.unpack("Q", os.read(counter, 8))
    finally:
        os.close(counter)
    return int((after - before) / OPS)
