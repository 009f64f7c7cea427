"""Calls of functions and methods in child processes. Only a parent and its children exchange these messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.packed_errors import PackedError, pack_error, unpack_error
from holdfast.ft.processes.zygote_client import zygote_with

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of `method` of an object in another process."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of a call: a `value`, or an `error`."""

    value: Any = None
    error: PackedError | None = None


@dataclass(frozen=True, slots=True)
class ObjectRecipe:
    """The object that a process serves: a type and the arguments to make it with."""

    kind: type[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def make(self) -> Any:
        """Make the object."""
        return self.kind(*self.args, **(self.kwargs or {}))


def pack(message: MethodCall | CallResult | ObjectRecipe) -> bytes:
    """Pack a message. A result that cannot be packed becomes the error that says so."""
    try:
        return _pickled(message)
    except Exception as error:
        if not isinstance(message, CallResult):
            raise
        return _pickled(CallResult(error=pack_error(error)))


def _pickled(message: object) -> bytes:
    """Pickle by name, which is fast; by value what has no name that is the same in the other process.

    `__main__` is another module there.
    """
    if not cloudpickle.list_registry_pickle_by_value():
        try:
            packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lambda, a local class
            pass
        else:
            if b"__main__" not in packed:
                return packed
    whole: bytes = cloudpickle.dumps(message)
    return whole


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The message that `pack` packed."""
    return cloudpickle.loads(data)


def call_in_fork(
    function: Callable[[], T], *, name: str, output: Path, timeout: float, preload: Sequence[str] = ()
) -> T:
    """What `function` returns; its process writes its output to the file `output`. It goes over by cloudpickle.

    The zygote imports the modules `preload` first. Raises what `function` raises, `StartFailed` if its process ends
    without an answer, and `TimeoutError`.
    """
    process = zygote_with(*preload).spawn(partial(_answer, function), name=name, output=output)
    try:
        result: CallResult = process.channel.recv(timeout)
    except ChannelClosed as error:
        raise StartFailed(f"{name} ended without an answer: {process.epitaph()}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{name} (pid {process.pid}) did not answer within {timeout:.3g} s") from error
    finally:
        process.close()
    if result.error is not None:
        raise unpack_error(result.error)
    value: T = result.value
    return value


def _answer(function: Callable[[], object], channel: ProcessChannel) -> None:
    try:
        result = CallResult(value=function())
    except Exception as error:
        result = CallResult(error=pack_error(error))
    channel.send(result)
