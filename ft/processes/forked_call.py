"""Calls a function in a fork of the zygote, so that the caller need not import what the function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.framed_socket import ChannelClosed
from holdfast.ft.processes.packed_errors import pack_error, unpack_error
from holdfast.ft.processes.remote_calls import CallResult
from holdfast.ft.processes.zygote_client import zygote_with

T = TypeVar("T")


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
