"""What cannot be in one configuration: values that are each allowed, and do not work together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable
from holdfast.ft.registers import schemes
from holdfast.ft.schedulers import WORD as SLURM
from holdfast.rl.config.named_code import ExtraNotInstalled, extra_python, file_of
from holdfast.rl.config.run_config import (
    CriterionConfig,
    EnvironmentConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TitanConfig,
    TrainerConfig,
)
from holdfast.rl.data.replay_buffer import StalenessRule
from holdfast.rl.errors import BadConfig, ConfigProblem, Key, StalenessUnreachable

Contradiction = tuple[tuple[Key, ...], str]
"""The values that contradict each other, the one to change first, and the reason."""


def contradictions(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    """Everything that contradicts itself. Paths in the configuration are relative to `folder`."""
    yield from _loop(config)
    yield from _data(config, folder)
    yield from _rewards(config, folder)
    yield from _environment(config, folder)
    yield from _roles(config)
    yield from _hosts(config)
    yield from _plugins(config)
    yield from _generators(config, folder)
    yield from _titan(config, folder)
    yield from _device(config)


def staleness_rule(config: RunConfig) -> StalenessRule:
    """The rule of a run's replay buffer. Raises `StalenessUnreachable`."""
    loop = config.algorithm
    return StalenessRule(groups=loop.groups, bound=loop.staleness, updates=loop.updates, capacity=loop.capacity)


def _loop(config: RunConfig) -> Iterator[Contradiction]:
    loop = config.algorithm
    try:
        staleness_rule(config)
    except StalenessUnreachable as error:
        names = ("capacity", "groups") if loop.staleness >= loop.updates - 1 else ("staleness", "updates")
        yield tuple(("algorithm", name) for name in names), str(error)
    if loop.mode == "synchronous" and loop.staleness > loop.updates - 1:
        yield (
            (("algorithm", "staleness"), ("algorithm", "mode"), ("algorithm", "updates")),
            f"the synchronous loop trains on the newest weights alone: {loop.updates - 1} with these updates, or "
            'mode = "asynchronous"',
        )
    if loop.updates > loop.groups:
        yield (
            (("algorithm", "updates"), ("algorithm", "groups")),
            f"a batch of algorithm.groups = {loop.groups} is not enough for so many",
        )
    if config.steps % loop.updates:
        yield (
            (("steps",), ("algorithm", "updates")),
            f"must be a multiple of algorithm.updates = {loop.updates}: each batch is used for all of its updates",
        )
    if config.objective.skip_overlong and not config.sampling.stop:
        yield (
            (("sampling", "stop"), ("objective", "skip_overlong")),
            "without a stop token every completion is cut off, and objective.skip_overlong leaves it out",
        )


