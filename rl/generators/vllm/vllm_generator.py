"""`VllmGenerator`: an actor that draws completions with vLLM, in an interpreter that has it (`make extra-vllm`)."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.ft.launch.held_directory import HeldDirectory, remove_left
from holdfast.rl.actors.engine import endpoint
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, Finish, SamplingRequest
from holdfast.rl.data.prompts import seed_of
from holdfast.rl.generators.errors import (
    BadRequest,
    GenerationTimeout,
    GeneratorClosed,
    GeneratorNotReady,
    UpdateFailed,
    VersionGone,
)
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.generators.transformers_generator import RequestLimits, await_visible, new_reader
from holdfast.rl.telemetry import WorkLog, WorkReport, processor_with_descendants
from holdfast.store import Follower, Layout, WeightStore

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the actor's process has threads, which a fork would lose
}
ON_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # compilation costs 20 s at the start
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, the threads of all replicas would share the first core
    "VLLM_TARGET_DEVICE": "cpu",  # else vLLM's wheel for GPUs finds no platform
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else even one worker is a process below the engine's, which starts too
}

FILES = "holdfast-vllm-"
"""The prefix of the folder for temporary files of a generator and vLLM's processes."""

CUT_OFF = "abort"
"""What vLLM says of a sample that was cut off; the others are "stop" and "length"."""

Draw = Callable[[tuple[int, ...], int, int], Awaitable[Any]]
"""Draws a sample after a prompt, from a seed, of at most so many tokens; returns vLLM's output."""


