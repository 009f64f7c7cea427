"""How long does a generator pause for new weights, by which way? `python docs/experiments/weight_pauses.py`.

A publisher and a generator in processes of their own; the generator draws step after step, and takes each version in
between two of them. Ways: the weight store (read ahead by its follower, or mapped ahead), safetensors in /dev/shm,
torchstore (`--torchstore CHECKOUT` of its main branch; PYTHONPATH has pygtrie and portpicker), and Ray's object store
(`--ray FOLDER` of `pip install --target FOLDER ray==2.60.0`). Prints, of all versions but the first three, the medians
of the seconds of a publish, of the seconds until the generator serves it, of its pause, and of its bytes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

State = dict[str, torch.Tensor]

COLD = 3
"""Versions that are not counted: memory is touched for the first time."""
PATIENCE = 120.0
ELEMENTS = 1 << 20


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each version: of its publish, from the begin of that to the first step that has it, and of the pause.

    `step` is the median of the seconds of the generator's steps.
    """

    publish: list[float]
    served: list[float]
    pause: list[float]
    step: float


class Board:
    """What publisher and generator tell each other, in a file that both map: versions, and when their publish began."""

    def __init__(self, folder: Path) -> None:
        path = folder / "board"
        if not path.exists():
            path.write_bytes(bytes(24))
        self._words: Any = np.memmap(path, np.float64, "r+", shape=(3,))

    published = property(lambda self: int(self._words[0]), lambda self, version: self._words.__setitem__(0, version))
    served = property(lambda self: int(self._words[1]), lambda self, version: self._words.__setitem__(1, version))
    began = property(lambda self: float(self._words[2]), lambda self, at: self._words.__setitem__(2, at))


class Way(ABC):
    """A way from a publisher to a generator. `begin` is called in each of them, with its state."""

    def begin(self, folder: Path, state: State, publishes: bool) -> None:
        self.folder, self.state = folder, state

    @abstractmethod
    def publish(self, version: int) -> None:
        """Return once the generator can read the state as this version."""

    @abstractmethod
    def take(self, version: int) -> bool:
        """Read a version that is published into the state; False if it is still being read ahead."""

    def end(self) -> None:  # noqa: B027 (most hold nothing)
        """Leave."""


class Holdfast(Way):
    """A follower of the weight store reads ahead; the pause is its swap, a copy."""

    map = False

    def begin(self, folder: Path, state: State, publishes: bool) -> None:
        from holdfast.store import WeightStore

        super().begin(folder, state, publishes)
        self._store = WeightStore(f"sqlite://{folder}/store.sqlite", hold=publishes, replicas=1, keep=2)
        self._follower: Any = None if publishes else self._store.follow(state, map=self.map)

    def publish(self, version: int) -> None:
        self._store.publish(version, self.state)

    def take(self, version: int) -> bool:
        if not self._follower.is_due():
            return False
        self._follower.swap()
        return bool(self._follower.version == version)

    def end(self) -> None:
        if self._follower is not None:
            self._follower.close()
        self._store.close()


class Mapped(Holdfast):
    """The follower maps versions ahead; its swap exchanges the tensors of the state dict."""

    map = True


class Safetensors(Way):
    """A file in shared memory, renamed once it is whole."""

    def publish(self, version: int) -> None:
        save: Any = import_module("safetensors.torch").save_file
        save(self.state, str(self.folder / "draft"))
        (self.folder / "draft").replace(self.folder / "weights.safetensors")

    def take(self, version: int) -> bool:
        load: Any = import_module("safetensors.torch").load_file
        for name, tensor in load(str(self.folder / "weights.safetensors")).items():
            self.state[name].copy_(tensor)
        return True


class Torchstore(Way):
    """`put_state_dict`, and `get_state_dict` into the tensors. `run` does a coroutine in the loop of an actor."""

    run: Callable[[Any], Any]

    def begin(self, folder: Path, state: State, publishes: bool) -> None:
        super().begin(folder, state, publishes)
        self._module: Any = import_module("torchstore")

    def publish(self, version: int) -> None:
        self.run(self._module.put_state_dict(self.state, "weights"))

    def take(self, version: int) -> bool:
        self.run(self._module.get_state_dict("weights", user_state_dict=self.state))
        return True


