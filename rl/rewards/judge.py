"""Judges completions by the reward of a configuration, in processes where it may hang."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess
from holdfast.ft.processes.remote_calls import PackedError, pack_error, unpack_error
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.data.episode import Completion, Episode, Group, Prompt
from holdfast.rl.data.prompts import Tokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.reward import Criterion, ExactMatch, FormatMatch, JudgedAnswer, LengthPenalty, Rubric, Score

MOST_PROCESSES = 8
START_SECONDS = 180.0
"""Seconds in which a process must have made the reward: it may load a model."""

_PATIENCE = 0.05
"""Seconds that answers wait for a process that is busy before another one is forked."""
_SEND_SECONDS = 60.0


class _Judgement:
    """Answers that a thread has judged by one process after another, until they are `given_up`."""

    def __init__(self, answers: Sequence[JudgedAnswer], timeout: float) -> None:
        self.answers, self.timeout = answers, timeout
        self.given_up = False
        self.process: ChildProcess | None = None

    def give_up(self) -> None:
        """Have the thread go on, and end the process."""
        self.given_up = True
        if self.process is not None:
            self.process.kill()


class RewardProcesses:
    """At most `most` processes that judge answers by the rubric that `make` makes, forked as they are needed.

    `make` goes there by cloudpickle. A process that gives no score in time is killed and replaced: that costs the
    answer which it was judging, and no other. `ended` counts the processes that ended so, or by themselves. The
    processes write to the file `log`. A thread waits for each, so that the event loop does not.
    """

    def __init__(self, make: Callable[[], Rubric], *, most: int = MOST_PROCESSES, log: Path | None = None) -> None:
        self.ended = 0
        self._make, self._log = make, log
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="rewards")
        self._idle: queue.LifoQueue[ChildProcess] = queue.LifoQueue()
        self._processes: set[ChildProcess] = set()
        self._changing = threading.Lock()
        self._closed = False
        self._directory: HeldDirectory | None = None

    async def start(self) -> None:
        """Start the first process. Raises what `make` raises there, and `StartFailed`."""
        if not self._processes:
            process = await asyncio.get_running_loop().run_in_executor(self._threads, self._new_process)
            self._idle.put(process)

    async def score_each(self, answers: Sequence[JudgedAnswer], timeout: float) -> list[Score | RewardFailed]:
        """The score of each answer, or its failure; each may take `timeout` seconds."""
        judgement = _Judgement(answers, timeout)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._judge, judgement)
        except asyncio.CancelledError:
            judgement.give_up()
            raise

    async def close(self) -> None:
        """End all processes. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._changing:
            self._closed = True
            for process in self._processes:
                process.kill()  # the threads that wait for one go on
        self._threads.shutdown()
        for process in tuple(self._processes):
            self._end(process)
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _judge(self, judgement: _Judgement) -> list[Score | RewardFailed]:
        results: list[Score | RewardFailed] = []
        while not judgement.given_up and (left := judgement.answers[len(results) :]):
            try:
                judgement.process = process = self._free_process()
            except Exception as error:  # the code of the user's may raise anything as it is imported
                why = f"no process can judge it: {describe(error)}"
                return [*results, *(RewardFailed("reward", each.prompt.number, why) for each in left)]
            if judgement.given_up:  # it may be killed by now
                self._end(process)
            else:
                results += self._ask(process, left, judgement.timeout)
            judgement.process = None
        return results

    def _ask(
        self, process: ChildProcess, answers: Sequence[JudgedAnswer], timeout: float
    ) -> list[Score | RewardFailed]:
        """Results up to the first answer that the process did not come back from, which fails."""
        results: list[Score | RewardFailed] = []
        try:
            process.channel.send(answers)
            results.extend(process.channel.recv(timeout) for _ in answers)  # those before an error stay
        except TimeoutError:
            why = f"no score after {timeout:.3g} s; its process {process.pid} was killed"
        except ChannelClosed:
            why = f"its process ended: {process.epitaph().splitlines()[0]}"
        else:
            self._idle.put(process)
            return results
        self.ended += 1
        self._end(process)
        return [*results, RewardFailed("reward", answers[len(results)].prompt.number, why)]

    def _free_process(self) -> ChildProcess:
        """A process that judges nothing: one that is there, or will be in a moment, or else a new one."""
        busy = len(self._processes) > self._idle.qsize()
        try:
            return self._idle.get(block=busy, timeout=_PATIENCE)
        except queue.Empty:
            return self._new_process()

    def _new_process(self) -> ChildProcess:
        """A process that has made the reward. Raises what that raised there."""
        with self._changing:
            if self._closed:
                raise HoldfastError("the processes of the reward are closed")
            if self._log is None and self._directory is None:
                self._directory = HeldDirectory("holdfast-rewards-")
            log = self._log or (self._directory.path / "rewards.log" if self._directory is not None else Path())
            process = zygote_with(__name__).spawn(partial(_serve, self._make), name="rewards", output=log)
            self._processes.add(process)
        try:
            failure: PackedError | None = process.channel.recv(START_SECONDS)
        except TimeoutError:
            self._end(process)
            late = f"it took more than {START_SECONDS:.3g} s (pid {process.pid})"
            raise HoldfastError(f"the reward was not made: {late}") from None
        except ChannelClosed:
            how = process.epitaph().splitlines()[0]
            self._end(process)
            raise HoldfastError(f"the reward was not made: {how}") from None
        if failure is None:
            return process
        self._end(process)
        error = unpack_error(failure)
        # SystemExit of a user's module must not end this process too.
        raise error if isinstance(error, Exception) else HoldfastError(f"the reward was not made: {describe(error)}")

    def _end(self, process: ChildProcess) -> None:
        process.close()
        with self._changing:
            self._processes.discard(process)


