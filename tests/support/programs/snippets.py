"""The fenced blocks of a page of documentation, and how each is run.

A comment right above a block says what it is:

    <!-- file: NAME -->          saved under this name, for the blocks that follow
    <!-- run -->                 run: Python as a program, shell commands by bash
    <!-- run: ranks=2 -->        run in so many processes, with RANK and WORLD_SIZE as a launcher sets them
    <!-- excerpt of: PATH -->    a part of a file of the repository, which has these very lines
    <!-- not run: REASON -->     shown only

A Python block without a comment is run. A shell block needs one. Blocks of other languages are shown only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from holdfast.ft.launch.job_contract import ReservedPort
from support.programs.forked_programs import ForkedProgram, run_holdfast
from support.source_tree import ROOT
from support.waiting import PROGRAM_SECONDS

BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
INCLUDED = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its text, what the comment above it says, and the line it starts on."""

    language: str
    text: str
    mark: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is executed."""
        return self.mark.startswith("run") or (self.language == "python" and not self.mark)

    @property
    def ranks(self) -> int:
        """How many processes it is run in."""
        return int(self.mark.partition("ranks=")[2] or 1)


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order, with the files that it includes."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        whole = INCLUDED.sub(lambda included: (ROOT / included["path"]).read_text(), match["text"])
        yield Block(match["language"], whole, match["mark"] or "", text.count("\n", 0, match.start("language")) + 1)


def unmarked(page: Path) -> list[str]:
    """Shell blocks without a comment that says whether they are run."""
    return [f"{page.name}:{block.line}" for block in blocks(page) if block.language == "bash" and not block.mark]


def wrong_excerpts(page: Path) -> list[str]:
    """Excerpts with lines that are not in the file that they name."""
    wrong = []
    for block in blocks(page):
        name = block.mark.removeprefix("excerpt of: ")
        if name != block.mark and block.text not in (ROOT / name).read_text():
            wrong.append(f"{page.name}:{block.line}: {name} has no such lines")
    return wrong


def run_page(page: Path, folder: Path) -> None:
    """Save and run the blocks of a page in a folder, in order. Raises AssertionError for one that fails."""
    for number, block in enumerate(blocks(page)):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.runs:
            _run(block, folder, number, f"{page.name}:{block.line}")


def _run(block: Block, folder: Path, number: int, where: str) -> None:
    script = folder / f"block{number}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(textwrap.dedent(block.text))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    if block.language == "python":
        with ExitStack() as stack:
            port = stack.enter_context(ReservedPort("127.0.0.1")).number
            forked = [
                stack.enter_context(
                    ForkedProgram(
                        script.read_text(), [str(script)], folder, environment | _rank(rank, block.ranks, port)
                    )
                )
                for rank in range(block.ranks)
            ]
            ended = [each.communicate(PROGRAM_SECONDS) for each in forked]
    elif commands := _of_holdfast(block.text):
        ended = []
        while commands and not any(each.returncode for each in ended):
            command, *commands = commands
            ended.append(run_holdfast(*command, cwd=folder, environ=environment))
    else:
        assert block.ranks == 1, where
        how = {"cwd": folder, "env": environment, "timeout": PROGRAM_SECONDS}
        ended = [subprocess.run(["bash", "-eu", script], capture_output=True, text=True, **how)]
    for each in ended:
        assert each.returncode == 0, f"{where} ended with {each.returncode}:\n{each.stdout}{each.stderr}"


def _of_holdfast(text: str) -> list[list[str]]:
    """The arguments of each command of a shell block of `holdfast` alone, which needs no new interpreter. Else none."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    shell = any(word[0] != "holdfast" or set("|&;<>$`(*").intersection("".join(word)) for word in lines if word)
    return [] if shell else [word[1:] for word in lines if word]


def _rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that a launcher sets."""
    if ranks == 1:
        return {}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
