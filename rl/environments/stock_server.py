"""A local server of the Model Context Protocol with three tools: `add`, `multiply`, and `stock` of an item.

Run as a program, it serves its standard input and output. It imports the standard library alone, to start fast.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

PROTOCOLS = ("2025-06-18", "2025-03-26", "2024-11-05")


def stock(item: str) -> int:
    """How many of an item are in stock: a number that only the tool knows."""
    return zlib.crc32(item.encode()) % 900 + 100


def _schema(kind: str, *arguments: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name in arguments}
    return {"type": "object", "properties": properties, "required": list(arguments)}


TOOLS: Mapping[str, tuple[str, dict[str, Any], Callable[..., int]]] = {
    "add": ("The sum of two integers.", _schema("integer", "a", "b"), lambda a, b: a + b),
    "multiply": ("The product of two integers.", _schema("integer", "a", "b"), lambda a, b: a * b),
    "stock": ("How many of an item are in stock.", _schema("string", "item"), stock),
}


def answer(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a request. Raises LookupError for a method or tool that is none."""
    match method:
        case "initialize":
            wanted = parameters.get("protocolVersion")
            return {
                "protocolVersion": wanted if wanted in PROTOCOLS else PROTOCOLS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "stock", "version": "1"},
            }
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [{"name": n, "description": d, "inputSchema": s} for n, (d, s, _) in TOOLS.items()]}
        case "tools/call":
            return _call(str(parameters.get("name")), parameters.get("arguments") or {})
    raise LookupError(f"there is no method {method}")


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if name not in TOOLS:
        raise LookupError(f"there is no tool {name}; there are {', '.join(TOOLS)}")
    _, schema, function = TOOLS[name]
    kinds = {"integer": int, "string": str}
    wrong = [
        f"{argument} must be a {kind['type']}"
        for argument, kind in schema["properties"].items()
        if type(arguments.get(argument)) is not kinds[kind["type"]]
    ]
    wrong += [f"there is no argument {argument}" for argument in arguments if argument not in schema["properties"]]
    text = "; ".join(wrong) or str(function(**arguments))
    return {"content": [{"type": "text", "text": text}], "isError": bool(wrong)}


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": None}
        try:
            message = json.loads(line)
            if "id" not in message:
                continue
            reply["id"] = message["id"]
            reply["result"] = answer(message["method"], message.get("params") or {})
        except LookupError as error:
            reply["error"] = {"code": -32602, "message": str(error)}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            reply["error"] = {"code": -32600, "message": f"no request: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
