"""What a run on several hosts needs: a register elsewhere, transports between hosts, and longer silences."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.ft.membership.view import Timeouts
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.replicas import ServiceOptions
from holdfast.rl.config.run_config import RunConfig

UCX_TLS = "UCX_TLS"
MANY_HOSTS = "tcp,self"
"""The transports of UCX that every network has."""


def new_register(url: str) -> str | None:
    """The register of one driver of a run. Each driver has a job of its own, under a name that no other one has.

    None without a URL: a file.
    """
    if not url:
        return None
    place, mark, options = url.partition("?")
    return f"{place}-{secrets.token_hex(6)}{mark}{options}"


def between_hosts(config: RunConfig) -> dict[str, str]:
    """The variables by which the run's processes reach other hosts. UCX has them in this process too."""
    planes = {} if config.store.plane == "auto" else {"HOLDFAST_PLANE": config.store.plane}
    if not config.engine.hosts:
        return planes
    return {**planes, UCX_TLS: os.environ.setdefault(UCX_TLS, MANY_HOSTS)}


def session_options(config: RunConfig) -> dict[str, Timeouts]:
    """The options of the trainers' session: between hosts, a trainer may be as silent as a host."""
    if not config.engine.hosts:
        return {}
    usual = Timeouts()
    suspect = max(config.engine.silence, usual.suspect)
    return {
        "timeouts": replace(
            usual, suspect=suspect, rebuild=usual.rebuild + suspect, operation=usual.operation + suspect
        )
    }


def service_options(config: RunConfig, engine: Engine, environ: Mapping[str, str]) -> dict[str, Any]:
    """The options of all services of a run: a replica may be as silent as its host."""
    silence = max(config.engine.silence, ServiceOptions().silence)
    return {"engine": engine, "environ": dict(environ), "hosts": config.engine.hosts, "silence": silence}
