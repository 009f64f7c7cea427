"""What happened in a job: one typed event for each kind. `holdfast.ft.event_lines` has the lines of logs.

Names on the wire (`tag`, and the fields) do not change, so logs of earlier versions can be read.
"""

from __future__ import annotations

import logging
import time
from typing import ClassVar, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.ft.console.units import counted, format_bytes, format_seconds


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One thing that happened. `str` gives it in a sentence, without its process and time.

    `shared`: all members learn of it, so one of them logs it for all. `then` says what follows from it.
    """

    usual_level: ClassVar[int] = logging.DEBUG
    shared: ClassVar[bool] = False
    then: ClassVar[str] = ""
    counter: ClassVar[str] = ""
    """The counter of metrics to which it adds one, or one for each of its `members`."""
    says: ClassVar[str] = ""
    """The sentence, in which `{self.FIELD}` stands for a field, unless the kind makes its own."""

    time: float = -1.0
    process: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return self.says.format(self=self)

    @property
    def level(self) -> int:
        """The level of its log line."""
        return self.usual_level

    @property
    def kind(self) -> str:
        """The name of its kind on the wire."""
        return str(type(self).__struct_config__.tag)


E = TypeVar("E", bound=Event)


def stamped(event: E, process: str, pid: int, at: float | None = None) -> E:
    """`event` as one of `process`, at the time `at` (default: now)."""
    return replace(event, time=time.monotonic() if at is None else at, process=process, pid=pid)


# Membership ----------------------------------------------------------------------------------------------------------


class JoinRequested(Event, frozen=True, tag="joined"):
    """The process asks for a place in the job."""

    says = "this process asks to join the job (it listens at {self.address})"

    address: str = ""


class SpareWaits(Event, frozen=True, tag="spare"):
    """The process waits as a spare, and announces that to the members `to`."""

    usual_level = logging.INFO
    then = "it takes a place when a member is lost"
    says = "this process waits as a spare of epoch {self.epoch}"

    epoch: int
    to: tuple[str, ...] = ()


class SpareWelcomed(Event, frozen=True, tag="welcomed"):
    """A member knows of a waiting spare."""

    says = "{self.spare} waits as a spare"

    spare: str


class ViewInstalled(Event, frozen=True, tag="installed"):
    """The process is in the view of an epoch; `members` in rank order. `over`: see `View.degraded_from`."""

    usual_level = logging.INFO
    shared = True

    epoch: int
    members: tuple[str, ...]
    rank: int | None = None
    reason: str = ""
    min_size: int | UnsetType = UNSET
    over: int | UnsetType = UNSET

    def __str__(self) -> str:
        then = "its members connect to each other" if self.over is UNSET else "they keep their communicator, and vote"
        return f"epoch {self.epoch} begins with {counted(len(self.members), 'member')}: {self.reason}; {then}"


class ViewProposed(Event, frozen=True, tag="proposed"):
    """The process asks the register to begin an epoch."""

    then = "the register decides"

    epoch: int
    phase: str = "running"
    reason: str = ""

    def __str__(self) -> str:
        what = "" if self.phase == "running" else f", in which the job is {self.phase}"
        return f"this rank proposes epoch {self.epoch}{what}: {self.reason}"

    @property
    def level(self) -> int:
        return logging.INFO if self.phase in ("running", "failed") else logging.DEBUG


class EpochRevoked(Event, frozen=True, tag="revoked"):
    """The process ends its work in an epoch."""

    shared = True
    usual_level = logging.INFO
    then = "its pending ops end, and the next view decides who goes on"
    says = "epoch {self.epoch} is over: {self.reason}"

    epoch: int
    reason: str = ""


class WasEvicted(Event, frozen=True, tag="evicted"):
    """The process was a member and is not one of the next view."""

    usual_level = logging.WARNING
    then = "it can do nothing more in this job"
    says = "epoch {self.epoch} begins without this process: {self.reason}"

    epoch: int
    reason: str = ""


class ResignedItself(Event, frozen=True, tag="resigned"):
    """The process leaves because it breaks the connectivity of the others."""

    usual_level = logging.WARNING
    then = "the others replace it"
    says = "this process leaves the job: {self.evidence}"

    evidence: str


class LostMajority(Event, frozen=True, tag="cut_off"):
    """The process hears too few members to work with them."""

    usual_level = logging.WARNING
    then = "it stops until it is heard again or replaced"
    says = "this process is cut off: {self.evidence}"

    evidence: str


class RegisterUnreachable(Event, frozen=True, tag="register_away"):
    """The register could not be reached."""

    usual_level = logging.WARNING
    then = "this rank tries again; steps go on without the register, recoveries wait for it"
    counter = "register_away"
    says = "the register cannot be reached: {self.reason}"

    reason: str


# Failures of members ------------------------------------------------------------------------------------------------


class DeathsDetected(Event, frozen=True, tag="detected"):
    """The process knows that members are gone; `silent` are the seconds since the last sign of life of each."""

    usual_level = logging.INFO
    shared = True
    counter = "failures_detected"
    then = "the survivors end the epoch and go on without"

    members: tuple[str, ...]
    evidence: str = ""
    errors: tuple[str, ...] = ()
    silent: tuple[float | None, ...] = ()

    def __str__(self) -> str:
        return f"{_some(self.members)} {'is' if len(self.members) == 1 else 'are'} lost: {self.evidence}"


class MemberSuspected(Event, frozen=True, tag="suspected"):
    """The process hears a member of another host no more. `of`: its living observers, in simulations."""

    usual_level = logging.INFO
    shared = True
    then = "it is lost once most of its observers agree"
    counter = "suspicions"
    says = "{self.member} is suspected: {self.evidence}"

    member: str
    evidence: str = ""
    of: int | UnsetType = UNSET


class SuspicionCleared(Event, frozen=True, tag="cleared"):
    """The process hears a suspected member again."""

    usual_level = logging.INFO
    shared = True
    says = "{self.member} is heard again"

    member: str


class MemberUnreachable(Event, frozen=True, tag="condemned"):
    """The process concludes that the job must go on without a member, which may live."""

    usual_level = logging.INFO
    shared = True
    then = "the next epoch begins without it"
    counter = "failures_detected"
    says = "{self.member} counts as failed: {self.evidence}"

    member: str
    evidence: str = ""


class MemberStalled(Event, frozen=True, tag="stalled"):
    """A member of this host did not run for the whole suspect time."""

    usual_level = logging.INFO
    then = "it is ended by SIGKILL"
    says = "{self.member} does not run: {self.evidence}"

    member: str
    evidence: str = ""


class MemberLate(Event, frozen=True, tag="late"):
    """A member holds up an op; `op` is its number in the epoch."""

    usual_level = logging.INFO
    shared = True
    says = "{self.member} holds up op {self.op}: {self.evidence}"

    member: str
    op: int
    evidence: str = ""


class MemberFenced(Event, frozen=True, tag="fenced"):
    """The process sent SIGKILL to a member that was stopped or hung."""

    usual_level = logging.INFO
    then = "its death is awaited"
    says = "{self.member} is ended by SIGKILL: {self.reason}"

    member: str
    reason: str = ""


class FenceFailed(Event, frozen=True, tag="fence_failed"):
    """The process could not send SIGKILL to a member, and tries again."""

    usual_level = logging.WARNING
    then = "this is tried again"
    says = "{self.member} cannot be ended: {self.error} (to end it because {self.reason})"

    member: str
    reason: str = ""
    error: str = ""


class DetectorLost(Event, frozen=True, tag="detector_lost"):
    """A failure detector is missing or has failed; `instead` is the evidence in its place."""

    usual_level = logging.WARNING
    says = "detector {self.detector!r} is lost ({self.reason}); in its place: {self.instead}"

    detector: str
    reason: str = ""
    instead: str = ""


# Steps ----------------------------------------------------------------------------------------------------------------


class StepBegun(Event, frozen=True, tag="attempt"):
    """The process begins an attempt at a step."""

    says = "step {self.step} begins"

    step: int
    epoch: int


class StepPrepared(Event, frozen=True, tag="prepared"):
    """The process has its results of the step."""

    says = "this rank's part of step {self.step} is done"

    step: int
    epoch: int


class StepCommitted(Event, frozen=True, tag="committed"):
    """The step is committed: `how` is normal, recovered (after a failure) or finished (with the job)."""

    step: int
    epoch: int
    how: str = "normal"
    digest: str | UnsetType = UNSET

    shared = True

    def __str__(self) -> str:
        if self.how == "recovered":
            return f"step {self.step} was complete on all survivors and is committed"
        return f"step {self.step} is committed"

    @property
    def level(self) -> int:
        return logging.INFO if self.how == "recovered" else logging.DEBUG


class StepAborted(Event, frozen=True, tag="aborted_step"):
    """The attempt is undone."""

    usual_level = logging.INFO
    shared = True
    then = "it comes again"
    counter = "steps_aborted"
    says = "step {self.step} was not complete on all ranks and is undone"

    step: int
    epoch: int


class CommunicatorBuilt(Event, frozen=True, tag="rebuilt"):
    """The communicator of the epoch stands."""

    usual_level = logging.INFO
    shared = True
    then = "newcomers, if any, get the state, and the steps go on"

    epoch: int
    seconds: float = 0.0
    rank: int | None = None
    size: int = 0

    def __str__(self) -> str:
        return f"the communicator of {counted(self.size, 'rank')} stands after {format_seconds(self.seconds)}"


class RecoveryEnded(Event, frozen=True, tag="gap"):
    """The first normal commit after a change of the view; `seconds` from the last one before, `usual` for a step."""

    usual_level = logging.INFO
    shared = True

    step: int
    epoch: int
    seconds: float = 0.0
    usual: float | None = None
    joined: int = 0
    left: int = 0

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", usually {format_seconds(self.usual)}"
        return (
            f"step {self.step} is committed, {format_seconds(self.seconds)} after the one before{usual} "
            f"({self.left} left, {self.joined} joined)"
        )


class StepsFinished(Event, frozen=True, tag="finished"):
    """The job's steps are over for the process; `step` is the last one."""

    usual_level = logging.INFO
    shared = True
    says = "the job is finished after step {self.step}"

    step: int = -1


