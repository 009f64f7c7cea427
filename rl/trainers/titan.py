"""A policy by TorchTitan: a model with the weights of a source, shared by FSDP2, HSDP and tensor parallelism.

The shards of a batch are summed exactly over all ranks that divide the data. The sums of tensor parallelism are
torch's, so the bits of the weights depend on its degree, and on nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from holdfast.comms.errors import CorruptData
from holdfast.rl.config.named_code import ExtraNotInstalled
from holdfast.rl.config.run_config import RunConfig, TitanConfig
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.telemetry import WorkLog
from holdfast.rl.trainers.layouts import ShardedLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Tensor = torch.Tensor


FAMILIES = ("llama", "qwen3")
"""The types of transformers' configurations for models that TorchTitan defines too."""

BACKEND = "partial_dtensor"
"""TorchTitan's backend in which tensor parallelism alone makes DTensors of activations."""
PERMUTED = ("attention.qkv_linear.wq.weight", "attention.qkv_linear.wk.weight")
"""What TorchTitan's adapter reorders by rows for a Llama, which it cannot do with a part of the rows."""


def mesh_of(size: int, replicate: int, tensor: int) -> dict[str, int]:
    """The mesh of `size` trainers, by TorchTitan's names. A degree that does not fit becomes 1."""
    tensor = tensor if size % tensor == 0 else 1
    replicate = replicate if size // tensor % replicate == 0 else 1
    return {"dp_replicate": replicate, "fsdp": size // tensor // replicate, "tp": tensor}


def epoch_dims(mesh: DeviceMesh, parallelism: Any) -> Any:
    """A `ParallelDims` that has its meshes from `mesh`, of `mesh_of`, and makes none of its own.

    Its own would be groups of the default group, and outlive the epoch.
    """
    from torchtitan.distributed import ParallelDims

    names = ("dp_replicate", "fsdp", "tp")
    replicate, shard, tensor = (mesh[name].size() for name in names)
    dims = ParallelDims(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=1,
        tp=tensor,
        pp=1,
        ep=1,
        world_size=mesh.size(),
        spmd_backend=parallelism.spmd_backend,
    )
    dims._world_mesh = mesh
    dims._global_meshes = {"dense": mesh}
    dims._single_axis_meshes = {name: mesh[name] for name in names}
    return dims


class TitanModel:
    """A model of TorchTitan for a source of transformers: built over meshes, and published under transformers' names.

    Raises `ExtraNotInstalled`, `ModelMisfit`.
    """

    def __init__(self, source: ModelSource, settings: TitanConfig) -> None:
        try:
            import torchtitan.config  # noqa: F401
        except ImportError as error:
            raise ExtraNotInstalled("titan", f"with torchtitan ({error})") from error
        from torchtitan.distributed.utils import set_spmd_backend

        set_spmd_backend(BACKEND)
        self._source, self._job = source, job_config(settings)
        self.parallelism: Any = self._job.parallelism
        transformers = source.build()
        self._tied = bool(transformers.config.tie_word_embeddings)
        self.config = model_config(transformers.config, source.name)
        self.config.update_from_config(config=SimpleNamespace(parallelism=self._job.parallelism))
        self._adapter = _family(transformers.config.model_type).adapter(self.config, None)
        self._parallelize = _family(transformers.config.model_type).parallelize

    def build(self, mesh: DeviceMesh) -> torch.nn.Module:
        """The model with the source's weights, sharded over a mesh of `mesh_of`."""
        source = self._source.build()
        with torch.device(self._source.device):
            model: torch.nn.Module = self.config.build()
        dtype = next(source.parameters()).dtype
        for each in model.parameters():  # not model.to(): position embeddings are complex buffers
            each.data = each.data.to(dtype)
        model.load_state_dict(self._adapter.from_hf(dict(source.state_dict())), strict=True)
        job = self._job
        self._parallelize(
            model,
            parallel_dims=epoch_dims(mesh, job.parallelism),
            training=job.training,
            parallelism=job.parallelism,
            compile_config=job.compile,
            ac_config=job.activation_checkpoint,
            dump_folder="",
        )
        return model

    def renamed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors with TorchTitan's names under those of transformers, each rank's shards; collective for a Llama's."""
        state = dict(tensors)
        placed = {
            name: each for name, each in state.items() if name.endswith(PERMUTED) and hasattr(each, "full_tensor")
        }
        state |= {name: each.full_tensor() for name, each in placed.items()}
        found: dict[str, Any] = {}
        for name, tensor in state.items():
            for new, converted in self._adapter.to_hf({name: tensor}).items():
                found[new] = _sharded_like(converted, placed[name]) if name in placed else converted
        if self._tied:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found


class TitanNames:
    """An actor that puts the tensors of a file under transformers' names, in the interpreter that has TorchTitan."""

    async def translate(self, source: ModelSource, settings: TitanConfig, given: str, found: str) -> None:
        """Write the file `found` from the file `given`. Raises `CorruptData` for tensors that are not of this model."""
        from safetensors.torch import load_file, save_file

        try:
            renamed = TitanModel(source, settings).renamed(load_file(given))
        except KeyError as error:
            raise CorruptData(f"the checkpoint is not one of this model of TorchTitan: there is no {error}") from error
        # Tied weights are one tensor with two names, of which such a file cannot have both.
        save_file({name: each.clone(memory_format=torch.contiguous_format) for name, each in renamed.items()}, found)


def job_config(settings: TitanConfig) -> Any:
    """TorchTitan's config objects for our settings: those of a registry's function as they are, or new ones.

    Raises `ModelMisfit` for a function that is not there or returns no `Trainer.Config`, or for pipelines.
    """
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import activation_checkpoint as recompute

    if settings.config:
        module, _, name = settings.config.partition(":")
        try:
            config = getattr(importlib.import_module(module), name)()
            parallelism = config.parallelism
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            hint = "write it as torchtitan.models.llama3.config_registry:llama3_8b"
            raise ModelMisfit(settings.config, f"it is no function of a config registry: {error}", hint) from error
        for other in ("pipeline", "context", "expert"):
            if getattr(parallelism, f"{other}_parallel_degree") != 1:
                raise ModelMisfit(settings.config, f"it asks for {other} parallelism", "set its degree to 1")
        parallelism.spmd_backend, parallelism.enable_sequence_parallel = BACKEND, False
        return config
    kinds: dict[str, Any] = {"none": None, "selective": recompute.SelectiveAC, "full": recompute.FullAC}
    kind = kinds[settings.activation_checkpoint]
    return SimpleNamespace(
        parallelism=ParallelismConfig(
            tensor_parallel_degree=settings.tensor_parallel_degree,
            data_parallel_replicate_degree=settings.data_parallel_replicate_degree,
            fsdp_reshard_after_forward=settings.fsdp_reshard_after_forward,
            enable_sequence_parallel=False,
            spmd_backend=BACKEND,
        ),
        training=TrainingConfig(mixed_precision_param=settings.mixed_precision_param),
        activation_checkpoint=None if kind is None else kind.Config(),
        compile=CompileConfig(),
    )


def model_config(config: Any, name: str) -> Any:
    """TorchTitan's configuration of a model of transformers. Raises `ModelMisfit` for one that it cannot express."""
    if config.model_type not in FAMILIES:
        raise ModelMisfit(name, f"TorchTitan has no {config.model_type!r} here", f"use one of {', '.join(FAMILIES)}")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, field, False):
            raise ModelMisfit(name, f"{field} is set, which TorchTitan's {config.model_type} does not know", "unset it")
    heads, width = config.num_attention_heads, config.hidden_size
    head_width = getattr(config, "head_dim", None) or width // heads
    if config.model_type == "llama" and head_width * heads != width:
        raise ModelMisfit(
            name, f"head_dim={head_width} x {heads} heads is not {width}", "use a Llama whose heads fill it"
        )
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    family = _family(config.model_type)
    extra = {"head_dim": head_width} if config.model_type == "qwen3" else {}
    layers = family.layers(
        n_layers=config.num_hidden_layers,
        dim=width,
        n_heads=heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size,
        rope=family.rope.Config(
            dim=head_width, max_seq_len=config.max_position_embeddings, **_rope(config, name, family.scalings)
        ),
        attn_backend="flex",
        fuse_qkv=False,
        **extra,
    )
    for layer in layers:  # rows are one document each and padded on the right, so a causal mask is enough
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    found = family.model.Config(
        dim=width,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width),
        lm_head=Linear.Config(in_features=width, out_features=config.vocab_size),
        layers=layers,
    )
    for _, norm, _, _ in found.traverse(RMSNorm.Config):
        norm.eps = config.rms_norm_eps
    return found


