"""The column of holdfast in docs/reference/compared.md names what is there, and leaves out no call of a user."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import comms
from holdfast.comms.collectives import PREPARABLE
from holdfast.comms.plugins.registry import registry
from holdfast.harness.cli.app import app
from support.source_tree import ROOT

GROUPS = tomllib.loads((ROOT / "docs/reference/compared.toml").read_text())["group"]
ROWS = [row for group in GROUPS for row in group["rows"]]
COLUMNS = {"what", "holdfast", "torchcomms", "c10d", "mpi4py", "nccl", "nixl"}
HOMES = {
    "comms": "holdfast.comms",
    "ft": "holdfast.ft",
    "hooks": "holdfast.comms.hooks",
    "quantised": "holdfast.comms.quantised",
    "spec": "holdfast.comms.plugins.spec",
}


def names() -> Iterator[str]:
    """Every name in the column of holdfast."""
    for row in ROWS:
        if not row["holdfast"].startswith("Unsupported: "):
            yield from row["holdfast"].split(", ")


def find(name: str) -> Any:
    """The object of a name: `Class.method` of holdfast.comms, or `module.name`; a backend, or a command."""
    first, _, rest = name.partition(" ")
    if first == "backend":
        return registry().backend(rest)
    if first == "command":
        return next(
            each for each in app.registered_commands if rest in (each.name, each.callback and each.callback.__name__)
        )
    first, _, rest = name.partition(".")
    if first in HOMES:
        return getattr(importlib.import_module(HOMES[first]), rest)
    place = getattr(comms, first, None) or getattr(importlib.import_module("holdfast.comms.hooks"), first)
    if rest and not hasattr(place, rest):  # an attribute that __init__ sets
        source = "".join(inspect.getsource(kind) for kind in place.__mro__[:-1])
        assert re.search(rf"^        self\.{rest}\b.* = ", source, re.M), name
        return rest
    return getattr(place, rest) if rest else place


@pytest.mark.parametrize("name", sorted(set(names())))
def test_each_name_of_holdfast_is_there(name: str) -> None:
    assert find(name) is not None


def test_every_row_has_holdfasts_column_and_no_unknown_one() -> None:
    for row in ROWS:
        assert {"what", "holdfast"} <= set(row) <= COLUMNS, row


def test_every_op_of_a_communicator_is_compared() -> None:
    ops = {f"Communicator.{name}" for name in PREPARABLE}
    assert not ops - set(names()), "add them to docs/reference/compared.toml"