def _serve(make: Callable[[], Rubric], channel: ProcessChannel) -> None:
    """Judge batch after batch, until the parent closes its end."""
    try:
        rubric = make()
    except BaseException as error:
        channel.send(pack_error(error))
        return
    channel.send(None)
    while True:
        try:
            answers: Sequence[JudgedAnswer] = channel.recv()
        except ChannelClosed:
            return
        for answer in answers:
            channel.send(rubric.score(answer), _SEND_SECONDS)


class Judge:
    """Makes groups of a prompt's completions, by a reward. `start` it before use, and `close` it.

    A rubric is quick, and judges here. In processes each answer may take `timeout` seconds. `on_failure` is called
    with the failure of each episode that is left out; `failures` counts them.
    """

    def __init__(
        self,
        reward: Rubric | RewardProcesses,
        tokenizer: Tokenizer,
        on_failure: Callable[[RewardFailed], None] = lambda failed: None,
        timeout: float = 60.0,
    ) -> None:
        self.failures = 0
        self._reward, self._tokenizer, self._on_failure, self._timeout = reward, tokenizer, on_failure, timeout

    async def start(self) -> None:
        """Start the first process, if the reward needs one. Raises what makes the reward unusable."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.start()

    async def close(self) -> None:
        """End the processes. Idempotent."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.close()

    async def scores(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score | RewardFailed]:
        """The score of each prompt's completion, or its failure."""
        answers = [
            JudgedAnswer(prompt=prompt, text=self.text(completion), length=len(completion.tokens))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if isinstance(self._reward, RewardProcesses):
            scores = await self._reward.score_each(answers, self._timeout)
        else:
            scores = [self._reward.score(each) for each in answers]
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


def reward_of(config: RunConfig, log: Path | None = None) -> Rubric | RewardProcesses:
    """The reward of a configuration: one criterion, or the weighted sum of several.

    One with functions or regular expressions of the user's, which may run for ever, judges in processes, which write
    to the file `log`.
    """
    if any(each.kind == "python" or each.pattern for each in config.reward):
        return RewardProcesses(partial(rubric_of, config), log=log)
    return rubric_of(config)


def rubric_of(config: RunConfig) -> Rubric:
    """Make the reward of a configuration here; its code is imported. Raises `NoSuchCode`, and what that code raises."""
    several = len(config.reward) > 1
    return Rubric(
        [
            Criterion(f"{each.kind}-{number}" if several else each.kind, each.weight, _function(each, config))
            for number, each in enumerate(config.reward)
        ]
    )


def _function(criterion: CriterionConfig, config: RunConfig) -> Callable[[JudgedAnswer], float]:
    match criterion.kind:
        case "exact":
            return ExactMatch(criterion.pattern)
        case "format":
            return FormatMatch(criterion.pattern)
        case "length":
            most = config.sampling.max_new_tokens
            return LengthPenalty(most, criterion.margin or most)
        case "python":
            function: Callable[[JudgedAnswer], float] = load_code(criterion.function)
            return function
