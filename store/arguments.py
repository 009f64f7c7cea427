"""Checks of the arguments that the store's methods share."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.comms.quantities import integer_in


def whole_number(value: int, what: str) -> int:
    return integer_in(value, what, 0, (1 << 63) - 1)


def name_sequence(names: Sequence[str], what: str) -> Sequence[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} is a list of names, not one name: [{names!r}]")
    return names


def wanted_version(version: int | str) -> int | str:
    if isinstance(version, str):
        if version != "latest":
            raise ValueError(f"a version is a number or 'latest', not {version!r}")
        return version
    return whole_number(version, "version")
