"""The steps of one trainer in its session: takes batches, updates the policy, publishes committed versions.

Version v of the weights is that after v updates. It is published at the beginning of the next attempt, by the members
of its epoch, and the attempt of a publisher ends once its part outlives it. No update is lost with a publisher, but a
version may be: if it dies amid a step that the others commit, the version after that step is the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import xxhash

from holdfast import ft
from holdfast.comms import Communicator
from holdfast.comms.errors import HoldfastError, Mismatch, Revoked, StaleEpoch
from holdfast.ft.console.units import counted
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.replay_buffer import BufferState, StepReport
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch, TrainingTokens, decode_state, updates_of
from holdfast.rl.telemetry import WorkLog
from holdfast.rl.trainers.layouts import ReplicatedLayout, ShardedLayout, UpdateResult
from holdfast.rl.trainers.titan import TitanLayout
from holdfast.store import WeightStore

Take = Callable[[int, Callable[[], None]], EncodedBatch]
"""Returns the batch that begins with an update; calls the function meanwhile, which raises if the epoch is over."""


class BadBatch(HoldfastError):
    """A batch that cannot be trained on, or did not come; the step is not committed."""

    def __init__(self, step: int, why: str) -> None:
        self.step, self.why = step, why
        super().__init__(f"the batch of step {step} cannot be trained on: {why}")


def weights_digest(state: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that depend on every bit of a state dict of tensors; collective if they are sharded."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class LoopState:
    """What trainers share beside the policy. Checkpoints have it, and trainers that join get it from the others.

    `after` is the state of the replay buffer after the last committed batch that came with one. `old` are the
    log-probabilities of the later updates of the batch that begins with update `step`, under the policy before its
    first one: the old policy.
    """

    def __init__(self) -> None:
        self.after, self.step, self.old = b"", -1, list[torch.Tensor]()

    @property
    def buffer(self) -> BufferState | None:
        """The replay buffer; None before the first batch."""
        return decode_state(self.after) if self.after else None

    def state_dict(self) -> dict[str, Any]:
        """All of it, the buffer as JSON."""
        return {"buffer": self.after.decode(), "step": self.step, "old": self.old}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.after, self.step, self.old = state["buffer"].encode(), state["step"], list(state["old"])


class Training:
    """All steps of one trainer, which begin with the policy `source`. `take` gives batches. `close` it after use.

    One version at a time is published to `store`, if there is one, in a thread of its own. `report` is called for each
    batch that is committed, `begun` with the step of the first attempt and the buffer that was saved with it, in a run
    that goes on. With a folder `checkpoints`, all state is saved there.
    """

    def __init__(
        self,
        config: RunConfig,
        source: ModelSource,
        store: WeightStore | None,
        take: Take,
        report: Callable[[StepReport], None] = lambda _: None,
        begun: Callable[[int, BufferState | None], None] = lambda *_: None,
        work: WorkLog | None = None,
        checkpoints: str = "",
    ) -> None:
        self._config, self._store, self._checkpoints = config, store, checkpoints
        self._work = work or WorkLog()
        self._take, self._report, self._begun = take, report, begun
        sharded = TitanLayout if config.trainer.kind == "titan" else ShardedLayout
        layout: Callable[[RunConfig, ModelSource, WorkLog], ReplicatedLayout | ShardedLayout]
        layout = sharded if config.trainer.strategy == "fsdp2" else ReplicatedLayout
        self._layout = layout(config, source, self._work)
        self._state = LoopState()
        # Else the old policy is the generator's, or the present one.
        self._old_wanted = config.objective.truncation > 0 and config.algorithm.updates > 1
        self._old: list[torch.Tensor] = []
        self._batch: tuple[EncodedBatch, list[TrainingTokens]] | None = None
        self._losses: list[float] = []
        self._published: tuple[int, int] = (-1, 0)
        self._publications = ThreadPoolExecutor(1, thread_name_prefix="publish-weights")
        self._publication: tuple[int, int, Future[None]] | None = None

    def run(self, session: ft.Session) -> str:
        """Do the session's steps until all batches are committed and their last version is published.

        Returns the digest of the last weights, "" for a spare that was not needed. Raises `NonFiniteLoss`, `BadBatch`,
        and the errors of the session and the store.
        """
        config, begun, digest = self._config, False, ""
        torch.set_num_threads(1)
        self._layout.attach(session)
        session.attach("loop", self._state)
        if self._checkpoints:
            session.checkpoints(self._checkpoints, every=config.checkpoint_steps, last=config.steps)
        for attempt in session.steps(config.steps + 1):
            if not begun:
                begun = True
                self._begun(attempt.step, self._state.buffer)
            result: UpdateResult | None = None
            with attempt:
                self._publish(attempt)
                if attempt.step < config.steps:
                    result = self._update(attempt)
                else:
                    digest = weights_digest(self._layout.state())
                    self._finish_publication()
            if attempt.committed and attempt.step < config.steps:
                self._layout.committed(attempt.step)
                if result is not None:
                    self._committed(attempt, result)
        return digest

    def _update(self, attempt: ft.Attempt) -> UpdateResult:
        part = attempt.step % self._config.algorithm.updates
        updates = self._updates(attempt.step - part, attempt)
        update = updates[part]
        if self._old_wanted and part:
            if self._state.step != attempt.step - part:
                raise BadBatch(attempt.step - part, f"it is joined at its update {part + 1}, without its old policy")
            update = replace(update, old_logprobs=self._state.old[part - 1])
        elif self._old_wanted:
            self._old = self._old_logprobs(attempt, updates[1:])

        def forwards(shard: int) -> list[TrainingTokens]:
            return update.shard(shard, attempt.total_shards, self._config.trainer.micro_batch)

        return self._layout.attempt(attempt, forwards, self._finish_publication)

    def _old_logprobs(self, attempt: ft.Attempt, updates: Sequence[TrainingTokens]) -> list[torch.Tensor]:
        """The log-probabilities of these updates under the policy now, through the calls of an update; collective."""
        shards, micro_batch = attempt.total_shards, self._config.trainer.micro_batch

        def tokens(shard: int) -> list[TrainingTokens]:
            return [each for update in updates for each in update.shard(shard, shards, micro_batch)]

        found = self._layout.logprobs(attempt, tokens)
        joined, begin = [], 0
        for update in updates:
            end = begin + len(update.shard(0, shards, micro_batch))
            mine = {shard: parts[begin:end] for shard, parts in found.items()}
            joined.append(update.joined(shards, micro_batch, mine))
            attempt.comm.all_reduce(joined[-1])  # each row is zero on all ranks but one: exact in any order
            begin = end
        return joined

    def _updates(self, step: int, attempt: ft.Attempt) -> list[TrainingTokens]:
        """The updates of the batch that begins with update `step`."""
        if self._batch is None or self._batch[0].step != step:
            batch = self._take(step, partial(_raise_if_over, attempt.comm))
            updates = self._config.algorithm.updates
            if len(batch.columns) < updates:
                raise BadBatch(step, f"it has {counted(len(batch.columns), 'group')}, and makes {updates} updates")
            self._batch = batch, updates_of(batch.columns, updates, self._config.objective)
        return self._batch[1]

    def _committed(self, attempt: ft.Attempt, result: UpdateResult) -> None:
        part = attempt.step % self._config.algorithm.updates
        if self._old_wanted:
            last = part == self._config.algorithm.updates - 1
            self._state.step = -1 if last else attempt.step - part
            self._state.old = [] if last else self._state.old if part else self._old
        self._losses = [*(self._losses if part else []), result.loss]
        if part < self._config.algorithm.updates - 1:
            return
        assert self._batch is not None
        if self._batch[0].after:
            self._state.after = self._batch[0].after
        figures = {
            "loss": sum(self._losses) / len(self._losses),
            "gradient_norm": result.norm,
            "trainers": float(attempt.comm.size),
            "epoch": float(attempt.epoch),
        }
        self._report(StepReport(step=self._batch[0].step, version=attempt.step + 1, figures=figures))

    def _publish(self, attempt: ft.Attempt) -> None:
        """Begin to publish the weights before this attempt, unless they are published, or in the middle of a batch."""
        version = attempt.step
        between = version % self._config.algorithm.updates
        if self._store is None or between or self._published == (version, attempt.epoch):
            return
        if self._published[1] != attempt.epoch:  # the members of an earlier epoch may have published this version
            seen = torch.zeros(1, dtype=torch.int64, device="cpu")
            if attempt.rank == 0:
                seen.fill_(_visible(self._store, version))
            attempt.comm.broadcast(seen, src=0)
            if bool(seen):
                self._published = version, attempt.epoch
                return
        state = self._layout.state()
        if self._layout.publishes(attempt.rank):
            self._finish_publication()
            publication = self._publications.submit(self._publish_part, self._store, version, state, attempt.epoch)
            self._publication = version, attempt.epoch, publication
        self._published = version, attempt.epoch

    def _publish_part(self, store: WeightStore, version: int, state: Mapping[str, Any], epoch: int) -> None:
        with self._work.doing("publish", version):
            store.publish(version, state, fence=epoch)

    def _finish_publication(self) -> None:
        """Wait until this rank's part outlives this process: then its tensors may change.

        Raises the store's errors, `Revoked` if the epoch is over.
        """
        if self._publication is None:
            return
        (version, epoch, publication), self._publication = self._publication, None
        try:
            publication.result()
        except StaleEpoch as error:
            raise Revoked(epoch, str(error)) from error
        except Mismatch:
            if self._store is None or not _visible(self._store, version):
                raise  # else members of the epoch before had published all of it after all

    def close(self) -> None:
        """Wait for the open publication, and leave the store. Idempotent."""
        self._publications.shutdown()
        if self._store is not None:
            self._store.close()


def _visible(store: WeightStore, version: int) -> bool:
    """Whether readers can read this version, or there is a later one."""
    newest = store.latest()
    return newest is not None and newest >= version


def _raise_if_over(comm: Communicator) -> None:
    """End a wait that is no op with the epoch: raise what ended its communicator."""
    if (over := comm.over) is not None:
        raise over.again()
