"""The filter of system calls, executed by a BPF machine in Python: the same policy on both architectures."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.environments.sandbox.inside import seccomp
from holdfast.rl.environments.sandbox.inside.seccomp import program

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED = 0x00050000 | errno.EPERM
MACHINES = list(seccomp.AUDIT)


def verdict(machine: str, number: int, arguments: Sequence[int] = (), architecture: int | None = None) -> int:
    """What the kernel would do with a call."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("IIQ6Q", number, architecture or seccomp.AUDIT[machine], 0, *given)
    code = list(struct.iter_unpack("HBBI", program(machine)))
    at, accumulator = 0, 0
    while True:
        operation, true, false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("I", data, value)
            case 0x15:
                at += true if accumulator == value else false
            case 0x35:
                at += true if accumulator >= value else false
            case 0x45:
                at += true if accumulator & value else false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


def known(machine: str) -> set[int]:
    tables = (seccomp.allowed(machine), seccomp.fatal(machine), seccomp.conditional(machine))
    return {number for table in tables for number in table.values()}


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 600))
def test_a_call_that_is_in_no_list_is_refused(machine: str, number: int) -> None:
    if number not in known(machine):
        assert verdict(machine, number) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
def test_lists_are_followed(machine: str) -> None:
    assert {verdict(machine, number) for number in seccomp.allowed(machine).values()} == {ALLOW}
    assert {verdict(machine, number) for number in seccomp.fatal(machine).values()} == {KILL}
    tables = [seccomp.allowed(machine), seccomp.fatal(machine), seccomp.conditional(machine)]
    assert sum(map(len, tables)) == len(known(machine)), "a number stands twice"


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 2**32 - 1), arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_every_call_has_a_verdict(machine: str, number: int, arguments: list[int]) -> None:
    assert verdict(machine, number, arguments) in (ALLOW, KILL, REFUSED, 0x50000 | errno.ENOSYS, 0x50000 | errno.ENOTTY)


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 600), other=st.integers(1, 2**32 - 1))
def test_the_calls_of_another_architecture_are_fatal(machine: str, number: int, other: int) -> None:
    if other != seccomp.AUDIT[machine]:
        assert verdict(machine, number, architecture=other) == KILL
    assert verdict(machine, number | 0x40000000) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "passes"),
    [
        ("clone", [17], True),  # a fork
        ("clone", [0x3D0F00], True),  # a thread
        ("clone", [17 | 0x10000000], False),  # a user namespace
        ("clone", [17 | 0x00020000], False),
        ("prlimit64", [0, 7], True),
        ("prlimit64", [1, 7], False),
        ("socketpair", [1], True),
        ("socketpair", [2], False),
        ("ioctl", [0, 0x5401], True),
        ("ioctl", [0, 0x5412], False),
        ("prctl", [15], True),
        ("prctl", [22], False),
        ("clone3", [], False),
        ("seccomp", [1], False),
        ("capset", [], False),
    ],
)
def test_arguments_decide(machine: str, name: str, arguments: list[int], passes: bool) -> None:
    number = seccomp.conditional(machine)[name]
    assert (verdict(machine, number, arguments) == ALLOW) == passes


def test_the_numbers_are_those_of_this_machine() -> None:
    """`os.getpid` by its number."""
    import ctypes
    import os

    number = seccomp.allowed(platform.machine())["getpid"]
    assert ctypes.CDLL(None).syscall(number) == os.getpid()
