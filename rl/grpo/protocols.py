"""What the algorithm uses: each protocol has an implementation in the packages above, and fakes in the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from holdfast.rl.data.episode import Completion, Episode, Group, Prompt, SamplingRequest
from holdfast.rl.data.replay_buffer import Batch, FailedGroup


class Data(Protocol):
    """The prompts of a run, each once."""

    async def sample(self) -> Prompt:
        """The next prompt, once its group may begin."""
        ...


class Generation(Protocol):
    """The endpoint of the policy that draws completions."""

    async def route(self, request: SamplingRequest, /) -> Sequence[Completion]:
        """The completions of a request, by any one replica."""
        ...


class WeightUpdate(Protocol):
    """The endpoint of the policy that switches its weights."""

    async def fanout(self, version: int, /) -> object:
        """Return once all replicas serve `version`."""
        ...


class Policy(Protocol):
    """The replicas that generate."""

    @property
    def generate(self) -> Generation:
        """Draws completions."""
        ...

    @property
    def update(self) -> WeightUpdate:
        """Switches weights."""
        ...


class Evaluator(Protocol):
    """Makes a group of a prompt's completions: by a reward, or by an environment."""

    async def evaluate(self, prompt: Prompt, completions: Sequence[Completion], /) -> Group | FailedGroup:
        """The group with rewards."""
        ...


class Buffer(Protocol):
    """The groups between generation and training, with the bound on their staleness."""

    @property
    def admissible(self) -> int:
        """How many groups may begin now."""
        ...

    @property
    def required_version(self) -> int | None:
        """The exact version that groups must be drawn with, if any."""
        ...

    async def add(self, group: Group | FailedGroup, /) -> None:
        """Add a group that was begun."""
        ...

    async def take(self, step: int, /) -> Batch:
        """Wait for the batch that begins with update `step`."""
        ...

    def commit(self) -> None:
        """The batch is trained."""
        ...

    def serve(self, version: int, /) -> None:
        """All replicas of the policy serve `version`."""
        ...


class GroupNumbers(Protocol):
    """The numbers of a run's groups, each once."""

    async def sample(self) -> int:
        """The next number, once its group may begin."""
        ...


class GroupInPlay(Protocol):
    """The episodes of one group, which begin with the same prompt and are played turn by turn together."""

    @property
    def waiting(self) -> Mapping[int, tuple[int, ...]]:
        """All tokens so far of each episode that waits for the policy, by its place in the group."""
        ...

    async def act(self, completions: Sequence[Completion], /) -> None:
        """Take a turn of the policy in each episode of `waiting`, in that order."""
        ...

    def episodes(self) -> Sequence[Episode]:
        """The episodes that did not fail, once nothing is waiting."""
        ...

    def result(self) -> Group | FailedGroup:
        """The group of these episodes."""
        ...


class Games(Protocol):
    """Begins the groups of a run."""

    def begin(self, number: int, /) -> AbstractAsyncContextManager[GroupInPlay]:
        """Play the group of a number; what follows depends on the number and the policy alone."""
        ...

    def held_out(self, first: int, count: int, /) -> AbstractAsyncContextManager[GroupInPlay]:
        """Play episodes that no group has, each from a prompt of its own."""
        ...


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a trained batch gave: the weights' version after it, and named figures such as `loss`."""

    step: int
    version: int
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)


class Trainer(Protocol):
    """Trains the policy."""

    async def step(self, batch: Batch, /) -> StepReport:
        """Train a batch; returns once the new weights are committed."""
        ...


class Evaluation(Protocol):
    """Evaluates weights beside training."""

    async def begin(self, version: int, /) -> None:
        """Begin to evaluate `version`, if it is due."""
        ...

    async def settle(self) -> None:
        """Wait for what was begun."""
        ...
