"""Joins requests that are made at the same time into larger ones, which a generator does in one batch.

Requests that come in one turn of the event loop are joined in the order of their coming, `size` prompts at a time. So a
loop that begins its episodes together makes the same batches again after a resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import msgspec

from holdfast.rl.data.episode import Completion, SamplingRequest

Route = Callable[[SamplingRequest], Awaitable[Sequence[Completion]]]
_Kind = tuple[object, ...]
_kind_of: Callable[[SamplingRequest], _Kind] = attrgetter(
    *(each for each in SamplingRequest.__struct_fields__ if each not in ("prompts", "seeds"))
)
"""What requests that are joined have in common."""


@dataclass(slots=True)
class _Joined:
    """Requests that differ in their prompts and seeds alone, and the futures of their completions."""

    requests: list[SamplingRequest] = field(default_factory=list)
    replies: list[asyncio.Future[Sequence[Completion]]] = field(default_factory=list)
    prompts: int = 0

    def whole(self) -> SamplingRequest:
        return msgspec.structs.replace(
            self.requests[0],
            prompts=tuple(chain.from_iterable([each.prompts for each in self.requests])),
            seeds=tuple(chain.from_iterable([each.seeds for each in self.requests])),
        )


class BatchedRequests:
    """An endpoint that joins requests for `route`, up to `size` prompts, but those that are to be `alone`."""

    def __init__(
        self, route: Route, size: int, alone: Callable[[SamplingRequest], bool] = lambda request: False
    ) -> None:
        self._route, self._size, self._alone = route, size, alone
        self._open: dict[_Kind, _Joined] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def route(self, request: SamplingRequest) -> Sequence[Completion]:
        """The completions of a request. Raises what `route` raises for the one that it is a part of."""
        if self._alone(request):
            return await self._route(request)
        loop = asyncio.get_running_loop()
        if not self._open:
            loop.call_soon(self._send_all)
        kind = _kind_of(request)
        joined = self._open.setdefault(kind, _Joined())
        if joined.requests and joined.prompts + len(request.prompts) > self._size:
            self._send(joined)
            joined = self._open[kind] = _Joined()
        reply: asyncio.Future[Sequence[Completion]] = loop.create_future()
        joined.prompts += len(request.prompts)
        joined.requests.append(request)
        joined.replies.append(reply)
        return await reply

    def _send_all(self) -> None:
        opened, self._open = list(self._open.values()), {}
        for joined in opened:
            self._send(joined)

    def _send(self, joined: _Joined) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(joined))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, joined: _Joined) -> None:
        try:
            completions = await self._route(joined.whole())
        except BaseException as error:
            for reply in joined.replies:
                if not reply.done():
                    reply.set_exception(error) if isinstance(error, Exception) else reply.cancel()
            if not isinstance(error, Exception):
                raise
            return
        at = 0
        for request, reply in zip(joined.requests, joined.replies, strict=True):
            if not reply.done():
                reply.set_result(completions[at : at + len(request.seeds)])
            at += len(request.seeds)
