"""Rules for code that touches the operating system, read from the source tree."""

from __future__ import annotations

import ast

from support.source_tree import ROOT, modules

BACKENDS = {"shm", "inproc", "gloo", "mpi", "nccl", "rccl", "ucx", "nixl"}


def test_shared_code_names_no_backend_in_errors() -> None:
    """Several backends run it: its caller says which one it is."""
    wrong = []
    for path in modules():
        if path.parts[0] != "comms" and path.parts[:2] != ("backends", "common"):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "BackendUnavailable" and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and name.value in BACKENDS:
                    wrong.append(f"{path}:{node.lineno}: {ast.unparse(name)}")
    assert not wrong, "\n".join(wrong)
