"""The embedded register in children that were forked while their parent had it open."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from holdfast.ft.registers import RegisterAway, open_cell, sqlite
from support.children import Child


def a_reader(pipe: Connection, url: str) -> None:
    """Report the content of the register, each change of it, and the number of descriptors."""
    for _ in range(2):
        cell = open_cell(url, "job")
        version, value = cell.read()
        pipe.send((version, value))
        while pipe.recv() == "look":
            found = cell.wait(version, 5.0)
            if found is not None:
                version = found[0]
            pipe.send(found)
        cell.close()


def a_parent(pipe: Connection, url: str) -> None:
    """Open the register and fork a reader, which continues when this process is killed."""
    cell = open_cell(url, "job")
    ours, theirs = os.pipe()
    if os.fork() == 0:
        a_reader(pipe, url)
        os._exit(0)
    cell.read()
    os.close(theirs)
    os.read(ours, 1)


def test_a_child_can_use_a_register_that_its_parent_has_closed(url: str, start: Callable[..., Child]) -> None:
    """Closing the parent's last handle would remove the WAL, and the child would see no change any more."""
    cell = open_cell(url, "job")
    cell.compare_and_set(0, b"first")
    child = start(a_reader, url)
    assert child.hear() == (1, b"first")
    cell.close()
    for version, value in ((1, b"second"), (2, b"third")):
        after = open_cell(url, "job")
        assert after.compare_and_set(version, value)
        after.close()
        child.tell("look")
        assert child.hear() == (version + 1, value)
    child.tell("open it again")
    assert child.hear() == (3, b"third")
    after = open_cell(url, "job")
    assert after.compare_and_set(3, b"fourth")
    after.close()
    child.tell("look")
    assert child.hear() == (4, b"fourth")
    child.tell("end")
    child.end()


def test_a_grandchild_can_use_the_register_after_its_ancestors_are_killed(
    url: str, start: Callable[..., Child]
) -> None:
    first = open_cell(url, "job")
    first.compare_and_set(0, b"first")
    parent = start(a_parent, url)
    assert parent.hear() == (1, b"first")
    first.close()
    parent.kill()
    after = open_cell(url, "job")
    assert after.compare_and_set(1, b"second")
    after.close()
    parent.tell("look")
    assert parent.hear() == (2, b"second")
    parent.tell("open it again")
    assert parent.hear() == (2, b"second")
    parent.tell("end")


def test_children_forked_amid_writes_can_write(url: str, start: Callable[..., Child]) -> None:
    """Regression: a child forked within a transaction of another thread stayed in it for ever."""

    def write() -> None:
        with contextlib.closing(open_cell(url, "busy")) as cell:
            version = cell.read()[0]
            while not over.is_set():
                version += cell.compare_and_set(version, bytes(20_000))

    def a_writer(pipe: Connection, number: int) -> None:
        pipe.send(open_cell(url, f"cell {number}").compare_and_set(0, b"mine"))

    over = threading.Event()
    open_cell(url, "job").close()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(30):
            assert start(a_writer, number).hear()
    finally:
        over.set()
        thread.join()


def test_a_child_forked_in_the_middle_of_a_write_is_refused_a_register(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the disk held up outlasted the fork's patience; the child waited for SQLite's locks for ever."""
    monkeypatch.setattr(sqlite, "FORK_SECONDS", 0.05)

    def refused(pipe: Connection) -> None:
        with pytest.raises(RegisterAway, match="forked while another thread had been writing"):
            open_cell(url, "job")
        pipe.send("refused")

    with contextlib.closing(open_cell(url, "busy")) as cell:
        with cell.lock:  # type: ignore[attr-defined]
            child = start(refused)
        assert child.hear() == "refused"
        assert cell.compare_and_set(0, b"the parent goes on")
        assert start(lambda pipe: pipe.send(open_cell(url, "other").read())).hear() == (0, b"")
