"""The packages and the compiled part. All else is said in pyproject.toml.

Each folder with an `__init__.py` below one of the six is a package; a folder without one holds data or C.

Where there is no C compiler, that of the `ziglang` package is used, which pip fetches for the build.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

FOLDERS = ("comms", "backends", "ft", "store", "rl", "harness")

needed = []
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler):
    os.environ["CC"] = f"{sys.executable} -m ziglang cc"
    needed.append("ziglang")


NATIVE = ("comms/native", "store/native")


def extension(name: str, sources: list[str]) -> Extension:
    return Extension(
        name,
        sources=sources,
        include_dirs=[*NATIVE],
        depends=[str(header) for folder in NATIVE for header in sorted(Path(folder).rglob("*.h"))],
        define_macros=[("_GNU_SOURCE", "1"), ("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"],
        py_limited_api=True,
    )


def packages() -> list[str]:
    """`holdfast` itself, the six folders, and every package below them."""
    below = [f"{folder}.{name}" for folder in FOLDERS for name in find_packages(folder)]
    return ["holdfast", *(f"holdfast.{name}" for name in (*FOLDERS, *below))]


setup(
    packages=packages(),
    setup_requires=needed,
    ext_modules=[
        extension(
            "holdfast.comms._native",
            [str(source) for folder in NATIVE for source in sorted(Path(folder).rglob("*.c"))],
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
