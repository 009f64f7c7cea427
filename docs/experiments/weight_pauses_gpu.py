"""What do new weights cost a generator on a GPU, by which way? `python docs/experiments/weight_pauses_gpu.py`

A trainer and a generator are two processes that share one GPU. A version begins as the trainer's tensors on the GPU,
and is there when the generator's own tensors hold it; each is compared. The whole is from the trainer's call to the
generator's last byte; the pause is what the generator itself spends on it. Each way runs by itself, within a limit of
its own, and prints its line: the store (`host`; read by a follower, `follow`; a copy on the GPU, `device`),
a safetensors file in /dev/shm, and checkpoint-engine's broadcast (`pip install checkpoint-engine`), with its process
group and pinned memory kept from version to version. Its P2P update needs RDMA.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.system.files import url_of
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.harness.bench.operations import parse_size
from holdfast.store import WeightStore

TENSORS = 64
SECONDS = 40.0
"""The limit of each way."""

State = dict[str, torch.Tensor]


def state_of(nbytes: int, device: str) -> State:
    """As many bytes of bfloat16, in equal tensors."""
    elements = nbytes // TENSORS // 2
    return {f"layer.{number}": torch.zeros(elements, dtype=torch.bfloat16, device=device) for number in range(TENSORS)}


def fill(state: State, version: int) -> None:
    """Give each tensor elements of its own."""
    for number, tensor in enumerate(state.values()):
        tensor.fill_((version * TENSORS + number) % 251)


def synchronize(state: State) -> None:
    if next(iter(state.values())).is_cuda:
        torch.cuda.synchronize()


class Way(ABC):
    """A way from a trainer to a generator: an object in each of both, with its own state."""

    def __init__(self, folder: Path, state: State, trains: bool) -> None:
        self.folder, self.state, self.trains = folder, state, trains

    @abstractmethod
    def send(self, version: int, generator: Connection) -> None:
        """Make the trainer's state a version that the generator can take."""

    @abstractmethod
    def take(self, version: int, told: Any) -> None:
        """Take it into the generator's state; `told` is what `send` told it."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Leave."""


class Host(Way):
    """The store, through memory of the host."""

    on_device = False

    def __init__(self, folder: Path, state: State, trains: bool) -> None:
        super().__init__(folder, state, trains)
        url = url_of("sqlite", folder / "register")
        self.store = WeightStore(url, hold=trains, replicas=1, device_copies=self.on_device)

    def send(self, version: int, generator: Connection) -> None:
        self.store.publish(version, self.state)
        generator.send(("take", version, None))

    def take(self, version: int, told: Any) -> None:
        self.store.get(version, self.state)

    def close(self) -> None:
        self.store.close()


class Device(Host):
    """The store, through a copy of the publisher's on the GPU."""

    on_device = True


class Follow(Host):
    """The store, read ahead by a follower: the pause is the swap."""

    def take(self, version: int, told: Any) -> None:
        if not hasattr(self, "follower"):
            self.follower = self.store.follow(self.state, timeout=SECONDS)
        while self.follower.version != version:
            self.follower.next_version()


class Safetensors(Way):
    """A file in /dev/shm."""

    def send(self, version: int, generator: Connection) -> None:
        path = f"/dev/shm/holdfast-pauses-{os.getpid()}.safetensors"
        import_module("safetensors.torch").save_file(self.state, path)
        generator.send(("take", version, path))

    def take(self, version: int, told: Any) -> None:
        device = str(next(iter(self.state.values())).device)
        loaded = import_module("safetensors.torch").load_file(told, device=device)
        for name, tensor in loaded.items():
            self.state[name].copy_(tensor)
        Path(told).unlink()


