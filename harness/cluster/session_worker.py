"""The body of a process of a `Job`: a function under an `ft.Session` that joins by the environment."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.packed_errors import pack_error
from holdfast.harness.cluster import pickling
from holdfast.harness.cluster.cluster_ranks import Ended

STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a process writes the stack of its main thread to its output."""


def session_target(
    body: bytes, options: Mapping[str, Any], prepare: Callable[[], Mapping[str, Any] | None] | None = None
) -> Callable[[ProcessChannel], None]:
    """The target of a process: `body` is the pickled (fn, args, kwargs), `options` are those of its `ft.Session`.

    It calls `prepare` first, while it has no other thread; that may return further options, of this process alone.
    """

    def target(channel: ProcessChannel) -> None:
        faulthandler.register(STACK_SIGNAL, all_threads=False)
        try:
            own = prepare() if prepare is not None else None
            ended = Ended(time.monotonic(), pickling.dumps_result(_in_session(body, {**options, **(own or {})})))
        except BaseException as error:
            ended = Ended(time.monotonic(), error=pack_error(error))
        channel.send(ended, timeout=600.0)

    return target


def _in_session(body: bytes, options: Mapping[str, Any]) -> Any:
    from holdfast.ft import Session

    fn, args, kwargs = cloudpickle.loads(body)
    with Session(**options) as session:
        return fn(session, *args, **kwargs)
