"""`holdfast backends`: the capabilities of each backend, whether it can run here, and what it lacks."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table
from rich.text import Text

from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.registry import Backend, registry
from holdfast.comms.plugins.spec import Available, Capabilities, DetectorInfo, Unavailable
from holdfast.ft.console.console import FoldingTable
from holdfast.ft.registers import schemes


def describe() -> dict[str, Any]:
    """The installed plugins as plain data.

    `backends` by name, failure `detectors` by name, `registers` by URL scheme, and `broken` plugins with the reason.
    """
    found = registry()
    return {
        "backends": {name: _describe(found.backend(name)) for name in sorted(found.backends)},
        "detectors": {name: _describe_detector(info) for name, info in found.detectors.items()},
        "registers": {scheme: _first_line(factory.__doc__) for scheme, factory in sorted(schemes().items())},
        "broken": dict(sorted(found.broken.items())),
    }


def _describe(backend: Backend) -> dict[str, Any]:
    info, status = backend.info, backend.status
    return {
        "available": backend.available,
        "by_launcher": getattr(status, "needs_launcher", False),
        "description": info.description,
        "detail": getattr(status, "detail", ""),
        "reason": getattr(status, "reason", ""),
        "install_hint": getattr(status, "install_hint", ""),
        "plugin_api": ".".join(map(str, info.api)),
        "communicator": info.connect is not None,
        "auto": dict(info.auto),
        "links": {link.name: {"latency": link.latency, "bandwidth": link.bandwidth} for link in info.links},
        "hints": {hint.name: _describe_hint(hint) for hint in info.hints},
        "capabilities": _capabilities(info.capabilities),
    }


def _describe_hint(hint: Hint) -> dict[str, Any]:
    return {
        "type": hint.kind.__name__,
        "values": hint.range,
        "default": hint.default,
        "per_op": hint.per_op,
        "description": hint.description,
    }


def _describe_detector(info: DetectorInfo) -> dict[str, Any]:
    status: Available | Unavailable
    try:
        status = info.probe()
    except Exception as error:
        status = Unavailable(f"its probe failed: {type(error).__name__}: {error}")
    return {
        "available": isinstance(status, Available),
        "description": info.description,
        "evidence": info.evidence,
        "detail": getattr(status, "detail", ""),
        "reason": getattr(status, "reason", ""),
        "install_hint": getattr(status, "install_hint", ""),
        "plugin_api": ".".join(map(str, info.api)),
    }


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    return {
        "collectives": sorted(capabilities.collectives),
        "widens": {device: sorted(capabilities.widens(device)) for device in sorted(capabilities.reduces)},
        "reduces": {device: sorted(dtypes) for device, dtypes in sorted(capabilities.reduces.items())},
        "moves": {device: sorted(dtypes) for device, dtypes in sorted(capabilities.moves.items())},
        "passive_target": capabilities.passive_target,
        "tcp": capabilities.tcp,
        **{name: getattr(capabilities, name) for name in FLAGS},
    }


_TARGETS = {
    "none": ["one-sided access even to a stopped process"],
    "thread": ["one-sided access while the target computes"],
}
FLAGS = {
    "one_host": "within one host only",
    "one_process": "within one process only",
    "memory_plane": "memory plane",
    "windows": "windows",
    "atomics": "atomics",
    "abortable": "ends blocked ops by abort",
    "finds_failures": "reports dead peers",
}


def table(described: dict[str, Any]) -> Table:
    """The table of backends, from the result of `describe`."""
    about = (Column("description, or what to install", ratio=2), Column("reduces", justify="right"))
    columns = (Column("name", style="bold"), "here", *about, Column("capabilities", ratio=1))
    result = FoldingTable(*columns, title="backends", title_justify="left", show_lines=True)
    for name, backend in described["backends"].items():
        here = Text("yes", "green") if backend["available"] else Text("no", "red")
        if backend["by_launcher"]:
            here = Text("by launcher", "green")
        result.add_row(name, here, _about(backend), _reduces(backend["capabilities"]), _can(backend))
    for name, why in described["broken"].items():
        result.add_row(name, Text("broken", "red"), Text(f"its plugin does not load: {why}"), "", "")
    return result


def hints_table(described: dict[str, Any]) -> Table:
    """The table of the hints that `connect`, `split` and ops take, by backend."""
    columns = ("backend", Column("hint", style="bold"), Column("values", ratio=1), "default")
    result = FoldingTable(
        *columns, Column("what it sets", ratio=2), title="hints", title_justify="left", show_lines=True
    )
    for name, backend in described["backends"].items():
        for hint, about in backend["hints"].items():
            default = "by the backend" if about["default"] is None else str(about["default"])
            text = about["description"] + ("; also for one op" if about["per_op"] else "")
            result.add_row(name, hint, about["values"], default, text)
    return result


def detectors_table(described: dict[str, Any]) -> Table:
    """The table of failure detectors."""
    columns = (Column("name", style="bold"), "here", "how it detects failures", "evidence")
    result = FoldingTable(*columns, title="failure detectors", title_justify="left")
    for name, detector in described["detectors"].items():
        here = Text("yes", "green") if detector["available"] else Text("no", "red")
        result.add_row(name, here, _about(detector), detector["evidence"])
    return result


def registers_table(described: dict[str, Any]) -> Table:
    """The table of registers."""
    result = FoldingTable(Column("URL", style="bold"), "what it is", title="registers", title_justify="left")
    for scheme, description in described["registers"].items():
        result.add_row(f"{scheme}://", description)
    return result


def _about(backend: dict[str, Any]) -> Text:
    text = Text(backend["description"])
    if backend["detail"]:
        text.append(f"\n{backend['detail']}", "dim")
    if backend["reason"]:
        text.append(f"\n{backend['reason']}", "dim" if backend.get("by_launcher") else "red")
    if backend["install_hint"]:
        text.append(f"\n{backend['install_hint']}", "yellow")
    return text


def _reduces(capabilities: dict[str, Any]) -> str:
    lines = []
    for device, dtypes in capabilities["reduces"].items():
        wider = len(capabilities["widens"][device])
        lines.append(f"{device}: {len(dtypes)} dtypes" + (f", {wider} more converted to float32" if wider else ""))
    return "\n".join(lines) or "nothing"


def _can(backend: dict[str, Any]) -> str:
    flags = [text for name, text in FLAGS.items() if backend["capabilities"][name]]
    targets = _TARGETS.get(backend["capabilities"]["passive_target"], [])
    return ", ".join((["collectives"] if backend["communicator"] else []) + flags + targets)
