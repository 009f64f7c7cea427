"""Judges completions by the reward of a configuration, in processes where it may hang."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.processes.channel import ChannelClosed, FramedSocket, ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, spawned
from holdfast.ft.processes.remote_calls import CallResult, pack, pack_error, unpack, unpack_error
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.data.episode import Completion, Episode, Group, Prompt
from holdfast.rl.data.prompts import Tokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.reward import (
    Criterion,
    ExactMatch,
    FormatMatch,
    FunctionReward,
    JudgedAnswer,
    LengthPenalty,
    Reward,
    Rubric,
    Score,
    is_bounded,
    score_each,
)

MakeReward = Callable[[], Awaitable[Reward]]
"""Makes the reward, in each process that needs it. It goes there by cloudpickle."""

MOST_PROCESSES = 8
START_SECONDS = 180.0
"""Seconds in which a process must have made the reward: it may load a model."""

_PATIENCE = 0.05
"""Seconds that answers wait for a process that is busy before another one is forked."""
_MARGIN = 1.0
"""Seconds after its limit that a reward which can be cancelled has to say so itself."""
_SEND_SECONDS = 60.0
_LENGTH = struct.Struct("<Q")


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """What a process is asked: to judge answers, each within `timeout` seconds."""

    answers: tuple[JudgedAnswer, ...]
    timeout: float


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """What a process answers for each of them, as soon as it knows; `failure` is empty for a score."""

    value: float
    parts: Mapping[str, float]
    reward: str = ""
    failure: str = ""


class RewardProcesses:
    """At most `most` processes that judge answers with the reward that `make` makes, forked as they are needed.

    A process that gives no score in time is killed and replaced: that costs the answer which it was judging, and no
    other. `ended` counts the processes that ended so, or by themselves. The processes write to the file `log`.
    """

    def __init__(self, make: MakeReward, *, most: int = MOST_PROCESSES, log: Path | None = None) -> None:
        self.ended = 0
        self._make, self._log = make, log
        self._places = asyncio.Semaphore(most)
        self._idle: list[_RewardProcess] = []
        self._busy: set[_RewardProcess] = set()
        self._freed = asyncio.Event()
        self._directory: HeldDirectory | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the first process. Raises what `make` raises there, and `StartFailed`."""
        if not self._idle and not self._busy:
            self._idle.append(await self._started())

    async def score_each(self, answers: Sequence[JudgedAnswer], timeout: float) -> list[Score | RewardFailed]:
        """The score of each answer, or its failure; each may take `timeout` seconds."""
        results: list[Score | RewardFailed] = []
        while len(results) < len(answers):
            left = answers[len(results) :]
            async with self._places:
                try:
                    process = await self._free_process()
                except Exception as error:  # the code of the user's may raise anything as it is imported
                    why = f"no process can judge it: {describe(error)}"
                    return [*results, *(RewardFailed("reward", each.prompt.number, why) for each in left)]
                results += await self._judged(process, left, timeout)
        return results

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for process in (*self._idle, *self._busy):
            self._end(process)
        self._idle.clear()
        while self._closing:
            await asyncio.wait(self._closing)
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    async def _judged(
        self, process: _RewardProcess, answers: Sequence[JudgedAnswer], timeout: float
    ) -> list[Score | RewardFailed]:
        self._busy.add(process)
        whole = False
        try:
            results, whole = await process.judge(answers, timeout)
            return results
        finally:
            self._busy.discard(process)
            if whole:
                self._idle.append(process)
            else:
                self.ended += 1
                self._end(process)
            self._freed.set()

    async def _free_process(self) -> _RewardProcess:
        """A process that judges nothing: one that is there, or will be in a moment, or else a new one."""
        if not self._idle and self._busy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    while not self._idle:
                        self._freed.clear()
                        await self._freed.wait()
        return self._idle.pop() if self._idle else await self._started()

    async def _started(self) -> _RewardProcess:
        if self._log is None and self._directory is None:
            self._directory = HeldDirectory("holdfast-rewards-")
        log = self._log or (self._directory.path / "rewards.log" if self._directory is not None else Path())
        process = _RewardProcess(await spawned(partial(_spawn, self._make, log)))
        try:
            await process.begin(START_SECONDS)
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: _RewardProcess) -> None:
        task = asyncio.ensure_future(process.end())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _RewardProcess:
    """One of the processes, as the driver sees it."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self, timeout: float) -> None:
        """Wait until the reward is made. Raises what made it fail."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._process.channel.detach())
        found = await self._receive(1, timeout)
        if not found:
            late = f"it took more than {timeout:.3g} s (pid {self._process.pid})"
            raise HoldfastError(f"the reward was not made: {await self._epitaph() if self._lost else late}")
        made: CallResult = unpack(found[0])
        if made.error is not None:
            error = unpack_error(made.error)
            # SystemExit of a user's module must not end this process too.
            why = HoldfastError(f"the reward was not made: {describe(error)}")
            raise error if isinstance(error, Exception) else why

    async def judge(self, answers: Sequence[JudgedAnswer], timeout: float) -> tuple[list[Score | RewardFailed], bool]:
        """Results up to the first answer that the process did not come back from; whether it may judge others."""
        batch = msgspec.msgpack.encode(_Batch(tuple(answers), timeout))
        assert self._writer is not None, "it has begun"
        self._writer.write(_LENGTH.pack(len(batch)) + batch)
        frames = await self._receive(len(answers), timeout + _MARGIN)
        results = [_outcome(_decode(frame), answer) for frame, answer in zip(frames, answers, strict=False)]
        if len(results) == len(answers):
            return results, True
        if self._lost:
            why = f"its process ended: {await self._epitaph()}"
        else:
            why = f"no score after {timeout:.3g} s; its process {self._process.pid} was killed"
        return [*results, RewardFailed("reward", answers[len(results)].prompt.number, why)], False

    async def end(self) -> None:
        """Kill it, and wait for its end. Idempotent."""
        if self._writer is not None:
            self._writer.transport.abort()
        await asyncio.to_thread(self._process.close)

    @property
    def _lost(self) -> bool:
        return self._reader.at_eof() or self._reader.exception() is not None

    async def _receive(self, wanted: int, silence: float) -> list[bytes]:
        """The next `wanted` frames; fewer if the process is silent for so many seconds, or `_lost`."""
        found = list[bytes]()
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            while len(found) < wanted:
                async with asyncio.timeout(silence):
                    (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                    found.append(await self._reader.readexactly(length))
        return found

    async def _epitaph(self) -> str:
        return (await asyncio.to_thread(self._process.epitaph)).splitlines()[0]


_decode = msgspec.msgpack.Decoder(_Result).decode


def _outcome(result: _Result, answer: JudgedAnswer) -> Score | RewardFailed:
    if result.failure:
        return RewardFailed(result.reward, answer.prompt.number, result.failure)
    return Score(result.value, result.parts)


def _spawn(make: MakeReward, log: Path) -> ChildProcess:
    return zygote_with(__name__).spawn(partial(_serve, make), name="rewards", output=log)


def _serve(make: MakeReward, channel: ProcessChannel) -> None:
    """Judge batch after batch, until the parent closes its end."""
    frames = FramedSocket(channel.detach())
    loop = asyncio.new_event_loop()
    try:
        reward = loop.run_until_complete(_made(make))
    except BaseException as error:
        frames.send(pack(CallResult(error=pack_error(error))), _SEND_SECONDS)
        return
    frames.send(pack(CallResult()), _SEND_SECONDS)
    while True:
        try:
            batch = msgspec.msgpack.decode(frames.receive(), type=_Batch)
        except ChannelClosed:
            return
        for answer in batch.answers:
            frames.send(msgspec.msgpack.encode(_judge(loop, reward, answer, batch.timeout)), _SEND_SECONDS)


async def _made(make: MakeReward) -> Reward:
    return await make()


def _judge(loop: asyncio.AbstractEventLoop, reward: Reward, answer: JudgedAnswer, timeout: float) -> _Result:
    try:
        (result,) = loop.run_until_complete(score_each(reward, [answer], timeout))
    except BaseException as error:  # a task of the reward's own has ended the loop by SystemExit
        return _Result(0.0, {}, reward.name, describe(error))
    if isinstance(result, RewardFailed):
        return _Result(0.0, {}, result.reward, result.reason)
    return _Result(result.value, result.parts)


class Judge:
    """Makes groups of a prompt's completions, by a reward. Use it as `async with`, or `start` and `close` it.

    A reward that is not `bounded` judges in processes of its own, where each answer may take `timeout` seconds.
    `on_failure` is called with the failure of each episode that is left out; `failures` counts them.
    """

    def __init__(
        self,
        reward: Reward | RewardProcesses,
        tokenizer: Tokenizer,
        on_failure: Callable[[RewardFailed], None] = lambda failed: None,
        timeout: float = 60.0,
    ) -> None:
        self.failures = 0
        if not isinstance(reward, RewardProcesses) and not is_bounded(reward):
            reward = RewardProcesses(partial(_same, reward))
        self._reward, self._tokenizer, self._on_failure, self._timeout = reward, tokenizer, on_failure, timeout

    async def start(self) -> None:
        """Start the first process, if the reward needs one. Raises what makes the reward unusable."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.start()

    async def close(self) -> None:
        """End the processes. Idempotent."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def scores(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score | RewardFailed]:
        """The score of each prompt's completion, or its failure."""
        answers = [
            JudgedAnswer(prompt=prompt, text=self.text(completion), length=len(completion.tokens))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if isinstance(self._reward, RewardProcesses):
            scores = await self._reward.score_each(answers, self._timeout)
        else:
            scores = await score_each(self._reward, answers, self._timeout)
        for each in scores:
            if isinstance(each, RewardFailed):
                self.failures += 1
                self._on_failure(each)
        return scores

    async def evaluate(self, prompt: Prompt, completions: Sequence[Completion]) -> Group | FailedGroup:
        """The group of a prompt's completions; failed if fewer than two of them have a score."""
        scores = await self.scores([prompt] * len(completions), completions)
        episodes = [
            Episode(
                prompt=prompt,
                tokens=completion.tokens,
                logprobs=completion.logprobs,
                versions=completion.versions,
                mask=(True,) * len(completion.tokens),
                reward=score.value,
                finish=completion.finish,
                parts=score.parts,
            )
            for completion, score in zip(completions, scores, strict=True)
            if isinstance(score, Score) and completion.tokens
        ]
        if len(episodes) < 2:
            reasons = tuple(str(each) for each in scores if isinstance(each, RewardFailed))
            return FailedGroup(number=prompt.number, reasons=reasons or ("its completions are empty",))
        return Group(number=prompt.number, prompt=prompt, episodes=tuple(episodes))

    def text(self, completion: Completion) -> str:
        """The words of a completion, without its stop token."""
        tokens = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        return self._tokenizer.decode(tokens)


async def _same(reward: Reward) -> Reward:
    return reward


def reward_of(config: RunConfig, log: Path | None = None) -> Reward | RewardProcesses:
    """The reward of a configuration: one criterion, or the weighted sum of several.

    One with functions or regular expressions of the user's judges in processes, which write to the file `log`.
    """
    bounded = [reward for each in config.reward if (reward := _bounded(each, config)) is not None]
    if len(bounded) == len(config.reward):
        return _rubric(config, bounded)
    return RewardProcesses(partial(make_reward, config), log=log)


async def make_reward(config: RunConfig) -> Reward:
    """Make the reward of a configuration here; its code is imported. Raises `NoSuchCode`, and what that code raises."""
    return _rubric(config, [_bounded(each, config) or _of_the_user(each) for each in config.reward])


def _rubric(config: RunConfig, rewards: Sequence[Reward]) -> Rubric:
    several = len(rewards) > 1
    return Rubric(
        [
            Criterion(f"{each.kind}-{number}" if several else each.kind, each.weight, reward)
            for number, (each, reward) in enumerate(zip(config.reward, rewards, strict=True))
        ]
    )


def _bounded(criterion: CriterionConfig, config: RunConfig) -> Reward | None:
    """The reward of a criterion that runs no code of the user's; None for any other."""
    if criterion.kind == "exact" and not criterion.pattern:
        return ExactMatch()
    if criterion.kind == "length":
        most = config.sampling.max_new_tokens
        return LengthPenalty(most, criterion.margin or most)
    return None


def _of_the_user(criterion: CriterionConfig) -> Reward:
    match criterion.kind:
        case "exact":
            return ExactMatch(criterion.pattern)
        case "format":
            return FormatMatch(criterion.pattern)
        case "python":
            function: Any = load_code(criterion.function)
            return FunctionReward(criterion.function.rpartition(":")[2], function)
        case "length":
            raise AssertionError("it runs no code of the user's")
