"""The order of the modules within each package: imports run down, in no circle, and no folder is crowded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.source_tree import NAMESPACE, ROOT, module_name, modules, runtime_imports

LAYERS = {
    "comms": """
        errors quantities
        system
        work
        tensors codecs
        ops
        arithmetic
        transport
        rendezvous
        plugins
        hooks
        executor
        reproducible quantised
        memory_plane
        onesided algorithms
        collectives
        communicator
        connect experts
        mesh
        torchdist
    """,
    "backends": """
        common
        fake inproc shm gloo nccl mpi ucx nixl hier
    """,
    "ft": """
        faultpoints console listen_address schedulers
        events
        event_lines
        control
        registers
        membership
        telemetry
        ports
        step_protocol
        state
        detectors
        settings
        node
        departure communicators
        session
        launch
        processes
        diagnosis
    """,
    "store": """
        errors
        catalog
        reshard
        data
        read casts holding
        publication
        inspection
        follow
        weight_store
        async_weight_store
        interop
        retention
        torchstore
    """,
    "rl": """
        errors
        data
        config
        rewards
        telemetry
        actors
        environments
        grpo
        generators
        trainers
        run
    """,
    "harness": """
        links command_line
        invariants recovery
        cluster
        testbed
        report
        training
        conformance
        simulate
        measure
        bench
        chaos
        gate
        cli
    """,
}
"""From the ground up: a module or folder imports only from its own line and from those above it."""

MOST = 15
"""The limit of modules in a folder, besides `__init__.py` and one more."""


@cache
def graph() -> Mapping[str, set[str]]:
    """Map each module to the modules of ours that it imports, also within functions."""
    files = {module_name(path): path for path in modules() if path.parent != NAMESPACE}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        lines = runtime_imports(path)
        homes = {
            name if name in files else name.rpartition(".")[0] for _, name in lines if not name.endswith("._native")
        }
        found[module] = {home for home in homes if home in files and home != module}
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_imports_run_down(package: str) -> None:
    levels = {name: level for level, line in enumerate(LAYERS[package].strip().splitlines()) for name in line.split()}
    wrong = []
    for module, others in graph().items():
        here = module.split(".")
        if here[1] != package or len(here) < 3:
            continue
        assert here[2] in levels, f"{module}: say in LAYERS where it stands"
        for other in others:
            there = other.split(".")
            if there[1] == package and len(there) > 2 and levels[there[2]] > levels[here[2]]:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_layers_name_existing_modules_only() -> None:
    gone = [
        f"{package}/{name}"
        for package, lines in LAYERS.items()
        for name in lines.split()
        if not (ROOT / package / name).is_dir() and not (ROOT / package / f"{name}.py").is_file()
    ]
    assert not gone


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count: two modules in a circle are one module, or three."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_folder_is_crowded() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in modules():
        folders[path.parent] += path.name != "__init__.py"
    crowded = [f"{folder}: {count} modules" for folder, count in folders.items() if count > MOST]
    assert not crowded, f"more than {MOST}: {', '.join(crowded)}"
