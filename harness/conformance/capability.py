"""The capabilities that the backend under test announces: checks test these, and no more."""

from __future__ import annotations

import torch

from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Capabilities


def capabilities(backend: str) -> Capabilities:
    """The capabilities that the backend's plugin announces."""
    return registry().backend(backend).info.capabilities


def reduces(backend: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in capabilities(backend).reduces.get("cpu", ())


def moves(backend: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in capabilities(backend).moves.get("cpu", ())