class CheckpointEngine(Way):
    """checkpoint-engine: pinned memory of the trainer's, broadcast to a buffer that the generator has by CUDA IPC."""

    def __init__(self, folder: Path, state: State, trains: bool) -> None:
        super().__init__(folder, state, trains)
        if not trains:
            self.worker = import_module("checkpoint_engine.worker")
            self.context = import_module("zmq").Context()
            return
        with ReservedPort("127.0.0.1") as port:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        self.server = import_module("checkpoint_engine.ps").ParameterServer(auto_pg=False, master_port=port.number)
        self.server.init_process_group()

    def send(self, version: int, generator: Connection) -> None:
        host = {name: tensor.cpu() for name, tensor in self.state.items()}
        self.server.register_checkpoint("weights", named_tensors=host, use_shared_memory_pool=True)
        self.server.gather_metas("weights")
        self.server.update("weights", lambda handles: generator.send(("take", version, handles[0][1])))
        self.server.unregister_checkpoint("weights")

    def take(self, version: int, told: Any) -> None:
        def copy(weights: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.state[name].copy_(tensor)

        self.worker.update_weights_from_ipc(self.context, told, 0, run=copy)

    def close(self) -> None:
        if self.trains and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


WAYS: dict[str, type[Way]] = {
    "host": Host, "follow": Follow, "device": Device, "safetensors": Safetensors, "checkpoint-engine": CheckpointEngine
}  # fmt: skip


def generate(name: str, folder: Path, nbytes: int, device: str, orders: Connection) -> None:
    """Take the versions that the trainer tells of; answer with the seconds, and whether all elements are right."""
    state, wanted = state_of(nbytes, device), state_of(nbytes, device)
    way = WAYS[name](folder, state, False)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        _, version, told = order
        began = time.perf_counter()
        way.take(version, told)
        synchronize(state)
        ended = time.perf_counter()
        fill(wanted, version)
        orders.send((ended - began, time.monotonic() - (time.perf_counter() - ended), _same(state, wanted)))
    way.close()


def _same(state: State, wanted: State) -> bool:
    return all(torch.equal(state[name], wanted[name]) for name in wanted)


def train(name: str, folder: Path, nbytes: int, device: str, versions: int) -> str:
    """Hand versions over to a generator of its own; returns a line of figures."""
    ours, theirs = torch.multiprocessing.Pipe()
    context = torch.multiprocessing.get_context("spawn")
    generator = context.Process(target=generate, args=(name, folder, nbytes, device, theirs), daemon=True)
    generator.start()
    state, whole, pause = state_of(nbytes, device), list[float](), list[float]()
    way = WAYS[name](folder, state, True)
    _answer(ours)
    for version in range(1, versions + 1):
        fill(state, version)
        synchronize(state)
        began = time.monotonic()
        way.send(version, ours)
        seconds, ended, right = _answer(ours)
        if not right:
            raise ArithmeticError(f"version {version} is not what the trainer has")
        whole.append(ended - began)
        pause.append(seconds)
    ours.send(None)
    generator.join(SECONDS)
    way.close()
    later = statistics.median(whole[2:]), statistics.median(pause[2:])
    rate = nbytes / later[0] / 1e9
    return (
        f"{name:18} whole {1e3 * later[0]:7.1f} ms  pause {1e3 * later[1]:7.1f} ms  {rate:5.1f} GB/s a reader  "
        f"(first: {1e3 * whole[0]:.0f} ms, pause {1e3 * pause[0]:.0f} ms)"
    )


def _answer(generator: Connection) -> Any:
    if not generator.poll(SECONDS):
        raise TimeoutError(f"the generator has not answered for {SECONDS:g} s")
    return generator.recv()


def _run(name: str, nbytes: int, device: str, versions: int, line: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            line.send(train(name, Path(folder), nbytes, device, versions))
        except Exception as error:  # of any of the libraries; the other ways go on
            line.send(f"{name:18} failed: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"), help="bytes of the weights")
    parser.add_argument("--versions", type=int, default=8, help="versions each way; the first two stand apart")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--device", default="cuda", help="cpu: to try the program, without the ways that need a GPU")
    asked = parser.parse_args()
    if asked.versions < 3:
        parser.error("give at least 3 versions: the first two stand apart")
    if asked.device == "cuda" and not torch.cuda.device_count():
        parser.error("torch sees no GPU: run this on a machine with a CUDA GPU and a CUDA build of torch")
    for name in asked.ways:
        ours, theirs = torch.multiprocessing.Pipe()
        arguments = (name, asked.size, asked.device, asked.versions, theirs)
        process = torch.multiprocessing.get_context("spawn").Process(target=_run, args=arguments)
        process.start()
        theirs.close()
        try:
            line = ours.recv() if ours.poll(SECONDS) else f"{name:18} took longer than {SECONDS:g} s"
        except EOFError:
            line = f"{name:18} ended without a figure"
        print(line, flush=True)
        process.join(5.0)
        if process.is_alive():
            process.kill()  # its generator sees the end of the pipe
            process.join()


if __name__ == "__main__":
    main()
