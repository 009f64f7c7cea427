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

setup(
    setup_requires=needed,
    ext_modules=[
        Extension(
            "holdfast.comms._native",
            sources=["comms/native/module.c"],
            depends=[str(header) for header in Path("comms/native").glob("*.h")],
            extra_compile_args=["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-function"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
