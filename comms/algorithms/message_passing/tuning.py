"""Store and check the constants of the cost model that `holdfast tune` measured on this machine.

They are in one small JSON file a machine, in the user's cache folder (`$XDG_CACHE_HOME/holdfast/`, else
`~/.cache/holdfast/`), named after the host, since home folders are often shared. It is only ever replaced whole. If
there is no file, or the folder cannot be read, the defaults hold; a file that cannot be decoded is an error, never a
silent default.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData

log = logging.getLogger("holdfast.comms")

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one link: `latency` in seconds, `bandwidth` in bytes a second.

    `measured` is when (UTC), `worst_error` by how much the model misses the worst measurement (0.2: 20%).
    """

    latency: Positive
    bandwidth: Positive
    measured: str
    worst_error: Annotated[float, msgspec.Meta(ge=0)]


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All links measured on one machine, by name."""

    version: Literal[1] = 1
    links: Mapping[str, Measured] = {}


def path() -> Path:
    """The file of this machine."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return folder / "holdfast" / f"tune-{platform.node() or 'this-host'}.json"


def load() -> Tuning:
    """What was measured here; nothing, if there is no file that can be read. `CorruptData` if it makes no sense."""
    try:
        file = path()
        return msgspec.json.decode(file.read_bytes(), type=Tuning)
    except (FileNotFoundError, NotADirectoryError):
        return Tuning()
    except UNDECODABLE as error:
        raise _unusable(file, error) from error
    except (PermissionError, RuntimeError) as error:  # RuntimeError: this user has no home
        log.info("link constants: defaults, for the file of measured ones cannot be read: %s", error)
        return Tuning()
    except OSError as error:
        raise _unusable(file, error) from error


def _unusable(file: Path, error: Exception) -> CorruptData:
    return CorruptData(
        f"the measured constants in {file} cannot be used: {error}; run `holdfast tune --forget` to go back to the "
        "defaults, or `holdfast tune --forget && holdfast tune` to measure again"
    )


def save(tuning: Tuning) -> None:
    """Replace the file of this machine."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(tuning)) + b"\n")
    draft.replace(file)


def forget() -> bool:
    """Remove the file of this machine, whatever is in it; False if there was none."""
    file = path()
    found = file.exists()
    file.unlink(missing_ok=True)
    return found