class VllmGenerator:
    """A generator: its methods are the endpoints of an actor. `generate` may be called twice.

    `source` is the model, `store` the URL of the store that its weights come from: it serves nothing before the first
    `update`. As a `reader` it needs none: it serves what `switch` commits, and its process
    ends if that cannot be loaded. Raises `ModelMisfit` if the model cannot serve, `Unsupported` where vLLM is not
    installed.
    """

    def __init__(
        self,
        source: ModelSource,
        store: str,
        config: RunConfig = RunConfig(),  # noqa: B008  (frozen)
        reader: bool = False,
    ) -> None:
        self._config, timeout = config.generator, config.generator.timeout
        self._store = WeightStore(store, hold=False)
        self._follower: Follower | None = None
        self._files = HeldDirectory(FILES, removing=_remove_segments)
        try:
            with _temporary_files_in(self._files.path):
                self._engine = _engine(source, config, self._files.path)
            _note_segments(self._files.path)
            if reader:  # of no tensors: those of vLLM's workers can only be filled while it stands still
                self._follower = self._store.follow({}, reader=new_reader(), strict=False, timeout=timeout)
        except BaseException:
            self._store.close()
            self._files.close()
            raise
        self._watching: asyncio.Task[None] | None = None
        self._catching_up = threading.Lock()
        self._closed = threading.Event()
        watch = threading.Thread(
            target=_end_with, args=(multiprocessing.active_children(), self._closed), name="watch-vllm", daemon=True
        )
        watch.start()
        model = self._engine.model_config
        self._limits = RequestLimits(int(model.max_model_len), int(model.get_vocab_size()))
        self._url, self._joined = store, False
        self._served: int | None = None
        self._digests: tuple[bytes, ...] = ()
        self._failure: HoldfastError | None = None
        self._updating = asyncio.Lock()
        self._exact = 0
        self._no_exact = asyncio.Event()
        self._no_exact.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._work = WorkLog(processor_with_descendants)
        self._drawing = 0
        """The requests that are drawn: one span of work, from the first to the last, which updates divide."""

    @endpoint(idempotent=True)
    async def generate(self, request: SamplingRequest) -> list[Completion]:
        """The completions of a request, those of one prompt side by side, with the version of each token.

        If the request names a version, wait for exactly that one. Raises `GeneratorNotReady`, `VersionGone`,
        `BadRequest`, `GenerationTimeout`, `GeneratorClosed`, and `StoreTimeout` if the version does not come.
        """
        self._check(request)
        deadline = time.monotonic() + self._config.timeout
        try:
            async with asyncio.timeout(self._config.timeout):
                await self._keep_up()
                if request.version is None:
                    return await self._draw_all(request)
                async with self._exactly(request.version, deadline):
                    return await self._draw_all(request)
        except TimeoutError as error:
            raise GenerationTimeout(self._config.timeout, len(request.seeds)) from error

    async def update(self, version: int) -> int:
        """Read a version and serve it, unless a newer one is served; returns its number.

        If that fails, the generator is not ready, and what it was drawing is cut off, until an update worked. Raises
        `UpdateFailed`, `VersionGone`, `StoreTimeout`.
        """
        deadline = time.monotonic() + self._config.timeout
        await asyncio.to_thread(await_visible, self._store, version, deadline)
        async with self._updating:
            digests = await asyncio.to_thread(self._store.digests, version)
            same = self._served == version and digests in (self._digests, ())
            if self._failure is None and self._served is not None and (self._served > version or same):
                return version
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    await self._no_exact.wait()
                    await self._switch(version, deadline)
            except Exception as error:
                failure = await self._failed(version, error)
                self._failure = failure
                raise failure from error
            self._served, self._digests, self._failure = version, digests, None
        return version

    async def work(self) -> WorkReport:
        """What this generator did since the last call, and the processor time of vLLM's processes with its own."""
        return self._work.report()

    def close(self) -> None:
        """End vLLM's processes, and leave the store. Idempotent."""
        self._closed.set()
        if self._follower is not None:
            with self._follower.changed:
                self._follower.changed.notify_all()
        self._engine.shutdown()
        self._store.close()
        self._files.close()

    @staticmethod
    def remove_left() -> None:
        """Remove the files of generators that were killed on this host. An engine does it after the end of one."""
        remove_left(FILES, removing=_remove_segments)

    # -- requests

    def _check(self, request: SamplingRequest) -> None:
        self._limits.check(request)
        if request.top_p < 1.0 and request.temperature > 0.0:
            raise BadRequest(f"top_p={request.top_p}, and vLLM has no log-probs before that cut", "draw with top_p=1.0")

    def _check_ready(self) -> int:
        if self._failure is not None:
            raise GeneratorNotReady(f"its last update failed: {self._failure}")
        if self._served is None:
            raise GeneratorNotReady("no version of the weights is here yet")
        return self._served

    @contextlib.asynccontextmanager
    async def _exactly(self, version: int, deadline: float) -> AsyncIterator[None]:
        """Serve `version`, and keep it inside of the block."""
        while True:
            if self._served != version or self._failure is not None:
                await self.update(version)
            async with self._updating:
                if self._failure is None and self._served == version:
                    self._exact += 1
                    self._no_exact.clear()
                    break
            if self._served is not None and self._served > version:
                raise VersionGone(version, [self._served])
        try:
            yield
        finally:
            self._exact -= 1
            if not self._exact:
                self._no_exact.set()

    async def _draw_all(self, request: SamplingRequest) -> list[Completion]:
        version = self._check_ready()
        prompts = [prompt for prompt in request.prompts for _ in range(request.samples)]
        drawing = [
            asyncio.ensure_future(self._draw(prompt, seed, request))
            for prompt, seed in zip(prompts, request.seeds, strict=True)
        ]
        self._drawing += 1
        if self._drawing == 1:
            self._work.lasting("generate", version, self._work.processor())
        try:
            return list(await asyncio.gather(*drawing))
        finally:
            self._drawing -= 1
            if not self._drawing:
                self._work.lasting("generate", None, self._work.processor())
            for each in drawing:
                each.cancel()
            await asyncio.wait(drawing)

    async def _draw(self, prompt: tuple[int, ...], seed: int, request: SamplingRequest) -> Completion:
        async def draw(seen: tuple[int, ...], seed: int, most: int) -> Any:
            self._check_ready()
            last, prompted = None, {"prompt_token_ids": list(seen)}
            async for each in self._engine.generate(prompted, sampling_parameters(request, seed, most), token_hex(8)):
                last = each
            if last is None or self._closed.is_set():
                raise GeneratorClosed("vLLM ended a sample without a word")
            return last.outputs[0]

        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await draw_whole(draw, prompt, seed, request.max_new_tokens)
        except asyncio.CancelledError:
            self._check_ready()
            raise
        finally:
            self._running.discard(task)

    # -- weights

    async def _keep_up(self) -> None:
        """As a reader, load the version that the newest switch asks for, now and from now on."""
        if (follower := self._follower) is None:
            return
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(follower))

        def catch_up() -> int:
            with self._catching_up:  # a request that was cancelled leaves its thread here
                return follower.catch_up()

        version = await asyncio.to_thread(catch_up)
        if self._failure is not None or version != self._served:
            try:
                await self.update(version)
            except UpdateFailed as error:
                print(f"this process ends, and another one takes its place: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    async def _watch(self, follower: Follower) -> None:
        """Give running samples new weights, too."""

        def await_due() -> None:
            with follower.changed:
                follower.changed.wait_for(lambda: self._closed.is_set() or follower.is_due())

        while not self._closed.is_set():
            await asyncio.to_thread(await_due)
            with contextlib.suppress(HoldfastError):
                await self._keep_up()

    async def _switch(self, version: int, deadline: float) -> None:
        """Pause, load a version, go on; in mode "keep" running samples go on with the new weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        engine = self._engine
        if not self._joined:
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"url": self._url}))
            self._joined = True
        if self._failure is not None:  # workers that did their part of the failed update still wait for its end
            with contextlib.suppress(Exception):
                await engine.finish_weight_update()
        await engine.pause_generation(mode=self._config.on_update, clear_cache=False)
        began, cpu = time.monotonic(), self._work.processor()
        self._work.lasting("generate", None, cpu)
        try:
            await engine.start_weight_update()
            left = max(0.001, deadline - time.monotonic())
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version, "timeout": left}))
            await engine.finish_weight_update(weight_version=str(version))
            await engine.resume_generation()
        finally:
            ended = self._work.processor()
            self._work.add("update", version, began, ended - cpu)
            if self._drawing:
                self._work.lasting("generate", version, ended)

    async def _failed(self, version: int, error: Exception) -> HoldfastError:
        """Cut off what is being drawn; vLLM stays paused, so it draws nothing with a mixture."""
        failure = UpdateFailed(version, f"{type(error).__name__}: {error}")
        self._failure = failure
        for each in self._running:
            each.cancel()
        await self._engine.pause_generation(mode="abort", clear_cache=False)
        return failure


def _end_with(children: Sequence[Any], closed: threading.Event) -> None:
    """End this process when one of `children` does: vLLM would wait. A new replica takes this one's place and calls."""
    multiprocessing.connection.wait([each.sentinel for each in children])
    if not closed.is_set():
        print("vLLM's engine has died; what it said is above", file=sys.stderr, flush=True)
        os._exit(1)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process, and those that it starts meanwhile, make their temporary files in a folder."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[1]


def _note_segments(folder: Path) -> None:
    """Keep the names of the files by which vLLM's ranks met. In good order, they go before the ranks do."""
    (folder / "met").mkdir()
    for meeting in folder.glob("vllm_dist_*"):
        (folder / "met" / meeting.name).touch()


def _remove_segments(folder: Path) -> None:
    """Remove the shared memory of vLLM's ranks on a CPU: they name it after the file by which they met."""
    for meeting in folder.rglob("vllm_dist_*"):
        for segment in Path("/dev/shm").glob(f"{meeting.name}-*"):
            segment.unlink(missing_ok=True)


def _engine(source: ModelSource, config: RunConfig, files: Path) -> Any:
    """vLLM with random weights: those of the store come by `update`."""
    on_cpu = source.device == "cpu"
    for name, value in (ENVIRONMENT | (ON_CPU if on_cpu else {})).items():
        os.environ.setdefault(name, value)
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise Unsupported(
            f"a vLLM generator here ({error})", "run make extra-vllm, and name its interpreter"
        ) from error
    folder = files / "model"
    folder.mkdir()
    source.save_config(folder)
    arguments = AsyncEngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=source.dtype,
        enforce_eager=on_cpu,
        max_num_seqs=config.sampling.slots,
        tensor_parallel_size=config.generator.tensor_parallel,
        distributed_executor_backend="uni" if config.generator.tensor_parallel == 1 else "mp",
        kv_cache_memory_bytes=int(config.generator.cache * 2**30),
        enable_prefix_caching=False,  # the cache of a prompt would outlive the weights that it was made with
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="holdfast"),
        disable_log_stats=True,
    )
    try:
        engine = AsyncLLM.from_engine_args(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelMisfit(source.name, f"{type(error).__name__}: {error}", "see vLLM's list of models") from error
    try:
        Layout.vllm(engine.model_config.hf_text_config, 0, config.generator.tensor_parallel)
    except BaseException:
        engine.shutdown()
        raise
    return engine


def sampling_parameters(request: SamplingRequest, seed: int, most: int) -> Any:
    """vLLM's parameters of one sample of a request, of at most `most` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=seed,
        max_tokens=most,
        stop_token_ids=list(request.stop),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def draw_whole(draw: Draw, prompt: tuple[int, ...], seed: int, most: int) -> Completion:
    """One sample of at most `most` tokens, to its end.

    A part that an update of the weights cut off goes on behind its tokens, with the new weights.
    """
    tokens, logprobs, versions = (), (), ()  # type: tuple[int, ...], tuple[float, ...], tuple[int, ...]
    while True:
        part = await draw(
            (*prompt, *tokens), seed_of("go on", seed, len(tokens)) if tokens else seed, most - len(tokens)
        )
        drawn = tuple(part.token_ids)
        logprobs += tuple(found[token].logprob for token, found in zip(drawn, part.logprobs or (), strict=True))
        versions += tuple(int(each.version) for each in part.weight_versions or () for _ in range(each.start, each.end))
        tokens += drawn
        finish: Finish = "stop" if part.finish_reason == "stop" else "length"
        if part.finish_reason != CUT_OFF or len(tokens) == most:
            return Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=finish)
