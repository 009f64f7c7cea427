"""Do TorchComms' own integration tests pass? `python docs/experiments/torchcomms_suite.py CHECKOUT TRANSPORT`.

CHECKOUT is a checkout of TorchComms, whose tests are not in any package. The classes below, over a `Communicator`, take
the place of its module in C++: each method calls the one of ours that does the same. Ranks run the tests side by side
in CPU memory. Prints how many pass, and each that fails, or is skipped, with its reason.
"""

from __future__ import annotations

import argparse
import enum
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import Communicator, Recv, Send, Unsupported

RANKS = int(os.environ.get("RANKS", "3"))
"""Tests of leaving ranks need three."""
SECONDS = 900.0
FILES = (
    *("AllGatherTest", "AllGatherSingleTest", "AllGatherVTest", "AllReduceTest", "AllToAllTest", "AllToAllSingleTest"),
    *("AllToAllvSingleTest", "BarrierTest", "BatchSendRecvTest", "BroadcastTest", "GatherTest", "GatherSingleTest"),
    *("MultiCommTest", "ObjColTest", "OptionsTest", "ReduceTest", "ReduceScatterTest", "ReduceScatterSingleTest"),
    *("ReduceScatterVTest", "RegisterTensorTest", "ScatterTest", "SendRecvTest", "SplitTest", "WaitBlockingTest"),
    *("WindowRmaTest", "GetInitHandleTest", "FinalizeWarningTest", "ReconfigureTest"),
)
"""All but those that need CUDA graphs, NCCLX, or TorchComms' own wrapper of process groups."""


class RedOpType(enum.Enum):
    SUM = "SUM"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"
    PREMUL_SUM = "PREMUL_SUM"
    AVG = "AVG"


class ReduceOp:
    SUM: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp
    AVG: ReduceOp

    def __init__(self, kind: RedOpType, ours: comms.ReduceOp) -> None:
        self.type, self.ours = kind, ours

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:  # noqa: N802  # TorchComms' name
        return ReduceOp(RedOpType.PREMUL_SUM, comms.ReduceOp.premul_sum(factor))


for _kind in RedOpType:
    if _kind is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _kind.name, ReduceOp(_kind, getattr(comms.ReduceOp, _kind.name)))


class Options:
    """An options object, of any op: a timeout and hints."""

    def __init__(self) -> None:
        self.timeout: timedelta | None = None
        self.hints: dict[str, str] = {}
        self.abort_process_on_timeout_or_error = False


class TorchWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.done())

    wait_blocking = wait


class BatchSendRecv:
    def __init__(self, comm: Communicator) -> None:
        self._comm, self._ops = comm, list[Send | Recv]()

    def send(self, tensor: Any, dst: int) -> None:
        self._ops.append(Send(tensor, dst))

    def recv(self, tensor: Any, src: int) -> None:
        self._ops.append(Recv(tensor, src))

    def issue(self, async_op: bool, options: Any = None) -> TorchWork:
        return TorchWork(self._comm.batch_send_recv(self._ops, async_op=async_op))


class BackendWrapper:
    """TorchComms' backend of torch's groups: holdfast has its own."""

    def __init__(self, comm: Any) -> None:
        raise Unsupported("TorchComms' wrapper of process groups", 'use init_process_group("holdfast")')


class TorchCommWinAccessType(enum.Enum):
    WIN_ACCESS_TYPE_UNIFIED = enum.auto()
    WIN_ACCESS_TYPE_SEPARATE = enum.auto()


