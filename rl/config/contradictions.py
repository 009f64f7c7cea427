"""What cannot be in one configuration: values that are each allowed, and do not work together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable
from holdfast.ft.registers import schemes
from holdfast.ft.schedulers import WORD as SLURM
from holdfast.rl.config.named_code import ExtraNotInstalled, extra_python, file_of
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.data.replay_buffer import StalenessRule
from holdfast.rl.errors import BadConfig, ConfigProblem, StalenessUnreachable

Contradiction = tuple[str, str]
"""The fields that contradict each other, the one to change first, as in "steps reward.0.kind"; and the reason."""


def contradictions(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    """Everything that contradicts itself. Paths in the configuration are relative to `folder`."""
    yield from _of_no_use(config)
    yield from _loop(config)
    yield from _data(config, folder)
    yield from _rewards(config, folder)
    yield from _environment(config, folder)
    yield from _roles(config, folder)
    yield from _hosts(config)
    yield from _plugins(config)


def staleness_rule(config: RunConfig) -> StalenessRule:
    """The rule of a run's replay buffer. Raises `StalenessUnreachable`."""
    loop = config.algorithm
    return StalenessRule(groups=loop.groups, bound=loop.staleness, updates=loop.updates)


_ARITHMETIC = 'the arithmetic task brings its problems; use task = "jsonl"'
_OF_NO_USE: tuple[tuple[str, str, str | bool, str], ...] = (
    ("data.train data.held_out", "data.task", "jsonl", _ARITHMETIC),
    ("environment.*", "environment.name", True, "there is no environment: say which in environment.name"),
    ("environment.arguments", "environment.addresses", False, "servers that run already have their options"),
    ("model.lora_targets model.lora_alpha", "model.lora_rank", True, "there are no adapters: model.lora_rank = 0"),
    ("model.warmup_batch model.warmup_rate", "model.warmup_steps", True, "there are no supervised steps"),
    ("trainer.copies", "trainer.strategy", "fsdp2", "each trainer has the whole policy with ddp"),
    ("trainer.python", "trainer.kind", "titan", "only titan trains in another environment"),
    ("titan.*", "trainer.kind", "titan", 'it is for trainers of kind = "titan"'),
    ("titan.*", "titan.config", False, "titan.config says it already"),
    ("trainer.strategy", "trainer.kind", "transformers", "TorchTitan shares the policy among the trainers"),
    ("model.lora_rank", "trainer.kind", "transformers", "TorchTitan's models have no adapters here"),
    ("generator.python", "generator.kind", "vllm", "only vllm generates in another environment"),
    ("generator.tensor_parallel", "generator.kind", "vllm", "only vllm shares the weights among processes"),
    ("generator.cache", "generator.kind", "vllm", "only vllm has a cache of a size that is said before"),
    ("generator.on_update", "generator.kind", "vllm", "only vllm pauses so; transformers has generator.update"),
    ("generator.update", "generator.kind", "transformers", "vllm pauses as generator.on_update says"),
    ("store.cast", "generator.kind", "transformers", "vllm's workers read every bit"),
    (
        "sampling.top_p",
        "generator.kind",
        "transformers",
        "vllm has no log-probs at the temperature before the cut, which the trainer needs: use 1.0",
    ),
)
"""Fields (`*`: all of a section) that must have their defaults unless another one has this value (True: any)."""


def _of_no_use(config: RunConfig) -> Iterator[Contradiction]:
    """The fields that are set, and that nothing would read."""
    default = RunConfig()
    for fields, other, wanted, reason in _OF_NO_USE:
        value = attrgetter(other)(config)
        if (bool(value) if isinstance(wanted, bool) else value) == wanted:
            continue
        for field in fields.split():
            section, _, name = field.partition(".")
            for each in getattr(config, section).__struct_fields__ if name == "*" else (name,):
                key = f"{section}.{each}"
                if key != other and attrgetter(key)(config) != attrgetter(key)(default):
                    yield f"{key} {other}", reason


def _loop(config: RunConfig) -> Iterator[Contradiction]:
    loop = config.algorithm
    try:
        staleness_rule(config)
    except StalenessUnreachable as error:
        yield "algorithm.staleness algorithm.updates", str(error)
    if loop.mode == "synchronous" and loop.staleness > loop.updates - 1:
        yield (
            "algorithm.staleness algorithm.mode algorithm.updates",
            f"the synchronous loop trains on the newest weights alone: {loop.updates - 1} with these updates, or "
            'mode = "asynchronous"',
        )
    if loop.updates > loop.groups:
        reason = f"a batch of algorithm.groups = {loop.groups} is not enough for so many"
        yield "algorithm.updates algorithm.groups", reason
    if config.steps % loop.updates:
        reason = f"must be a multiple of algorithm.updates = {loop.updates}: each batch is used for all of its updates"
        yield "steps algorithm.updates", reason
    if config.objective.skip_overlong and not config.sampling.stop:
        reason = "without a stop token every completion is cut off, and objective.skip_overlong leaves it out"
        yield "sampling.stop objective.skip_overlong", reason


