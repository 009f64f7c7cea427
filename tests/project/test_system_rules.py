"""Rules of the source tree that its text shows: what no line may have, who owns descriptors, who bounds strangers."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from support.source_tree import PACKAGES, ROOT, TESTS, modules, parsed

OWN_FILE = "tests/project/test_system_rules.py"
TEST_FILES = [path.relative_to(ROOT) for path in sorted(TESTS.rglob("*.py"))]
PRODUCT = tuple(package for package in PACKAGES if package != "harness")


class Banned(NamedTuple):
    """What no line of some paths may have, a line that has it, what to write instead, and files that may."""

    pattern: str
    example: str
    instead: str
    under: tuple[str, ...] = tuple(f"{package}/" for package in PACKAGES)
    but: tuple[str, ...] = ()


BANNED = {
    "median": Banned(
        r"(\b[\w.]+)\[len\(\1\) // 2\]",
        "found = times[len(times) // 2]",
        "statistics.median: of an even number of values this is the higher of the middle pair",
    ),
    "cache in a view": Banned(
        r"\.__dict__[\[.]",
        'view.__dict__["ranks"] = ranks',
        "View.remember: threads share views, and only a view keeps what is derived from it",
        ("ft",),
        ("ft/membership/view.py",),
    ),
    "switch": Banned(
        r"environ\b.*(?:[!=]=|\bin) .*[\"'][01][\"']",
        'if os.environ.get("HOLDFAST_X") != "0":',
        "holdfast.comms.system.environment.flag: `HOLDFAST_X=false` must not turn X on",
        # Open MPI and torch have their own words for on and off
        but=("comms/system/environment.py", "backends/mpi/__init__.py", "backends/nccl/torch_groups.py"),
    ),
    "backend in an error of shared code": Banned(
        r'BackendUnavailable\(\s*"(?:shm|inproc|gloo|mpi|nccl|rccl|ucx|nixl|hier)"',
        'raise BackendUnavailable("ucx", "no")',
        "the name that the caller has: several backends run it",
        ("comms", "backends/common"),
    ),
    "descriptor that is kept": Banned(
        r"\bos\.close\b(?!\()|\bmmap\.mmap\((?!-1)(?!.*MAP_PRIVATE)|os\.eventfd_write\(",
        "stack.callback(os.close, fd)",
        "OwnedDescriptor, its `wake`, and map_file",
        PRODUCT,
        ("comms/system/files.py",),
    ),
    "transfer": Banned(
        r"\bos\.(?:p?readv?|p?writev?|sendfile|copy_file_range)\(",
        "os.write(fd, data)",
        "comms/system/files.py: a short result is no error",
        but=(
            "comms/system/files.py",  # the loops themselves
            "ft/telemetry/event_log.py",  # a line is appended whole or taken back
            "ft/registers/sqlite.py",  # notifications are drained, not looked at
            "harness/chaos/faults/storage.py",  # it writes until the disk is full
            "ft/launch/guardian.py",  # a line that a pipe takes at once or not at all
            "ft/launch/local_launcher.py",  # single bytes, and lines are put together from what has come
            "harness/testbed/netns.py",  # single bytes
            "rl/environments/sandbox/limits.py",  # output is taken as it comes, up to its limit
            "rl/environments/sandbox/inside/namespaces.py",  # a line that /proc takes at once or not at all
            "rl/environments/sandbox/inside/template.py",  # lines of pipes and of /proc; a file in memory whole
        ),
    ),
    "copy between processes": Banned(
        r"\.process_vm_(?:readv|writev)\(", "libc.process_vm_readv(pid)", "comms/native/process_copy.c"
    ),
    "send without its result": Banned(
        r"(?im)^\s*[\w.]*sock(?:et)?\.send\(", "    self._sock.send(data)", "sendall, which goes on by itself"
    ),
    "current process": Banned(
        r"os\.register_at_fork\(|_pid\b.* [!=]= .*getpid\(\)|getpid\(\) [!=]= .*_pid\b",
        "if self._pid != os.getpid():",
        "comms/system/forks.py",
        PRODUCT,
        ("comms/system/forks.py",),
    ),
    "clock or socket in virtual time": Banned(
        r"(?m)^ *(?:import|from) (?:time|socket|threading|asyncio|os|subprocess|secrets|datetime)\b",
        "import time",
        "the ports of the world: a run of the simulator depends on its seed alone",
        ("harness/simulate",),
        tuple(f"harness/simulate/{name}.py" for name in ("run", "show", "command", "compare", "known_bugs/reproduce")),
    ),
    "holdfast before a fork of the gate": Banned(
        r"(?m)^from holdfast",
        "from holdfast import comms",
        "an import in a function: both sides would run the code of the gate",
        ("harness/gate/arm.py", "harness/gate/workloads.py", "harness/measure/worker.py"),
    ),
    "root counted in a test's own file": Banned(
        r"\(__file__\)\.parents\[",
        "ROOT = Path(__file__).parents[2]",
        "support.source_tree.ROOT: the path is wrong as soon as the file moves",
        ("tests",),
        ("tests/support/source_tree.py", OWN_FILE),
    ),
    "endless wait for a child": Banned(
        r"(?<!await )(?<![\w.])[\w.]*\b"
        r"(?:(?:stdout|stderr|output)\.readline|communicate(?=\(\)|\(\w+=))\((?![^)]*timeout)",
        "words = child.communicate()",
        "support.waiting.next_line, or a timeout",
        ("tests",),
        (OWN_FILE,),
    ),
    "text for rich": Banned(
        r"(?<!\w)(?:Console|Table)\(|\.from_markup\(|\bTextColumn\((?!.*markup=)|(?<!\w)Panel\(.*title=f?[\"']",
        'Panel(x, title=f"{name}: failed")',
        "ft/console/console.py: text of others may be markup",
        ("harness",),
    ),
    "markup": Banned(
        r"(?m)\[/\]|(?<![\w`])\[/?(?:bold|dim|italic|red|green|yellow|blue|cyan|magenta|default)\b[^]\n]*\](?!Examples|$)",
        'out.print(f"[red]{name}[/]")',
        "styled() of ft/console/console.py",
        ("harness",),
    ),
}


@pytest.mark.parametrize("rule", BANNED.values(), ids=BANNED)
def test_no_line_has_what_is_banned(rule: Banned) -> None:
    assert re.search(rule.pattern, rule.example)
    wrong = []
    for path in map(str, [*modules(), *TEST_FILES]):
        if path.startswith(rule.under) and path not in rule.but:
            text = (ROOT / path).read_text()
            wrong += [f"{path}:{text.count(chr(10), 0, each.end()) + 1}" for each in re.finditer(rule.pattern, text)]
    assert not wrong, f"use {rule.instead}: {', '.join(wrong)}"


def test_only_process_copy_copies_between_processes_and_compiled_code_makes_no_other_transfers() -> None:
    sources = [*(ROOT / "comms/native").rglob("*.[ch]"), *(ROOT / "store/native").rglob("*.[ch]")]
    transfers = re.compile(r"SYS_process_vm_|\b(?:p?readv?|p?writev?|sendfile|send|recv)\(\w*fd")
    assert [path.name for path in sources if transfers.search(path.read_text())] == ["process_copy.c"]


OWN_PROGRAMS = ("ft/processes/zygote", "ft/launch/proxy_program", "rl/environments/sandbox/inside/")
"""Programs in which no code but ours runs, so no other part closes descriptors."""


def test_descriptors_that_are_kept_are_owned() -> None:
    """`os.close` is for a number that the same function has opened; what is kept is an `OwnedDescriptor`."""
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        if path.parts[0] != "harness" and not str(path).startswith(OWN_PROGRAMS) and path.name != "files.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.close"
        if _is_kept(node.args[0], parsed(path))
    ]
    assert not wrong, "\n".join(wrong)


def _is_kept(number: ast.expr, tree: ast.Module) -> bool:
    """Whether a number is one of an object, or of a collection that an object has."""
    if isinstance(number, ast.Name):
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and number in ast.walk(node)]
        return any(
            "self." in ast.unparse(loop.iter) for loop in loops if ast.unparse(loop.target).startswith(number.id)
        )
    return isinstance(number, ast.Attribute | ast.Subscript)


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
