"""Prompts in their order, episodes without contradictions, and a buffer that keeps its bound under any schedule."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.rl.data.episode import Completion, Episode, Group, Prompt, SamplingRequest
from holdfast.rl.data.prompts import (
    CharacterTokenizer,
    Problem,
    PromptSource,
    arithmetic_held_out,
    arithmetic_training,
    read_problems,
)
from holdfast.rl.data.replay_buffer import Batch, BufferState, FailedGroup, Permit, ReplayBuffer, StalenessRule
from holdfast.rl.errors import BadDataset, BufferStalled, InvalidEpisode, OutOfOrder, StaleGroup, StalenessUnreachable
from holdfast.rl.grpo.batch import decode_state
from support.rl.small_batches import episode, group_of

TOKENIZER = CharacterTokenizer()


@given(count=st.integers(1, 30), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_an_epoch_holds_every_problem_once(count: int, seed: int, epoch: int) -> None:
    problems = [Problem(f"{number}=") for number in range(count)]
    source = PromptSource(problems, TOKENIZER, seed)
    prompts = [source.prompt(number) for number in range(epoch * count, (epoch + 1) * count)]
    assert sorted(each.text for each in prompts) == sorted(each.prompt for each in problems)
    assert [each.number for each in prompts] == list(range(epoch * count, (epoch + 1) * count))
    assert prompts == [PromptSource(problems, TOKENIZER, seed).prompt(each.number) for each in prompts]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        source = PromptSource(arithmetic_training(), TOKENIZER, seed)
        return tuple(source.prompt(epoch * len(source) + place).text for place in range(len(source)))

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_the_arithmetic_task_holds_out_problems_that_are_never_trained_on() -> None:
    trained, held_out = (
        {each.prompt for each in problems} for problems in (arithmetic_training(), arithmetic_held_out())
    )
    assert trained and held_out and not trained & held_out
    for each in (*arithmetic_training(), *arithmetic_held_out()):
        assert int(each.answer) == sum(map(int, each.prompt.rstrip("=").split("+")))
    assert TOKENIZER.decode(TOKENIZER.encode("7+8+5= \n")) == "7+8+5= \n"


def test_problems_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "03"}\n\n{"prompt": "9+9="}\n')
    assert read_problems(path) == (Problem("1+2=", "03"), Problem("9+9="))


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"prompt": "1="}\n{"prompt": 2}\n', r"sums.jsonl:2: .*Expected `str`, got `int`"),
        ('{"prompt": "1=", "reply": "x"}', r"sums.jsonl:1: .*reply"),
        ("{", r"sums.jsonl:1: not a line"),
        ("\n", "no prompts"),
        (None, r"sums.jsonl: cannot be read: No such file"),
    ],
)
def test_a_bad_line_or_a_missing_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "sums.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadDataset, match=words):
        read_problems(path)


def test_a_prompt_that_the_tokenizer_does_not_know_is_named() -> None:
    with pytest.raises(BadDataset, match=r"sums: the tokenizer cannot encode prompt 2, 'a='"):
        PromptSource([Problem("1="), Problem("a=")], TOKENIZER, 0, "sums")
    with pytest.raises(BadDataset, match="has no tokens"):
        PromptSource([Problem("")], TOKENIZER, 0)
    with pytest.raises(BadDataset, match="no prompts"):
        PromptSource([], TOKENIZER, 0)


PROMPT = Prompt(number=7, tokens=(1, 2), text="1+2=", answer="3")
COMPLETION = Completion(tokens=(3, 4), logprobs=(-0.5, 0.0), versions=(5, 6), finish="stop")
EPISODE = Episode(
    prompt=PROMPT,
    tokens=(3, 9, 4),
    logprobs=(-0.5, 0.0, -1.0),
    versions=(6, 0, 5),
    mask=(True, False, True),
    reward=1.0,
    finish="stop",
    turns=2,
    parts={"exact": 1.0},
)
GROUP = Group(number=0, prompt=PROMPT, episodes=(EPISODE,))
REQUEST = SamplingRequest(prompts=((1,), (2, 3)), samples=2, seeds=(1, 2, 3, 4), max_new_tokens=8, temperature=1.0)


def test_the_version_of_a_group_is_that_of_its_oldest_policy_token() -> None:
    assert GROUP.version == 5, "0 belongs to the environment's token"


@pytest.mark.parametrize(
    "value, wrong, words",
    [
        (PROMPT, {"number": -1}, "negative"),
        (PROMPT, {"tokens": ()}, "no tokens"),
        (PROMPT, {"tokens": (1, -1)}, "token number -1"),
        (COMPLETION, {"logprobs": (0.0,)}, "tokens has length 2, logprobs has 1"),
        (COMPLETION, {"versions": (1, 2, 3)}, "versions has 3"),
        (COMPLETION, {"logprobs": (0.0, math.nan)}, "logprobs holds nan"),
        (COMPLETION, {"finish": "aborted"}, "let it go on, or draw it again"),
        (EPISODE, {"mask": (True,)}, "prompt 7: tokens has length 3, mask has 1"),
        (EPISODE, {"reward": math.inf}, "reward holds inf"),
        (EPISODE, {"reward": -1e39}, "reward"),
        (EPISODE, {"parts": {"exact": math.nan}}, "parts holds nan"),
        (EPISODE, {"turns": 0}, "turns=0"),
        (GROUP, {"episodes": ()}, "no episode"),
        (GROUP, {"number": -1}, "number is -1"),
        (GROUP, {"prompt": Prompt(number=8, tokens=(1,))}, "another prompt"),
        (REQUEST, {"seeds": (1,)}, "1 seeds, and 4 samples"),
        (REQUEST, {"seeds": (1, 2, 3, 1 << 64)}, "64 bits"),
        (REQUEST, {"seeds": (1, 2, 3, -1)}, "64 bits"),
        (REQUEST, {"samples": 0}, "samples=0"),
        (REQUEST, {"prompts": ((1,), ())}, "without tokens"),
        (REQUEST, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (REQUEST, {"temperature": math.nan}, "temperature"),
        (REQUEST, {"top_p": 0.0}, "top_p"),
        (REQUEST, {"stop": (-5,)}, "token number -5"),
    ],
)
def test_a_contradiction_is_refused_by_name(value: msgspec.Struct, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEpisode, match=words):
        msgspec.structs.replace(value, **wrong)


def test_a_contradiction_in_bytes_is_refused_too() -> None:
    wild = msgspec.msgpack.encode({"tokens": [1], "logprobs": [], "versions": [1], "finish": "stop"})
    with pytest.raises(InvalidEpisode):
        msgspec.msgpack.decode(wild, type=Completion)


def group(number: int, version: int) -> Group:
    return group_of(episode(Prompt(number=number, tokens=(1,)), (1,), version=version))


class Schedules(RuleBasedStateMachine):
    """Generators that begin, finish and fail in any order, beside a trainer, with processes that end and resume.

    The model holds what the trainer did, and the checkpoint that it wrote with each batch.
    """

    @initialize(groups=st.integers(1, 4), updates=st.integers(1, 3), extra=st.integers(0, 4))
    def start(self, groups: int, updates: int, extra: int) -> None:
        self.rule = StalenessRule(groups=groups, bound=updates - 1 + extra, updates=updates)
        self.state = BufferState(rule=self.rule)
        self.trained: list[int] = []
        self.failed: set[int] = set()
        self.checkpoint = (self.state, list(self.trained), set(self.failed))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.state.in_flight)))

    @precondition(lambda self: self.state.admissible)
    @rule()
    def begin(self) -> None:
        lost = self.state.again
        begun = self.state.begin()
        assert begun is not None
        self.state, permit = begun
        assert permit.version == self.state.served
        assert permit.number == (lost[0] if lost else self.state.begun - 1)

    @rule()
    def begin_all(self) -> None:
        while self.state.admissible:
            self.begin()

    @precondition(lambda self: self.state.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """With the permit's version or any later one that the generator may have received since."""
        number = self.pick(data)
        least = self.state.in_flight[number]
        newest = max(least, self.state.batch * self.rule.updates)
        self.state = self.state.finish(group(number, data.draw(st.integers(least, newest))))

    @precondition(lambda self: self.state.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = self.pick(data)
        self.state = self.state.fail(number)
        self.failed.add(number)

    @precondition(lambda self: self.state.served < self.state.batch * self.rule.updates)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        newest = self.state.batch * self.rule.updates
        self.state = self.state.serve(data.draw(st.integers(self.state.served, newest)))

    @rule(commit=st.booleans(), serve=st.booleans())
    def train(self, commit: bool, serve: bool) -> None:
        """Take the next batch if it is ready; train it, write a checkpoint and publish, or stop between these."""
        taken = self.state.take(self.state.batch)
        if taken is None:
            return
        assert taken.take(self.state.batch) is taken, "taking it again gives the same batch"
        self.state = taken
        if commit:
            self.commit()
            if serve:
                self.state = self.state.serve(self.state.batch * self.rule.updates)

    @precondition(lambda self: self.state.taken)
    @rule()
    def commit(self) -> None:
        self.check_batch(self.state)
        self.trained += [each.number for each in self.state.batch_groups()]
        self.state = self.state.commit()
        self.checkpoint = (self.state, list(self.trained), set(self.failed))

    @rule()
    def resume(self) -> None:
        """The process is killed; the next one begins from the last checkpoint, of weights and buffer together."""
        state, self.trained, self.failed = self.checkpoint[0], list(self.checkpoint[1]), set(self.checkpoint[2])
        self.state = decode_state(msgspec.json.encode(state)).resumed()

    @rule()
    def look_ahead(self) -> None:
        """Once publication and generators have caught up, batch after batch fills in time: nothing waits for ever."""
        state = self.state
        for _ in range(self.rule.bound + 2):
            state = state.serve(max(state.served, state.batch * self.rule.updates))
            while (taken := state.take(state.batch)) is None:
                if state.in_flight:
                    state = state.finish(group(*max(state.in_flight.items())))
                else:
                    begun = state.begin()
                    assert begun is not None, f"the batch does not fill: {state}"
                    state = begun[0]
            self.check_batch(taken)
            state = taken.commit()

    def check_batch(self, taken: BufferState) -> None:
        groups = taken.batch_groups()
        numbers = [each.number for each in groups]
        assert len(groups) == self.rule.groups
        assert numbers == sorted(numbers)
        last = (taken.batch + 1) * self.rule.updates - 1
        assert all(last - each.version <= self.rule.bound for each in groups)
        batch = Batch(step=taken.batch * self.rule.updates, groups=groups, after=taken.commit())
        assert min(batch.staleness) >= 0 and max(batch.staleness) <= self.rule.bound

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        state = self.state
        places = [*self.trained, *self.failed, *state.again]
        places += [*state.in_flight, *state.ready]
        assert sorted(places) == list(range(state.begun))
        assert len(self.trained) == state.batch * self.rule.groups
        assert len(self.failed) == state.failed

    @invariant()
    def it_is_bounded(self) -> None:
        outstanding = len(self.state.again) + len(self.state.in_flight) + len(self.state.ready)
        assert outstanding <= self.rule.groups * (self.rule.bound + 2)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(stateful_step_count=60)


def test_the_staleness_of_a_group_is_that_of_the_update_that_trains_it() -> None:
    """With several updates a batch, the weights move on under the groups that are trained last."""
    rule = StalenessRule(groups=8, bound=5, updates=4)
    batch = Batch(step=8, groups=tuple(group(number, 6) for number in range(8)), after=BufferState(rule=rule, batch=3))
    assert batch.staleness == (2, 2, 3, 3, 4, 4, 5, 5)


def test_to_wait_only_for_groups_that_are_due_now_would_not_do() -> None:
    """The example of the proof: prompt 3 may not take the place that 1 or 2 will need."""
    state = BufferState(rule=StalenessRule(groups=1, bound=2))
    for _ in range(3):
        state, _ = state.begin() or pytest.fail("three groups may begin at version 0")
    assert state.begin() is None
    state = state.finish(group(0, 0)).take(0) or pytest.fail("prompt 0 is ready")
    state = state.commit().serve(1)
    state, permit = state.begin() or pytest.fail("version 1 admits one more")
    state = state.finish(group(permit.number, 1))
    assert state.take(1) is None, "both 1 and 2 would be due in batch 2"
    assert (state.finish(group(2, 0)).take(1) or state).taken == (2,)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"groups": 4, "bound": 1, "updates": 3}, "raise the bound to at least 2"),
        ({"groups": 0}, "at least 1"),
        ({"groups": 1, "bound": -1}, "at least 0"),
    ],
)
def test_a_batch_that_can_never_fill_is_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(StalenessUnreachable, match=words):
        StalenessRule(**wrong)


