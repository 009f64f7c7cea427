"""The versions of a run's weights that are on disk.

There are the first, those of the trainers' checkpoints, and the best. Version v is that after v updates. Nothing of a
checkpoint is unpickled, and no process of the run is needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.ft.control import event_loop
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.errors import EndpointFailed
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run.evaluation import read_best
from holdfast.rl.run.policy import policy_source
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.trainers.policy import build_policy, merged
from holdfast.rl.trainers.titan import TitanNames
from holdfast.store.interop.dcp import DcpDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PREFIXES = ("model.", "policy.")
"""What the names of a policy's tensors begin with in a checkpoint, by the layout of its trainers."""


class NoSavedVersion(HoldfastError):
    """A version of a run is not on disk; `there` are those that are."""

    def __init__(self, place: str, version: str, there: tuple[int, ...], best: int | None) -> None:
        self.version, self.there = version, there
        found = ", ".join(map(str, there)) or "none"
        of_best = "no version was evaluated yet" if best is None else f"the best is {best}"
        super().__init__(f"{place} has no version {version}: on disk are {found}, and {of_best}; name one of these")


class SavedVersions:
    """The saved versions of the run in `directory`; without one, version 0 of the configuration is all there is.

    Raises `CorruptData` for a damaged record of the best version.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory | None) -> None:
        self._config, self._directory = config, directory
        self._best = None if directory is None else read_best(directory.best)
        self._checkpoints = {} if directory is None else directory.saved_steps()

    @property
    def best(self) -> int | None:
        """The best version by evaluation; None before the first one."""
        return None if self._best is None else self._best.version

    @property
    def numbers(self) -> tuple[int, ...]:
        """All saved versions, the oldest first."""
        return tuple(sorted({0, *self._checkpoints, *([] if self._best is None else [self._best.version])}))

    def find(self, version: str) -> int:
        """The number of a version: "best", "latest", or a number itself. Raises `NoSavedVersion`."""
        if version == "latest":
            return self.numbers[-1]
        if version == "best" and self.best is not None:
            return self.best
        if version.isdecimal() and int(version) in self.numbers:
            return int(version)
        place = "the configuration" if self._directory is None else str(self._directory.path)
        raise NoSavedVersion(place, version, self.numbers, self.best)

    def model(self, number: int) -> PreTrainedModel:
        """The model of a saved version, adapters merged.

        Raises `ModelMisfit`, `CorruptData`, `CopyFailed`, and `ExtraNotInstalled` for a checkpoint of TorchTitan where
        there is none: the names in it are translated by the trainers' interpreter. Not to be called in an event loop.
        """
        if number in self._checkpoints and number != self.best:
            return self._of_checkpoint(self._checkpoints[number])
        return self._source(number).build()

    def source(self, number: int, scratch: Path) -> ModelSource:
        """The model of a saved version as a source; one of a checkpoint is written to `scratch`. Raises as `model`."""
        if number in self._checkpoints and number != self.best:
            save_model(self._of_checkpoint(self._checkpoints[number]), scratch)
            return self._placed(scratch)
        return self._source(number)

    def _source(self, number: int) -> ModelSource:
        """The best version, or the policy before the first step: warmed up, if the run has done that."""
        if self._directory is None:
            return policy_source(self._config)
        if self._best is not None and number == self._best.version:
            return self._placed(self._directory.best / self._best.folder)
        warm = self._directory.policy
        return self._placed(warm) if warm.is_dir() else policy_source(self._config)

    def _placed(self, folder: Path) -> ModelSource:
        first = policy_source(self._config)
        return ModelSource(path=str(folder), dtype=first.dtype, vocabulary=first.vocabulary)

    def _of_checkpoint(self, path: Path) -> PreTrainedModel:
        found = DcpDirectory(path)
        tensors = {
            name.removeprefix(prefix): found.read(name)
            for name in found.sizes
            for prefix in _PREFIXES
            if name.startswith(prefix)
        }
        config, source = self._config, self._source(0)
        if config.trainer.kind == "titan":
            tensors = event_loop.run(_titan_renamed(tensors, source, config))
        policy = build_policy(source, config.model)
        _load(policy, tensors, path)
        if not config.model.lora_rank:
            return policy
        model = source.build()
        _load(model, merged(policy), path)
        return model


TITAN_SECONDS = 600.0
"""The limit for the interpreter that has TorchTitan."""


async def _titan_renamed(
    tensors: Mapping[str, torch.Tensor], source: ModelSource, config: RunConfig
) -> dict[str, torch.Tensor]:
    """Tensors with TorchTitan's names under those of transformers, by the interpreter of the trainers."""
    from safetensors.torch import load_file, save_file

    python = extra_python("titan", config.trainer.python)
    with tempfile.TemporaryDirectory(prefix="holdfast-titan-") as folder:
        given, found = Path(folder) / "titan.safetensors", Path(folder) / "transformers.safetensors"
        save_file({name: each.contiguous() for name, each in tensors.items()}, given)
        async with LocalEngine() as engine:
            names = await engine.start("titan-names", TitanNames, python=str(python))
            try:
                await names.call("translate", source, config.titan, str(given), str(found), timeout=TITAN_SECONDS)
            except EndpointFailed as error:
                raise (error.__cause__ or error) from None
        return load_file(found)


def _load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise CorruptData(
            f"the checkpoint {path} does not fit the model of the run's configuration: {error}"
        ) from error