class SessionFailed(Event, frozen=True, tag="error"):
    """The process ended with an error."""

    usual_level = logging.INFO
    then = "it leaves the job"
    says = "this process ends with an error: {self.error}"

    error: str = ""


class OpEnded(Event, frozen=True, tag="op"):
    """An op ended; `timeout` is its limit in seconds."""

    op: str
    seq: int
    epoch: int
    seconds: float
    error: str = ""
    timeout: float | UnsetType = UNSET

    def __str__(self) -> str:
        return f"{self.op} ended after {format_seconds(self.seconds)}{': ' if self.error else ''}{self.error}"


# State ----------------------------------------------------------------------------------------------------------------


class StateReceived(Event, frozen=True, tag="synced"):
    """The process got the state after a step from other ranks; -1: before the first step."""

    then = "it works with the others from now on"

    step: int
    epoch: int
    source: int = -1
    bytes: int = 0
    seconds: float = 0.0
    via: str = ""
    sources: dict[str, int] = {}
    kept: int = 0
    lost: tuple[int, ...] = ()
    digest: str | UnsetType = UNSET

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step >= 0 else "before the first step"
        return (
            f"this rank has the state {when} from rank {self.source} "
            f"({format_bytes(self.bytes)} by {self.via} in {format_seconds(self.seconds)})"
        )

    @property
    def level(self) -> int:
        return logging.INFO if self.step >= 0 else logging.DEBUG


