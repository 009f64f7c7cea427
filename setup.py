"""The compiled part. All else is said in pyproject.toml.

Where there is no C compiler, that of the `ziglang` package is used, which pip fetches for the build.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

needed = []
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler):
    os.environ["CC"] = f"{sys.executable} -m ziglang cc"
    needed.append("ziglang")


def extension(name: str, source: str) -> Extension:
    return Extension(
        name,
        sources=[source],
        depends=[str(header) for header in Path("comms/native").glob("*.h")],
        extra_compile_args=["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-function"],
        py_limited_api=True,
    )


setup(
    setup_requires=needed,
    ext_modules=[
        extension("holdfast.comms._native", "comms/native/module.c"),
        extension("holdfast.backends.ucx._near", "backends/ucx/native/near.c"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
