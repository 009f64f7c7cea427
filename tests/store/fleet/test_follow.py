"""Readers that follow the store: staging beside what is served, swaps between two batches, ways back, switches.

The switches of a fleet of processes are last: these are killed and stopped at each step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch
from holdfast.comms.transport.base import Peer
from holdfast.ft.registers import RegisterAway
from holdfast.store import Follower, Layout, NoSuchVersion, NotCaughtUp, ReaderReplaced, StoreTimeout, WeightStore
from holdfast.store.catalog import fleet
from holdfast.store.catalog.records import SwitchRecord
from holdfast.store.catalog.settling import without_versions
from holdfast.store.data.state_dicts import FlatState
from holdfast.store.follow import staging
from holdfast.store.follow.staging import StagedVersions, StagingState
from support.children import Child, Start
from support.samples.store_processes import move_to_host
from support.waiting import eventually
from support.weights.state_dicts import bits, odd_targets, odd_tensors, value_of, weights


def publish_ready(store: WeightStore, follower: Follower, number: int) -> None:
    """Publish a version, and wait until it is staged."""
    store.publish(number, weights(number))
    follower.wait_ready(number)


Serving = tuple[Follower, dict[str, torch.Tensor]]


@pytest.fixture
def serving(store: WeightStore) -> Iterator[Serving]:
    """A follower that serves version 1, and its tensors."""
    store.publish(1, weights(1))
    into = weights(-1)
    with store.follow(into) as follower:
        assert follower.catch_up() == 1
        yield follower, into


def test_a_follower_prefetches_and_swaps_between_two_batches(store: WeightStore) -> None:
    store.publish(1, weights(1))
    into, seen = weights(-1), list[tuple[int, str]]()
    with store.follow(
        into, on_version=lambda number: seen.append((number, threading.current_thread().name))
    ) as follower:
        assert follower.version is None and value_of(into) == -1
        assert follower.catch_up() == 1 == follower.version
        assert value_of(into) == 1
        publish_ready(store, follower, 2)
        assert follower.ready(2) and follower.version == 1 and value_of(into) == 1, "not before the swap"
        with follower.batch() as version:
            assert version == 2 and value_of(into) == 2
            publish_ready(store, follower, 3)
            assert value_of(into) == 2, "not inside of a batch"
            with pytest.raises(Mismatch, match="serves a batch"):
                follower.swap()
        assert follower.swap() == 3 == follower.swap() and value_of(into) == 3
        me = threading.current_thread().name
        assert seen == [(1, me), (2, me), (3, me)]
        assert [each.served for each in store.readers()] == [3]
    assert store.readers() == () and value_of(into) == 3


def test_a_number_that_is_lost_and_published_anew_is_swapped_in_as_another_version(store: WeightStore) -> None:
    into, told = weights(-1), list[float]()
    with store.follow(into, on_version=lambda number: told.append(value_of(into))) as follower:
        store.publish(1, weights(1))
        follower.catch_up()
        store._change(lambda catalog: replace(without_versions(catalog, [1]), past=()))  # all holders died
        assert follower.swap() == 1 and value_of(into) == 1, "there is nothing else to serve"
        store.publish(1, weights(11))
        eventually(lambda: follower.swap() == 1 and value_of(into) == 11)
        assert told == [1.0, 11.0]


def test_a_batch_waits_for_the_first_version(store: WeightStore) -> None:
    into = weights(-1)
    with store.follow(into) as follower:
        with pytest.raises(NotCaughtUp, match="no version is staged"):
            follower.swap()
        with pytest.raises(StoreTimeout, match="catch_up"), follower.batch(timeout=0.02):
            pass
        thread = threading.Thread(target=store.publish, args=(1, weights(1)))
        thread.start()
        with follower.batch(timeout=20.0) as version:
            assert version == 1 and value_of(into) == 1
        thread.join()


def test_staged_and_served_versions_stay_until_they_are_let_go(store: WeightStore) -> None:
    store.publish(1, weights(1))
    with store.follow(weights(-1)) as follower:
        follower.catch_up()
        for number in range(2, 6):
            store.publish(number, weights(number))
        assert 1 in store.versions(), "it is served"
        with pytest.raises(Mismatch, match="version 1 is kept for reader"):
            store.delete(1)
        follower.wait_ready(5)
        assert follower.swap() == 5
        eventually(lambda: store.readers()[0].pinned == (5,))
        store.publish(6, weights(6))
        assert 1 not in store.versions()
    store.publish(7, weights(7))
    assert store.versions() == [6, 7]


def test_the_way_back_needs_one_call(store: WeightStore, serving: Serving) -> None:
    follower, into = serving
    with pytest.raises(Mismatch, match="no version to go back to"):
        follower.back()
    publish_ready(store, follower, 2)
    assert follower.swap() == 2
    assert follower.back() == 1 == follower.version and value_of(into) == 1
    assert follower.swap() == 1, "the version that it left is not taken again"
    with pytest.raises(Mismatch, match="no version to go back to"):
        follower.back()
    publish_ready(store, follower, 3)
    assert follower.swap() == 3 and value_of(into) == 3
    assert follower.back() == 1, "the version before is the one that was served before"


@pytest.mark.parametrize("pinned", [True, False])
def test_the_way_back_reads_again_what_is_no_longer_staged(store: WeightStore, serving: Serving, pinned: bool) -> None:
    """It cannot be gone back to if the store has let it go."""
    follower, into = serving
    with store.pin(1) if pinned else nullcontext():
        for number in (2, 3, 4, 5):
            publish_ready(store, follower, number)
            assert number != 2 or follower.swap() == 2
        assert not follower.ready(1)
        if pinned:
            assert follower.back() == 1 and value_of(into) == 1
            assert follower.swap() == 1, "versions 2 to 5 were there when it went back"
        else:
            with pytest.raises(NoSuchVersion, match="superseded"):
                follower.back(timeout=10.0)
            assert follower.version == 2 and value_of(into) == 2
            assert follower.swap() == 5 and value_of(into) == 5, "it goes on"
        publish_ready(store, follower, 6)
        assert follower.swap() == 6


@pytest.mark.parametrize("swapped", [True, False], ids=["after the swap", "before it"])
def test_a_rollback_is_followed(store: WeightStore, serving: Serving, swapped: bool) -> None:
    follower, into = serving
    publish_ready(store, follower, 2)
    assert not swapped or follower.swap() == 2
    store.rollback(1)
    assert follower.catch_up() == 1 and value_of(into) == 1
    store.publish(3, weights(3))
    assert follower.catch_up() == 3


def test_a_version_that_does_not_fit_is_an_error_of_the_next_call_alone(store: WeightStore, serving: Serving) -> None:
    follower, into = serving
    store.publish(2, {"a": torch.ones(3)})
    eventually(lambda: follower.failures > 0)
    with pytest.raises(Mismatch, match=r"'b'|b float64|a float32\[3\]"):
        follower.swap()
    assert follower.swap() == 1 and value_of(into) == 1, "each error is raised once"
    with pytest.raises(Mismatch):
        follower.wait_ready(2)
    publish_ready(store, follower, 3)
    assert follower.swap() == 3 and follower.failures == 1


def test_a_swap_that_is_broken_off_leaves_the_one_before(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    into = weights(-1)
    copies = staging.copy_state

    def interrupted(source: StagingState, target: FlatState) -> None:
        target.tensors["a"].copy_(source.locals["a"])
        monkeypatch.setattr(staging, "copy_state", copies)
        raise KeyboardInterrupt

    with store.follow(into) as follower:
        for number, before in ((1, None), (2, 1)):
            publish_ready(store, follower, number)
            monkeypatch.setattr(staging, "copy_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                follower.swap()
            assert follower.version == before, "at first, the tensors had no version before"
            assert before is None or value_of(into) == before
            assert follower.swap() == number and value_of(into) == number


def test_errors_of_the_register_are_raised_and_retried(
    store: WeightStore, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, _ = serving

    def away(*_: object) -> Any:
        raise RegisterAway(store.url, "unplugged")

    with monkeypatch.context() as patched:
        patched.setattr(follower._stager.client, "wait", away)
        eventually(lambda: follower.failures >= 2)
        with pytest.raises(RegisterAway, match="unplugged"):
            follower.swap()
    store.publish(2, weights(2))
    eventually(lambda: follower.ready(2))
    with suppress(RegisterAway):  # a retry may have failed after the error that was raised
        follower.swap()
    assert follower.swap() == 2


def test_a_model_is_followed_with_tied_weights_views_and_values(store: WeightStore) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 20)
            self.head = nn.Linear(20, 30, bias=False)
            self.head.weight = self.embed.weight
            base = torch.arange(64, dtype=torch.float32)
            self.register_buffer("low", base[:40])
            self.register_buffer("high", base[24:])

    model, other = Tied(), Tied()
    store.publish(1, {**model.state_dict(), "steps": [1, {"lr": 0.1}]})
    into = {**other.state_dict(), "steps": [0, {"lr": 0.0}]}
    with store.follow(into) as follower:
        follower.catch_up()
        assert into["steps"] == [1, {"lr": 0.1}]
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )
        assert other.head.weight is other.embed.weight and other.embed.weight.requires_grad
        staged = follower._staged.served
        assert (
            staged is not None and staged.locals["embed.weight"].data_ptr() == staged.locals["head.weight"].data_ptr()
        )
        store.publish(2, {**model.state_dict(), "low": torch.full((40,), 7.0), "steps": [2, {"lr": 0.2}]})
        with pytest.raises(Mismatch, match="share memory"):
            follower.wait_ready(2)
        assert follower.swap() == 1
        store.publish(3, {**model.state_dict(), "steps": [3, {"lr": 0.3}]})
        follower.wait_ready(3)
        assert into["steps"] == [1, {"lr": 0.1}], "not before the swap"
        assert follower.swap() == 3 and into["steps"] == [3, {"lr": 0.3}]
        assert follower.back() == 1 and into["steps"] == [1, {"lr": 0.1}]


def test_a_value_in_a_tuple_stays_and_a_version_with_another_one_does_not_fit(store: WeightStore) -> None:
    store.publish(1, {"pair": (torch.ones(3), 7)})
    into = {"pair": (torch.zeros(3), 7)}
    with store.follow(into) as follower:
        assert follower.catch_up() == 1 and into["pair"][0].sum() == 3
        store.publish(2, {"pair": (torch.full((3,), 2.0), 8)})
        with pytest.raises(Mismatch, match=r"'pair\.1' of `into` is in a tuple, which cannot be changed"):
            follower.wait_ready(2)
        assert into["pair"][0].sum() == 3


def test_a_value_in_a_mapping_that_cannot_be_changed_is_refused_before_the_swap(store: WeightStore) -> None:
    tensor = torch.zeros(3)
    with store.follow({"fixed": MappingProxyType({"w": tensor, "n": 7})}) as follower:
        for number, value in ((1, 7), (2, 8)):
            store.publish(number, {"fixed": {"w": torch.full((3,), float(number)), "n": value}})
            follower.wait_ready(number)
            with nullcontext() if value == 7 else pytest.raises(Mismatch, match="mappingproxy, which cannot be"):
                follower.swap()
        assert tensor.sum() == 3 and follower.version == 1


def test_a_mapped_version_is_exchanged_and_not_copied(store: WeightStore) -> None:
    model = nn.Linear(300, 400)
    into: dict[str, Any] = dict(model.state_dict())
    store.publish(1, {"weight": torch.full((400, 300), 1.0), "bias": torch.full((400,), 1.0)})
    with store.follow(into, map=True) as follower:
        assert follower.catch_up() == 1
        model.load_state_dict(into, assign=True)
        served = model.weight
        store.publish(2, {"weight": torch.full((400, 300), 2.0), "bias": torch.full((400,), 2.0)})
        follower.wait_ready(2)
        assert bool((model.weight == 1).all()), "not before the swap"
        assert follower.swap() == 2 and bool((into["weight"] == 2).all()) and bool((into["bias"] == 2).all())
        assert bool((served == 1).all()), "tensors that were taken before stay as they are"
        assert follower.back() == 1 and bool((into["weight"] == 1).all()), "it is mapped again"
    assert bool((into["weight"] == 1).all())


def test_a_mapped_version_must_fit_what_the_reader_has(store: WeightStore) -> None:
    into = weights(-1)
    with store.follow(into, map=True, reader="a") as follower:
        store.publish(1, {"a": torch.zeros(3)})
        for _ in range(2):  # before it has tried to take the version, or after that
            result = store.switch(1)
            assert not result.committed and "reader 'a' cannot take it" in result.reason and "a" in result.missing
            eventually(lambda: follower.failures == 1)
        with pytest.raises(Mismatch, match=r"the version has no|the version has a"):
            follower.swap()
        assert value_of(into) == -1
    for wrong in ({"cast": "bf16"}, {"layout": Layout()}):
        with pytest.raises(ValueError, match="what is mapped is not copied"):
            store.follow(into, map=True, **wrong)  # type: ignore[arg-type]


def test_mapped_bytes_that_are_wrong_are_not_served(store: WeightStore) -> None:
    into: dict[str, Any] = {}
    store.publish(1, weights(1))
    (kept,) = store._replica_holder._kept.values()
    kept.memory[100] += 1
    with store.follow(into, map=True) as follower:
        eventually(lambda: follower.failure is not None)
        with pytest.raises(CorruptData, match="wrong bytes"):
            follower.swap()
        assert into == {}


def test_every_odd_tensor_is_swapped_bit_for_bit(store: WeightStore) -> None:
    wanted, into = odd_tensors(1), odd_targets()
    store.publish(1, wanted)
    with store.follow(into) as follower:
        follower.catch_up()
    assert [name for name in wanted if bits(into[name]) != bits(wanted[name])] == []


def test_a_closed_follower_says_so_and_its_store_closes_it(tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, weights(1))
        follower = store.follow(weights(-1), reader="g0")
        assert [each.id for each in store.readers()] == ["g0"]
        with pytest.raises(Mismatch, match="follows as reader 'g0'"):
            store.follow(weights(-1), reader="g0")
    for call in (follower.swap, follower.catch_up, follower.back):
        with pytest.raises(Mismatch, match="closed"):
            call()
    follower.close()


def test_bad_arguments_are_refused(store: WeightStore) -> None:
    for reader in ("", "x" * 201, "a\nb", "a\n"):
        with pytest.raises(ValueError, match="cannot name a reader"):
            store.follow(weights(1), reader=reader)
    store.follow(weights(1), reader="x" * 200).close()
    with pytest.raises(TypeError, match="name is a string"):
        store.follow(weights(1), reader=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.follow({"a": object()})
    with pytest.raises(Mismatch, match="expanded"):
        store.follow({"a": torch.zeros(1).expand(3)})
    with pytest.raises(TypeError, match="list of names"):
        store.switch(1, "g0")
    with pytest.raises(ValueError, match="quorum"):
        store.switch(1, ["g0"], 0)
    with pytest.raises(NoSuchVersion):
        store.switch(1, ["g0"])
    assert store.readers() == ()


# -- switches in one process


def test_a_switch_makes_all_readers_serve_a_version(store: WeightStore) -> None:
    models = {name: weights(-1) for name in ("g0", "g1")}
    store.publish(1, weights(1))
    with store.follow(models["g0"], reader="g0") as one, store.follow(models["g1"], reader="g1") as two:
        with pytest.raises(NotCaughtUp, match="no switch that names it"):
            one.swap()
        result = store.switch(1)
        assert result.committed and result.ready == ("g0", "g1") and result.missing == ()
        assert one.swap() == two.swap() == 1 and value_of(models["g0"]) == value_of(models["g1"]) == 1
        publish_ready(store, one, 2)
        assert one.swap() == 1, "nobody serves what was not committed"
        assert store.switch(2, ["g0", "g1"]).committed
        assert one.swap() == 2
        assert [(each.id, each.served) for each in store.readers()] == [("g0", 2), ("g1", 1)]
        assert two.swap() == 2
        with pytest.raises(Mismatch, match="call switch"):
            one.back()
        assert store.switch(1).committed, "back to the version before: it is still staged"
        assert one.swap() == two.swap() == 1


def test_a_reader_may_serve_before_it_reports_to_be_ready(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quorum did not need it, and it reaches a batch boundary between the last byte and the report."""
    complete, completed, go_on = StagedVersions.complete, threading.Event(), threading.Event()

    def late(self: StagedVersions, found: StagingState) -> None:
        complete(self, found)
        completed.set()
        go_on.wait(20.0)

    store.publish(1, weights(1))
    with store.follow(weights(-1), reader="g0"):
        assert store.switch(1).committed
        monkeypatch.setattr(StagedVersions, "complete", late)
        with store.follow(weights(-1), reader="g1") as other:
            assert completed.wait(20.0)
            assert other.swap() == 1
            assert {each.id: each.ready for each in store.readers()} == {"g0": (1,), "g1": (1,)}
            go_on.set()


