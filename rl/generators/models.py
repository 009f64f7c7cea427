"""Causal language models of transformers, from a configuration or a folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.comms.errors import HoldfastError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_building = threading.Lock()
"""Held while the global random state is that of a model; threads share it."""


class ModelMisfit(HoldfastError):
    """A model that cannot be built, or that does not fit its tokenizer or the generator."""

    def __init__(self, model: str, why: str, hint: str) -> None:
        self.model, self.why = model, why
        super().__init__(f"the model {model} does not fit: {why}; {hint}")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model: the folder `path` of a saved one, or a `config` ("model_type" and its fields) and a `seed`.

    `vocabulary` is the number of tokens that the tokenizer has, 0 if there is none: the model must have as many.
    `device` is torch's name of one.
    """

    path: str = ""
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    vocabulary: int = 0

    @property
    def name(self) -> str:
        """The model in messages."""
        return repr(self.path) if self.path else f"of type {self.config.get('model_type')!r}"

    def check_device(self) -> None:
        """Raise `ModelMisfit` if the device is a GPU that torch does not see. CUDA is not initialised."""
        wanted = torch.device(self.device)
        if wanted.type == "cuda" and (wanted.index or 0) >= (there := torch.cuda.device_count()):
            seen = f"torch sees no GPU {wanted.index} but {there}" if there else "torch sees no GPU"
            raise ModelMisfit(self.name, f"its device is {self.device!r}, and {seen}", 'use device = "cpu"')

    def build(self) -> PreTrainedModel:
        """A new model in evaluation mode. Its weights depend on this source alone.

        The global random state is kept. Raises `ModelMisfit`.
        """
        from transformers import AutoModelForCausalLM

        config = self.read_config()
        make: Any = AutoModelForCausalLM
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelMisfit(self.name, f"dtype {self.dtype!r} is no floating type of torch", "try 'float32'")
        try:
            with _building, _without_progress_bars(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                if self.path:
                    model = make.from_pretrained(self.path, local_files_only=True, dtype=dtype)
                else:
                    model = make.from_config(config, dtype=dtype)
                model = model.to(self.device)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise self._unknown(error) from error
        built: PreTrainedModel = model.eval()
        return built

    def read_config(self) -> Any:
        """The configuration of transformers. Raises `ModelMisfit` without one, or if it does not fit the tokenizer."""
        from transformers import AutoConfig

        if bool(self.path) == bool(self.config):
            raise ModelMisfit(self.name, "it has both a path and a config, or neither", "give one of them")
        try:
            if self.path:
                config = AutoConfig.from_pretrained(self.path, local_files_only=True)
            else:
                config = AutoConfig.for_model(**self.config)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self._unknown(error) from error
        size = getattr(config, "vocab_size", None)
        if isinstance(size, int) and size < self.vocabulary:
            raise ModelMisfit(
                self.name,
                f"it has {size} tokens, and its tokenizer {self.vocabulary}",
                "take the model's own tokenizer, or give the model a larger vocab_size",
            )
        return config

    def longest_sequence(self) -> int:
        """The number of tokens, prompt included, that the model can attend to. Raises `ModelMisfit`."""
        config = self.read_config()
        longest = getattr(config, "max_position_embeddings", None)
        if not isinstance(longest, int):
            raise ModelMisfit(self.name, "its config has no max_position_embeddings", "use another model")
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        slides = any(kind != "full_attention" for kind in kinds) if kinds else bool(window)
        if slides and not isinstance(window, int):
            raise ModelMisfit(self.name, f"its layers are {sorted(set(kinds or ()))}", "use full attention")
        return min(longest, window) if slides and isinstance(window, int) else longest

    def save_config(self, folder: Path) -> None:
        """Write the model's configuration to a folder of its weights, so that transformers loads them from there."""
        if self.path:
            shutil.copyfile(Path(self.path) / "config.json", folder / "config.json")
            return
        config = self.read_config()
        config.architectures = [type(self.build()).__name__]
        config.save_pretrained(folder)

    def _unknown(self, error: Exception) -> ModelMisfit:
        why = f"{type(error).__name__}: {error}"
        return ModelMisfit(self.name, why, "give a causal model that transformers knows")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model to a folder that transformers loads."""
    with _without_progress_bars():
        model.save_pretrained(folder)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for each file and model."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
