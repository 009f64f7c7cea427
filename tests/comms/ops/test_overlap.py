"""Tensors of one op that share memory: inputs keep their old values, outputs must not overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, Recv, Send
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.harness import LocalCluster

Tensor = torch.Tensor
Parts = tuple[list[Tensor], list[Tensor]]
"""Outputs and inputs."""
Op = Callable[[Communicator, Sequence[Tensor], Sequence[Tensor]], object]

RANKS = 3
COUNTS = (3, 40_000)

OPS: dict[str, Op] = {
    "all_gather_single": lambda comm, outputs, inputs: comm.all_gather_single(outputs[0], inputs[0]),
    "all_gather": lambda comm, outputs, inputs: comm.all_gather(outputs, inputs[0]),
    "reduce_scatter_single": lambda comm, outputs, inputs: comm.reduce_scatter_single(outputs[0], inputs[0]),
    "reduce_scatter": lambda comm, outputs, inputs: comm.reduce_scatter(outputs[0], inputs),
    "all_to_all_single": lambda comm, outputs, inputs: comm.all_to_all_single(outputs[0], inputs[0]),
    "all_to_all": lambda comm, outputs, inputs: comm.all_to_all(outputs, inputs),
    "gather": lambda comm, outputs, inputs: comm.gather(inputs[0], outputs if comm.rank == 1 else None, 1),
    "scatter": lambda comm, outputs, inputs: comm.scatter(outputs[0], inputs if comm.rank == 1 else None, 1),
    "batch_send_recv": lambda comm, outputs, inputs: comm.batch_send_recv(
        [Send(inputs[0], (comm.rank + 1) % comm.size), Recv(outputs[0], (comm.rank - 1) % comm.size)]
    ),
}


def _shared(op: str, rank: int, count: int, shift: int) -> Parts:
    """An op's tensors in one buffer.

    `shift` 0: where NCCL has them in place, or the same for both; else the input lies so many elements further.
    """
    base = torch.arange((RANKS + 1) * count + shift, dtype=torch.float32) % 977 * (rank + 1)
    whole, part = base[: RANKS * count], base[rank * count + shift : (rank + 1) * count + shift]
    moved = base[shift : RANKS * count + shift]
    match op:
        case "all_gather_single":
            return [whole], [part]
        case "all_gather" | "gather":
            return list(whole.split(count)), [part]
        case "reduce_scatter_single":
            return [part], [whole]
        case "reduce_scatter" | "scatter":
            return [part], list(whole.split(count))
        case "all_to_all":
            return list(whole.split(count)), list(moved.split(count))
    return [whole], [moved]


def _compare(comm: Communicator, op: str) -> list[str]:
    """Run each op twice: with shared memory, and with separate memory for each tensor."""
    wrong = []
    for count, shift in product(COUNTS, (0, 1, -1)):
        shift = shift * (count // 2)
        if shift < 0 and (comm.rank == 0 or op in ("all_to_all", "all_to_all_single", "batch_send_recv")):
            shift = -shift
        outputs, inputs = _shared(op, comm.rank, count, shift)
        apart = [[tensor.clone() for tensor in tensors] for tensors in (outputs, inputs)]
        OPS[op](comm, outputs, inputs)
        OPS[op](comm, *apart)
        if not all(map(torch.equal, outputs, apart[0])):
            wrong.append(f"{op} of {count}, shifted by {shift}")
    return wrong


@pytest.mark.parametrize("checks", ["0", "1"], indirect=True)
def test_an_input_that_shares_memory_with_the_output_is_read_as_it_was(three_ranks: LocalCluster) -> None:
    assert three_ranks.run(lambda comm: [wrong for op in OPS for wrong in _compare(comm, op)]) == [[]] * RANKS


def _refused(comm: Communicator) -> list[str]:
    """Check that every op refuses outputs with elements that share memory."""
    size, ones, peer = comm.size, torch.ones(4), (comm.rank + 1) % comm.size
    expanded, woven = torch.zeros(1).expand(4), torch.zeros(5).as_strided((2, 2), (1, 1))
    base = torch.zeros(4 * size)
    overlapping = [base[2 * i : 2 * i + 4] for i in range(size)]
    calls: dict[str, Callable[[], object]] = {}
    for name, bad in (("expand", expanded), ("as_strided", woven)):
        whole = bad.reshape(-1)[:1].expand(4 * size)
        calls |= {
            f"all_reduce {name}": lambda bad=bad: comm.all_reduce(bad),
            f"reduce {name}": lambda bad=bad: comm.reduce(bad, comm.rank),
            f"broadcast {name}": lambda bad=bad: comm.broadcast(bad, peer),
            f"all_gather_single {name}": lambda whole=whole: comm.all_gather_single(whole, ones),
            f"all_gather {name}": lambda bad=bad: comm.all_gather([bad] * size, ones),
            f"reduce_scatter_single {name}": lambda bad=bad: comm.reduce_scatter_single(bad, base),
            f"reduce_scatter {name}": lambda bad=bad: comm.reduce_scatter(bad, [ones] * size),
            f"all_to_all_single {name}": lambda whole=whole: comm.all_to_all_single(whole, base),
            f"all_to_all {name}": lambda bad=bad: comm.all_to_all([bad] * size, [ones] * size),
            f"gather {name}": lambda bad=bad: comm.gather(ones, [bad] * size, comm.rank),
            f"scatter {name}": lambda bad=bad: comm.scatter(bad, None, peer),
            f"recv {name}": lambda bad=bad: comm.recv(bad, peer),
            f"batch {name}": lambda bad=bad: comm.batch_send_recv([Recv(bad, peer)]),
        }
    calls |= {
        "all_gather overlapping": lambda: comm.all_gather(overlapping, ones),
        "all_to_all overlapping": lambda: comm.all_to_all(overlapping, [ones] * size),
        "gather overlapping": lambda: comm.gather(ones, overlapping, comm.rank),
        "batch overlapping": lambda: comm.batch_send_recv([Recv(base[:4], peer), Recv(base[2:6], peer, 1)]),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(f"{name}: taken")
        except ValueError as error:
            if "share memory" not in str(error):
                wrong.append(f"{name}: {error}")
    total = torch.ones(4)
    comm.all_reduce(total)
    return wrong + ["the communicator does not work"] * (total.tolist() != [size] * 4)


def test_an_output_whose_elements_share_memory_is_refused_before_anything_moves(three_ranks: LocalCluster) -> None:
    assert three_ranks.run(_refused) == [[]] * RANKS


def _expanded_inputs(comm: Communicator) -> bool:
    one = torch.full((1,), float(comm.rank + 1))
    gathered, received = torch.empty(4 * comm.size), torch.empty(4)
    comm.all_gather_single(gathered, one.expand(4))
    given = one.expand(4) if comm.rank == 0 else received
    comm.broadcast(given, 0)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.batch_send_recv([Send(one.expand(4), right), Recv(received, left)])
    everyones = [rank + 1.0 for rank in range(comm.size) for _ in range(4)]
    return gathered.tolist() == everyones and received.tolist() == [left + 1.0] * 4 and bool(given[0] >= 1)


def test_an_input_may_be_expanded(three_ranks: LocalCluster) -> None:
    assert all(three_ranks.run(_expanded_inputs))


def test_a_window_is_not_read_into_a_tensor_whose_elements_share_memory() -> None:
    def refuse(comm: Communicator) -> bool:
        with comm.window(torch.zeros(4)) as window, pytest.raises(ValueError, match="dst share memory"):
            window.get(torch.zeros(1).expand(4), 0)
        return True

    with LocalCluster(1, "inproc") as cluster:
        assert cluster.run(refuse) == [True]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    st.integers(0, 30),
)
def test_outputs_are_refused_only_if_a_byte_belongs_to_two_elements(
    first: list[tuple[int, int]], second: list[tuple[int, int]], offset: int
) -> None:
    base = torch.zeros(128)
    outputs = [
        base.as_strided([size for size, _ in dims], [stride for _, stride in dims], at)
        for dims, at in ((first, 0), (second, offset))
    ]
    places = [
        at + sum(index * stride for index, (_, stride) in zip(indices, dims, strict=True))
        for dims, at in ((first, 0), (second, offset))
        for indices in product(*(range(size) for size, _ in dims))
    ]
    if len(set(places)) == len(places):
        check_outputs(outputs, ["a", "b"])
    else:
        with pytest.raises(ValueError, match="share memory"):
            check_outputs(outputs, ["a", "b"])