def _data(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    data = config.data
    for name in ("train", "held_out") if data.task == "jsonl" else ():
        value = getattr(data, name)
        if value and not _is_there(folder / value, Path.is_file):
            yield f"data.{name}", f"there is no file {folder / value}"
    if data.task == "jsonl" and not data.train:
        yield "data.train data.task", 'task = "jsonl" needs a file of prompts'
    if data.task == "jsonl" and config.evaluation.every and not data.held_out:
        reason = "evaluation needs a file of held-out prompts, or evaluation.every = 0"
        yield "data.held_out data.task evaluation.every", reason
    if config.model.path and not _is_there(folder / config.model.path, Path.is_dir):
        yield "model.path", f"there is no folder {folder / config.model.path}"
    if not config.model.path and data.task == "jsonl" and config.has_prompts:
        reason = (
            "the small Llama has the 14 characters of the arithmetic task; name a model with a tokenizer of its own"
        )
        yield "model.path data.task", reason


def _rewards(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    if not config.reward and config.has_prompts:
        yield "reward environment.name", "an episode needs a reward or an environment"
    for number, each in enumerate(config.reward):
        yield from _criterion(config, each, folder, f"reward.{number}")


_OF_KIND = {"exact": "pattern", "format": "pattern", "length": "margin", "python": "function"}
"""The field that each kind of criterion reads."""


def _criterion(config: RunConfig, criterion: CriterionConfig, folder: Path, at: str) -> Iterator[Contradiction]:
    kind = criterion.kind
    for name in ("pattern", "margin", "function"):
        if getattr(criterion, name) and name != _OF_KIND[kind]:
            yield f"{at}.{name} {at}.kind", f"a criterion of kind {kind!r} has none"
    if kind in ("format", "python") and not getattr(criterion, _OF_KIND[kind]):
        yield f"{at}.{_OF_KIND[kind]} {at}.kind", f"a criterion of kind {kind!r} needs one"
    elif kind == "python" and (reason := _missing_code(criterion.function, folder)):
        yield f"{at}.function", reason
    try:
        groups = re.compile(criterion.pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield f"{at}.pattern", f"not a regular expression: {error}"
    else:
        if kind == "exact" and criterion.pattern and groups != 1:
            yield f"{at}.pattern {at}.kind", f"it has {groups} groups, and needs one, which is the answer"
    most = config.sampling.max_new_tokens
    if kind == "length" and not 0 < criterion.margin <= most:
        reason = f"must be from 1 to sampling.max_new_tokens = {most}"
        yield f"{at}.margin {at}.kind sampling.max_new_tokens", reason


def _missing_code(code: str, folder: Path) -> str:
    """Why a name cannot lead to code; its module is not imported for that."""
    module, _, name = code.rpartition(":")
    if not module or not name:
        return f"{code!r} is not FILE.py:NAME, or MODULE:NAME of an installed module"
    file = file_of(code)
    return f"there is no file {folder / file}" if file and not _is_there(folder / file, Path.is_file) else ""


def _is_there(path: Path, look: Callable[[Path], bool]) -> bool:
    """Whether a look finds a path; of one that is too long, or behind a closed folder, it raises."""
    try:
        return look(path)
    except OSError:
        return False


def _environment(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    environment, group, most = config.environment, config.sampling.group, config.sampling.max_new_tokens
    if not environment.name:
        return
    kind, _, code = environment.name.partition(":")
    if kind == "python" and (reason := _missing_code(code, folder)):
        yield "environment.name", reason
    if "?" in environment.name:
        yield "environment.name", "options are a table of their own: environment.arguments"
    for number, each in enumerate(environment.addresses):
        if not re.fullmatch(r"(wss?|https?)://[^/\s]+(/\S*)?", each):
            reason = f"{each!r} is no address of a server, such as ws://host:8123 (number {number + 1})"
            yield "environment.addresses", reason
    if environment.addresses and environment.servers:
        yield "environment.servers environment.addresses", "0, where servers run already at environment.addresses"
    if not environment.addresses and not environment.servers:
        reason = "1 or more, unless servers run already at environment.addresses"
        yield "environment.servers environment.addresses", reason
    places = environment.sessions * (environment.servers or len(environment.addresses) or 1)
    if places < group:
        reason = f"{places} episodes can be played at the same time, and a group has sampling.group = {group}"
        yield "environment.sessions environment.servers sampling.group", reason
    if environment.max_tokens and environment.max_tokens <= most:
        reason = f"no room for a turn of sampling.max_new_tokens = {most}"
        yield "environment.max_tokens sampling.max_new_tokens", reason
    if not config.has_prompts:
        yield from _environment_alone(config)


def _environment_alone(config: RunConfig) -> Iterator[Contradiction]:
    """What belongs to prompts, where all groups are played in an environment."""
    if config.data.task == "jsonl":
        yield "environment.name data.task", 'the environment makes the prompts: it has no use for task = "jsonl"'
    if config.reward not in ((), (CriterionConfig(),)):
        yield "reward.0 environment.name", "the environment gives the reward: leave [[reward]] out"
    if config.model.warmup_steps:
        reason = "an environment has no answers to learn from: give a trained model"
        yield "model.warmup_steps environment.name", reason
    if config.evaluation.every and not config.evaluation.prompts:
        reason = "say how many held-out episodes to play: an environment has no end of them"
        yield "evaluation.prompts evaluation.every environment.name", reason


def _roles(config: RunConfig, folder: Path) -> Iterator[Contradiction]:
    trainer, titan, groups = config.trainer, config.titan, config.algorithm.groups
    if trainer.units > groups:
        reason = f"a batch of algorithm.groups = {groups} has no more parts than that"
        yield "trainer.units algorithm.groups", reason
    if trainer.replicas > trainer.units:
        reason = f"more trainers than trainer.units = {trainer.units} leave some without work"
        yield "trainer.replicas trainer.units", reason
    if config.store.copies > config.store.holders:
        reason = f"more copies than store.holders = {config.store.holders}"
        yield "store.copies store.holders", reason
    for role, kind in (("generator", "vllm"), ("trainer", "titan")):
        section = getattr(config, role)
        if section.kind == kind:
            try:
                extra_python(kind, section.python, folder)
            except ExtraNotInstalled as error:
                yield f"{role}.kind {role}.python", str(error)
    if titan.config and not re.fullmatch(r"[\w.]+:\w+", titan.config):
        yield "titan.config", "write it as torchtitan.models.llama3.config_registry:llama3_8b"
    degree = titan.tensor_parallel_degree * titan.data_parallel_replicate_degree
    if trainer.replicas % degree:
        yield (
            "trainer.replicas titan.tensor_parallel_degree titan.data_parallel_replicate_degree",
            f"must be a multiple of {degree}, the product of titan's degrees",
        )
    if config.model.device != "cpu" and trainer.strategy == "fsdp2":
        yield (
            "trainer.strategy model.device",
            'shards are reduced in memory of the host; use "ddp": each trainer has the whole policy on the GPU',
        )
    if config.model.device != "cpu" and trainer.backend in ("nccl", "rccl"):
        yield (
            "trainer.backend model.device",
            "it needs a GPU for each trainer, and all of a run share one: use shm, gloo or ucx, which reduce gradients "
            "in memory of the host",
        )


def _hosts(config: RunConfig) -> Iterator[Contradiction]:
    engine = config.engine
    if not engine.hosts:
        return
    if engine.kind == "local":
        yield "engine.hosts engine.kind", "the local engine starts processes on this host alone"
        return
    for number, each in enumerate(engine.hosts):
        slurm = len(engine.hosts) == 1 and SLURM.fullmatch(each)
        if not slurm and not re.fullmatch(r"tcp://[^/\s]+:\d+", each):
            yield (
                "engine.hosts",
                f"{each!r} is no address of a host, such as tcp://10.0.0.2:26600, or slurm alone (number {number + 1})",
            )
    if engine.register.partition("://")[0] in ("", "sqlite", "memory"):
        yield "engine.register engine.hosts", "a file is on one host: use a register that all hosts reach, as etcd is"
    if config.trainer.backend == "shm":
        yield "trainer.backend engine.hosts", "shm is memory of one host: use gloo or ucx"
    if config.store.plane in ("auto", "shm"):
        yield "store.plane engine.hosts", "the plane of one host reads no other host's memory: use ucx or nixl"


def _plugins(config: RunConfig) -> Iterator[Contradiction]:
    """The names that no plugin answers to, or that name a plugin which cannot do this work anywhere."""
    for name in _names(config.trainer.backend) or ("",):
        if reason := _problem(name, "connect"):
            yield "trainer.backend", reason
    if reason := _problem(config.store.plane, "memory"):
        yield "store.plane", reason
    register = config.engine.register
    scheme, separator, _ = register.partition("://")
    if register and (not separator or scheme not in schemes()):
        known = ", ".join(f"{each}://" for each in sorted(schemes()))
        yield "engine.register", f"{register!r} is not a register's URL; known are {known}"


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


def _problem(name: str, part: str) -> str:
    """Why `name` is neither auto nor a backend with that part, which connects processes that the run starts."""
    known = {each: _unfit(info, part) for each, info in sorted(registry().backends.items())}
    if name == "auto" or known.get(name) == "":
        return ""
    if broken := registry().broken.get(name):
        return f"its plugin is broken: {broken}"
    there = ", ".join(each for each, reason in known.items() if not reason)
    reason = f"{name!r} {known[name]}" if name in known else f"there is no {name!r}"
    return f"{reason}; there are auto, {there}"


def _unfit(info: BackendInfo, part: str) -> str:
    """Why a backend does not fit, in words after its name; "" if it does."""
    able = info.capabilities
    if able.peerless:
        return "connects no other ranks"
    if able.one_process:
        return "works within one process only"
    if able.launcher:
        return f"works in processes that {able.launcher} starts, and a run starts its own"
    if getattr(info, part) is None:
        return "has only a memory plane" if part == "connect" else "has none"
    return ""


def _unavailable(name: str) -> str:
    """Why a backend cannot run here; "" if it can."""
    status = registry().backend(name).status
    return str(BackendUnavailable(name, status.reason, status.install_hint)) if isinstance(status, Unavailable) else ""
