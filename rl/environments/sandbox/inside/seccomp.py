"""The filter of system calls that a run cannot remove: an allow-list, assembled for the kernel's BPF machine.

A call outside of the list fails with EPERM, so that ordinary code sees an ordinary error. A call that only an attack
makes (`fatal`) kills the process. Four calls pass by their arguments: `clone` without new namespaces, `ioctl` with the
requests of ordinary files, `prlimit64` of the caller itself, `socketpair` of Unix sockets (asyncio needs it).

The calls, with their numbers on x86_64 and aarch64, are a table of this file, not of the host's headers: a call that a
later kernel adds is refused until it is listed here.

Stops: a program in its place (`execve`), tracing, new namespaces, and calls that reach rarely used parts of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final

AUDIT: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's name for each architecture, as a filter sees it."""

_COLUMNS: Final = ("x86_64", "aarch64")

_ALLOWED = """
    read 0 63,  write 1 64,  readv 19 65,  writev 20 66,  pread64 17 67,  pwrite64 18 68,  preadv 295 69,
    pwritev 296 70,  preadv2 327 286,  pwritev2 328 287,  open 2 -,  openat 257 56,  close 3 57,  close_range 436 436,
    creat 85 -,  stat 4 -,  lstat 6 -,  fstat 5 80,  newfstatat 262 79,  statx 332 291,  access 21 -,
    faccessat 269 48,  faccessat2 439 439,  lseek 8 62,  getdents 78 -,  getdents64 217 61,  dup 32 23,  dup2 33 -,
    dup3 292 24,  pipe 22 -,  pipe2 293 59,  flock 73 32,  fsync 74 82,  fdatasync 75 83,  fcntl 72 25,
    ftruncate 77 46,  truncate 76 45,  fallocate 285 47,  rename 82 -,  renameat 264 38,  renameat2 316 276,
    mkdir 83 -,  mkdirat 258 34,  rmdir 84 -,  unlink 87 -,  unlinkat 263 35,  link 86 -,  linkat 265 37,
    symlink 88 -,  symlinkat 266 36,  readlink 89 -,  readlinkat 267 78,  chmod 90 -,  fchmod 91 52,  fchmodat 268 53,
    utime 132 -,  utimes 235 -,  utimensat 280 88,  futimesat 261 -,  getcwd 79 17,  chdir 80 49,  fchdir 81 50,
    umask 95 166,  statfs 137 43,  fstatfs 138 44,  sendfile 40 71,  copy_file_range 326 285,  fadvise64 221 223,
    getxattr 191 8,  lgetxattr 192 9,  fgetxattr 193 10,  listxattr 194 11,  llistxattr 195 12,  flistxattr 196 13,
    mmap 9 222,  munmap 11 215,  mprotect 10 226,  mremap 25 216,  madvise 28 233,  brk 12 214,  msync 26 227,
    mincore 27 232,  membarrier 324 283,  rt_sigaction 13 134,  rt_sigprocmask 14 135,  rt_sigreturn 15 139,
    rt_sigsuspend 130 133,  rt_sigpending 127 136,  rt_sigtimedwait 128 137,  sigaltstack 131 132,  kill 62 129,
    tgkill 234 131,  tkill 200 130,  pause 34 -,  alarm 37 -,  setitimer 38 103,  getitimer 36 102,
    restart_syscall 219 128,  clock_gettime 228 113,  clock_getres 229 114,  clock_nanosleep 230 115,
    nanosleep 35 101,  gettimeofday 96 169,  time 201 -,  times 100 153,  getpid 39 172,  getppid 110 173,
    gettid 186 178,  getuid 102 174,  geteuid 107 175,  getgid 104 176,  getegid 108 177,  getgroups 115 158,
    getresuid 118 148,  getresgid 120 150,  getpgid 121 155,  getpgrp 111 -,  getsid 124 156,  setsid 112 157,
    setpgid 109 154,  uname 63 160,  getrlimit 97 163,  setrlimit 160 164,  getrusage 98 165,  sysinfo 99 179,
    exit 60 93,  exit_group 231 94,  wait4 61 260,  waitid 247 95,  fork 57 -,  vfork 58 -,  set_tid_address 218 96,
    set_robust_list 273 99,  get_robust_list 274 100,  futex 202 98,  futex_waitv 449 449,  rseq 334 293,
    sched_yield 24 124,  sched_getaffinity 204 123,  sched_getparam 143 121,  sched_getscheduler 145 120,
    sched_get_priority_max 146 125,  sched_get_priority_min 147 126,  arch_prctl 158 -,  getcpu 309 168,
    getrandom 318 278,  getpriority 140 141,  poll 7 -,  ppoll 271 73,  select 23 -,  pselect6 270 72,
    epoll_create 213 -,  epoll_create1 291 20,  epoll_ctl 233 21,  epoll_wait 232 -,  epoll_pwait 281 22,
    epoll_pwait2 441 441,  eventfd 284 -,  eventfd2 290 19,  sendto 44 206,  recvfrom 45 207,  getsockopt 55 209,
    getsockname 51 204,  getpeername 52 205,  shutdown 48 210
"""