def _data(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    data = config.data
    for name in ("train", "held_out"):
        value = getattr(data, name)
        if data.task == "arithmetic" and value:
            yield (("data", name), ("data", "task")), 'the arithmetic task brings its problems; use task = "jsonl"'
        elif value and not (folder / value).is_file():
            yield (("data", name),), f"there is no file {folder / value}"
    if data.task == "jsonl" and not data.train:
        yield (("data", "train"), ("data", "task")), 'task = "jsonl" needs a file of prompts'
    share = ("data", "held_out_share")
    if data.held_out_share and data.task == "arithmetic":
        yield (share, ("data", "task")), 'the arithmetic task brings its problems; use task = "jsonl"'
    elif data.held_out_share and data.held_out:
        yield (share, ("data", "held_out")), "data.held_out names the prompts that are held out"
    if data.task == "jsonl" and config.evaluation.every and not data.held_out and not data.held_out_share:
        yield (
            (("data", "held_out"), ("data", "task"), ("evaluation", "every")),
            "evaluation needs a file of held-out prompts, a data.held_out_share of those in data.train, or "
            "evaluation.every = 0",
        )
    if config.model.path and not (folder / config.model.path).is_dir():
        yield (("model", "path"),), f"there is no folder {folder / config.model.path}"
    if not config.model.path and data.task == "jsonl" and config.has_prompts:
        yield (
            (("model", "path"), ("data", "task")),
            "the small Llama has the 14 characters of the arithmetic task; name a model with a tokenizer of its own",
        )


def _rewards(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    if not config.reward and config.has_prompts:
        yield (("reward",), ("environment", "name")), "an episode needs a reward or an environment"
    for number, each in enumerate(config.reward):
        yield from _criterion(config, each, folder, ("reward", number))


def _criterion(config: RunConfig, criterion: CriterionConfig, folder: Path, key: Key) -> Iterator[Contradiction]:
    pattern, kind = (*key, "pattern"), (*key, "kind")
    if criterion.pattern and criterion.kind not in ("exact", "format"):
        yield (pattern, kind), f"a criterion of kind {criterion.kind!r} has no pattern"
    yield from _code_of_criterion(criterion, folder, key)
    if not criterion.pattern and criterion.kind == "format":
        yield (pattern, kind), "a criterion of kind 'format' needs one"
    if criterion.pattern:
        try:
            groups = re.compile(criterion.pattern).groups
        except re.error as error:
            yield (pattern,), f"not a regular expression: {error}"
        else:
            if criterion.kind == "exact" and groups != 1:
                yield (pattern, kind), f"it has {groups} groups, and needs one, which is the answer"
    if criterion.kind == "length" and not 0 < criterion.margin <= config.sampling.max_new_tokens:
        yield (
            ((*key, "margin"), kind, ("sampling", "max_new_tokens")),
            f"must be from 1 to sampling.max_new_tokens = {config.sampling.max_new_tokens}",
        )
    if criterion.kind != "length" and criterion.margin:
        yield ((*key, "margin"), kind), f"a criterion of kind {criterion.kind!r} has no margin"


def _code_of_criterion(criterion: CriterionConfig, folder: Path, key: Key) -> Iterator[Contradiction]:
    function, kind = (*key, "function"), (*key, "kind")
    if criterion.kind != "python":
        if criterion.function:
            yield (function, kind), f"a criterion of kind {criterion.kind!r} has none"
    elif not criterion.function:
        yield (function, kind), f"a criterion of kind {criterion.kind!r} needs it"
    elif reason := _missing_code(criterion.function, folder):
        yield (function,), reason


def _missing_code(code: str, folder: Path) -> str:
    """Why a name cannot lead to code; its module is not imported for that."""
    module, _, name = code.rpartition(":")
    if not module or not name:
        return f"{code!r} is not FILE.py:NAME, or MODULE:NAME of an installed module"
    file = file_of(code)
    return f"there is no file {folder / file}" if file and not (folder / file).is_file() else ""


def _environment(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    environment, group = config.environment, config.sampling.group
    name, addresses = ("environment", "name"), ("environment", "addresses")
    if not environment.name:
        for field in environment.__struct_fields__:
            if getattr(environment, field) != getattr(EnvironmentConfig(), field):
                yield (("environment", field), name), "there is no environment: say which in environment.name"
        return
    kind, _, code = environment.name.partition(":")
    if kind == "python" and (reason := _missing_code(code, folder)):
        yield (name,), reason
    if "?" in environment.name:
        yield (name,), "options are a table of their own: environment.arguments"
    for number, each in enumerate(environment.addresses):
        if not re.fullmatch(r"(wss?|https?)://[^/\s]+(/\S*)?", each):
            yield (addresses,), f"{each!r} is no address of a server, such as ws://host:8123 (number {number + 1})"
    if environment.addresses and environment.servers:
        yield (("environment", "servers"), addresses), "0, where servers run already at environment.addresses"
    if not environment.addresses and not environment.servers:
        yield (
            (("environment", "servers"), addresses),
            "1 or more, unless servers run already at environment.addresses",
        )
    if environment.addresses and environment.arguments:
        yield (
            (("environment", "arguments"), addresses),
            "servers at environment.addresses have their options from where they were started",
        )
    places = environment.sessions * (environment.servers or len(environment.addresses) or 1)
    if places < group:
        yield (
            (("environment", "sessions"), ("environment", "servers"), ("sampling", "group")),
            f"{places} episodes can be played at the same time, and a group has sampling.group = {group}",
        )
    if environment.max_tokens and environment.max_tokens <= config.sampling.max_new_tokens:
        yield (
            (("environment", "max_tokens"), ("sampling", "max_new_tokens")),
            f"no room for a turn of sampling.max_new_tokens = {config.sampling.max_new_tokens}",
        )
    if not config.has_prompts:
        yield from _environment_alone(config)


def _environment_alone(config: RunConfig) -> Iterator[Contradiction]:
    """What belongs to prompts, where all groups are played in an environment."""
    name = ("environment", "name")
    if config.data.task == "jsonl":
        yield (name, ("data", "task")), 'the environment makes the prompts: it has no use for task = "jsonl"'
    if config.reward not in ((), (CriterionConfig(),)):
        yield (("reward", 0), name), "the environment gives the reward: leave [[reward]] out"
    if config.model.warmup_steps:
        yield (("model", "warmup_steps"), name), "an environment has no answers to learn from: give a trained model"
    if config.evaluation.every and not config.evaluation.prompts:
        yield (
            (("evaluation", "prompts"), ("evaluation", "every"), name),
            "say how many held-out episodes to play: an environment has no end of them",
        )


def _roles(config: RunConfig) -> Iterator[Contradiction]:
    trainer, groups, model = config.trainer, config.algorithm.groups, config.model
    if not model.lora_rank and (model.lora_targets or model.lora_alpha != ModelConfig().lora_alpha):
        name = "lora_targets" if model.lora_targets else "lora_alpha"
        yield (("model", name), ("model", "lora_rank")), "there are no adapters: model.lora_rank = 0"
    for name in ("warmup_batch", "warmup_rate"):
        if not model.warmup_steps and getattr(model, name) != getattr(ModelConfig(), name):
            yield (("model", name), ("model", "warmup_steps")), "there are no supervised steps: model.warmup_steps = 0"
    if trainer.units > groups:
        yield (
            (("trainer", "units"), ("algorithm", "groups")),
            f"a batch of algorithm.groups = {groups} has no more parts than that",
        )
    if trainer.replicas > trainer.units:
        yield (
            (("trainer", "replicas"), ("trainer", "units")),
            f"more trainers than trainer.units = {trainer.units} leave some without work",
        )
    if trainer.strategy == "ddp" and trainer.copies != TrainerConfig().copies:
        yield (("trainer", "copies"), ("trainer", "strategy")), "each trainer has the whole policy with ddp"
    if config.store.copies > config.store.holders:
        yield (
            (("store", "copies"), ("store", "holders")),
            f"more copies than store.holders = {config.store.holders}",
        )


def _hosts(config: RunConfig) -> Iterator[Contradiction]:
    engine, hosts = config.engine, ("engine", "hosts")
    if not engine.hosts:
        return
    if engine.kind == "local":
        yield (hosts, ("engine", "kind")), "the local engine starts processes on this host alone"
        return
    for number, each in enumerate(engine.hosts):
        if len(engine.hosts) == 1 and SLURM.fullmatch(each):
            continue
        if not re.fullmatch(r"tcp://[^/\s]+:\d+", each):
            yield (
                (hosts,),
                f"{each!r} is no address of a host, such as tcp://10.0.0.2:26600, or slurm alone (number {number + 1})",
            )
    if engine.register.partition("://")[0] in ("", "sqlite", "memory"):
        yield (("engine", "register"), hosts), "a file is on one host: use a register that all hosts reach, as etcd is"
    if config.trainer.backend == "shm":
        yield (("trainer", "backend"), hosts), "shm is memory of one host: use gloo or ucx"
    if config.store.plane in ("auto", "shm"):
        yield (("store", "plane"), hosts), "the plane of one host reads no other host's memory: use ucx or nixl"


def _generators(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    generator, kind = config.generator, ("generator", "kind")
    if generator.kind != "vllm":
        if generator.python:
            yield (("generator", "python"), kind), "only vllm generates in another environment"
        if generator.tensor_parallel > 1:
            yield (("generator", "tensor_parallel"), kind), "only vllm shares the weights among processes"
        if generator.cache != GeneratorConfig().cache:
            yield (("generator", "cache"), kind), "only vllm has a cache of a size that is said before"
        if generator.on_update != "keep":
            yield (("generator", "on_update"), kind), "only vllm pauses so; transformers has generator.update"
        return
    try:
        extra_python("vllm", generator.python, folder)
    except ExtraNotInstalled as error:
        yield (kind, ("generator", "python")), str(error)
    if config.store.cast != "none":
        yield (("store", "cast"), kind), "vllm's workers read every bit"
    if generator.update != "swap":
        yield (("generator", "update"), kind), "vllm pauses as generator.on_update says"
    if config.sampling.top_p < 1.0:
        yield (
            (("sampling", "top_p"), kind),
            "vllm has no log-probs at the temperature before the cut, which the trainer needs: use 1.0",
        )


def _titan(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    trainer, titan, kind = config.trainer, config.titan, ("trainer", "kind")
    changed = [name for name in titan.__struct_fields__ if getattr(titan, name) != getattr(TitanConfig(), name)]
    if trainer.kind != "titan":
        if trainer.python:
            yield (("trainer", "python"), kind), "only titan trains in another environment"
        for name in changed:
            yield (("titan", name), kind), 'it is for trainers of kind = "titan"'
        return
    try:
        extra_python("titan", trainer.python, folder)
    except ExtraNotInstalled as error:
        yield (kind, ("trainer", "python")), str(error)
    if titan.config:
        for name in changed:
            if name != "config":
                yield (("titan", name), ("titan", "config")), "titan.config says it already"
        if not re.fullmatch(r"[\w.]+:\w+", titan.config):
            yield (("titan", "config"),), "write it as torchtitan.models.llama3.config_registry:llama3_8b"
    if trainer.strategy != "fsdp2":
        yield (("trainer", "strategy"), kind), "TorchTitan shares the policy among the trainers"
    if config.model.lora_rank:
        yield (("model", "lora_rank"), kind), "TorchTitan's models have no adapters here"
    degree = titan.tensor_parallel_degree * titan.data_parallel_replicate_degree
    if trainer.replicas % degree:
        yield (
            (("trainer", "replicas"), ("titan", "tensor_parallel_degree"), ("titan", "data_parallel_replicate_degree")),
            f"must be a multiple of {degree}, the product of titan's degrees",
        )


def _device(config: RunConfig) -> Iterator[Contradiction]:
    if config.model.device == "cpu":
        return
    if config.trainer.strategy == "fsdp2":
        yield (
            (("trainer", "strategy"), ("model", "device")),
            'shards are reduced in memory of the host; use "ddp": each trainer has the whole policy on the GPU',
        )
    if config.trainer.backend in ("nccl", "rccl"):
        yield (
            (("trainer", "backend"), ("model", "device")),
            "it needs a GPU for each trainer, and all of a run share one: use shm, gloo or ucx, which reduce gradients "
            "in memory of the host",
        )


def _plugins(config: RunConfig) -> Iterator[Contradiction]:
    """The names that no plugin answers to, or that name a plugin which cannot do this work anywhere."""
    for name in _names(config.trainer.backend) or ("",):
        if reason := _problem(name, [each for each, info in _usable() if info.connect is not None]):
            yield (("trainer", "backend"),), reason
    if reason := _problem(config.store.plane, [each for each, info in _usable() if info.memory is not None]):
        yield (("store", "plane"),), reason
    register = config.engine.register
    scheme, separator, _ = register.partition("://")
    if register and (not separator or scheme not in schemes()):
        known = ", ".join(f"{each}://" for each in sorted(schemes()))
        yield (("engine", "register"),), f"{register!r} is not a register's URL; known are {known}"


def check_plugins_run_here(config: RunConfig) -> None:
    """Raise `BadConfig` if the backend or the plane cannot run on this host, and the run is on no other."""
    if config.engine.hosts:
        return
    problems = []
    for field, names in (("trainer.backend", _names(config.trainer.backend)), ("store.plane", (config.store.plane,))):
        reasons = [_unavailable(name) for name in names if name != "auto"]
        if "auto" not in names and all(reasons):
            problems.append(ConfigProblem("on this host", field, "; ".join(reasons)))
    if problems:
        raise BadConfig(problems)


def _names(backends: str) -> tuple[str, ...]:
    """The backends of a preference list."""
    return tuple(name.strip() for name in backends.split(",") if name.strip())


def _usable() -> Iterator[tuple[str, BackendInfo]]:
    """The backends that connect processes which the run starts."""
    for name, info in sorted(registry().backends.items()):
        able = info.capabilities
        if not (able.one_process or able.launcher or able.peerless):
            yield name, info


def _problem(name: str, able: list[str]) -> str:
    """Why `name` is none of those that are `able`."""
    known = registry().backends.get(name)
    there = f"there are auto, {', '.join(able)}"
    if name == "auto" or name in able:
        return ""
    if known is None:
        broken = registry().broken.get(name)
        return f"its plugin is broken: {broken}" if broken else f"there is no {name!r}; {there}"
    if known.capabilities.peerless:
        return f"{name!r} connects no other ranks; {there}"
    if known.capabilities.one_process:
        return f"{name!r} works within one process only; {there}"
    if known.capabilities.launcher:
        return (
            f"{name!r} works in processes that {known.capabilities.launcher} starts, and a run starts its own; {there}"
        )
    return f"{name!r} has only a memory plane; {there}" if known.connect is None else f"{name!r} has none; {there}"


def _unavailable(name: str) -> str:
    """Why a backend cannot run here; "" if it can."""
    status = registry().backend(name).status
    return str(BackendUnavailable(name, status.reason, status.install_hint)) if isinstance(status, Unavailable) else ""
