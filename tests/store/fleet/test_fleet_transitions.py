"""Switches of a fleet, as transitions of the catalogue in every order of events that hypothesis generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fleet, settling, transitions
from holdfast.store.catalog.records import Catalog, Holder, Reader, SwitchRecord
from holdfast.store.errors import ReaderReplaced
from support.weights.catalogs import announced, joined

TRAINER = Holder("trainer", Peer("host", 1, 1))
NAMES = ("g0", "g1", "g2")
names = st.sampled_from(NAMES)
some_readers = st.none() | st.lists(names, min_size=1, unique=True)


def publish(catalog: Catalog, number: int) -> Catalog:
    return announced(catalog, TRAINER.id, number, digest=bytes([number]) * 16)


def store_with(*numbers: int) -> Catalog:
    catalog = joined(TRAINER)
    for number in numbers:
        catalog = publish(catalog, number)
    return catalog


@dataclass
class Process:
    """A reader as its process sees itself: the versions that it has, and the one in its model."""

    reader: Reader
    has: set[int] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    serves: int | None = None
    serving: bool = False


def follow(catalog: Catalog, name: str, incarnation: int = 0) -> tuple[Catalog, Process]:
    peer = Peer("host", 100 + 10 * NAMES.index(name) + incarnation, 7)
    process = Process(Reader(name, f"{name}.{incarnation}", f"store of {name}", peer, switched=True))
    return fleet.register(catalog, process.reader), process


def bytes_of(*numbers: int) -> dict[int, tuple[bytes, ...]]:
    """What a reader has that has read these versions."""
    return {number: (bytes([number]) * 16,) for number in numbers}


def stage(catalog: Catalog, process: Process, *versions: int) -> Catalog:
    """Copy versions, and say that they are ready."""
    reader = process.reader
    process.has |= set(versions)
    catalog = fleet.report(catalog, reader.id, reader.token, process.has, bytes_of(*process.has - set(versions)))
    return fleet.report(catalog, reader.id, reader.token, process.has, bytes_of(*process.has))


class Fleet(RuleBasedStateMachine):
    """Readers, proposers and deaths in any order. A process acts on what it read, the catalogue may have moved on."""

    catalog = seen = Catalog()
    processes: dict[str, Process]
    decided: dict[str, SwitchRecord]
    started = published = proposed = 0

    @initialize()
    def begin(self) -> None:
        self.catalog = transitions.join(Catalog(), TRAINER)
        self.seen, self.processes, self.decided = self.catalog, {}, {}
        self.started = self.published = self.proposed = 0
        for _ in range(2):
            self.publish()
        for name in NAMES:
            self.start_or_restart(name)

    def apply(self, transition: Callable[[Catalog], Catalog]) -> bool:
        before = self.catalog
        try:
            self.catalog = transition(before)
        except (HoldfastError, ValueError):
            assert self.catalog is before
            return False
        assert transition(self.catalog) == self.catalog, "a change whose outcome is unknown can be asked again"
        self.check_decisions(before)
        return True

    def check_decisions(self, before: Catalog) -> None:
        for switch in self.catalog.switches:
            if switch.preparing:
                assert switch.token not in self.decided
                continue
            assert self.decided.setdefault(switch.token, switch) == switch, "a decision is final"
            was = fleet.find_switch(before, switch.token)
            if switch.state == "committed" and (was is None or was.preparing):
                ready = [each.id for each in self.catalog.readers if switch.version in each.ready]
                alive = set(switch.readers) - set(switch.gone)
                assert set(switch.ready) <= set(ready) & set(switch.readers)
                assert len(switch.ready) >= (len(alive) if switch.quorum is None else switch.quorum) >= 1

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.apply(lambda now: publish(now, self.published))

    @rule(name=names)
    def start_or_restart(self, name: str) -> None:
        """A process that is killed and started again has nothing, and serves nothing."""
        if name in self.processes:
            self.kill(name)
        self.started += 1
        _, process = follow(self.catalog, name, self.started)
        assert self.apply(lambda now: fleet.register(now, process.reader))
        self.processes[name] = process

    @rule(name=names)
    def kill(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            self.apply(lambda now: transitions.remove_dead_holders(now, {process.reader.peer}))

    @rule(name=names)
    def close(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            self.apply(lambda now: fleet.unregister(now, name, process.reader.token))

    @rule(data=st.data(), name=names)
    def begin_to_copy(self, data: st.DataObject, name: str) -> None:
        process = self.processes.get(name)
        me = fleet.find_reader(self.catalog, name)
        if process is None or me is None or not (versions := fleet.wanted(self.catalog, me)):
            return
        version = data.draw(st.sampled_from(versions))
        dropped = set(data.draw(st.sets(st.sampled_from(sorted(process.has) or [0])))) - {version, process.serves}
        pinned, ready = {*process.has, *process.copying, version} - dropped, process.has - dropped
        asked = set(fleet.needed(self.catalog, me)) & set(me.ready)
        if self.apply(lambda now: fleet.report(now, name, process.reader.token, pinned, bytes_of(*ready))):
            me = fleet.find_reader(self.catalog, name)
            assert me is not None and asked <= set(me.ready)
            if set(me.pinned) == pinned:
                process.has, process.copying = ready, pinned - ready
            else:
                assert dropped, "only what a switch asks for cannot be dropped"

    @rule(name=names)
    def complete_the_copies(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.has, process.copying = process.has | process.copying, set()
            assert self.report(process)

    @rule()
    def complete_all_that_is_wanted(self) -> None:
        for name, process in self.processes.items():
            me = fleet.find_reader(self.catalog, name)
            process.copying |= set(fleet.wanted(self.catalog, me)) - process.has
            self.report(process)
            self.complete_the_copies(name)

    def report(self, process: Process) -> bool:
        me, pinned, had = process.reader, process.has | process.copying, bytes_of(*process.has)
        return self.apply(lambda now: fleet.report(now, me.id, me.token, pinned, had))

    @rule(late=st.booleans())
    def all_reach_a_batch_boundary(self, late: bool) -> None:
        for name in self.processes:
            self.reach_a_batch_boundary(name, late)

    @rule(name=names)
    def refuse(self, name: str) -> None:
        process, proposed = self.processes.get(name), fleet.preparing(self.catalog)
        if process is not None and proposed is not None and proposed.version not in process.has:
            version = proposed.version
            self.apply(lambda now: fleet.refuse(now, name, process.reader.token, version, "it does not fit"))

    @rule()
    def look(self) -> None:
        """What readers see that do not look again."""
        self.seen = self.catalog

    @rule(name=names, late=st.booleans())
    def reach_a_batch_boundary(self, name: str, late: bool) -> None:
        """What a follower does between two batches: look, swap if it can, acknowledge, serve if it may.

        If it is `late`, switches were decided after its look.
        """
        process = self.processes.get(name)
        if process is None:
            return
        process.serving = False
        looked = self.seen if late else self.catalog
        found = fleet.find_reader(looked, name)
        must = None if found is None else fleet.target(looked, found)
        if must is not None and must.version in process.has:
            process.serves = must.version
            version = must.version
            self.apply(lambda now: fleet.acknowledge(now, name, process.reader.token, version))
        me = fleet.find_reader(self.catalog, name)
        process.serving = me is not None and fleet.may_serve(self.catalog, me)

    @rule(name=names, version=st.integers(1, 8))
    def acknowledge_what_is_not_ready(self, name: str, version: int) -> None:
        process = self.processes.get(name)
        if process is not None and version not in process.has:
            assert not self.apply(lambda now: fleet.acknowledge(now, name, process.reader.token, version))

    @rule(back=st.integers(0, 2), readers=some_readers, quorum=st.none() | st.integers(1, 3), proposer=names)
    def propose(self, back: int, readers: list[str] | None, quorum: int | None, proposer: str) -> None:
        process = self.processes.get(proposer)
        if process is not None:
            self.proposed += 1
            version, token, peer = self.published - back, f"switch {self.proposed}", process.reader.peer
            self.apply(lambda now: fleet.propose(now, token, version, readers, quorum, 5.0, peer))

    @precondition(lambda self: self.catalog.switches)
    @rule(data=st.data())
    def lose_patience(self, data: st.DataObject) -> None:
        """Too late, if the switch is decided."""
        tokens = {*self.decided, *(each.token for each in self.catalog.switches)}
        token = data.draw(st.sampled_from(sorted(tokens)))
        undecided = fleet.preparing(self.catalog)
        self.apply(lambda now: fleet.abort(now, token, "it took too long"))
        assert fleet.preparing(self.catalog) == (None if undecided and undecided.token == token else undecided)

    @invariant()
    def it_survives_the_register(self) -> None:
        assert Catalog.decode(self.catalog.encode()) == self.catalog

    @invariant()
    def readers_that_acknowledged_a_switch_serve_its_version(self) -> None:
        by_serial = {each.serial: each for each in self.catalog.switches}
        for reader in self.catalog.readers:
            if reader.acknowledged:
                switch = by_serial.get(reader.acknowledged)
                process = self.processes[reader.id]
                assert switch is None or (switch.state == "committed" and reader.served == switch.version)
                assert reader.served in process.has

    @invariant()
    def a_reader_serves_only_what_it_has_and_what_was_committed(self) -> None:
        for process in getattr(self, "processes", {}).values():
            if process.serving:
                assert process.serves in process.has
                committed = {each.version for each in self.decided.values() if each.state == "committed"}
                assert process.serves in committed

    @invariant()
    def one_switch_is_undecided_at_most(self) -> None:
        assert sum(each.preparing for each in self.catalog.switches) <= 1
        serials = [each.serial for each in self.catalog.switches]
        assert serials == sorted(set(serials)) and len(serials) <= fleet.DECISIONS + 1 + len(NAMES) + 1

    @invariant()
    def what_a_reader_copies_and_must_serve_stays_in_the_store(self) -> None:
        visible = set(self.catalog.visible())
        for reader in self.catalog.readers:
            assert set(reader.pinned) <= visible
            assert set(fleet.needed(self.catalog, reader)) <= visible

    @invariant()
    def a_switch_for_which_all_are_ready_is_not_undecided(self) -> None:
        proposed = fleet.preparing(self.catalog)
        if proposed is not None:
            alive = set(proposed.readers) - set(proposed.gone)
            assert alive and set(fleet.ready_for(self.catalog, proposed)) < alive


TestFleet = Fleet.TestCase
TestFleet.settings = settings(stateful_step_count=40)


def test_a_dead_reader_is_counted_out_unless_the_quorum_needs_it() -> None:
    for quorum, state in [(None, "committed"), (1, "committed"), (2, "aborted")]:
        catalog = store_with(1)
        catalog, one = follow(catalog, "g0")
        catalog, two = follow(catalog, "g1")
        catalog = fleet.propose(catalog, "t", 1, ["g0", "g1"], quorum, 5.0, TRAINER.peer)
        catalog = transitions.remove_dead_holders(catalog, {two.reader.peer})
        catalog = stage(catalog, one, 1)
        switch = fleet.find_switch(catalog, "t")
        assert switch is not None and switch.state == state
        assert quorum != 2 or "1 of 2 readers are left, and 2 are needed" in switch.reason


def test_a_dead_reader_that_comes_back_counts_again_in_the_switch_that_is_prepared() -> None:
    catalog, one = follow(store_with(1), "g0")
    catalog, two = follow(catalog, "g1")
    catalog = fleet.propose(catalog, "t", 1, ["g0", "g1"], None, 5.0, TRAINER.peer)
    catalog = transitions.remove_dead_holders(catalog, {two.reader.peer})
    assert [switch.gone for switch in catalog.switches] == [("g1",)]
    catalog, two = follow(catalog, "g1")
    assert [switch.gone for switch in catalog.switches] == [()]
    catalog = stage(catalog, one, 1)
    assert [switch.state for switch in catalog.switches] == ["preparing"]
    assert [switch.state for switch in stage(catalog, two, 1).switches] == ["committed"]


def test_a_new_reader_joins_the_newest_committed_switch_and_an_older_one_keeps_its_version_for_the_late() -> None:
    catalog, one = follow(store_with(1, 2), "g0")
    catalog = fleet.propose(stage(catalog, one, 1), "t", 1, None, None, 5.0, TRAINER.peer)
    catalog, _ = follow(catalog, "g2")
    (joined,) = (fleet.target(catalog, each) for each in catalog.readers if each.id == "g2")
    assert joined is not None and joined.version == 1
    for number in (3, 4, 5):
        catalog = publish(catalog, number)
    assert 1 in catalog.visible(), "a reader that restarts must find it"
    with pytest.raises(Mismatch, match=r"kept for .*reader 'g0'.*committed switch 1"):
        transitions.delete(catalog, 1)
    late = Reader("g0", "g0.0", "store of g0", Peer("host", 100, 7), switched=True, must=1)
    switches = tuple(
        SwitchRecord(version, "token", version, ("g1",), None, 1.0, TRAINER.peer, state="committed")
        for version in (1, 2, 3)
    )
    catalog = Catalog(readers=(late,), switches=switches)
    assert settling.kept_for_readers(catalog) == {1, 3}
    assert [fleet.needed(catalog, replace(late, switched=switched)) for switched in (True, False)] == [(1,), ()]
    assert settling.kept_for_readers(Catalog(switches=switches)) == {3}
    aborted = replace(switches[0], state="aborted")
    assert settling.kept_for_readers(Catalog(switches=(aborted,))) == frozenset()


def test_a_reader_enters_by_the_newest_switch_that_names_it_and_that_others_carry_out() -> None:
    others = tuple(
        Reader(f"g{serial}", "", "", Peer("host", serial, 7), switched=True, must=serial) for serial in (1, 3)
    )
    switches = tuple(
        SwitchRecord(serial, "token", serial, names, None, 1.0, TRAINER.peer, state="committed")
        for serial, names in ((1, ("g0",)), (2, ("g0",)), (3, ("g1",)))
    )
    catalog = Catalog(readers=others, switches=switches)
    assert [fleet.joins(catalog, name) for name in ("g0", "g1", "g2")] == [1, 3, 3]
    assert fleet.joins(Catalog(readers=others), "g0") == 0


def test_a_refusal_counts_for_the_switch_to_its_version_and_from_one_of_its_readers_alone() -> None:
    catalog, one = follow(store_with(1, 2), "g0")
    catalog, two = follow(catalog, "g1")

    def refuse(process: Process, version: int) -> Catalog:
        return fleet.refuse(catalog, process.reader.id, process.reader.token, version, "it does not fit")

    assert refuse(one, 1) == catalog, "nothing is proposed"
    catalog = fleet.propose(catalog, "t", 1, ["g0"], None, 5.0, TRAINER.peer)
    assert refuse(one, 2) == refuse(two, 1) == catalog
    switch = fleet.find_switch(refuse(one, 1), "t")
    assert switch is not None and switch.state == "aborted" and "it does not fit" in switch.reason


def test_what_cannot_be_proposed_is_refused() -> None:
    catalog = store_with(1)
    with pytest.raises(Mismatch, match="needs readers"):
        fleet.propose(catalog, "t", 1, None, None, 5.0, TRAINER.peer)
    with pytest.raises(ValueError, match="quorum=3 of 2 readers"):
        fleet.propose(catalog, "t", 1, ["g0", "g1"], 3, 5.0, TRAINER.peer)
    catalog = fleet.register(catalog, Reader("free", "x", "store", Peer("host", 5, 5), switched=False))
    with pytest.raises(Mismatch, match="'free' follows the latest version"):
        fleet.propose(catalog, "t", 1, ["free"], None, 5.0, TRAINER.peer)


def test_who_took_the_place_of_a_reader_is_named() -> None:
    _, first = follow(store_with(), "g0")
    catalog, second = follow(store_with(), "g0", incarnation=1)
    assert fleet.own(catalog, "g0", second.reader.token) == second.reader
    for now, said in ((catalog, f"process {second.reader.peer.pid} took"), (store_with(), "was taken for dead")):
        with pytest.raises(ReaderReplaced, match=said):
            fleet.own(now, "g0", first.reader.token)
    assert fleet.unregister(catalog, "g0", first.reader.token) == catalog, "it closes late"
    assert fleet.unregister(catalog, "g0", second.reader.token).readers == ()


def test_a_reader_acknowledges_the_version_that_it_must_serve_alone() -> None:
    catalog, one = follow(store_with(1, 2), "g0")
    for number in (1, 2):
        catalog = fleet.propose(stage(catalog, one, number), str(number), number, None, None, 5.0, TRAINER.peer)
    assert fleet.acknowledge(catalog, "g0", one.reader.token, 1) == catalog
    (reader,) = fleet.acknowledge(catalog, "g0", one.reader.token, 2).readers
    assert (reader.served, reader.acknowledged) == (2, 2)


def test_a_reader_is_not_ready_for_other_bytes_of_the_same_number() -> None:
    """A version that is deleted or lost may be published anew with other bytes."""
    catalog, one = follow(store_with(1, 2), "g0")
    catalog = stage(catalog, one, 1)
    catalog = transitions.delete(fleet.report(catalog, "g0", one.reader.token, set(), bytes_of(1)), 1)
    assert catalog.readers[0].ready == ()
    catalog = announced(catalog, TRAINER.id, digest=b"other bytes")
    catalog = fleet.report(catalog, "g0", one.reader.token, {1}, bytes_of(1))
    assert catalog.readers[0].ready == ()
    catalog = fleet.report(catalog, "g0", one.reader.token, {1}, {1: (b"other bytes",)})
    assert catalog.readers[0].ready == (1,)


def test_a_switch_to_a_version_that_is_lost_is_aborted() -> None:
    catalog, one = follow(store_with(1), "g0")
    proposer = Peer("other host", 9, 9)
    catalog = fleet.propose(catalog, "t", 1, None, None, 5.0, proposer)
    catalog = transitions.remove_dead_holders(catalog, {TRAINER.peer})
    switch = fleet.find_switch(catalog, "t")
    assert switch is not None and switch.state == "aborted" and "version 1 is lost" in switch.reason
    assert fleet.find_reader(catalog, one.reader.id) is not None
