"""Joining a job: invalid arguments, late joiners, and the state that they get, or not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast.comms import BackendUnavailable, Communicator, CorruptData, HoldfastError, Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.system.keys import KeyRefused, create_key
from holdfast.ft import Attempt, Session, StateNotGiven, Timeouts, faultpoints, settings
from holdfast.ft.control.errors import WrongKey
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway
from holdfast.ft.state import transfer
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.ft.state.fetching import BLOCK, Block, Fetched, Fetcher
from holdfast.ft.state.transfer import StateTransfer
from holdfast.ft.step_protocol import Decision
from holdfast.harness import LocalCluster
from support.children import Child, errors_of
from support.samples.tally import cluster, contract_in, start_with_spares
from support.waiting import PATIENCE, eventually

QUICK = Timeouts(heartbeat=0.1, suspect=0.5, operation=10.0, rebuild=5.0, join=2.0)


@pytest.fixture
def contract(tmp_path: Path) -> dict[str, Any]:
    return contract_in(tmp_path, timeouts=QUICK)


def one_step(session: Session) -> int:
    for attempt in session.steps(1):
        with attempt:
            attempt.comm.barrier()
    return session.step


# -- invalid input is refused at once with the reason, and nothing is changed


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"job": None}, ValueError, "job is not given and HOLDFAST_JOB is not in the environment"),
        ({"register": None}, ValueError, "HOLDFAST_REGISTER"),
        ({"key_file": None}, ValueError, "HOLDFAST_KEY_FILE"),
        ({"key_file": "/nowhere/key"}, KeyRefused, "cannot be read"),
        ({"register": "carrier-pigeon://x"}, ValueError, "is not a register URL"),
        ({"register": "sqlite:///nowhere/at/all/x.sqlite"}, RegisterAway, "cannot open the file"),
        ({"size": 2, "min_size": 3}, ValueError, "min_size=3 is above size=2: the job could never run"),
        ({"size": 0}, ValueError, "size=0 is out of range"),
        ({"size": "2"}, TypeError, "size must be a whole number"),
        ({"min_size": 0}, ValueError, "min_size=0 is out of range"),
        ({"shards": -1}, ValueError, "shards=-1 is out of range"),
        ({"timeouts": 3.0}, TypeError, "timeouts must be a Timeouts"),
        ({"on_death": "mourn"}, ValueError, "'mourn' is none of 'rebuild', 'finish_step', 'go_on'"),
        ({"backend": "telepathy"}, BackendUnavailable, "known are"),
        ({"job": "x" * 200}, ValueError, "at most 100 printable characters"),
        ({"host": "203.0.113.1"}, ValueError, "none of this machine"),
    ],
)
def test_arguments_that_cannot_work_are_refused_and_nothing_is_left_behind(
    contract: dict[str, Any], change: dict[str, Any], error: type[Exception], words: str
) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(error, match=words):
        Session(**{**contract, **change})
    eventually(lambda: set(threading.enumerate()) <= threads)
    with Register.open(contract["register"]) as register:
        assert register.read() is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [(name, "perhaps") for name in ("HOLDFAST_CHECK", "HOLDFAST_SIZE", "HOLDFAST_MIN_SIZE", "HOLDFAST_SHARDS")]
    + [("HOLDFAST_MESH", "0")],
)
def test_a_variable_that_makes_no_sense_is_refused(
    contract: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}='?{value}"):
        Session(**contract)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of a session whose register is in use, with size 1 and 4 shards."""
    used = contract_in(tmp_path_factory.mktemp("founded"), timeouts=QUICK)
    create_key(used["key_file"].with_name("other"))
    with Session(**used, size=1, shards=4) as founder:
        one_step(founder)
    return used


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"job": "other"}, Mismatch, "it belongs to job 'job', not to 'other'"),
        ({"size": 2}, Mismatch, "in use with size=1, not 2"),
        ({"shards": 7}, Mismatch, "in use with shards=4, not 7"),
        ({"backend": "gloo"}, Mismatch, "in use with backend='shm', not 'gloo'"),
        ({"timeouts": Timeouts(heartbeat=1.0, suspect=3.0)}, Mismatch, "in use with heartbeat=0.1, not 1.0"),
        ({"timeouts": replace(QUICK, join=3.0)}, Mismatch, "in use with join=2.0, not 3.0"),
        ({"HOLDFAST_MESH": "2"}, Mismatch, "in use with mesh=64, not 2"),
        ({"key_file": "other"}, WrongKey, "belongs to job 'job' with another key"),
    ],
)
def test_a_register_in_use_by_another_job_key_or_configuration_is_refused(
    founded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with Register.open(founded["register"]) as register:
        before = register.read()
    if "key_file" in change:
        change = {"key_file": founded["key_file"].with_name(change["key_file"])}
    if "HOLDFAST_MESH" in change:
        monkeypatch.setenv("HOLDFAST_MESH", change["HOLDFAST_MESH"])
        change = {}
    with pytest.raises(error, match=words):
        Session(**{**founded, **change})
    with Register.open(founded["register"]) as register:
        assert register.read() == before


def test_a_process_on_another_host_is_refused_by_a_job_of_one_host(
    contract: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(**contract, size=1) as founder:
        for attempt in founder.steps(1):
            with attempt, monkeypatch.context() as elsewhere:
                elsewhere.setattr(settings, "this_host", lambda: "elsewhere")
                with pytest.raises(BackendUnavailable, match="needs all members on one host"):
                    Session(**contract)


def test_an_attached_object_must_have_a_state(contract: dict[str, Any]) -> None:
    session = Session(**contract, size=1)
    with pytest.raises(TypeError, match="'numbers' cannot be attached: list has no state_dict"):
        session.attach("numbers", [1, 2])  # type: ignore[arg-type]
    session.attach("model", torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="attached as 'model' already"):
        session.attach("model", torch.nn.Linear(1, 1))


def test_bad_calls_of_steps_are_refused(contract: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match="the session is not open"):
        Session(**contract, size=1).steps(3)
    with Session(**contract, size=1) as session:
        with pytest.raises(ValueError, match=r"steps\(-1\)"):
            session.steps(-1)
        assert session.view is None and session.rank is None and session.epoch is None
        assert list(session.steps(0)) == []
        with pytest.raises(HoldfastError, match="can be called once"):
            session.steps(1)
        with pytest.raises(HoldfastError, match="before steps"):
            session.attach("late", torch.nn.Linear(1, 1))


def test_an_attempt_must_be_entered_and_only_once(contract: dict[str, Any]) -> None:
    with Session(**contract, size=1) as session:
        seen: list[Attempt] = []
        with pytest.raises(HoldfastError, match="must be entered"):
            for attempt in session.steps(3):
                if seen:
                    continue
                seen.append(attempt)
                with attempt:
                    pass
        with pytest.raises(HoldfastError, match="made already"), seen[0]:
            pass


def test_an_error_caught_around_an_attempt_ends_this_rank_before_it_repeats_the_step(contract: dict[str, Any]) -> None:
    """Its op would be matched with the op of the commit, in which the others wait already."""
    caught = pytest.raises(HoldfastError, match="step 0 ended here in an error that was caught outside of `with")
    with Session(**contract, size=1) as session, caught:
        for attempt in session.steps(2):
            with suppress(KeyError), attempt:
                raise KeyError("a bug of the user")


def test_a_job_that_no_other_process_joins_ends_with_the_reason(contract: dict[str, Any]) -> None:
    with Session(**contract, size=2, min_size=2) as session:
        began = time.monotonic()
        with pytest.raises(HoldfastError, match="1 of 2 members came within 2 s, 2 are needed"):
            one_step(session)
    assert 1.5 < time.monotonic() - began < PATIENCE
    with pytest.raises(HoldfastError, match="has ended: 1 of 2 members came"):
        Session(**contract, size=2, min_size=2)


def test_a_job_begins_with_min_size_members_and_a_late_process_finds_nothing_to_do(contract: dict[str, Any]) -> None:
    with Session(**contract, size=2) as session:
        assert (one_step(session), session.size) == (1, 1)
    with Session(**contract, size=2) as late:
        assert list(late.steps(1)) == []


@pytest.mark.parametrize("size", [1, 2], ids=["spare", "founder"])
def test_a_founder_or_a_spare_whose_job_died_raises_register_away_when_the_register_is_removed(
    contract: dict[str, Any], tmp_path: Path, start: Callable[..., Child], size: int
) -> None:
    contract["timeouts"] = Timeouts(heartbeat=0.1, suspect=0.2, operation=10.0, rebuild=0.5, join=0.5)

    def linger(pipe: Any) -> None:
        with Session(**contract, size=1) as session:
            for attempt in session.steps(10**6):
                with attempt:
                    pipe.send("in a step")
                    time.sleep(0.05)

    members = [start(linger)] if size == 1 else []
    for member in members:
        member.hear()
    with Session(**contract, size=size) as session:
        (tmp_path / "job.sqlite").unlink()
        for member in members:
            member.kill()
        with pytest.raises(RegisterAway, match="nobody runs the job, and nothing can be agreed"):
            one_step(session)


# -- late joiners


def hear_until(child: Child, wanted: Callable[[Any], bool]) -> Any:
    while not wanted(message := child.hear()):
        pass
    return message


def step_until_three(pipe: Any, contract: dict[str, Any], gate: str, tells: bool) -> None:
    """Do steps, once the file `gate` exists, until three members have done one."""
    with Session(**contract, size=3, min_size=2) as session:
        pipe.send(("inside", 0))
        eventually(Path(gate).exists)
        for attempt in session.steps(10**6):
            with attempt:
                attempt.comm.barrier()
                time.sleep(0.005)
            if attempt.committed and (tells or attempt.comm.size == 3):
                pipe.send(("step", attempt.comm.size))
            if attempt.committed and attempt.comm.size == 3:
                break


def test_members_do_not_wait_for_a_joiner_that_still_prepares_its_steps(
    contract: dict[str, Any], tmp_path: Path, start: Callable[..., Child]
) -> None:
    gate = str(tmp_path / "gate")
    first = [start(step_until_three, contract, str(tmp_path), tells) for tells in (True, False)]
    hear_until(first[0], lambda m: m == ("step", 2))
    joiner = start(step_until_three, contract, gate, False)
    assert joiner.hear() == ("inside", 0)
    inside = time.monotonic()
    while time.monotonic() < inside + 3 * QUICK.suspect:
        assert first[0].hear() == ("step", 2)
    Path(gate).touch()
    for child in (*first, joiner):
        hear_until(child, lambda m: m == ("step", 3))
        child.end()


# -- the transfer of the state to a joiner

BLOCKS = 12
"""The number of blocks of the state; each is read and checked at a time."""


def carry(session: Session, gate: str) -> tuple[float, int]:
    """Do steps over a large state; its sum, and the number of blocks that a newcomer has read.

    It kills the first member when it is about to read its third block.
    """
    weights = torch.arange(BLOCKS * BLOCK // 8, dtype=torch.float64)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(weights, requires_grad=False)})
    read = 0

    def kill_first(point: str, step: int, rank: int, epoch: int) -> None:
        nonlocal read
        if point == "sync.before_chunk" and Path(gate).exists():  # it is not for the founders
            read += 1
            if read == 3 and session.view is not None:
                os.kill(session.view.members[0].peer.pid, signal.SIGKILL)

    faultpoints.arm(kill_first)
    session.attach("model", model)
    for attempt in session.steps(8):
        with attempt:
            if attempt.step == 3:
                eventually(Path(gate).exists)
            attempt.comm.barrier()
        if attempt.committed:
            model["w"][attempt.step] += attempt.step
    return model["w"].sum().item(), read


def test_a_source_that_dies_during_the_transfer_is_replaced_without_a_restart() -> None:
    """A spare takes the place of rank 2, and kills rank 0 when it has two blocks."""
    with cluster(3, spares=1) as ranks:
        job = start_with_spares(ranks, carry, strike=lambda job: job.kill(2))
        sums, read = zip(*job.results(), strict=True)
        events = job.events()
    whole = torch.arange(BLOCKS * BLOCK // 8).double().sum().item() + sum(range(8))
    assert sums == (whole, whole)
    synced = [event for event in events if event["kind"] == "synced" and event["step"] == 2]
    assert synced and sum(event["bytes"] + event["kept"] for event in synced) == len(synced) * BLOCKS * BLOCK
    assert 3 <= max(read) <= BLOCKS + 4, "no block but those under way was read twice"


# -- what of a state arrives: tensors, plain data, numbers of numpy; and what is refused


class Attachable:
    """An object with a state of any kind."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def journey(state: Any) -> Any:
    """The state that a newcomer receives."""
    packed = transfer.pack({"thing": Attachable(state)}, torch.device("cpu"))
    return transfer.unpack(transfer.PackedState(packed.description, packed.pieces, [c.clone() for c in packed.chunks]))[
        "thing"
    ]


@given(st.lists(st.tuples(st.sampled_from(["uint8", "float32", "float64", "bool"]), st.integers(0, 40)), max_size=8))
def test_each_received_tensor_has_aligned_memory_of_its_own(kinds: list[tuple[str, int]]) -> None:
    given_ = {f"t{i}": torch.arange(n).to(getattr(torch, dtype)) for i, (dtype, n) in enumerate(kinds)}
    received = journey(given_)
    for name, tensor in given_.items():
        mine = received[name]
        assert torch.equal(mine, tensor)
        assert mine.storage_offset() == 0
        assert mine.untyped_storage().nbytes() == mine.nbytes
        assert mine.data_ptr() % 16 == 0
    places = [t.untyped_storage().data_ptr() for t in received.values() if t.nbytes]
    assert len(set(places)) == len(places)


def test_tensors_of_odd_layouts_arrive_with_their_values() -> None:
    """One element with any stride, conjugated, negated."""
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    one = torch.arange(3.0).as_strided((1,), (5,), 2)
    received = journey({"one": one, "conj": tensor.conj(), "negative": tensor.conj().imag})
    assert torch.equal(received["one"], torch.tensor([2.0]))
    assert torch.equal(received["conj"], torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(received["negative"], torch.tensor([-2.0, 1.0]))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers(), st.text()), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3).map(set)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_data_is_decoded_unchanged(value: Any) -> None:
    description, tensors = encode_state(value)
    assert decode_state(description, tensors) == value


def test_a_frozen_set_arrives_frozen_also_as_a_key_and_in_a_set() -> None:
    pair = frozenset({1, 2})
    received = journey({"groups": {pair: 3}, "seen": {pair}, "alone": pair, "open": {1}})
    assert received == {"groups": {pair: 3}, "seen": {pair}, "alone": pair, "open": {1}}
    assert (type(received["alone"]), type(received["open"])) == (frozenset, set)


numbers = (
    arrays.boolean_dtypes()
    | arrays.integer_dtypes(endianness="=")
    | arrays.unsigned_integer_dtypes(endianness="=")
    | arrays.floating_dtypes(endianness="=", sizes=(16, 32, 64))
    | arrays.complex_number_dtypes(endianness="=", sizes=(64, 128))
)


@given(numbers.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))))
def test_arrays_and_numbers_of_numpy_arrive_bit_by_bit_with_their_types(array: Any) -> None:
    state = {"array": array, "turned": array.T, "numbers": list(array.flat)}
    received = journey(state)
    for name in ("array", "turned"):
        assert type(received[name]) is np.ndarray
        assert received[name].dtype == array.dtype
        assert received[name].shape == state[name].shape
        assert received[name].tobytes() == np.ascontiguousarray(state[name]).tobytes()
    assert [type(each) for each in received["numbers"]] == [type(each) for each in state["numbers"]]
    assert [each.tobytes() for each in received["numbers"]] == [each.tobytes() for each in state["numbers"]]


class Colour(StrEnum):
    RED = "red"


nested: list[Any] = []
nested.append(nested)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [np.array(["text"])]}, r"state\['a'\]\[0\] is a ndarray of <U4: only plain arrays of numbers"),
        ({"a": np.array([object()])}, r"state\['a'\] is a ndarray of object"),
        ({"a": np.ma.masked_array([1], [True])}, r"state\['a'\] is a MaskedArray"),
        ({"a": np.datetime64("2020-01-01")}, r"state\['a'\] is a datetime64"),
        ({"a": Colour.RED}, r"state\['a'\] is a Colour"),
        ({"a": torch.empty(2, device="meta")}, r"state\['a'\] is a meta tensor"),
        ({"a": nested}, "nested too deeply, or contains itself"),
        ({"a": "\ud800"}, "text that is not valid Unicode"),
        ({"model": [object()]}, r"state\['model'\]\[0\] is a object"),
        ({"f": print}, "builtin_function_or_method"),
        ({"w": torch.eye(2).to_sparse()}, "sparse"),
        ({object(): 1}, "a key of state is a object"),
    ],
)
def test_state_that_cannot_arrive_as_it_is_is_refused_by_name(state: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode_state(state)


FORGED: list[Any] = [
    ["n", "O", b"12345678"], ["n", "<f8", b"1234"], ["n", "nonsense", b""], ["a", 3], ["d", [[["l", []], ["v", 1]]]],
    ["T", 3], ["i", "x"],
]  # fmt: skip


@pytest.mark.parametrize("description", [b"", b"junk", *map(msgspec.msgpack.encode, FORGED)])
def test_a_malformed_or_forged_description_is_refused(description: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_state(description, [])


# -- the transfer of the state


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{i}": torch.randn(i, 7, generator=generator) for i in range(5)}
    return {
        **tensors,
        "big": torch.randn(5_000_000, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "flag": torch.tensor(True),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "step": 3,
    }


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key] for key, value in a.items()
    )


def transfer_of(
    comm: Communicator,
    thing: Attachable,
    receivers: tuple[int, ...],
    name: str = "thing",
    reach: Callable[[str], object] = lambda point: None,
) -> StateTransfer:
    """A transfer from rank 1 over the communicator."""
    decision = Decision(False, 17, 1, receivers, 0)
    return StateTransfer(comm, None, decision, {name: thing}, 20.0, 20.0, reach)


def no_fetch(plane: MemoryPlane, blocks: Iterable[Block]) -> Fetched:
    raise AssertionError("nothing is read without a plane")


@pytest.mark.parametrize("receivers", [(0, 2), (2,)])
def test_receivers_get_the_state_bit_by_bit_and_others_keep_theirs(receivers: tuple[int, ...]) -> None:
    def move(comm: Communicator) -> tuple[int, bool, bool]:
        thing = Attachable(state_of(comm.rank))
        moving = transfer_of(comm, thing, receivers)
        done = -1
        if comm.rank in receivers:
            done = moving.pull(Fetcher(), no_fetch).done
            moving.arrived()
        else:
            moving.offer(17, lambda reason: None)
        return done, same(thing.state, state_of(1)), same(thing.state, state_of(comm.rank))

    with LocalCluster(3, "inproc") as ranks:
        results = ranks.run(move)
    for rank, (done, is_sources, is_own) in enumerate(results):
        assert done == (17 if rank in receivers else -1)
        assert is_sources == (rank == 1 or rank in receivers)
        assert is_own == (rank not in receivers)


@pytest.mark.parametrize(
    ("name", "damage", "error", "words"),
    [
        ("thing", 1, CorruptData, "another checksum"),
        ("model", 0, Mismatch, "attached here: thing; where the state comes from: model"),
    ],
)
def test_damaged_state_and_that_of_another_thing_is_refused_and_nothing_is_loaded(
    name: str, damage: int, error: type[HoldfastError], words: str
) -> None:
    """The damage comes after the checksums were told."""

    def move(comm: Communicator) -> None:
        weights = torch.full((100,), float(comm.rank))
        thing = Attachable({"w": weights})
        if comm.rank == 1:
            transfer_of(comm, thing, (0,), name, lambda point: weights.add_(damage)).offer(1, lambda reason: None)
            return
        moving = transfer_of(comm, thing, (0,))
        with pytest.raises(error, match=words):
            moving.pull(Fetcher(), no_fetch)
        moving.arrived()
        assert not thing.state["w"].any()

    with LocalCluster(2, "inproc") as ranks:
        ranks.run(move)


# -- state that cannot be sent


def state_becomes_unsendable(session: Session, gate: str) -> list[int]:
    """Eight steps; after step 1 the state cannot be sent."""
    thing, done = Attachable({"value": 1}), []
    session.attach("thing", thing)
    for attempt in session.steps(8):
        with attempt:
            while attempt.step == 3 and not Path(gate).exists():
                time.sleep(0.005)
            attempt.comm.barrier()
        if attempt.committed:
            done.append(attempt.step)
            if attempt.step == 1:
                thing.state = {"value": os.stat_result}
    return done


def test_survivors_that_cannot_send_their_state_continue_without_the_newcomer() -> None:
    with cluster(3, spares=1) as ranks:
        job = start_with_spares(ranks, state_becomes_unsendable, strike=lambda job: job.kill(2))
        newcomer = job.process_of(job.wait_for("spare")["pid"])
        assert job.results() == [list(range(8)), list(range(8))]
        (refused,) = errors_of(job, [newcomer], 20.0)
        events = job.events()
    assert isinstance(refused, StateNotGiven)
    assert "cannot give its state to newcomers: TypeError: state['thing']['value'] is a type" in str(refused)
    assert {event["reason"] for event in events if event["kind"] == "state_refused"}
    unfit = [event for event in events if event["kind"] == "state_unfit"]
    assert {event["name"] for event in unfit} == {"thing"}
    assert min(event["step"] for event in unfit) == 1, "found when it changed, not when somebody died"


def test_a_founder_whose_state_cannot_be_sent_ends_the_job_with_the_reason() -> None:
    def start(session: Session) -> None:
        thing = Attachable({"value": 1})
        session.attach("thing", thing)
        thing.state = {"value": print}
        for attempt in session.steps(2):
            with attempt:
                pass

    with cluster(2) as ranks:
        job = ranks.start(start)
        with pytest.raises(StateNotGiven, match="rank 0 cannot give its state to newcomers"):
            job.results()
