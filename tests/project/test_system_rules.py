"""Rules for code that touches the operating system, read from the source tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.source_tree import ROOT, modules, nodes, parsed

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


OWN_PROGRAMS = ("ft/processes/zygote", "ft/launch/proxy_program", "rl/environments/sandbox/inside/")
"""Programs in which no code but ours runs, so no other part closes descriptors."""


def test_descriptors_that_are_kept_are_owned() -> None:
    """`os.close` is for a number that the same function has opened; what is kept is an `OwnedDescriptor`."""
    wrong = []
    for path in modules():
        if path.parts[0] == "harness" or str(path).startswith(OWN_PROGRAMS) or path.name == "files.py":
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
    "backends/common/tcp_channel.py": "one connection at a time, closed within a second unless it knows the secret",
    "ft/control/event_loop.py": "the one that bounds strangers",
    "comms/rendezvous/tcp.py": "torch's TCPStore accepts",
    "ft/launch/process_proxies.py": "in a folder of this user alone",
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


TRANSFERS = {"read", "write", "pread", "pwrite", "readv", "writev", "preadv", "pwritev", "sendfile", "copy_file_range"}
"""Functions of `os` that may move fewer bytes than requested."""

AS_THEY_COME = {
    "comms/system/files.py": "the loops themselves",
    "ft/telemetry/event_log.py": "a line is appended whole or taken back",
    "ft/registers/sqlite.py": "notifications are drained, not looked at",
    "harness/chaos/faults/storage.py": "it writes until the disk is full",
    "ft/launch/guardian.py": "a line that a pipe takes at once or not at all",
    "ft/launch/local_launcher.py": "single bytes, and lines are put together from what has come",
    "harness/testbed/netns.py": "single bytes",
    "rl/environments/sandbox/limits.py": "output is taken as it comes, up to its limit",
    "rl/environments/sandbox/inside/namespaces.py": "a line that /proc takes at once or not at all",
    "rl/environments/sandbox/inside/template.py": "lines of a pipe and of /proc; a file in memory is read whole",
}


def test_every_other_transfer_goes_through_file_io() -> None:
    wrong = [
        f"{path}:{node.lineno}: os.{node.func.attr}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        and str(path) not in AS_THEY_COME
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "os"
        and node.func.attr in TRANSFERS
    ]
    assert not wrong, "a short result is no error: use comms/system/files.py: " + ", ".join(wrong)


def test_only_process_copy_copies_between_processes() -> None:
    """No other Python or C code copies between processes, and compiled code makes no other transfers."""
    sources = [*(ROOT / "comms/native").rglob("*.[ch]"), *(ROOT / "store/native").rglob("*.[ch]")]
    transfers = re.compile(r"SYS_process_vm_|\b(?:p?readv?|p?writev?|sendfile|send|recv)\(\w*fd")
    assert [path.name for path in sources if transfers.search(path.read_text())] == ["process_copy.c"]
    calls = re.compile(r"\.process_vm_(?:readv|writev)\(")
    assert not [path for path in modules() if calls.search((ROOT / path).read_text())]


def test_a_partial_send_is_continued() -> None:
    """`sendall` continues by itself; code that calls `send` uses its result."""
    wrong = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "send"
        and ast.unparse(node.value.func.value).lower().endswith(("sock", "socket"))
    ]
    assert not wrong, ", ".join(wrong)


def test_only_one_helper_asks_for_the_current_process() -> None:
    """Comparing process ids, or another fork handler, would be a second way."""
    wrong = []
    for path, node in nodes("comms", "backends", "ft", "store", "rl"):
        match node:
            case ast.Call(ast.Attribute(ast.Name("os"), "register_at_fork")):
                asks = True
            case ast.Compare():
                asks = "getpid()" in (words := ast.unparse(node)) and "_pid" in words
            case _:
                continue
        if asks and path != Path("comms/system/forks.py"):
            wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not wrong, "use comms.forks: " + "; ".join(wrong)
