"""Scenarios as data, read from TOML and validated: the workload, the faults and their moments, the expected outcome.

Those that come with holdfast are found by name. The error of an invalid scenario names the line, what is wrong with it
and what is allowed. `schedule` draws from a scenario and a seed which fault hits which process, and when.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.comms.errors import BackendUnavailable, HoldfastError
from holdfast.ft.console.units import counted
from holdfast.ft.faultpoints import POINTS, WORKLOAD_POINTS
from holdfast.ft.membership.view import Timeouts
from holdfast.harness.chaos.fault_type import FaultType, fault_types
from holdfast.harness.chaos.workload import ReinforcementLearning, Workload
from holdfast.rl.config.toml import explained, leaves, lines_of, nearest_line
from holdfast.rl.errors import BadConfig, Key, dotted, key_of

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)]


class BadScenario(HoldfastError, ValueError):
    """A scenario is invalid. `source` and `line` say where."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        self.source, self.line, self.reason = source, line, reason
        super().__init__(f"{source}{f':{line}' if line else ''}: {reason}")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table that refuses unknown keys."""


class Patience(_Strict, frozen=True, kw_only=True):
    """`ft.Timeouts`, in seconds; shorter than the defaults, for runs of seconds."""

    def __post_init__(self) -> None:
        Timeouts(**msgspec.structs.asdict(self))

    heartbeat: Positive = 0.1
    suspect: Positive = 0.5
    operation: Positive = 20.0
    rebuild: Positive = 10.0
    join: Positive = 30.0


class JobSpec(_Strict, frozen=True, kw_only=True):
    """The job that runs the workload.

    `replace`: a new process replaces a dead one, as a cluster manager would do. `links`: the links between ranks lead
    through a proxy (needed by faults of links; also in the fault-free run that this one is compared with).
    `hosts` "many": every process believes that it is on a host of its own, and knows of others by the network alone;
    "namespaces": it has a network namespace of its own, with a cable that can be pulled (as root).
    `shards`: parts of a step; by default as many as ranks. `disk`: the job's files are on a file system of their own,
    of so many megabytes (as root). `register`: the place of the job's views: a file, torch's TCPStore served by a
    process, or a real etcd of `register_nodes` nodes; the server is started for the run.
    """

    backend: Annotated[str, Meta(min_length=1)] = "shm"
    ranks: Annotated[int, Meta(ge=1, le=64)] = 3
    spares: Annotated[int, Meta(ge=0, le=16)] = 0
    min_size: Annotated[int, Meta(ge=1)] = 1
    shards: Annotated[int, Meta(ge=1)] | None = None
    replace: bool = False
    links: bool = False
    hosts: Literal["one", "many", "namespaces"] = "one"
    disk: Annotated[float, Meta(ge=1, le=1024)] | None = None
    timeouts: Patience = Patience()
    environ: dict[str, str] = {}
    register: Literal["sqlite", "tcp", "etcd"] = "sqlite"
    register_nodes: Literal[1, 3] = 1

    def __post_init__(self) -> None:
        if self.min_size > self.ranks:
            raise ValueError(f"min_size = {self.min_size}: the job has {counted(self.ranks, 'rank')} only")
        if self.register_nodes != 1 and self.register != "etcd":
            raise ValueError(f'register_nodes = {self.register_nodes}: only register = "etcd" has more nodes than one')
        if self.register != "sqlite" and self.hosts == "namespaces":
            raise ValueError(f'register = "{self.register}" listens on this host, and hosts = "namespaces" are others')


class At(_Strict, frozen=True, kw_only=True):
    """When a fault is injected. Exactly one of:

    `step`: when this step is committed. `seconds`: so long after the job began to run. `random = [low, high]`: at a
    step in this part of the run (shares of all its steps), drawn from the seed. `point`: when a process is at this
    point of the protocol, before it goes on; `in_step`, `rank` and `epoch` narrow it down, and with `random` it is in
    the drawn step or a later one. `every`: repeatedly, at this interval in seconds, the first time after `start`
    seconds (by default `every`).
    """

    step: Annotated[int, Meta(ge=0)] | None = None
    seconds: Annotated[float, Meta(ge=0)] | None = None
    random: tuple[Share, Share] | None = None
    point: str | None = None
    every: Positive | None = None
    start: Annotated[float, Meta(ge=0)] | None = None
    in_step: Annotated[int, Meta(ge=0)] | None = None
    rank: Annotated[int, Meta(ge=0)] | None = None
    epoch: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        kinds = ("step", "seconds", "random", "point", "every")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1 and given != ["random", "point"]:
            raise ValueError(f"`at` says when by exactly one of {', '.join(kinds)}; this has {given or 'none'}")
        if self.random is not None and self.random[0] > self.random[1]:
            raise ValueError(f"random = {list(self.random)}: the first share must not be above the second")
        if self.point is not None and self.point not in (*POINTS, *WORKLOAD_POINTS):
            raise ValueError(f"there is no point {self.point!r}; there are {', '.join((*POINTS, *WORKLOAD_POINTS))}")
        if self.point is None and (self.in_step, self.rank, self.epoch) != (None, None, None):
            raise ValueError("in_step, rank and epoch belong to a `point`")
        if self.random is not None and self.in_step is not None:
            raise ValueError("in_step and random: give one of them")
        if self.every is None and self.start is not None:
            raise ValueError("start belongs to `every`")


class ScenarioFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: `what` to break, `at` which moment, and for how long (`lasts` seconds; None: for good)."""

    type: str
    at: At
    what: FaultType
    lasts: float | None = None


