"""Names in a configuration that lead to plugins: the backend, the plane of the store, and the register."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable
from holdfast.ft.registers import schemes
from holdfast.rl.config.errors import BadConfig, ConfigProblem
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml_text import Key


def plugin_contradictions(config: RunConfig) -> Iterator[tuple[tuple[Key, ...], str]]:
    """The names that no plugin answers to, or that name a plugin which cannot do this work anywhere."""
    for name in _names(config.trainer.backend) or ("",):
        if reason := _problem(name, [each for each, info in _usable() if info.connect is not None]):
            yield (("trainer", "backend"),), reason
    if reason := _problem(config.store.plane, [each for each, info in _usable() if info.memory is not None]):
        yield (("store", "plane"),), reason
    register = config.engine.register
    scheme, separator, _ = register.partition("://")
    if register and (not separator or scheme not in schemes()):
        known = ", ".join(f"{each}://" for each in sorted(schemes()))
        yield (("engine", "register"),), f"{register!r} is not a register's URL; known are {known}"


def check_plugins_run_here(config: RunConfig) -> None:
    """Raise `BadConfig` if the backend or the plane cannot run on this host, and the run is on no other."""
    if config.engine.hosts:
        return
    problems = []
    for field, names in (("trainer.backend", _names(config.trainer.backend)), ("store.plane", (config.store.plane,))):
        reasons = [_unavailable(name) for name in names if name != "auto"]
        if "auto" not in names and all(reasons):
            problems.append(ConfigProblem("on this host", field, "; ".join(reasons)))
    if problems:
        raise BadConfig(problems)


def _names(backends: str) -> tuple[str, ...]:
    """The backends of a preference list."""
    return tuple(name.strip() for name in backends.split(",") if name.strip())


def _usable() -> Iterator[tuple[str, BackendInfo]]:
    """The backends that connect processes which the run starts."""
    for name, info in sorted(registry().backends.items()):
        able = info.capabilities
        if not (able.one_process or able.launcher or able.peerless):
            yield name, info


def _problem(name: str, able: list[str]) -> str:
    """Why `name` is none of those that are `able`."""
    known = registry().backends.get(name)
    there = f"there are auto, {', '.join(able)}"
    if name == "auto" or name in able:
        return ""
    if known is None:
        broken = registry().broken.get(name)
        return f"its plugin is broken: {broken}" if broken else f"there is no {name!r}; {there}"
    if known.capabilities.peerless:
        return f"{name!r} connects no other ranks; {there}"
    if known.capabilities.one_process:
        return f"{name!r} works within one process only; {there}"
    if known.capabilities.launcher:
        return (
            f"{name!r} works in processes that {known.capabilities.launcher} starts, and a run starts its own; {there}"
        )
    return f"{name!r} has only a memory plane; {there}" if known.connect is None else f"{name!r} has none; {there}"


def _unavailable(name: str) -> str:
    """Why a backend cannot run here; "" if it can."""
    status = registry().backend(name).status
    return str(BackendUnavailable(name, status.reason, status.install_hint)) if isinstance(status, Unavailable) else ""
