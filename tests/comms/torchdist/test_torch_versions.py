"""holdfast imports from torch only what each version of torch has that it claims to work with."""

from __future__ import annotations

import tomllib

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement

from support.programs.torch_names import table, uses
from support.source_tree import ROOT

TABLE = table()
ADVICE = "take another name, or look for it with getattr; tests/support/programs/torch_names.py makes the tables anew"


def claimed() -> list[str]:
    """The versions of torch that pyproject.toml allows, as "2.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = next(each.specifier for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    return [f"2.{minor}" for minor in range(100) if specifier.contains(f"2.{minor}.0")]


def test_there_is_a_table_for_each_claimed_version() -> None:
    assert sorted(TABLE, key=lambda version: int(version[2:])) == claimed()


@pytest.mark.parametrize("version", TABLE)
def test_each_name_that_is_imported_from_torch_is_in_the_version(version: str) -> None:
    missing = [
        f"{place}: {module}.{name}"
        for module, names in uses().items()
        for name, place in names.items()
        if name not in TABLE[version].get(module, ())
    ]
    missing += [module for module in uses() if module not in TABLE[version]]
    assert not missing, ADVICE


def test_the_modules_of_the_installed_version_have_the_names_too() -> None:
    """So the reader of wheels finds what an import finds."""
    for name, place in uses()["torch.distributed"].items():
        assert hasattr(dist, name) or name.startswith("ProcessGroup"), place