class Ray(Way):
    """`put` of numpy's arrays; `get` gives views of the object store, which are copied into the tensors."""

    box: Any
    """An actor that keeps the newest reference."""

    def begin(self, folder: Path, state: State, publishes: bool) -> None:
        super().begin(folder, state, publishes)
        self._ray: Any = import_module("ray")

    def publish(self, version: int) -> None:
        reference = self._ray.put({name: tensor.numpy() for name, tensor in self.state.items()})
        self._ray.get(self.box.keep.remote([reference]))

    def take(self, version: int) -> bool:
        (reference,) = self._ray.get(self.box.kept.remote())
        for name, array in self._ray.get(reference).items():
            np.copyto(self.state[name].numpy(), array)
        return True


WAYS: dict[str, type[Way]] = {
    "holdfast": Holdfast,
    "holdfast-mapped": Mapped,
    "safetensors": Safetensors,
    "torchstore": Torchstore,
    "ray": Ray,
}


def begin(way: Way, folder: Path, nbytes: int, publishes: bool) -> tuple[Board, State]:
    """Open a way. Each process has one thread, as a generator of many on a host has."""
    torch.set_num_threads(1)
    state = state_of(nbytes)
    way.begin(folder, state, publishes)
    return Board(folder), state


def state_of(nbytes: int) -> State:
    return {f"layer.{number}": torch.zeros(ELEMENTS, device="cpu") for number in range(nbytes // (4 * ELEMENTS))}


def layers_of(state: State) -> list[torch.Tensor]:
    """The weights that a step uses; a way may have exchanged the tensors of the state."""
    return [tensor.view(1024, -1) for tensor in list(state.values())[:16]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the other side did not answer")
        time.sleep(0.001)


def publisher(way: Way, folder: Path, nbytes: int, versions: int) -> list[float]:
    """Publish one version after the other, each half a second after the generator serves the one before."""
    (board, state), taken = begin(way, folder, nbytes, True), []
    for version in range(1, versions + 1):
        for number, tensor in enumerate(state.values()):
            tensor.fill_(float(version + number))
        began = board.began = time.monotonic()
        way.publish(version)
        taken.append(time.monotonic() - began)
        board.published = version
        wait_until(lambda version=version: board.served >= version)  # type: ignore[misc]
        time.sleep(0.5)
    way.end()
    return taken


def generator(way: Way, folder: Path, nbytes: int, versions: int) -> tuple[list[float], list[float], float]:
    """Draw steps, and take each version; seconds until it is served, pauses, and the median of a step."""
    board, state = begin(way, folder, nbytes, False)
    layers = layers_of(state)
    served, pauses, steps = list[float](), list[float](), list[float]()
    hidden = torch.ones(1, 1024, device="cpu")
    while board.served < versions:
        began = time.monotonic()
        for layer in layers:
            torch.mm(hidden, layer)
        ended = time.monotonic()
        steps.append(ended - began)
        if board.published > board.served and way.take(board.published):
            layers = layers_of(state)
            now = time.monotonic()
            pauses.append(now - ended)
            served.append(now - board.began)
            version = board.published
            assert all(bool((each == version + n).all()) for n, each in enumerate(state.values())), "other bytes"
            board.served = version
    way.end()
    return served, pauses, statistics.median(steps)


def figures(published: list[float], generated: tuple[list[float], list[float], float]) -> Figures:
    served, pause, step = generated
    return Figures(publish=published, served=served, pause=pause, step=step)


def run_role(name: str, role: str, folder: Path, nbytes: int, versions: int) -> Any:
    return (publisher if role == "publisher" else generator)(WAYS[name](), folder, nbytes, versions)


def in_programs(name: str, folder: Path, nbytes: int, versions: int) -> Figures:
    """Both roles in programs of their own."""
    common = [sys.executable, __file__, "--versions", str(versions), "--size", str(nbytes), "--ways", name]
    programs = [
        subprocess.Popen([*common, "--role", role, "--folder", str(folder)], stdout=subprocess.PIPE)
        for role in ("publisher", "generator")
    ]
    published, generated = (msgspec.json.decode(program.communicate()[0]) for program in programs)
    return figures(published, generated)


async def _torchstore_role(actor: object, role: str, folder: str, nbytes: int, versions: int) -> Any:
    loop, way = asyncio.get_running_loop(), Torchstore()
    way.run = lambda call: asyncio.run_coroutine_threadsafe(call, loop).result()
    return await asyncio.to_thread(publisher if role == "publisher" else generator, way, Path(folder), nbytes, versions)


async def in_monarch(folder: Path, nbytes: int, versions: int) -> Figures:
    """Both roles in actors, as torchstore's users have them."""
    torchstore, monarch = import_module("torchstore"), import_module("monarch.actor")
    kind = type("Role", (monarch.Actor,), {"play": monarch.endpoint(_torchstore_role)})
    await torchstore.initialize()
    roles = ("publisher", "generator")
    actors = [monarch.this_host().spawn_procs(per_host={"gpus": 1}).spawn(role, kind) for role in roles]
    calls = [each.play.call_one(role, str(folder), nbytes, versions) for each, role in zip(actors, roles, strict=True)]
    published, generated = await asyncio.gather(*calls)
    await torchstore.shutdown()
    return figures(published, generated)


class _Box:
    """A Ray actor that keeps a reference."""

    def keep(self, references: list[Any]) -> None:
        self._references = references

    def kept(self) -> list[Any]:
        return self._references


def _ray_role(box: Any, role: str, folder: str, nbytes: int, versions: int) -> Any:
    way = Ray()
    way.box = box
    return (publisher if role == "publisher" else generator)(way, Path(folder), nbytes, versions)


def in_ray(folder: Path, nbytes: int, versions: int) -> Figures:
    """Both roles as tasks of Ray."""
    ray = import_module("ray")
    ray.init(num_cpus=3, object_store_memory=max(4 * nbytes, 1 << 28), include_dashboard=False, log_to_driver=False)
    box, role = ray.remote(_Box).remote(), ray.remote(_ray_role)
    calls = [role.remote(box, name, str(folder), nbytes, versions) for name in ("publisher", "generator")]
    published, generated = ray.get(calls)
    ray.shutdown()
    return figures(published, generated)


def measure(name: str, nbytes: int, versions: int, path: str) -> Figures:
    """One way, in a program of its own."""
    from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory

    paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR", "PYTHONPATH": paths}
    with HeldDirectory("holdfast-pauses-", SHARED_MEMORY) as held:
        command = [sys.executable, __file__, "--role", "all", "--folder", str(held.path), "--ways", name]
        command += ["--versions", str(versions), "--size", str(nbytes)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Figures)


def row(name: str, nbytes: int, rounds: Sequence[Figures]) -> str:
    """The medians of all rounds; the first version is that of the first round."""

    def median(times_of: Callable[[Figures], Sequence[float]]) -> float:
        return 1e3 * statistics.median(time for each in rounds for time in times_of(each)[COLD:])

    publish, pause = median(lambda each: each.publish), median(lambda each: each.pause)
    served = median(lambda each: each.served)
    fetch = median(lambda each: [late - early for late, early in zip(each.served, each.publish, strict=True)])
    step = 1e3 * statistics.median(each.step for each in rounds)
    return (
        f"{name:15} publish {publish:7.1f} ms  served after {served:7.1f} ms (first {1e3 * rounds[0].served[0]:7.1f})  "
        f"pause {pause:7.2f} ms   {nbytes / fetch / 1e6:5.2f} GB/s a reader   step {step:.1f} ms"
    )


def play(asked: argparse.Namespace) -> None:
    """Do what the program that starts this one wants: a way, or one role of it. The result is the last line."""
    (name,), folder, size, versions = asked.ways, Path(asked.folder), asked.size, asked.versions
    found: Any
    if asked.role != "all":
        found = run_role(name, asked.role, folder, size, versions)
    elif name == "torchstore":
        found = asyncio.run(in_monarch(folder, size, versions))
    elif name == "ray":
        found = in_ray(folder, size, versions)
    else:
        found = in_programs(name, folder, size, versions)
    print("", msgspec.json.encode(found).decode(), sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512 << 20, help="bytes of a version")
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1, help="of all ways, in turns")
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:3], choices=sorted(WAYS))
    parser.add_argument("--torchstore", default="", help="a checkout of torchstore")
    parser.add_argument("--ray", default="", help="a folder with Ray")
    parser.add_argument("--role", choices=["all", "publisher", "generator"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.role:
        play(asked)
        return
    paths = {"torchstore": asked.torchstore, "ray": asked.ray}
    names = list(dict.fromkeys([*asked.ways, *(name for name, path in paths.items() if path)]))
    found = dict[str, list[Figures]]()
    for _ in range(asked.rounds):
        for name in names:
            one = measure(name, asked.size, max(COLD + 1, asked.versions), paths.get(name, ""))
            found.setdefault(name, []).append(one)
    for name in names:
        print(row(name, asked.size, found[name]))
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
