"""How long do calls of torchstore's interface take, beside torchstore? `python docs/experiments/torchstore_calls.py`.

With `--torchstore CHECKOUT` (its main branch; PYTHONPATH has pygtrie and portpicker) both take turns: each a program of
its own whose values another process keeps. Prints the first, the second, and the median of the later puts and gets of a
key, every value checked; and the mean of puts of new keys, one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

OURS, THEIRS = "holdfast", "torchstore"
MODULES = {OURS: "holdfast.store.torchstore", THEIRS: "torchstore"}


@dataclass(frozen=True)
class Case:
    """Values that are put and got under the same key again and again."""

    name: str
    tensors: int
    nbytes: int

    def values(self, turn: int) -> dict[str, torch.Tensor]:
        return {
            f"{self.name}.{number}": torch.full((self.nbytes // 4,), float(turn + number), device="cpu")
            for number in range(self.tensors)
        }


CASES = (
    Case("3-numbers", 1, 12),
    Case("4KiB", 1, 4 << 10),
    Case("300x16KiB", 300, 16 << 10),
    Case("64MiB", 1, 64 << 20),
    Case("512MiB", 1, 512 << 20),
)


class Turn(msgspec.Struct, frozen=True):
    """Seconds of the puts and gets of one turn."""

    puts: list[float]
    gets: list[float]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, in milliseconds: the first, the second, and the median of the later ones."""

    library: str
    case: str
    put: tuple[float, float, float]
    get: tuple[float, float, float]


async def timed(call: Any) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


async def serve(library: str) -> None:
    """The program of a library: a line names a case and how many rounds; the answer is a line with a `Turn`."""
    ts: Any = importlib.import_module(MODULES[library])
    if library == THEIRS:
        await ts.initialize()
    print("ready", flush=True)
    done = 0
    for line in sys.stdin:
        name, rounds = line.split()
        puts, gets = [], []
        if name == "new-keys":
            value = torch.zeros(1024, device="cpu")
            puts = [await timed(ts.put(f"new.{done + number}", value)) for number in range(int(rounds))]
            done += int(rounds)
        else:
            case = next(each for each in CASES if each.name == name)
            targets = case.values(-1)
            for turn in range(int(rounds)):
                values = case.values(turn)
                puts.append(await timed(ts.put_batch(values)))
                gets.append(await timed(ts.get_batch(targets)))
                assert all(torch.equal(targets[key], values[key]) for key in values)
                await asyncio.sleep(0.05 + case.tensors * case.nbytes / 1e9)
        print(msgspec.json.encode(Turn(puts, gets)).decode(), flush=True)
    if library == THEIRS:
        await ts.shutdown()


def spawn(library: str, checkout: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")]) if library == THEIRS else None
    environment = os.environ | ({"PYTHONPATH": path, "TORCHSTORE_LOG_LEVEL": "ERROR"} if path else {})
    program = [sys.executable, str(Path(__file__)), "--serve", library]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(program: subprocess.Popen[str], line: str | None) -> str:
    """The answer of a program to a line; None waits until it has started. Lines of its libraries are skipped."""
    assert program.stdin is not None and program.stdout is not None
    if line is not None:
        print(line, file=program.stdin, flush=True)
    while (answer := program.stdout.readline()).strip():
        if answer.startswith(("{", "ready")):
            return answer
    raise SystemExit(f"a program has ended: {program.args!r}")


def figures(library: str, case: Case, turn: Turn) -> Figures:
    def row(times: Sequence[float]) -> tuple[float, float, float]:
        return 1e3 * times[0], 1e3 * times[1], 1e3 * statistics.median(times[2:])

    return Figures(library=library, case=case.name, put=row(turn.puts), get=row(turn.gets))


def measure(libraries: Sequence[str], rounds: int, most: int, new_keys: int, checkout: str = "") -> list[Figures]:
    """Put and get every case of up to `most` bytes, the libraries in turn; prints a line each."""
    import holdfast.store.torchstore as ts

    asyncio.run(ts.initialize())  # the owner: the program that puts finds it as its parent
    found = []
    with contextlib.ExitStack() as ends:
        programs = {each: ends.enter_context(spawn(each, checkout)) for each in libraries}
        for program in programs.values():
            ask(program, None)
        for case in [each for each in CASES if each.tensors * each.nbytes <= most]:
            for library, program in programs.items():
                turn = msgspec.json.decode(ask(program, f"{case.name} {rounds}"), type=Turn)
                found.append(figures(library, case, turn))
                print(row(found[-1]))
        for library, program in programs.items():
            turn = msgspec.json.decode(ask(program, f"new-keys {new_keys}"), type=Turn)
            each = 1e3 * statistics.fmean(turn.puts)
            print(f"{library:10}  {new_keys} new keys of 4 KiB, one by one: {each:.2f} ms each")
            assert program.stdin is not None
            program.stdin.close()
    asyncio.run(ts.shutdown())
    return found


def row(each: Figures) -> str:
    put, get = (" ".join(f"{time:9.2f}" for time in times) for times in (each.put, each.get))
    return f"{each.library:10}  {each.case:10}  put {put}   get {get} ms (first, second, later)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchstore", default="", help="a checkout of torchstore")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--most", type=int, default=512 << 20, help="bytes of the largest value")
    parser.add_argument("--new-keys", type=int, default=1000)
    parser.add_argument("--serve", choices=sorted(MODULES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve(asked.serve))
    else:
        libraries = [OURS, THEIRS] if asked.torchstore else [OURS]
        measure(libraries, max(3, asked.rounds), asked.most, asked.new_keys, asked.torchstore)