class Expect(_Strict, frozen=True, kw_only=True):
    """The expected outcome.

    `verdict`: "held", or "broken" if one or more of the invariants named in `broken` are violated, and no other (for a
    limit that is known, or a bug that is shown). `weights`: what the ranks return has equal bits; "identical": those of
    a run without faults, too; "any": those are not asked for; "unchecked": nothing that the ranks return is compared.
    `finishes`: all steps are committed. `goodput`: at least this share of the steps a second of a run without faults.
    `ranks`: so many at the end. `rebuilds = [least, most]`: how often the communicator was rebuilt. `progress`: seconds
    within which a step is committed after any fault. `caught`: words of which one must be in the logs of the job (a
    corruption that a checksum found). `leaks`: whether descriptors and threads of processes that live through many
    rebuilds must not grow. `held_out`: the least held-out reward that the last evaluations of a run of reinforcement
    learning have on average.
    """

    verdict: Literal["held", "broken"] = "held"
    broken: tuple[str, ...] = ()
    weights: Literal["identical", "any", "unchecked"] = "identical"
    finishes: bool = True
    goodput: Share = 0.0
    ranks: Annotated[int, Meta(ge=0)] | None = None
    rebuilds: tuple[int, int] | None = None
    progress: Positive = 20.0
    caught: tuple[str, ...] = ()
    leaks: bool = False
    held_out: Share = 0.0

    def __post_init__(self) -> None:
        if (self.verdict == "broken") != bool(self.broken):
            raise ValueError('verdict = "broken" comes with the names of the invariants in `broken`, and only then')
        if self.rebuilds is not None and not 0 <= self.rebuilds[0] <= self.rebuilds[1]:
            raise ValueError(f"rebuilds = {list(self.rebuilds)}: write [least, most]")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A whole scenario. `title` in a few words, `summary` what it shows and why that matters; `limit` in seconds.

    `minutes`: the default length of a run, at the speed of a run without faults; without it the workload sets the
    number of steps.
    """

    name: str
    title: str
    summary: str
    workload: Workload
    job: JobSpec = JobSpec()
    faults: tuple[ScenarioFault, ...] = ()
    expect: Expect = Expect()
    limit: float = 120.0
    minutes: float | None = None

    @property
    def own_hosts(self) -> int:
        """How many network namespaces are hosts of its processes; 0 if these are on this host."""
        if isinstance(self.workload, ReinforcementLearning):
            return self.workload.hosts if self.workload.hosts > 1 else 0
        return self.job.ranks + self.job.spares if self.job.hosts == "namespaces" else 0


class _Document(_Strict, frozen=True, kw_only=True):
    """The TOML document; the type of each fault decodes its table."""

    title: Annotated[str, Meta(min_length=1, max_length=120)]
    summary: str = ""
    limit: Positive = 120.0
    minutes: Positive | None = None
    workload: Workload
    job: JobSpec = JobSpec()
    fault: list[dict[str, Any]] = []
    expect: Expect = Expect()


def parse(text: str, name: str, source: str) -> Scenario:
    """A scenario from TOML. Raises `BadScenario` with the line and what is allowed there."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of very many digits, and for arrays in arrays
        found = re.search(r"at line (\d+)", str(error))
        raise BadScenario(source, int(found[1]) if found else None, f"not TOML: {error}") from None
    for path, value in leaves(raw):
        if isinstance(value, float) and not math.isfinite(value) and path[:2] != ("workload", "arguments"):
            raise BadScenario(source, line_of(text, path), f"{dotted(path)}: {value} is not a number to work with")
    try:
        document = msgspec.convert(raw, _Document)
    except msgspec.ValidationError as error:
        raise _explained(error, text, source, _Document, raw) from None
    faults = tuple(_fault(each, number, text, source) for number, each in enumerate(document.fault))
    scenario = Scenario(
        name=name,
        title=document.title,
        summary=document.summary,
        workload=document.workload,
        job=document.job,
        faults=faults,
        expect=document.expect,
        limit=document.limit,
        minutes=document.minutes,
    )
    if isinstance(scenario.workload, ReinforcementLearning):
        _check_training(scenario, scenario.workload, text, source)
    for number, fault in enumerate(faults):
        try:
            check_fits(scenario, fault)
        except (ValueError, BackendUnavailable) as error:
            raise BadScenario(source, line_of(text, ("fault", number)), f"fault {number + 1}: {error}") from None
    return scenario