def test_two_switches_take_turns(store: WeightStore) -> None:
    for number in (1, 2):
        store.publish(number, weights(number))
    with store.follow(weights(-1), reader="g0") as one, ThreadPoolExecutor(2) as pool:
        switching = pool.submit(store.switch, 1, ["g0", "absent"], timeout=0.5)
        eventually(lambda: store.readers()[0].ready != () and len(store.readers()) == 1)
        second = pool.submit(store.switch, 2, ["g0"], timeout=20.0).result()
        first = switching.result()
        assert not first.committed and second.committed
        assert first.missing[0] == "absent" and "0.5 s" in first.reason
        assert one.swap() == 2


def test_a_reader_that_another_host_took_over_does_not_serve(store: WeightStore) -> None:
    store.publish(1, weights(1))
    with store.follow(weights(-1), reader="g0") as one:
        assert store.switch(1).committed and one.swap() == 1
        record = replace(store.readers()[0], token="other", peer=Peer("elsewhere", 4, 2))
        store._catalog_client.change(lambda now: fleet.register(now, record))
        with pytest.raises(ReaderReplaced, match="process 4 took its place"):
            one.swap()
        eventually(lambda: one.failures == 1)
        for call in (one.swap, one.catch_up, partial(one.wait_ready, 2)):
            with pytest.raises(ReaderReplaced):
                call()


