"""The configuration of a run: frozen sections, with a default and a description for each field.

The text below a field is its description in the reference.
"""

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
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Processes = Annotated[int, Meta(ge=1, le=MOST_PROCESSES)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the document."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """The policy."""

    path: str = ""
    """A folder in the format of transformers; empty: a Llama of 84,032 random weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the weights."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Where trainers and generators have it: `cpu`, or `cuda` for a GPU that all of them share."""
    lora_rank: Count = 0
    """Train adapters of this rank; 0: train all weights."""
    lora_alpha: PositiveFloat = 16.0
    """Adapters are scaled by this, divided by their rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers that get adapters; none: all linear layers."""
    warmup_steps: Count = 0
    """Supervised steps before the first step."""
    warmup_batch: Positive = 256
    """Problems of a supervised step."""
    warmup_rate: PositiveFloat = 2e-3
    """The learning rate of the supervised steps."""


class DataConfig(_Section, frozen=True, kw_only=True):
    """The prompts."""

    task: Literal["arithmetic", "jsonl"] = "arithmetic"
    """Sums of three digits, or files of your own."""
    train: str = ""
    """A file with a `{"prompt", "answer"}` a line, for task `jsonl`."""
    held_out: str = ""
    """The same for evaluation."""


class AlgorithmConfig(_Section, frozen=True, kw_only=True):
    """The loop, and how far generation may run ahead of training."""

    mode: Literal["synchronous", "asynchronous"] = "asynchronous"
    """Generate and train in turns, or at the same time."""
    groups: Positive = 32
    """Groups, which is prompts, of a batch."""
    updates: Positive = 1
    """Updates of the weights with each batch."""
    staleness: Count = 1
    """How many updates old the weights that drew a token may be, at most."""
    concurrency: Positive = 32
    """Groups that are generated at the same time, in the asynchronous loop."""


class Objective(_Section, frozen=True, kw_only=True):
    """The loss of a step. The algorithm sets the defaults of the other fields; those here are GRPO's."""

    algorithm: Algorithm = "grpo"
    """The algorithm, whose defaults the other fields have."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of their group, or of the whole batch; or not. It is
    the unbiased one (over n - 1), plus 1e-4, as in TRL's option of this name."""
    aggregate: Literal["sequence", "token", "sum"] = "sequence"
    """Average tokens in each sequence, or over all tokens of the step; or add those of a sequence."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratios of tokens, or of whole sequences."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 minus this."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 plus this."""
    kl: NonNegative = 0.0
    """The weight of the distance to the reference policy (k3)."""
    entropy: NonNegative = 0.0
    """The weight of an entropy bonus."""
    truncation: NonNegative = 0.0
    """The cap of the importance weight of the trainer's old policy against the generator; 0: the generator's
    log-probabilities are the old ones."""
    redraws: Annotated[int, Meta(ge=0, le=100)] = 0
    """How often a group whose rewards are all equal is drawn again."""
    skip_overlong: bool = False
    """Leave episodes with a completion that the limit of tokens cut out of the loss."""


PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {},
    "dr_grpo": {"scale_rewards": "none", "aggregate": "sum"},
    "dapo": {"aggregate": "token", "clip_high": 0.28, "redraws": 4, "skip_overlong": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""What the fields of an objective are by default, where that differs from GRPO."""


class Sampling(_Section, frozen=True, kw_only=True):
    """How a group's completions are drawn: `group` for each prompt, each with a seed of its own."""

    group: Annotated[int, Meta(ge=2)] = 8
    """Completions of each prompt, which are compared."""
    batch: Positive = 8
    """Prompts of a request, whose completions are drawn together."""
    max_new_tokens: Positive = 128
    """The limit of a completion's tokens."""
    temperature: PositiveFloat = 1.0
    """The temperature."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens of this total."""
    stop: tuple[Count, ...] = ()
    """Token numbers that end a completion."""

    @property
    def slots(self) -> int:
        """The most samples that a generator draws together."""
        return self.batch * self.group

    def request(self, seed: int, prompt: Prompt, draw: int, version: int | None) -> SamplingRequest:
        """The request for a prompt's group, the `draw`-th time: equal arguments give an equal request.

        Which groups are drawn again at one time depends on how long their rewards take.
        """
        seeds = seeds_of("sample", seed, prompt.number, draw, each=range(self.group))
        return self._asked((prompt.tokens,), seeds, version, alone=draw > 0)

    def turn(
        self, seed: int, number: int, draw: int, seen: Mapping[int, tuple[int, ...]], version: int | None
    ) -> SamplingRequest:
        """The request for the next turn of a group's samples, each after the tokens that it has `seen`."""
        seeds = tuple(seed_of("turn", seed, number, draw, sample, len(before)) for sample, before in seen.items())
        return self._asked(tuple(seen.values()), seeds, version, alone=True)

    def greedy(self, seen: Iterable[tuple[int, ...]], version: int | None) -> SamplingRequest:
        """The request for the likeliest tokens after those that were `seen`."""
        prompts = tuple(seen)
        asked = self._asked(prompts, (0,) * len(prompts), version, alone=True)
        return msgspec.structs.replace(asked, temperature=0.0, top_p=1.0)

    def _asked(
        self, prompts: tuple[tuple[int, ...], ...], seeds: tuple[int, ...], version: int | None, alone: bool
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
            alone=alone,
        )


class CriterionConfig(_Section, frozen=True, kw_only=True):
    """One criterion of the reward, which is the weighted sum of all."""

    kind: Literal["exact", "format", "length", "python"] = "exact"
    """Equal to the reference; matched by `pattern`; a penalty for long completions; or a `function` of yours."""
    weight: float = 1.0
    """The weight."""
    pattern: str = ""
    """A regular expression: of the whole text (`format`), or its group is the answer (`exact`)."""
    margin: Count = 0
    """The penalty begins so many tokens before `sampling.max_new_tokens` (`length`)."""
    function: str = ""
    """`FILE.py:NAME` or `MODULE:NAME`: from a `JudgedAnswer` to a number (`python`)."""


class EnvironmentConfig(_Section, frozen=True, kw_only=True):
    """An environment instead of prompts and a reward function."""

    name: str = ""
    """`guess`, `arithmetic`, `python:FILE.py:NAME` ...; empty: episodes have one turn and a reward."""
    arguments: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)
    """The environment's options, as a table."""
    servers: Annotated[int, Meta(ge=0, le=MOST_PROCESSES)] = 1
    """Server processes that the run starts; 0: episodes are played at `addresses`."""
    addresses: tuple[str, ...] = ()
    """Servers that run already, such as `ws://host:8123`."""
    sessions: Positive = 64
    """Episodes that a server plays at the same time."""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The share of groups that are played in it; the others are prompts."""
    max_turns: Positive = 8
    """The limit of an episode's turns."""
    max_tokens: Count = 0
    """The limit of an episode's tokens, with the prompt; 0: the model's."""
    timeout: Seconds = 30.0
    """Seconds after which a step of the environment has failed."""
    attempts: Positive = 3
    """Environments that an episode is played in, one after another, until it fails."""


class TrainerConfig(_Section, frozen=True, kw_only=True):
    """The trainers and their optimizer."""

    replicas: Processes = 2
    """Trainer processes."""
    spares: Annotated[int, Meta(ge=0, le=MOST_PROCESSES)] = 1
    """Processes that wait to replace a trainer."""
    kind: Literal["transformers", "titan"] = "transformers"
    """Whose model is trained: TorchTitan's is `titan`."""
    python: str = ""
    """The interpreter of another environment, for `titan`; empty: that of `make extra-titan`."""
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    """Sharded, or whole on every trainer."""
    backend: str = "shm"
    """What gradients are reduced over: shm, gloo, ucx ..."""
    copies: Count = 1
    """Neighbours that keep a copy of each trainer's shard, for when it dies."""
    units: Positive = 4
    """Parts of a batch whose gradients are added; fixes the bits of the sum."""
    micro_batch: Count = 0
    """Episodes of a forward; gradients of several are added. 0: all of a part."""
    rate: PositiveFloat = 5e-4
    """The learning rate."""
    rate_warmup: Positive = 10
    """Updates until the full learning rate."""
    rate_decay: Positive = 1000
    """The update at which the learning rate is lowest."""
    rate_floor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """The lowest learning rate's share of `rate`."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    timeout: Seconds = 600.0
    """Seconds after which a step, or the beginning from a checkpoint, has failed, and the run with it."""

    def rate_at(self, update: int) -> float:
        """The learning rate of an update, counted from 0: a line up, then a line down to its floor."""
        warm = min(1.0, (update + 1) / self.rate_warmup)
        gone = min(1.0, update / self.rate_decay)
        return self.rate * warm * (1.0 - (1.0 - self.rate_floor) * gone)


class TitanConfig(_Section, frozen=True, kw_only=True):
    """How TorchTitan shares the policy among trainers of kind `titan`, in the words of its own configuration."""

    config: str = ""
    """A function of its config registries, `module:name`, whose parallelism, precision, checkpoints of activations and
    compilation are taken as they are; empty: the fields below."""
    tensor_parallel_degree: Positive = 1
    """Trainers that share each layer."""
    data_parallel_replicate_degree: Positive = 1
    """Replicas of the shards (HSDP)."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered weights are dropped after use."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """The type of the gathered weights."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """The activations that are computed again."""


class GeneratorConfig(_Section, frozen=True, kw_only=True):
    """The generators."""

    replicas: Processes = 2
    """Generator processes."""
    kind: Literal["transformers", "vllm"] = "transformers"
    """What generates."""
    python: str = ""
    """The interpreter of another environment, for `vllm`; empty: that of `make extra-vllm`."""
    tensor_parallel: Processes = 1
    """Processes that share the weights of a `vllm` one."""
    on_update: Literal["keep", "wait", "abort"] = "keep"
    """Running completions of `vllm` go on with new weights, end before them, or are cut off and go on with keys and
    values that the new weights make anew."""
    cache: PositiveFloat = 1.0
    """The memory of keys and values of each `vllm` one, in GiB."""
    update: Literal["swap", "drain"] = "swap"
    """Switch weights within completions, or between them."""
    timeout: Seconds = 60.0
    """Seconds after which a request is tried elsewhere."""
    attempts: Positive = 5
    """How often a request is tried."""


class StoreConfig(_Section, frozen=True, kw_only=True):
    """The weight store."""

    holders: Processes = 2
    """Processes that hold versions."""
    copies: Positive = 2
    """Copies of each version."""
    plane: str = "auto"
    """The memory plane that moves weights; between hosts ucx or nixl. auto: this host's best."""
    cast: Literal["none", "bf16", "fp8"] = "none"
    """Round wider floats to this on their way to generators: fewer bytes. none: every bit arrives."""


class EngineConfig(_Section, frozen=True, kw_only=True):
    """What starts the processes."""

    kind: Literal["monarch", "local"] = "monarch"
    """Monarch, or processes of this host."""
    hosts: tuple[str, ...] = ()
    """Hosts that the processes are spread over, such as `tcp://10.0.0.2:26600`; `slurm`: the nodes of this SLURM job;
    none: this host."""
    register: str = ""
    """The register that all hosts reach, such as `etcd://etcd-1:2379/run`; empty: a file."""
    silence: Seconds = 5.0
    """Seconds after which a host that does not answer is away, its processes with it."""
    restarts: Count = 100
    """Trainers that may be lost before the run fails."""


class EvaluationConfig(_Section, frozen=True, kw_only=True):
    """Evaluation beside training."""

    every: Count = 25
    """Updates between evaluations; 0: never."""
    prompts: Count = 0
    """Held-out prompts of an evaluation; 0: all."""


class CheckpointConfig(_Section, frozen=True, kw_only=True):
    """Checkpoints, from which a run resumes."""

    every: Positive = 10
    """Batches between checkpoints."""


class TelemetryConfig(_Section, frozen=True, kw_only=True):
    """What a run records besides its events."""

    tensorboard: bool = False
    """Write figures for TensorBoard."""
    episodes: Count = 4
    """Episodes of each batch that can be read in the report."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """All that a run depends on."""

    seed: Count = 0
    """Decides the initial weights, the data order and all samples."""
    steps: Positive = 800
    """Updates of the weights in all."""
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