def _check_training(scenario: Scenario, workload: ReinforcementLearning, text: str, source: str) -> None:
    """Raise `BadScenario` for a run that cannot be, or not with this job and these expectations."""
    try:
        config = workload.config_in(Path(source).parent)
    except BadConfig as error:
        first = error.problems[0]
        path = ("workload", "run", *key_of(first.key))
        raise BadScenario(source, line_of(text, path), f"workload.run.{first.key}: {first.reason}") from None
    if scenario.job != JobSpec():
        reason = "[job] is for other workloads: a run of reinforcement learning has its processes in workload.run"
        raise BadScenario(source, line_of(text, ("job",)), reason)
    if scenario.expect.weights == "identical" and config.algorithm.mode != "synchronous":
        reason = 'expect.weights: only the loop of workload.run.algorithm.mode = "synchronous" gives equal weights'
        raise BadScenario(source, line_of(text, ("expect", "weights")), reason + '; expect.weights = "unchecked"')


def load(path: Path) -> Scenario:
    """The scenario in a file. Raises `BadScenario`, OSError."""
    name = re.sub(r"[^a-z0-9-]+", "-", path.stem.lower()).strip("-") or "scenario"
    text = text_of(path)
    loaded = parse(text, name, str(path))
    try:
        return msgspec.structs.replace(loaded, workload=loaded.workload.placed(path.parent))
    except ValueError as error:
        raise BadScenario(str(path), line_of(text, ("workload", "target")), str(error)) from None


