"""`holdfast backends`: what each backend can do, whether it can run here, and what to install where it cannot."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from holdfast.comms.plugins import Capabilities
from holdfast.comms.registry import Backend, registry


def describe() -> dict[str, Any]:
    """Everything about the installed plugins as plain data: `backends` by name, and `broken` plugins with why."""
    found = registry()
    return {
        "backends": {name: _describe(found.backend(name)) for name in sorted(found.backends)},
        "broken": dict(sorted(found.broken.items())),
    }


def _describe(backend: Backend) -> dict[str, Any]:
    info, status = backend.info, backend.status
    return {
        "available": backend.available,
        "description": info.description,
        "detail": getattr(status, "detail", ""),
        "reason": getattr(status, "reason", ""),
        "install_hint": getattr(status, "install_hint", ""),
        "plugin_api": ".".join(map(str, info.api)),
        "communicator": info.connect is not None,
        "capabilities": _capabilities(info.capabilities),
    }


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    return {
        "collectives": sorted(capabilities.collectives),
        "reduces": {device: sorted(dtypes) for device, dtypes in sorted(capabilities.reduces.items())},
        "moves": {device: sorted(dtypes) for device, dtypes in sorted(capabilities.moves.items())},
        **{name: getattr(capabilities, name) for name in FLAGS},
    }


FLAGS = {
    "one_host": "one host",
    "one_process": "one process",
    "memory_plane": "memory plane",
    "windows": "windows",
    "atomics": "atomics",
    "abortable": "abortable",
    "native_shrink": "native shrink",
    "native_grow": "native grow",
}


def table(described: dict[str, Any]) -> Table:
    """The table for people, of what `describe` gave."""
    result = Table(title="backends", title_justify="left", show_lines=True)
    result.add_column("name", style="bold", no_wrap=True)
    result.add_column("here", no_wrap=True)
    result.add_column("what it is, or what is missing", ratio=2)
    result.add_column("reduces", justify="right")
    result.add_column("can", ratio=1)
    for name, backend in described["backends"].items():
        here = Text("yes", "green") if backend["available"] else Text("no", "red")
        result.add_row(name, here, _about(backend), _reduces(backend["capabilities"]), _can(backend))
    for name, why in described["broken"].items():
        result.add_row(name, Text("broken", "red"), Text(f"its plugin does not load: {why}"), "", "")
    return result


def _about(backend: dict[str, Any]) -> Text:
    text = Text(backend["description"])
    if backend["detail"]:
        text.append(f"\n{backend['detail']}", "dim")
    if backend["reason"]:
        text.append(f"\n{backend['reason']}", "red")
    if backend["install_hint"]:
        text.append(f"\n{backend['install_hint']}", "yellow")
    return text


def _reduces(capabilities: dict[str, Any]) -> str:
    lines = [f"{device}: {len(dtypes)} dtypes" for device, dtypes in capabilities["reduces"].items()]
    return "\n".join(lines) or "nothing"


def _can(backend: dict[str, Any]) -> str:
    flags = [text for name, text in FLAGS.items() if backend["capabilities"][name]]
    return ", ".join((["collectives"] if backend["communicator"] else []) + flags)
