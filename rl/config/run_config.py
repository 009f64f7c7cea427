"""The configuration of a run: frozen sections, with a description and a default for each field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.rl.data.episode import Prompt, SamplingRequest
from holdfast.rl.data.prompts import seed_of, seeds_of

MOST_PROCESSES = 4096
"""The most processes of one role: a slip of the pen must not start a million."""

MOST_SECONDS = 1e6
"""The longest time that a configuration may wait for: clocks and locks take no more than a few centuries."""


Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the document."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[
        str, Meta(description="A folder in the format of transformers; empty: a Llama of 84,032 random weights.")
    ] = ""
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="The type of the weights.")] = "float32"
    device: Annotated[
        str,
        Meta(
            pattern=r"^(cpu|cuda(:\d+)?)$",
            description="Where trainers and generators have it: `cpu`, or `cuda` for a GPU that all of them share.",
        ),
    ] = "cpu"
    lora_rank: Annotated[int, Meta(ge=0, description="Train adapters of this rank; 0: train all weights.")] = 0
    lora_alpha: Annotated[float, Meta(gt=0, description="Adapters are scaled by this, divided by their rank.")] = 16.0
    lora_targets: Annotated[
        tuple[str, ...], Meta(description="Names of the layers that get adapters; none: all linear layers.")
    ] = ()
    warmup_steps: Annotated[int, Meta(ge=0, description="Supervised steps before the first step.")] = 0
    warmup_batch: Annotated[int, Meta(ge=1, description="Problems of a supervised step.")] = 256
    warmup_rate: Annotated[float, Meta(gt=0, description="The learning rate of the supervised steps.")] = 2e-3


class DataConfig(_Section, frozen=True, kw_only=True):
    """The prompts."""

    task: Annotated[Literal["arithmetic", "jsonl"], Meta(description="Sums of three digits, or files of your own.")] = (
        "arithmetic"
    )
    train: Annotated[str, Meta(description='A file with a `{"prompt", "answer"}` a line, for task `jsonl`.')] = ""
    held_out: Annotated[str, Meta(description="The same for evaluation.")] = ""


class AlgorithmConfig(_Section, frozen=True, kw_only=True):
    """The loop, and how far generation may run ahead of training."""

    mode: Annotated[
        Literal["synchronous", "asynchronous"], Meta(description="Generate and train in turns, or at the same time.")
    ] = "asynchronous"
    groups: Annotated[int, Meta(ge=1, description="Groups, which is prompts, of a batch.")] = 32
    updates: Annotated[int, Meta(ge=1, description="Updates of the weights with each batch.")] = 1
    staleness: Annotated[
        int, Meta(ge=0, description="How many updates old the weights that drew a token may be, at most.")
    ] = 1
    concurrency: Annotated[
        int, Meta(ge=1, description="Groups that are generated at the same time, in the asynchronous loop.")
    ] = 32


class Objective(_Section, frozen=True, kw_only=True):
    """The loss of a step. The algorithm sets the defaults of the other fields; those here are GRPO's."""

    algorithm: Annotated[Algorithm, Meta(description="The algorithm, whose defaults the other fields have.")] = "grpo"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Meta(
            description="Divide advantages by the standard deviation of the rewards of their group, or of the whole "
            "batch; or not. It is the unbiased one (over n - 1), plus 1e-4, as in TRL's option of this name."
        ),
    ] = "group"
    aggregate: Annotated[
        Literal["sequence", "token", "sum"],
        Meta(
            description="Average tokens in each sequence, or over all tokens of the step; or add those of a sequence."
        ),
    ] = "sequence"
    ratio: Annotated[
        Literal["token", "sequence"], Meta(description="Importance ratios of tokens, or of whole sequences.")
    ] = "token"
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="The ratio is clipped from below at 1 minus this.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="The ratio is clipped from above at 1 plus this.")] = 0.2
    kl: Annotated[float, Meta(ge=0, description="The weight of the distance to the reference policy (k3).")] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="The weight of an entropy bonus.")] = 0.0
    truncation: Annotated[
        float,
        Meta(
            ge=0,
            description="The cap of the importance weight of the trainer's old policy against the generator; 0: the "
            "generator's log-probabilities are the old ones.",
        ),
    ] = 0.0
    redraws: Annotated[
        int, Meta(ge=0, le=100, description="How often a group whose rewards are all equal is drawn again.")
    ] = 0
    skip_overlong: Annotated[
        bool, Meta(description="Leave episodes with a completion that the limit of tokens cut out of the loss.")
    ] = False


PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {},
    "dr_grpo": {"scale_rewards": "none", "aggregate": "sum"},
    "dapo": {"aggregate": "token", "clip_high": 0.28, "redraws": 4, "skip_overlong": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""What the fields of an objective are by default, where that differs from GRPO."""


def objective(algorithm: Algorithm, **fields: object) -> Objective:
    """The objective of an algorithm, with `fields` instead of its defaults. Raises msgspec.ValidationError."""
    return msgspec.convert({**PRESETS[algorithm], **fields, "algorithm": algorithm}, Objective)


class Sampling(_Section, frozen=True, kw_only=True):
    """How a group's completions are drawn: `group` for each prompt, each with a seed of its own."""

    group: Annotated[int, Meta(ge=2, description="Completions of each prompt, which are compared.")] = 8
    batch: Annotated[int, Meta(ge=1, description="Prompts of a request, whose completions are drawn together.")] = 8
    max_new_tokens: Annotated[int, Meta(ge=1, description="The limit of a completion's tokens.")] = 128
    temperature: Annotated[float, Meta(gt=0, description="The temperature.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Draw from the likeliest tokens of this total.")] = 1.0
    stop: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...], Meta(description="Token numbers that end a completion.")
    ] = ()

    @property
    def slots(self) -> int:
        """The most samples that a generator draws together."""
        return self.batch * self.group

    def request(self, seed: int, prompt: Prompt, draw: int, version: int | None) -> SamplingRequest:
        """The request for a prompt's group, the `draw`-th time: equal arguments give an equal request."""
        seeds = seeds_of("sample", seed, prompt.number, draw, each=range(self.group))
        return self._asked((prompt.tokens,), seeds, version)

    def turn(
        self, seed: int, number: int, draw: int, seen: Mapping[int, tuple[int, ...]], version: int | None
    ) -> SamplingRequest:
        """The request for the next turn of a group's samples, each after the tokens that it has `seen`."""
        seeds = tuple(seed_of("turn", seed, number, draw, sample, len(before)) for sample, before in seen.items())
        return self._asked(tuple(seen.values()), seeds, version)

    def greedy(self, seen: Iterable[tuple[int, ...]], version: int | None) -> SamplingRequest:
        """The request for the likeliest tokens after those that were `seen`."""
        prompts = tuple(seen)
        asked = self._asked(prompts, (0,) * len(prompts), version)
        return msgspec.structs.replace(asked, temperature=0.0, top_p=1.0)

    def _asked(
        self, prompts: tuple[tuple[int, ...], ...], seeds: tuple[int, ...], version: int | None
    ) -> SamplingRequest:
        """The request for as many completions of each prompt as there are seeds."""
        return SamplingRequest(
            prompts=prompts,
            samples=len(seeds) // len(prompts),
            seeds=seeds,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            version=version,
        )


class CriterionConfig(_Section, frozen=True, kw_only=True):
    """One criterion of the reward, which is the weighted sum of all."""

    kind: Annotated[
        Literal["exact", "format", "length", "python"],
        Meta(
            description="Equal to the reference; matched by `pattern`; a penalty for long completions; or a `function` "
            "of yours."
        ),
    ] = "exact"
    weight: Annotated[float, Meta(description="The weight.")] = 1.0
    pattern: Annotated[
        str,
        Meta(description="A regular expression: of the whole text (`format`), or its group is the answer (`exact`)."),
    ] = ""
    margin: Annotated[
        int, Meta(ge=0, description="The penalty begins so many tokens before `sampling.max_new_tokens` (`length`).")
    ] = 0
    function: Annotated[
        str, Meta(description="`FILE.py:NAME` or `MODULE:NAME`: from a `JudgedAnswer` to a number (`python`).")
    ] = ""


class EnvironmentConfig(_Section, frozen=True, kw_only=True):
    """An environment instead of prompts and a reward function."""

    name: Annotated[
        str,
        Meta(
            description="`guess`, `arithmetic`, `python:FILE.py:NAME` ...; empty: episodes have one turn and a reward."
        ),
    ] = ""
    arguments: Annotated[
        dict[str, str | bool | int | float], Meta(description="The environment's options, as a table.")
    ] = msgspec.field(default_factory=dict)
    servers: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_PROCESSES,
            description="Server processes that the run starts; 0: episodes are played at `addresses`.",
        ),
    ] = 1
    addresses: Annotated[tuple[str, ...], Meta(description="Servers that run already, such as `ws://host:8123`.")] = ()
    sessions: Annotated[int, Meta(ge=1, description="Episodes that a server plays at the same time.")] = 64
    share: Annotated[
        float, Meta(gt=0, le=1, description="The share of groups that are played in it; the others are prompts.")
    ] = 1.0
    max_turns: Annotated[int, Meta(ge=1, description="The limit of an episode's turns.")] = 8
    max_tokens: Annotated[
        int, Meta(ge=0, description="The limit of an episode's tokens, with the prompt; 0: the model's.")
    ] = 0
    timeout: Annotated[
        float, Meta(gt=0, le=MOST_SECONDS, description="Seconds after which a step of the environment has failed.")
    ] = 30.0
    attempts: Annotated[
        int, Meta(ge=1, description="Environments that an episode is played in, one after another, until it fails.")
    ] = 3


