"""TorchTitan's weights under transformers' names, in the interpreter that has TorchTitan, be it this one or another.

`python -m holdfast.rl.trainers.titan_names FOLDER` is what the other one does.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from holdfast.comms.errors import CorruptData
from holdfast.rl.config.named_code import ExtraNotInstalled, extra_python
from holdfast.rl.config.run_config import TitanConfig
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.trainers.titan import TitanModel

SECONDS = 600.0
"""The limit of the other interpreter's time."""

_LINES = 12
"""How much of its output an error quotes."""
_JOB, _GIVEN, _FOUND = "job.json", "titan.safetensors", "transformers.safetensors"


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    source: ModelSource
    titan: TitanConfig


def renamed(
    tensors: Mapping[str, torch.Tensor], source: ModelSource, titan: TitanConfig, python: str
) -> dict[str, torch.Tensor]:
    """Whole tensors with TorchTitan's names under those of transformers.

    `python` is the interpreter of another environment, empty for that of `make extra-titan`; it is asked if TorchTitan
    is not installed here. Raises `ExtraNotInstalled`, and `CorruptData` for tensors that are not of this model.
    """
    if importlib.util.find_spec("torchtitan") is not None:
        return _renamed(tensors, source, titan)
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="holdfast-titan-") as folder:
        place = Path(folder)
        save_file({name: each.contiguous() for name, each in tensors.items()}, place / _GIVEN)
        (place / _JOB).write_bytes(msgspec.json.encode(_Job(source=source, titan=titan)))
        command = [str(extra_python("titan", python)), "-P", "-m", __name__, folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CorruptData(f"TorchTitan did not translate the names of a checkpoint in {SECONDS:.0f} s") from error
        if done.returncode:
            said = "\n".join(done.stderr.splitlines()[-_LINES:])
            raise CorruptData(
                f"TorchTitan cannot translate the names of a checkpoint (exit status {done.returncode}):\n{said}"
            )
        return load_file(place / _FOUND)


def _renamed(tensors: Mapping[str, torch.Tensor], source: ModelSource, titan: TitanConfig) -> dict[str, torch.Tensor]:
    try:
        return TitanModel(source, titan).renamed(tensors)
    except KeyError as error:
        raise CorruptData(f"the checkpoint is not one of this model of TorchTitan: there is no {error}") from error


def main(folder: Path) -> None:
    """Do the job in a folder."""
    from safetensors.torch import load_file, save_file

    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=_Job)
    found = _renamed(load_file(folder / _GIVEN), job.source, job.titan)
    # Tied weights are one tensor with two names, of which such a file cannot have both.
    save_file(
        {name: each.clone(memory_format=torch.contiguous_format) for name, each in found.items()}, folder / _FOUND
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (ExtraNotInstalled, CorruptData) as error:
        sys.exit(f"{type(error).__name__}: {error}")
