"""The matrix of faults: each op, hit by each fault, in each way to call it. How do the other ranks come out of it?

`PYTHONPATH=tests python -m support.programs.fault_matrix --write docs/reference/fault-matrix.md` measures it and writes
the table; names of backends and ops choose. After each cell the survivors have to be **usable** (the next communicator
connects, and its op is right), **told** (a typed error that names the rank or its reason) and **bounded** (out by the
op's timeout and a margin).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast import comms
from holdfast.comms import Communicator, OpTimeout, PeerFailed, Recv, Revoked, Send
from holdfast.comms.system.files import url_of
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.conformance.helpers import capabilities, wait_for_files
from support.comms import nccl_stand_in

STAND_IN = nccl_stand_in.NAME
BACKENDS = ("inproc", "shm", "gloo", "ucx", "mpi", STAND_IN)
GPU = "nccl"
"""Not in the table: three ranks that share a GPU, by sockets."""
RANKS, VICTIM = 3, 1
FAULTS = ("kill", "stop", "slow", "exception", "abort", "close")
MODES = ("sync", "async", "coalesced")
LATE = ("stop", "slow")
"""The faults that show by the op's timeout alone."""

NAME_NO_LATE_RANK = ("gloo", STAND_IN, GPU)
NAME_NO_CLOSER = ("gloo",)
"""Over these a typed error may name no rank: after a timeout; after a close, which gloo shows as a lost connection."""

SHORT, LONG, MARGIN = 0.5, 30.0, 15.0
"""Timeouts of the ops that a late rank holds up, and of the communicator; what a loaded machine may add, in seconds."""

REASON = "disk on fire"
_NAMES_VICTIM = re.compile(rf"\branks? (\d+, )*{VICTIM}\b")


def _message(comm: Communicator, **how: Any) -> Any:
    return comm.send(torch.ones(8), 0, **how) if comm.rank == VICTIM else comm.recv(torch.empty(8), VICTIM, **how)


def _batch(comm: Communicator, **how: Any) -> Any:
    others = [rank for rank in range(comm.size) if rank != VICTIM] if comm.rank == VICTIM else [VICTIM]
    sends, recvs = ([kind(torch.ones(8), rank) for rank in others] for kind in (Send, Recv))
    return comm.batch_send_recv([*sends, *recvs], **how)


