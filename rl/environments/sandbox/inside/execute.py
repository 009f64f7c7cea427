"""Execute a program in a module of its own, and encode what a call of it gives.

Nothing here is trusted once the program has begun: it shares this interpreter. The process outside believes an exit
status, and compares a value's text itself.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from typing import Any

FILE = "<solution>"
VALUE = 3
"""The descriptor for the encoded value."""


def execute(program: Mapping[str, Any]) -> int:
    """Execute `program["code"]`, then call its function if one is named. Returns the exit status."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = [FILE]
    code: str = program["code"]
    module = types.ModuleType(program["module"])
    for name in [name for name in sys.modules if name.split(".")[0] == "holdfast"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    status = _shielded(lambda: _run(code, module, program))
    ending = _shielded(_end)
    return status or ending


def _run(code: str, module: types.ModuleType, program: Mapping[str, Any]) -> None:
    exec(compile(code, FILE, "exec"), module.__dict__)
    if program["function"]:
        value = getattr(module, program["function"])(*decode(program["arguments"]))
        encoded = json.dumps(encode(value)).encode()
        while encoded:
            encoded = encoded[os.write(VALUE, encoded) :]


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


_CONTAINERS: Any = (list, tuple, set, frozenset)


def encode(value: Any) -> Any:
    """Plain data as JSON that keeps the types apart; any other value as its type's name.

    A value of a subclass, such as `Counter`, a named tuple or `IntEnum`, is what its plain type says that it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return [kind.__name__, [encode(item) for item in kind.__iter__(value)]]
    return ["object", type(value).__name__]


def decode(encoded: Any) -> Any:
    """Plain data from what `encode` makes of it. Raises for any other text."""
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key): decode(item) for key, item in content}
    make: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return make(map(decode, content))
