"""The settings of a session, from arguments and environment, checked before anything is changed."""

from __future__ import annotations

import functools
import hmac
import importlib.metadata
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from holdfast.comms.connect import checks_are_on, runnable_backends
from holdfast.comms.errors import BackendUnavailable, HoldfastError, Mismatch
from holdfast.comms.plugins.registry import registry
from holdfast.comms.quantities import integer_in
from holdfast.comms.system.keys import load_key
from holdfast.comms.transport.liveness import this_host
from holdfast.ft.control.errors import WrongKey
from holdfast.ft.listen_address import check_ours, choose_address, local_addresses
from holdfast.ft.membership.state_machine import host_refusal_reason
from holdfast.ft.membership.view import MESH, Job, JobIdentity, OnDeath, Timeouts, View
from holdfast.ft.schedulers import Placement, placement

MAX_NAME = 100
MAX_MEMBERS = 1 << 16
MAX_SHARDS = 1 << 30

_log = logging.getLogger("holdfast.ft")


@dataclass(frozen=True, slots=True)
class Settings:
    """One process's settings, complete and checked.

    0 for `size` or `shards`: the job's value; `scheduled`, the scheduler's number of processes, is the size of a job
    that this process founds. `mesh`: up to this many members, all members watch each other; HOLDFAST_MESH changes it,
    and must be the same in all processes of a job. `host` is the address to listen on.
    """

    name: str
    register: str
    key: bytes
    backend: str
    size: int
    min_size: int
    shards: int
    timeouts: Timeouts
    device: torch.device
    mesh: int = MESH
    host: str = "127.0.0.1"
    scheduled: int = 0
    on_death: OnDeath = "rebuild"


def settle(
    *,
    backend: str | None,
    size: int | None,
    min_size: int | None,
    job: str | None,
    register: str | None,
    key_file: str | os.PathLike[str] | None,
    shards: int | None,
    timeouts: Timeouts,
    device: str | torch.device | None,
    host: str | None = None,
    interface: str | None = None,
    on_death: OnDeath = "rebuild",
) -> Settings:
    """Take arguments that are None from the environment and check all.

    The order is: the argument, its HOLDFAST_ variable, what the scheduler says. Raises ValueError, TypeError,
    `KeyRefused`, `AddressNeeded`, `NoSuchInterface`.
    """
    placed = placement(os.environ)
    if size is None and "HOLDFAST_SIZE" in os.environ:
        size = _number("HOLDFAST_SIZE", os.environ["HOLDFAST_SIZE"])
    if min_size is None:
        min_size = _number("HOLDFAST_MIN_SIZE", os.environ.get("HOLDFAST_MIN_SIZE", "1"))
    if shards is None and "HOLDFAST_SHARDS" in os.environ:
        shards = _number("HOLDFAST_SHARDS", os.environ["HOLDFAST_SHARDS"])
    min_size = integer_in(min_size, "min_size", 1, MAX_MEMBERS)
    if size is not None:
        size = integer_in(size, "size", 1, MAX_MEMBERS)
        if min_size > size:
            raise ValueError(f"min_size={min_size} is above size={size}: the job could never run")
    if shards is not None:
        shards = integer_in(shards, "shards", 1, MAX_SHARDS)
    if on_death not in get_args(OnDeath):
        raise ValueError(f"on_death={on_death!r} is none of {', '.join(map(repr, get_args(OnDeath)))}")
    if not isinstance(timeouts, Timeouts):
        raise TypeError(f"timeouts must be a Timeouts, not {type(timeouts).__name__}")
    name = _given("job", job, "HOLDFAST_JOB", "the name of the job", placed.job)
    if len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"job {name[:MAX_NAME]!r}: a job's name has at most {MAX_NAME} printable characters")
    url = _given("register", register, "HOLDFAST_REGISTER", "such as sqlite:///path/job.sqlite")
    key_path = None if key_file is None else os.fspath(key_file)
    key_path = _given("key_file", key_path, "HOLDFAST_KEY_FILE", "the file with the job's key")
    asked = backend or os.environ.get("HOLDFAST_BACKEND") or "auto"
    where = torch.device("cpu" if device is None else device)
    mesh = _number("HOLDFAST_MESH", os.environ.get("HOLDFAST_MESH", str(MESH)))
    integer_in(mesh, "HOLDFAST_MESH", 1, MAX_MEMBERS)
    checks_are_on()
    key = load_key(Path(key_path))
    address = listen_address(host, interface, placed)
    if placed.ends_together:
        _warn_of_torchrun()
    return Settings(
        name,
        url,
        key,
        asked,
        size or 0,
        min_size,
        shards or 0,
        timeouts,
        where,
        mesh,
        address,
        placed.size or 0,
        on_death,
    )


def listen_address(host: str | None, interface: str | None, placed: Placement) -> str:
    """The address to listen on: `host`, an address or name of this machine, or what `interface` chooses.

    If both are None, HOLDFAST_HOST or HOLDFAST_INTERFACE says it; without them it is loopback, unless the placement
    says that the job is on several hosts. Raises ValueError, TypeError, `AddressNeeded`, `NoSuchInterface`.
    """
    if host is None and interface is None:
        host, interface = os.environ.get("HOLDFAST_HOST") or None, os.environ.get("HOLDFAST_INTERFACE") or None
    if host is not None and interface is not None:
        raise ValueError(f"host={host!r} and interface={interface!r} both say where to listen; give one of them")
    if host is not None:
        return check_ours(host)
    if interface is not None and (not isinstance(interface, str) or not interface):
        raise ValueError(f"interface {interface!r}: give the name of an interface, a network or an address")
    why = f"{placed.source} started processes of this job on several hosts" if placed.spread else ""
    return choose_address(interface or "", why, local_addresses() if interface or why else ())