OPS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, **how: comm.all_reduce(torch.ones(8), **how),
    "broadcast": lambda comm, **how: comm.broadcast(torch.ones(8), VICTIM, **how),
    "all_gather": lambda comm, **how: comm.all_gather_single(torch.empty(8 * RANKS), torch.ones(8), **how),
    "reduce_scatter": lambda comm, **how: comm.reduce_scatter_single(torch.ones(8), torch.ones(8 * comm.size), **how),
    "all_to_all": lambda comm, **how: comm.all_to_all_single(torch.empty(8 * RANKS), torch.ones(8 * RANKS), **how),
    "barrier": lambda comm, **how: comm.barrier(**how),
    "send_recv": _message,
}


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One op, hit by one fault."""

    op: str
    fault: str
    mode: str


@dataclass(frozen=True, slots=True)
class OpEnd:
    """How one rank came out of a cell: its error, after how long, and the error of the next communicator."""

    error: str
    text: str
    seconds: float
    next: str


@dataclass(frozen=True, slots=True)
class CellResult:
    """The ends of the survivors of a cell, and what they amount to."""

    backend: str
    cell: MatrixCell
    ends: tuple[OpEnd, ...]

    @property
    def usable(self) -> bool:
        return all(end.next == "right" for end in self.ends)

    @property
    def told(self) -> bool:
        """Whether all errors are typed and name a rank or a reason; after a timeout, at least one does.

        gloo and NCCL do not know who has not come: over these a timeout says which op it is. Nor does gloo tell whose
        connection was closed.
        """
        late = self.cell.fault in LATE
        kinds = {PeerFailed.__name__, Revoked.__name__, *([OpTimeout.__name__] if late else [])}
        named = [bool(_NAMES_VICTIM.search(end.text)) or REASON in end.text for end in self.ends]
        if late and self.backend in NAME_NO_LATE_RANK:
            named = [end.error == OpTimeout.__name__ for end in self.ends]
        if self.cell.fault == "close" and self.backend in NAME_NO_CLOSER:
            named = ["lost a connection" in end.text or name for end, name in zip(self.ends, named, strict=True)]
        return all(end.error in kinds for end in self.ends) and (any(named) if late else all(named))

    @property
    def bounded(self) -> bool:
        limit = SHORT if self.cell.fault in LATE else LONG
        return all(end.seconds < limit + MARGIN for end in self.ends)

    @property
    def missing(self) -> tuple[str, ...]:
        """What it should be and is not."""
        return tuple(name for name in ("usable", "told", "bounded") if not getattr(self, name))

    def __str__(self) -> str:
        ends = [f"{end.error} after {end.seconds:.2f} s: {end.text}; {end.next}" for end in self.ends]
        cell = f"{self.cell.op}, {self.cell.fault}, {self.cell.mode}: not {', '.join(self.missing)}"
        return "\n    ".join([cell, *ends])


def cells(backend: str, ops: Iterable[str] = OPS, faults: Iterable[str] = FAULTS) -> Iterator[MatrixCell]:
    """The cells of a backend. Threads cannot be killed or stopped alone."""
    for op in ops:
        for fault in faults:
            for mode in MODES:
                if (mode == "coalesced") <= (op == "send_recv") and not (
                    fault in ("kill", "stop") and backend not in (STAND_IN, GPU) and capabilities(backend).one_process
                ):
                    yield MatrixCell(op, fault, mode)


def measure(backend: str, wanted: Sequence[MatrixCell]) -> Iterator[CellResult]:
    """The result of each cell. The processes live on from cell to cell, but for those that are killed."""
    outer = "gloo" if backend in (STAND_IN, GPU) else backend
    lasting, deadly = ([cell for cell in wanted if (cell.fault == "kill") == kills] for kills in (False, True))
    environ = {"HOLDFAST_CHECK": "0"}
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder,
        LocalCluster(RANKS, outer, timeout=280.0, grace=60.0, environ=environ, threads=1, echo=False) as cluster,
    ):
        if lasting:
            by_rank = cluster.run(_run_cells, backend, lasting, folder)
            for cell, ends in zip(lasting, zip(*by_rank, strict=True), strict=True):
                yield CellResult(backend, cell, tuple(end for rank, end in enumerate(ends) if rank != VICTIM))
        for number, cell in enumerate(deadly, len(lasting)):
            outcomes = cluster.outcomes(_run_cells, backend, [cell], folder, number)
            ends = (
                OpEnd(type(each.error).__name__, str(each.error), 0.0, "not reached") if each.error else each.value[0]
                for each in outcomes
                if each.rank != VICTIM
            )
            yield CellResult(backend, cell, tuple(ends))


def _run_cells(
    outer: Communicator, backend: str, wanted: Sequence[MatrixCell], folder: str, first: int = 0
) -> list[OpEnd]:
    if backend == STAND_IN:
        with contextlib.suppress(ValueError):  # it is there already
            comms.register(nccl_stand_in)
    os.environ["NCCL_HOSTID"] = f"rank-{outer.rank}"  # NCCL refuses two ranks of one host on one GPU
    pids = outer.all_gather_object(os.getpid())
    with torch.device(_device(backend)):
        places = [(Path(folder, str(number)), cell) for number, cell in enumerate(wanted, first)]
        return [_run_cell(outer, backend, cell, place, pids) for place, cell in places]


def _device(backend: str) -> str:
    return "cuda:0" if backend == GPU else "cpu"


def _connect(backend: str, rank: int, size: int, place: Path, timeout: float) -> Communicator:
    where: dict[str, Any] = {"rendezvous": url_of("file", place), "name": place.name, "device": _device(backend)}
    return comms.connect(backend, rank=rank, size=size, timeout=timeout, **where)


def _run_cell(outer: Communicator, backend: str, cell: MatrixCell, place: Path, pids: Sequence[int]) -> OpEnd:
    rank = outer.rank
    comm = _connect(backend, rank, outer.size, place, LONG)
    outer.barrier()
    how: dict[str, Any] = {"timeout": SHORT} if cell.fault in LATE else {}  # without one an op takes the usual way
    how["async_op"] = cell.mode == "async"
    op = _batch if cell.mode == "coalesced" else OPS[cell.op]
    outs = [place.with_name(f"{place.name}-out-{other}") for other in range(outer.size) if other != VICTIM]
    if rank == VICTIM:
        _commit(cell.fault, comm, outs)
    began = time.monotonic()
    error = _failure(lambda: op(comm, **how), comm)
    seconds = time.monotonic() - began
    if rank != VICTIM:
        place.with_name(f"{place.name}-out-{rank}").touch()
        if cell.fault == "stop" and rank == 0:
            wait_for_files(*outs)
            os.kill(pids[VICTIM], signal.SIGCONT)
    comm.close()
    left = [other for other in range(outer.size) if other != VICTIM or cell.fault != "kill"]
    following = _failure(lambda: _use_next(backend, left.index(rank), len(left), place))
    name = "none" if error is None else type(error).__name__
    return OpEnd(name, str(error), seconds, "right" if following is None else repr(following))


def _failure(call: Callable[[], Any], comm: Communicator | None = None) -> Exception | None:
    try:
        work = call()
        if work is not None:
            work.wait()
        if comm is not None and comm.device.type == "cuda":  # the op was only queued: the next one says how it ended
            torch.cuda.synchronize()
            comm.barrier(timeout=LONG)
    except Exception as error:
        return error
    return None


def _commit(fault: str, comm: Communicator, outs: Sequence[Path]) -> None:
    """Do to this rank what the cell says, once the others wait for it."""
    time.sleep(0.05)
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "slow":
        wait_for_files(*outs)
    elif fault == "exception":
        with contextlib.suppress(OSError), comm:
            raise OSError(REASON)
    elif fault == "abort":
        comm.abort(REASON)
    else:
        comm.close()


def _use_next(backend: str, rank: int, size: int, place: Path) -> None:
    tensor = torch.full((8,), float(rank + 1))
    with _connect(backend, rank, size, place.with_name(f"{place.name}-next"), 60.0) as comm:
        comm.all_reduce(tensor)
        comm.barrier()
    if tensor.tolist() != [size * (size + 1) / 2] * 8:
        raise ArithmeticError(f"the next communicator's sum is {tensor}")


def main(arguments: Sequence[str]) -> int:
    """Measure backends (all that can run here); exit status 1 if a cell is not as it should be."""
    ops = [each for each in arguments if each in OPS] or list(OPS)
    found: dict[str, list[CellResult]] = {}
    for backend in [each for each in arguments if each in (*BACKENDS, GPU)] or BACKENDS:
        found[backend] = list(measure(backend, list(cells(backend, ops))))
        wrong = [result for result in found[backend] if result.missing]
        print(
            f"{backend}: {len(found[backend])} cells, {len(wrong)} not as they should be", *wrong, sep="\n", flush=True
        )
    if "--write" in arguments:
        page = Path(arguments[arguments.index("--write") + 1])
        page.write_text(page.read_text().partition(_MARK)[0] + _MARK + "\n" + table(found) + "\n")
    return 1 if any(result.missing for results in found.values() for result in results) else 0


_MARK = "<!-- the table: python -m support.programs.fault_matrix --write docs/reference/fault-matrix.md -->"


def table(found: Mapping[str, Sequence[CellResult]]) -> str:
    """The results as a Markdown table: a row for each op and way to call it, a column a fault."""
    lines = ["", f"| op | called | {' | '.join(FAULTS)} |", "|---" * (2 + len(FAULTS)) + "|"]
    for op in OPS:
        for mode in MODES:
            row = [_entry(found, MatrixCell(op, fault, mode)) for fault in FAULTS]
            if any(entry != "-" for entry in row):
                lines.append(f"| {op} | {mode} | {' | '.join(row)} |")
    return "\n".join(lines)


def _entry(found: Mapping[str, Sequence[CellResult]], cell: MatrixCell) -> str:
    results = {backend: each for backend, results in found.items() for each in results if each.cell == cell}
    wrong = [f"{backend}: not {', '.join(each.missing)}" for backend, each in results.items() if each.missing]
    good = len(results) - len(wrong)
    return "; ".join([*([f"{good} of {len(results)}"] if results else ["-"]), *wrong])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
