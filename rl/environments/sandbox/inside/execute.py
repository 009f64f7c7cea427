"""Execute a program in a module of its own.

Nothing here is trusted once the program has begun: it shares this interpreter. The process outside believes an exit
status alone.
"""

from __future__ import annotations

import atexit
import linecache
import sys
import threading
import traceback
import types
from typing import Any

FILE = "<solution>"


def execute(code: str) -> int:
    """Execute a program. Returns the exit status."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = [FILE]
    module = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.split(".")[0] == "holdfast"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    status = _shielded(lambda: exec(compile(code, FILE, "exec"), module.__dict__))
    ending = _shielded(_end)
    return status or ending


def _end() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()


def _shielded(body: Any) -> int:
    """Run a function; print its exception as the interpreter does. Returns the exit status."""
    try:
        body()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0