class TrainerConfig(_Section, frozen=True, kw_only=True):
    """The trainers and their optimizer."""

    replicas: Annotated[int, Meta(ge=1, le=MOST_PROCESSES, description="Trainer processes.")] = 2
    spares: Annotated[int, Meta(ge=0, le=MOST_PROCESSES, description="Processes that wait to replace a trainer.")] = 1
    kind: Annotated[
        Literal["transformers", "titan"], Meta(description="Whose model is trained: TorchTitan's is `titan`.")
    ] = "transformers"
    python: Annotated[
        str, Meta(description="The interpreter of another environment, for `titan`; empty: that of `make extra-titan`.")
    ] = ""
    strategy: Annotated[Literal["fsdp2", "ddp"], Meta(description="Sharded, or whole on every trainer.")] = "fsdp2"
    backend: Annotated[str, Meta(description="What gradients are reduced over: shm, gloo, ucx ...")] = "shm"
    copies: Annotated[
        int, Meta(ge=0, description="Neighbours that keep a copy of each trainer's shard, for when it dies.")
    ] = 1
    units: Annotated[
        int, Meta(ge=1, description="Parts of a batch whose gradients are added; fixes the bits of the sum.")
    ] = 4
    micro_batch: Annotated[
        int, Meta(ge=0, description="Episodes of a forward; gradients of several are added. 0: all of a part.")
    ] = 0
    rate: Annotated[float, Meta(gt=0, description="The learning rate.")] = 5e-4
    rate_warmup: Annotated[int, Meta(ge=1, description="Updates until the full learning rate.")] = 10
    rate_decay: Annotated[int, Meta(ge=1, description="The update at which the learning rate is lowest.")] = 1000
    rate_floor: Annotated[float, Meta(ge=0, le=1, description="The lowest learning rate's share of `rate`.")] = 0.1
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's weight decay.")] = 0.0
    max_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this norm.")] = 1.0

    def rate_at(self, update: int) -> float:
        """The learning rate of an update, counted from 0: a line up, then a line down to its floor."""
        warm = min(1.0, (update + 1) / self.rate_warmup)
        gone = min(1.0, update / self.rate_decay)
        return self.rate * warm * (1.0 - (1.0 - self.rate_floor) * gone)


class TitanConfig(_Section, frozen=True, kw_only=True):
    """How TorchTitan shares the policy among trainers of kind `titan`, in the words of its own configuration."""

    config: Annotated[
        str,
        Meta(
            description="A function of its config registries, `module:name`, whose parallelism, precision, checkpoints "
            "of activations and compilation are taken as they are; empty: the fields below."
        ),
    ] = ""
    tensor_parallel_degree: Annotated[int, Meta(ge=1, description="Trainers that share each layer.")] = 1
    data_parallel_replicate_degree: Annotated[int, Meta(ge=1, description="Replicas of the shards (HSDP).")] = 1
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"], Meta(description="Whether gathered weights are dropped after use.")
    ] = "default"
    mixed_precision_param: Annotated[
        Literal["float32", "bfloat16"], Meta(description="The type of the gathered weights.")
    ] = "float32"
    activation_checkpoint: Annotated[
        Literal["none", "selective", "full"], Meta(description="The activations that are computed again.")
    ] = "none"