def text_of(path: Path) -> str:
    """The text of a scenario's file, without the byte order mark of some editors. Raises `BadScenario`, OSError."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadScenario(str(path), line, f"not UTF-8: byte 0x{data[error.start]:02x}") from None


def check_fits(scenario: Scenario, fault: ScenarioFault) -> None:
    """Raise ValueError, saying why, for a fault that cannot be injected in this scenario."""
    if fault.lasts is not None and fault.lasts <= 0:
        raise ValueError(f"lasts = {fault.lasts} must be positive seconds")
    steps = scenario.workload.steps
    if fault.at.step is not None and steps is not None and fault.at.step >= steps:
        raise ValueError(f"at.step = {fault.at.step}, but the workload has {counted(steps, 'step')}")
    family = scenario.workload.family
    if fault.at.point in POINTS and family not in ("session", "rl"):
        raise ValueError("points of the protocol are reached by workloads with an ft.Session only")
    if fault.at.point in WORKLOAD_POINTS and family != "rl":
        raise ValueError(f'the point {fault.at.point} is reached by a workload of kind = "rl" only')
    fault.what.check(scenario)
    if fault.lasts is None and (why := fault.what.stalls(scenario)):
        raise ValueError(f'{why}; give `lasts`, or job.hosts = "many"')


def _fault(raw: dict[str, Any], number: int, text: str, source: str) -> ScenarioFault:
    raw = dict(raw)
    known = fault_types()
    kind = raw.pop("type", None)
    if not isinstance(kind, str) or kind not in known:
        says = "a fault needs a `type`" if kind is None else f"there is no fault type {kind!r}"
        line = line_of(text, ("fault", number, "type"))
        raise BadScenario(source, line, f"{says}; there are {', '.join(sorted(known))}")
    at, lasts = raw.pop("at", None), raw.pop("lasts", None)
    if at is None:
        raise BadScenario(source, line_of(text, ("fault", number)), "a fault says when by `at`, such as at.step = 40")
    try:
        when = msgspec.convert(at, At)
    except msgspec.ValidationError as error:
        raise _explained(error, text, source, At, at, ("fault", number, "at")) from None
    try:
        what: FaultType = msgspec.convert(raw, known[kind])
    except msgspec.ValidationError as error:
        raise _explained(error, text, source, known[kind], raw, ("fault", number)) from None
    try:
        duration = msgspec.convert(lasts, float | None)
    except msgspec.ValidationError as error:
        raise _explained(error, text, source, float | None, lasts, ("fault", number, "lasts")) from None
    return ScenarioFault(type=kind, at=when, what=what, lasts=duration)


_NAMED = re.compile(r"(\w+) ?= ?")
"""The start of a reason that is about one key of a table."""


def _explained(
    error: msgspec.ValidationError, text: str, source: str, kind: Any, raw: Any, prefix: Key = ()
) -> BadScenario:
    """The error with its line and what is allowed there."""
    key, reason = explained(error, kind, raw, ("type", "at", "lasts") if len(prefix) == 2 else ())
    path = (*prefix, *key)
    named = _NAMED.match(reason)
    line = line_of(text, (*path, named[1]) if named else path)
    return BadScenario(source, line, f"{dotted(path)}: {reason}" if path else reason)


def line_of(document: str, path: Key) -> int | None:
    """The line (from 1) of the value at `path`, or of the nearest table around it; None without one."""
    return nearest_line(lines_of(document), path)


# The scenarios that come with holdfast --------------------------------------------------------------------------------


FOLDER = Path(__file__).with_name("scenarios")


def scenario_names() -> list[str]:
    """The scenario_names of the scenarios that come with holdfast."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def scenario_path(name_or_file: str) -> Path:
    """The file of a scenario: by the name of one that comes with holdfast, or by path. Raises `BadScenario`."""
    shipped = FOLDER / f"{name_or_file}.toml"
    if "/" not in name_or_file and not name_or_file.endswith(".toml") and shipped.is_file():
        return shipped
    path = Path(name_or_file)
    if not path.is_file():
        raise BadScenario(
            name_or_file, None, f"no such file, and no scenario of that name; there are {', '.join(scenario_names())}"
        )
    return path


