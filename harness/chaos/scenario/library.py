"""The scenarios that come with holdfast, by name."""

from __future__ import annotations

from pathlib import Path

from holdfast.harness.chaos.scenario.scenario import BadScenario, Scenario, load

FOLDER = Path(__file__).parents[1] / "scenarios"


def names() -> list[str]:
    """The names of the scenarios that come with holdfast."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def path_of(name_or_file: str) -> Path:
    """The file of a scenario: by the name of one that comes with holdfast, or by path. Raises `BadScenario`."""
    shipped = FOLDER / f"{name_or_file}.toml"
    if "/" not in name_or_file and not name_or_file.endswith(".toml") and shipped.is_file():
        return shipped
    path = Path(name_or_file)
    if not path.is_file():
        raise BadScenario(
            name_or_file, None, f"no such file, and no scenario of that name; there are {', '.join(names())}"
        )
    return path


def find(name_or_file: str) -> Scenario:
    """Load a scenario by name or file. Raises `BadScenario`."""
    return load(path_of(name_or_file))