@pytest.mark.parametrize("lost", [True, False], ids=["is lost", "cannot be read"])
def test_a_reader_that_cannot_have_the_committed_version_is_ready_for_the_next(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """All holders of version 1 died before a second reader had it, or all its replicas are damaged."""
    read = staging.CopiedStaging.read

    def broken(self: staging.CopiedStaging, version: int, into: StagingState) -> None:
        if version == 1:
            raise CorruptData("no replica of version 1 has the right bytes")
        read(self, version, into)

    store.publish(1, weights(1))
    with store.follow(weights(-1), reader="g0") as one:
        assert store.switch(1).committed and one.swap() == 1
        if lost:
            store._change(lambda catalog: replace(without_versions(catalog, [1]), past=()))
        else:
            monkeypatch.setattr(staging.CopiedStaging, "read", broken)
        with store.follow(weights(-1), reader="g1") as late:
            if lost:
                with pytest.raises(NotCaughtUp, match="version 1, committed by switch 1, is not staged yet"):
                    late.swap()
            store.publish(2, weights(2))
            assert store.switch(2, ["g0", "g1"], timeout=20.0).committed
            if not lost:
                with pytest.raises(CorruptData):
                    late.swap()
            assert one.swap() == late.swap() == 2


# -- switches of a fleet of processes


def a_reader(pipe: Connection, url: str, name: str, dies: int = 0) -> None:
    """Follow as `name`, and answer orders.

    "swap" and "catch up" are answered with what is served then, "ready N" once it is.

    Dies when it has the bytes of the version `dies`, before it says so.
    """
    into, told, complete = weights(-1), threading.Event(), StagedVersions.complete

    def completed(self: StagedVersions, found: StagingState) -> None:
        if found.version == dies:
            told.wait()  # a thread of the follower may be here before the test has been told that it follows
            pipe.send("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        complete(self, found)

    StagedVersions.complete = completed  # type: ignore[method-assign]
    with WeightStore(url, hold=False) as trainer, trainer.follow(into, reader=name) as follower:
        pipe.send("follows")
        told.set()
        while (order := pipe.recv()) != "end":
            try:
                if order.startswith("ready"):
                    follower.wait_ready(int(order.split()[1]), 15.0)
                    pipe.send("ready")
                else:
                    served = follower.swap() if order == "swap" else follower.catch_up(15.0)
                    assert value_of(into) == served
                    pipe.send(served)
            except HoldfastError as error:
                pipe.send(type(error).__name__)


def a_proposer(pipe: Connection, url: str, version: int, names: list[str], timeout: float = 15, host: str = "") -> None:
    """Propose a switch of the fleet, and die by SIGKILL after that."""
    if host:
        move_to_host(host)

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == "switch_proposed":
            pipe.send(kind)
            os.kill(os.getpid(), signal.SIGKILL)

    with WeightStore(url, hold=False, observe=observe) as trainer:
        trainer.switch(version, names, timeout=timeout)


@pytest.fixture
def trainer(url: str) -> Iterator[WeightStore]:
    """The store of a trainer, with version 1."""
    with WeightStore(url, replicas=1) as opened:
        opened.publish(1, weights(1))
        yield opened


def a_fleet(trainer: WeightStore, start: Start, *names: str) -> list[Child]:
    """Readers that serve version 1; version 2 is published."""
    readers = [start(a_reader, trainer.url, name) for name in names]
    for reader in readers:
        assert reader.hear() == "follows"
    assert trainer.switch(1).committed
    for reader in readers:
        assert said(reader, "swap") == 1
    trainer.publish(2, weights(2))
    return readers


def said(child: Child, order: str) -> object:
    child.tell(order)
    return child.hear()


def newest(trainer: WeightStore) -> SwitchRecord:
    return trainer._catalog_client.read()[1].switches[-1]


def test_a_reader_that_dies_before_it_is_ready_is_counted_out(trainer: WeightStore, start: Start) -> None:
    one, _ = a_fleet(trainer, start, "g0", "g1")
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(trainer.switch, 2, ["g0", "g1", "g2"])
        eventually(lambda: newest(trainer).state == "preparing")
        dying = start(a_reader, trainer.url, "g2", 2)
        assert dying.hear() == "follows" and dying.hear() == "dies"
        result = switching.result()
    assert result.committed and result.ready == ("g0", "g1") and result.missing == ("g2",)
    assert said(one, "swap") == 2
    eventually(lambda: {each.id for each in trainer.readers()} == {"g0", "g1"})


def test_a_proposer_that_dies_before_the_commit_leaves_the_fleet_as_it_was(trainer: WeightStore, start: Start) -> None:
    readers = a_fleet(trainer, start, "g0", "g1")
    proposer = start(a_proposer, trainer.url, 2, ["g0", "g1", "absent"])
    assert proposer.hear() == "switch_proposed"
    proposer.kill()
    eventually(lambda: newest(trainer).state == "aborted")
    assert f"process {proposer.pid}, died" in newest(trainer).reason
    for reader in readers:
        assert said(reader, "ready 2") == "ready" and said(reader, "swap") == 1
    assert trainer.switch(2).committed
    assert [said(reader, "swap") for reader in readers] == [2, 2]


def test_readers_settle_a_switch_of_another_host_that_went_silent(trainer: WeightStore, start: Start) -> None:
    """The readers wait as long as the proposer wanted to, then abort.

    Nothing proves the death of a process of another host.
    """
    readers = a_fleet(trainer, start, "g0", "g1")
    proposer = start(a_proposer, trainer.url, 2, ["g0", "absent"], 0.5, "another")
    assert proposer.hear() == "switch_proposed"
    proposer.kill()
    eventually(lambda: newest(trainer).state == "aborted")
    assert "did not decide it" in newest(trainer).reason
    assert [said(reader, "swap") for reader in readers] == [1, 1]


def test_a_quorum_goes_on_without_a_stopped_reader_which_then_catches_up(trainer: WeightStore, start: Start) -> None:
    one, other = a_fleet(trainer, start, "g0", "g1")
    trainer.publish(3, weights(3))
    other.stop(trainer.url)
    waits = trainer.switch(3, ["g0", "g1"], timeout=0.5)
    if not waits.committed:  # else it was ready before it was stopped
        assert "g1" in waits.missing and said(one, "swap") == 1
        assert trainer.switch(3, ["g0", "g1"], 1).committed
    assert said(one, "swap") == 3
    other.tell("swap")
    other.resume()
    assert other.hear() in (3, "NotCaughtUp"), "it does not serve version 1 again"
    assert said(other, "catch up") == 3
