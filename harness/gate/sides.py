"""Makes the sides of a comparison importable: the code of a commit, or of a folder as it is."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

PINS = ("constraints.txt",)
SOURCES = (
    "backends", "comms", "ft", "harness", "rl", "store", "pyproject.toml", "setup.py", "LICENSE", "README.md", *PINS
)  # fmt: skip
BUILD_SECONDS = 300.0
GIT_SECONDS = 60.0


class NoSuchSide(ValueError):
    """A name is neither a commit of the repository nor a folder with holdfast in it."""


@dataclass(frozen=True, slots=True)
class Side:
    """`site` is a folder that holds the package `holdfast` of this side, and the entry points of its plugins."""

    name: str
    title: str
    site: Path
    root: Path


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_SECONDS,
        )
    except FileNotFoundError:
        raise NoSuchSide("git is not installed: name two folders, or install it to compare commits") from None
    except subprocess.TimeoutExpired:
        raise NoSuchSide(f"git {arguments[0]} did not end within {GIT_SECONDS:g} s") from None
    if done.returncode:
        raise NoSuchSide(f"git {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def build(name: str, repository: Path, folder: Path) -> Side:
    """Make `name`, a commit of the repository around `repository` or a folder, importable under the new `folder`.

    Copies the files, so that the originals may change meanwhile, compiles C and bytecode, and maps the packages as an
    installation does. Raises `NoSuchSide`.
    """
    folder.mkdir()
    root = folder / "tree"
    root.mkdir()
    try:
        if (tree := _tree_around(name)) is not None:
            title = f"{name} as it is"
            _copy(tree, root)
        else:
            title = _check_out(name, repository, root)
        if not (root / "comms" / "__init__.py").is_file():
            raise NoSuchSide(f"there is no comms/__init__.py in {name}")
        _compile(root, title)
    except (OSError, tarfile.TarError, subprocess.TimeoutExpired) as error:
        raise NoSuchSide(f"{name} cannot be made ready: {error}") from error
    site = folder / "site"
    site.mkdir()
    (site / "holdfast").symlink_to(root)
    _publish_entry_points(root, site)
    return Side(name, title, site, root)


def _tree_around(name: str) -> Path | None:
    """The nearest folder with a pyproject.toml at or above the folder `name`; None if there is none.

    A plain word may also be a branch: it counts as a folder only if that has the file itself.
    """
    folder = Path(name).absolute()
    is_path = name in (".", "..") or "/" in name
    around = (folder, *folder.parents) if is_path and folder.is_dir() else (folder,)
    return next((each for each in around if (each / "pyproject.toml").is_file()), None)


def _check_out(name: str, repository: Path, root: Path) -> str:
    """Extract the files of a commit to `root`; returns its title. Raises `NoSuchSide`."""
    top = repository_of(repository, name)
    try:
        commit = _git(top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except NoSuchSide as error:
        why = f"{name} is neither a commit of {top} nor a folder with a pyproject.toml"
        if _git(top, "rev-parse", "--is-shallow-repository") == "true":
            why += "; the clone is shallow: git fetch --unshallow brings the older commits"
        raise NoSuchSide(why) from error
    _extract(top, commit, root)
    return _git(top, "log", "-1", "--format=%h %s", commit)


def _copy(source: Path, root: Path) -> None:
    for name in SOURCES:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source / name, root / name, symlinks=True, ignore=ignored)
        elif (source / name).is_file():
            shutil.copy2(source / name, root / name)


def _compile(root: Path, title: str) -> None:
    """Compile as `pip install -e` would, with the same compiler for both sides. Raises `NoSuchSide`."""
    if (root / "setup.py").is_file():
        done = subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=root,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=BUILD_SECONDS,
        )
        if done.returncode:
            raise NoSuchSide(f"{title} does not compile: {(done.stderr or done.stdout).strip()[-500:]}")
    compileall.compile_dir(root, quiet=2, workers=1)


def _extract(repository: Path, commit: str, root: Path) -> None:
    """Extract the files of `commit` without changing the repository."""
    there = set(_git(repository, "ls-tree", "--name-only", commit).split("\n"))
    wanted = [name for name in SOURCES if name in there]
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit, *wanted]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as archive,
        tarfile.open(fileobj=cast(IO[bytes], archive.stdout), mode="r|") as files,
    ):
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            files.extraction_filter = tarfile.data_filter
        files.extractall(root)
    if archive.returncode:
        raise NoSuchSide(f"git archive {commit} ended with status {archive.returncode}")


def _publish_entry_points(root: Path, site: Path) -> None:
    """Write the entry points of an installation, so that only this side's own plugins are found."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    information = site / f"holdfast-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: holdfast\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (information / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def differing_pins(base: Side, head: Side) -> tuple[str, ...]:
    """Lines of constraints.txt that differ: both sides run with the installed versions."""
    pins = [_pins(side.root) for side in (base, head)]
    return tuple(sorted(pins[0] ^ pins[1]))


def _pins(root: Path) -> set[str]:
    lines: set[str] = set()
    for name in PINS:
        path = root / name
        if path.is_file():
            lines |= {line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] != "#"}
    return lines


def repository_of(folder: Path, name: str) -> Path:
    """The repository around `folder`, to look for the commit `name`. Raises `NoSuchSide`."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel"))
    except NoSuchSide as error:
        why = f"{name} is no folder with a pyproject.toml, and no commit can be looked for: {error}"
        raise NoSuchSide(why) from error


def free_cpu(seconds: float = 0.03) -> int:
    """The CPU that idles most within `seconds`, among those that this process may use."""
    before = _idle()
    time.sleep(seconds)
    after = _idle()
    return max(sorted(os.sched_getaffinity(0)), key=lambda cpu: after[cpu] - before[cpu])


def _idle() -> dict[int, int]:
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    return {int(fields[0][3:]): int(fields[4]) for fields in lines if fields[0] != "cpu"}