class StateRestored(Event, frozen=True, tag="restored"):
    """Sharded parts were put back, from copies or a checkpoint."""

    usual_level = logging.INFO
    shared = True

    step: int
    epoch: int
    source: str
    bytes: int = 0
    sources: dict[str, int] = {}
    kept: int = 0
    lost: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"the sharded state after {counted(self.step + 1, 'step')} is restored from: {self.source} "
            f"({format_bytes(self.bytes)} in {format_seconds(self.seconds)})"
        )


class PartCopied(Event, frozen=True, tag="copied"):
    """The process's part of sharded state was copied to its neighbours."""

    step: int
    epoch: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        amount, seconds = format_bytes(self.bytes), format_seconds(self.seconds)
        return f"this rank's part after step {self.step} is copied ({amount} in {seconds})"


class CheckpointSaved(Event, frozen=True, tag="checkpoint"):
    """A checkpoint is saved."""

    step: int
    epoch: int
    seconds: float

    def __str__(self) -> str:
        return f"a checkpoint after step {self.step} is saved in {format_seconds(self.seconds)}"


class StateRefused(Event, frozen=True, tag="state_refused"):
    """The rank could not give its state to a newcomer."""

    usual_level = logging.ERROR
    then = "the others go on without the newcomer"
    says = "this rank cannot give its state to newcomers: {self.reason}"

    step: int
    epoch: int
    reason: str


class StateUnfit(Event, frozen=True, tag="state_unfit"):
    """Something attached has become a thing that newcomers cannot be given."""

    usual_level = logging.WARNING
    says = "what is attached as {self.name!r} cannot be given to newcomers any more: {self.reason}"

    step: int
    name: str
    reason: str


# About the record itself ---------------------------------------------------------------------------------------------


class MetricsServed(Event, frozen=True, tag="metrics"):
    """Where the process serves its metrics."""

    usual_level = logging.INFO
    says = "metrics are served at {self.url}"

    url: str


class EventsDropped(Event, frozen=True, tag="events_dropped"):
    """A receiver took no event for long, and `count` did not fit into its queue."""

    count: int

    def __str__(self) -> str:
        return f"{counted(self.count, 'event')} were dropped"


# Workloads under faults, and simulations -----------------------------------------------------------------------------


class SamplesTaken(Event, frozen=True, tag="samples"):
    """The shards that a rank works on in an attempt. The step has `of` of them."""

    says = "step {self.step} works on shards {self.shards}"

    step: int
    epoch: int
    shards: tuple[int, ...]
    of: int | UnsetType = UNSET


