"""Requests that are made together become one batch, the same one each time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.run.generation import BatchedRequests


def request(token: int, *, samples: int = 2, version: int | None = 0) -> SamplingRequest:
    return SamplingRequest(
        prompts=((token,),),
        samples=samples,
        seeds=tuple(10 * token + sample for sample in range(samples)),
        max_new_tokens=4,
        temperature=1.0,
        version=version,
    )


class Generator:
    """Answers with the seed of each sample as its token, and keeps the requests that it got."""

    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []

    async def route(self, asked: SamplingRequest) -> Sequence[Completion]:
        self.requests.append(asked)
        await asyncio.sleep(0)
        if any(prompt == (13,) for prompt in asked.prompts):
            raise RuntimeError("unlucky")
        return [Completion(tokens=(seed,), logprobs=(-1.0,), versions=(0,), finish="stop") for seed in asked.seeds]


def ask(requests: Sequence[SamplingRequest], size: int) -> tuple[Generator, list[object]]:
    generator = Generator()

    async def main() -> list[object]:
        batched = BatchedRequests(generator.route, size)
        return list(await asyncio.gather(*map(batched, requests), return_exceptions=True))

    return generator, asyncio.run(main())


def test_each_request_gets_the_completions_of_its_own_seeds_and_batches_are_the_same_each_time() -> None:
    asked = [request(token) for token in range(1, 8)]
    generator, replies = ask(asked, 3)
    assert ask(asked, 3)[0].requests == generator.requests
    assert [len(each.prompts) for each in generator.requests] == [3, 3, 1]
    for each, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, list) and tuple(one.tokens[0] for one in reply) == each.seeds


def test_requests_of_other_kinds_are_not_joined() -> None:
    generator, _ = ask([request(1), request(2, version=1), request(3), request(4, samples=3)], 8)
    assert sorted(len(each.prompts) for each in generator.requests) == [1, 1, 2]


def test_a_failure_reaches_the_requests_of_its_batch_alone() -> None:
    _, replies = ask([request(11), request(12), request(13), request(14)], 2)
    assert [isinstance(each, RuntimeError) for each in replies] == [False, False, True, True]


def test_a_request_that_is_given_up_does_not_disturb_the_others() -> None:
    generator = Generator()

    async def main() -> object:
        batched = BatchedRequests(generator.route, 4)
        first, second = (asyncio.ensure_future(batched(request(token))) for token in (1, 2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    reply = asyncio.run(main())
    assert isinstance(reply, list) and [one.tokens[0] for one in reply] == [20, 21]
    with pytest.raises(RuntimeError):
        asyncio.run(BatchedRequests(generator.route, 1)(request(13)))