def find_scenario(name_or_file: str) -> Scenario:
    """Load a scenario by name or file. Raises `BadScenario`."""
    return load(scenario_path(name_or_file))


# The schedule of a seed -----------------------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """The moment of a fault.

    At the commit of `step`, `seconds` after the job began to run, or when a process is at `point` (with the given step,
    rank and epoch, -1 for any, and not before the step `since`).
    """

    step: int | None = None
    seconds: float | None = None
    point: str | None = None
    in_step: int = -1
    since: int = -1
    rank: int = -1
    epoch: int = -1

    def words(self) -> str:
        """The moment in words."""
        if self.step is not None:
            return f"step {self.step}"
        if self.seconds is not None:
            return f"{self.seconds:.2f} s"
        narrowed = [f"{name} {value}" for name, value in self._narrowed() if value >= 0]
        return f"at {self.point}" + (f" ({', '.join(narrowed)})" if narrowed else "")

    def _narrowed(self) -> tuple[tuple[str, int], ...]:
        return (("step", self.in_step), ("from step", self.since), ("rank", self.rank), ("epoch", self.epoch))


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A fault with all random choices made. `number` counts from 1. `again`: it recurs as long as the run lasts."""

    number: int
    type: str
    when: Trigger
    what: FaultType
    lasts: float | None = None
    again: bool = False


def schedule(
    scenario: Scenario, seed: int, *, steps: int | None = None, seconds: float | None = None
) -> tuple[Planned, ...]:
    """Every fault of a run, in the order of the scenario, with recurring ones up to `seconds`.

    All random choices of a run are made here, each fault's from a generator of its own: equal seeds give equal
    schedules, and one more fault changes no choice for those before it. Shares of a run count in `steps` (default: the
    workload's). Raises ValueError for a fault that cannot be placed.
    """
    found: list[tuple[Trigger, FaultType, str, float | None, bool]] = []
    total = steps if steps is not None else scenario.workload.steps
    for index, fault in enumerate(scenario.faults):
        dice = random.Random(_seed(seed, scenario.name, index))
        at = fault.at
        if at.every is None:
            what = fault.what.drawn(dice, scenario)
            found.append((_trigger(at, dice, total), what, fault.type, fault.lasts, False))
            continue
        if seconds is None:
            raise ValueError("a fault that comes again and again needs a run of a known duration: give `minutes`")
        moment = at.every if at.start is None else at.start
        while moment < seconds:
            what = fault.what.drawn(dice, scenario)
            found.append((Trigger(seconds=round(moment, 6)), what, fault.type, fault.lasts, True))
            moment += at.every
    found.sort(key=lambda each: each[0].seconds if each[0].seconds is not None else -1.0)
    return tuple(
        Planned(number=number, type=kind, when=when, what=what, lasts=lasts, again=again)
        for number, (when, what, kind, lasts, again) in enumerate(found, start=1)
    )


def encoded(planned: tuple[Planned, ...]) -> bytes:
    """The schedule as JSON: equal schedules have equal bytes."""
    return msgspec.json.encode(planned, order="sorted")


def _trigger(at: At, dice: random.Random, total: int | None) -> Trigger:
    step = at.step
    if at.random is not None:
        if total is None:
            raise ValueError(
                "a random step needs to know how many steps there are: say so by `steps` in [workload], or steps="
            )
        low, high = (round(share * (total - 1)) for share in at.random)
        step = dice.randint(low, max(low, high))
    if at.point is not None:
        narrowed = {"in_step": at.in_step, "since": step, "rank": at.rank, "epoch": at.epoch}
        return Trigger(point=at.point, **{name: value for name, value in narrowed.items() if value is not None})
    return Trigger(step=step, seconds=at.seconds)


def _seed(seed: int, name: str, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest(), "big")
