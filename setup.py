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


def extension(name: str, source: str) -> Extension:
    return Extension(
        name,
        sources=[source],
        include_dirs=["comms/native"],
        depends=[str(header) for header in Path("comms/native").rglob("*.h")],
        extra_compile_args=["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-function"],
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
        extension("holdfast.comms._native", "comms/native/module.c"),
        extension("holdfast.backends.ucx.onesided._near", "backends/ucx/onesided/near.c"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
