"""The tables of `holdfast store`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from rich.table import Column, Table
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.store.inspection import HolderReport, ReplicaCheck, StoreReport, VersionContent, VersionReport

LONGEST_VALUE = 200

right = partial(Column, justify="right")
bold = partial(Column, style="bold")


def versions_table(report: StoreReport) -> Table:
    """The versions of a store, newest first."""
    title = f"{report.url}, newest {report.keep} kept"
    if report.lost:
        title += f", lost with their holders: {', '.join(map(str, report.lost))}"
    counts = map(right, ("parts", "tensors", "size", "replicas", "hosts"))
    columns = (right("version", style="bold"), "state", *counts, "disk", "pinned by")
    result = FoldingTable(*columns, title=title, title_justify="left")
    for version in reversed(report.versions):
        tensors = "?" if version.tensors is None else f"{version.tensors:,}"
        parts = f"{version.parts}" if version.there == version.parts else f"{version.there} of {version.parts}"
        result.add_row(
            f"{version.number}",
            _state(version),
            parts,
            tensors,
            format_bytes(version.nbytes),
            _replicas(version),
            f"{version.hosts}",
            version.disk,
            ", ".join(f"pid {pin.pid}" for pin in version.pins),
        )
    return result


def _state(version: VersionReport) -> Text:
    if not version.visible:
        return Text("being published", "yellow")
    return Text("latest", "green") if version.latest else Text("visible")


def _replicas(version: VersionReport) -> Text:
    if not version.lacking:
        return Text(f"{version.replicas}")
    return Text(f"{version.replicas}, {version.lacking} lacking", "red")


def holders_table(report: StoreReport) -> Table:
    """The holders of a store, the memory that their replicas take, and what their processes have ready."""
    columns = (bold("id"), right("pid"), "host", "state", *map(right, ("replicas", "memory", "touched")))
    result = FoldingTable(*columns, title="holders", title_justify="left")
    for holder in report.holders:
        state = Text("leaving" if holder.leaving else "holds")
        if not holder.alive or holder.away:
            state = Text("away" if holder.alive else "dead", "red")
        if holder.slow:
            state.append(f"; copies from the GPU are slow: {holder.slow}", "yellow")
        memory = format_bytes(holder.nbytes)
        if holder.limit is not None:
            memory += f" of {format_bytes(holder.limit)}"
        result.add_row(
            holder.id, f"{holder.pid}", holder.host[:12], state, f"{holder.replicas}", memory, _touched(holder)
        )
    return result


def _touched(holder: HolderReport) -> str:
    if holder.touched is None or holder.huge is None:
        return "?"
    share = f", {holder.huge / holder.touched:.0%} on huge pages" if holder.touched else ""
    return format_bytes(holder.touched) + share


def parts_table(content: VersionContent) -> Table:
    """The parts of a version."""
    version = content.version
    title = f"version {version.number}: {format_bytes(version.nbytes)}, {version.tensors} tensors"
    result = FoldingTable(right("part"), right("size"), "digest", "holders", title=title, title_justify="left")
    for part in content.parts:
        result.add_row(f"{part.part}", format_bytes(part.nbytes), part.digest, ", ".join(part.holders))
    return result


def tensors_table(content: VersionContent) -> Table:
    """The tensors of a version."""
    columns = (bold("name"), "dtype", "shape", right("size"), right("part"))
    result = FoldingTable(*columns, title="tensors", title_justify="left")
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, source in content.skeleton.ties.items():
        names[source].append(name)
    for tensor in content.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        if tensor.box is not None:
            shape += f", [{', '.join(f'{low}:{high}' for low, high in tensor.box)}]"
        name = " = ".join([tensor.name, *names[tensor.name]])
        result.add_row(name, tensor.dtype, shape, format_bytes(tensor.nbytes), f"{tensor.part}")
    return result


def values_table(values: Mapping[str, str]) -> Table:
    """The values of a version that are not tensors."""
    result = FoldingTable(bold("name"), "value", title="values", title_justify="left")
    for name, value in values.items():
        result.add_row(name, value)
    return result


def shortened(value: object) -> str:
    """A value as Python writes it, cut after `LONGEST_VALUE` characters."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def checks_table(checks: Sequence[ReplicaCheck]) -> Table:
    """The result for each replica that was read."""
    wrong = sum(not check.right for check in checks)
    whole = counted(len(checks), "replica")
    title = f"{wrong} of {whole} wrong or unreachable" if wrong else f"{whole} read, all right"
    columns = (right("version"), right("part"), "holder", right("pid"), right("size"), "result")
    result = FoldingTable(*columns, title=styled(title, "red" if wrong else "green"), title_justify="left")
    for check in checks:
        found = Text(check.result, "green" if check.right else "red")
        if check.why:
            found.append(f": {check.why}", "dim")
        result.add_row(
            f"{check.version}", f"{check.part}", check.holder, f"{check.pid}", format_bytes(check.nbytes), found
        )
    return result
