"""What `train_ddp.py` and `train_fsdp2.py` train: a small Llama, a text in shards, and a rank that kills itself.

Needs transformers: pip install 'holdfast[rl]'.
"""

import argparse
import os
import signal
from collections.abc import Sequence

import torch
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import ft

SHARDS = 6
"""Parts of the global batch: fixed, so that what is computed does not depend on how many ranks there are."""
TEXT = torch.tensor(list(b"what was promised will be kept, and what is kept was promised; so it holds. " * 4))


def small_llama() -> LlamaForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))


def batch(step: int, shard: int) -> torch.Tensor:
    """Pieces of the text (4, 24) for one shard of one step: the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    starts = torch.randint(0, TEXT.numel() - 24, (4,), generator=generator)
    return torch.stack([TEXT[start : start + 24] for start in starts.tolist()])


def checksum(weights: Sequence[torch.Tensor]) -> str:
    flat = torch.cat([each.detach().flatten() for each in weights])
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def end_once(attempt: ft.Attempt, first: ft.Attempt, kill_rank: int, kill_step: int) -> None:
    """Kill the named rank in the named step, once: not its successor."""
    named = (attempt.rank, attempt.step) == (kill_rank, kill_step)
    if named and attempt.epoch == first.epoch and first.step < kill_step:
        os.kill(os.getpid(), signal.SIGKILL)


def report(attempt: ft.Attempt, loss: torch.Tensor) -> None:
    print(f"step {attempt.step}: loss {loss.item():.9f} (rank {attempt.rank} of {attempt.comm.size})", flush=True)


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The arguments of both programs; `text` is what their help says."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank ends itself with SIGKILL ...")
    parser.add_argument("--kill-step", type=int, default=-1, help="... in the middle of this step")
    return parser
