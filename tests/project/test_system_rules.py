"""Rules for code that touches the operating system, read from the source tree."""

from __future__ import annotations

import ast

from support.source_tree import modules, nodes, parsed

BACKENDS = {"shm", "inproc", "gloo", "mpi", "nccl", "rccl", "ucx", "nixl", "hier"}


def test_shared_code_names_no_backend_in_errors() -> None:
    """Several backends run it: its caller says which one it is."""
    wrong = []
    for path, node in nodes("comms", "backends"):
        match node:
            case ast.Call(ast.Name("BackendUnavailable"), [ast.Constant(name), *_]) if name in BACKENDS:
                if path.parts[0] == "comms" or path.parts[:2] == ("backends", "common"):
                    wrong.append(f"{path}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


OWN_PROGRAMS = ("ft/processes/zygote", "ft/processes/fork_shim", "rl/environments/sandbox/inside/")
"""Programs in which no code but ours runs, so no other part closes descriptors."""


def test_descriptors_that_are_kept_are_owned() -> None:
    """`os.close` is for a number that the same function has opened; what is kept is an `OwnedDescriptor`."""
    wrong = []
    for path in modules():
        if path.parts[0] == "harness" or str(path).startswith(OWN_PROGRAMS) or path.name == "descriptors.py":
            continue
        tree = parsed(path)
        calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.close" and id(node) not in calls:
                wrong.append(f"{path}:{node.lineno}: os.close is passed on")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap" and not _is_copy(node):
                wrong.append(f"{path}:{node.lineno}: mmap keeps a descriptor: use map_file")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.eventfd_write":
                wrong.append(f"{path}:{node.lineno}: use OwnedDescriptor.wake")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.close" and _is_kept(node.args[0], tree):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def _is_kept(number: ast.expr, tree: ast.Module) -> bool:
    """Whether a number is one of an object, or of a collection that an object has."""
    if isinstance(number, ast.Name):
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and number in ast.walk(node)]
        return any(
            "self." in ast.unparse(loop.iter) for loop in loops if ast.unparse(loop.target).startswith(number.id)
        )
    return isinstance(number, ast.Attribute | ast.Subscript)


def _is_copy(call: ast.Call) -> bool:
    """Whether a mapping is of no file, or private to this process."""
    return ast.unparse(call.args[0]) == "-1" or "mmap.MAP_PRIVATE" in ast.unparse(call)


LISTENERS = {
    "backends/gloo/onesided.py": "one connection at a time, closed within a second unless it knows the secret",
    "ft/control/bounded_listener.py": "the one that bounds strangers",
    "comms/rendezvous/tcp.py": "torch's TCPStore accepts",
    "ft/launch/mpirun.py": "in a folder of this user alone",
    "ft/processes/fork_shim.py": "in a folder of this user alone",
}


def test_every_listener_bounds_strangers() -> None:
    """A flood of idle connections takes the descriptors of a process unless a `BoundedListener` counts them."""
    calls = {"listen", "create_server", "start_server", "create_unix_server", "start_unix_server"}
    wrong = []
    for path in modules():
        if path.parts[0] == "harness" or str(path) in LISTENERS:
            continue
        called = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        names = {ast.unparse(node.func).rpartition(".")[2]: node.lineno for node in called}
        if "BoundedListener" not in names:
            wrong += [f"{path}:{names[name]}: {name}" for name in calls & names.keys()]
    assert not wrong, "\n".join(wrong)