class TorchCommWindow:
    def __init__(self, comm: Communicator, tensor: Any) -> None:
        self._window = comm.window(tensor)
        self._tensor = tensor

    def tensor_register(self, tensor: Any, owning: bool = True) -> None:
        self._tensor = tensor
        self._window.register(tensor)

    def tensor_deregister(self) -> None:
        self._window.deregister()

    def put(self, tensor: Any, dst_rank: int, target_offset_nelems: int, async_op: bool, **_: Any) -> TorchWork:
        return TorchWork(self._window.put(tensor, dst_rank, target_offset_nelems, async_op=async_op))

    def signal(self, peer_rank: int, async_op: bool, **_: Any) -> TorchWork:
        return TorchWork(self._window.signal(peer_rank, async_op=async_op))

    def wait_signal(self, peer_rank: int, async_op: bool, **_: Any) -> TorchWork:
        return TorchWork(self._window.wait_signal(peer_rank, async_op=async_op))

    def map_remote_tensor(self, rank: int) -> Any:
        return self._window.map(rank)

    def get_attr(self, rank: int) -> types.SimpleNamespace:
        mapped = self._window.info.access == "mapped"
        kind = TorchCommWinAccessType
        return types.SimpleNamespace(
            access_type=kind.WIN_ACCESS_TYPE_UNIFIED if mapped else kind.WIN_ACCESS_TYPE_SEPARATE
        )

    def get_tensor(self) -> Any:
        return self._tensor


def _op(ours: str, *names: str) -> Callable[..., TorchWork]:
    """TorchComms' method of these arguments, then `async_op`, hints and a timeout, which calls the op `ours`."""

    def method(self: TorchComm, *given: Any, **named: Any) -> TorchWork:
        values = dict(zip((*names, "async_op", "hints", "timeout"), given, strict=False)) | named
        arguments = [values[name] for name in names]
        return self._issue(ours, *arguments, async_op=values["async_op"], timeout=values.get("timeout"))

    return method


class TorchComm:
    """TorchComms' communicator over ours. Hints, which are of other backends, are not passed on."""

    def __init__(self, comm: Communicator, timeout: timedelta | None = None) -> None:
        self._comm, self._options = comm, Options()
        self._options.timeout = timeout

    def finalize(self) -> None:
        """Close, and release the store, whose port the next test may listen on."""
        self._comm.close()
        del self._comm
        gc.collect()

    def get_rank(self) -> int:
        return self._comm.rank

    def get_size(self) -> int:
        return self._comm.size

    def get_name(self) -> str:
        return self._comm.name

    def get_device(self) -> torch.device:
        return self._comm.device

    def get_backend(self) -> str:
        return self._comm.backend

    def get_backend_version(self) -> str:
        return self._comm.info.library_version

    def get_options(self) -> Options:
        return self._options

    def get_mem_allocator(self) -> None:
        """None: the default allocator."""

    mem_allocator = property(get_mem_allocator)

    def abort(self) -> None:
        self._comm.abort()

    def get_init_handle(self) -> str:
        return self._comm.handle()

    def reconfigure(
        self, uuid: int, init_handles: Any, timeout: timedelta | None = None, hints: Any = None
    ) -> TorchWork:
        return TorchWork(self._comm.reconfigure(uuid, init_handles, timeout.total_seconds() if timeout else None))

    def is_abort_supported(self) -> bool:
        return True

    def is_aborted(self) -> bool:
        return self._comm.over is not None

    def _issue(self, op: str, *arguments: Any, async_op: bool, timeout: timedelta | None = None, **_: Any) -> TorchWork:
        given = [each.ours if isinstance(each, ReduceOp) else each for each in arguments]
        limit = timeout.total_seconds() if timeout else None
        return TorchWork(getattr(self._comm, op)(*given, async_op=async_op, timeout=limit))

    send = _op("send", "tensor", "dst")
    recv = _op("recv", "tensor", "src")
    broadcast = _op("broadcast", "tensor", "root")
    all_reduce = _op("all_reduce", "tensor", "op")
    reduce = _op("reduce", "tensor", "root", "op")
    all_gather = all_gather_v = _op("all_gather", "tensor_list", "tensor")
    all_gather_single = _op("all_gather_single", "output", "tensor")
    reduce_scatter = reduce_scatter_v = _op("reduce_scatter", "output", "input_list", "op")
    reduce_scatter_single = _op("reduce_scatter_single", "output", "tensor", "op")
    all_to_all = _op("all_to_all", "output_tensor_list", "input_tensor_list")
    all_to_all_single = _op("all_to_all_single", "output", "tensor")
    all_to_all_v_single = _op("all_to_all_single", "output", "tensor", "output_split_sizes", "input_split_sizes")
    barrier = _op("barrier")

    def scatter(
        self, output_tensor: Any, input_tensor_list: Any, root: int, async_op: bool, hints: Any = None, **more: Any
    ) -> TorchWork:
        inputs = input_tensor_list if self._comm.rank == root else None
        return self._issue("scatter", output_tensor, inputs, root, async_op=async_op, **more)

    def gather(
        self, output_tensor_list: Any, input_tensor: Any, root: int, async_op: bool, hints: Any = None, **more: Any
    ) -> TorchWork:
        outputs = output_tensor_list if self._comm.rank == root else None
        return self._issue("gather", input_tensor, outputs, root, async_op=async_op, **more)

    def gather_single(
        self, output: Any, tensor: Any, root: int, async_op: bool, hints: Any = None, **more: Any
    ) -> TorchWork:
        outputs = list(output.view(self._comm.size, *tensor.shape)) if self._comm.rank == root else None
        return self._issue("gather", tensor, outputs, root, async_op=async_op, **more)

    def split(self, ranks: Sequence[int], name: str, hints: Any = None, timeout: Any = None) -> TorchComm | None:
        """A ValueError of ours is a RuntimeError there; so is a list without this rank, to which `split` gives None."""
        if ranks and self._comm.rank not in ranks:
            raise RuntimeError(f"rank {self._comm.rank} is not in {ranks}")
        try:
            part = self._comm.split(ranks or None, name=name)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        return None if part is None else TorchComm(part)

    def batch_op_create(self) -> BatchSendRecv:
        return BatchSendRecv(self._comm)

    def new_window(self, tensor: Any = None) -> TorchCommWindow:
        return TorchCommWindow(self._comm, tensor)

    def tensor_register(self, tensor: Any) -> None:
        self._comm.register(tensor)

    def tensor_deregister(self, tensor: Any) -> None:
        """Does nothing: a registration ends with its object."""