def test_an_impossible_order_is_refused() -> None:
    state, _ = BufferState(rule=StalenessRule(groups=1)).begin() or pytest.fail("the first may begin")
    with pytest.raises(OutOfOrder, match="prompt 5 is not in flight"):
        state.finish(group(5, 0))
    with pytest.raises(OutOfOrder, match="the next one is 0"):
        state.take(1)
    with pytest.raises(OutOfOrder, match="was not taken"):
        state.commit()
    with pytest.raises(OutOfOrder, match="do not go back"):
        state.serve(3).serve(2)
    with pytest.raises(OutOfOrder, match="over already"):
        state.finish(group(0, 0)).finish(group(0, 0))


def test_a_token_older_than_its_permit_is_refused() -> None:
    state = BufferState(rule=StalenessRule(groups=1), served=4, batch=4, begun=4)
    state, permit = state.begin() or pytest.fail("one may begin")
    with pytest.raises(StaleGroup, match="version 3"):
        state.finish(group(permit.number, 3))


async def test_waiting_tasks_go_on_when_they_may() -> None:
    buffer = ReplayBuffer(StalenessRule(groups=2, bound=1), patience=60.0)
    permits = [await buffer.admit() for _ in range(4)]
    assert [each.number for each in permits] == [0, 1, 2, 3]
    assert buffer.admissible == 0
    fifth = asyncio.create_task(buffer.admit())
    batch = asyncio.create_task(buffer.take(0))
    await buffer.add(FailedGroup(number=1, reasons=("no answer",)))
    assert (await fifth).number == 4, "another one begins in the place of one that failed"
    for number in (3, 0):
        await buffer.add(group(number, 0))
    taken = await batch
    assert [each.number for each in taken.groups] == [0, 3]
    assert (await buffer.take(0)) == taken
    later = asyncio.create_task(buffer.admit())
    buffer.commit()
    assert buffer.state() == taken.after
    assert ReplayBuffer.from_state(taken.after).state().again == (2, 4)
    buffer.serve(1)
    assert (await later).version == 1
    assert buffer.state().failed == 1


