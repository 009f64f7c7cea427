"""The names of torchstore's module `utils` that code outside of it uses."""

from __future__ import annotations

import importlib
import uuid
from typing import Any


async def spawn_actors(num_processes: int, actor_cls: Any, name: str, mesh: Any = None, **init_args: Any) -> Any:
    """Spawn an actor in each of `num_processes` new Monarch processes of this host, or in those of `mesh`."""
    if mesh is None:
        mesh = importlib.import_module("monarch.actor").this_host().spawn_procs(per_host={"gpus": num_processes})
    await mesh.initialized
    return mesh.spawn(f"{name}_{uuid.uuid4().hex[:8]}", actor_cls, **init_args)