def new_comm(backend: str, device: Any, name: str = "default", store: Any = None, **more: Any) -> TorchComm:
    timeout = more.get("timeout")
    seconds = timeout.total_seconds() if timeout else 60.0
    if more.get("enable_reconfigure"):
        return TorchComm(comms.unconnected(backend, name=name, device=device, timeout=seconds), timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        store = dist.FileStore(f"{os.environ['SUITE_FOLDER']}/{name}", -1)
    return TorchComm(
        comms.connect(backend, rank=rank, size=size, rendezvous=store, name=name, device=device, timeout=seconds),
        timeout,
    )


def install(checkout: Path) -> None:
    """Make `torchcomms` and `torchcomms._comms` this shim, beside the Python modules of the checkout."""
    names = (
        RedOpType,
        ReduceOp,
        TorchWork,
        TorchComm,
        TorchCommWindow,
        TorchCommWinAccessType,
        BatchSendRecv,
        new_comm,
    )
    package, compiled = types.ModuleType("torchcomms"), types.ModuleType("torchcomms._comms")
    package.__path__ = [str(checkout / "comms" / "torchcomms")]
    for module in (package, compiled):
        for each in names:
            setattr(module, each.__name__, each)
        for name in ("CommOptions", "BatchP2POptions", "SendOptions", "RecvOptions"):
            setattr(module, name, Options)
        vars(module).update(Timeout=timedelta, _BackendWrapper=BackendWrapper)
    sys.modules.update({"torchcomms": package, "torchcomms._comms": compiled})


class Outcomes(unittest.TestResult):
    """The outcome of each test: "passed", or why not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802  # unittest's names
        self.found[test.id()] = "passed"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.found[test.id()] = f"failed: {err[0].__name__}: {err[1]}"[:300]

    addError = addFailure  # noqa: N815

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.found[test.id()] = f"skipped: {reason}"


def _announce(module: types.ModuleType) -> None:
    """Have the module's optional tests run for this transport, in CPU memory."""
    for each in vars(module).values():
        if isinstance(each, type) and isinstance(names := getattr(each, "SUPPORTED_BACKENDS", None), set):
            names.add(os.environ["TEST_BACKEND"])
    windows = getattr(module, "WindowRmaTest", None)
    for test in (windows.test_all_tests, windows.test_new_window_with_tensor) if windows else ():
        setattr(windows, test.__name__, test.__wrapped__)
        nothing = {"Stream": MagicMock, "MemPool": MagicMock, "synchronize": MagicMock()}
        contexts = {name: lambda _: nullcontext() for name in ("stream", "use_mem_pool")}
        vars(torch.cuda).update(nothing, **contexts)  # a CPU has no streams, and no pools that windows need


def run_rank(checkout: Path, files: Sequence[str], out: Path) -> None:
    """Run the tests of these files as one rank, and write what came out after each file."""
    install(checkout)
    outcomes = Outcomes()
    torch.set_num_threads(1)
    for name, port in zip(files, os.environ["PORTS"].split(), strict=True):
        os.environ["MASTER_PORT"] = port  # a test's store may keep it
        try:
            module = importlib.import_module(f"torchcomms.tests.integration.py.{name}")
        except ImportError as error:
            outcomes.found[name] = f"failed: {error}"
        else:
            _announce(module)
            unittest.defaultTestLoader.loadTestsFromModule(module).run(outcomes)
        out.write_text(json.dumps(outcomes.found))


def main(checkout: str, transport: str, files: Sequence[str]) -> int:
    """Start the ranks, and print what all agree passes."""
    if not Path(checkout, "comms", "torchcomms", "tests", "integration", "py").is_dir():
        print(
            f"{checkout or 'no folder'} is no checkout of TorchComms: git clone "
            "https://github.com/meta-pytorch/torchcomms, "
            "then make torchcomms-suite HOLDFAST_TORCHCOMMS=FOLDER"
        )
        return 2
    folder = tempfile.mkdtemp(prefix="torchcomms-suite-")
    environ = {
        **os.environ,
        "TEST_BACKEND": transport,
        "TEST_DEVICE": "cpu",
        "WORLD_SIZE": str(RANKS),
        "SUITE_FOLDER": folder,
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": " ".join(str(tcp_port()) for _ in files or FILES),
    }
    command = [sys.executable, __file__, "rank", checkout, folder, *(files or FILES)]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(RANKS)]
    for each in ranks:
        try:
            each.wait(SECONDS)
        except subprocess.TimeoutExpired:
            each.kill()
    found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    worst = {
        name: next((each.get(name, "failed: did not end") for each in found if each.get(name) != "passed"), "passed")
        for name in sorted({name for each in found for name in each})
    }
    kinds = [text.partition(":")[0] for text in worst.values()]
    print(
        f"{transport}: {kinds.count('passed')} pass, {kinds.count('failed')} fail, {kinds.count('skipped')} are skipped"
    )
    for name, text in worst.items():
        if text != "passed":
            print(f"  {name.removeprefix('torchcomms.tests.integration.py.')}: {text}")
    return kinds.count("failed")


def tcp_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _, _, place, out, *names = sys.argv
        with Path(os.devnull).open("w") as quiet, redirect_stdout(quiet), redirect_stderr(quiet):
            run_rank(Path(place), names, Path(out, f"{os.environ['RANK']}.json"))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("checkout")
        parser.add_argument("transport")
        parser.add_argument("files", nargs="*", help="such as AllReduceTest; without any, all that can run on a CPU")
        asked = parser.parse_args()
        sys.exit(main(asked.checkout, asked.transport, asked.files))