class StateDigested(Event, frozen=True, tag="state"):
    """A checksum of the state that the process holds after a step."""

    says = "the state after step {self.step} has digest {self.digest}"

    step: int
    digest: str


class ResourcesUsed(Event, frozen=True, tag="resources"):
    """The descriptors, threads and resident bytes of a process."""

    descriptors: int
    threads: int
    resident: int

    def __str__(self) -> str:
        return f"it has {self.descriptors} descriptors, {self.threads} threads, {format_bytes(self.resident)}"


class FaultInjected(Event, frozen=True, tag="fault"):
    """The harness injects a fault."""

    what: str
    number: int = 0
    target: str | UnsetType = UNSET
    target_pid: int | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    details: str | UnsetType = UNSET

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(part for part in (self.target, self.details) if part)}"


class FaultHealed(Event, frozen=True, tag="healed"):
    """A fault is over."""

    says = "fault {self.number} is over"

    number: int


class ProcessDied(Event, frozen=True, tag="died"):
    """The harness or the simulator ended a process."""

    says = "this process is killed: {self.why}"

    why: str = ""


class ProcessStopped(Event, frozen=True, tag="stopped"):
    """The harness or the simulator stopped a process."""

    seconds: float

    def __str__(self) -> str:
        return f"this process is stopped for {format_seconds(self.seconds)}"


class RoleLost(Event, frozen=True, tag="process_lost"):
    """A process of a training run ended."""

    says = "this {self.role} is lost"

    role: str


class RoleReplaced(Event, frozen=True, tag="process_replaced"):
    """A process of a training run takes the place of another."""

    says = "this {self.role} takes the place of a lost one"

    role: str


class SimulationBegun(Event, frozen=True, tag="simulated"):
    """A simulation begins: its log has the fate of every process."""

    ranks: int
    hosts: int

    def __str__(self) -> str:
        return f"a simulation of {counted(self.ranks, 'rank')} on {counted(self.hosts, 'host')} begins"


class SimulationEnds(Event, frozen=True, tag="horizon"):
    """A simulation ends, `seconds` after the end of the last fault."""

    seconds: float

    def __str__(self) -> str:
        return f"the simulation ends {format_seconds(self.seconds)} after the last fault"


class CoreBroken(Event, frozen=True, tag="broken"):
    """The membership core of a process raised."""

    says = "the membership core raised: {self.error}"

    error: str


class VersionEvent(Event, frozen=True):
    """An event about a version of the weights in a store."""

    version: int


class VersionPublished(VersionEvent, frozen=True, tag="published"):
    """Readers may see the version from now on."""

    says = "version {self.version} is published"


class VersionFetched(VersionEvent, frozen=True, tag="fetched"):
    """The process read the version."""

    says = "version {self.version} is fetched"


class VersionRetired(VersionEvent, frozen=True, tag="retired"):
    """The version may be removed from now on."""

    says = "version {self.version} is retired"


class VersionLost(VersionEvent, frozen=True, tag="lost"):
    """No holder has the version any more."""

    says = "version {self.version} is lost: no holder has it"


class ReplicaMade(VersionEvent, frozen=True, tag="replica_made"):
    """A holder has copied a part of a version."""

    says = "part {self.part} of version {self.version} is copied here"

    part: int = 0


class ReplicaCorrupt(VersionEvent, frozen=True, tag="replica_corrupt"):
    """A copy of a part of a version is not what was published."""

    says = "the copy of part {self.part} of version {self.version} at {self.holder} is corrupt"

    part: int = 0
    holder: str = ""


class HoldersDied(Event, frozen=True, tag="holders_died"):
    """Processes that held copies are gone."""

    pids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"holders are gone: pids {', '.join(map(str, self.pids))}"


class HostAway(Event, frozen=True, tag="host_away"):
    """A host of holders does not answer."""

    says = "host {self.host} does not answer"

    host: str = ""
    hosts: int = 0


class HolderReady(Event, frozen=True, tag="holding"):
    """A holder of a workload is ready."""

    def __str__(self) -> str:
        return "this process holds copies from now on"


class ReadsEnded(Event, frozen=True, tag="read"):
    """A reader of a workload has read all versions that it wanted."""

    reads: int

    def __str__(self) -> str:
        return f"{counted(self.reads, 'read')} are done"


class EpochReduced(Event, frozen=True, tag="first_op"):
    """A rank of a benchmark completed its first op of an epoch, at the time `completed`."""

    says = "the first op of epoch {self.epoch} is complete"

    epoch: int
    rank: int
    completed: float


class VersionWrong(VersionEvent, frozen=True, tag="wrong"):
    """The process read other bytes than were published."""

    says = "version {self.version} has wrong bytes"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
