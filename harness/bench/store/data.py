"""The states that are handed over: shapes of real models or plain tensors, values by version, digests, shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

State = dict[str, torch.Tensor]
DimOf = Callable[[str], int | None]
"""The dimension along which a tensor of this name is sharded; None if it is not."""


class TensorShape(msgspec.Struct, frozen=True):
    """A tensor of the state that is handed over; `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


BLANK = 0xA5
"""The byte that targets are filled with before a get: no version has a tensor of it."""

_CONFIGS = ((64, 2), (128, 4), (256, 6), (512, 8), (768, 12), (1024, 16), (1536, 20), (2048, 24), (3072, 28))
"""Hidden sizes and numbers of layers of Llamas, from 0.3 to 4,000 million parameters."""


def model_shapes(nbytes: int, dtype: str) -> tuple[TensorShape, ...]:
    """The state dict of a Llama of at most `nbytes` bytes; its vocabulary takes what its layers leave.

    The model is built from a config by transformers, on the meta device. Raises ModuleNotFoundError without
    transformers, ValueError if no Llama is so small.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    count = nbytes // getattr(torch, dtype).itemsize
    for hidden, layers in reversed(_CONFIGS):
        heads = hidden // 32
        small = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            intermediate_size=hidden * 8 // 3 // 32 * 32,
            vocab_size=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device("meta"):
            layers_alone = sum(each.numel() for each in LlamaForCausalLM(small).state_dict().values())
            words = (count - layers_alone + 2 * hidden) // (2 * hidden)
            if words < 128:
                continue
            small.vocab_size = words
            state = LlamaForCausalLM(small).state_dict()
        return tuple(TensorShape(name, dtype, tuple(each.shape)) for name, each in state.items())
    raise ValueError(f"no Llama has as few as {nbytes} bytes of {dtype}; ask for 256K or more")


def equal_shapes(tensors: int, nbytes: int, dtype: str = "float32") -> tuple[TensorShape, ...]:
    """So many flat tensors of `nbytes` bytes each."""
    count = nbytes // getattr(torch, dtype).itemsize
    return tuple(TensorShape(f"layers.{index}.weight", dtype, (count,)) for index in range(tensors))


def bytes_of(tensors: Sequence[TensorShape]) -> int:
    """The bytes of a state."""
    return sum(torch.Size(each.shape).numel() * getattr(torch, each.dtype).itemsize for each in tensors)


def source(tensors: Sequence[TensorShape], seed: int, device: str = "cpu") -> State:
    """Tensors with random values of `seed`, as a model has before its training."""
    generator = torch.Generator(device).manual_seed(seed)
    state = target(tensors, device)
    for each in state.values():
        each.normal_(0.0, 0.02, generator=generator)
    return state


def target(tensors: Sequence[TensorShape], device: str = "cpu") -> State:
    """Tensors to get into. Their pages exist."""
    return {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype), device=device) for each in tensors}


def on_meta(each: TensorShape) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")


def change(state: Mapping[str, torch.Tensor], version: int, share: float = 0.0) -> None:
    """Make each tensor differ from that of all other versions, in about a `share` of its elements.

    Some place of it differs whatever the share is; with a share of 1 all elements do.
    """
    generator = torch.Generator().manual_seed(version)
    for each in state.values():
        flat = each.view(-1)
        if share >= 1:
            flat.neg_()
        elif share > 0:
            where = torch.randint(len(flat), (int(share * len(flat)),), generator=generator)
            flat[where] = torch.randn(len(where), dtype=flat.dtype, generator=generator)
        flat[version * 7919 % len(flat)] = float(version % 251 + 1)


def blank(state: Mapping[str, torch.Tensor]) -> None:
    """Overwrite all bytes."""
    for each in state.values():
        each.view(-1).view(torch.uint8).fill_(BLANK)
    if any(each.is_cuda for each in state.values()):
        torch.cuda.synchronize()


def digests(state: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """The digest of the bytes of each tensor."""
    return tuple(
        xxhash.xxh3_64_intdigest(each.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        for each in state.values()
    )


# Shards ---------------------------------------------------------------------------------------------------------------


def fsdp_dim(name: str) -> int | None:
    """The dimension along which FSDP shards a tensor."""
    return 0


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension along which tensor parallelism shards a tensor of a Llama; None if each rank has all of it."""
    if "norm" in name:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def shard(state: Mapping[str, torch.Tensor], dim_of: DimOf, rank: int, ranks: int) -> State:
    """The views of whole tensors that a rank has."""
    return {name: _shard(each, dim_of(name), rank, ranks) for name, each in state.items()}


def _shard(tensor: torch.Tensor, dim: int | None, rank: int, ranks: int) -> torch.Tensor:
    if dim is None:
        return tensor
    chunks = tensor.chunk(ranks, dim)
    if rank < len(chunks):
        return chunks[rank]
    return tensor.narrow(dim, 0, 0)


def as_dtensors(
    local: Mapping[str, torch.Tensor], tensors: Sequence[TensorShape], dim_of: DimOf, mesh: DeviceMesh
) -> State:
    """The DTensors of a rank's shards, which share their memory."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    found: State = {}
    for each in tensors:
        dim = dim_of(each.name)
        found[each.name] = DTensor.from_local(
            local[each.name],
            mesh,
            [Replicate() if dim is None else Shard(dim)],
            run_check=False,
            shape=torch.Size(each.shape),
            stride=on_meta(each).stride(),
        )
    return found


@dataclass(frozen=True, slots=True)
class Shards:
    """What a rank of FSDP that publishes, or of tensor parallelism that gets, has of `tensors`.

    `readers` ranks get them.
    """

    tensors: Sequence[TensorShape]
    rank: int
    ranks: int
    readers: int
    mesh: DeviceMesh

    @staticmethod
    def of(tensors: Sequence[TensorShape], role: str, rank: int, sharded: tuple[int, int], folder: Path) -> Shards:
        """Join the other workers of the role, over gloo: `sharded` says how many publishers and readers there are."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        ranks = sharded[0 if role == "publisher" else 1]
        if not dist.is_initialized():
            meeting = (folder / f"{role}s").as_uri()
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        return Shards(tensors, rank, ranks, sharded[1], init_device_mesh("cpu", (ranks,)))

    def give(self, source: State) -> State:
        """The DTensors of a publisher: views of its source."""
        local = shard(source, fsdp_dim, self.rank, self.ranks)
        return as_dtensors(local, self.tensors, fsdp_dim, self.mesh)

    def target(self) -> State:
        """New shards of a reader."""
        whole = {each.name: on_meta(each) for each in self.tensors}
        local = shard(whole, tensor_parallel_dim, self.rank, self.ranks)
        return target([TensorShape(each.name, each.dtype, tuple(local[each.name].shape)) for each in self.tensors])

    def take(self, target: State) -> State:
        """The DTensors of a reader, over its shards."""
        return as_dtensors(target, self.tensors, tensor_parallel_dim, self.mesh)

    def digests(self, source: State) -> tuple[tuple[int, ...], ...]:
        """The digests of the shards of each reader."""
        shards = (shard(source, tensor_parallel_dim, rank, self.readers) for rank in range(self.readers))
        return tuple(map(digests, shards))