async def test_a_generation_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    buffer = ReplayBuffer(StalenessRule(groups=1), patience=20.0)
    await buffer.admit()
    first, second = (asyncio.create_task(buffer.admit()) for _ in range(2))
    await asyncio.sleep(0)
    await buffer.add(FailedGroup(number=0, reasons=("no answer",)))
    first.cancel()
    assert (await second).number == 1
    assert first.cancelled()
    third, fourth = (asyncio.create_task(buffer.admit()) for _ in range(2))
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.wait([third])
    await buffer.add(FailedGroup(number=1, reasons=("no answer",)))
    assert (await fourth).number == 2


async def test_a_change_wakes_no_more_tasks_than_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    begin = BufferState.begin

    def counted(state: BufferState) -> tuple[BufferState, Permit] | None:
        tries.append(state.batch)
        return begin(state)

    monkeypatch.setattr(BufferState, "begin", counted)
    buffer = ReplayBuffer(StalenessRule(groups=8), patience=20.0)
    for _ in range(8):
        await buffer.admit()
    waiting = [asyncio.create_task(buffer.admit()) for _ in range(40)]
    batch = asyncio.create_task(buffer.take(0))
    await asyncio.sleep(0)
    tries.clear()
    for number in range(8):
        await buffer.add(group(number, 0))
        await asyncio.sleep(0)
    assert len((await batch).groups) == 8
    assert tries == [], "no generation may begin yet"
    buffer.commit()
    buffer.serve(1)
    done, left = await asyncio.wait(waiting, timeout=0.05)
    assert (len(done), len(left)) == (8, 32)
    assert len(tries) <= 16
    for each in left:
        each.cancel()
    await asyncio.wait(left)


async def test_on_policy_groups_need_the_exact_version() -> None:
    rules = (StalenessRule(groups=1), StalenessRule(groups=1, bound=1), StalenessRule(groups=1, bound=1, updates=2))
    assert [ReplayBuffer(each).required_version for each in rules] == [0, None, 0]


async def test_a_stalled_buffer_is_an_error_that_says_what_it_waits_for() -> None:
    buffer = ReplayBuffer(StalenessRule(groups=1), patience=0.01)
    with pytest.raises(BufferStalled, match=r"step 0 waits for its groups.*0 in flight"):
        await buffer.take(0)
    await buffer.admit()
    with pytest.raises(BufferStalled, match=r"a generation waits to begin.*1 in flight"):
        await buffer.admit()