class GeneratorConfig(_Section, frozen=True, kw_only=True):
    """The generators."""

    replicas: Annotated[int, Meta(ge=1, le=MOST_PROCESSES, description="Generator processes.")] = 2
    kind: Annotated[Literal["transformers", "vllm"], Meta(description="What generates.")] = "transformers"
    python: Annotated[
        str, Meta(description="The interpreter of another environment, for `vllm`; empty: that of `make extra-vllm`.")
    ] = ""
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=MOST_PROCESSES, description="Processes that share the weights of a `vllm` one.")
    ] = 1
    on_update: Annotated[
        Literal["keep", "wait", "abort"],
        Meta(
            description="Running completions of `vllm` go on with new weights, end before them, or are cut off and go "
            "on with keys and values that the new weights make anew."
        ),
    ] = "keep"
    cache: Annotated[float, Meta(gt=0, description="The memory of keys and values of each `vllm` one, in GiB.")] = 1.0
    update: Annotated[
        Literal["swap", "drain"], Meta(description="Switch weights within completions, or between them.")
    ] = "swap"
    timeout: Annotated[
        float, Meta(gt=0, le=MOST_SECONDS, description="Seconds after which a request is tried elsewhere.")
    ] = 60.0
    attempts: Annotated[int, Meta(ge=1, description="How often a request is tried.")] = 5


class StoreConfig(_Section, frozen=True, kw_only=True):
    """The weight store."""

    holders: Annotated[int, Meta(ge=1, le=MOST_PROCESSES, description="Processes that hold versions.")] = 2
    copies: Annotated[int, Meta(ge=1, description="Copies of each version.")] = 2
    plane: Annotated[
        str, Meta(description="The memory plane that moves weights; between hosts ucx or nixl. auto: this host's best.")
    ] = "auto"
    cast: Annotated[
        Literal["none", "bf16", "fp8"],
        Meta(
            description="Round wider floats to this on their way to generators: fewer bytes. none: every bit arrives."
        ),
    ] = "none"


class EngineConfig(_Section, frozen=True, kw_only=True):
    """What starts the processes."""

    kind: Annotated[Literal["monarch", "local"], Meta(description="Monarch, or processes of this host.")] = "monarch"
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that the processes are spread over, such as `tcp://10.0.0.2:26600`; `slurm`: the "
            "nodes of this SLURM job; none: this host."
        ),
    ] = ()
    register: Annotated[
        str,
        Meta(description="The register that all hosts reach, such as `etcd://etcd-1:2379/run`; empty: a file."),
    ] = ""
    silence: Annotated[
        float,
        Meta(
            gt=0,
            le=MOST_SECONDS,
            description="Seconds after which a host that does not answer is away, its processes with it.",
        ),
    ] = 5.0
    restarts: Annotated[int, Meta(ge=0, description="Trainers that may be lost before the run fails.")] = 100


class EvaluationConfig(_Section, frozen=True, kw_only=True):
    """Evaluation beside training."""

    every: Annotated[int, Meta(ge=0, description="Updates between evaluations; 0: never.")] = 25
    prompts: Annotated[int, Meta(ge=0, description="Held-out prompts of an evaluation; 0: all.")] = 0


class CheckpointConfig(_Section, frozen=True, kw_only=True):
    """Checkpoints, from which a run resumes."""

    every: Annotated[int, Meta(ge=1, description="Batches between checkpoints.")] = 10


class TelemetryConfig(_Section, frozen=True, kw_only=True):
    """What a run records besides its events."""

    tensorboard: Annotated[bool, Meta(description="Write figures for TensorBoard.")] = False
    episodes: Annotated[int, Meta(ge=0, description="Episodes of each batch that can be read in the report.")] = 4


class RunConfig(_Section, frozen=True, kw_only=True):
    """All that a run depends on."""

    seed: Annotated[int, Meta(ge=0, description="Decides the initial weights, the data order and all samples.")] = 0
    steps: Annotated[int, Meta(ge=1, description="Updates of the weights in all.")] = 800
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    objective: Objective = Objective()
    sampling: Sampling = Sampling()
    reward: tuple[CriterionConfig, ...] = (CriterionConfig(),)
    environment: EnvironmentConfig = EnvironmentConfig()
    trainer: TrainerConfig = TrainerConfig()
    titan: TitanConfig = TitanConfig()
    generator: GeneratorConfig = GeneratorConfig()
    store: StoreConfig = StoreConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def has_prompts(self) -> bool:
        """Whether there are groups of prompts and a reward: all, or those that an environment leaves."""
        return not self.environment.name or self.environment.share < 1.0

    @property
    def kept_versions(self) -> int:
        """The number of newest versions that the store keeps: all that generators may ask for, and one more."""
        return 4 + self.algorithm.staleness

    @property
    def checkpoint_steps(self) -> int:
        """The number of updates from one checkpoint to the next."""
        return self.checkpoint.every * self.algorithm.updates

    def saved_after(self, step: int) -> bool:
        """Whether a checkpoint is written after the batch that begins with update `step`."""
        done = step + self.algorithm.updates
        return done % self.checkpoint_steps == 0 or done == self.steps
