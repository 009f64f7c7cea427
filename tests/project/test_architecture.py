"""Rules of the tree: which package and which module may import which, what a wheel holds, what no line may have."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.utils._device import _device_constructors

from support.programs.forked_programs import run_program, run_python
from support.source_tree import (
    NAMESPACE,
    PACKAGES,
    ROOT,
    TESTS,
    imports,
    module_name,
    modules,
    nodes,
    parsed,
    runtime_imports,
)

MAY_USE = {
    "comms": {"comms"},
    "backends": {"backends", "comms"},
    "ft": {"ft", "comms"},
    "store": {"store", "ft", "comms"},
    "rl": {"rl", "store", "ft", "comms"},
    "harness": {"harness", "rl", "store", "ft", "comms"},
}
"""What each package may import. Nothing imports `backends`: plugins find them."""

PURE = {
    "__future__",
    "abc",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "math",
    "msgspec",
    "types",
    "typing",
}
"""What a file without I/O may import from outside holdfast."""

DATA_ONLY = {"holdfast.comms.errors", "holdfast.comms.quantities", "holdfast.comms.transport.base"}
"""What it may import from outside its package: errors, accepted numbers, and the type `Peer`."""

LONGEST = 800

MOST = 15
"""The limit of modules in a folder, besides `__init__.py`."""

WIDEST = 110
"""Columns of a line of C."""


PRODUCT = tuple(package for package in PACKAGES if package != "harness")


TEXTS_THAT_DECIDE = {
    "backends/nccl/transport.py": "torch raises a RuntimeError with NCCL's text for a failure in a group of calls",
    "comms/plugins/registry.py": "`evidence` of a detector is a Literal",
}
"""Files that may ask what a text says, and why."""


RIDDLES = re.compile(
    r"\b(nobody|somebody|whoever|whom|strangers?|be alike|none of|"
    r"(is|are) needed(,|$)|(?<!there )(is|are) no (?!longer))",
    re.IGNORECASE,
)
"""Words of errors that do not say what was expected, or of whom."""


def test_errors_of_comms_and_backends_say_what_was_expected() -> None:
    found = []
    for path in [path for path in modules() if path.parts[0] in ("comms", "backends")]:
        for node in ast.walk(parsed(path)):
            texts = ast.walk(node.exc) if isinstance(node, ast.Raise) and node.exc is not None else ()
            found += [
                f"{path}:{text.lineno}: {text.value}"
                for text in texts
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and RIDDLES.search(text.value)
            ]
    for source in [*(ROOT / "comms").rglob("*.[ch]"), *(ROOT / "backends").rglob("*.[ch]")]:
        for number, line in enumerate(source.read_text().splitlines(), start=1):
            if (text := re.search(r'PyErr_\w+\(.*"(.*)"', line)) and RIDDLES.search(text[1]):
                found.append(f"{source.relative_to(ROOT)}:{number}: {text[1]}")
    assert not found, "\n".join(found)


def test_no_text_decides() -> None:
    """Texts of errors and evidence are for people; code asks for a type, or a field that has a kind."""
    texts = ("evidence", "reason", "message")

    def is_text(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return ast.unparse(node) in ("str(error)", "str(over)", "str(failure)")
        return isinstance(node, ast.Attribute) and node.attr in texts

    wrong: dict[str, list[str]] = {}
    for path, node in nodes():
        if isinstance(node, ast.Compare):
            same = all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops)
            asks = not same and any(map(is_text, (node.left, *node.comparators)))
        else:
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            asks = asks and node.func.attr in ("startswith", "endswith") and is_text(node.func.value)
        if asks:
            wrong.setdefault(str(path), []).append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert wrong.keys() == TEXTS_THAT_DECIDE.keys(), wrong


def test_dependencies_point_one_way() -> None:
    """Nor does `import store` name a folder of ours: it would find the user's own, or nothing."""
    wrong = []
    for path in modules():
        for line, name in imports(path):
            top, _, rest = name.partition(".")
            if top in PACKAGES:
                wrong.append(f"{path}:{line}: write holdfast.{name}")
            if top == "holdfast" and rest.partition(".")[0] not in MAY_USE[path.parts[0]]:
                wrong.append(f"{path}:{line}: {path.parts[0]} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_the_membership_core_does_no_io() -> None:
    """The same holds for all modules of `ft` that it imports; of `comms` it takes data types alone."""
    files = {module_name(path): path for path in modules()}
    seen: set[str] = set()
    todo = ["holdfast.ft.membership.state_machine"]
    wrong = []
    while todo:
        module = todo.pop()
        seen.add(module)
        for line, name in runtime_imports(files[module]):
            home = name if name in files else name.rpartition(".")[0]
            if home.startswith("holdfast.ft"):
                todo += {home} - seen
            elif home not in DATA_ONLY and name.partition(".")[0] not in PURE:
                wrong.append(f"{files[module]}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_files_and_folders_stay_small() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in modules()}
    long = [f"{path}: {length} lines" for path, length in lengths.items() if length > LONGEST]
    assert not long, f"more than {LONGEST} lines; split by idea: " + ", ".join(long)
    folders = Counter(path.parent for path in modules() if path.name != "__init__.py")
    crowded = [f"{folder}: {count} modules" for folder, count in folders.items() if count > MOST]
    assert not crowded, f"more than {MOST}: {', '.join(crowded)}"


def test_c_has_short_lines_and_functions_apart_from_declarations() -> None:
    """A header declares, and defines what is inlined; all else stands in a .c file."""
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.[ch]")]
    assert any(path.suffix == ".c" for path in sources)
    for path in sources:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert len(line) <= WIDEST, f"{where} has {len(line)} columns"
            defines = path.suffix == ".h" and line.endswith(") {") and not line[0].isspace()
            assert not defines or line.startswith("static inline "), f"{where} defines a function"


def test_no_module_beside_a_program_hides_an_installed_one() -> None:
    """Python looks first in the folder of the program: there `requests.py` hides the package `requests`."""
    installed = sys.stdlib_module_names | set(importlib.metadata.packages_distributions())
    beside = [path for top in (TESTS, ROOT / "examples") for path in top.rglob("*.py")]
    assert [str(path) for path in beside if path.stem in installed] == []


TEXT_IMPORT = re.compile(
    r"^[ ]*from ((?:holdfast|support)(?:\.\w+)*) import (?:\(([\w\s,]+)\)|([\w, ]+))", re.MULTILINE
)


def test_programs_that_no_type_checker_reads_import_names_that_exist() -> None:
    """Texts, and the examples; the tests that start them may run in the second tier alone."""
    files = [*modules(), *(path.relative_to(ROOT) for path in TESTS.rglob("*.py"))]
    homes = {module_name(path).removeprefix("holdfast.tests."): path for path in files}
    programs = [(str(path.relative_to(ROOT)), path.read_text()) for path in (ROOT / "examples").rglob("*.py")]
    programs += [
        (f"{path}:{node.lineno}", node.value)
        for path in files
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    wrong = []
    for place, program in programs:
        for found in TEXT_IMPORT.finditer(program):
            home = homes.get(found[1])
            known = _bound(parsed(home)) if home is not None else set()
            names = re.findall(r"(\w+)(?: as \w+)?", found[2] or found[3])
            missing = [name for name in names if name not in known and f"{found[1]}.{name}" not in homes]
            wrong += [f"{place}: {found[1]} has no {name}" for name in missing]
    assert not wrong, "\n".join(wrong)


def _bound(tree: ast.Module) -> set[str]:
    """The names of a module, with those of a table of public names that are imported on demand."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["dev"], *extras["mpi"], *extras["rl"]]
    wanted = {canonicalize_name(Requirement(text).name) for text in listed}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(line).name) for line in lines}
    assert all("==" in line for line in lines), "only exact pins, no addresses and no paths"
    assert "torch==2.13.0" in lines
    assert wanted - pinned - {"holdfast"} == set()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("comms", {"transformers", "typer", "matplotlib", "mpi4py", "jinja2", "sqlite3", "holdfast.backends"}),
        ("harness.cli.app", {"torch", "numpy", "transformers", "matplotlib"}),
    ],
)
def test_importing_comms_or_the_command_brings_in_no_framework(module: str, heavy: set[str]) -> None:
    code = f"import sys; before = set(sys.modules); import holdfast.{module}; print(*set(sys.modules) - before)"
    assert heavy & set(run_python("-c", code).split()) == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy of the files in git alone."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, text=True
    )
    for name in names.split("\0"):
        if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


def run_command(command: Path, *arguments: str, cwd: Path) -> str:
    """Run the installed command outside the tree; its output. Raises if it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST"))}
    return run_program(command, *arguments, cwd=cwd, environ=environ)


@pytest.mark.thorough
def test_the_wheel_holds_every_module_and_no_other_top_level_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"holdfast/{path.name if path.parent == NAMESPACE else path}" for path in modules()} <= names
    assert {f"holdfast/{package}/py.typed" for package in PACKAGES} <= names
    kinds = ("*.j2", "*.toml", "*.template")
    data = [path for package in PACKAGES for kind in kinds for path in (ROOT / package).rglob(kind)]
    assert {f"holdfast/{path.relative_to(ROOT)}" for path in data} <= names
    assert "holdfast/comms/_native.abi3.so" in names
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"holdfast"}
    assert len(top) == 2
    assert "holdfast/__init__.py" not in names, "holdfast is a namespace: plugins may add to it"


@pytest.mark.thorough
def test_the_installed_wheel_lists_its_backends_is_a_module_to_run_and_runs_the_demo(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment of its own, which borrows its dependencies without the editable install of this tree."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python, installed = home / "bin" / "python", home / "bin" / "holdfast"
    run_program(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = Path(run_program(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # path files are not followed into the folders that they name: no editable finder
    (site / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    where = run_program(python, "-c", "import holdfast.comms; print(holdfast.comms.__file__)").strip()
    assert Path(where).is_relative_to(home), f"{where} is not what was installed"
    listed = run_command(installed, "backends", cwd=tmp_path)
    assert all(name in listed for name in ("inproc", "shm", "gloo"))
    assert "broken" not in listed
    assert run_command(python, "-m", "holdfast", "--version", cwd=tmp_path).startswith("holdfast ")
    run_command(installed, "demo", "--steps", "8", "--report", str(tmp_path / "report"), cwd=tmp_path)
    assert (tmp_path / "report" / "report.html").stat().st_size > 1000


def test_our_own_tensors_do_not_follow_the_default_device() -> None:
    """`torch.set_default_device` is for a user's tensors: each tensor of holdfast names its device."""
    factories = {function.__name__ for function in _device_constructors()}
    wrong = []
    for path, node in nodes(*PRODUCT):  # the harness is programs of its own, which set no default
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), name), _, keywords) if name in factories:
                if "device" not in {keyword.arg for keyword in keywords}:
                    wrong.append(f'{path}:{node.lineno}: torch.{name} without device="cpu"')
            case ast.ImportFrom("torch", names) if found := factories & {alias.name for alias in names}:
                wrong.append(f"{path}:{node.lineno}: write torch.{min(found)}, with its device")
    assert not wrong, "\n".join(wrong)


def _kept(function: ast.AST) -> Iterator[tuple[int, str]]:
    """The `raise` statements of a function that raise a stored error."""
    caught = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)}
    kept = set()
    for node in ast.walk(function):
        match node:
            case ast.NamedExpr(ast.Name(name), value) | ast.Assign([ast.Name(name)], value):
                asked = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("over", "exception")
                if (isinstance(value, ast.Attribute) or asked) and name not in caught:
                    kept.add(name)
    for node in ast.walk(function):
        match node:
            case ast.Raise(ast.Attribute() | ast.Subscript()):
                yield node.lineno, ast.unparse(node)
            case ast.Raise(ast.Name(name)) if name in kept:
                yield node.lineno, ast.unparse(node)
            case ast.Raise(ast.Call(ast.Attribute(_, "with_traceback"))):
                yield node.lineno, ast.unparse(node)


def test_kept_errors_are_raised_as_copies() -> None:
    """An error that is raised again grows its traceback each time, and holds every frame that it passed."""
    wrong = set()
    for path, node in nodes(*PRODUCT):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wrong |= {f"{path}:{line}: {words}" for line, words in _kept(node)}
    assert not wrong, "raise again(error): " + "; ".join(sorted(wrong))


@pytest.mark.parametrize("package", ["holdfast.ft", "holdfast.harness", "holdfast.harness.chaos"])
def test_every_public_name_is_imported_on_demand(package: str) -> None:
    module = importlib.import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no public name 'nothing'"):
        _ = module.nothing


def test_an_attribute_error_in_a_module_imported_on_demand_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("import os\nos.nothing_of_this_name\n")
    (tmp_path / "lazy_package.py").write_text(
        "from holdfast.ft import on_demand\n__getattr__ = on_demand({'Name': 'broken_module'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"broken_module cannot be imported: .* 'nothing_of_this_name'") as caught:
        exec("from lazy_package import Name", {})
    assert isinstance(caught.value.__cause__, AttributeError)


# -- the order of the modules within each package: imports run down, in no circle


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
    there = {path.with_suffix("").name for path in (ROOT / package).iterdir() if path.is_dir() or path.suffix == ".py"}
    assert levels.keys() <= there, "LAYERS names what does not exist"
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


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count: two modules in a circle are one module, or three."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# -- what no line may have, who owns descriptors, who bounds strangers


OWN_FILE = "tests/project/test_architecture.py"
TEST_FILES = [path.relative_to(ROOT) for path in sorted(TESTS.rglob("*.py"))]


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
    "errors of a decoder": Banned(
        r"except .*\bmsgspec\.(?:DecodeError|MsgspecError)",
        "except (msgspec.DecodeError, UnicodeDecodeError) as error:",
        "holdfast.comms.errors.UNDECODABLE: bytes that nest too deeply are a RecursionError",
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
    "object without its constructor": Banned(
        r"\.__new__\(",
        "transport = object.__new__(GlooTransport)",
        "the constructor, or a function that needs no object: on a slow machine more of the object is looked at",
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
