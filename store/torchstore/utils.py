"""The helpers of torchstore that code outside of it uses."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import uuid
from typing import Any


async def spawn_actors(num_processes: int, actor_cls: Any, name: str, mesh: Any = None, **init_args: Any) -> Any:
    """Spawn an actor in each of `num_processes` new Monarch processes of this host, or in those of `mesh`."""
    if mesh is None:
        mesh = importlib.import_module("monarch.actor").this_host().spawn_procs(per_host={"gpus": num_processes})
    await mesh.initialized
    return mesh.spawn(f"{name}_{uuid.uuid4().hex[:8]}", actor_cls, **init_args)


def init_logging() -> None:
    """Log to standard output, from level TORCHSTORE_LOG_LEVEL (INFO) on."""
    level = os.environ.get("TORCHSTORE_LOG_LEVEL", "INFO").upper()
    root = logging.getLogger()
    root.setLevel(level)
    if not any(getattr(each, "stream", None) is sys.stdout for each in root.handlers):
        handler = logging.StreamHandler(sys.stdout)
        handler.setLevel(level)
        root.addHandler(handler)