@functools.cache
def installed_version() -> str:
    """The version of holdfast that is installed here; "" if it is not installed as a distribution."""
    try:
        return importlib.metadata.version("holdfast")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _warn_of_torchrun() -> None:
    _log.warning(
        "torchrun ends all workers of an agent when one of them fails, and with --max-restarts above 0 it starts those "
        "of all agents again, so that one death reaches healthy ranks: start one agent for each process, with "
        "--nproc-per-node 1 --max-restarts 0"
    )


def candidate_job(settings: Settings, view: View | None) -> Job:
    """The job as this process would found it, checked against the `view` in the register (None: there is none).

    Raises `WrongKey`, `Mismatch` if `view` is of another job or of this one in another configuration,
    `BackendUnavailable` if this process cannot run the backend, or is not on the one host that the job needs.
    """
    names, unavailable = runnable_backends(settings.backend, settings.device)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
    if not names:
        raise BackendUnavailable(settings.backend, reasons or "nothing to choose from")
    there = view.job if view is not None else None
    size = settings.size or (there.size if there else max(settings.min_size, settings.scheduled, 1))
    shards = settings.shards or (there.shards if there else size)
    identity = identity_of(settings.key, settings.name)
    mine = Job(
        identity.name,
        size,
        settings.min_size,
        shards,
        tuple(names),
        key_check=identity.key_check,
        asked=settings.backend,
        timeouts=settings.timeouts,
        mesh=settings.mesh,
        on_death=settings.on_death,
        version=identity.version,
    )
    if view is None or there is None:
        if mine.min_size > mine.size:
            raise ValueError(f"min_size={mine.min_size} is above size={mine.size}: the job could never run")
        return mine
    check_identity(settings.register, mine.identity, there.identity)
    difference = mine.conflict(there)
    if difference is not None:
        raise Mismatch(f"register {settings.register}: {difference}")
    if view.phase == "failed":
        raise HoldfastError(f"job {there.name!r} has ended: {view.reason}; start it under another name or register")
    if there.backend and there.backend not in names:
        raise BackendUnavailable(
            there.backend, f"the job runs on it, this process cannot: {reasons or 'not asked for'}"
        )
    distance = host_refusal_reason(this_host(), one_host_backends(mine.backends), view)
    if distance is not None:
        raise BackendUnavailable(there.backend, distance)
    return mine


def check_identity(register: str, mine: JobIdentity, there: JobIdentity) -> None:
    """Raise `WrongKey` or `Mismatch` if the register at a URL is of the job `there`, and that is not `mine`."""
    if (difference := mine.conflict(there)) is not None:
        kind = WrongKey if mine.name == there.name and mine.key_check != there.key_check else Mismatch
        raise kind(f"register {register}: {difference}")


class AlreadyJoined(HoldfastError):
    """This process has another session of the same job open."""

    def __init__(self, job: str) -> None:
        self.job = job
        super().__init__(
            f"this process has a session of job {job!r} open already; leave that one first, or start another process"
        )


_open_sessions: set[tuple[int, str, str]] = set()
_open_lock = threading.Lock()


def check_single(settings: Settings) -> None:
    """Raise `AlreadyJoined` if this process has a session of the job open."""
    if _session_key(settings) in _open_sessions:
        raise AlreadyJoined(settings.name)


def open_single(settings: Settings) -> None:
    """Register an open session of the job in this process, until `close_single`. Raises `AlreadyJoined`."""
    with _open_lock:
        check_single(settings)
        _open_sessions.add(_session_key(settings))


def close_single(settings: Settings) -> None:
    """Undo `open_single`: the session of the job is closed."""
    _open_sessions.discard(_session_key(settings))


def _session_key(settings: Settings) -> tuple[int, str, str]:
    return os.getpid(), settings.register, settings.name


def one_host_backends(names: tuple[str, ...]) -> frozenset[str]:
    """The backends of `names` that need all members on one host."""
    return frozenset(name for name in names if registry().backend(name).info.capabilities.one_host)


def identity_of(key: bytes, name: str) -> JobIdentity:
    """The identity of the job `name` with this key, for a process of this holdfast.

    Its check of the key is a digest (16 bytes, hex) that does not reveal the key.
    """
    check = hmac.digest(key, b"holdfast job " + name.encode(), "sha256")[:16].hex()
    return JobIdentity(name, check, installed_version())


def _given(what: str, value: str | None, variable: str, meaning: str, otherwise: str = "") -> str:
    found = os.environ.get(variable, "") or otherwise if value is None else value
    if not isinstance(found, str):
        raise TypeError(f"{what} must be text, not {type(found).__name__}")
    if not found:
        raise ValueError(f"{what} is not given and {variable} is not in the environment: {meaning}")
    return found


def _number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what}={text!r} is not a whole number") from None
