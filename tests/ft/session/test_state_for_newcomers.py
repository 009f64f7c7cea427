"""Sending state to newcomers: state that arrives unchanged, and errors for state that cannot be sent or is damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
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

from holdfast.comms import Communicator, CorruptData, Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.ft import Session, StateNotGiven
from holdfast.ft.state import transfer
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.ft.state.fetching import Block, Fetched, Fetcher
from holdfast.ft.state.transfer import StateTransfer
from holdfast.ft.step_protocol import Decision
from holdfast.harness import LocalCluster
from support.children import errors_of
from support.samples.tally import QUICK


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


# -- tensors


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


def test_a_generators_state_can_be_set_from_what_a_newcomer_received() -> None:
    torch.manual_seed(5)
    received = journey({"small": torch.ones(3), "state": torch.get_rng_state()})  # in one chunk
    wanted = torch.rand(3)
    torch.set_rng_state(received["state"])
    assert torch.equal(torch.rand(3), wanted)


def test_tensors_of_odd_layouts_arrive_with_their_values() -> None:
    """One element with any stride, conjugated, negated."""
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    one = torch.arange(3.0).as_strided((1,), (5,), 2)
    received = journey({"one": one, "conj": tensor.conj(), "negative": tensor.conj().imag})
    assert torch.equal(received["one"], torch.tensor([2.0]))
    assert torch.equal(received["conj"], torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(received["negative"], torch.tensor([-2.0, 1.0]))


# -- plain data

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


# -- numbers of numpy

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


def test_the_state_of_an_optimizer_and_of_a_scheduler_made_with_numpy_arrives_unchanged() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lambda step: 0.5 * (1 + np.cos(step / 50 * np.pi))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = optimizer.state_dict()
    received = journey(state)
    assert received["param_groups"] == state["param_groups"]
    assert received["state"].keys() == state["state"].keys()
    assert all(torch.equal(received["state"][0][name], value) for name, value in state["state"][0].items())
    assert journey(scheduler.state_dict())["_last_lr"] == scheduler.state_dict()["_last_lr"]


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


# -- the transfer


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


def transfer_of(comm: Any, thing: Attachable, receivers: tuple[int, ...], name: str = "thing") -> StateTransfer:
    """A transfer from rank 1 over the communicator."""
    decision = Decision(False, 17, 1, receivers, 0)
    return StateTransfer(comm, None, decision, {name: thing}, 20.0, 20.0, lambda point: None)


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

    with LocalCluster(3) as cluster:
        results = cluster.run(move)
    for rank, (done, is_sources, is_own) in enumerate(results):
        assert done == (17 if rank in receivers else -1)
        assert is_sources == (rank == 1 or rank in receivers)
        assert is_own == (rank not in receivers)


class Tape:
    """A stand-in for the communicator of two ranks: rank 0 gets what rank 1 has given, perhaps damaged."""

    size, device = 2, torch.device("cpu")

    def __init__(self, damage: bool = False) -> None:
        self.rank = 1
        self._damage = damage
        self._offers = [b"", b""]
        self._tensors: list[torch.Tensor] = []

    def all_gather_object(self, offer: bytes) -> list[bytes]:
        if self.rank == 1:
            self._offers[1] = offer
        return self._offers

    def broadcast(self, tensor: torch.Tensor, source: int, timeout: float) -> None:
        if self.rank == source:
            self._tensors.append(tensor.clone())
        else:
            tensor.copy_(self._tensors.pop(0))
            tensor[5] ^= self._damage

    def barrier(self, timeout: float) -> None:
        self.rank = 0


def test_damaged_state_is_refused_and_nothing_is_loaded() -> None:
    tape = Tape(damage=True)
    transfer_of(tape, Attachable({"w": torch.ones(100)}), (0,)).offer(1, lambda reason: None)
    mine = Attachable({"w": torch.zeros(100)})
    with pytest.raises(CorruptData, match="another checksum"):
        transfer_of(tape, mine, (0,)).pull(Fetcher(), no_fetch)
    assert not mine.state["w"].any()


def test_ranks_that_attach_different_things_are_told() -> None:
    tape = Tape()
    transfer_of(tape, Attachable({}), (0,), "model").offer(1, lambda reason: None)
    with pytest.raises(Mismatch, match="attached here: thing; where the state comes from: model"):
        transfer_of(tape, Attachable({}), (0,)).pull(Fetcher(), no_fetch)


# -- state that cannot be sent


def state_becomes_unsendable(session: Session, steps: int, gate: str, at: int) -> list[int]:
    """Steps; from step `at` on, the state cannot be sent."""
    thing, done = Attachable({"value": 1}), []
    session.attach("thing", thing)
    for attempt in session.steps(steps):
        with attempt:
            while attempt.step == 3 and not Path(gate).exists():
                time.sleep(0.005)
            attempt.comm.barrier()
        if attempt.committed:
            done.append(attempt.step)
            if attempt.step == at:
                thing.state = {"value": os.stat_result}
    return done


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_survivors_that_cannot_send_their_state_continue_without_the_newcomer(backend: str) -> None:
    with LocalCluster(3, backend, spares=1, session={"timeouts": QUICK}) as ranks:
        gate = ranks.logs / "gate"
        job = ranks.start(state_becomes_unsendable, 8, str(gate), 1)
        job.wait_for_spares()
        job.wait_for("committed", step=2)
        job.kill(2)
        gate.touch()
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

    with LocalCluster(2, session={"timeouts": QUICK}) as ranks:
        job = ranks.start(start)
        with pytest.raises(StateNotGiven, match="rank 0 cannot give its state to newcomers"):
            job.results()
