"""Survivors of each fault in each op, however called, are usable, told and bounded, over each backend.

`support.programs.fault_matrix` says what these mean, and writes the table of the documentation.
"""

from __future__ import annotations

import pytest
import torch

from holdfast.comms.plugins.registry import registry
from support.programs import fault_matrix
from support.programs.fault_matrix import FAULTS, GPU, STAND_IN, CellResult, MatrixCell, OpEnd, cells


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", STAND_IN])
def test_survivors_of_an_op_are_usable_told_and_bounded(backend: str) -> None:
    """Without kills, each of which starts a process."""
    ops = ["all_reduce", "send_recv"] if backend == "inproc" else ["all_reduce"]
    check(backend, list(cells(backend, ops, [fault for fault in FAULTS if fault != "kill"])))


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", fault_matrix.BACKENDS)
def test_survivors_of_every_op_are_usable_told_and_bounded(backend: str) -> None:
    check(backend, list(cells(backend)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_survivors_of_an_op_over_nccl_are_usable_told_and_bounded() -> None:
    check(GPU, list(cells(GPU, ["all_reduce"])))


def check(backend: str, wanted: list[MatrixCell]) -> None:
    if backend != STAND_IN and (missing := registry().backend(backend).missing) is not None:
        pytest.skip(f"{missing.reason}; {missing.install_hint}")
    results = list(fault_matrix.measure(backend, wanted))
    assert [result.cell for result in results] == sorted(wanted, key=lambda cell: cell.fault == "kill")
    assert not [str(result) for result in results if result.missing]


def result(fault: str, *ends: OpEnd, backend: str = "shm") -> CellResult:
    return CellResult(backend, MatrixCell("all_reduce", fault, "sync"), ends)


def test_a_result_says_what_is_missing() -> None:
    named = OpEnd("PeerFailed", "ranks 0, 1 failed: gone", 0.1, "right")
    late = OpEnd("OpTimeout", "timed out after 0.5 s waiting for rank 1", 0.5, "right")
    assert result("kill", named, named).missing == ()
    assert result("kill", named, OpEnd("PeerFailed", "unknown ranks failed", 0.1, "right")).missing == ("told",)
    assert result("kill", named, OpEnd("PeerFailed", "rank 11 failed", 0.1, "right")).missing == ("told",)
    assert result("kill", named, OpEnd("RuntimeError", "rank 1", 0.1, "right")).missing == ("told",)
    assert result("slow", late, OpEnd("Revoked", "rank 0 aborted", 0.5, "right")).missing == ()
    assert result("kill", late).missing == ("told",), "a death has not to wait for a timeout"
    unnamed = OpEnd("OpTimeout", "all_reduce (op 1) timed out waiting for unknown ranks", 0.5, "right")
    assert (result("slow", unnamed).missing, result("slow", unnamed, backend="gloo").missing) == (("told",), ())
    assert result("kill", OpEnd("PeerFailed", "rank 1", 99.0, "OpTimeout()")).missing == ("usable", "bounded")


def test_the_table_has_a_row_for_each_way_to_call_an_op() -> None:
    good, bad = (OpEnd("PeerFailed", f"rank {rank} failed", 0.1, "right") for rank in (1, 2))
    rows = fault_matrix.table({"shm": [result("kill", good)], "gloo": [result("kill", bad)]}).splitlines()
    assert rows[-1] == "| all_reduce | sync | 1 of 2; gloo: not told | - | - | - | - | - |"
    ways = {(cell.op, cell.mode) for cell in cells("shm")}
    assert len(ways) == 2 * len(fault_matrix.OPS) + 1, "sends and receives are coalesced, too"
    assert {cell.fault for cell in cells("inproc")} == set(FAULTS) - {"kill", "stop"}, "threads do not die alone"