_FATAL = """
    ptrace 101 117,  process_vm_readv 310 270,  process_vm_writev 311 271,  process_madvise 440 440,  kcmp 312 272,
    pidfd_getfd 438 438,  mount 165 40,  umount2 166 39,  pivot_root 155 41,  chroot 161 51,  unshare 272 97,
    setns 308 268,  move_mount 429 429,  open_tree 428 428,  fsopen 430 430,  fsconfig 431 431,  fsmount 432 432,
    fspick 433 433,  mount_setattr 442 442,  open_by_handle_at 304 265,  bpf 321 280,  perf_event_open 298 241,
    userfaultfd 323 282,  io_uring_setup 425 425,  io_uring_enter 426 426,  io_uring_register 427 427,
    keyctl 250 219,  add_key 248 217,  request_key 249 218,  kexec_load 246 104,  kexec_file_load 320 294,
    init_module 175 105,  finit_module 313 273,  delete_module 176 106,  reboot 169 142,  swapon 167 224,
    swapoff 168 225,  acct 163 89,  quotactl 179 60,  syslog 103 116,  settimeofday 164 170,  clock_settime 227 112,
    clock_adjtime 305 266,  adjtimex 159 171,  sethostname 170 161,  setdomainname 171 162,  iopl 172 -,
    ioperm 173 -,  memfd_secret 447 447
"""

_CONDITIONAL = """
    clone 56 220,  clone3 435 435,  ioctl 16 29,  prctl 157 167,  prlimit64 302 261,  socketpair 53 199,
    capset 126 91,  seccomp 317 277
"""


def _numbers(table: str, machine: str) -> Mapping[str, int]:
    column = 1 + _COLUMNS.index(machine)
    rows = [entry.split() for entry in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def allowed(machine: str) -> Mapping[str, int]:
    """The calls that pass whatever their arguments are."""
    return _numbers(_ALLOWED, machine)


def fatal(machine: str) -> Mapping[str, int]:
    """The calls that no solution of a task has a use for: the kernel kills the process that makes one."""
    return _numbers(_FATAL, machine)


def conditional(machine: str) -> Mapping[str, int]:
    """The calls that pass or fail by their arguments, and the two that the launcher itself makes."""
    return _numbers(_CONDITIONAL, machine)


def number(name: str) -> int:
    """The number of a system call that the launcher makes, on this machine."""
    machine = platform.machine()
    return {**fatal(machine), **conditional(machine)}[name]


libc: Final = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name: str, result: int) -> int:
    """Return the result of a call of `libc`. Raises OSError, with the name of the call, where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return int(result)


_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""

_X32 = 0x40000000
"""Set in the numbers of the x32 calls, which reach the same kernel by another table."""

_CLONE_OUTSIDE = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x8000
"""`clone` flags: new cgroup, mount, uts, ipc, user, pid and net namespaces; a sibling instead of a child."""

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

_PRCTLS = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""

_SET_MODE_FILTER, _NO_NEW_PRIVS = 1, 38
_UNIX = 1


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _instruction(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


def _answer(number: int, action: int) -> Iterator[bytes]:
    yield _instruction(_JUMP_EQUAL, number, 0, 1)
    yield _instruction(_RETURN, action)


def _if_argument(number: int, place: int, values: Sequence[int], refusal: int) -> Iterator[bytes]:
    """Let call `number` pass if the low half of one argument is among `values`."""
    yield _instruction(_JUMP_EQUAL, number, 0, len(values) + 3)
    yield _instruction(_LOAD, _ARGUMENTS + 8 * place)
    for index, value in enumerate(values):
        yield _instruction(_JUMP_EQUAL, value, len(values) - index, 0)
    yield _instruction(_RETURN, refusal)
    yield _instruction(_RETURN, _ALLOW)


def _unless_bits(number: int, place: int, bits: int, refusal: int) -> Iterator[bytes]:
    yield _instruction(_JUMP_EQUAL, number, 0, 4)
    yield _instruction(_LOAD, _ARGUMENTS + 8 * place)
    yield _instruction(_JUMP_ANY_BIT, bits, 0, 1)
    yield _instruction(_RETURN, refusal)
    yield _instruction(_RETURN, _ALLOW)


@cache
def program(machine: str) -> bytes:
    """The filter for a machine, "x86_64" or "aarch64"."""
    calls = conditional(machine)
    refused = _ERRNO | errno.EPERM
    parts: list[Iterable[bytes]] = [
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_JUMP_EQUAL, AUDIT[machine], 1, 0),
            _instruction(_RETURN, _KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_JUMP_GREATER_EQUAL, _X32, 0, 1),
            _instruction(_RETURN, _KILL),
        ],
        *(_answer(number, _ALLOW) for number in allowed(machine).values()),
        *(_answer(number, _KILL) for number in fatal(machine).values()),
        _answer(calls["clone3"], _ERRNO | errno.ENOSYS),
        _unless_bits(calls["clone"], 0, _CLONE_OUTSIDE, _KILL),
        _if_argument(calls["ioctl"], 1, _IOCTLS, _ERRNO | errno.ENOTTY),
        _if_argument(calls["prctl"], 0, _PRCTLS, refused),
        _if_argument(calls["prlimit64"], 0, (0,), refused),
        _if_argument(calls["socketpair"], 0, (_UNIX,), refused),
        [_instruction(_RETURN, refused)],
    ]
    return b"".join(instruction for part in parts for instruction in part)


def install(machine: str) -> None:
    """Put the filter on this process and on all that it starts, for good. Raises OSError."""
    code = ctypes.create_string_buffer(program(machine))
    described = _Program((len(code) - 1) // 8, ctypes.addressof(code))
    call("prctl", libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    call("seccomp", libc.syscall(number("seccomp"), _SET_MODE_FILTER, 0, ctypes.byref(described)))