def _family(model_type: str) -> Any:
    """The parts of TorchTitan's definition of a type of model."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    if model_type == "llama":
        import torchtitan.models.llama3 as llama3

        return SimpleNamespace(
            model=llama3.Llama3Model,
            layers=llama3._build_llama3_layers,
            rope=ComplexRoPE,
            scalings={"default": "none", "llama3": "llama"},
            adapter=llama3.Llama3StateDictAdapter,
            parallelize=llama3.parallelize_llama,
        )
    import torchtitan.models.qwen3 as qwen3

    return SimpleNamespace(
        model=qwen3.Qwen3Model,
        layers=qwen3._build_qwen3_layers,
        rope=CosSinRoPE,
        scalings={"default": "none"},
        adapter=qwen3.Qwen3StateDictAdapter,
        parallelize=qwen3.parallelize_qwen3,
    )


def _rope(config: Any, name: str, scalings: Mapping[str, str]) -> dict[str, Any]:
    """The frequencies of the position embedding. Raises `ModelMisfit` for a scaling that TorchTitan does not have."""
    given = dict(config.rope_parameters)
    kind = given.get("rope_type", "default")
    if kind not in scalings:
        raise ModelMisfit(name, f"its rope_type is {kind!r}", f"TorchTitan has {', '.join(scalings)}")
    found = {"theta": given["rope_theta"], "scaling": scalings[kind]}
    if kind == "llama3":
        found["scaling_factor"] = given["factor"]
        for field in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            found[field] = given[field]
    return found


def _sharded_like(tensor: torch.Tensor, placed: Any) -> Any:
    """A tensor that every rank has whole, sharded as `placed` is; without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, placed.device_mesh, placed.placements, src_data_rank=None)


class TitanLayout(ShardedLayout):
    """The trainers have shards of one of TorchTitan's models."""

    def __init__(self, config: RunConfig, source: ModelSource, work: WorkLog) -> None:
        self._titan = TitanModel(source, config.titan)
        super().__init__(config, source, work, titan_logits)
        parallelism = self._titan.parallelism
        self._shape = partial(
            mesh_of,
            replicate=parallelism.data_parallel_replicate_degree,
            tensor=parallelism.tensor_parallel_degree,
        )

    def state(self) -> dict[str, Any]:
        return self._titan.renamed(self._things["model"].state_dict())

    def _model(self, mesh: DeviceMesh) -> torch.nn.Module:
        self._data = mesh if mesh["tp"].size() == 1 else mesh["dp_replicate", "fsdp"]._flatten("data")
        return self._titan.build(mesh)


def titan_logits(model: torch.nn.Module, tokens: Tensor, kept: int) -> Tensor:
    """The logits (n, kept, words) after the last `kept` tokens, of one of TorchTitan's models."""
    found: Any = model(tokens)
    if hasattr(found, "full_tensor"):
        found = found.full_tensor()
    logits: Tensor = found[:, tokens.shape[1] - kept :]
    return logits
